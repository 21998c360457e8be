// Quantising, projecting, unpacking and the small kernels, against double precision and against each other.
#pragma once

#include "sources.h"

namespace test {

struct Shape {
    int64_t rows, cols;
};

// A row of activations as the kernels quantise it, computed one by one. Only correctly rounded operations, so the
// kernels' codes, scales and sums are the same in every bit.
struct QuantizedBlock {
    int8_t codes[32];
    float scale;
    sol::BlockSums sums;
};

inline QuantizedBlock quantize_block_reference(const float* x) {
    QuantizedBlock out{};
    float amax = 0.0f;
    bool finite = true;
    for (int i = 0; i < 32; i++) {
        finite = finite && std::isfinite(x[i]);
        amax = fmaxf(amax, fabsf(x[i]));
    }
    out.scale = !finite ? NAN : amax < 1e-35f ? 0.0f : amax / 127.0f;
    const float inverse = out.scale > 0.0f ? 1.0f / out.scale : 0.0f;
    int total[2] = {0, 0};
    for (int i = 0; i < 32; i++) {
        out.codes[i] = finite ? (int8_t)nearbyintf(x[i] * inverse) : (int8_t)0;
        total[i / 16] += out.codes[i];
    }
    out.sums = {{(int16_t)total[0], (int16_t)total[1]}, out.scale * (float)(total[0] + total[1])};
    return out;
}

// Block b of a row; whether it is refined, and then what the codes leave over.
inline bool quantize_reference(const float* x, const int32_t* perm, int64_t b, QuantizedBlock* whole,
                               QuantizedBlock* rest) {
    float in[32];
    int energy = 0;
    for (int i = 0; i < 32; i++) in[i] = x[perm != nullptr ? perm[32 * b + i] : 32 * b + i];
    *whole = quantize_block_reference(in);
    for (const int8_t code : whole->codes) energy += code * code;
    if (!(whole->scale > 0.0f) || energy * 4.5 * 4.5 >= 32.0 * 127 * 127) return false;
    for (int i = 0; i < 32; i++) {
        volatile float product = whole->scale * (float)whole->codes[i];  // rounded before it is taken off
        in[i] -= product;
    }
    *rest = quantize_block_reference(in);
    return true;
}

inline bool same_block(const sol::QuantizedRows& rows, int64_t b, const QuantizedBlock& expected) {
    const sol::BlockSums& sums = rows.sums[b];
    bool good = memcmp(rows.codes + 32 * b, expected.codes, 32) == 0;
    good = good && sums.half[0] == expected.sums.half[0] && sums.half[1] == expected.sums.half[1];
    if (std::isnan(expected.scale)) return good && std::isnan(rows.scales[b]) && std::isnan(sums.scaled);
    return good && rows.scales[b] == expected.scale && sums.scaled == expected.sums.scaled;
}

inline void check_quantize(const sol::Kernels& kernels, Random& random) {
    for (const int64_t cols : {32, 64, 96, 576}) {
        constexpr int64_t tokens = 8;
        Bytes x = random_floats(random, tokens * cols, 3.0f);
        for (int64_t i = 0; i < cols; i++) {
            x.floats()[1 * cols + i] = 0.0f;
            x.floats()[2 * cols + i] *= 1e-38f;  // subnormal
            x.floats()[3 * cols + i] *= 1e37f;
            x.floats()[4 * cols + i] = (float)(i % 255 - 127) * 0.5f;  // ties
        }
        x.floats()[5 * cols + 7] = NAN;
        x.floats()[6 * cols + cols - 1] = -INFINITY;
        std::vector<int32_t> perm((size_t)cols);
        for (int32_t i = 0; i < (int32_t)cols; i++) perm[(size_t)i] = (int32_t)(((int64_t)i * 5 + 3) % cols);
        if (cols % 5 == 0) perm.clear();
        for (const int32_t* p : {(const int32_t*)nullptr, perm.empty() ? nullptr : (const int32_t*)perm.data()}) {
            Bytes buffer((int64_t)sol::quantized_nbytes(tokens, cols));
            const sol::QuantizedActivations q = sol::quantized_in(buffer.data(), tokens, cols);
            for (int64_t t = 0; t < tokens; t++) {
                kernels.quantize(x.floats() + t * cols, p, t, q);
                const sol::QuantizedActivations got = q.from(t);
                bool good = true;
                int32_t refined = 0;
                for (int64_t b = 0; b < cols / 32; b++) {
                    QuantizedBlock whole, rest;
                    const bool twice = quantize_reference(x.floats() + t * cols, p, b, &whole, &rest);
                    good = good && same_block(got.whole, b, whole);
                    if (twice) good = good && got.refined[++refined] == b && same_block(got.rest, b, rest);
                }
                good = good && got.refined[0] == refined;
                check(good, "%s: quantize: token %" PRId64 " of %" PRId64 " columns", isa_name(kernels.isa), t, cols);
            }
        }
    }
}

// Everything of one matrix on one instruction set. Returns a digest of what was unpacked, the same on all.
inline void check_matrix(const sol::Kernels& kernels, const Source& source, Random& random, int64_t tokens) {
    const char* isa = isa_name(kernels.isa);
    const char* name = source.format.name;
    const int64_t rows = source.rows, cols = source.cols;
    const PackedWeight packed = pack_weight(kernels.isa, source);

    std::vector<int64_t> ids;
    for (int64_t row = rows; row-- > 0;) ids.push_back(row);
    Bytes unpacked(rows * cols * 4);
    check(sol_unpack_rows(kernels.isa, &packed.segment, ids.data(), rows, unpacked.floats()) == SOL_OK, "%s %s: unpack: %s",
          isa, name, sol_last_error());
    bool good = true;
    std::vector<double> weights((size_t)(rows * cols)), sizes((size_t)(rows * cols));
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t col = 0; col < cols; col++) {
            const Weight w = weight_at(source, row, col);
            const double got = (double)unpacked.floats()[(rows - 1 - row) * cols + col];
            const double size = fabs(w.product) + fabs(w.minimum);
            // Two products and a sum, each rounded to float.
            good = good && fabs(got - w.value()) <= 0x1p-22 * size;
            weights[(size_t)(row * cols + col)] = w.value();
            sizes[(size_t)(row * cols + col)] = size;
        }
    }
    check(good, "%s %s: unpacked [%" PRId64 ", %" PRId64 "] differs from the format's rule", isa, name, rows, cols);

    Bytes x = random_floats(random, tokens * cols, 2.0f);
    std::vector<float> bias((size_t)rows);
    for (float& b : bias) b = random.uniform(-1, 1);
    const SolLinear linear = {1, 0, &packed.segment, bias.data()};
    Bytes y(tokens * rows * 4);
    if (!check(sol_linear(kernels.isa, &linear, x.floats(), tokens, y.floats()) == SOL_OK, "%s %s: sol_linear: %s", isa,
               name, sol_last_error())) {
        return;
    }

    // Against double precision. An output is a chain of fma over the columns (float formats) or of at most two a block
    // of 32, refined ones twice, whose integer dot product is exact; a factor has at most three roundings.
    std::vector<double> in((size_t)cols);
    const double roundings = source.format.is_float ? 2.0 * (double)cols : 4.0 * (double)(cols / 32) + 4.0;
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t c = 0; c < cols; c++) in[(size_t)c] = (double)x.floats()[t * cols + c];
        for (int64_t b = 0; b < (source.format.is_float ? 0 : cols / 32); b++) {
            QuantizedBlock whole, rest;
            const bool twice = quantize_reference(x.floats() + t * cols, nullptr, b, &whole, &rest);
            for (int i = 0; i < 32; i++) {
                in[(size_t)(32 * b + i)] = (double)whole.scale * whole.codes[i];
                if (twice) in[(size_t)(32 * b + i)] += (double)rest.scale * rest.codes[i];
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            double exact = (double)bias[(size_t)r], size = fabs(exact);
            const double *weight = weights.data() + r * cols, *magnitude = sizes.data() + r * cols, *input = in.data();
            for (int64_t c = 0; c < cols; c++) {
                exact += weight[c] * input[c];
                size += magnitude[c] * fabs(input[c]);
            }
            const double got = (double)y.floats()[t * rows + r];
            if (!check(fabs(got - exact) <= 0x1p-23 * (roundings + 4) * size,
                       "%s %s [%" PRId64 ", %" PRId64 "] token %" PRId64 " row %" PRId64 ": %.9g, exactly %.9g", isa, name,
                       rows, cols, t, r, got, exact)) {
                return;
            }
        }
    }

    // The same bits for any number of tokens, from any token on.
    for (int64_t n = 1; n <= tokens; n++) {
        const int64_t first = random.below(tokens - n + 1);
        Bytes some(n * rows * 4);
        sol_linear(kernels.isa, &linear, x.floats() + first * cols, n, some.floats());
        check(same_bits(some.floats(), y.floats() + first * rows, n * rows),
              "%s %s [%" PRId64 ", %" PRId64 "]: tokens %" PRId64 " to %" PRId64 " of %" PRId64 " differ when alone", isa,
              name, rows, cols, first, first + n, tokens);
    }

    // The same bits for any range of row groups, into rows further apart; what lies between is left alone.
    const int64_t groups = (rows + kernels.group_rows - 1) / kernels.group_rows, stride = rows + 3;
    Bytes scratch((int64_t)sol::linear_scratch_nbytes(cols)), apart(((tokens - 1) * stride + rows) * 4);
    Bytes buffer((int64_t)sol::quantized_nbytes(tokens, cols));
    const sol::QuantizedActivations q = sol::quantized_in(buffer.data(), tokens, cols);
    if (!source.format.is_float)
        for (int64_t t = 0; t < tokens; t++) kernels.quantize(x.floats() + t * cols, nullptr, t, q);
    const sol::PackedMatrix matrix = {source.format.format, source.format.group_size, rows,   cols,
                                      packed.segment.packed_nbytes / groups, packed.data.data(), nullptr};
    for (int64_t i = 0; i < apart.nbytes() / 4; i++) apart.floats()[i] = 12345.0f;
    for (int64_t g = 0; g < groups;) {
        const int64_t end = g + 1 + random.below(groups - g);
        kernels.linear(matrix, source.format.is_float ? x.floats() : nullptr, source.format.is_float ? nullptr : &q, tokens,
                       g, end, apart.floats(), stride, scratch.data());
        g = end;
    }
    good = true;
    for (int64_t t = 0; t < tokens; t++) {
        float* row = apart.floats() + t * stride;
        for (int64_t i = rows; i < stride && t + 1 < tokens; i++) good = good && row[i] == 12345.0f;
        kernels.add(row, bias.data(), rows);
        good = good && same_bits(row, y.floats() + t * rows, rows);
    }
    check(good, "%s %s [%" PRId64 ", %" PRId64 "]: ranges of row groups differ", isa, name, rows, cols);

    // A NaN in one token is NaN in its outputs, and in no other's.
    if (tokens > 1) {
        Bytes poisoned(tokens * cols * 4), out(tokens * rows * 4);
        memcpy(poisoned.data(), x.data(), (size_t)x.nbytes());
        poisoned.floats()[cols + random.below(cols)] = random.one_in(2) ? NAN : INFINITY;
        sol_linear(kernels.isa, &linear, poisoned.floats(), tokens, out.floats());
        good = true;
        for (int64_t r = 0; r < rows; r++) good = good && !std::isfinite(out.floats()[rows + r]);
        check(good, "%s %s: a token that is not finite has finite outputs", isa, name);
        check(same_bits(out.floats(), y.floats(), rows) &&
                  same_bits(out.floats() + 2 * rows, y.floats() + 2 * rows, (tokens - 2) * rows),
              "%s %s: a token that is not finite changes its neighbours", isa, name);
    }
}

