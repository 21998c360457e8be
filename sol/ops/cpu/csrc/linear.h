// y = x · Wᵀ for packed weights. One accumulator for each (row, token), its terms added in the order of columns,
// whatever the tile: results do not depend on how many tokens or groups a call has.
#pragma once

#include "formats.h"
#include "simd.h"

#define SOL_UNROLL _Pragma("GCC unroll 16")

namespace sol::SOL_NS {

// ---- Quantised weights × quantised activations

// How the codes of a block become weights: code - offset (a constant, or a zero point a row), scale · code + min, or a
// scale for each half of the block.
enum class Rule { OFFSET, ZERO_POINT, MIN, HALVES };

struct Scales {
    vf scale;
    vf second;  // MIN: the minimum; HALVES: the second half's scale
    vi zero;    // ZERO_POINT
};

// A block of a format as it lies packed: constants, and how to read codes and scales. HEADER and PARAMS: bytes a row.
template <int32_t FORMAT>
struct PackedBlock {
    static constexpr Layout LAYOUT = layout_of(FORMAT);
    static constexpr int BITS = LAYOUT.bits;
    static constexpr int BLOCKS_PER_SUPER = LAYOUT.blocks_per_super;
    static constexpr bool IN_MEMORY = true;
    static constexpr int VECTOR = 4 * LANES;
    static constexpr int CODES_NBYTES = 4 * BITS * LANES;
    static constexpr int HEADER_NBYTES = LAYOUT.header * LANES;
    static constexpr int BLOCK_NBYTES = CODES_NBYTES + LAYOUT.params * LANES;
    static constexpr Rule RULE = FORMAT == SOL_INT4                                             ? Rule::ZERO_POINT
                                 : FORMAT == SOL_Q6_K                                           ? Rule::HALVES
                                 : FORMAT == SOL_Q4_0 || FORMAT == SOL_Q5_0 || LAYOUT.bits == 8 ? Rule::OFFSET
                                                                                                : Rule::MIN;
    static constexpr int OFFSET = FORMAT == SOL_Q4_0   ? 8
                                  : FORMAT == SOL_Q5_0 ? 16
                                  : FORMAT == SOL_Q6_K ? 32
                                                       : Dot<BITS>::CODE_OFFSET;

    static inline vb code(const uint8_t* block, int j) {
        if constexpr (BITS == 8) {
            return load_b(block + j * VECTOR);
        } else {
            const vb pair = load_b(block + (j % 4) * VECTOR);
            const vb low = and_b(j < 4 ? pair : shift_right(pair, 4), 15);
            if constexpr (BITS == 4) {
                return low;
            } else if constexpr (BITS == 5) {
                const vb high = load_b(block + 4 * VECTOR);
                return or_b(low, and_b(j < 4 ? shift_left(high, 4 - j) : shift_right(high, j - 4), 16));
            } else {
                const vb high = load_b(block + (4 + j / 4) * VECTOR);
                const int at = 2 * (j % 4);
                return or_b(low, and_b(at < 4 ? shift_left(high, 4 - at) : shift_right(high, at - 4), 48));
            }
        }
    }

    static inline Scales header(const uint8_t* p) {
        if constexpr (FORMAT == SOL_INT8) {
            return {load((const float*)p), zero(), set1_i(0)};
        } else if constexpr (FORMAT == SOL_INT4) {
            return {load((const float*)p), zero(), load_factors(p + 4 * LANES)};
        } else if constexpr (FORMAT == SOL_Q6_K) {
            return {load_f16((const uint16_t*)p), zero(), set1_i(0)};
        } else if constexpr (LAYOUT.header == 4) {
            return {load_f16((const uint16_t*)p), sub(zero(), load_f16((const uint16_t*)p + LANES)), set1_i(0)};
        } else {
            return {zero(), zero(), set1_i(0)};
        }
    }

