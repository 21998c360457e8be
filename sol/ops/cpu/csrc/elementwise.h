// What surrounds a projection: norm, RoPE, SiLU, sums and the quantisation of activations. Rows of any length.
#pragma once

#include "simd.h"

namespace sol::SOL_NS {

// c · tanh(s / c)
static inline vf cap(vf s, vf c, vf inverse) {
    const vf x = min(set1(10.0f), max(set1(-10.0f), mul(s, inverse)));
    const vf e = exp(add(x, x));
    return mul(c, div(sub(e, set1(1.0f)), add(e, set1(1.0f))));
}

// 32 activations: scale = amax / 127, codes to nearest, ties to even.
static inline void quantize_block(const float* x, int8_t* codes, float* scale_out, BlockSums* sums) {
    vf v[BLOCK_VECTORS];
    vi most = set1_i(0);
    for (int i = 0; i < BLOCK_VECTORS; i++) {
        v[i] = load(x + i * LANES);
        most = max_i(most, abs_bits(v[i]));
    }
    const int32_t bits = reduce_max_i(most);
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    // Below this the inverse would overflow; what is so small is zero next to any other activation.
    const bool is_zero = amax < 1e-35f, is_finite = bits < 0x7f800000;
    const float scale = is_zero ? 0.0f : (is_finite ? amax / 127.0f : __builtin_nanf(""));
    const float inverse = is_zero || !is_finite ? 0.0f : 1.0f / scale;
    if (is_finite) {
        for (int i = 0; i < BLOCK_VECTORS; i++) v[i] = mul(v[i], set1(inverse));
    } else {
        for (int i = 0; i < BLOCK_VECTORS; i++) v[i] = zero();
    }
    store_codes(codes, sums, v);
    *scale_out = scale;
    sums->scaled = scale * (float)(sums->half[0] + sums->half[1]);
}

// A block is refined if its largest value is more than 4.5 times the root of its mean square: Σ code² below
// 32 · 127² / 4.5². In integers, so that every instruction set decides alike.
constexpr int32_t REFINED_ENERGY = 25488;

// One token's row.
static void quantize(const float* x, const int32_t* perm, int64_t row, const QuantizedActivations& q) {
    const QuantizedActivations out = q.from(row);
    const int64_t blocks = q.cols / 32;
    int32_t count = 0;
    float gathered[32], rest[32];
    for (int64_t b = 0; b < blocks; b++) {
        const float* in = x + 32 * b;
        if (perm) {
            for (int i = 0; i < 32; i++) gathered[i] = x[perm[32 * b + i]];
            in = gathered;
        }
        const int8_t* codes = out.whole.codes + 32 * b;
        quantize_block(in, out.whole.codes + 32 * b, out.whole.scales + b, out.whole.sums + b);
        int32_t energy = 0;
        for (int i = 0; i < 32; i++) energy += codes[i] * codes[i];
        const float scale = out.whole.scales[b];
        if (energy >= REFINED_ENERGY || !(scale > 0.0f)) continue;
        for (int i = 0; i < 32; i++) rest[i] = in[i] - scale * (float)codes[i];
        quantize_block(rest, out.rest.codes + 32 * b, out.rest.scales + b, out.rest.sums + b);
        out.refined[++count] = (int32_t)b;
    }
    out.refined[0] = count;
}

// x / sqrt(mean(x²) + eps) · (weight + offset)
static void rms_norm(const float* x, const float* weight, float eps, float offset, int64_t n, float* out) {
    vf squares[2] = {zero(), zero()};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const vf a = load(x + i), b = load(x + i + LANES);
        squares[0] = fma(a, a, squares[0]);
        squares[1] = fma(b, b, squares[1]);
    }
    for (; i < n; i += LANES) {
        const vf a = n - i < LANES ? load_first(x + i, (int)(n - i)) : load(x + i);
        squares[0] = fma(a, a, squares[0]);
    }
    const float mean = reduce_add(add(squares[0], squares[1])) / (float)n;
    const vf scale = set1(1.0f / __builtin_sqrtf(mean + eps)), shift = set1(offset);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, mul(mul(load(x + i), scale), add(load(weight + i), shift)));
    if (i < n) {
        const int rest = (int)(n - i);
        store_first(out + i, mul(mul(load_first(x + i, rest), scale), add(load_first(weight + i, rest), shift)), rest);
    }
}

static void add_row(float* x, const float* y, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, add(load(x + i), load(y + i)));
    if (i < n) {
        const int rest = (int)(n - i);
        store_first(x + i, add(load_first(x + i, rest), load_first(y + i, rest)), rest);
    }
}

// gate / (1 + e^-gate) · up
static inline vf silu_times(vf gate, vf up) { return mul(div(gate, add(set1(1.0f), exp(sub(zero(), gate)))), up); }

static void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, silu_times(load(gate + i), load(up + i)));
    if (i < n) {
        const int rest = (int)(n - i);
        store_first(out + i, silu_times(load_first(gate + i, rest), load_first(up + i, rest)), rest);
    }
}

// GELU(gate) · up, with the approximation by tanh (arXiv:1606.08415): (1 + tanh(y)) / 2 = 1 / (1 + e^-2y) at
// y = sqrt(2 / π) (gate + 0.044715 gate³).
static inline vf gelu_times(vf gate, vf up) {
    const vf inner = fma(mul(gate, gate), set1(0.07135481627159748f), set1(1.5957691216057308f));
    return mul(div(gate, add(set1(1.0f), exp(sub(zero(), mul(gate, inner))))), up);
}

static void gelu_mul(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, gelu_times(load(gate + i), load(up + i)));
    if (i < n) {
        const int rest = (int)(n - i);
        store_first(out + i, gelu_times(load_first(gate + i, rest), load_first(up + i, rest)), rest);
    }
}

// limit · tanh(x / limit) in place.
static void softcap(float* x, float limit, int64_t n) {
    const vf most = set1(limit), inverse = set1(1.0f / limit);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, cap(load(x + i), most, inverse));
    if (i < n) store_first(x + i, cap(load_first(x + i, (int)(n - i)), most, inverse), (int)(n - i));
}

// One head in place: element i pairs with i + head_dim / 2.
static void rope(float* x, const float* cos, const float* sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    float* y = x + half;
    int64_t i = 0;
    for (; i < half; i += LANES) {
        const int rest = half - i < LANES ? (int)(half - i) : LANES;
        const bool whole = rest == LANES;
        const vf a = whole ? load(x + i) : load_first(x + i, rest), b = whole ? load(y + i) : load_first(y + i, rest);
        const vf c = whole ? load(cos + i) : load_first(cos + i, rest);
        const vf s = whole ? load(sin + i) : load_first(sin + i, rest);
        const vf first = sub(mul(a, c), mul(b, s)), second = add(mul(b, c), mul(a, s));
        if (whole) {
            store(x + i, first);
            store(y + i, second);
        } else {
            store_first(x + i, first, rest);
            store_first(y + i, second, rest);
        }
    }
}

}  // namespace sol::SOL_NS
