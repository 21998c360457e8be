// Paged attention on one instruction set; kv_cache.h says what the functions do and how keys and values lie.
//
// A score is one chain of fma over the head's elements, an output element one chain of fma over the keys, in their
// order; the maximum and the sum of a row go over its segment's vectors in order. None of it depends on which rows are
// computed together, so decode, verification, chunks and whole prompts agree in every bit. Rows are tiled only so that a
// key or value vector that was loaded serves several of them.
#pragma once

#include "elementwise.h"
#include "kv_cache.h"
#include "simd.h"

namespace sol::SOL_NS {

static inline vf load_kv(const float* p) { return load(p); }
static inline vf load_kv(const uint16_t* p) { return load_f16(p); }
static inline vf load_kv(const int8_t* p) { return load_i8(p); }

constexpr int SLAB = WIDEST_VECTOR;  // slots whose scores are computed at once
constexpr int SLAB_VECTORS = SLAB / LANES;
constexpr int TILE_ROWS = 6;
constexpr int MOST_BLOCKS = SEGMENT_SLOTS / WIDEST_VECTOR;

static inline float exp1(float x) { return reduce_max(exp(set1(x))); }

// One segment's part of a request, as the tiles below see it.
template <class T>
struct SegmentView {
    const uint8_t* blocks[MOST_BLOCKS];  // the head's part of each block
    int32_t block_size;
    int32_t slots;
    int32_t head_dim;
    int32_t pitch;
    int64_t value_offset;
    int64_t scale_offset;

    const T* keys(int32_t slab) const {
        const int32_t position = slab * SLAB;
        return reinterpret_cast<const T*>(blocks[position / slots]) + position % slots;
    }
    const uint8_t* values(int32_t slab) const {
        const int32_t position = slab * SLAB;
        return blocks[position / slots] + value_offset + position % slots * (int64_t)pitch * (int64_t)sizeof(T);
    }
    int32_t position(int32_t token) const { return token / block_size * slots + token % block_size; }
};

// scores[r][slab · SLAB + …] = q[r] · key for COUNT neighbouring slabs.
template <int R, int COUNT, class T>
static inline void score_slabs(const SegmentView<T>& view, const float* q, int32_t slab, int32_t end, float* scores) {
    constexpr int N = COUNT * SLAB_VECTORS;
    // Few rows wait for memory. Slabs lie apart, which no hardware prefetcher foresees: the next keys are asked for in
    // good time, and the values, which come after all keys of the segment.
    constexpr bool PREFETCH = R <= 3;
    const T* keys[COUNT];
    const uint8_t* next_keys[COUNT];
    const uint8_t* values[COUNT];
    for (int c = 0; c < COUNT; c++) {
        keys[c] = view.keys(slab + c);
        const int32_t next = slab + COUNT + c;
        next_keys[c] = reinterpret_cast<const uint8_t*>(view.keys(next < end ? next : slab + c));
        values[c] = view.values(slab + c);
    }
    const int32_t head_dim = view.head_dim;
    const int64_t stride = view.slots;
    vf acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) acc[r][n] = zero();
    }
    for (int32_t d = 0; d < head_dim; d++) {
        if constexpr (PREFETCH) {
#pragma GCC unroll 16
            for (int c = 0; c < COUNT; c++) {
                __builtin_prefetch(next_keys[c] + d * stride * (int64_t)sizeof(T), 0, 3);
                __builtin_prefetch(values[c] + d * (int64_t)sizeof(T) * SLAB, 0, 2);
            }
        }
        // The fewer of the two stay in registers beside the accumulators.
        if constexpr (R < N) {
            vf element[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) element[r] = set1(q[(int64_t)r * head_dim + d]);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                const vf key = load_kv(keys[n / SLAB_VECTORS] + d * stride + n % SLAB_VECTORS * LANES);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) acc[r][n] = fma(element[r], key, acc[r][n]);
            }
        } else {
            vf key[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                key[n] = load_kv(keys[n / SLAB_VECTORS] + d * stride + n % SLAB_VECTORS * LANES);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const vf element = set1(q[(int64_t)r * head_dim + d]);
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) acc[r][n] = fma(element, key[n], acc[r][n]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) store(scores + r * SEGMENT_SLOTS + slab * SLAB + n * LANES, acc[r][n]);
    }
}