inline void check_linear(const sol::Kernels& kernels, bool thorough) {
    Random random(7);
    for (const FormatCase& f : all_formats()) {
        std::vector<Shape> shapes;
        const std::vector<int64_t> all_rows = thorough ? std::vector<int64_t>{1, 7, 8, 9, 16, 17, 33} : std::vector<int64_t>{1, 9, 33};
        for (const int64_t rows : all_rows) {
            for (const int64_t blocks : {1, 3}) shapes.push_back({rows, f.block_cols * blocks});
            if (f.is_float) shapes.push_back({rows, 31});
            if (f.format == SOL_INT8) shapes.push_back({rows, 160});
        }
        for (const Shape& shape : shapes) check_matrix(kernels, random_source(random, f, shape.rows, shape.cols), random, 17);
        // Wider than what the loops keep in a cache at once: several tiles of tokens, several chunks of groups.
        if (f.group_size != 64 && f.group_size != 128) {
            const Shape wide = f.is_float ? Shape{12 * kernels.group_rows + 17, f.format == SOL_F32 ? 600 : 1100} : Shape{9, 12288};
            check_matrix(kernels, random_source(random, f, wide.rows, wide.cols), random, thorough ? 19 : 17);
        }
    }
}

// Columns in another order give the same bits as weights whose columns were ordered back, block by block.
inline void check_perm(const sol::Kernels& kernels) {
    Random random(11);
    for (const FormatCase& f : all_formats()) {
        if (f.is_float) continue;
        const int64_t rows = 9, cols = 2 * (f.block_cols < 64 ? 64 : f.block_cols), tokens = 3;
        const Source source = random_source(random, f, rows, cols);
        PackedWeight packed = pack_weight(kernels.isa, source);
        std::vector<int32_t> perm;
        for (int32_t i = 0; i < (int32_t)cols; i++) perm.push_back((int32_t)((i * 7 + 5) % cols));
        Bytes x = random_floats(random, tokens * cols, 1.0f), ordered(tokens * cols * 4), a(tokens * rows * 4), b(tokens * rows * 4);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t c = 0; c < cols; c++) ordered.floats()[t * cols + c] = x.floats()[t * cols + perm[(size_t)c]];
        const SolLinear plain = {1, 0, &packed.segment, nullptr};
        check(sol_linear(kernels.isa, &plain, ordered.floats(), tokens, a.floats()) == SOL_OK, "%s", sol_last_error());
        packed.segment.perm = perm.data();
        check(sol_linear(kernels.isa, &plain, x.floats(), tokens, b.floats()) == SOL_OK, "%s", sol_last_error());
        check(same_bits(a.floats(), b.floats(), tokens * rows), "%s %s: perm", isa_name(kernels.isa), f.name);
    }
}

