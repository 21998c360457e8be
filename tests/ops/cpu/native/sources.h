// Random weights of every format, and what they mean: an implementation of the formats' rules of its own, in double, that
// shares nothing with csrc/formats.cpp.
#pragma once

#include "formats.h"  // float16 conversions only
#include "harness.h"

namespace test {

struct FormatCase {
    int32_t format;
    const char* name;
    int32_t group_size;
    int64_t block_cols;    // cols must be a multiple
    int64_t source_cols;   // columns of `source_nbytes` of the source
    int64_t source_nbytes;
    bool is_float;
};

inline const std::vector<FormatCase>& all_formats() {
    static const std::vector<FormatCase> formats = {
        {SOL_F32, "F32", 0, 1, 1, 4, true},          {SOL_F16, "F16", 0, 1, 1, 2, true},
        {SOL_BF16, "BF16", 0, 1, 1, 2, true},        {SOL_Q4_0, "Q4_0", 0, 32, 32, 18, false},
        {SOL_Q4_1, "Q4_1", 0, 32, 32, 20, false},    {SOL_Q5_0, "Q5_0", 0, 32, 32, 22, false},
        {SOL_Q5_1, "Q5_1", 0, 32, 32, 24, false},    {SOL_Q8_0, "Q8_0", 0, 32, 32, 34, false},
        {SOL_Q4_K, "Q4_K", 0, 256, 256, 144, false}, {SOL_Q5_K, "Q5_K", 0, 256, 256, 176, false},
        {SOL_Q6_K, "Q6_K", 0, 256, 256, 210, false}, {SOL_INT8, "INT8", 0, 32, 1, 1, false},
        {SOL_INT4, "INT4 g32", 32, 32, 2, 1, false}, {SOL_INT4, "INT4 g64", 64, 64, 2, 1, false},
        {SOL_INT4, "INT4 g128", 128, 128, 2, 1, false},
    };
    return formats;
}

inline void put_f16(uint8_t* at, float value) {
    const uint16_t bits = sol::f32_to_f16(value);
    memcpy(at, &bits, 2);
}
inline double get_f16(const uint8_t* at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return (double)sol::f16_to_f32(bits);
}

// A weight as a checkpoint holds it.
struct Source {
    FormatCase format;
    int64_t rows, cols;
    Bytes data;
    std::vector<float> scales;
    std::vector<uint8_t> zeros;