template <int R, class T>
static void score(const SegmentView<T>& view, const float* q, int32_t slab, int32_t end, float* scores) {
    constexpr int AT_ONCE = R == 1 ? 4 : R <= 3 ? 2 : 1;  // enough chains to hide the latency of fma
    for (; slab + AT_ONCE <= end; slab += AT_ONCE) score_slabs<R, AT_ONCE>(view, q, slab, end, scores);
    for (; slab < end; slab++) score_slabs<R, 1>(view, q, slab, end, scores);
}

// acc[r][…] += Σ p[r][key] · value[key] over tokens [begin, end) of the segment, for N vectors of columns.
template <int R, int N, class T>
static inline void mix_columns(const SegmentView<T>& view, const float* p, int32_t begin, int32_t end, int32_t column,
                               float* out) {
    vf acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) acc[r][n] = load(out + r * view.pitch + column + n * LANES);
    }
    for (int32_t block = begin / view.block_size; block * view.block_size < end; block++) {
        const int32_t first = block * view.block_size;
        const int32_t from = begin > first ? begin - first : 0;
        const int32_t to = end - first < view.block_size ? end - first : view.block_size;
        const T* values = reinterpret_cast<const T*>(view.blocks[block] + view.value_offset) + column;
        const float* weights = p + block * view.slots;
        for (int32_t slot = from; slot < to; slot++) {
            const T* row = values + (int64_t)slot * view.pitch;
            if constexpr (R < N) {
                vf weight[R];
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) weight[r] = set1(weights[r * SEGMENT_SLOTS + slot]);
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) {
                    const vf value = load_kv(row + n * LANES);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) acc[r][n] = fma(weight[r], value, acc[r][n]);
                }
            } else {
                vf value[N];
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) value[n] = load_kv(row + n * LANES);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const vf weight = set1(weights[r * SEGMENT_SLOTS + slot]);
#pragma GCC unroll 16
                    for (int n = 0; n < N; n++) acc[r][n] = fma(weight, value[n], acc[r][n]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) store(out + r * view.pitch + column + n * LANES, acc[r][n]);
    }
}

template <int R, class T>
static void mix(const SegmentView<T>& view, const float* p, int32_t begin, int32_t end, float* out) {
    constexpr int N = R == 1 ? 8 : R <= 3 ? 4 : 2;
    int32_t column = 0;
    for (; column + N * LANES <= view.pitch; column += N * LANES) mix_columns<R, N>(view, p, begin, end, column, out);
    if constexpr (N > 2) {
        for (; column + 2 * LANES <= view.pitch; column += 2 * LANES) {
            mix_columns<R, 2>(view, p, begin, end, column, out);
        }
    }
    for (; column + LANES <= view.pitch; column += LANES) mix_columns<R, 1>(view, p, begin, end, column, out);
}

template <class T>
static void score_rows(int rows, const SegmentView<T>& view, const float* q, int32_t slab, int32_t end, float* scores) {
    switch (rows) {
        case 1: return score<1>(view, q, slab, end, scores);
        case 2: return score<2>(view, q, slab, end, scores);
        case 3: return score<3>(view, q, slab, end, scores);
        case 4: return score<4>(view, q, slab, end, scores);
        case 5: return score<5>(view, q, slab, end, scores);
        default: return score<6>(view, q, slab, end, scores);
    }
}

template <class T>
static void mix_rows(int rows, const SegmentView<T>& view, const float* p, int32_t begin, int32_t end, float* out) {
    switch (rows) {
        case 1: return mix<1>(view, p, begin, end, out);
        case 2: return mix<2>(view, p, begin, end, out);
        case 3: return mix<3>(view, p, begin, end, out);
        case 4: return mix<4>(view, p, begin, end, out);
        case 5: return mix<5>(view, p, begin, end, out);
        default: return mix<6>(view, p, begin, end, out);
    }
}

