// A tiny model with mixed formats, and batches for it.
#pragma once

#include <memory>

#include "sources.h"

namespace test {

constexpr int64_t VOCAB = 61;

struct ModelOptions {
    int32_t isa = SOL_ISA_PORTABLE;
    int32_t num_threads = 1;
    int32_t kv_dtype = SOL_KV_F32;
    int32_t block_size = 16;
    int32_t max_num_tokens = 96;
    int32_t window = 0;
    float softcap = 0;
    bool floats = false;   // float weights alone
    int64_t intermediate_size = 96;
    int64_t num_blocks = 120;
    int64_t max_positions = 700;
    uint64_t seed = 23;
    const SolModel* threads_of = nullptr;
};

// Owns all that a SolModelDesc points to. The same seed gives the same weights for every instruction set.
class TinyModel {
   public:
    explicit TinyModel(const ModelOptions& options) : options_(options) {
        constexpr int64_t hidden = 256;
        constexpr int32_t layers = 2, heads = 4, kv_heads = 2, head_dim = 20;
        Random random(options.seed);
        desc_.isa = options.isa;
        desc_.num_threads = options.num_threads;
        desc_.threads_of = options.threads_of;
        desc_.hidden_size = hidden;
        desc_.intermediate_size = options.intermediate_size;
        desc_.vocab_size = VOCAB;
        desc_.max_positions = options.max_positions;
        desc_.num_layers = layers;
        desc_.num_heads = heads;
        desc_.num_kv_heads = kv_heads;
        desc_.head_dim = head_dim;
        desc_.kv_dtype = options.kv_dtype;
        desc_.block_size = options.block_size;
        desc_.max_num_tokens = options.max_num_tokens;
        desc_.num_blocks = options.num_blocks;
        const int64_t block = sol_kv_block_nbytes(options.isa, options.kv_dtype, kv_heads, head_dim, options.block_size);
        kv_cache_ = Bytes(layers * options.num_blocks * block);
        memset(kv_cache_.data(), 0xff, (size_t)kv_cache_.nbytes());
        desc_.kv_cache = kv_cache_.data();
        desc_.kv_cache_nbytes = kv_cache_.nbytes();
        const int64_t angles = options.max_positions * (head_dim / 2);
        float *cosine = keep(Bytes(angles * 4)), *sine = keep(Bytes(angles * 4));
        for (int64_t i = 0; i < angles; i++) {
            const double angle = (double)(i / (head_dim / 2)) * pow(10000.0, -(double)(i % (head_dim / 2)) / (head_dim / 2));
            cosine[i] = (float)cos(angle);
            sine[i] = (float)sin(angle);
        }
        const int64_t q = heads * head_dim, k = kv_heads * head_dim, inter = options.intermediate_size;
        for (int32_t layer = 0; layer < layers; layer++) {
            const bool odd = layer % 2 == 1;
            SolOp op{};
            op.kind = SOL_OP_ATTENTION_INPUT;
            op.layer = layer;
            op.norm = norm(random, hidden);
            op.linear = odd ? linear(random, hidden, {{SOL_Q4_K, q}, {SOL_Q6_K, 2 * k}}, true)
                            : linear(random, hidden, {{SOL_Q8_0, q}, {SOL_F16, k}, {SOL_INT4, k}}, false);
            op.rope_cos = cosine;
            op.rope_sin = sine;
            ops_.push_back(op);
            op = SolOp{};
            op.kind = SOL_OP_PAGED_ATTENTION;
            op.layer = layer;
            op.scale = 1.0f / sqrtf((float)head_dim);
            op.softcap = options.softcap;
            op.window = odd ? 0 : options.window;
            ops_.push_back(op);
            op = SolOp{};
            op.kind = SOL_OP_PROJECT_RESIDUAL;
            // 80 columns are no multiple of 32: float weights alone.
            op.linear = linear(random, q, {{odd ? SOL_F32 : SOL_BF16, hidden}}, odd);
            ops_.push_back(op);
            op = SolOp{};
            op.kind = SOL_OP_MLP_INPUT;
            op.norm = norm(random, hidden);
            op.linear = odd ? linear(random, hidden, {{SOL_Q4_1, inter}, {SOL_Q5_K, inter}}, false)
                            : linear(random, hidden, {{SOL_Q5_0, 2 * inter}}, true);
            ops_.push_back(op);
            op = SolOp{};
            op.kind = SOL_OP_PROJECT_RESIDUAL;
            op.linear = linear(random, inter, {{odd ? SOL_INT8 : SOL_Q5_1, 100}, {SOL_Q4_0, hidden - 100}}, false);
            ops_.push_back(op);
        }
        desc_.num_ops = (int32_t)ops_.size();
        desc_.ops = ops_.data();
        desc_.final_norm = norm(random, hidden);
        desc_.head = linear(random, hidden, {{SOL_Q6_K, VOCAB}}, false);
        desc_.embedding = desc_.head.segments[0];
    }
    TinyModel(const TinyModel&) = delete;
    TinyModel& operator=(const TinyModel&) = delete;
    ~TinyModel() { close(); }