    // Element by element: GCC copies a whole Scales in halves of a register, which the next load then waits for.
    static inline Scales scales(const uint8_t* block, const Scales& header) {
        const uint8_t* p = block + CODES_NBYTES;
        if constexpr (LAYOUT.params == 0) {
            return {header.scale, header.second, header.zero};
        } else if constexpr (FORMAT == SOL_Q6_K) {
            return {mul(header.scale, load_i8((const int8_t*)p)), mul(header.scale, load_i8((const int8_t*)p + LANES)),
                    set1_i(0)};
        } else if constexpr (LAYOUT.header == 4) {
            return {mul(header.scale, load_u8(p)), mul(header.second, load_u8(p + LANES)), set1_i(0)};
        } else if constexpr (LAYOUT.params == 4) {
            return {load_f16((const uint16_t*)p), load_f16((const uint16_t*)p + LANES), set1_i(0)};
        } else {
            return {load_f16((const uint16_t*)p), zero(), set1_i(0)};
        }
    }
};

// The same block unpacked into the scratch memory: a vector of codes a step, then the scales.
template <class Packed>
struct UnpackedBlock {
    static constexpr int BITS = Packed::BITS;
    static constexpr Rule RULE = Packed::RULE;
    static constexpr int OFFSET = Packed::OFFSET;
    static constexpr int BLOCKS_PER_SUPER = 1;
    static constexpr bool IN_MEMORY = false;
    static constexpr int VECTOR = 4 * LANES;
    static constexpr int HEADER_NBYTES = 0;
    static constexpr int BLOCK_NBYTES = (8 + (RULE == Rule::OFFSET ? 1 : 2)) * VECTOR;

