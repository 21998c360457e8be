// ARMv8.2 NEON with the dot product instructions. A vf is two registers, so that the packed layout is that of AVX2.
#pragma once

#include <arm_neon.h>

namespace sol::SOL_NS {

constexpr int LANES = 8;
struct vf {
    float32x4_t low, high;
};
struct vi {  // LANES int32
    int32x4_t low, high;
};
struct vb {  // 4 · LANES bytes
    uint8x16_t low, high;
};

// ---- floats

static inline vf set1(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
static inline vf zero() { return set1(0.0f); }
static inline vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void store(float* p, vf a) {
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
static inline vf load_first(const float* p, int n) {  // the rest: 0
    float all[LANES] = {};
    memcpy(all, p, (size_t)n * sizeof(float));
    return load(all);
}
static inline void store_first(float* p, vf a, int n) {
    float all[LANES];
    store(all, a);
    memcpy(p, all, (size_t)n * sizeof(float));
}
static inline vf fma(vf a, vf b, vf c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
static inline vf add(vf a, vf b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
static inline vf sub(vf a, vf b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
static inline vf mul(vf a, vf b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
static inline vf div(vf a, vf b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
static inline vf max(vf a, vf b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
static inline vf min(vf a, vf b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
static inline vf abs(vf a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
static inline vf round(vf a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }  // to nearest, ties to even
static inline float reduce_add(vf a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
static inline float reduce_max(vf a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }
static inline vf load_f16(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
static inline void store_f16(uint16_t* p, vf a) {  // to nearest, ties to even
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(a.low), vcvt_f16_f32(a.high))));
}
static inline vf load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
}
static inline vf load_i8(const int8_t* p) {
    const int16x8_t h = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(h)))};
}
static inline vf load_u8(const uint8_t* p) {
    const uint16x8_t h = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(h))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(h)))};
}
static inline vi to_int(vf a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
static inline void store_i8(int8_t* p, vf a) {  // to nearest, ties to even; |a| <= 127
    const vi v = to_int(a);
    vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(v.low), vmovn_s32(v.high))));
}
static inline vf pow2(vf n) {  // 2^n for integral -126 <= n <= 127
    const vi v = to_int(n);
    const int32x4_t bias = vdupq_n_s32(127);
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(v.low, bias), 23)),
            vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(v.high, bias), 23))};
}

// ---- tiles, for 32 registers, two to a vector
constexpr int TOKEN_TILE = 6;            // tokens that a row group's codes meet at once
constexpr bool UNPACKS_FOR_MANY = true;  // whether codes are unpacked into memory first where there are more
constexpr int FLOAT_TOKEN_TILE = 6;
constexpr int FLOAT_ACCUMULATORS = 12;

// ---- integers

static inline vi set1_i(int32_t a) { return {vdupq_n_s32(a), vdupq_n_s32(a)}; }
static inline vi load_i(const uint8_t* p) {
    return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))};
}
static inline void store_i(uint8_t* p, vi a) {
    vst1q_u8(p, vreinterpretq_u8_s32(a.low));
    vst1q_u8(p + 16, vreinterpretq_u8_s32(a.high));
}
static inline vi add_i(vi a, vi b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
static inline vi sub_i(vi a, vi b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
static inline vf to_float(vi a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
static inline vb load_b(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
static inline void store_b(uint8_t* p, vb a) {
    vst1q_u8(p, a.low);
    vst1q_u8(p + 16, a.high);
}
static inline vb or_b(vb a, vb b) { return {vorrq_u8(a.low, b.low), vorrq_u8(a.high, b.high)}; }
static inline vb and_b(vb a, uint8_t mask) {
    return {vandq_u8(a.low, vdupq_n_u8(mask)), vandq_u8(a.high, vdupq_n_u8(mask))};
}
static inline vb shift_left(vb a, int n) {
    const int8x16_t by = vdupq_n_s8((int8_t)n);
    return {vshlq_u8(a.low, by), vshlq_u8(a.high, by)};
}
static inline vb shift_right(vb a, int n) { return shift_left(a, -n); }
static inline vb broadcast4(const int8_t* p) {  // the same 4 bytes for every row
    uint32_t word;
    memcpy(&word, p, sizeof word);
    const uint8x16_t v = vreinterpretq_u8_u32(vdupq_n_u32(word));
    return {v, v};
}

// Dot products in int32. Codes of less than 8 bits are positive as signed bytes.
template <int BITS>
struct Dot {
    static constexpr int STEPS = 8;
    static constexpr int CODE_OFFSET = 0;
    using Part = vi;
    static inline Part more(Part part, vb w, vb x) {
        return {vdotq_s32(part.low, vreinterpretq_s8_u8(w.low), vreinterpretq_s8_u8(x.low)),
                vdotq_s32(part.high, vreinterpretq_s8_u8(w.high), vreinterpretq_s8_u8(x.high))};
    }
    static inline Part first(vb w, vb x) { return more(set1_i(0), w, x); }
    static inline vi widen(Part part) { return part; }
};

static inline vi times_sum(const BlockSums& sums, int k) { return set1_i(k * (sums.half[0] + sums.half[1])); }
static inline vi times_half_sum(const BlockSums& sums, int half, int k) { return set1_i(k * sums.half[half]); }
static inline vi load_factors(const uint8_t* p) {  // a byte a row, for times_sum
    const uint16x8_t h = vmovl_u8(vld1_u8(p));
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(h))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(h)))};
}
static inline vi times_sum(const BlockSums& sums, vi factors) {
    const int32_t sum = sums.half[0] + sums.half[1];
    return {vmulq_n_s32(factors.low, sum), vmulq_n_s32(factors.high, sum)};
}

// 32 rounded activations (|a| < 128) and the sums of their halves.
constexpr int BLOCK_VECTORS = 32 / LANES;
static inline void store_codes(int8_t* codes, BlockSums* sums, const vf* a) {
    for (int half = 0; half < 2; half++) {
        const vi first = to_int(a[2 * half]), last = to_int(a[2 * half + 1]);
        const int16x8_t h0 = vcombine_s16(vmovn_s32(first.low), vmovn_s32(first.high));
        const int16x8_t h1 = vcombine_s16(vmovn_s32(last.low), vmovn_s32(last.high));
        vst1q_s8(codes + 16 * half, vcombine_s8(vmovn_s16(h0), vmovn_s16(h1)));
        sums->half[half] = vaddvq_s16(vaddq_s16(h0, h1));
    }
}
static inline vi abs_bits(vf a) {  // ordered like |a|; NaN above infinity
    return {vreinterpretq_s32_f32(vabsq_f32(a.low)), vreinterpretq_s32_f32(vabsq_f32(a.high))};
}
static inline vi max_i(vi a, vi b) { return {vmaxq_s32(a.low, b.low), vmaxq_s32(a.high, b.high)}; }
static inline int32_t reduce_max_i(vi a) { return vmaxvq_s32(vmaxq_s32(a.low, a.high)); }

}  // namespace sol::SOL_NS