    const float* scales_or_null() const { return scales.empty() ? nullptr : scales.data(); }
    const uint8_t* zeros_or_null() const { return zeros.empty() ? nullptr : zeros.data(); }
};

inline Source random_source(Random& random, const FormatCase& f, int64_t rows, int64_t cols) {
    Source s{f, rows, cols, Bytes(rows * cols / f.source_cols * f.source_nbytes), {}, {}};
    s.data.fill_random(random);
    uint8_t* p = s.data.data();
    const float size = 1.0f / sqrtf((float)cols);
    const auto scale = [&](float largest) { return random.uniform(-1.0f, 1.0f) * size / largest; };
    const int64_t units = rows * cols / f.source_cols;
    switch (f.format) {
        case SOL_F32:
            for (int64_t i = 0; i < units; i++) reinterpret_cast<float*>(p)[i] = scale(1);
            break;
        case SOL_F16:
            for (int64_t i = 0; i < units; i++) put_f16(p + 2 * i, scale(1));
            break;
        case SOL_BF16:
            for (int64_t i = 0; i < units; i++) {
                const float value = scale(1);
                memcpy(p + 2 * i, reinterpret_cast<const char*>(&value) + 2, 2);
            }
            break;
        case SOL_Q4_0:
        case SOL_Q5_0:
        case SOL_Q8_0:
            for (int64_t i = 0; i < units; i++) put_f16(p + i * f.source_nbytes, scale(f.format == SOL_Q8_0 ? 128 : 16));
            break;
        case SOL_Q4_1:
        case SOL_Q5_1:
            for (int64_t i = 0; i < units; i++) {
                put_f16(p + i * f.source_nbytes, scale(16));
                put_f16(p + i * f.source_nbytes + 2, scale(1));
            }
            break;
        case SOL_Q4_K:
        case SOL_Q5_K:
            for (int64_t i = 0; i < units; i++) {
                put_f16(p + i * f.source_nbytes, scale(16 * 63));
                put_f16(p + i * f.source_nbytes + 2, scale(63));
            }
            break;
        case SOL_Q6_K:
            for (int64_t i = 0; i < units; i++) put_f16(p + i * 210 + 208, scale(32 * 128));
            break;
        case SOL_INT8:
            for (int64_t i = 0; i < rows; i++) s.scales.push_back(scale(128));
            break;
        default:
            for (int64_t i = 0; i < rows * cols / f.group_size; i++) {
                s.scales.push_back(scale(16));
                s.zeros.push_back((uint8_t)random.below(16));
            }
    }
    return s;
}

// One weight is factor · code + minimum, exactly.
struct Weight {
    double product, minimum;
    double value() const { return product + minimum; }
};

inline Weight weight_at(const Source& s, int64_t row, int64_t col) {
    const FormatCase& f = s.format;
    const int64_t row_nbytes = s.cols / f.source_cols * f.source_nbytes;
    const uint8_t* p = s.data.data() + row * row_nbytes + col / f.source_cols * f.source_nbytes;
    const int i = (int)(col % f.source_cols);
    const auto nibble = [&](const uint8_t* codes) { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; };
    const auto fifth = [&](const uint8_t* bits) { return ((bits[i / 8] >> (i % 8)) & 1) << 4; };
    switch (f.format) {
        case SOL_F32: {
            float value;
            memcpy(&value, p, 4);
            return {value, 0};
        }
        case SOL_F16: return {get_f16(p), 0};
        case SOL_BF16: {
            const uint8_t bytes[4] = {0, 0, p[0], p[1]};
            float value;
            memcpy(&value, bytes, 4);
            return {value, 0};
        }
        case SOL_Q4_0: return {get_f16(p) * (nibble(p + 2) - 8), 0};
        case SOL_Q4_1: return {get_f16(p) * nibble(p + 4), get_f16(p + 2)};
        case SOL_Q5_0: return {get_f16(p) * ((nibble(p + 6) | fifth(p + 2)) - 16), 0};
        case SOL_Q5_1: return {get_f16(p) * (nibble(p + 8) | fifth(p + 4)), get_f16(p + 2)};
        case SOL_Q8_0: return {get_f16(p) * (int8_t)p[2 + i], 0};
        case SOL_Q4_K:
        case SOL_Q5_K: {
            const bool five = f.format == SOL_Q5_K;
            const int j = i / 32, l = i % 32;
            const uint8_t* k = p + 4;
            int scale, minimum;
            if (j < 4) {
                scale = k[j] & 63;
                minimum = k[j + 4] & 63;
            } else {
                scale = (k[j + 4] & 0xF) | ((k[j - 4] >> 6) << 4);
                minimum = (k[j + 4] >> 4) | ((k[j] >> 6) << 4);
            }
            const uint8_t* low = p + (five ? 48 : 16) + 32 * (j / 2);
            int code = j % 2 == 0 ? low[l] & 15 : low[l] >> 4;
            if (five) code += (p[16 + l] >> j & 1) * 16;
            return {get_f16(p) * scale * code, -get_f16(p + 2) * minimum};
        }
        case SOL_Q6_K: {
            const int half = i / 128, l = i % 32, quarter = i % 128 / 32;
            const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
            const int8_t* scales = reinterpret_cast<const int8_t*>(p + 192 + 8 * half);
            const uint8_t byte = low[l + 32 * (quarter % 2)];
            const int code = (quarter < 2 ? byte & 15 : byte >> 4) | ((high[l] >> (2 * quarter)) & 3) << 4;
            return {get_f16(p + 208) * scales[2 * quarter + l / 16] * (code - 32), 0};
        }
        case SOL_INT8: return {(double)s.scales[(size_t)row] * (int8_t)*p, 0};
        default: {
            const size_t group = (size_t)((row * s.cols + col) / f.group_size);
            const int code = i == 0 ? *p & 15 : *p >> 4;
            return {(double)s.scales[group] * (code - s.zeros[group]), 0};
        }
    }
}

// A weight packed for an instruction set.
struct PackedWeight {
    Bytes data{0};
    SolSegment segment{};
};

inline PackedWeight pack_weight(int32_t isa, const Source& s) {
    const int64_t nbytes = sol_packed_nbytes(isa, s.format.format, s.rows, s.cols, s.format.group_size);
    check(nbytes > 0, "%s: sol_packed_nbytes [%" PRId64 ", %" PRId64 "]: %s", s.format.name, s.rows, s.cols,
          sol_last_error());
    PackedWeight w;
    w.data = Bytes(nbytes);
    const int32_t code =
        sol_pack(isa, s.format.format, s.rows, s.cols, s.format.group_size, s.data.data(), s.data.nbytes(),
                 s.scales_or_null(), (int64_t)s.scales.size(), s.zeros_or_null(), (int64_t)s.zeros.size(),
                 w.data.data(), nbytes);
    check(code == SOL_OK, "%s: sol_pack: %s", s.format.name, sol_last_error());
    check(sol_check_packed(isa, s.format.format, s.rows, s.cols, s.format.group_size, w.data.data(), nbytes) == SOL_OK,
          "%s: what was packed is refused: %s", s.format.name, sol_last_error());
    w.segment = {s.format.format, s.format.group_size, s.rows, s.cols, w.data.data(), nbytes, nullptr};
    return w;
}

}  // namespace test
