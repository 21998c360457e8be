// Vectors of floats and integers, one implementation for each instruction set. A kernels_<isa>.cpp defines SOL_NS (a
// namespace of its own, so that no inline function of one instruction set is ever linked into another's code) and is
// compiled with that set's flags; this header picks the implementation.
//
// Floats: vf of LANES lanes. Where an operand is a NaN, max and min return their second operand or a NaN, and every
// other operation a NaN. Reductions have one fixed order.
#pragma once

#ifndef SOL_NS
#error "define SOL_NS before including simd.h"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(SOL_ISA_IS_AVX512)
#include "simd_avx512.h"
#elif defined(SOL_ISA_IS_AVX2)
#include "simd_avx2.h"
#elif defined(SOL_ISA_IS_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace sol::SOL_NS {

// e^x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by a polynomial of degree 6 (Cephes' expf), scaled by 2^n in
// two steps so that the ends of the range come out right. exp(-inf) = 0, exp(inf) = inf, NaN stays NaN.
static inline vf exp(vf x) {
    x = min(set1(89.0f), max(set1(-104.0f), x));
    const vf n = round(mul(x, set1(1.44269504088896341f)));
    vf r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), r);
    p = add(p, set1(1.0f));
    const vf half = round(mul(n, set1(0.5f)));
    return mul(mul(p, pow2(half)), pow2(sub(n, half)));
}

}  // namespace sol::SOL_NS
