#include "formats.h"

namespace sol {

static const Format FORMATS[] = {
    {SOL_F32, "F32", 1, 4, true},        {SOL_F16, "F16", 1, 2, true},        {SOL_BF16, "BF16", 1, 2, true},
    {SOL_Q4_0, "Q4_0", 32, 18, false},   {SOL_Q4_1, "Q4_1", 32, 20, false},   {SOL_Q5_0, "Q5_0", 32, 22, false},
    {SOL_Q5_1, "Q5_1", 32, 24, false},   {SOL_Q8_0, "Q8_0", 32, 34, false},   {SOL_Q4_K, "Q4_K", 256, 144, false},
    {SOL_Q5_K, "Q5_K", 256, 176, false}, {SOL_Q6_K, "Q6_K", 256, 210, false}, {SOL_INT8, "INT8", 32, 32, false},
    {SOL_INT4, "INT4", 32, 16, false},
};

const Format* find_format(int32_t id) {
    for (const Format& format : FORMATS)
        if (format.id == id) return &format;
    return nullptr;
}

int64_t blocks_per_super(const MatrixShape& shape) {
    const int blocks = layout_of(shape.format).blocks_per_super;
    return blocks > 0 ? blocks : (blocks == 0 ? shape.cols : shape.group_size) / BLOCK;
}

int64_t group_nbytes(const MatrixShape& shape, int group_rows) {
    const Format* format = find_format(shape.format);
    if (format->is_float) return shape.cols * format->block_nbytes * group_rows;
    const Layout layout = layout_of(shape.format);
    const int64_t blocks = shape.cols / BLOCK;
    const int64_t supers = blocks / blocks_per_super(shape);
    return (supers * layout.header + blocks * (4 * layout.bits + layout.params)) * group_rows;
}

// ---- Source blocks

namespace {

// One row's 32 columns, as the packed layout keeps them.
struct Block {
    uint8_t codes[BLOCK];  // 8-bit codes: two's complement
    uint8_t params[4];
};

uint16_t high_bit(const uint8_t* bits, int column) { return (uint16_t)((bits[column / 8] >> (column % 8)) & 1); }

// ggml's 6-bit scales and minima of the 8 blocks of a Q4_K or Q5_K super-block, in 12 bytes.
void read_k_scales(const uint8_t* p, int j, uint8_t* scale, uint8_t* min) {
    if (j < 4) {
        *scale = p[j] & 63;
        *min = p[j + 4] & 63;
    } else {
        *scale = (uint8_t)((p[j + 4] & 15) | ((p[j - 4] >> 6) << 4));
        *min = (uint8_t)((p[j + 4] >> 4) | ((p[j] >> 6) << 4));
    }
}

// Block `b` of a row. `row` is the row's first byte.
void read_block(int32_t format, const uint8_t* row, int64_t b, Block* out) {
    uint8_t* codes = out->codes;
    switch (format) {
        case SOL_Q4_0:
        case SOL_Q4_1:
        case SOL_Q5_0:
        case SOL_Q5_1: {
            const Format* f = find_format(format);
            const Layout layout = layout_of(format);
            const uint8_t* p = row + b * f->block_nbytes;
            memcpy(out->params, p, (size_t)layout.params);
            p += layout.params;
            const uint8_t* high = p;
            if (layout.bits == 5) p += 4;
            for (int i = 0; i < 16; i++) {
                codes[i] = p[i] & 15;
                codes[i + 16] = p[i] >> 4;
            }
            if (layout.bits == 5)
                for (int i = 0; i < BLOCK; i++) codes[i] |= (uint8_t)(high_bit(high, i) << 4);
            return;
        }
        case SOL_Q8_0: {
            const uint8_t* p = row + b * 34;
            memcpy(out->params, p, 2);
            memcpy(codes, p + 2, BLOCK);
            return;
        }
        case SOL_Q4_K:
        case SOL_Q5_K: {
            const bool five = format == SOL_Q5_K;
            const uint8_t* p = row + (b / 8) * (five ? 176 : 144);
            const int j = (int)(b % 8);
            read_k_scales(p + 4, j, &out->params[0], &out->params[1]);
            const uint8_t* high = p + 16;
            const uint8_t* low = p + (five ? 48 : 16) + (j / 2) * BLOCK;
            for (int i = 0; i < BLOCK; i++) {
                codes[i] = (j % 2) ? low[i] >> 4 : low[i] & 15;
                if (five) codes[i] |= (uint8_t)(((high[i] >> j) & 1) << 4);
            }
            return;
        }
        case SOL_Q6_K: {
            const uint8_t* p = row + (b / 8) * 210;
            const int j = (int)(b % 8), k = j % 4;
            const uint8_t* low = p + (j / 4) * 64 + (k % 2) * BLOCK;
            const uint8_t* high = p + 128 + (j / 4) * BLOCK;
            for (int i = 0; i < BLOCK; i++) {
                const int nibble = k < 2 ? low[i] & 15 : low[i] >> 4;
                codes[i] = (uint8_t)(nibble | (((high[i] >> (2 * k)) & 3) << 4));
            }
            memcpy(out->params, p + 192 + 2 * j, 2);
            return;
        }
        case SOL_INT8: memcpy(codes, row + b * BLOCK, BLOCK); return;
        case SOL_INT4:
            for (int i = 0; i < BLOCK / 2; i++) {
                codes[2 * i] = row[b * 16 + i] & 15;
                codes[2 * i + 1] = row[b * 16 + i] >> 4;
            }
            return;
        default: return;
    }
}

// ---- Packed blocks

uint32_t read_u32(const uint8_t* p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

void write_codes(uint8_t* block, int bits, int group_rows, int r, const uint8_t* codes) {
    const int vector = 4 * group_rows;
    uint8_t* out = block + 4 * r;
    if (bits == 8) {
        for (int j = 0; j < 8; j++) memcpy(out + j * vector, codes + 4 * j, 4);
        return;
    }
    for (int j = 0; j < 4; j++) {
        const uint32_t word =
            (read_u32(codes + 4 * j) & 0x0f0f0f0fu) | ((read_u32(codes + 4 * j + 16) & 0x0f0f0f0fu) << 4);
        memcpy(out + j * vector, &word, 4);
    }
    if (bits == 5) {
        uint32_t high = 0;
        for (int j = 0; j < 8; j++) high |= ((read_u32(codes + 4 * j) >> 4) & 0x01010101u) << j;
        memcpy(out + 4 * vector, &high, 4);
    } else if (bits == 6) {
        uint32_t high[2] = {0, 0};
        for (int j = 0; j < 8; j++) high[j / 4] |= ((read_u32(codes + 4 * j) >> 4) & 0x03030303u) << (2 * (j % 4));
        memcpy(out + 4 * vector, &high[0], 4);
        memcpy(out + 5 * vector, &high[1], 4);
    }
}

void read_codes(const uint8_t* block, int bits, int group_rows, int r, uint8_t* codes) {
    const int vector = 4 * group_rows;
    const uint8_t* in = block + 4 * r;
    for (int j = 0; j < 8; j++) {
        uint32_t word;
        if (bits == 8) {
            word = read_u32(in + j * vector);
        } else {
            word = (read_u32(in + (j % 4) * vector) >> (j / 4 * 4)) & 0x0f0f0f0fu;
            if (bits == 5) word |= ((read_u32(in + 4 * vector) >> j) & 0x01010101u) << 4;
            if (bits == 6) word |= ((read_u32(in + (4 + j / 4) * vector) >> (2 * (j % 4))) & 0x03030303u) << 4;
        }
        memcpy(codes + 4 * j, &word, 4);
    }
}

// Arrays of group_rows elements, one after the other.
template <class T>
void write_element(uint8_t* arrays, int group_rows, int index, int r, const T& value) {
    memcpy(arrays + ((size_t)index * (size_t)group_rows + (size_t)r) * sizeof(T), &value, sizeof(T));
}
template <class T>
T read_element(const uint8_t* arrays, int group_rows, int index, int r) {
    T value;
    memcpy(&value, arrays + ((size_t)index * (size_t)group_rows + (size_t)r) * sizeof(T), sizeof(T));
    return value;
}

bool is_finite(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

bool has_f16_params(int32_t format) { return format >= SOL_Q4_0 && format <= SOL_Q8_0; }
bool has_byte_min(int32_t format) { return format == SOL_Q4_K || format == SOL_Q5_K; }

void write_params(int32_t format, uint8_t* params, int group_rows, int r, const Block& block) {
    const int nbytes = layout_of(format).params;
    if (has_f16_params(format)) {
        for (int i = 0; i < nbytes / 2; i++) write_element(params, group_rows, i, r, read_u16(block.params + 2 * i));
    } else {
        for (int i = 0; i < nbytes; i++) write_element(params, group_rows, i, r, block.params[i]);
    }
}

bool params_are_valid(int32_t format, const uint8_t* params, int group_rows, int r) {
    const int nbytes = layout_of(format).params;
    if (has_f16_params(format)) {
        for (int i = 0; i < nbytes / 2; i++)
            if (!f16_is_finite(read_element<uint16_t>(params, group_rows, i, r))) return false;
    } else if (has_byte_min(format)) {
        for (int i = 0; i < nbytes; i++)
            if (read_element<uint8_t>(params, group_rows, i, r) > 63) return false;
    }
    return true;
}

bool header_is_valid(int32_t format, const uint8_t* header, int group_rows, int r) {
    switch (format) {
        case SOL_Q4_K:
        case SOL_Q5_K:
            return f16_is_finite(read_element<uint16_t>(header, group_rows, 0, r)) &&
                   f16_is_finite(read_element<uint16_t>(header, group_rows, 1, r));
        case SOL_Q6_K: return f16_is_finite(read_element<uint16_t>(header, group_rows, 0, r));
        case SOL_INT8: return is_finite(read_element<float>(header, group_rows, 0, r));
        case SOL_INT4:
            return is_finite(read_element<float>(header, group_rows, 0, r)) && header[4 * group_rows + r] <= 15;
        default: return true;
    }
}

template <class T>
void pack_floats(const MatrixShape& shape, int group_rows, const uint8_t* data, uint8_t* out) {
    for (int64_t row = 0; row < shape.rows; row++) {
        const uint8_t* in = data + row * shape.cols * (int64_t)sizeof(T);
        uint8_t* group = out + row / group_rows * group_rows * shape.cols * (int64_t)sizeof(T);
        const int64_t r = row % group_rows;
        for (int64_t c = 0; c < shape.cols; c++)
            memcpy(group + (c * group_rows + r) * (int64_t)sizeof(T), in + c * (int64_t)sizeof(T), sizeof(T));
    }
}

}  // namespace

// ---- Whole matrices

int64_t pack(const MatrixShape& shape, int group_rows, const uint8_t* data, const float* scales, const uint8_t* zeros,
             uint8_t* out) {
    const int64_t groups = (shape.rows + group_rows - 1) / group_rows;
    const int64_t nbytes = group_nbytes(shape, group_rows);
    if (shape.rows % group_rows != 0) memset(out + (groups - 1) * nbytes, 0, (size_t)nbytes);
    switch (shape.format) {
        case SOL_F32: pack_floats<uint32_t>(shape, group_rows, data, out); return -1;
        case SOL_F16:
        case SOL_BF16: pack_floats<uint16_t>(shape, group_rows, data, out); return -1;
        default: break;
    }
    const Format* format = find_format(shape.format);
    const Layout layout = layout_of(shape.format);
    const int64_t per_super = blocks_per_super(shape), supers = shape.cols / BLOCK / per_super;
    const int64_t row_nbytes = shape.cols / format->block_cols * format->block_nbytes;
    for (int64_t row = 0; row < shape.rows; row++) {
        const uint8_t* in = data + row * row_nbytes;
        uint8_t* p = out + row / group_rows * nbytes;
        const int r = (int)(row % group_rows);
        for (int64_t s = 0; s < supers; s++) {
            switch (shape.format) {
                case SOL_Q4_K:
                case SOL_Q5_K:
                    write_element(p, group_rows, 0, r, read_u16(in + s * format->block_nbytes));
                    write_element(p, group_rows, 1, r, read_u16(in + s * format->block_nbytes + 2));
                    break;
                case SOL_Q6_K: write_element(p, group_rows, 0, r, read_u16(in + s * 210 + 208)); break;
                case SOL_INT8: write_element(p, group_rows, 0, r, scales[row]); break;
                case SOL_INT4:
                    write_element(p, group_rows, 0, r, scales[row * supers + s]);
                    p[4 * group_rows + r] = zeros ? zeros[row * supers + s] : 8;
                    break;
                default: break;
            }
            if (!header_is_valid(shape.format, p, group_rows, r)) return row;
            p += layout.header * group_rows;
            for (int64_t b = s * per_super; b < (s + 1) * per_super; b++) {
                Block block;
                read_block(shape.format, in, b, &block);
                write_codes(p, layout.bits, group_rows, r, block.codes);
                p += 4 * layout.bits * group_rows;
                write_params(shape.format, p, group_rows, r, block);
                if (!params_are_valid(shape.format, p, group_rows, r)) return row;
                p += layout.params * group_rows;
            }
        }
    }
    return -1;
}

int64_t check(const MatrixShape& shape, int group_rows, const uint8_t* packed) {
    if (find_format(shape.format)->is_float) return -1;
    const Layout layout = layout_of(shape.format);
    const int64_t per_super = blocks_per_super(shape), supers = shape.cols / BLOCK / per_super;
    const int64_t groups = (shape.rows + group_rows - 1) / group_rows;
    const uint8_t* p = packed;
    for (int64_t group = 0; group < groups; group++) {
        for (int64_t s = 0; s < supers; s++) {
            for (int r = 0; r < group_rows; r++)
                if (!header_is_valid(shape.format, p, group_rows, r)) return group * group_rows + r;
            p += layout.header * group_rows;
            for (int64_t b = 0; b < per_super; b++) {
                p += 4 * layout.bits * group_rows;
                for (int r = 0; r < group_rows; r++)
                    if (!params_are_valid(shape.format, p, group_rows, r)) return group * group_rows + r;
                p += layout.params * group_rows;
            }
        }
    }
    return -1;
}

void unpack_row(const MatrixShape& shape, int group_rows, const uint8_t* packed, int64_t row, float* out) {
    const uint8_t* p = packed + row / group_rows * group_nbytes(shape, group_rows);
    const int r = (int)(row % group_rows);
    const Format* format = find_format(shape.format);
    if (format->is_float) {
        for (int64_t c = 0; c < shape.cols; c++) {
            const uint8_t* element = p + (c * group_rows + r) * format->block_nbytes;
            if (shape.format == SOL_F32) {
                memcpy(&out[c], element, sizeof(float));
            } else if (shape.format == SOL_F16) {
                out[c] = f16_to_f32(read_u16(element));
            } else {
                const uint32_t bits = (uint32_t)read_u16(element) << 16;
                memcpy(&out[c], &bits, sizeof bits);
            }
        }
        return;
    }
    const Layout layout = layout_of(shape.format);
    const int64_t per_super = blocks_per_super(shape), supers = shape.cols / BLOCK / per_super;
    for (int64_t s = 0; s < supers; s++) {
        const uint8_t* header = p;
        p += layout.header * group_rows;
        for (int64_t b = 0; b < per_super; b++) {
            uint8_t codes[BLOCK];
            read_codes(p, layout.bits, group_rows, r, codes);
            p += 4 * layout.bits * group_rows;
            const uint8_t* params = p;
            p += layout.params * group_rows;
            // w = scale[half] · (code - offset) + min
            float scale[2], min = 0.0f;
            int offset = 0;
            const bool has_min = has_f16_params(shape.format) ? layout.params == 4 : has_byte_min(shape.format);
            switch (shape.format) {
                case SOL_INT8: scale[0] = read_element<float>(header, group_rows, 0, r); break;
                case SOL_INT4:
                    scale[0] = read_element<float>(header, group_rows, 0, r);
                    offset = header[4 * group_rows + r];
                    break;
                case SOL_Q4_K:
                case SOL_Q5_K:
                    scale[0] = f16_to_f32(read_element<uint16_t>(header, group_rows, 0, r)) *
                               (float)read_element<uint8_t>(params, group_rows, 0, r);
                    min = -(f16_to_f32(read_element<uint16_t>(header, group_rows, 1, r)) *
                            (float)read_element<uint8_t>(params, group_rows, 1, r));
                    break;
                case SOL_Q6_K: scale[0] = f16_to_f32(read_element<uint16_t>(header, group_rows, 0, r)); break;
                default:
                    scale[0] = f16_to_f32(read_element<uint16_t>(params, group_rows, 0, r));
                    if (layout.params == 4) min = f16_to_f32(read_element<uint16_t>(params, group_rows, 1, r));
                    break;
            }
            scale[1] = scale[0];
            if (shape.format == SOL_Q6_K)
                for (int h = 0; h < 2; h++) scale[h] *= (float)read_element<int8_t>(params, group_rows, h, r);
            if (shape.format == SOL_Q4_0) offset = 8;
            if (shape.format == SOL_Q5_0) offset = 16;
            if (shape.format == SOL_Q6_K) offset = 32;
            for (int i = 0; i < BLOCK; i++) {
                const int code = layout.bits == 8 ? (int8_t)codes[i] : codes[i];
                const float w = scale[i / 16] * (float)(code - offset);
                *out++ = has_min ? w + min : w;  // without: a negative zero stays one
            }
        }
    }
}

}  // namespace sol