// Scores of one row become weights: scaled, capped, tokens outside [begin, end) masked, exponentials taken. Vectors
// that are masked altogether add +0 to the sum, so it does not matter how many of them there are.
template <class T>
static void soften(const SegmentView<T>& view, const AttentionRows& rows, float* scores, int32_t slab, int32_t slab_end,
                   int32_t begin, int32_t end, float* max_out, float* sum_out) {
    const int32_t from = slab * SLAB, to = slab_end * SLAB;
    const vf scale = set1(rows.scale), limit = set1(rows.softcap);
    const vf inverse = set1(rows.softcap != 0.0f ? 1.0f / rows.softcap : 0.0f);
    for (int32_t i = from; i < to; i += LANES) {
        vf s = load(scores + i);
        if constexpr (sizeof(T) == 1) {
            const uint8_t* block = view.blocks[i / view.slots];
            s = mul(s, load(reinterpret_cast<const float*>(block + view.scale_offset) + i % view.slots));
        }
        s = mul(s, scale);
        store(scores + i, rows.softcap != 0.0f ? cap(s, limit, inverse) : s);
    }
    const float masked = -__builtin_inff();
    const int32_t first = view.position(begin), last = view.position(end - 1);
    for (int32_t i = from; i < first; i++) scores[i] = masked;
    for (int32_t i = last + 1; i < to; i++) scores[i] = masked;
    if (view.slots != view.block_size) {
        for (int32_t block = first / view.slots; block < last / view.slots; block++) {
            for (int32_t slot = view.block_size; slot < view.slots; slot++) scores[block * view.slots + slot] = masked;
        }
    }
    vf most = set1(masked);
    for (int32_t i = from; i < to; i += LANES) most = max(most, load(scores + i));
    const float row_max = reduce_max(most);
    vf sum = zero();
    for (int32_t i = from; i < to; i += LANES) {
        vf p = exp(sub(load(scores + i), set1(row_max)));
        sum = add(sum, p);
        if constexpr (sizeof(T) == 1) {  // a value is code · scale
            const uint8_t* block = view.blocks[i / view.slots];
            p = mul(p, load(reinterpret_cast<const float*>(block + view.scale_offset) + view.slots + i % view.slots));
        }
        store(scores + i, p);
    }
    *max_out = row_max;
    *sum_out = reduce_add(sum);
}

static inline void merge_row(int32_t pitch, float* max_a, float* sum_a, float* acc_a, float max_b, float sum_b,
                             const float* acc_b) {
    if (sum_b == 0.0f) return;  // has seen no key
    if (*sum_a == 0.0f) {
        *max_a = max_b;
        *sum_a = sum_b;
        for (int32_t i = 0; i < pitch; i += LANES) store(acc_a + i, load(acc_b + i));
        return;
    }
    const float most = *max_a > max_b ? *max_a : max_b;
    const float factor_a = exp1(*max_a - most), factor_b = exp1(max_b - most);
    *max_a = most;
    *sum_a = *sum_a * factor_a + sum_b * factor_b;
    for (int32_t i = 0; i < pitch; i += LANES) {
        store(acc_a + i, fma(load(acc_b + i), set1(factor_b), mul(load(acc_a + i), set1(factor_a))));
    }
}

