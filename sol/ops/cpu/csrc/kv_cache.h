// The paged KV cache as the kernels lay it out, and what attention kernels an instruction set has.
//
// A layer is num_blocks blocks; a block holds block_size tokens of all its key/value heads, head after head:
//
//     keys    [head_dim][slots]     transposed, so that one vector holds one element of neighbouring tokens
//     values  [slots][value_pitch]
//     INT8 alone: key scales [slots], value scales [slots], float32: x = code · scale, one scale a token and head
//
// slots is block_size and value_pitch head_dim, both rounded up to the widest vector of any instruction set: kernels
// always load whole vectors, and the layout is the same for all sets. What lies in slots and columns that were never
// written may be anything; no result depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sol_cpu.h"

namespace sol {

constexpr int32_t WIDEST_VECTOR = 16;

// Keys of a segment at most. A row's attention is computed segment by segment, each on its own, and the results are
// merged in order. Segments lie at fixed positions of the sequence (multiples of segment_blocks blocks), so it does not
// matter which thread computes which.
constexpr int32_t SEGMENT_SLOTS = 256;

struct KVLayout {
    int32_t dtype;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t slots;
    int32_t value_pitch;
    int32_t segment_blocks;
    int64_t value_offset;  // bytes from a head's begin
    int64_t scale_offset;
    int64_t head_nbytes;
    int64_t block_nbytes;

    int64_t segment_tokens() const { return (int64_t)segment_blocks * block_size; }
};

static inline KVLayout kv_layout(int32_t dtype, int32_t num_kv_heads, int32_t head_dim, int32_t block_size) {
    const auto round_up = [](int32_t n) { return (n + WIDEST_VECTOR - 1) / WIDEST_VECTOR * WIDEST_VECTOR; };
    const int64_t element = dtype == SOL_KV_F32 ? 4 : dtype == SOL_KV_F16 ? 2 : 1;
    KVLayout kv{};
    kv.dtype = dtype;
    kv.num_kv_heads = num_kv_heads;
    kv.head_dim = head_dim;
    kv.block_size = block_size;
    kv.slots = round_up(block_size);
    kv.value_pitch = round_up(head_dim);
    kv.segment_blocks = SEGMENT_SLOTS / kv.slots;
    kv.value_offset = (int64_t)head_dim * kv.slots * element;
    kv.scale_offset = kv.value_offset + (int64_t)kv.slots * kv.value_pitch * element;
    kv.head_nbytes = kv.scale_offset + (dtype == SOL_KV_INT8 ? 2 * (int64_t)kv.slots * 4 : 0);
    kv.head_nbytes = (kv.head_nbytes + 63) / 64 * 64;
    kv.block_nbytes = kv.head_nbytes * num_kv_heads;
    return kv;
}

// Attention of some rows over one key/value head of one request. A row is one query head of one token; the `group`
// query heads that share the key/value head stand side by side: row r belongs to the token first_token + r / group,
// counted from the request's first. It sees the keys of that token and those before it, `window` of them at most.
struct AttentionRows {
    const KVLayout* kv;
    const uint8_t* layer;        // the layer's first block
    const int64_t* block_table;  // of the request
    int32_t kv_head;
    int32_t group;
    int32_t num_rows;  // up to ATTENTION_ROWS
    int32_t window;    // 0: none
    int64_t first_token;
    int32_t first_head;  // row 0 is query head first_head of the group
    float scale;
    float softcap;   // 0: none
    const float* q;  // [num_rows, head_dim], rotated
};

// Softmax numerators of some rows: out = acc / sum. A row that has seen no key yet has sum 0 and max -inf.
struct AttentionState {
    float* max;  // [rows]
    float* sum;  // [rows]
    float* acc;  // [rows, value_pitch]
};

constexpr int32_t ATTENTION_ROWS = 48;

// Floats of scratch that `attend` needs: scores of six rows and the state of one segment.
static inline size_t attention_scratch_floats(const KVLayout& kv) {
    return 6 * SEGMENT_SLOTS + 6 * (size_t)(kv.value_pitch + WIDEST_VECTOR);
}

struct AttentionKernels {
    // Writes a token's rotated key and its value (both [head_dim]) of one head; `head` is the head's part of a block.
    void (*write_kv)(const KVLayout& kv, uint8_t* head, int32_t slot, const float* key, const float* value);

    // Adds segments [segment_begin, segment_end) to the state, in order.
    void (*attend)(const AttentionRows& rows, int64_t segment_begin, int64_t segment_end, const AttentionState& state,
                   float* scratch);

    // Adds what was computed of later segments to the state of earlier ones: the same operations as in `attend`.
    void (*merge)(const KVLayout& kv, int64_t num_rows, const AttentionState& earlier, const AttentionState& later);

    // out [head_dim] = acc / sum of one row.
    void (*finish)(const KVLayout& kv, const AttentionState& state, int64_t row, float* out);
};

static inline void clear_state(const AttentionState& state, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; row++) {
        state.max[row] = -__builtin_inff();
        state.sum[row] = 0.0f;
    }
}

}  // namespace sol
