// The walk through a model's ops that all threads take together. A kernel is only ever called from here.
#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace sol {

namespace {

using Clock = std::chrono::steady_clock;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that a projection takes: row i is base + index[i] · stride (index null: i), through a norm where there is one.
struct Source {
    const float* base;
    int64_t stride;
    const int64_t* index;
    int64_t count;
    const SolNorm* norm;

    const float* row(int64_t i) const { return base + (index == nullptr ? i : index[i]) * stride; }
};

// The same rows in the forms that the projection's segments want.
struct Input {
    const float* x = nullptr;
    const QuantizedActivations* quantized = nullptr;
};

// A chunk of a projection: some tokens times some units.
struct Chunk {
    Input input;
    int64_t token_begin;
    int64_t token_end;
    int64_t unit_begin;
    int64_t unit_end;
};

class StepWalk {
   public:
    StepWalk(SolModel& model, Walker& walker)
        : m_(model),
          k_(*model.kernels),
          w_(walker),
          local_(model.locals[(size_t)walker.thread()]),
          batch_(model.step.batch),
          tokens_(model.step.batch.num_tokens) {}

    void walk() {
        auto begin = Clock::now();
        embed();
        account(0, begin);
        for (const Op& op : m_.ops) {
            switch (op.kind) {
                case SOL_OP_ATTENTION_INPUT:
                    attention_input(op);
                    account(1, begin);
                    input_ = &op;
                    break;
                case SOL_OP_PAGED_ATTENTION:
                    paged_attention(op);
                    account(2, begin);
                    residual_source_ = m_.attended;
                    break;
                case SOL_OP_PROJECT_RESIDUAL:
                    project_residual(op);
                    account(3, begin);
                    break;
                case SOL_OP_MOE:
                    moe(op);
                    account(4, begin);
                    break;
                default:
                    mlp_input(op);
                    account(4, begin);
                    residual_source_ = m_.hidden;
            }
        }
        logits();
        account(5, begin);
    }

   private:
    void account(int kind, Clock::time_point& begin) {
        if (w_.thread() != 0) return;
        const auto now = Clock::now();
        m_.timing.seconds[kind] += std::chrono::duration<double>(now - begin).count();
        begin = now;
    }

    void embed() {
        w_.phase(tokens_, [&](int64_t token) {
            float* row = m_.residual + token * m_.hidden_size;
            k_.unpack_row(m_.embedding, batch_.token_ids[token], row);
            if (m_.embedding_scale == 1.0f) return;
            for (int64_t i = 0; i < m_.hidden_size; i++) row[i] *= m_.embedding_scale;
        });
    }

    // ---- projections

    void prepare_row(const LinearPlan& linear, const Source& source, int64_t row, float* x,
                     const QuantizedActivations* quantized) {
        const float* in = source.row(row);
        if (source.norm != nullptr) {
            float* out = linear.has_float ? x + row * linear.cols : local_.row;
            k_.rms_norm(in, source.norm->weight, source.norm->eps, source.norm->offset, linear.cols, out);
            in = out;
        }
        for (size_t i = 0; i < linear.perms.size(); i++) k_.quantize(in, linear.perms[i], row, quantized[i]);
    }

    // Calls body(chunk) for the chunks of a projection that fall to this thread.
    template <class Body>
    void project(const LinearPlan& linear, const Source& source, Body&& body) {
        if (source.count == 0) return;
        Input input{source.norm == nullptr ? source.base : nullptr, nullptr};
        const bool prepare = source.norm != nullptr || !linear.perms.empty();
        const bool own = source.count <= OWN_INPUT_TOKENS;
        if (prepare) {
            const int64_t room = own ? OWN_INPUT_TOKENS : m_.max_num_tokens;
            for (size_t i = 0; i < linear.perms.size(); i++) {
                local_.views[i] = quantized_in(own ? local_.quantized[i] : m_.quantized[i], room, linear.cols);
            }
            input.quantized = local_.views.data();
            if (source.norm != nullptr) input.x = own ? local_.x : m_.x;
        }
        float* x = own ? local_.x : m_.x;
        if (prepare && !own) {
            // Of a verifying step's few rows, each goes to whoever is free.
            const int64_t at_once = std::clamp(source.count / (4 * w_.num_threads()), int64_t{1}, int64_t{4});
            w_.phase(ceil_div(source.count, at_once), [&](int64_t chunk) {
                const int64_t end = std::min(source.count, (chunk + 1) * at_once);
                for (int64_t row = chunk * at_once; row < end; row++) {
                    prepare_row(linear, source, row, x, input.quantized);
                }
            });
        }
        // Only a thread that got a chunk prepares its input: until it is done, nobody changes what it reads.
        bool ready = !prepare || !own;
        const int64_t units = (int64_t)linear.units.size();
        const int64_t tiles = ceil_div(source.count, TILE_TOKENS);
        const int64_t tile = ceil_div(source.count, tiles);
        const int64_t at_once = std::clamp(units / (8 * w_.num_threads()), int64_t{1}, TILE_UNITS);
        const int64_t chunks = ceil_div(units, at_once);
        w_.phase(tiles * chunks, [&](int64_t index) {
            if (!ready) {
                for (int64_t row = 0; row < source.count; row++) prepare_row(linear, source, row, x, input.quantized);
                ready = true;
            }
            const int64_t t = index / chunks * tile, u = index % chunks * at_once;
            body(Chunk{input, t, std::min(source.count, t + tile), u, std::min(units, u + at_once)});
        });
    }

