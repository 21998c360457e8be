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

}  // namespace sol::SOL_NS