    static inline vb code(const uint8_t* block, int j) { return load_b(block + j * VECTOR); }
    static inline Scales header(const uint8_t*) { return {zero(), zero(), set1_i(0)}; }
    static inline Scales scales(const uint8_t* block, const Scales&) {
        const uint8_t* p = block + 8 * VECTOR;
        if constexpr (RULE == Rule::ZERO_POINT) {
            return {load((const float*)p), zero(), load_i(p + VECTOR)};
        } else if constexpr (RULE == Rule::OFFSET) {
            return {load((const float*)p), zero(), set1_i(0)};
        } else {
            return {load((const float*)p), load((const float*)(p + VECTOR)), set1_i(0)};
        }
    }
    static inline void write(uint8_t* out, const uint8_t* packed, const Scales& header) {
        SOL_UNROLL for (int j = 0; j < 8; j++)
            store_b(out + j * VECTOR, Packed::code(packed, j));
        const Scales s = Packed::scales(packed, header);
        store((float*)(out + 8 * VECTOR), s.scale);
        if constexpr (RULE == Rule::ZERO_POINT) {
            store_i(out + 9 * VECTOR, s.zero);
        } else if constexpr (RULE != Rule::OFFSET) {
            store((float*)(out + 9 * VECTOR), s.second);
        }
    }
};

// One block of one row group times T tokens, added to acc. x, scales, sums: of the first token; the next tokens' lie
// `cols`, `blocks` and `blocks` further on.
template <class B, int T>
static inline void block_product(const uint8_t* p, const Scales& header, const int8_t* x, int64_t cols,
                                 const float* scales, const BlockSums* sums, int64_t blocks, vf* acc) {
    using D = Dot<B::BITS>;
    constexpr int HALVES = B::RULE == Rule::HALVES ? 2 : 1;
    constexpr int STEPS = D::STEPS < 8 / HALVES ? D::STEPS : 8 / HALVES;
    typename D::Part part[T];
    vi dot[HALVES][T];
    SOL_UNROLL for (int j = 0; j < 8; j++) {
        const int half = HALVES == 2 ? j / 4 : 0;
        const vb w = B::code(p, j);
        SOL_UNROLL for (int t = 0; t < T; t++) {
            const vb a = broadcast4(x + t * cols + 4 * j);
            part[t] = j % STEPS == 0 ? D::first(w, a) : D::more(part[t], w, a);
            if (j % STEPS == STEPS - 1) {
                const vi sum = D::widen(part[t]);
                dot[half][t] = j % (8 / HALVES) == STEPS - 1 ? sum : add_i(dot[half][t], sum);
            }
        }
    }
    const Scales s = B::scales(p, header);
    SOL_UNROLL for (int t = 0; t < T; t++) {
        const vf a_scale = set1(scales[t * blocks]);
        const BlockSums& a_sums = sums[t * blocks];
        if constexpr (B::RULE == Rule::HALVES) {
            const vi first = sub_i(dot[0][t], times_half_sum(a_sums, 0, B::OFFSET));
            const vi second = sub_i(dot[1][t], times_half_sum(a_sums, 1, B::OFFSET));
            acc[t] = fma(to_float(first), mul(s.scale, a_scale), acc[t]);
            acc[t] = fma(to_float(second), mul(s.second, a_scale), acc[t]);
        } else {
            vi whole = dot[0][t];
            if constexpr (B::RULE == Rule::ZERO_POINT) {
                whole = sub_i(whole, times_sum(a_sums, s.zero));
            } else if constexpr (B::OFFSET != 0) {
                whole = sub_i(whole, times_sum(a_sums, B::OFFSET));
            }
            acc[t] = fma(to_float(whole), mul(s.scale, a_scale), acc[t]);
            if constexpr (B::RULE == Rule::MIN) acc[t] = fma(set1(a_sums.scaled), s.second, acc[t]);
        }
    }
}

// Weights are read once, from main memory as a rule, and each block is a lot of arithmetic: the processor's own
// prefetching does not run far enough ahead (measured on Zen 3: 1.2 times faster with it). Past the matrix it does
// nothing.
constexpr int PREFETCH_NBYTES = 2048;

template <int NBYTES>
static inline void prefetch(const uint8_t* p) {
    SOL_UNROLL for (int i = 0; i < NBYTES; i += 64)
        __builtin_prefetch(p + PREFETCH_NBYTES + i);
}

static inline void store_rows(float* y, vf acc, int num_rows) {
    if (num_rows == LANES) {
        store(y, acc);
    } else {
        store_first(y, acc, num_rows);
    }
}

// What a token's refined blocks add to one row group.
template <class B>
[[gnu::noinline]] static vf add_refined(const uint8_t* group, int64_t per_super, const QuantizedActivations& q, vf acc) {
    const int64_t super_nbytes = B::HEADER_NBYTES + per_super * B::BLOCK_NBYTES;
    for (int32_t i = 1; i <= q.refined[0]; i++) {
        const int64_t b = q.refined[i];
        const uint8_t* p = group + b / per_super * super_nbytes;
        block_product<B, 1>(p + B::HEADER_NBYTES + b % per_super * B::BLOCK_NBYTES, B::header(p),
                            q.rest.codes + b * BLOCK, 0, q.rest.scales + b, q.rest.sums + b, 0, &acc);
    }
    return acc;
}

// One row group times T tokens from token t0 on.
template <class B, int T>
static void quantized_tile(const uint8_t* group, int64_t per_super, const QuantizedActivations& q, int64_t t0, float* y,
                           int64_t y_stride, int num_rows) {
    const int64_t cols = q.cols, blocks = cols / BLOCK;
    const QuantizedRows rows = q.whole.from(t0, cols);
    const int8_t* x = rows.codes;
    const uint8_t* p = group;
    vf acc[T];
    SOL_UNROLL for (int t = 0; t < T; t++)
        acc[t] = zero();
    if constexpr (B::BLOCKS_PER_SUPER > 0) per_super = B::BLOCKS_PER_SUPER;
    for (int64_t b = 0; b < blocks; b += per_super) {
        const Scales header = B::header(p);
        p += B::HEADER_NBYTES;
        for (int64_t i = b; i < b + per_super; i++) {
            if constexpr (B::IN_MEMORY) prefetch<B::BLOCK_NBYTES>(p);
            block_product<B, T>(p, header, x, cols, rows.scales + i, rows.sums + i, blocks, acc);
            p += B::BLOCK_NBYTES;
            x += BLOCK;
        }
    }
    SOL_UNROLL for (int t = 0; t < T; t++) {
        const QuantizedActivations token = q.from(t0 + t);
        if (token.refined[0] != 0) acc[t] = add_refined<B>(group, per_super, token, acc[t]);
        store_rows(y + t * y_stride, acc[t], num_rows);
    }
}

template <class Packed>
static void unpack_group(const uint8_t* p, int64_t per_super, int64_t blocks, uint8_t* out) {
    if constexpr (Packed::BLOCKS_PER_SUPER > 0) per_super = Packed::BLOCKS_PER_SUPER;
    for (int64_t b = 0; b < blocks; b += per_super) {
        const Scales header = Packed::header(p);
        p += Packed::HEADER_NBYTES;
        for (int64_t i = 0; i < per_super; i++) {
            UnpackedBlock<Packed>::write(out, p, header);
            p += Packed::BLOCK_NBYTES;
            out += UnpackedBlock<Packed>::BLOCK_NBYTES;
        }
    }
}

// Calls f with the constant that n is, MIN <= n <= MAX.
template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};
template <int MIN, int MAX, class F>
static inline void with_tokens(int64_t n, const F& f) {
    if constexpr (MAX > MIN) {
        if (n < MAX) return with_tokens<MIN, MAX - 1>(n, f);
    }
    f(Constant<MAX>{});
}

