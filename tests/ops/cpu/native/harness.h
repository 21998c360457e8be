// What the drivers share: random numbers, checks that are counted, memory whose end is the end of an allocation.
#pragma once

#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#include "sol_cpu.h"

namespace test {

// SplitMix64: the same numbers on every machine.
class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
    bool one_in(int64_t n) { return below(n) == 0; }
    float uniform(float low, float high) { return low + (high - low) * (float)(next() >> 40) * 0x1p-24f; }
    template <class T>
    T pick(const std::vector<T>& of) {
        return of[(size_t)below((int64_t)of.size())];
    }

   private:
    uint64_t state_;
};

// Exactly `nbytes` of memory, 64-byte aligned: an instrumented build notices the first byte read or written past it.
class Bytes {
   public:
    explicit Bytes(int64_t nbytes) : nbytes_(nbytes) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, (size_t)(nbytes > 0 ? nbytes : 1)) != 0) {
            fprintf(stderr, "no memory for %" PRId64 " bytes\n", nbytes);
            abort();
        }
        data_ = static_cast<uint8_t*>(memory);
    }
    Bytes(Bytes&& other) noexcept : data_(other.data_), nbytes_(other.nbytes_) { other.data_ = nullptr; }
    Bytes& operator=(Bytes&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(nbytes_, other.nbytes_);
        return *this;
    }
    ~Bytes() { free(data_); }

    uint8_t* data() const { return data_; }
    int64_t nbytes() const { return nbytes_; }
    float* floats() const { return reinterpret_cast<float*>(data_); }
    void fill_random(Random& random) {
        for (int64_t i = 0; i < nbytes_; i++) data_[i] = (uint8_t)random.next();
    }

   private:
    uint8_t* data_;
    int64_t nbytes_;
};

inline Bytes random_floats(Random& random, int64_t count, float magnitude) {
    Bytes bytes(count * 4);
    for (int64_t i = 0; i < count; i++) bytes.floats()[i] = random.uniform(-magnitude, magnitude);
    return bytes;
}

inline int64_t num_checks = 0, num_failures = 0;

// Counts a check; says what failed, the first fifty times.
__attribute__((format(printf, 2, 3))) inline bool check(bool good, const char* format, ...) {
    num_checks++;
    if (good) return true;
    if (++num_failures <= 50) {
        va_list arguments;
        va_start(arguments, format);
        fputs("FAILED: ", stdout);
        vprintf(format, arguments);
        putchar('\n');
        va_end(arguments);
    }
    return false;
}

inline bool same_bits(const float* a, const float* b, int64_t count) {
    return count == 0 || memcmp(a, b, (size_t)count * sizeof(float)) == 0;
}

inline const char* isa_name(int32_t isa) {
    const char* const names[] = {"portable", "neon", "avx2", "avx512", "avx512vnni"};
    return isa >= 0 && isa < 5 ? names[isa] : "?";
}

inline std::vector<int32_t> supported_isas() {
    std::vector<int32_t> isas;
    for (int32_t isa = SOL_ISA_PORTABLE; isa <= SOL_ISA_AVX512VNNI; isa++)
        if (sol_isa_supported(isa) == 1) isas.push_back(isa);
    return isas;
}

}  // namespace test
