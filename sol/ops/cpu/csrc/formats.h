// Weight formats: what a block of each is, how packed bytes are laid out, and the scalar code that reads and writes
// them. Compiled for the architecture's baseline; `static inline` so that no instruction set's copy is linked into
// another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sol_cpu.h"

namespace sol {

static inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u;
    uint32_t mantissa = h & 0x3ffu;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
    } else {  // zero or subnormal: mantissa · 2^-24, exact
        const float value = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

// To nearest, ties to even.
static inline uint16_t f32_to_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));  // NaN, quiet
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {                                    // subnormal: the sum's last bit is 2^-24
        float shifted;
        memcpy(&shifted, &magnitude, sizeof shifted);
        shifted += 0.5f;
        uint32_t out;
        memcpy(&out, &shifted, sizeof out);
        return (uint16_t)(sign | (out - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

static inline bool f16_is_finite(uint16_t h) { return (h & 0x7c00u) != 0x7c00u; }

static inline uint16_t read_u16(const uint8_t* p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

// ---- The packed layout of quantised formats
//
// A group of R rows is a sequence of super-blocks; a super-block a header and some blocks of 32 columns; a block
//   codes   vectors of 4 R bytes. Byte 4 r + i of step j = 0..7 is the code of row r, column 4 j + i, so that one
//           vector instruction multiplies 4 columns of R rows. 8-bit codes: 8 vectors. Below: 4 vectors, step j in the
//           low and step j + 4 in the high half of each byte; then bit 4 of the codes (bit j of a byte belongs to
//           step j), or bits 4 and 5 in two vectors (bits 2 j, 2 j + 1 of the first belong to step j, of the second to
//           step j + 4)
//   params  arrays of R: for Q4_0, Q5_0, Q8_0 float16 scales; Q4_1, Q5_1 scales, then minima; Q4_K, Q5_K byte scales,
//           then byte minima; Q6_K int8 scales of the first, then of the last 16 columns
// Headers are arrays of R as well: Q4_K, Q5_K float16 d, then dmin; Q6_K float16 d; INT8 float32 scales; INT4 float32
// scales, then byte zero points. Codes are unsigned with an offset, except the signed 8-bit ones.
struct Layout {
    int bits;
    int header;            // bytes a row
    int params;            // bytes a row
    int blocks_per_super;  // 0: all of a row's; -1: a group's
};

constexpr int BLOCK = 32;
constexpr int MAX_GROUP_ROWS = 16;

constexpr Layout layout_of(int32_t format) {
    switch (format) {
        case SOL_Q4_0: return {4, 0, 2, 1};
        case SOL_Q4_1: return {4, 0, 4, 1};
        case SOL_Q5_0: return {5, 0, 2, 1};
        case SOL_Q5_1: return {5, 0, 4, 1};
        case SOL_Q8_0: return {8, 0, 2, 1};
        case SOL_Q4_K: return {4, 4, 2, 8};
        case SOL_Q5_K: return {5, 4, 2, 8};
        case SOL_Q6_K: return {6, 2, 2, 8};
        case SOL_INT8: return {8, 4, 0, 0};
        case SOL_INT4: return {4, 5, 0, -1};
        default: return {0, 0, 0, 0};
    }
}

// What a format is called and how its source lies in memory.
struct Format {
    int32_t id;
    const char* name;
    int block_cols;    // cols must be a multiple; INT4: of group_size instead
    int block_nbytes;  // source bytes of so many columns
    bool is_float;
};

const Format* find_format(int32_t id);  // null: no such format

struct MatrixShape {
    int32_t format;
    int32_t group_size;
    int64_t rows;
    int64_t cols;
};

int64_t blocks_per_super(const MatrixShape& shape);
int64_t group_nbytes(const MatrixShape& shape, int group_rows);

// Packs a matrix whose sizes are checked. Gives the first row whose scale is not finite (or whose INT4 zero point is
// not 0 to 15), or -1.
int64_t pack(const MatrixShape& shape, int group_rows, const uint8_t* data, const float* scales, const uint8_t* zeros,
             uint8_t* out);

// The first row of packed bytes that pack() would have refused, or -1.
int64_t check(const MatrixShape& shape, int group_rows, const uint8_t* packed);

// Row `row`, dequantised by the format's own rule in float32, out [cols].
void unpack_row(const MatrixShape& shape, int group_rows, const uint8_t* packed, int64_t row, float* out);

}  // namespace sol