// Up to TILE_ROWS rows of one segment, added to their state.
template <class T>
static void attend_tile(const AttentionRows& rows, const SegmentView<T>& view, int64_t segment_begin, int32_t row,
                        int32_t count, const AttentionState& state, float* scratch) {
    // What each row sees of the segment. Both ends grow with the rows, so those that see anything are neighbours.
    int32_t begins[TILE_ROWS], ends[TILE_ROWS], first = count, last = -1;
    const int64_t tokens = rows.kv->segment_tokens();
    for (int32_t r = 0; r < count; r++) {
        const int64_t end = rows.first_token + (rows.first_head + row + r) / rows.group + 1 - segment_begin;
        const int64_t begin = rows.window > 0 ? end - rows.window : 0 - segment_begin;
        begins[r] = (int32_t)(begin > 0 ? begin : 0);
        ends[r] = (int32_t)(end < tokens ? end : tokens);
        if (end > 0 && begin < tokens) {
            first = r < first ? r : first;
            last = r;
        }
    }
    if (last < 0) return;
    const int32_t lowest = begins[first], highest = ends[last];
    const int32_t slab = view.position(lowest) / SLAB, slab_end = view.position(highest - 1) / SLAB + 1;
    const int32_t active = last - first + 1, pitch = view.pitch;
    float* scores = scratch;
    float* acc = scratch + TILE_ROWS * SEGMENT_SLOTS;
    score_rows(active, view, rows.q + (int64_t)(row + first) * view.head_dim, slab, slab_end, scores);
    float maxima[TILE_ROWS], sums[TILE_ROWS];
    for (int32_t r = 0; r < active; r++) {
        soften(view, rows, scores + r * SEGMENT_SLOTS, slab, slab_end, begins[first + r], ends[first + r], &maxima[r],
               &sums[r]);
    }
    for (int32_t i = 0; i < active * pitch; i += LANES) store(acc + i, zero());
    // Values that only some of the rows see are not multiplied by zero for the others: they might be infinite.
    const int32_t common = begins[last], common_end = ends[first];
    if (common < common_end) {
        for (int32_t r = 0; begins[first + r] < common; r++) {
            mix_rows(1, view, scores + r * SEGMENT_SLOTS, begins[first + r], common, acc + r * pitch);
        }
        mix_rows(active, view, scores, common, common_end, acc);
        for (int32_t r = active - 1; ends[first + r] > common_end; r--) {
            mix_rows(1, view, scores + r * SEGMENT_SLOTS, common_end, ends[first + r], acc + r * pitch);
        }
    } else {
        for (int32_t r = 0; r < active; r++) {
            mix_rows(1, view, scores + r * SEGMENT_SLOTS, begins[first + r], ends[first + r], acc + r * pitch);
        }
    }
    for (int32_t r = 0; r < active; r++) {
        const int64_t at = row + first + r;
        merge_row(pitch, state.max + at, state.sum + at, state.acc + at * pitch, maxima[r], sums[r], acc + r * pitch);
    }
}

template <class T>
static void attend_as(const AttentionRows& rows, int64_t segment_begin, int64_t segment_end,
                      const AttentionState& state, float* scratch) {
    const KVLayout& kv = *rows.kv;
    SegmentView<T> view;
    view.block_size = kv.block_size;
    view.slots = kv.slots;
    view.head_dim = kv.head_dim;
    view.pitch = kv.value_pitch;
    view.value_offset = kv.value_offset;
    view.scale_offset = kv.scale_offset;
    const int64_t last_token = rows.first_token + (rows.first_head + rows.num_rows - 1) / rows.group;
    const int64_t lowest = rows.window > 0 && rows.first_token >= rows.window ? rows.first_token + 1 - rows.window : 0;
    for (int64_t segment = segment_begin; segment < segment_end; segment++) {
        const int64_t begin = segment * kv.segment_tokens();
        if (begin > last_token) break;
        if (begin + kv.segment_tokens() <= lowest) continue;
        for (int32_t i = 0; i < kv.segment_blocks; i++) {
            const int64_t token = begin + (int64_t)i * kv.block_size;
            const bool held = token <= last_token && token + kv.block_size > lowest;  // others are never looked at
            const int64_t block = held ? rows.block_table[token / kv.block_size] : 0;
            view.blocks[i] = rows.layer + block * kv.block_nbytes + rows.kv_head * kv.head_nbytes;
        }
        for (int32_t row = 0; row < rows.num_rows; row += TILE_ROWS) {
            const int32_t left = rows.num_rows - row;
            attend_tile(rows, view, begin, row, left < TILE_ROWS ? left : TILE_ROWS, state, scratch);
        }
    }
}

static void attend(const AttentionRows& rows, int64_t segment_begin, int64_t segment_end, const AttentionState& state,
                   float* scratch) {
    switch (rows.kv->dtype) {
        case SOL_KV_F32: return attend_as<float>(rows, segment_begin, segment_end, state, scratch);
        case SOL_KV_F16: return attend_as<uint16_t>(rows, segment_begin, segment_end, state, scratch);
        default: return attend_as<int8_t>(rows, segment_begin, segment_end, state, scratch);
    }
}