    // y[(t - token_begin) · stride + row] for the projection's rows `row` in the chunk's part of `units`.
    void multiply(const LinearPlan& linear, const std::vector<Unit>& units, const Chunk& chunk, float* y,
                  int64_t stride) {
        const int64_t count = chunk.token_end - chunk.token_begin;
        for (int64_t u = chunk.unit_begin; u < chunk.unit_end;) {
            int64_t end = u + 1;  // neighbours in the same segment are one call
            while (end < chunk.unit_end && units[(size_t)end].segment == units[(size_t)u].segment) end++;
            const LinearSegment& segment = linear.segments[(size_t)units[(size_t)u].segment];
            const int64_t first = units[(size_t)u].group_begin, last = units[(size_t)end - 1].group_end;
            float* out = y + segment.row;
            if (segment.input < 0) {
                k_.linear(segment.matrix, chunk.input.x + chunk.token_begin * linear.cols, nullptr, count, first, last,
                          out, stride, local_.scratch);
            } else {
                const QuantizedActivations q = chunk.input.quantized[segment.input].from(chunk.token_begin);
                k_.linear(segment.matrix, nullptr, &q, count, first, last, out, stride, local_.scratch);
            }
            u = end;
        }
    }

    // The same into the thread's tile, bias added; returns the number of rows, which is the tile's stride.
    int64_t multiply_tile(const LinearPlan& linear, const std::vector<Unit>& units, const Chunk& chunk, float* tile) {
        const Unit& last = units[(size_t)chunk.unit_end - 1];
        const int64_t row = units[(size_t)chunk.unit_begin].row, rows = last.row + last.num_rows - row;
        multiply(linear, units, chunk, tile - row, rows);
        if (linear.bias != nullptr) {
            for (int64_t t = 0; t < chunk.token_end - chunk.token_begin; t++) {
                k_.add(tile + t * rows, linear.bias + row, rows);
            }
        }
        return rows;
    }

    void project_to(const LinearPlan& linear, const Source& source, float* y) {
        project(linear, source, [&](const Chunk& chunk) {
            multiply(linear, linear.units, chunk, y + chunk.token_begin * linear.rows, linear.rows);
            if (linear.bias == nullptr) return;
            const Unit& last = linear.units[(size_t)chunk.unit_end - 1];
            const int64_t row = linear.units[(size_t)chunk.unit_begin].row;
            for (int64_t t = chunk.token_begin; t < chunk.token_end; t++) {
                k_.add(y + t * linear.rows + row, linear.bias + row, last.row + last.num_rows - row);
            }
        });
    }

    void attention_input(const Op& op) {
        project_to(op.linear, Source{m_.residual, m_.hidden_size, nullptr, tokens_, &op.norm}, m_.qkv);
    }