inline bool near(float got, double exact, double relative, double absolute) {
    return fabs((double)got - exact) <= relative * fabs(exact) + absolute;
}

inline void check_elementwise(const sol::Kernels& kernels) {
    Random random(13);
    const char* isa = isa_name(kernels.isa);
    for (int64_t n = 1; n <= 70; n++) {
        Bytes x = random_floats(random, n, 4.0f), y = random_floats(random, n, 4.0f), out(n * 4), sum(n * 4);
        double squares = 0;
        for (int64_t i = 0; i < n; i++) squares += (double)x.floats()[i] * x.floats()[i];
        kernels.rms_norm(x.floats(), y.floats(), 1e-5f, 1.0f, n, out.floats());
        bool good = true;
        for (int64_t i = 0; i < n; i++) {
            const double exact = x.floats()[i] / sqrt(squares / (double)n + 1e-5) * (1.0 + (double)y.floats()[i]);
            good = good && near(out.floats()[i], exact, 4e-6, 1e-6);
        }
        check(good, "%s: rms_norm of %" PRId64, isa, n);
        memcpy(sum.data(), x.data(), (size_t)n * 4);
        kernels.add(sum.floats(), y.floats(), n);
        good = true;
        for (int64_t i = 0; i < n; i++) good = good && sum.floats()[i] == x.floats()[i] + y.floats()[i];
        check(good, "%s: add of %" PRId64, isa, n);
        for (int64_t i = 0; i < n; i++) x.floats()[i] *= i % 3 == 0 ? 40.0f : 1.0f;
        kernels.silu_mul(x.floats(), y.floats(), n, out.floats());
        good = true;
        for (int64_t i = 0; i < n; i++) {
            const double gate = x.floats()[i], exact = gate / (1.0 + exp(-gate)) * (double)y.floats()[i];
            good = good && near(out.floats()[i], exact, 1e-6, 1e-36);
        }
        check(good, "%s: silu_mul of %" PRId64, isa, n);
        kernels.gelu_mul(x.floats(), y.floats(), n, out.floats());
        good = true;
        for (int64_t i = 0; i < n; i++) {
            const double gate = x.floats()[i], inner = sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
            const double exact = gate / (1.0 + exp(-2 * inner)) * (double)y.floats()[i];
            // The exponent's rounding grows with it, where what it gives is small.
            good = good && near(out.floats()[i], exact, 2e-6, 1e-6);
        }
        check(good, "%s: gelu_mul of %" PRId64, isa, n);
        memcpy(out.data(), x.data(), (size_t)n * 4);
        kernels.softcap(out.floats(), 3.0f, n);
        good = true;
        for (int64_t i = 0; i < n; i++) {
            good = good && near(out.floats()[i], 3.0 * tanh((double)x.floats()[i] / 3.0), 1e-6, 1e-6);
        }
        check(good, "%s: softcap of %" PRId64, isa, n);
        x.floats()[n - 1] = NAN;
        kernels.silu_mul(x.floats(), y.floats(), n, out.floats());
        check(std::isnan(out.floats()[n - 1]), "%s: silu_mul of a NaN", isa);
        if (n % 2 == 1) continue;
        Bytes head = random_floats(random, n, 1.0f), cosine = random_floats(random, n / 2, 1.0f),
              sine = random_floats(random, n / 2, 1.0f), turned(n * 4);
        memcpy(turned.data(), head.data(), (size_t)n * 4);
        kernels.rope(turned.floats(), cosine.floats(), sine.floats(), n);
        good = true;
        for (int64_t i = 0; i < n / 2; i++) {
            const double a = head.floats()[i], b = head.floats()[i + n / 2], c = cosine.floats()[i], s = sine.floats()[i];
            good = good && near(turned.floats()[i], a * c - b * s, 0, 4e-7) &&
                   near(turned.floats()[i + n / 2], b * c + a * s, 0, 4e-7);
        }
        check(good, "%s: rope of %" PRId64, isa, n);
    }
}

}  // namespace test
