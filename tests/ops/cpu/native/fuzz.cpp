// A seeded mutation fuzzer of everything that takes packed weights, descriptions and batches: sizes that lie, truncated
// buffers, damaged bytes, scales that are not finite, indices from anywhere. Every array is exactly as long as the
// function is told, or as its contract says, so that an instrumented build notices the first access outside.
//
//     fuzz [--seed N] [--iterations N]
//
// What must hold: an error has a code and a message; what sol_pack accepts, sol_check_packed accepts; what either
// accepts is computed with, on every instruction set of this processor, without touching anything else.
#include <algorithm>

#include "tiny_model.h"

using namespace test;

namespace {

int64_t accepted = 0, refused = 0;

void count(int64_t code, const char* what) {
    if (code >= 0) {
        accepted++;
        return;
    }
    refused++;
    check(code >= SOL_E_DATA, "%s: unknown code %" PRId64, what, code);
    check(sol_last_error()[0] != '\0', "%s: no message", what);
}

// A number that looks like `value`, or one from the ends of what there is.
int64_t mutate(Random& random, int64_t value) {
    switch (random.below(10)) {
        case 0: return value + 1;
        case 1: return value - 1;
        case 2: return -value;
        case 3: return value * 2;
        case 4: return 0;
        case 5: return value ^ (int64_t)(1ull << random.below(64));
        case 6: return random.pick<int64_t>({INT64_MAX, INT64_MIN, INT32_MAX, INT32_MIN, (int64_t)UINT32_MAX, 1ll << 28, 1ll << 40});
        case 7: return random.below(300);
        case 8: return value / 2;
        default: return (int64_t)random.next();
    }
}

// A scale as a file may hold it.
float any_float(Random& random) {
    if (random.one_in(2)) return random.uniform(-1, 1);
    const auto bits = (uint32_t)random.next();
    float value;
    memcpy(&value, &bits, 4);
    return random.one_in(2) ? value : random.pick<float>({NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 3e38f, 1e-45f});
}

void damage(Random& random, Bytes& bytes) {
    if (bytes.nbytes() == 0) return;
    for (int64_t n = 1 + random.below(6); n > 0; n--) {
        uint8_t& byte = bytes.data()[random.below(bytes.nbytes())];
        byte = random.one_in(2) ? (uint8_t)(byte ^ (1u << random.below(8))) : random.pick<uint8_t>({0, 0x7c, 0xfc, 0x7f, 0xff, 0x80});
    }
}

// Any multiplication that the fuzzer makes must finish.
bool small(int64_t rows, int64_t cols) { return rows >= 1 && cols >= 1 && rows <= 4096 && cols <= 1 << 16 && rows * cols <= 1 << 16; }

void compute(Random& random, int32_t isa, const SolSegment& segment) {
    const int64_t tokens = 1 + random.below(9);
    Bytes x = random_floats(random, tokens * segment.cols, 1.0f), y(tokens * segment.rows * 4);
    if (random.one_in(8)) x.fill_random(random);
    const SolLinear linear = {1, 0, &segment, nullptr};
    count(sol_linear(isa, &linear, x.floats(), tokens, y.floats()), "sol_linear");
    std::vector<int64_t> ids;
    for (int64_t i = 1 + random.below(4); i > 0; i--)
        ids.push_back(random.one_in(6) ? mutate(random, segment.rows) : random.below(segment.rows));
    Bytes out((int64_t)ids.size() * segment.cols * 4);
    count(sol_unpack_rows(isa, &segment, ids.data(), (int64_t)ids.size(), out.floats()), "sol_unpack_rows");
}

void fuzz_pack(Random& random, const std::vector<int32_t>& isas) {
    const FormatCase& f = all_formats()[(size_t)random.below((int64_t)all_formats().size())];
    int64_t rows = 1 + random.below(20), cols = f.block_cols * (1 + random.below(2)), group = f.group_size;
    int32_t format = f.format, isa = random.pick(isas);
    Source source = random_source(random, f, rows, cols);
    // Sizes that the function is told, and the memory there is: the same.
    int64_t data_nbytes = source.data.nbytes(), num_scales = (int64_t)source.scales.size(), num_zeros = (int64_t)source.zeros.size();
    int64_t out_nbytes = sol_packed_nbytes(isa, format, rows, cols, (int32_t)group);
    const bool lie = random.one_in(2);
    if (lie) {
        switch (random.below(9)) {
            case 0: rows = mutate(random, rows); break;
            case 1: cols = mutate(random, cols); break;
            case 2: group = (int32_t)mutate(random, group); break;
            case 3: format = (int32_t)random.below(36); break;
            case 4: isa = (int32_t)mutate(random, isa); break;
            case 5: data_nbytes = random.below(data_nbytes + 2); break;
            case 6: num_scales = random.below(num_scales + 2); break;
            case 7: num_zeros = random.below(num_zeros + 2); break;
            default: out_nbytes = random.below(out_nbytes + 2);
        }
        // Often all sizes fit the lie, as they would in a file that was written by it.
        const int64_t needed = sol_packed_nbytes(isa, format, rows, cols, (int32_t)group);
        count(needed, "sol_packed_nbytes");
        if (random.one_in(2) && needed > 0 && needed < 1 << 22) out_nbytes = needed;
    }
    Bytes data(data_nbytes), scales(num_scales * 4), zeros(num_zeros), out(out_nbytes);
    data.fill_random(random);
    memcpy(data.data(), source.data.data(), (size_t)std::min(data.nbytes(), source.data.nbytes()));
    for (int64_t i = 0; i < num_scales; i++)
        scales.floats()[i] = random.one_in(40) ? any_float(random) : (i < (int64_t)source.scales.size() ? source.scales[(size_t)i] : 1.0f);
    for (int64_t i = 0; i < num_zeros; i++) zeros.data()[i] = (uint8_t)(random.one_in(60) ? random.next() : (uint64_t)random.below(16));
    if (random.one_in(4)) damage(random, data);
    if (random.one_in(30)) data.fill_random(random);
    const bool no_zeros = random.one_in(5);
    const int32_t code = sol_pack(isa, format, rows, cols, (int32_t)group, data.data(), data_nbytes,
                                  num_scales == 0 ? nullptr : scales.floats(), num_scales,
                                  num_zeros == 0 || no_zeros ? nullptr : zeros.data(), no_zeros ? 0 : num_zeros, out.data(), out_nbytes);
    count(code, "sol_pack");
    if (code != SOL_OK || !small(rows, cols)) return;
    check(sol_check_packed(isa, format, rows, cols, (int32_t)group, out.data(), out_nbytes) == SOL_OK,
          "sol_check_packed refuses what sol_pack made: %s", sol_last_error());
    const SolSegment segment = {format, (int32_t)group, rows, cols, out.data(), out_nbytes, nullptr};
    compute(random, isa, segment);
}

// Packed bytes from a file: damaged, truncated, or of another shape.
void fuzz_packed(Random& random, const std::vector<int32_t>& isas) {
    const FormatCase& f = all_formats()[(size_t)random.below((int64_t)all_formats().size())];
    const int64_t rows = 1 + random.below(20), cols = f.block_cols * (1 + random.below(2));
    const int32_t isa = random.pick(isas);
    PackedWeight weight = pack_weight(isa, random_source(random, f, rows, cols));
    SolSegment segment = weight.segment;
    if (random.one_in(2)) {  // another size, all of it there
        Bytes other(random.one_in(2) ? random.below(weight.data.nbytes() + 1) : weight.data.nbytes() + random.below(9));
        other.fill_random(random);
        memcpy(other.data(), weight.data.data(), (size_t)std::min(other.nbytes(), weight.data.nbytes()));
        segment.packed_nbytes = other.nbytes();
        weight.data = std::move(other);
        segment.packed = weight.data.data();
    }
    if (random.one_in(2)) damage(random, weight.data);
    if (random.one_in(20)) weight.data.fill_random(random);
    switch (random.below(12)) {
        case 0: segment.rows = mutate(random, rows); break;
        case 1: segment.cols = mutate(random, cols); break;
        case 2: segment.group_size = (int32_t)mutate(random, f.group_size); break;
        case 3: segment.format = (int32_t)random.below(36); break;
        default: break;
    }
    std::vector<int32_t> perm;
    if (random.one_in(4) && segment.cols > 0 && segment.cols < 4096) {
        for (int32_t i = 0; i < (int32_t)segment.cols; i++) perm.push_back((int32_t)segment.cols - 1 - i);
        if (random.one_in(2)) perm[(size_t)random.below((int64_t)perm.size())] = (int32_t)mutate(random, segment.cols);
        perm.shrink_to_fit();
        segment.perm = perm.data();
    }
    count(sol_check_packed(isa, segment.format, segment.rows, segment.cols, segment.group_size, segment.packed, segment.packed_nbytes),
          "sol_check_packed");
    // What was refused for its scales is computed with all the same: nonsense, but inside its memory.
    if (segment.packed_nbytes <= 1 << 22 && segment.rows > 0 && segment.cols > 0 && small(segment.rows, segment.cols))
        compute(random, isa, segment);
}


void fuzz_model(Random& random, int32_t isa) {
    ModelOptions options;
    options.isa = isa;
    options.max_num_tokens = 24;
    options.floats = random.one_in(2);
    options.kv_dtype = (int32_t)random.below(3);
    options.block_size = random.pick<int32_t>({1, 3, 16});
    options.num_blocks = options.block_size == 1 ? 160 : 60;
    options.max_positions = 40;
    options.window = random.one_in(2) ? 5 : 0;
    TinyModel tiny(options);
    SolModelDesc& d = tiny.desc();
    // Fields that say how long an array without a size of its own is (norms, rotary tables, biases) are only ever told
    // too small, as no function could notice the contrary.
    const auto smaller = [&](int64_t value) { return std::min(value, mutate(random, value)); };
    const auto change = [&] {
        SolOp& op = tiny.ops()[(size_t)random.below((int64_t)tiny.ops().size())];
        auto* segments = const_cast<SolSegment*>(op.linear.segments);
        SolSegment* segment = segments == nullptr ? &d.embedding : &segments[random.below(op.linear.num_segments)];
        switch (random.below(26)) {
            case 0: d.isa = (int32_t)mutate(random, d.isa); break;
            case 1: d.num_threads = random.pick<int32_t>({INT32_MIN, -1, 0, 1, 2, 3, 1025, INT32_MAX}); break;
            case 2: d.hidden_size = smaller(d.hidden_size); break;
            case 3: d.intermediate_size = mutate(random, d.intermediate_size); break;
            case 4: d.vocab_size = mutate(random, d.vocab_size); break;
            case 5: d.max_positions = smaller(d.max_positions); break;
            case 6: d.num_layers = (int32_t)mutate(random, d.num_layers); break;
            case 7: d.num_heads = (int32_t)mutate(random, d.num_heads); break;
            case 8: d.num_kv_heads = (int32_t)mutate(random, d.num_kv_heads); break;
            case 9: d.head_dim = (int32_t)smaller(d.head_dim); break;
            case 10: d.num_ops = (int32_t)smaller(d.num_ops); break;
            case 11: d.kv_dtype = (int32_t)mutate(random, d.kv_dtype); break;
            case 12: d.block_size = (int32_t)mutate(random, d.block_size); break;
            case 13: d.max_num_tokens = random.pick<int32_t>({INT32_MIN, -1, 0, 1, 5, 100, (1 << 20) + 1, INT32_MAX}); break;
            case 14: d.num_blocks = mutate(random, d.num_blocks); break;
            case 15: d.kv_cache_nbytes = smaller(d.kv_cache_nbytes); break;
            case 16: op.kind = (int32_t)random.below(5); break;
            case 17: op.layer = (int32_t)mutate(random, op.layer); break;
            case 18: op.scale = any_float(random); break;
            case 19: op.softcap = any_float(random); break;
            case 20: op.window = (int32_t)mutate(random, op.window); break;
            case 21:  // never more than there are: an array's length cannot be checked
                op.linear.num_segments = (int32_t)std::clamp<int64_t>(smaller(op.linear.num_segments), INT32_MIN,
                                                                      op.linear.num_segments);
                break;
            case 22: segment->rows = mutate(random, segment->rows); break;
            case 23: segment->cols = mutate(random, segment->cols); break;
            case 24: segment->format = (int32_t)random.below(36); break;
            default: segment->packed_nbytes = smaller(segment->packed_nbytes);
        }
    };
    if (!random.one_in(5)) change();
    if (random.one_in(4)) change();
    SolModel* model = nullptr;
    const int32_t code = sol_model_create(&d, &model);
    count(code, "sol_model_create");
    if (code != SOL_OK) {
        check(model == nullptr, "a model in spite of an error");
        return;
    }
    for (int64_t steps = 8; steps > 0; steps--) {
        std::vector<Part> parts;
        int64_t at = random.below(3), left = std::min<int64_t>(d.max_num_tokens, 24);
        for (int64_t request = 0; request < 4 && left > 0; request++) {
            Part part{request, at, {}};
            for (int64_t n = 1 + random.below(std::min<int64_t>(left, 9)); n > 0; n--) part.tokens.push_back(random.below(VOCAB));
            left -= (int64_t)part.tokens.size();
            parts.push_back(part);
            if (random.one_in(3)) at = random.below(30);
        }
        Batch b = make_batch(parts, std::max(1, d.block_size));
        SolBatch& batch = b.batch;
        const int64_t total = batch.num_tokens;
        int64_t sizes[] = {total, batch.num_requests, batch.num_logits_rows, batch.max_blocks};
        std::vector<int64_t>* arrays[] = {&b.token_ids, &b.positions, &b.slots, &b.table, &b.query_lens, &b.seq_lens, &b.logits_rows};
        for (int64_t n = random.below(4); n > 0; n--) {
            if (random.one_in(4)) {
                int64_t& size = sizes[random.below(4)];
                size = random.one_in(2) ? mutate(random, size) : random.below(30);
            } else {
                std::vector<int64_t>& values = *arrays[random.below(7)];
                int64_t& value = values[(size_t)random.below((int64_t)values.size())];
                value = random.one_in(2) ? mutate(random, value) : random.below(40);
            }
        }
        if (random.one_in(4))
            for (int64_t& slot : b.slots) slot = random.below(d.num_blocks * d.block_size);
        // The arrays as long as the batch says, where that is possible.
        const auto resized = [&](std::vector<int64_t>& values, int64_t n) {
            std::vector<int64_t> other((size_t)std::clamp<int64_t>(n, 0, 4096));
            for (size_t i = 0; i < other.size(); i++) other[i] = i < values.size() ? values[i] : random.below(5);
            values = std::move(other);
            return values.empty() ? nullptr : values.data();
        };
        __extension__ const __int128 cells = (__int128)sizes[1] * sizes[3];
        const bool wide = cells > 4096;  // more table than there can be: refused, or never read, only if it lies
        batch.num_tokens = sizes[0];
        batch.num_requests = sizes[1];
        batch.num_logits_rows = sizes[2];
        batch.max_blocks = wide ? 1 : sizes[3];
        batch.token_ids = resized(b.token_ids, sizes[0]);
        batch.positions = resized(b.positions, sizes[0]);
        batch.slot_mapping = resized(b.slots, sizes[0]);
        batch.block_table = resized(b.table, wide ? sizes[1] : (int64_t)cells);
        batch.query_lens = resized(b.query_lens, sizes[1]);
        batch.seq_lens = resized(b.seq_lens, sizes[1]);
        batch.logits_rows = resized(b.logits_rows, sizes[2]);
        Bytes logits(std::clamp<int64_t>(sizes[2], 0, 64) * d.vocab_size * 4);
        count(sol_model_step(model, &batch, logits.floats()), "sol_model_step");
    }
    sol_model_destroy(model);
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t seed = 1;
    int64_t iterations = 20000;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string argument = argv[i];
        if (argument == "--seed") {
            seed = strtoull(argv[i + 1], nullptr, 10);
        } else if (argument == "--iterations") {
            iterations = strtoll(argv[i + 1], nullptr, 10);
        } else {
            fprintf(stderr, "usage: %s [--seed N] [--iterations N]\n", argv[0]);
            return 2;
        }
    }
    const std::vector<int32_t> isas = supported_isas();
    const char* const verbose = getenv("FUZZ_VERBOSE");
    for (int64_t i = 0; i < iterations; i++) {
        Random random(seed * 0x1000003 + (uint64_t)i);  // each iteration can be repeated alone
        if (verbose != nullptr) fprintf(stderr, "%" PRId64 "\n", i);
        const int64_t kind = random.below(20);
        if (kind == 0) {
            fuzz_model(random, random.pick(isas));
        } else if (kind < 10) {
            fuzz_pack(random, isas);
        } else {
            fuzz_packed(random, isas);
        }
    }
    printf("%" PRId64 " inputs: %" PRId64 " calls accepted, %" PRId64 " refused; %" PRId64 " checks, %" PRId64 " failed\n",
           iterations, accepted, refused, num_checks, num_failures);
    return num_failures == 0 ? 0 : 1;
}
