// Checks every instruction set that this processor has: its kernels against double precision and against the portable
// ones, whole steps of a model, and what the C ABI says to wrong arguments. Exit status 0 if all of it holds.
//
//     parity [--thorough] [--isa NAME]... [--threads ROUNDS]
//
// --threads: only the steps on several threads, so many rounds (for ThreadSanitizer).
#include <ctime>

#include "attention_checks.h"
#include "linear_checks.h"
#include "model_checks.h"

using namespace test;

namespace {

// Whether `code` is the error that is expected, with a message that names `word`.
void refused(int64_t code, int32_t expected, const char* word) {
    check(code == expected, "%s: code %" PRId64 ", not %d", word, code, expected);
    check(strstr(sol_last_error(), word) != nullptr, "the message '%s' does not name %s", sol_last_error(), word);
}

void check_weight_errors(int32_t isa) {
    Random random(3);
    const auto nbytes = [&](int32_t format, int64_t rows, int64_t cols, int32_t group) {
        return sol_packed_nbytes(isa, format, rows, cols, group);
    };
    refused(sol_packed_nbytes(99, SOL_F32, 1, 1, 0), SOL_E_UNSUPPORTED, "99");
    refused(sol_group_rows(-1), SOL_E_UNSUPPORTED, "-1");
    refused(nbytes(3, 1, 32, 0), SOL_E_ARGUMENT, "format 3");
    refused(nbytes(SOL_Q4_0, 0, 32, 0), SOL_E_ARGUMENT, "0 rows");
    refused(nbytes(SOL_Q4_0, 4, -32, 0), SOL_E_ARGUMENT, "-32 columns");
    refused(nbytes(SOL_Q4_0, 1, 48, 0), SOL_E_ARGUMENT, "48");
    refused(nbytes(SOL_Q4_K, 1, 128, 0), SOL_E_ARGUMENT, "256");
    refused(nbytes(SOL_INT4, 1, 128, 0), SOL_E_ARGUMENT, "group_size");
    refused(nbytes(SOL_INT4, 1, 128, 48), SOL_E_ARGUMENT, "group_size");
    refused(nbytes(SOL_INT4, 1, 96, 64), SOL_E_ARGUMENT, "96");
    refused(nbytes(SOL_Q8_0, 1, 32, 32), SOL_E_ARGUMENT, "group_size");
    refused(nbytes(SOL_F32, INT64_MAX, INT64_MAX, 0), SOL_E_ARGUMENT, "rows");
    for (const FormatCase& f : all_formats()) {
        const int64_t rows = 9, cols = 2 * f.block_cols;
        Source s = random_source(random, f, rows, cols);
        const int64_t size = nbytes(f.format, rows, cols, f.group_size);
        Bytes out(size);
        const auto pack = [&](int64_t data_nbytes, const float* scales, int64_t num_scales, const uint8_t* zeros,
                              int64_t num_zeros, int64_t out_nbytes) {
            return sol_pack(isa, f.format, rows, cols, f.group_size, s.data.data(), data_nbytes, scales, num_scales, zeros,
                            num_zeros, out.data(), out_nbytes);
        };
        const int64_t data = s.data.nbytes(), scales = (int64_t)s.scales.size(), zeros = (int64_t)s.zeros.size();
        const float one = 1.0f;
        refused(pack(data - 1, s.scales_or_null(), scales, s.zeros_or_null(), zeros, size), SOL_E_ARGUMENT, "data_nbytes");
        refused(pack(data, s.scales_or_null(), scales, s.zeros_or_null(), zeros, size - 1), SOL_E_ARGUMENT, "out_nbytes");
        refused(pack(data, s.scales.empty() ? &one : nullptr, scales, s.zeros_or_null(), zeros, size), SOL_E_ARGUMENT, "scales");
        if (scales > 0)
            refused(pack(data, s.scales_or_null(), scales - 1, s.zeros_or_null(), zeros, size), SOL_E_ARGUMENT, "num_scales");
        if (zeros > 0)
            refused(pack(data, s.scales_or_null(), scales, s.zeros_or_null(), zeros - 1, size), SOL_E_ARGUMENT, "num_zeros");
        if (f.is_float) continue;

        // A scale that is not finite, in the source and in what was packed.
        PackedWeight good = pack_weight(isa, s);
        if (!s.scales.empty()) {
            s.scales.back() = INFINITY;
        } else {
            const int64_t blocks = s.data.nbytes() / f.source_nbytes;
            put_f16(s.data.data() + (blocks - 1) * f.source_nbytes + (f.format == SOL_Q6_K ? 208 : 0), NAN);
        }
        refused(pack(data, s.scales_or_null(), scales, s.zeros_or_null(), zeros, size), SOL_E_DATA, "row 8 of 9");
        bool noticed = false;  // all ones somewhere in a group's last 64 bytes are a scale that is not finite
        for (int64_t begin = 0; begin + 64 <= size && !noticed; begin += 16) {
            Bytes damaged(size);
            memcpy(damaged.data(), good.data.data(), (size_t)size);
            memset(damaged.data() + begin, 0xff, 64);
            noticed = sol_check_packed(isa, f.format, rows, cols, f.group_size, damaged.data(), size) == SOL_E_DATA;
        }
        check(noticed, "%s: no damaged scale is noticed", f.name);
        refused(sol_check_packed(isa, f.format, rows, cols, f.group_size, good.data.data(), size - 1), SOL_E_ARGUMENT,
                "packed_nbytes");
        const int64_t ids[2] = {0, rows};
        Bytes row(2 * cols * 4);
        refused(sol_unpack_rows(isa, &good.segment, ids, 2, row.floats()), SOL_E_ARGUMENT, "ids[1]");
        std::vector<int32_t> perm((size_t)cols, 0);
        good.segment.perm = perm.data();
        const SolLinear linear = {1, 0, &good.segment, nullptr};
        refused(sol_linear(isa, &linear, row.floats(), 1, row.floats()), SOL_E_DATA, "perm[1]");
    }
    for (int32_t other = SOL_ISA_PORTABLE; other <= SOL_ISA_AVX512VNNI; other++) {
        if (sol_isa_supported(other) == 1) continue;  // not built in, or the processor has not got it: never executed
        const Source s = random_source(random, all_formats()[0], 1, 1);
        PackedWeight w;
        w.segment = {SOL_F32, 0, 1, 1, s.data.data(), 4, nullptr};
        const int64_t id = 0;
        float x = 1, y;
        const SolLinear linear = {1, 0, &w.segment, nullptr};
        check(sol_linear(other, &linear, &x, 1, &y) == SOL_E_UNSUPPORTED, "sol_linear on an instruction set that is not there");
        check(sol_unpack_rows(other, &w.segment, &id, 1, &y) < 0, "sol_unpack_rows on an instruction set that is not there");
    }
}

void check_model_errors(int32_t isa) {
    const auto create = [&](int32_t expected, const char* word, auto&& change) {
        ModelOptions options;
        options.isa = isa;
        TinyModel tiny(options);
        change(tiny.desc(), tiny.ops());
        SolModel* model = nullptr;
        refused(sol_model_create(&tiny.desc(), &model), expected, word);
        check(model == nullptr, "%s: a model nevertheless", word);
    };
    using Desc = SolModelDesc&;
    using Ops = std::vector<SolOp>&;
    create(SOL_E_UNSUPPORTED, "isa", [](Desc d, Ops) { d.isa = 77; });
    create(SOL_E_ARGUMENT, "num_threads", [](Desc d, Ops) { d.num_threads = 0; });
    create(SOL_E_ARGUMENT, "hidden_size", [](Desc d, Ops) { d.hidden_size = -1; });
    create(SOL_E_ARGUMENT, "embedding", [](Desc d, Ops) { d.vocab_size = 62; });
    create(SOL_E_ARGUMENT, "num_heads", [](Desc d, Ops) { d.num_heads = 3; });
    create(SOL_E_ARGUMENT, "head_dim", [](Desc d, Ops) { d.head_dim = 258; });
    create(SOL_E_ARGUMENT, "head_dim", [](Desc d, Ops) { d.head_dim = 21; });
    create(SOL_E_ARGUMENT, "kv_dtype", [](Desc d, Ops) { d.kv_dtype = 3; });
    create(SOL_E_ARGUMENT, "block_size", [](Desc d, Ops) { d.block_size = 257; });
    create(SOL_E_ARGUMENT, "kv_cache_nbytes", [](Desc d, Ops) { d.kv_cache_nbytes--; });
    create(SOL_E_ARGUMENT, "kv_cache", [](Desc d, Ops) { d.kv_cache = (char*)d.kv_cache + 4; });
    create(SOL_E_ARGUMENT, "ops", [](Desc d, Ops) { d.ops = nullptr; });
    create(SOL_E_ARGUMENT, "packed_nbytes", [](Desc d, Ops) { d.embedding.packed_nbytes++; });
    create(SOL_E_ARGUMENT, "packed", [](Desc d, Ops) { d.embedding.packed = nullptr; });
    create(SOL_E_ARGUMENT, "norm", [](Desc d, Ops) { d.final_norm.weight = nullptr; });
    create(SOL_E_ARGUMENT, "eps", [](Desc d, Ops) { d.final_norm.eps = NAN; });
    create(SOL_E_ARGUMENT, "ops[0]", [](Desc, Ops ops) { ops[0].layer = 2; });
    create(SOL_E_ARGUMENT, "ops[0].segments[1]", [](Desc, Ops ops) {
        const_cast<SolSegment&>(ops[0].linear.segments[1]).packed_nbytes = 3;
    });
    create(SOL_E_ARGUMENT, "rope", [](Desc, Ops ops) { ops[0].rope_sin = nullptr; });
    create(SOL_E_ARGUMENT, "kind is 9", [](Desc, Ops ops) { ops[0].kind = 9; });
    create(SOL_E_UNSUPPORTED, "ops[2]", [](Desc, Ops ops) { ops[2].kind = SOL_OP_MLP_INPUT; });
    create(SOL_E_UNSUPPORTED, "ops", [](Desc d, Ops) { d.num_ops--; });
    create(SOL_E_ARGUMENT, "window", [](Desc, Ops ops) { ops[1].window = -1; });
    create(SOL_E_ARGUMENT, "segments", [](Desc, Ops ops) { ops[2].linear.num_segments = 0; });

    ModelOptions options;
    options.isa = isa;
    options.num_threads = 2;
    TinyModel tiny(options);
    const int32_t core = 0;
    create(SOL_E_ARGUMENT, "num_threads is 1", [&](Desc d, Ops) { d.threads_of = tiny.model(); });
    create(SOL_E_ARGUMENT, "cores not null", [&](Desc d, Ops) {
        d.threads_of = tiny.model();
        d.num_threads = 2;
        d.cores = &core;
    });
    const auto step = [&](const char* word, auto&& change) {
        Batch batch = make_batch({part_of(0, 0, 5), part_of(1, 0, 1)}, 16);
        change(batch);
        Bytes out(6 * VOCAB * 4);
        refused(sol_model_step(tiny.model(), &batch.batch, out.floats()), SOL_E_ARGUMENT, word);
    };
    step("num_tokens", [](Batch& b) { b.batch.num_tokens = 97; });
    step("num_tokens", [](Batch& b) { b.batch.num_tokens = -1; });
    step("num_requests", [](Batch& b) { b.batch.num_requests = 7; });
    step("num_logits_rows", [](Batch& b) { b.batch.num_logits_rows = 7; });
    step("max_blocks", [](Batch& b) { b.batch.max_blocks = 0; });
    step("token_ids is null", [](Batch& b) { b.batch.token_ids = nullptr; });
    step("token_ids[2]", [](Batch& b) { b.token_ids[2] = VOCAB; });
    step("positions[1]", [](Batch& b) { b.positions[1] = 700; });
    step("slot_mapping[5]", [](Batch& b) { b.slots[5] = 120 * 16; });
    step("slot_mapping[5]", [](Batch& b) { b.slots[5] = -1; });
    step("block_table[1, 0]", [](Batch& b) { b.table[1] = 120; });
    step("query_lens", [](Batch& b) { b.query_lens[0] = 0; });
    step("query_lens", [](Batch& b) { b.query_lens[0] = 4; });
    step("query_lens", [](Batch& b) { b.query_lens[0] = INT64_MAX; });
    step("seq_lens[0]", [](Batch& b) { b.seq_lens[0] = 4; });
    step("seq_lens[0]", [](Batch& b) { b.seq_lens[0] = 17; });
    step("seq_lens[0]", [](Batch& b) { b.seq_lens[0] = INT64_MAX; });
    step("logits_rows[0]", [](Batch& b) { b.logits_rows[0] = 6; });
    Logits logits(4);
    run_step(tiny, {part_of(0, 0, 5)}, 16, logits);  // and it still works
    check(sol_model_workspace_nbytes(tiny.model()) > 0, "no workspace");
    double seconds[7];
    sol_model_times(tiny.model(), seconds);
    for (const double s : seconds) check(s >= 0.0, "negative time");
    refused(sol_model_create(nullptr, nullptr), SOL_E_ARGUMENT, "null");
    refused(sol_kv_block_nbytes(isa, 9, 1, 2, 1), SOL_E_ARGUMENT, "kv_dtype");
    refused(sol_kv_block_nbytes(isa, SOL_KV_F32, 0, 2, 1), SOL_E_ARGUMENT, "num_kv_heads");
}

template <class Body>
void section(const char* isa, const char* name, Body&& body) {
    const int64_t checks = num_checks, failures = num_failures;
    timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    body();
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    printf("%-11s %-12s %8" PRId64 " checks, %" PRId64 " failed, %.1f s\n", isa, name, num_checks - checks,
           num_failures - failures, seconds);
    fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    bool thorough = false;
    int rounds = 0;
    std::vector<int32_t> isas;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == "--thorough") {
            thorough = true;
        } else if (argument == "--threads" && i + 1 < argc) {
            rounds = atoi(argv[++i]);
        } else if (argument == "--isa" && i + 1 < argc) {
            const std::string wanted = argv[++i];
            for (const int32_t isa : supported_isas())
                if (wanted == isa_name(isa)) isas.push_back(isa);
            if (isas.empty()) {
                fprintf(stderr, "this processor or this build does not have %s\n", wanted.c_str());
                return 2;
            }
        } else {
            fprintf(stderr, "usage: %s [--thorough] [--isa NAME]... [--threads ROUNDS]\n", argv[0]);
            return 2;
        }
    }
    check(sol_abi_version() == SOL_ABI_VERSION, "ABI version");
    if (isas.empty()) isas = supported_isas();
    for (const int32_t isa : isas) {
        const char* name = isa_name(isa);
        const sol::Kernels& kernels = *sol::kernels_for(isa);
        check(kernels.isa == isa && kernels.group_rows == sol_group_rows(isa), "%s: the table is another's", name);
        if (rounds > 0) {
            section(name, "threads", [&] {
                check_threads(isa, rounds);
                check_shared_threads(isa, 1 + rounds / 3);
            });
            continue;
        }
        section(name, "quantize", [&] {
            Random random(5);
            check_quantize(kernels, random);
        });
        section(name, "elementwise", [&] { check_elementwise(kernels); });
        section(name, "linear", [&] { check_linear(kernels, thorough); });
        section(name, "perm", [&] { check_perm(kernels); });
        section(name, "attention", [&] { check_attention(kernels, thorough); });
        section(name, "model", [&] { check_model(isa, thorough); });
        section(name, "threads", [&] {
            check_threads(isa, thorough ? 20 : 4);
            check_shared_threads(isa, thorough ? 4 : 1);
        });
        section(name, "errors", [&] {
            check_weight_errors(isa);
            check_model_errors(isa);
        });
    }
    printf("%" PRId64 " checks, %" PRId64 " failed\n", num_checks, num_failures);
    return num_failures == 0 ? 0 : 1;
}