// Tokens [t0, t1) of one row group, in tiles of nearly equal size: of at least MIN if there are at least MAX tokens.
template <class B, int MIN, int MAX>
static void quantized_rows(const uint8_t* p, int64_t per_super, const QuantizedActivations& q, int64_t t0, int64_t t1,
                           float* y, int64_t y_stride, int num_rows) {
    while (t0 < t1) {
        const int64_t left = t1 - t0, tiles = (left + MAX - 1) / MAX;
        const int64_t n = (left + tiles - 1) / tiles;
        float* out = y + t0 * y_stride;
        with_tokens<MIN, MAX>(
            n, [&](auto tokens) { quantized_tile<B, tokens.value>(p, per_super, q, t0, out, y_stride, num_rows); });
        t0 += n;
    }
}

// Of what is read again and again: activations, for every row group; or float row groups, for every tile of tokens.
constexpr int64_t L2_NBYTES = 192 * 1024;

template <int32_t FORMAT>
static void quantized_linear(const PackedMatrix& w, const QuantizedActivations& q, int64_t num_tokens,
                             int64_t group_begin, int64_t group_end, float* y, int64_t y_stride,
                             [[maybe_unused]] void* scratch) {
    using Packed = PackedBlock<FORMAT>;
    const int64_t per_super = Packed::BLOCKS_PER_SUPER == 0 ? w.cols / BLOCK : w.group_size / BLOCK;
    int64_t tile = L2_NBYTES / w.cols / 12 * 12;
    if (tile < 24) tile = 24;
    for (int64_t t0 = 0; t0 < num_tokens; t0 += tile) {
        const int64_t t1 = t0 + tile < num_tokens ? t0 + tile : num_tokens;
        for (int64_t g = group_begin; g < group_end; g++) {
            const uint8_t* p = w.data + g * w.group_nbytes;
            const int64_t row = g * LANES;
            const int num_rows = w.rows - row < LANES ? (int)(w.rows - row) : LANES;
            if constexpr (UNPACKS_FOR_MANY && Packed::BITS < 8) {
                // Unpacking costs more than packed codes that are read twice, unless they are slow to read.
                if (t1 - t0 > (Packed::BITS == 4 ? 2 * TOKEN_TILE : TOKEN_TILE)) {
                    unpack_group<Packed>(p, per_super, w.cols / BLOCK, (uint8_t*)scratch);
                    quantized_rows<UnpackedBlock<Packed>, 3, 4>((const uint8_t*)scratch, 1, q, t0, t1, y + row,
                                                                y_stride, num_rows);
                    continue;
                }
            }
            quantized_rows<Packed, 1, TOKEN_TILE>(p, per_super, q, t0, t1, y + row, y_stride, num_rows);
        }
    }
}

// ---- Float weights × float activations

template <int32_t FORMAT>
static inline vf load_weight(const uint8_t* p) {
    if constexpr (FORMAT == SOL_F32) {
        return load((const float*)p);
    } else if constexpr (FORMAT == SOL_F16) {
        return load_f16((const uint16_t*)p);
    } else {
        return load_bf16((const uint16_t*)p);
    }
}

// G row groups times T tokens; the last group has num_rows rows.
template <int32_t FORMAT, int G, int T>
static void float_tile(const uint8_t* p, int64_t group_nbytes, const float* x, int64_t cols, float* y, int64_t y_stride,
                       int num_rows) {
    constexpr int64_t COLUMN_NBYTES = LANES * (FORMAT == SOL_F32 ? 4 : 2);
    vf acc[G][T];
    SOL_UNROLL for (int g = 0; g < G; g++) {
        SOL_UNROLL for (int t = 0; t < T; t++)
            acc[g][t] = zero();
    }
    for (int64_t c = 0; c < cols; c++) {
        if constexpr (G < 8) {  // eight streams keep the memory busy as they are
            SOL_UNROLL for (int g = 0; g < G; g++)
                prefetch<COLUMN_NBYTES>(p + g * group_nbytes + c * COLUMN_NBYTES);
        }
        vf w[G];
        SOL_UNROLL for (int g = 0; g < G; g++)
            w[g] = load_weight<FORMAT>(p + g * group_nbytes + c * COLUMN_NBYTES);
        SOL_UNROLL for (int t = 0; t < T; t++) {
            const vf a = set1(x[t * cols + c]);
            SOL_UNROLL for (int g = 0; g < G; g++)
                acc[g][t] = fma(w[g], a, acc[g][t]);
        }
    }
    SOL_UNROLL for (int g = 0; g < G; g++) {
        SOL_UNROLL for (int t = 0; t < T; t++) {
            store_rows(y + t * y_stride + g * LANES, acc[g][t], g == G - 1 ? num_rows : LANES);
        }
    }
}

