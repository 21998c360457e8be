// The table of one instruction set: included by kernels_<isa>.cpp after its macros.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace sol::SOL_NS {

static void unpack_matrix_row(const PackedMatrix& w, int64_t row, float* out) {
    unpack_row({w.format, w.group_size, w.rows, w.cols}, LANES, w.data, row, out);
}

static constexpr Kernels table(int32_t isa) {
    return {isa, LANES, quantize, linear, unpack_matrix_row, rms_norm, add_row, silu_mul, gelu_mul,
            softcap, rope, &ATTENTION};
}

}  // namespace sol::SOL_NS
