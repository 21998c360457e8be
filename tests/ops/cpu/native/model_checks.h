// Whole steps of a tiny model: the same bits however tokens are batched and on however many threads, and nearly the same
// values on every instruction set.
#pragma once

#include <algorithm>

#include "tiny_model.h"

namespace test {

// Logits of every token of the requests, as they came: [request][position · VOCAB].
using Logits = std::vector<std::vector<float>>;

inline int64_t token_of(int64_t request, int64_t position) { return (request * 29 + position * position * 7 + position) % VOCAB; }

inline std::vector<int64_t> lengths(int64_t block_size) {
    return block_size >= 16 ? std::vector<int64_t>{44, 290, 14, 18} : std::vector<int64_t>{44, 85, 14, 18};
}

inline void run_step(TinyModel& tiny, const std::vector<Part>& parts, int64_t block_size, Logits& logits) {
    const Batch batch = make_batch(parts, block_size);
    Bytes out((int64_t)batch.logits_rows.size() * VOCAB * 4);
    if (!check(sol_model_step(tiny.model(), &batch.batch, out.floats()) == SOL_OK, "sol_model_step: %s", sol_last_error()))
        return;
    const float* row = out.floats();
    for (const Part& part : parts) {
        std::vector<float>& of = logits[(size_t)part.request];
        const size_t begin = (size_t)(part.computed * VOCAB), count = part.tokens.size() * (size_t)VOCAB;
        if (of.size() < begin + count) of.resize(begin + count);
        std::copy_n(row, count, of.begin() + (int64_t)begin);
        row += count;
    }
}

inline Part part_of(int64_t request, int64_t begin, int64_t end) {
    Part part{request, begin, {}};
    for (int64_t p = begin; p < end; p++) part.tokens.push_back(token_of(request, p));
    return part;
}

// A ragged mix: prefills in chunks, decodes, verifications, side by side.
inline Logits run_mixed(TinyModel& tiny, int64_t block_size) {
    Logits logits(4);
    const std::vector<int64_t> n = lengths(block_size);
    run_step(tiny, {part_of(0, 0, 40), part_of(1, 0, 50)}, block_size, logits);
    run_step(tiny, {part_of(0, 40, 41), part_of(2, 0, 13), part_of(1, 50, 80)}, block_size, logits);
    for (int64_t at = 80; at + 5 < n[1];) {
        const int64_t end = std::min(at + 90, n[1] - 5);
        run_step(tiny, {part_of(1, at, end)}, block_size, logits);
        at = end;
    }
    const int64_t b = n[1] - 5;
    run_step(tiny, {part_of(1, b, b + 4), part_of(0, 41, 42), part_of(2, 13, 14)}, block_size, logits);  // all small
    run_step(tiny, {part_of(3, 0, 18), part_of(0, 42, 44), part_of(1, b + 4, b + 5)}, block_size, logits);
    return logits;
}

// Each request for itself, `chunk` tokens a step.
inline Logits run_alone(TinyModel& tiny, int64_t block_size, int64_t chunk) {
    Logits logits(4);
    const std::vector<int64_t> n = lengths(block_size);
    for (int64_t request = 3; request >= 0; request--) {
        const int64_t step = request == 1 ? std::max<int64_t>(chunk, 7) : chunk;
        for (int64_t at = 0; at < n[(size_t)request]; at += step)
            run_step(tiny, {part_of(request, at, std::min(at + step, n[(size_t)request]))}, block_size, logits);
    }
    return logits;
}

inline bool same(const Logits& a, const Logits& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (a[i].size() != b[i].size() || !same_bits(a[i].data(), b[i].data(), (int64_t)a[i].size())) return false;
    return true;
}

// Largest difference, in root mean squares of `a`.
inline double difference(const Logits& a, const Logits& b) {
    double squares = 0, worst = 0;
    int64_t count = 0;
    for (size_t i = 0; i < a.size(); i++) {
        for (size_t j = 0; j < a[i].size(); j++) {
            const double error = fabs((double)a[i][j] - (double)b[i][j]);
            worst = error <= worst ? worst : error;
            squares += (double)a[i][j] * a[i][j];
            count++;
        }
    }
    return worst / sqrt(squares / (double)count);
}

inline void check_model(int32_t isa, bool thorough) {
    for (const int32_t kv_dtype : {SOL_KV_F32, SOL_KV_F16, SOL_KV_INT8}) {
        for (const bool floats : {false, true}) {
            ModelOptions options;
            options.kv_dtype = kv_dtype;
            options.floats = floats;
            options.block_size = kv_dtype == SOL_KV_F16 ? 3 : 16;
            if (floats) {
                options.window = 37;
                options.softcap = 20.0f;
                options.intermediate_size = 100;  // gate and up do not fall into the same row groups
            }
            if (!floats || kv_dtype == SOL_KV_F32) options.num_threads = 3;
            options.isa = isa;
            const char* name = isa_name(isa);
            TinyModel tiny(options);
            const Logits mixed = run_mixed(tiny, options.block_size);
            for (const int64_t chunk : thorough ? std::vector<int64_t>{1, 7, 96} : std::vector<int64_t>{1, 96}) {
                check(same(mixed, run_alone(tiny, options.block_size, chunk)),
                      "%s: kv %d, %s: other bits for each request alone, %d tokens a step", name, kv_dtype,
                      floats ? "float weights" : "mixed weights", (int)chunk);
            }
            ModelOptions single = options;
            single.num_threads = options.num_threads == 1 ? 2 : 1;
            TinyModel other(single);
            check(same(mixed, run_mixed(other, options.block_size)), "%s: kv %d: other bits on %d and %d threads", name,
                  kv_dtype, options.num_threads, single.num_threads);
            if (isa == SOL_ISA_PORTABLE) continue;
            ModelOptions portable = options;
            portable.isa = SOL_ISA_PORTABLE;
            TinyModel reference(portable);
            const double apart = difference(run_mixed(reference, options.block_size), mixed);
            // Where activations or keys are rounded to 8 bits, a last bit decides now and then which way.
            const double bound = floats && kv_dtype != SOL_KV_INT8 ? (kv_dtype == SOL_KV_F32 ? 1e-4 : 5e-3) : 5e-2;
            check(apart <= bound, "%s: kv %d, %s: logits differ from portable's by %g of their size", name, kv_dtype,
                  floats ? "float weights" : "mixed weights", apart);
        }
    }
}

// Many short steps, models that come and go, two at once: what a race or a lost wake-up would show in.
inline void check_threads(int32_t isa, int rounds) {
    ModelOptions options;
    options.isa = isa;
    options.num_threads = 3;
    TinyModel first(options);
    options.num_threads = 2;
    options.kv_dtype = SOL_KV_INT8;
    for (int round = 0; round < rounds; round++) {
        TinyModel second(options);
        Logits a(4), b(4);
        run_step(first, {part_of(0, 0, 30), part_of(1, 0, 3)}, 16, a);
        run_step(second, {part_of(0, 0, 30), part_of(1, 0, 3)}, 16, b);
        for (int64_t position = 3; position < 40; position++) {
            run_step(first, {part_of(1, position, position + 1)}, 16, a);
            run_step(second, {part_of(1, position, position + 1), part_of(0, 30, 31)}, 16, b);
        }
        if (round % 2 == 1) {  // longer than a worker spins: it sleeps and is woken
            const timespec pause = {0, 5'000'000};
            nanosleep(&pause, nullptr);
            run_step(first, {part_of(1, 40, 44)}, 16, a);
        }
        check(difference(a, a) == 0.0, "not finite");
    }
}

// Models that step in turn on the threads of one of them, which may be the first to go.
inline void check_shared_threads(int32_t isa, int rounds) {
    ModelOptions options;
    options.isa = isa;
    options.num_threads = 3;
    for (int round = 0; round < rounds; round++) {
        auto first = std::make_unique<TinyModel>(options);
        ModelOptions other = options;
        other.kv_dtype = SOL_KV_INT8;
        other.floats = true;
        other.intermediate_size = 100;
        const Logits expected = run_mixed(*first, options.block_size);
        TinyModel alone(other);
        const Logits expected_other = run_mixed(alone, other.block_size);
        other.threads_of = first->model();
        auto second = std::make_unique<TinyModel>(other);
        check(same(run_mixed(*second, other.block_size), expected_other), "other bits on another model's threads");
        check(same(run_mixed(*first, options.block_size), expected), "other bits after another model's steps");
        Logits a(4), b(4);
        run_step(*first, {part_of(0, 0, 30)}, 16, a);
        run_step(*second, {part_of(0, 0, 30)}, 16, b);
        for (int64_t position = 30; position < 60; position++) {  // a target and its drafter
            run_step(*first, {part_of(0, position, position + 1)}, 16, a);
            run_step(*second, {part_of(0, position, position + 1)}, 16, b);
        }
        first.reset();
        check(same(run_mixed(*second, other.block_size), expected_other), "other bits without the threads' first model");
        ModelOptions heir = options;
        heir.threads_of = second->model();
        TinyModel third(heir);
        check(same(run_mixed(third, options.block_size), expected), "other bits on threads that were handed on");
    }
}

}  // namespace test