// T tokens and a range of groups, G at a time, then the rest one by one.
template <int32_t FORMAT, int G, int T>
static void float_groups(const PackedMatrix& w, const float* x, int64_t group_begin, int64_t group_end, float* y,
                         int64_t y_stride) {
    int64_t g = group_begin;
    const auto rows_of = [&](int64_t group) {
        return w.rows - group * LANES < LANES ? (int)(w.rows - group * LANES) : LANES;
    };
    for (; g + G <= group_end; g += G)
        float_tile<FORMAT, G, T>(w.data + g * w.group_nbytes, w.group_nbytes, x, w.cols, y + g * LANES, y_stride,
                                 rows_of(g + G - 1));
    for (; g < group_end; g++)
        float_tile<FORMAT, 1, T>(w.data + g * w.group_nbytes, w.group_nbytes, x, w.cols, y + g * LANES, y_stride,
                                 rows_of(g));
}

template <int32_t FORMAT>
static void float_linear(const PackedMatrix& w, const float* x, int64_t num_tokens, int64_t group_begin,
                         int64_t group_end, float* y, int64_t y_stride) {
    // Groups that stay in the second-level cache while every token passes.
    int64_t chunk = L2_NBYTES / w.group_nbytes / 12 * 12;
    if (chunk < 12) chunk = 12;
    for (int64_t g0 = group_begin; g0 < group_end; g0 += chunk) {
        const int64_t g1 = g0 + chunk < group_end ? g0 + chunk : group_end;
        for (int64_t t = 0; t < num_tokens;) {
            const int64_t left = num_tokens - t;
            const float* in = x + t * w.cols;
            float* out = y + t * y_stride;
            const int64_t tiles = (left + FLOAT_TOKEN_TILE - 1) / FLOAT_TOKEN_TILE, n = (left + tiles - 1) / tiles;
            with_tokens<1, FLOAT_TOKEN_TILE>(n, [&](auto tokens) {
                constexpr int T = tokens.value, G = FLOAT_ACCUMULATORS / T < 8 ? FLOAT_ACCUMULATORS / T : 8;
                float_groups<FORMAT, G, T>(w, in, g0, g1, out, y_stride);
            });
            t += n;
        }
    }
}

static void linear(const PackedMatrix& w, const float* x, const QuantizedActivations* q, int64_t num_tokens,
                   int64_t group_begin, int64_t group_end, float* y, int64_t y_stride, void* scratch) {
#define SOL_QUANTIZED(FORMAT) \
    case FORMAT: quantized_linear<FORMAT>(w, *q, num_tokens, group_begin, group_end, y, y_stride, scratch); return;
#define SOL_FLOAT(FORMAT) \
    case FORMAT: float_linear<FORMAT>(w, x, num_tokens, group_begin, group_end, y, y_stride); return;
    switch (w.format) {
        SOL_FLOAT(SOL_F32)
        SOL_FLOAT(SOL_F16)
        SOL_FLOAT(SOL_BF16)
        SOL_QUANTIZED(SOL_Q4_0)
        SOL_QUANTIZED(SOL_Q4_1)
        SOL_QUANTIZED(SOL_Q5_0)
        SOL_QUANTIZED(SOL_Q5_1)
        SOL_QUANTIZED(SOL_Q8_0)
        SOL_QUANTIZED(SOL_Q4_K)
        SOL_QUANTIZED(SOL_Q5_K)
        SOL_QUANTIZED(SOL_Q6_K)
        SOL_QUANTIZED(SOL_INT8)
        SOL_QUANTIZED(SOL_INT4)
        default: return;
    }
#undef SOL_QUANTIZED
#undef SOL_FLOAT
}

}  // namespace sol::SOL_NS
