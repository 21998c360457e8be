// Weight formats: what a block of each is, how packed bytes are laid out, and the scalar code that reads and writes them.
// Compiled for the architecture's baseline; `static inline` so that no instruction set's copy is linked into another's.
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
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);                                // rounds to infinity
    if (magnitude < 0x38800000u) {  // subnormal: the sum's last bit is 2^-24
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

}  // namespace sol