    void project_residual(const Op& op) {
        const LinearPlan& linear = op.linear;
        if (op.norm.weight != nullptr) {
            project_to(linear, Source{residual_source_, linear.cols, nullptr, tokens_, nullptr}, m_.projected);
            w_.phase(tokens_, [&](int64_t token) {
                const int64_t at = token * m_.hidden_size;
                k_.rms_norm(m_.projected + at, op.norm.weight, op.norm.eps, op.norm.offset, m_.hidden_size, local_.row);
                k_.add(m_.residual + at, local_.row, m_.hidden_size);
            });
            return;
        }
        project(linear, Source{residual_source_, linear.cols, nullptr, tokens_, nullptr}, [&](const Chunk& chunk) {
            const int64_t row = linear.units[(size_t)chunk.unit_begin].row;
            const int64_t rows = multiply_tile(linear, linear.units, chunk, local_.tile);
            for (int64_t t = chunk.token_begin; t < chunk.token_end; t++) {
                k_.add(m_.residual + t * m_.hidden_size + row, local_.tile + (t - chunk.token_begin) * rows, rows);
            }
        });
    }

    void mlp_input(const Op& op) {
        gate_up(op, op.linear, Source{m_.residual, m_.hidden_size, nullptr, tokens_, &op.norm});
    }

    // Of the source's rows, to the first rows of `hidden`.
    void gate_up(const Op& op, const LinearPlan& linear, const Source& source) {
        const int64_t size = m_.intermediate_size;
        const auto multiply_gate = op.activation == SOL_ACT_GELU_TANH ? k_.gelu_mul : k_.silu_mul;
        if (linear.partners.empty()) {
            project_to(linear, source, m_.gate_up);
            w_.phase(source.count, [&](int64_t token) {
                const float* gate = m_.gate_up + token * 2 * size;
                multiply_gate(gate, gate + size, size, m_.hidden + token * size);
            });
            return;
        }
        project(linear, source, [&](const Chunk& chunk) {
            const int64_t row = linear.units[(size_t)chunk.unit_begin].row;
            const int64_t rows = multiply_tile(linear, linear.units, chunk, local_.tile);
            multiply_tile(linear, linear.partners, chunk, local_.up_tile);
            for (int64_t t = 0; t < chunk.token_end - chunk.token_begin; t++) {
                multiply_gate(local_.tile + t * rows, local_.up_tile + t * rows, rows,
                              m_.hidden + (chunk.token_begin + t) * size + row);
            }
        });
    }

    // ---- mixtures of experts

    // The router's logits become the token's experts and their weights.
    void choose(const Op& op, int64_t token) {
        Mixture& mixture = m_.mixture;
        const int64_t experts = (int64_t)op.gate_up.size(), count = op.experts_per_token;
        float* scores = mixture.scores + token * experts;
        float most = scores[0], sum = 0.0f, kept = 0.0f;
        for (int64_t e = 1; e < experts; e++) most = std::max(most, scores[e]);
        for (int64_t e = 0; e < experts; e++) sum += scores[e] = std::exp(scores[e] - most);
        int32_t* chosen = mixture.chosen + token * count;
        float* weights = mixture.weights + token * count;
        for (int64_t i = 0; i < count; i++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++) {
                if (std::find(chosen, chosen + i, (int32_t)e) != chosen + i) continue;
                if (best < 0 || scores[e] > scores[best]) best = e;
            }
            chosen[i] = (int32_t)best;
            weights[i] = scores[best] / sum;
            kept += weights[i];
        }
        for (int64_t i = 0; i < count && op.normalise; i++) weights[i] /= kept;
        std::fill_n(mixture.mixed + token * m_.hidden_size, m_.hidden_size, 0.0f);
    }

    // Counting sort of (token, expert) pairs by expert; tokens stay in order.
    void group(const Op& op) {
        Mixture& mixture = m_.mixture;
        const int64_t count = op.experts_per_token, experts = (int64_t)op.gate_up.size();
        std::fill_n(mixture.starts.begin(), experts + 1, 0);
        for (int64_t i = 0; i < tokens_ * count; i++) mixture.starts[(size_t)mixture.chosen[i] + 1]++;
        for (int64_t e = 0; e < experts; e++) mixture.starts[(size_t)e + 1] += mixture.starts[(size_t)e];
        for (int64_t i = 0; i < tokens_ * count; i++) {
            const int64_t at = mixture.starts[(size_t)mixture.chosen[i]]++;
            mixture.tokens[at] = i / count;
            mixture.token_weights[at] = mixture.weights[i];
        }
        for (int64_t e = experts; e > 0; e--) mixture.starts[(size_t)e] = mixture.starts[(size_t)e - 1];
        mixture.starts[0] = 0;
    }

