// AVX2 with FMA and F16C (x86-64-v3).
#pragma once

#include <immintrin.h>

namespace sol::SOL_NS {

constexpr int LANES = 8;
using vf = __m256;
using vi = __m256i;  // LANES int32
using vb = __m256i;  // 4 · LANES bytes

// ---- floats

static inline __m256i lane_mask(int n) {  // all ones in the first n lanes
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf load_first(const float* p, int n) { return _mm256_maskload_ps(p, lane_mask(n)); }  // the rest: 0
static inline void store_first(float* p, vf a, int n) { _mm256_maskstore_ps(p, lane_mask(n), a); }
static inline vf set1(float a) { return _mm256_set1_ps(a); }
static inline vf zero() { return _mm256_setzero_ps(); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf round(vf a) {  // to nearest, ties to even
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline float reduce_add(vf a) {
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
static inline float reduce_max(vf a) {
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}
static inline vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_f16(uint16_t* p, vf a) {  // to nearest, ties to even
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline void store_i8(int8_t* p, vf a) {  // to nearest, ties to even; |a| <= 127
    const __m256i v = _mm256_cvtps_epi32(a);
    const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(w, w));
}
static inline vf pow2(vf n) {  // 2^n for integral -126 <= n <= 127
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

// ---- tiles, for 16 registers
constexpr int TOKEN_TILE = 6;            // tokens that a row group's codes meet at once
constexpr bool UNPACKS_FOR_MANY = true;  // whether codes are unpacked into memory first where there are more
constexpr int FLOAT_TOKEN_TILE = 6;
constexpr int FLOAT_ACCUMULATORS = 12;

// ---- integers

static inline vi set1_i(int32_t a) { return _mm256_set1_epi32(a); }
static inline vi load_i(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_i(uint8_t* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
// Stops GCC from turning a chain of additions into a tree, whose products do not fit into the registers.
#define SOL_IN_ORDER(v) __asm__("" : "+x"(v))
static inline vi add_i(vi a, vi b) {
    vi sum = _mm256_add_epi32(a, b);
    SOL_IN_ORDER(sum);
    return sum;
}
static inline vi sub_i(vi a, vi b) { return _mm256_sub_epi32(a, b); }
static inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vb load_b(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void store_b(uint8_t* p, vb a) { _mm256_storeu_si256((__m256i*)p, a); }
static inline vb or_b(vb a, vb b) { return _mm256_or_si256(a, b); }
static inline vb and_b(vb a, uint8_t mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }
// Bits may cross from one byte into the next: mask them.
static inline vb shift_left(vb a, int n) { return _mm256_slli_epi16(a, n); }
static inline vb shift_right(vb a, int n) { return _mm256_srli_epi16(a, n); }
static inline vb broadcast4(const int8_t* p) {  // the same 4 bytes for every row
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm256_set1_epi32(word);
}

// Dot products of unsigned codes below 2^BITS with activations. A Part is what STEPS steps may be added up in: here
// int16 sums of two products, 2^BITS - 1 times 127 each.
template <int BITS>
struct Dot {
    static constexpr int STEPS = BITS == 4 ? 8 : (BITS == 5 ? 4 : 2);
    static constexpr int CODE_OFFSET = 0;
    using Part = __m256i;
    static inline Part first(vb w, vb x) { return _mm256_maddubs_epi16(w, x); }
    static inline Part more(Part part, vb w, vb x) {
        part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x));
        SOL_IN_ORDER(part);
        return part;
    }
    static inline vi widen(Part part) { return _mm256_madd_epi16(part, _mm256_set1_epi16(1)); }
};

// Signed codes: |w| · (x with w's sign), at most 128 · 127 · 2 = 32512.
template <>
struct Dot<8> {
    static constexpr int STEPS = 1;
    static constexpr int CODE_OFFSET = 0;
    using Part = __m256i;
    static inline Part first(vb w, vb x) { return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }
    static inline Part more(Part part, vb w, vb x) { return _mm256_add_epi16(part, first(w, x)); }
    static inline vi widen(Part part) { return _mm256_madd_epi16(part, _mm256_set1_epi16(1)); }
};

static inline __m256i broadcast_sums(const BlockSums& sums) {
    int32_t pair;
    memcpy(&pair, sums.half, sizeof pair);
    return _mm256_set1_epi32(pair);
}
static inline vi times_sum(const BlockSums& sums, int k) {  // k · (half[0] + half[1])
    return _mm256_madd_epi16(broadcast_sums(sums), _mm256_set1_epi16((int16_t)k));
}
static inline vi times_half_sum(const BlockSums& sums, int half, int k) {  // k · half[half], 0 <= k < 2^15
    return _mm256_madd_epi16(broadcast_sums(sums), _mm256_set1_epi32(half == 0 ? k : k << 16));
}
static inline vi load_factors(const uint8_t* p) {  // a byte a row, for times_sum
    const __m256i k = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_or_si256(k, _mm256_slli_epi32(k, 16));
}
static inline vi times_sum(const BlockSums& sums, vi factors) {
    return _mm256_madd_epi16(broadcast_sums(sums), factors);
}

// 32 rounded activations (|a| < 128) and the sums of their halves.
constexpr int BLOCK_VECTORS = 32 / LANES;
static inline void store_codes(int8_t* codes, BlockSums* sums, const vf* a) {
    const __m256i v0 = _mm256_cvtps_epi32(a[0]), v1 = _mm256_cvtps_epi32(a[1]);
    const __m256i v2 = _mm256_cvtps_epi32(a[2]), v3 = _mm256_cvtps_epi32(a[3]);
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v0, v1), _mm256_packs_epi32(v2, v3));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)codes, _mm256_permutevar8x32_epi32(bytes, order));
    const __m256i pairs = _mm256_hadd_epi32(_mm256_add_epi32(v0, v1), _mm256_add_epi32(v2, v3));
    __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    halves = _mm_hadd_epi32(halves, halves);
    sums->half[0] = (int16_t)_mm_cvtsi128_si32(halves);
    sums->half[1] = (int16_t)_mm_extract_epi32(halves, 1);
}
static inline vi abs_bits(vf a) { return _mm256_castps_si256(abs(a)); }  // ordered like |a|; NaN above infinity
static inline vi max_i(vi a, vi b) { return _mm256_max_epi32(a, b); }
static inline int32_t reduce_max_i(vi a) {
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

}  // namespace sol::SOL_NS
