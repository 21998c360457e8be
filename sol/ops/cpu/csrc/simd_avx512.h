// AVX-512 F, BW, VL and DQ, with VNNI where SOL_ISA_HAS_VNNI is defined.
#pragma once

#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)  // GCC's own header, of results it calls undefined (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace sol::SOL_NS {

constexpr int LANES = 16;
using vf = __m512;
using vi = __m512i;  // LANES int32
using vb = __m512i;  // 4 · LANES bytes

// ---- floats

static inline __mmask16 lane_mask(int n) { return (__mmask16)((1u << n) - 1u); }
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }  // the rest: 0
static inline void store_first(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), a); }
static inline vf set1(float a) { return _mm512_set1_ps(a); }
static inline vf zero() { return _mm512_setzero_ps(); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf abs(vf a) { return _mm512_abs_ps(a); }
static inline vf round(vf a) {  // to nearest, ties to even
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline float reduce_add(vf a) {
    const __m256 w = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
static inline float reduce_max(vf a) {
    const __m256 w = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}
static inline vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_f16(uint16_t* p, vf a) {  // to nearest, ties to even
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline vf load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline void store_i8(int8_t* p, vf a) {  // to nearest, ties to even; |a| <= 127
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
static inline vf pow2(vf n) {  // 2^n for integral -126 <= n <= 127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

// ---- tiles, for 32 registers
constexpr int TOKEN_TILE = 6;            // tokens that a row group's codes meet at once
constexpr bool UNPACKS_FOR_MANY = true;  // whether codes are unpacked into memory first where there are more
constexpr int FLOAT_TOKEN_TILE = 6;
constexpr int FLOAT_ACCUMULATORS = 24;

// ---- integers

static inline vi set1_i(int32_t a) { return _mm512_set1_epi32(a); }
static inline vi load_i(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void store_i(uint8_t* p, vi a) { _mm512_storeu_si512(p, a); }
// Stops GCC from turning a chain of additions into a tree, whose products do not fit into the registers.
#define SOL_IN_ORDER(v) __asm__("" : "+v"(v))
static inline vi add_i(vi a, vi b) {
    vi sum = _mm512_add_epi32(a, b);
    SOL_IN_ORDER(sum);
    return sum;
}
static inline vi sub_i(vi a, vi b) { return _mm512_sub_epi32(a, b); }
static inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vb load_b(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void store_b(uint8_t* p, vb a) { _mm512_storeu_si512(p, a); }
static inline vb or_b(vb a, vb b) { return _mm512_or_si512(a, b); }
static inline vb and_b(vb a, uint8_t mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
// Bits may cross from one byte into the next: mask them.
static inline vb shift_left(vb a, int n) { return _mm512_slli_epi16(a, (unsigned)n); }
static inline vb shift_right(vb a, int n) { return _mm512_srli_epi16(a, (unsigned)n); }
static inline vb broadcast4(const int8_t* p) {  // the same 4 bytes for every row
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}

#if defined(SOL_ISA_HAS_VNNI)

// Dot products of unsigned codes with activations, in int32.
template <int BITS>
struct Dot {
    static constexpr int STEPS = 8;
    static constexpr int CODE_OFFSET = 0;
    using Part = __m512i;
    static inline Part first(vb w, vb x) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x); }
    static inline Part more(Part part, vb w, vb x) { return _mm512_dpbusd_epi32(part, w, x); }
    static inline vi widen(Part part) { return part; }
};

// Signed codes become unsigned ones with an offset.
template <>
struct Dot<8> {
    static constexpr int STEPS = 8;
    static constexpr int CODE_OFFSET = 128;
    using Part = __m512i;
    static inline Part more(Part part, vb w, vb x) {
        return _mm512_dpbusd_epi32(part, _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)), x);
    }
    static inline Part first(vb w, vb x) { return more(_mm512_setzero_si512(), w, x); }
    static inline vi widen(Part part) { return part; }
};

#else

// Dot products of unsigned codes below 2^BITS with activations. A Part is what STEPS steps may be added up in: here
// int16 sums of two products, 2^BITS - 1 times 127 each.
template <int BITS>
struct Dot {
    static constexpr int STEPS = BITS == 4 ? 8 : (BITS == 5 ? 4 : 2);
    static constexpr int CODE_OFFSET = 0;
    using Part = __m512i;
    static inline Part first(vb w, vb x) { return _mm512_maddubs_epi16(w, x); }
    static inline Part more(Part part, vb w, vb x) {
        part = _mm512_add_epi16(part, _mm512_maddubs_epi16(w, x));
        SOL_IN_ORDER(part);
        return part;
    }
    static inline vi widen(Part part) { return _mm512_madd_epi16(part, _mm512_set1_epi16(1)); }
};

// Signed codes: |w| · (x with w's sign), at most 128 · 127 · 2 = 32512.
template <>
struct Dot<8> {
    static constexpr int STEPS = 1;
    static constexpr int CODE_OFFSET = 0;
    using Part = __m512i;
    static inline Part first(vb w, vb x) {
        const __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
        return _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x);
    }
    static inline Part more(Part part, vb w, vb x) { return _mm512_add_epi16(part, first(w, x)); }
    static inline vi widen(Part part) { return _mm512_madd_epi16(part, _mm512_set1_epi16(1)); }
};

#endif

static inline __m512i broadcast_sums(const BlockSums& sums) {
    int32_t pair;
    memcpy(&pair, sums.half, sizeof pair);
    return _mm512_set1_epi32(pair);
}
static inline vi times_sum(const BlockSums& sums, int k) {  // k · (half[0] + half[1])
    return _mm512_madd_epi16(broadcast_sums(sums), _mm512_set1_epi16((int16_t)k));
}
static inline vi times_half_sum(const BlockSums& sums, int half, int k) {  // k · half[half], 0 <= k < 2^15
    return _mm512_madd_epi16(broadcast_sums(sums), _mm512_set1_epi32(half == 0 ? k : k << 16));
}
static inline vi load_factors(const uint8_t* p) {  // a byte a row, for times_sum
    const __m512i k = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_or_si512(k, _mm512_slli_epi32(k, 16));
}
static inline vi times_sum(const BlockSums& sums, vi factors) {
    return _mm512_madd_epi16(broadcast_sums(sums), factors);
}

// 32 rounded activations (|a| < 128) and the sums of their halves.
constexpr int BLOCK_VECTORS = 32 / LANES;
static inline void store_codes(int8_t* codes, BlockSums* sums, const vf* a) {
    for (int half = 0; half < 2; half++) {
        const __m512i v = _mm512_cvtps_epi32(a[half]);
        _mm_storeu_si128((__m128i*)(codes + 16 * half), _mm512_cvtepi32_epi8(v));
        sums->half[half] = (int16_t)_mm512_reduce_add_epi32(v);
    }
}
static inline vi abs_bits(vf a) { return _mm512_castps_si512(abs(a)); }  // ordered like |a|; NaN above infinity
static inline vi max_i(vi a, vi b) { return _mm512_max_epi32(a, b); }
static inline int32_t reduce_max_i(vi a) { return _mm512_reduce_max_epi32(a); }

}  // namespace sol::SOL_NS
