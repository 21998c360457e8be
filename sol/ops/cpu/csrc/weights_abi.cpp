// The part of the C ABI that concerns weights, and the choice of kernels.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "error.h"
#include "formats.h"
#include "kernels.h"
#include "weights.h"

namespace sol {

static thread_local char last_error[512] = "";

int32_t fail(int32_t code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

const Kernels* kernels_for(int32_t isa) {
    switch (isa) {
        case SOL_ISA_PORTABLE: return &KERNELS_PORTABLE;
#if defined(__x86_64__)
        case SOL_ISA_AVX2: return &KERNELS_AVX2;
        case SOL_ISA_AVX512: return &KERNELS_AVX512;
        case SOL_ISA_AVX512VNNI: return &KERNELS_AVX512VNNI;
#elif defined(__aarch64__)
        case SOL_ISA_NEON: return &KERNELS_NEON;
#endif
        default: return nullptr;
    }
}

bool is_float_format(int32_t format) { return format == SOL_F32 || format == SOL_F16 || format == SOL_BF16; }

size_t linear_scratch_nbytes(int64_t cols) {
    // A row group unpacked: per block of 32 columns, 8 vectors of codes and 2 of scales, of the widest group.
    return (size_t)((cols + BLOCK - 1) / BLOCK) * 10 * 4 * MAX_GROUP_ROWS;
}

static bool processor_has(int32_t isa) {
    switch (isa) {
        case SOL_ISA_PORTABLE: return true;
#if defined(__x86_64__)
        // libgcc's and compiler-rt's tests include the operating system's support of the registers (XGETBV).
        case SOL_ISA_AVX2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case SOL_ISA_AVX512VNNI:
            if (!__builtin_cpu_supports("avx512vnni")) return false;
            [[fallthrough]];
        case SOL_ISA_AVX512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   processor_has(SOL_ISA_AVX2);
#elif defined(__aarch64__) && defined(__linux__)
        case SOL_ISA_NEON: return (getauxval(AT_HWCAP) & (1ul << 20)) != 0;  // HWCAP_ASIMDDP: the dot product
#elif defined(__aarch64__) && defined(__APPLE__)
        case SOL_ISA_NEON: return true;  // every Apple processor of this architecture's macOS has it
#endif
        default: return false;
    }
}

// What every function here asks of (isa, format, rows, cols, group_size).
static int32_t check_shape(const char* what, int32_t isa, const MatrixShape& shape, const Kernels** kernels) {
    const auto number = [](int64_t n) { return (long long)n; };
    *kernels = kernels_for(isa);
    if (*kernels == nullptr) return fail(SOL_E_UNSUPPORTED, "%s: instruction set %d is not built in", what, (int)isa);
    const Format* format = find_format(shape.format);
    if (format == nullptr) return fail(SOL_E_ARGUMENT, "%s: unknown weight format %d", what, (int)shape.format);
    if (shape.rows < 1 || shape.cols < 1 || shape.rows > INT32_MAX || shape.cols > INT32_MAX / 8) {
        return fail(SOL_E_ARGUMENT,
                    "%s: a matrix of %lld rows and %lld columns; both must be at least 1 and below 2^31 (2^28)", what,
                    number(shape.rows), number(shape.cols));
    }
    const bool grouped = shape.format == SOL_INT4;
    if (grouped ? shape.group_size < BLOCK || shape.group_size % BLOCK != 0 : shape.group_size != 0) {
        return fail(SOL_E_ARGUMENT, "%s: group_size is %d; %s", what, (int)shape.group_size,
                    grouped ? "INT4 takes a multiple of 32" : "only INT4 has one");
    }
    const int64_t block = grouped ? shape.group_size : format->block_cols;
    if (shape.cols % block != 0) {
        return fail(SOL_E_ARGUMENT, "%s: cols is %lld; %s needs a multiple of %lld", what, number(shape.cols),
                    format->name, number(block));
    }
    return SOL_OK;
}

// Products stay below 2^63: rows < 2^31, a row's bytes < 2^31.
static int64_t packed_nbytes(const MatrixShape& shape, int group_rows) {
    return (shape.rows + group_rows - 1) / group_rows * group_nbytes(shape, group_rows);
}

static int32_t check_nbytes(const char* what, const char* field, int64_t given, int64_t needed) {
    if (given == needed) return SOL_OK;
    return fail(SOL_E_ARGUMENT, "%s: %s is %lld; this shape and format take %lld", what, field, (long long)given,
                (long long)needed);
}

int32_t open_segment(const Kernels& kernels, const SolSegment& segment, const char* what, PackedMatrix* out) {
    const MatrixShape shape = {segment.format, segment.group_size, segment.rows, segment.cols};
    const Kernels* found;
    if (const int32_t code = check_shape(what, kernels.isa, shape, &found)) return code;
    if (segment.packed == nullptr) return fail(SOL_E_ARGUMENT, "%s: packed is null", what);
    if ((uintptr_t)segment.packed % 4 != 0) return fail(SOL_E_ARGUMENT, "%s: packed is not aligned to 4 bytes", what);
    const int64_t nbytes = packed_nbytes(shape, kernels.group_rows);
    if (const int32_t code = check_nbytes(what, "packed_nbytes", segment.packed_nbytes, nbytes)) return code;
    if (segment.perm != nullptr) {
        if (is_float_format(segment.format))
            return fail(SOL_E_UNSUPPORTED, "%s: perm is for quantised formats; reorder the columns of %s instead", what,
                        find_format(segment.format)->name);
        uint8_t* seen = (uint8_t*)calloc((size_t)segment.cols, 1);
        if (seen == nullptr) return fail(SOL_E_MEMORY, "%s: no memory for %lld bytes", what, (long long)segment.cols);
        int32_t code = SOL_OK;
        for (int64_t i = 0; i < segment.cols && code == SOL_OK; i++) {
            const int32_t column = segment.perm[i];
            if (column < 0 || column >= segment.cols || seen[column]++)
                code = fail(SOL_E_DATA, "%s: perm[%lld] is %d: not a permutation of %lld columns", what, (long long)i,
                            (int)column, (long long)segment.cols);
        }
        free(seen);
        if (code != SOL_OK) return code;
    }
    *out = {segment.format,
            segment.group_size,
            segment.rows,
            segment.cols,
            group_nbytes(shape, kernels.group_rows),
            (const uint8_t*)segment.packed,
            segment.perm};
    return SOL_OK;
}

}  // namespace sol

using namespace sol;

int32_t sol_abi_version(void) { return SOL_ABI_VERSION; }

const char* sol_last_error(void) { return last_error; }

int32_t sol_isa_supported(int32_t isa) { return kernels_for(isa) != nullptr && processor_has(isa); }

int32_t sol_group_rows(int32_t isa) {
    const Kernels* kernels = kernels_for(isa);
    if (kernels == nullptr)
        return fail(SOL_E_UNSUPPORTED, "sol_group_rows: instruction set %d is not built in", (int)isa);
    return kernels->group_rows;
}

int64_t sol_packed_nbytes(int32_t isa, int32_t format, int64_t rows, int64_t cols, int32_t group_size) {
    const MatrixShape shape = {format, group_size, rows, cols};
    const Kernels* kernels;
    if (const int32_t code = check_shape("sol_packed_nbytes", isa, shape, &kernels)) return code;
    return packed_nbytes(shape, kernels->group_rows);
}

int32_t sol_pack(int32_t isa, int32_t format, int64_t rows, int64_t cols, int32_t group_size, const void* data,
                 int64_t data_nbytes, const float* scales, int64_t num_scales, const uint8_t* zeros, int64_t num_zeros,
                 void* out, int64_t out_nbytes) {
    const char* what = "sol_pack";
    const MatrixShape shape = {format, group_size, rows, cols};
    const Kernels* kernels;
    if (const int32_t code = check_shape(what, isa, shape, &kernels)) return code;
    if (data == nullptr || out == nullptr) return fail(SOL_E_ARGUMENT, "%s: data or out is null", what);
    const Format* source = find_format(format);
    const int64_t nbytes = rows * (cols / source->block_cols * source->block_nbytes);
    if (const int32_t code = check_nbytes(what, "data_nbytes", data_nbytes, nbytes)) return code;
    if (const int32_t code = check_nbytes(what, "out_nbytes", out_nbytes, packed_nbytes(shape, kernels->group_rows)))
        return code;
    const int64_t groups = format == SOL_INT8 ? rows : (format == SOL_INT4 ? rows * (cols / group_size) : 0);
    if ((scales != nullptr) != (groups > 0))
        return fail(SOL_E_ARGUMENT, "%s: %s %s scales", what, source->name, groups > 0 ? "needs" : "takes no");
    if (zeros != nullptr && format != SOL_INT4)
        return fail(SOL_E_ARGUMENT, "%s: %s takes no zeros", what, source->name);
    if (const int32_t code = check_nbytes(what, "num_scales", num_scales, groups)) return code;
    if (const int32_t code = check_nbytes(what, "num_zeros", num_zeros, zeros != nullptr ? groups : 0)) return code;
    const int64_t row = sol::pack(shape, kernels->group_rows, (const uint8_t*)data, scales, zeros, (uint8_t*)out);
    if (row >= 0)
        return fail(SOL_E_DATA, "%s: row %lld of %lld has a scale that is not finite or a zero point outside 0 to 15",
                    what, (long long)row, (long long)rows);
    return SOL_OK;
}

int32_t sol_check_packed(int32_t isa, int32_t format, int64_t rows, int64_t cols, int32_t group_size,
                         const void* packed, int64_t nbytes) {
    const char* what = "sol_check_packed";
    const MatrixShape shape = {format, group_size, rows, cols};
    const Kernels* kernels;
    if (const int32_t code = check_shape(what, isa, shape, &kernels)) return code;
    if (packed == nullptr) return fail(SOL_E_ARGUMENT, "%s: packed is null", what);
    if (const int32_t code = check_nbytes(what, "packed_nbytes", nbytes, packed_nbytes(shape, kernels->group_rows)))
        return code;
    const int64_t row = sol::check(shape, kernels->group_rows, (const uint8_t*)packed);
    if (row >= 0)
        return fail(SOL_E_DATA, "%s: row %lld of %lld has a scale or zero point out of range", what, (long long)row,
                    (long long)rows);
    return SOL_OK;
}

int32_t sol_unpack_rows(int32_t isa, const SolSegment* segment, const int64_t* ids, int64_t num_ids, float* out) {
    const char* what = "sol_unpack_rows";
    if (segment == nullptr || (num_ids > 0 && (ids == nullptr || out == nullptr)))
        return fail(SOL_E_ARGUMENT, "%s: segment, ids or out is null", what);
    const Kernels* kernels = kernels_for(isa);
    if (kernels == nullptr || !processor_has(isa))
        return fail(SOL_E_UNSUPPORTED, "%s: this processor or build lacks instruction set %d", what, (int)isa);
    PackedMatrix matrix;
    if (const int32_t code = open_segment(*kernels, *segment, what, &matrix)) return code;
    if (matrix.perm != nullptr) return fail(SOL_E_UNSUPPORTED, "%s: rows of a matrix with perm", what);
    for (int64_t i = 0; i < num_ids; i++)
        if (ids[i] < 0 || ids[i] >= matrix.rows)
            return fail(SOL_E_ARGUMENT, "%s: ids[%lld] is %lld; there are %lld rows", what, (long long)i,
                        (long long)ids[i], (long long)matrix.rows);
    for (int64_t i = 0; i < num_ids; i++) kernels->unpack_row(matrix, ids[i], out + i * matrix.cols);
    return SOL_OK;
}

int32_t sol_linear(int32_t isa, const SolLinear* linear, const float* x, int64_t num_tokens, float* y) {
    const char* what = "sol_linear";
    if (linear == nullptr || linear->segments == nullptr || linear->num_segments < 1)
        return fail(SOL_E_ARGUMENT, "%s: no segments", what);
    if (num_tokens < 0 || (num_tokens > 0 && (x == nullptr || y == nullptr)))
        return fail(SOL_E_ARGUMENT, "%s: x or y is null, or num_tokens is %lld", what, (long long)num_tokens);
    const Kernels* kernels = kernels_for(isa);
    if (kernels == nullptr || !processor_has(isa))
        return fail(SOL_E_UNSUPPORTED, "%s: this processor or build lacks instruction set %d", what, (int)isa);
    const int64_t cols = linear->segments[0].cols;
    int64_t total = 0;
    for (int32_t i = 0; i < linear->num_segments; i++) {
        PackedMatrix matrix;
        if (const int32_t code = open_segment(*kernels, linear->segments[i], what, &matrix)) return code;
        if (matrix.cols != cols)
            return fail(SOL_E_ARGUMENT, "%s: segment %d has %lld columns, the first %lld", what, (int)i,
                        (long long)matrix.cols, (long long)cols);
        total += matrix.rows;
    }
    if (num_tokens == 0) return SOL_OK;
    void* scratch = malloc(linear_scratch_nbytes(cols) + quantized_nbytes(num_tokens, cols));
    if (scratch == nullptr) return fail(SOL_E_MEMORY, "%s: no memory for %lld tokens", what, (long long)num_tokens);
    QuantizedActivations q = quantized_in((char*)scratch + linear_scratch_nbytes(cols), num_tokens, cols);
    int64_t first_row = 0;
    for (int32_t i = 0; i < linear->num_segments; i++) {
        PackedMatrix matrix;
        open_segment(*kernels, linear->segments[i], what, &matrix);
        const bool floats = is_float_format(matrix.format);
        if (!floats)
            for (int64_t t = 0; t < num_tokens; t++) kernels->quantize(x + t * cols, matrix.perm, t, q);
        kernels->linear(matrix, floats ? x : nullptr, floats ? nullptr : &q, num_tokens, 0,
                        (matrix.rows + kernels->group_rows - 1) / kernels->group_rows, y + first_row, total, scratch);
        first_row += matrix.rows;
    }
    if (linear->bias != nullptr)
        for (int64_t t = 0; t < num_tokens; t++) kernels->add(y + t * total, linear->bias, total);
    free(scratch);
    return SOL_OK;
}