    // Expert by expert, each with its tokens: what a token gets is added up in the order of its experts, whoever else
    // is in the step.
    void moe(const Op& op) {
        Mixture& mixture = m_.mixture;
        project_to(op.linear, Source{m_.residual, m_.hidden_size, nullptr, tokens_, &op.norm}, mixture.scores);
        w_.phase(tokens_, [&](int64_t token) { choose(op, token); });
        w_.phase(1, [&](int64_t) { group(op); });
        for (size_t e = 0; e < op.gate_up.size(); e++) {
            const int64_t first = mixture.starts[e], count = mixture.starts[e + 1] - first;
            if (count == 0) continue;
            gate_up(op, op.gate_up[e],
                    Source{m_.residual, m_.hidden_size, mixture.tokens + first, count, &op.norm});
            const LinearPlan& down = op.down[e];
            project(down, Source{m_.hidden, down.cols, nullptr, count, nullptr}, [&](const Chunk& chunk) {
                const int64_t row = down.units[(size_t)chunk.unit_begin].row;
                const int64_t rows = multiply_tile(down, down.units, chunk, local_.tile);
                for (int64_t t = chunk.token_begin; t < chunk.token_end; t++) {
                    float* out = local_.tile + (t - chunk.token_begin) * rows;
                    const float weight = mixture.token_weights[first + t];
                    for (int64_t i = 0; i < rows; i++) out[i] *= weight;
                    k_.add(mixture.mixed + mixture.tokens[first + t] * m_.hidden_size + row, out, rows);
                }
            });
        }
        w_.phase(tokens_, [&](int64_t token) {
            const int64_t at = token * m_.hidden_size;
            k_.add(m_.residual + at, mixture.mixed + at, m_.hidden_size);
        });
    }

    void logits() {
        const Source source{m_.residual, m_.hidden_size, batch_.logits_rows, batch_.num_logits_rows, &m_.final_norm};
        project_to(m_.head, source, m_.step.logits);
        if (m_.logits_softcap == 0.0f) return;
        constexpr int64_t at_once = 4096;
        const int64_t chunks = ceil_div(m_.vocab_size, at_once);
        w_.phase(batch_.num_logits_rows * chunks, [&](int64_t index) {
            const int64_t begin = index % chunks * at_once, end = std::min(m_.vocab_size, begin + at_once);
            k_.softcap(m_.step.logits + index / chunks * m_.vocab_size + begin, m_.logits_softcap, end - begin);
        });
    }

    // ---- attention

    uint8_t* layer(const Op& op) const { return m_.kv_cache + op.layer * m_.layer_nbytes; }

    // One head of a query or a key, in place.
    void rotate(float* x, int64_t token, const SolNorm& norm) const {
        if (norm.weight != nullptr) k_.rms_norm(x, norm.weight, norm.eps, norm.offset, m_.head_dim, x);
        const int64_t at = batch_.positions[token] * (m_.head_dim / 2);
        k_.rope(x, input_->rope_cos + at, input_->rope_sin + at, m_.head_dim);
    }

