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

}  // namespace sol::SOL_NS
