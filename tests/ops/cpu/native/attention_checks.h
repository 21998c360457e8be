// Attention kernels on one instruction set: writing keys and values, attending, merging, against double precision.
#pragma once

#include <algorithm>

#include "formats.h"
#include "harness.h"
#include "kv_cache.h"

namespace test {

struct AttentionCase {
    int32_t dtype, head_dim, block_size, group, window;
    float softcap;
    int64_t context;  // tokens of the request
    int64_t queries;  // its last ones
};

// What the cache keeps of a vector.
inline std::vector<double> stored(int32_t dtype, const float* x, int32_t n) {
    std::vector<double> out((size_t)n);
    float amax = 0;
    for (int32_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf(x[i]));
    for (int32_t i = 0; i < n; i++) {
        out[(size_t)i] = dtype == SOL_KV_F32   ? (double)x[i]
                         : dtype == SOL_KV_F16 ? (double)sol::f16_to_f32(sol::f32_to_f16(x[i]))
                                               : (double)(amax / 127.0f) * nearbyintf(x[i] * (127.0f / amax));
    }
    return out;
}

inline void check_attention_case(const sol::Kernels& kernels, const AttentionCase& c, Random& random) {
    const sol::AttentionKernels& attention = *kernels.attention;
    const sol::KVLayout kv = sol::kv_layout(c.dtype, 2, c.head_dim, c.block_size);
    const int64_t blocks = (c.context + c.block_size - 1) / c.block_size;
    Bytes cache((2 * blocks + 1) * kv.block_nbytes);
    memset(cache.data(), 0xff, (size_t)cache.nbytes());  // NaN in every float format: nothing foreign may be seen
    std::vector<int64_t> table;
    for (int64_t i = 0; i < blocks; i++) table.push_back((i * 7 + 1) % (2 * blocks + 1));
    for (size_t i = 0; i < table.size(); i++)  // distinct even where 7 divides the number of blocks
        while (std::count(table.begin(), table.end(), table[i]) > 1) table[i] = random.below(2 * blocks + 1);
    constexpr int32_t kv_head = 1;
    Bytes keys = random_floats(random, c.context * c.head_dim, 1.5f), values = random_floats(random, c.context * c.head_dim, 1.5f);
    std::vector<std::vector<double>> k, v;
    for (int64_t t = 0; t < c.context; t++) {
        const float *key = keys.floats() + t * c.head_dim, *value = values.floats() + t * c.head_dim;
        uint8_t* head = cache.data() + table[(size_t)(t / c.block_size)] * kv.block_nbytes + kv_head * kv.head_nbytes;
        attention.write_kv(kv, head, (int32_t)(t % c.block_size), key, value);
        k.push_back(stored(c.dtype, key, c.head_dim));
        v.push_back(stored(c.dtype, value, c.head_dim));
    }
    const int64_t rows = c.queries * c.group;
    const float scale = 1.0f / sqrtf((float)c.head_dim);
    Bytes q = random_floats(random, rows * c.head_dim, 2.0f), out(rows * c.head_dim * 4), again(rows * c.head_dim * 4);
    Bytes scratch((int64_t)sol::attention_scratch_floats(kv) * 4);
    const int64_t segments = (c.context - 1) / kv.segment_tokens() + 1;

    const auto state_of = [&](std::vector<Bytes>& memory, int64_t n) {
        memory.emplace_back(n * 4);
        memory.emplace_back(n * 4);
        memory.emplace_back(n * kv.value_pitch * 4);
        const size_t at = memory.size() - 3;
        return sol::AttentionState{memory[at].floats(), memory[at + 1].floats(), memory[at + 2].floats()};
    };
    // Rows [begin, end), in calls of `at_once` rows, segments in one call or each on its own and merged.
    const auto attend = [&](int64_t at_once, bool split, float* to) {
        for (int64_t row = 0; row < rows; row += at_once) {
            const auto n = (int32_t)std::min(at_once, rows - row);
            const sol::AttentionRows part = {&kv, cache.data(), table.data(), kv_head, c.group, n, c.window,
                                             c.context - c.queries + row / c.group, (int32_t)(row % c.group), scale, c.softcap,
                                             q.floats() + row * c.head_dim};
            std::vector<Bytes> memory;
            memory.reserve(6);
            const sol::AttentionState state = state_of(memory, n);
            sol::clear_state(state, n);
            if (split) {
                attention.attend(part, 0, 1, state, scratch.floats());
                const sol::AttentionState later = state_of(memory, n);
                for (int64_t s = 1; s < segments; s++) {
                    sol::clear_state(later, n);
                    attention.attend(part, s, s + 1, later, scratch.floats());
                    attention.merge(kv, n, state, later);
                }
            } else {
                attention.attend(part, 0, segments, state, scratch.floats());
            }
            for (int64_t r = 0; r < n; r++) attention.finish(kv, state, r, to + (row + r) * c.head_dim);
        }
    };
    attend(sol::ATTENTION_ROWS, false, out.floats());
    const auto describe = [&] {
        char text[160];
        snprintf(text, sizeof text, "%s: attention: kv %d, head_dim %d, block %d, group %d, window %d, softcap %g, %d of %d",
                 isa_name(kernels.isa), c.dtype, c.head_dim, c.block_size, c.group, c.window, (double)c.softcap,
                 (int)c.queries, (int)c.context);
        return std::string(text);
    };
    double worst = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t position = c.context - c.queries + row / c.group;
        const int64_t lowest = c.window > 0 ? std::max<int64_t>(0, position + 1 - c.window) : 0;
        std::vector<double> s;
        double most = -INFINITY, sum = 0;
        for (int64_t t = lowest; t <= position; t++) {
            double dot = 0;
            for (int32_t d = 0; d < c.head_dim; d++) dot += (double)q.floats()[row * c.head_dim + d] * k[(size_t)t][(size_t)d];
            dot *= (double)scale;
            if (c.softcap != 0) dot = c.softcap * tanh(dot / c.softcap);
            s.push_back(dot);
            most = std::max(most, dot);
        }
        for (double& p : s) sum += p = exp(p - most);
        for (int32_t d = 0; d < c.head_dim; d++) {
            double exact = 0;
            for (int64_t t = lowest; t <= position; t++) exact += s[(size_t)(t - lowest)] / sum * v[(size_t)t][(size_t)d];
            const double error = fabs((double)out.floats()[row * c.head_dim + d] - exact);
            worst = error <= worst ? worst : error;  // a NaN stays
        }
    }
    // int8: a value that lies on a tie may be rounded the other way by a product whose last bit differs.
    check(worst <= (c.dtype == SOL_KV_INT8 ? 2e-3 : 1e-5), "%s: error %g", describe().c_str(), worst);
    for (const int64_t at_once : {1, 5, 48}) {
        for (const bool split : {false, true}) {
            attend(at_once, split, again.floats());
            check(same_bits(out.floats(), again.floats(), rows * c.head_dim), "%s: other bits in calls of %d rows%s",
                  describe().c_str(), (int)at_once, split ? ", segments split" : "");
        }
    }
}