    void write_kv(const Op& op, int64_t token, int64_t kv_head) {
        const float* row = m_.qkv + token * (m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim;
        const float* key = row + (m_.num_heads + kv_head) * m_.head_dim;
        const float* value = key + m_.num_kv_heads * m_.head_dim;
        memcpy(local_.key, key, (size_t)m_.head_dim * sizeof(float));
        rotate(local_.key, token, input_->k_norm);
        const int64_t slot = batch_.slot_mapping[token];
        uint8_t* head = layer(op) + slot / m_.kv.block_size * m_.kv.block_nbytes + kv_head * m_.kv.head_nbytes;
        k_.attention->write_kv(m_.kv, head, (int32_t)(slot % m_.kv.block_size), local_.key, value);
    }

    void paged_attention(const Op& op) {
        if (!m_.step.fused) {
            constexpr int64_t at_once = 8;
            w_.phase(ceil_div(tokens_, at_once), [&](int64_t chunk) {
                for (int64_t token = chunk * at_once; token < std::min(tokens_, (chunk + 1) * at_once); token++) {
                    for (int64_t head = 0; head < m_.num_kv_heads; head++) write_kv(op, token, head);
                }
            });
        }
        w_.phase((int64_t)m_.step.tasks.size(), [&](int64_t index) { attend(op, m_.step.tasks[(size_t)index]); });
    }

    void attend(const Op& op, const AttentionTask& task) {
        const int64_t start = m_.step.starts[(size_t)task.request];
        const int64_t query_len = batch_.query_lens[task.request];
        const int64_t computed = batch_.seq_lens[task.request] - query_len;
        if (m_.step.fused) {  // the tokens that lie in this task's segments
            const int64_t size = m_.kv.segment_tokens();
            const int64_t begin = std::max<int64_t>(0, task.segment_begin * size - computed);
            const int64_t end = std::min(query_len, task.segment_end * size - computed);
            for (int64_t i = begin; i < end; i++) write_kv(op, start + i, task.kv_head);
        }
        const int64_t group = m_.num_heads / m_.num_kv_heads;
        AttentionRows rows{};
        rows.kv = &m_.kv;
        rows.layer = layer(op);
        rows.block_table = batch_.block_table + task.request * batch_.max_blocks;
        rows.kv_head = task.kv_head;
        rows.group = (int32_t)group;
        rows.window = op.window;
        rows.scale = op.scale;
        rows.softcap = op.softcap;
        rows.q = local_.query;
        for (int64_t row = task.row_begin; row < task.row_end; row += ATTENTION_ROWS) {
            rows.num_rows = (int32_t)std::min<int64_t>(ATTENTION_ROWS, task.row_end - row);
            rows.first_token = computed + row / group;
            rows.first_head = (int32_t)(row % group);
            for (int64_t i = 0; i < rows.num_rows; i++) {
                float* query = local_.query + i * m_.head_dim;
                memcpy(query, query_row(m_.qkv, m_.num_heads + 2 * m_.num_kv_heads, start, task, row + i),
                       (size_t)m_.head_dim * sizeof(float));
                rotate(query, start + (row + i) / group, input_->q_norm);
            }
            AttentionState state = local_.state;
            if (task.split >= 0) {
                const AttentionSplit& split = m_.step.splits[(size_t)task.split];
                state = split_state(split, task.segment_begin, row - split.row_begin);
            }
            clear_state(state, rows.num_rows);
            k_.attention->attend(rows, task.segment_begin, task.segment_end, state, local_.attention_scratch);
            if (task.split < 0) {
                for (int64_t i = 0; i < rows.num_rows; i++) {
                    float* out = query_row(m_.attended, m_.num_heads, start, task, row + i);
                    k_.attention->finish(m_.kv, state, i, out);
                }
            }
        }
        if (task.split >= 0) merge_split(start, task);
    }

    // The head of a token that a task's row stands for, in an array of `heads` heads a token.
    float* query_row(float* base, int64_t heads, int64_t start, const AttentionTask& task, int64_t row) const {
        const int64_t group = m_.num_heads / m_.num_kv_heads;
        return base + ((start + row / group) * heads + task.kv_head * group + row % group) * m_.head_dim;
    }

    AttentionState split_state(const AttentionSplit& split, int64_t segment, int64_t row) const {
        const int64_t at = split.first_state + segment * split.num_rows + row;
        return {m_.states.max + at, m_.states.sum + at, m_.states.acc + at * m_.kv.value_pitch};
    }

    void merge_split(int64_t start, const AttentionTask& task) {
        const AttentionSplit& split = m_.step.splits[(size_t)task.split];
        // Counted on from layer to layer; plan_step starts it at zero.
        const int64_t finished = m_.finished[(size_t)task.split].fetch_add(1, std::memory_order_acq_rel) + 1;
        if (finished % split.num_segments != 0) return;
        const AttentionState state = split_state(split, 0, 0);
        for (int64_t segment = 1; segment < split.num_segments; segment++) {
            k_.attention->merge(m_.kv, split.num_rows, state, split_state(split, segment, 0));
        }
        for (int64_t row = 0; row < split.num_rows; row++) {
            float* out = query_row(m_.attended, m_.num_heads, start, task, split.row_begin + row);
            k_.attention->finish(m_.kv, state, row, out);
        }
    }

    SolModel& m_;
    const Kernels& k_;
    Walker& w_;
    Local& local_;
    const SolBatch& batch_;
    const int64_t tokens_;
    const Op* input_ = nullptr;              // the attention input op at hand: its rotary tables
    const float* residual_source_ = nullptr;  // what the next project_residual takes
};

}  // namespace

void walk_step(void* context, Walker& walker) { StepWalk(*static_cast<SolModel*>(context), walker).walk(); }

}  // namespace sol
