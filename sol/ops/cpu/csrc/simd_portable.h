// Any processor: 8 lanes in GCC's and Clang's vector extension, which the compiler maps to what there is.
#pragma once

#include "formats.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // every function that takes or gives a vector is inlined or static

namespace sol::SOL_NS {

constexpr int LANES = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));

// ---- floats

static inline vf set1(float a) { return vf{a, a, a, a, a, a, a, a}; }
static inline vf zero() { return set1(0.0f); }
static inline vf load(const float* p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void store(float* p, const vf& a) { memcpy(p, &a, sizeof a); }
static inline vf load_first(const float* p, int n) {
    vf a = zero();
    memcpy(&a, p, (size_t)n * sizeof(float));
    return a;
}
static inline void store_first(float* p, const vf& a, int n) { memcpy(p, &a, (size_t)n * sizeof(float)); }
static inline vf fma(const vf& a, const vf& b, const vf& c) { return a * b + c; }
static inline vf add(const vf& a, const vf& b) { return a + b; }
static inline vf sub(const vf& a, const vf& b) { return a - b; }
static inline vf mul(const vf& a, const vf& b) { return a * b; }
static inline vf div(const vf& a, const vf& b) { return a / b; }
static inline vf max(const vf& a, const vf& b) { return a > b ? a : b; }
static inline vf min(const vf& a, const vf& b) { return a < b ? a : b; }
static inline vf abs(const vf& a) { return (vf)((vi)a & 0x7fffffff); }
static inline vf round(const vf& a) {  // to nearest, ties to even; |a| < 2^22
    const vf magic = set1(12582912.0f);
    return (a + magic) - magic;
}
static inline float reduce_add(const vf& a) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}
static inline float reduce_max(const vf& a) {
    float m = a[0];
    for (int i = 1; i < LANES; i++) m = m > a[i] ? m : a[i];
    return m;
}
static inline vf load_f16(const uint16_t* p) {
    vf a;
    for (int i = 0; i < LANES; i++) a[i] = f16_to_f32(p[i]);
    return a;
}
static inline void store_f16(uint16_t* p, const vf& a) {
    for (int i = 0; i < LANES; i++) p[i] = f32_to_f16(a[i]);
}
static inline vf load_bf16(const uint16_t* p) {
    vu a;
    for (int i = 0; i < LANES; i++) a[i] = (uint32_t)p[i] << 16;
    return (vf)a;
}
static inline vf load_i8(const int8_t* p) {
    vf a;
    for (int i = 0; i < LANES; i++) a[i] = (float)p[i];
    return a;
}
static inline vf load_u8(const uint8_t* p) {
    vf a;
    for (int i = 0; i < LANES; i++) a[i] = (float)p[i];
    return a;
}
static inline vi to_int(const vf& a) {  // nearest integer of |a| < 2^22; any value of a is defined
    const vf shifted = a + 12582912.0f;
    return (vi)((vu)shifted - 0x4b400000u);
}
static inline void store_i8(int8_t* p, const vf& a) {
    const vi v = to_int(a);
    for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
}
static inline vf pow2(const vf& n) { return (vf)(((vu)to_int(n) + 127u) << 23); }

// ---- tiles, for 16 registers of 16 bytes, if nothing better
constexpr int TOKEN_TILE = 2;             // tokens that a row group's codes meet at once
constexpr bool UNPACKS_FOR_MANY = false;  // whether codes are unpacked into memory first where there are more
constexpr int FLOAT_TOKEN_TILE = 2;
constexpr int FLOAT_ACCUMULATORS = 4;

// ---- integers

typedef uint8_t vb __attribute__((vector_size(32)));  // 4 · LANES bytes
typedef int8_t vsb __attribute__((vector_size(32)));
typedef int16_t vs __attribute__((vector_size(32)));
typedef uint16_t vus __attribute__((vector_size(32)));

static inline vi set1_i(int32_t a) { return vi{a, a, a, a, a, a, a, a}; }
static inline vi load_i(const uint8_t* p) {
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void store_i(uint8_t* p, const vi& a) { memcpy(p, &a, sizeof a); }
static inline vi add_i(const vi& a, const vi& b) { return a + b; }
static inline vi sub_i(const vi& a, const vi& b) { return a - b; }
static inline vf to_float(const vi& a) { return __builtin_convertvector(a, vf); }
static inline vb load_b(const uint8_t* p) {
    vb a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void store_b(uint8_t* p, const vb& a) { memcpy(p, &a, sizeof a); }
static inline vb or_b(const vb& a, const vb& b) { return a | b; }
static inline vb and_b(const vb& a, uint8_t mask) { return a & mask; }
// Bits may cross from one byte into the next: mask them.
static inline vb shift_left(const vb& a, int n) { return (vb)((vus)a << (uint16_t)n); }
static inline vb shift_right(const vb& a, int n) { return (vb)((vus)a >> (uint16_t)n); }
static inline vb broadcast4(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    return (vb)set1_i(word);
}

// The even and odd bytes' products in int16 (at most 128 · 127), added up in int32. Codes of less than 8 bits are
// positive as signed bytes.
template <int BITS>
struct Dot {
    static constexpr int STEPS = 8;
    static constexpr int CODE_OFFSET = 0;
    using Part = vi;
    static inline vi first(const vb& w, const vb& x) {
        const vs even = ((vs)((vus)w << 8) >> 8) * ((vs)((vus)x << 8) >> 8);
        const vs odd = ((vs)w >> 8) * ((vs)x >> 8);
        return (((vi)((vu)even << 16) >> 16) + ((vi)even >> 16)) + (((vi)((vu)odd << 16) >> 16) + ((vi)odd >> 16));
    }
    static inline vi more(const vi& part, const vb& w, const vb& x) { return part + first(w, x); }
    static inline vi widen(const vi& part) { return part; }
};

static inline vi times_sum(const BlockSums& sums, int k) { return set1_i(k * (sums.half[0] + sums.half[1])); }
static inline vi times_half_sum(const BlockSums& sums, int half, int k) { return set1_i(k * sums.half[half]); }
static inline vi load_factors(const uint8_t* p) {
    vi a;
    for (int i = 0; i < LANES; i++) a[i] = p[i];
    return a;
}
static inline vi times_sum(const BlockSums& sums, const vi& factors) { return factors * (sums.half[0] + sums.half[1]); }

constexpr int BLOCK_VECTORS = 32 / LANES;
static inline void store_codes(int8_t* codes, BlockSums* sums, const vf* a) {
    for (int half = 0; half < 2; half++) {
        const vi first = to_int(a[2 * half]), last = to_int(a[2 * half + 1]);
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) {
            codes[16 * half + i] = (int8_t)first[i];
            codes[16 * half + 8 + i] = (int8_t)last[i];
            sum += first[i] + last[i];
        }
        sums->half[half] = (int16_t)sum;
    }
}
static inline vi abs_bits(const vf& a) { return (vi)a & 0x7fffffff; }
static inline vi max_i(const vi& a, const vi& b) { return a > b ? a : b; }
static inline int32_t reduce_max_i(const vi& a) {
    int32_t m = a[0];
    for (int i = 1; i < LANES; i++) m = m > a[i] ? m : a[i];
    return m;
}

}  // namespace sol::SOL_NS