inline void check_attention(const sol::Kernels& kernels, bool thorough) {
    Random random(17);
    const std::vector<int32_t> block_sizes = thorough ? std::vector<int32_t>{1, 3, 16, 32, 100, 256} : std::vector<int32_t>{3, 16, 100};
    for (const int32_t dtype : {SOL_KV_F32, SOL_KV_F16, SOL_KV_INT8}) {
        for (const int32_t block_size : block_sizes) {
            for (const int32_t head_dim : thorough ? std::vector<int32_t>{2, 8, 20, 64, 80, 256} : std::vector<int32_t>{2, 20, 64}) {
                const int64_t context = block_size == 1 ? 50 : random.one_in(2) ? 37 : 300;
                check_attention_case(kernels, {dtype, head_dim, block_size, 3, 0, 0.0f, context, 1}, random);
                check_attention_case(kernels, {dtype, head_dim, block_size, 1, 19, 0.0f, context, 23}, random);
                check_attention_case(kernels, {dtype, head_dim, block_size, 2, 0, 5.0f, 20, 20}, random);
            }
        }
        check_attention_case(kernels, {dtype, 16, 16, 4, 0, 0.0f, 1030, 5}, random);
        check_attention_case(kernels, {dtype, 16, 16, 4, 300, 30.0f, 1030, 5}, random);
    }
}

}  // namespace test
