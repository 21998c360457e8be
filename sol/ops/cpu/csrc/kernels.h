// What each instruction set implements: a table of functions, filled by kernels_<isa>.cpp, each compiled with its own
// flags. Code outside the table uses no instruction beyond the architecture's baseline. Everything is compiled with
// -ffp-contract=off: a multiplication and an addition are one rounding only where the code says fma, so that copies of
// one formula give the same bits wherever they are instantiated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sol {

// Sums of a block's codes, for formats whose codes have an offset or a minimum.
struct BlockSums {
    int16_t half[2];  // of the first and the last 16 codes
    float scaled;     // scale · (half[0] + half[1])
};

// Rows in int8 blocks of 32 columns: x ≈ scale · code, |code| <= 127. [tokens, cols] and twice [tokens, cols / 32].
struct QuantizedRows {
    int8_t* codes;
    float* scales;
    BlockSums* sums;

    QuantizedRows from(int64_t token, int64_t cols) const {
        return {codes + token * cols, scales + token * (cols / 32), sums + token * (cols / 32)};
    }
};

// Activations of some tokens. A block that holds a NaN or an infinity has a NaN for its scale, so what is computed from
// it is NaN. Every quantised weight format consumes this one form. cols is a multiple of 32.
//
// One value far above the others of its block leaves these few codes to be told apart by. The blocks of which that is
// true, about a tenth, are refined: what their codes leave over is quantised once more (`rest`), and a product adds
// both. It brings the logits several times closer to those of unquantised activations.
struct QuantizedActivations {
    QuantizedRows whole;
    QuantizedRows rest;  // written and read where `refined` says
    int32_t* refined;    // [tokens, 1 + cols / 32]: of each token how many blocks are, and which, ascending
    int64_t cols;

    QuantizedActivations from(int64_t token) const {
        return {whole.from(token, cols), rest.from(token, cols), refined + token * (1 + cols / 32), cols};
    }
};

// Bytes that `tokens` quantised rows take, and the arrays laid out in such a buffer (4-byte aligned).
static inline size_t quantized_nbytes(int64_t tokens, int64_t cols) {
    const size_t blocks = (size_t)tokens * (size_t)(cols / 32);
    return blocks * (2 * (sizeof(BlockSums) + sizeof(float) + 32) + sizeof(int32_t)) + (size_t)tokens * sizeof(int32_t);
}

static inline QuantizedActivations quantized_in(void* buffer, int64_t tokens, int64_t cols) {
    const int64_t blocks = tokens * (cols / 32);
    BlockSums* sums = (BlockSums*)buffer;
    float* scales = (float*)(sums + 2 * blocks);
    int32_t* refined = (int32_t*)(scales + 2 * blocks);
    int8_t* codes = (int8_t*)(refined + blocks + tokens);
    return {{codes, scales, sums}, {codes + 32 * blocks, scales + blocks, sums + blocks}, refined, cols};
}

// A packed weight. `data` holds ceil(rows / group_rows) groups of group_rows interleaved rows, each group_nbytes long;
// rows past the end are zero.
struct PackedMatrix {
    int32_t format;
    int32_t group_size;
    int64_t rows;
    int64_t cols;
    int64_t group_nbytes;
    const uint8_t* data;
    const int32_t* perm;  // null or [cols]
};

struct Kernels {
    int32_t isa;
    int32_t group_rows;  // rows of a packed group

    // x [cols] of one token -> its row of q (token index `row`). x may be permuted through perm (null: not).
    void (*quantize)(const float* x, const int32_t* perm, int64_t row, const QuantizedActivations& q);

    // y[t * y_stride + r] = sum over columns, for tokens [0, num_tokens) and all rows r of groups [group_begin,
    // group_end) that exist (r counts from the matrix's first row). Exactly one of x (float formats; [tokens, cols])
    // and q is used. The result of a (token, row) does not depend on num_tokens, on the range of groups or on
    // neighbours: one fixed order of operations. `scratch`: linear_scratch_nbytes of the calling thread's own.
    void (*linear)(const PackedMatrix& w, const float* x, const QuantizedActivations* q, int64_t num_tokens,
                   int64_t group_begin, int64_t group_end, float* y, int64_t y_stride, void* scratch);

    void (*unpack_row)(const PackedMatrix& w, int64_t row, float* out);  // [cols]

    // Everything below: one row each, any n >= 1, no alignment asked for.
    void (*rms_norm)(const float* x, const float* weight, float eps, float offset, int64_t n, float* out);
    void (*add)(float* x, const float* y, int64_t n);                              // x += y
    void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);   // silu(gate) * up
    void (*gelu_mul)(const float* gate, const float* up, int64_t n, float* out);   // gelu(gate) * up, by tanh
    void (*softcap)(float* x, float limit, int64_t n);                             // x = limit * tanh(x / limit)
    void (*rope)(float* x, const float* cos, const float* sin, int64_t head_dim);  // in place, one head

    // Attention: see attention.h.
    const struct AttentionKernels* attention;
};

size_t linear_scratch_nbytes(int64_t cols);

const Kernels* kernels_for(int32_t isa);  // null where it is not built in

// Filled by kernels_<isa>.cpp, each on its own architecture.
extern const Kernels KERNELS_PORTABLE, KERNELS_NEON, KERNELS_AVX2, KERNELS_AVX512, KERNELS_AVX512VNNI;

bool is_float_format(int32_t format);  // F32, F16, BF16: consumed with float activations

}  // namespace sol