static void merge(const KVLayout& kv, int64_t num_rows, const AttentionState& a, const AttentionState& b) {
    for (int64_t row = 0; row < num_rows; row++) {
        merge_row(kv.value_pitch, a.max + row, a.sum + row, a.acc + row * kv.value_pitch, b.max[row], b.sum[row],
                  b.acc + row * kv.value_pitch);
    }
}

static void finish(const KVLayout& kv, const AttentionState& state, int64_t row, float* out) {
    const float* acc = state.acc + row * kv.value_pitch;
    const vf sum = set1(state.sum[row]);
    int32_t i = 0;
    for (; i + LANES <= kv.head_dim; i += LANES) store(out + i, div(load(acc + i), sum));
    if (i < kv.head_dim) store_first(out + i, div(load(acc + i), sum), kv.head_dim - i);
}

static inline vf load_row(const float* x, int32_t i, int32_t n) {
    return i + LANES <= n ? load(x + i) : load_first(x + i, n - i);
}

// Codes of one head's vector; a NaN or an infinity in it makes the scale NaN.
static inline float quantize_head(const float* x, int32_t n, int8_t* codes) {
    vf most = zero(), invalid = zero();
    for (int32_t i = 0; i < n; i += LANES) {
        const vf v = load_row(x, i, n);
        most = max(most, abs(v));
        invalid = fma(v, zero(), invalid);  // 0, or NaN
    }
    const float largest = reduce_max(most);
    const bool tiny = !(largest > 1e-30f);
    const vf inverse = set1(tiny ? 0.0f : 127.0f / largest);
    for (int32_t i = 0; i < n; i += LANES) {
        const vf v = mul(load_row(x, i, n), inverse);
        store_i8(codes + i, min(set1(127.0f), max(set1(-127.0f), v)));
    }
    return (tiny ? 0.0f : largest / 127.0f) + reduce_add(invalid);
}

// A NaN stays one: it is the second operand.
static inline vf in_f16_range(vf a) { return min(set1(65504.0f), max(set1(-65504.0f), a)); }

template <class T>
static inline void scatter(const T* from, int32_t n, int32_t stride, T* to) {
    for (int32_t i = 0; i < n; i++) to[(int64_t)i * stride] = from[i];
}

// Values are written in whole vectors: the columns past head_dim are padding.
static void write_kv(const KVLayout& kv, uint8_t* head, int32_t slot, const float* key, const float* value) {
    const int32_t n = kv.head_dim;
    uint8_t* values = head + kv.value_offset;
    const int64_t at = (int64_t)slot * kv.value_pitch;
    if (kv.dtype == SOL_KV_F32) {
        scatter(key, n, kv.slots, reinterpret_cast<float*>(head) + slot);
        float* out = reinterpret_cast<float*>(values) + at;
        for (int32_t i = 0; i < n; i += LANES) store(out + i, load_row(value, i, n));
    } else if (kv.dtype == SOL_KV_F16) {
        uint16_t keys[256 + WIDEST_VECTOR];
        for (int32_t i = 0; i < n; i += LANES) store_f16(keys + i, in_f16_range(load_row(key, i, n)));
        scatter(keys, n, kv.slots, reinterpret_cast<uint16_t*>(head) + slot);
        uint16_t* out = reinterpret_cast<uint16_t*>(values) + at;
        for (int32_t i = 0; i < n; i += LANES) store_f16(out + i, in_f16_range(load_row(value, i, n)));
    } else {
        int8_t keys[256 + WIDEST_VECTOR];
        float* scales = reinterpret_cast<float*>(head + kv.scale_offset);
        scales[slot] = quantize_head(key, n, keys);
        scatter(keys, n, kv.slots, reinterpret_cast<int8_t*>(head) + slot);
        scales[kv.slots + slot] = quantize_head(value, n, reinterpret_cast<int8_t*>(values) + at);
    }
}

static const AttentionKernels ATTENTION = {write_kv, attend, merge, finish};

}  // namespace sol::SOL_NS