    SolModelDesc& desc() { return desc_; }
    std::vector<SolOp>& ops() { return ops_; }

    SolModel* model() {
        if (model_ == nullptr) check(sol_model_create(&desc_, &model_) == SOL_OK, "sol_model_create: %s", sol_last_error());
        return model_;
    }
    void close() {
        sol_model_destroy(model_);
        model_ = nullptr;
    }

   private:
    struct Part {
        int32_t format;
        int64_t rows;
    };

    float* keep(Bytes bytes) {
        kept_.push_back(std::move(bytes));
        return kept_.back().floats();
    }
    SolNorm norm(Random& random, int64_t size) {
        return {keep(random_floats(random, size, 0.5f)), 1e-5f, 1.0f};
    }
    SolLinear linear(Random& random, int64_t cols, const std::vector<Part>& parts, bool bias) {
        segments_.push_back(std::make_unique<std::vector<SolSegment>>());
        std::vector<SolSegment>& segments = *segments_.back();
        int64_t rows = 0;
        for (const Part& part : parts) {
            for (const FormatCase& f : all_formats()) {
                if (f.format != (options_.floats ? (int32_t)SOL_F32 : part.format)) continue;
                PackedWeight weight = pack_weight(options_.isa, random_source(random, f, part.rows, cols));
                segments.push_back(weight.segment);
                kept_.push_back(std::move(weight.data));
                rows += part.rows;
                break;
            }
        }
        return {(int32_t)segments.size(), 0, segments.data(), bias ? keep(random_floats(random, rows, 0.1f)) : nullptr};
    }

    ModelOptions options_;
    SolModelDesc desc_{};
    std::vector<SolOp> ops_;
    std::vector<std::unique_ptr<std::vector<SolSegment>>> segments_;
    std::vector<Bytes> kept_;
    Bytes kv_cache_{0};
    SolModel* model_ = nullptr;
};

// One request's part of a step.
struct Part {
    int64_t request;  // its blocks: request · width, then every `stride`th
    int64_t computed;
    std::vector<int64_t> tokens;
};

struct Batch {
    std::vector<int64_t> token_ids, positions, slots, table, query_lens, seq_lens, logits_rows;
    SolBatch batch{};
};

inline int64_t block_of(int64_t request, int64_t index) { return request + 4 * index; }  // four requests, interleaved

inline Batch make_batch(const std::vector<Part>& parts, int64_t block_size) {
    Batch b;
    int64_t width = 1;
    for (const Part& part : parts)
        width = std::max<int64_t>(width, (part.computed + (int64_t)part.tokens.size() - 1) / block_size + 1);
    for (const Part& part : parts) {
        int64_t position = part.computed;
        for (const int64_t token : part.tokens) {
            b.token_ids.push_back(token);
            b.positions.push_back(position);
            b.slots.push_back(block_of(part.request, position / block_size) * block_size + position % block_size);
            b.logits_rows.push_back((int64_t)b.logits_rows.size());
            position++;
        }
        b.query_lens.push_back((int64_t)part.tokens.size());
        b.seq_lens.push_back(position);
        for (int64_t i = 0; i < width; i++)
            b.table.push_back(i <= (position - 1) / block_size ? block_of(part.request, i) : -1);
    }
    b.batch = {(int64_t)b.token_ids.size(), (int64_t)parts.size(),  (int64_t)b.logits_rows.size(), width,
               b.token_ids.data(),          b.positions.data(),     b.slots.data(),                b.table.data(),
               b.query_lens.data(),         b.seq_lens.data(),      b.logits_rows.data()};
    return b;
}

}  // namespace test
