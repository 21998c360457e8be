// The part of the C ABI that concerns models: what a description may say, and the workspace that it takes.
#include <algorithm>
#include <cmath>
#include <string>

#include "error.h"
#include "step.h"
#include "weights.h"

namespace sol {

namespace {

long long number(int64_t n) { return (long long)n; }

// Cuts rows [begin, end) of a projection into units, counted from `begin`; false if a cut falls inside a row group.
bool make_units(const LinearPlan& linear, int64_t group_rows, int64_t begin, int64_t end, std::vector<Unit>* units) {
    for (size_t i = 0; i < linear.segments.size(); i++) {
        const LinearSegment& segment = linear.segments[i];
        const int64_t from = std::max(begin, segment.row) - segment.row;
        const int64_t to = std::min(end, segment.row + segment.matrix.rows) - segment.row;
        if (from >= to) continue;
        if (from % group_rows != 0 || (to % group_rows != 0 && to != segment.matrix.rows)) return false;
        for (int64_t row = from; row < to; row += UNIT_ROWS) {
            const int64_t stop = std::min(to, row + UNIT_ROWS);
            units->push_back({segment.row + row, stop - row, row / group_rows, (stop + group_rows - 1) / group_rows,
                              (int)i});
        }
    }
    return true;
}

int32_t open_linear(const SolModel& model, const SolLinear& linear, const std::string& what, int64_t rows, int64_t cols,
                    LinearPlan* out) {
    if (linear.num_segments < 1 || linear.segments == nullptr) {
        return fail(SOL_E_ARGUMENT, "%s: no segments", what.c_str());
    }
    for (int32_t i = 0; i < linear.num_segments; i++) {
        const std::string name = what + ".segments[" + std::to_string(i) + "]";
        LinearSegment segment{};
        segment.row = out->rows;
        if (const int32_t code = open_segment(*model.kernels, linear.segments[i], name.c_str(), &segment.matrix)) {
            return code;
        }
        if (segment.matrix.cols != cols) {
            return fail(SOL_E_ARGUMENT, "%s: cols is %lld; the input has %lld", name.c_str(),
                        number(segment.matrix.cols), number(cols));
        }
        if (is_float_format(segment.matrix.format)) {
            segment.input = -1;
            out->has_float = true;
        } else {
            const auto found = std::find(out->perms.begin(), out->perms.end(), segment.matrix.perm);
            segment.input = (int)(found - out->perms.begin());
            if (found == out->perms.end()) out->perms.push_back(segment.matrix.perm);
        }
        out->rows += segment.matrix.rows;
        out->segments.push_back(segment);
    }
    if (out->rows != rows) {
        return fail(SOL_E_ARGUMENT, "%s: the segments have %lld rows; it takes %lld", what.c_str(), number(out->rows),
                    number(rows));
    }
    out->cols = cols;
    out->bias = linear.bias;
    make_units(*out, model.kernels->group_rows, 0, rows, &out->units);
    return SOL_OK;
}

// Gate and up rows that a chunk computes together, if both halves fall into the same units.
void pair_units(const SolModel& model, LinearPlan* linear) {
    const int64_t half = linear->rows / 2;
    std::vector<Unit> gate, up;
    if (!make_units(*linear, model.kernels->group_rows, 0, half, &gate)) return;
    if (!make_units(*linear, model.kernels->group_rows, half, 2 * half, &up)) return;
    if (gate.size() != up.size()) return;
    for (size_t i = 0; i < gate.size(); i++) {
        if (up[i].row != gate[i].row + half || up[i].num_rows != gate[i].num_rows) return;
    }
    linear->units = std::move(gate);
    linear->partners = std::move(up);
}

int32_t check_norm(const SolNorm& norm, const std::string& what) {
    if (norm.weight == nullptr) return fail(SOL_E_ARGUMENT, "%s: the norm's weight is null", what.c_str());
    if (!std::isfinite(norm.eps) || norm.eps < 0 || !std::isfinite(norm.offset)) {
        return fail(SOL_E_ARGUMENT, "%s: the norm's eps is %g and its offset %g", what.c_str(), (double)norm.eps,
                    (double)norm.offset);
    }
    return SOL_OK;
}

int32_t check_dimensions(const SolModelDesc& d) {
    const struct {
        const char* name;
        int64_t value, low, high;
    } fields[] = {{"num_threads", d.num_threads, 1, 1024},
                  {"hidden_size", d.hidden_size, 1, 1 << 24},
                  {"intermediate_size", d.intermediate_size, 1, 1 << 24},
                  {"vocab_size", d.vocab_size, 1, 1 << 28},
                  {"max_positions", d.max_positions, 1, 1 << 28},
                  {"num_layers", d.num_layers, 1, 1 << 16},
                  {"num_heads", d.num_heads, 1, 1 << 16},
                  {"num_kv_heads", d.num_kv_heads, 1, d.num_heads},
                  {"head_dim", d.head_dim, 2, 256},
                  {"num_ops", d.num_ops, 0, 1 << 20},
                  {"kv_dtype", d.kv_dtype, SOL_KV_F32, SOL_KV_INT8},
                  {"block_size", d.block_size, 1, 256},
                  {"max_num_tokens", d.max_num_tokens, 1, 1 << 20},
                  {"num_blocks", d.num_blocks, 1, int64_t{1} << 40}};
    for (const auto& field : fields) {
        if (field.value < field.low || field.value > field.high) {
            return fail(SOL_E_ARGUMENT, "%s is %lld; it can be %lld to %lld", field.name, number(field.value),
                        number(field.low), number(field.high));
        }
    }
    if (d.num_heads % d.num_kv_heads != 0) {
        return fail(SOL_E_ARGUMENT, "num_heads is %d; it must be a multiple of num_kv_heads, %d", (int)d.num_heads,
                    (int)d.num_kv_heads);
    }
    if (d.head_dim % 2 != 0) return fail(SOL_E_ARGUMENT, "head_dim is %d; it must be even", (int)d.head_dim);
    if (d.max_num_tokens * (int64_t)d.num_heads > Walker::MAX_CHUNKS) {
        return fail(SOL_E_UNSUPPORTED, "max_num_tokens is %d; with %d heads it can be %lld", (int)d.max_num_tokens,
                    (int)d.num_heads, number(Walker::MAX_CHUNKS / d.num_heads));
    }
    if (d.ops == nullptr && d.num_ops > 0) return fail(SOL_E_ARGUMENT, "ops is null");
    if (d.kv_cache == nullptr || (uintptr_t)d.kv_cache % 64 != 0) {
        return fail(SOL_E_ARGUMENT, "kv_cache is %p; it must be aligned to 64 bytes", d.kv_cache);
    }
    return SOL_OK;
}

int32_t open_experts(const SolModel& model, const SolOp& op, const std::string& what, Op* out) {
    if (op.num_experts < 1 || op.num_experts > 1 << 16 || op.experts_per_token < 1 ||
        op.experts_per_token > op.num_experts || op.expert_gate_up == nullptr || op.expert_down == nullptr) {
        return fail(SOL_E_ARGUMENT, "%s: num_experts is %d, experts_per_token %d, or their weights are null",
                    what.c_str(), (int)op.num_experts, (int)op.experts_per_token);
    }
    out->experts_per_token = op.experts_per_token;
    out->normalise = op.normalise != 0;
    int32_t code = open_linear(model, op.linear, what, op.num_experts, model.hidden_size, &out->linear);
    for (int32_t e = 0; e < op.num_experts && code == SOL_OK; e++) {
        const std::string name = what + ".experts[" + std::to_string(e) + "]";
        LinearPlan gate_up, down;
        code = open_linear(model, op.expert_gate_up[e], name, 2 * model.intermediate_size, model.hidden_size, &gate_up);
        if (code != SOL_OK) return code;
        pair_units(model, &gate_up);
        code = open_linear(model, op.expert_down[e], name, model.hidden_size, model.intermediate_size, &down);
        out->gate_up.push_back(std::move(gate_up));
        out->down.push_back(std::move(down));
    }
    return code;
}

int32_t open_ops(const SolModelDesc& desc, SolModel* model) {
    const int64_t attended = model->num_heads * model->head_dim;
    const int64_t qkv = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    int64_t produced = 0;  // columns of what the next PROJECT_RESIDUAL takes; 0: nothing to take
    for (int32_t i = 0; i < desc.num_ops; i++) {
        const SolOp& op = desc.ops[i];
        const std::string what = "ops[" + std::to_string(i) + "]";
        const int32_t before = i == 0 ? -1 : desc.ops[i - 1].kind;
        const bool after_input = before == SOL_OP_ATTENTION_INPUT;
        if ((op.kind == SOL_OP_PAGED_ATTENTION) != after_input ||
            (op.kind == SOL_OP_PROJECT_RESIDUAL) != (before == SOL_OP_PAGED_ATTENTION || before == SOL_OP_MLP_INPUT)) {
            return fail(SOL_E_UNSUPPORTED,
                        "%s: kind %d after kind %d; the kernels walk ATTENTION_INPUT, PAGED_ATTENTION, "
                        "PROJECT_RESIDUAL, and MLP_INPUT, PROJECT_RESIDUAL or MOE",
                        what.c_str(), (int)op.kind, (int)before);
        }
        Op out{};
        out.kind = op.kind;
        out.layer = op.layer;
        int32_t code = SOL_OK;
        if (op.kind == SOL_OP_ATTENTION_INPUT || op.kind == SOL_OP_MLP_INPUT || op.kind == SOL_OP_MOE ||
            (op.kind == SOL_OP_PROJECT_RESIDUAL && op.norm.weight != nullptr)) {
            if ((code = check_norm(op.norm, what))) return code;
            out.norm = op.norm;
        }
        if (op.kind == SOL_OP_ATTENTION_INPUT || op.kind == SOL_OP_PAGED_ATTENTION) {
            if (op.layer < 0 || op.layer >= desc.num_layers) {
                return fail(SOL_E_ARGUMENT, "%s: layer is %d; there are %d", what.c_str(), (int)op.layer,
                            (int)desc.num_layers);
            }
        }
        switch (op.kind) {
            case SOL_OP_ATTENTION_INPUT:
                if (op.rope_cos == nullptr || op.rope_sin == nullptr) {
                    return fail(SOL_E_ARGUMENT, "%s: rope_cos or rope_sin is null", what.c_str());
                }
                out.rope_cos = op.rope_cos;
                out.rope_sin = op.rope_sin;
                for (const SolNorm* norm : {&op.q_norm, &op.k_norm}) {
                    if (norm->weight != nullptr && (code = check_norm(*norm, what))) return code;
                }
                out.q_norm = op.q_norm;
                out.k_norm = op.k_norm;
                code = open_linear(*model, op.linear, what, qkv, model->hidden_size, &out.linear);
                break;
            case SOL_OP_PAGED_ATTENTION:
                if (op.layer != desc.ops[i - 1].layer) {
                    return fail(SOL_E_UNSUPPORTED, "%s: layer is %d; the op before it writes layer %d", what.c_str(),
                                (int)op.layer, (int)desc.ops[i - 1].layer);
                }
                if (!std::isfinite(op.scale) || !std::isfinite(op.softcap) || op.softcap < 0 || op.window < 0) {
                    return fail(SOL_E_ARGUMENT, "%s: scale is %g, softcap %g, window %d", what.c_str(),
                                (double)op.scale, (double)op.softcap, (int)op.window);
                }
                out.scale = op.scale;
                out.softcap = op.softcap;
                out.window = op.window;
                produced = attended;
                break;
            case SOL_OP_PROJECT_RESIDUAL:
                code = open_linear(*model, op.linear, what, model->hidden_size, produced, &out.linear);
                break;
            case SOL_OP_MLP_INPUT:
                if (op.activation != SOL_ACT_SILU && op.activation != SOL_ACT_GELU_TANH) {
                    return fail(SOL_E_ARGUMENT, "%s: activation is %d", what.c_str(), (int)op.activation);
                }
                out.activation = op.activation;
                code = open_linear(*model, op.linear, what, 2 * model->intermediate_size, model->hidden_size,
                                   &out.linear);
                if (code == SOL_OK) pair_units(*model, &out.linear);
                produced = model->intermediate_size;
                break;
            case SOL_OP_MOE: code = open_experts(*model, op, what, &out); break;
            default: return fail(SOL_E_ARGUMENT, "%s: kind is %d", what.c_str(), (int)op.kind);
        }
        if (code != SOL_OK) return code;
        model->ops.push_back(std::move(out));
    }
    if (desc.num_ops > 0) {
        const int32_t last = desc.ops[desc.num_ops - 1].kind;
        if (last != SOL_OP_PROJECT_RESIDUAL && last != SOL_OP_MOE) {
            return fail(SOL_E_UNSUPPORTED,
                        "ops: the last one is of kind %d; a program ends with PROJECT_RESIDUAL or MOE", (int)last);
        }
    }
    return SOL_OK;
}

// Throws std::bad_alloc.
void take_workspace(SolModel* model) {
    Workspace& memory = model->workspace;
    const int64_t tokens = model->max_num_tokens, heads = model->num_heads, kv_heads = model->num_kv_heads;
    const int64_t size = model->head_dim, group = heads / kv_heads;
    int64_t most_cols = std::max({model->hidden_size, model->intermediate_size, heads * size});
    size_t copies = 0;
    bool has_float = false, unpaired = false, post_norms = false;
    Mixture& mixture = model->mixture;
    const auto add = [&](const LinearPlan& linear) {
        copies = std::max(copies, linear.perms.size());
        has_float = has_float || linear.has_float;
    };
    for (const Op& op : model->ops) {
        add(op.linear);
        post_norms = post_norms || (op.kind == SOL_OP_PROJECT_RESIDUAL && op.norm.weight != nullptr);
        unpaired = unpaired || (op.kind == SOL_OP_MLP_INPUT && op.linear.partners.empty());
        for (const LinearPlan& linear : op.gate_up) {
            add(linear);
            unpaired = unpaired || linear.partners.empty();
        }
        for (const LinearPlan& linear : op.down) add(linear);
        mixture.most_experts = std::max(mixture.most_experts, (int64_t)op.gate_up.size());
        mixture.most_per_token = std::max(mixture.most_per_token, op.experts_per_token);
    }
    add(model->head);
    model->residual = memory.take<float>(tokens * model->hidden_size);
    model->qkv = memory.take<float>(tokens * (heads + 2 * kv_heads) * size);
    model->attended = memory.take<float>(tokens * heads * size);
    model->hidden = memory.take<float>(tokens * model->intermediate_size);
    if (unpaired) model->gate_up = memory.take<float>(tokens * 2 * model->intermediate_size);
    if (mixture.most_experts > 0) {
        mixture.scores = memory.take<float>(tokens * mixture.most_experts);
        mixture.mixed = memory.take<float>(tokens * model->hidden_size);
        mixture.chosen = memory.take<int32_t>(tokens * mixture.most_per_token);
        mixture.weights = memory.take<float>(tokens * mixture.most_per_token);
        mixture.tokens = memory.take<int64_t>(tokens * mixture.most_per_token);
        mixture.token_weights = memory.take<float>(tokens * mixture.most_per_token);
        mixture.starts.assign((size_t)mixture.most_experts + 1, 0);
    }
    if (post_norms) model->projected = memory.take<float>(tokens * model->hidden_size);
    if (has_float) model->x = memory.take<float>(tokens * model->hidden_size);
    for (size_t i = 0; i < copies; i++) {
        model->quantized.push_back(memory.take<char>((int64_t)quantized_nbytes(tokens, most_cols)));
    }
    const int64_t pitch = model->kv.value_pitch;
    for (int thread = 0; thread < model->pool->num_threads(); thread++) {
        Local local{};
        local.row = memory.take<float>(model->hidden_size);
        local.x = memory.take<float>(OWN_INPUT_TOKENS * model->hidden_size);
        for (size_t i = 0; i < copies; i++) {
            local.quantized.push_back(memory.take<char>((int64_t)quantized_nbytes(OWN_INPUT_TOKENS, most_cols)));
        }
        local.views.resize(copies);
        local.tile = memory.take<float>(2 * std::min(TILE_TOKENS, tokens) * TILE_UNITS * UNIT_ROWS);
        local.up_tile = local.tile + std::min(TILE_TOKENS, tokens) * TILE_UNITS * UNIT_ROWS;
        local.scratch = memory.take<char>((int64_t)linear_scratch_nbytes(most_cols));
        local.query = memory.take<float>(ATTENTION_ROWS * size);
        local.key = memory.take<float>(size);
        local.state = {memory.take<float>(ATTENTION_ROWS), memory.take<float>(ATTENTION_ROWS),
                       memory.take<float>(ATTENTION_ROWS * pitch)};
        local.attention_scratch = memory.take<float>((int64_t)attention_scratch_floats(model->kv));
        model->locals.push_back(std::move(local));
    }
    // Splitting pays where there are few rows: room for some tokens of the longest request.
    const int64_t most_segments = (model->max_positions - 1) / model->kv.segment_tokens() + 1;
    model->max_splits = 4 * model->pool->num_threads();
    if (model->pool->num_threads() > 1 && most_segments > 1) {
        model->max_states = most_segments * heads *
                            std::clamp<int64_t>((1 << 14) / (most_segments * heads), 2, FUSED_QUERY_TOKENS);
        model->states = {memory.take<float>(model->max_states), memory.take<float>(model->max_states),
                         memory.take<float>(model->max_states * pitch)};
    }
    model->finished.reset(new std::atomic<int64_t>[(size_t)model->max_splits]);
    model->writers.assign((size_t)model->num_blocks, 0);
    model->step.starts.reserve((size_t)tokens);
    model->step.splits.reserve((size_t)model->max_splits);
    // Tiles of all requests: whole ones of ATTENTION_ROWS rows and one that is not whole for each. Then split segments.
    const int64_t tasks = kv_heads * (tokens * group / ATTENTION_ROWS + tokens) + model->max_states;
    model->step.tasks.reserve((size_t)tasks);
}

int32_t create(const SolModelDesc& desc, std::unique_ptr<SolModel>* out) {
    if (const int32_t code = check_dimensions(desc)) return code;
    auto model = std::make_unique<SolModel>();
    model->kernels = kernels_for(desc.isa);
    if (model->kernels == nullptr || !sol_isa_supported(desc.isa)) {
        return fail(SOL_E_UNSUPPORTED, "isa is %d; this processor or this build does not have it", (int)desc.isa);
    }
    model->kv = kv_layout(desc.kv_dtype, desc.num_kv_heads, desc.head_dim, desc.block_size);
    model->kv_cache = static_cast<uint8_t*>(desc.kv_cache);
    model->num_blocks = desc.num_blocks;
    __extension__ typedef __int128 Wide;
    const Wide needed = (Wide)desc.num_layers * desc.num_blocks * model->kv.block_nbytes;
    if (desc.kv_cache_nbytes < needed) {
        return fail(SOL_E_ARGUMENT, "kv_cache_nbytes is %lld; %d layers of %lld blocks of %lld bytes take more",
                    number(desc.kv_cache_nbytes), (int)desc.num_layers, number(desc.num_blocks),
                    number(model->kv.block_nbytes));
    }
    model->layer_nbytes = desc.num_blocks * model->kv.block_nbytes;
    model->hidden_size = desc.hidden_size;
    model->intermediate_size = desc.intermediate_size;
    model->vocab_size = desc.vocab_size;
    model->max_positions = desc.max_positions;
    model->num_heads = desc.num_heads;
    model->num_kv_heads = desc.num_kv_heads;
    model->head_dim = desc.head_dim;
    model->max_num_tokens = desc.max_num_tokens;
    if (const int32_t code = open_segment(*model->kernels, desc.embedding, "embedding", &model->embedding)) return code;
    if (desc.embedding.rows != desc.vocab_size || desc.embedding.cols != desc.hidden_size) {
        return fail(SOL_E_ARGUMENT, "embedding is [%lld, %lld]; the model takes [%lld, %lld]",
                    number(desc.embedding.rows), number(desc.embedding.cols), number(desc.vocab_size),
                    number(desc.hidden_size));
    }
    if (desc.embedding.perm != nullptr) return fail(SOL_E_UNSUPPORTED, "embedding: perm is not null");
    if (const int32_t code = check_norm(desc.final_norm, "final_norm")) return code;
    model->final_norm = desc.final_norm;
    if (!std::isfinite(desc.embedding_scale) || !std::isfinite(desc.logits_softcap) || desc.logits_softcap < 0) {
        return fail(SOL_E_ARGUMENT, "embedding_scale is %g, logits_softcap %g", (double)desc.embedding_scale,
                    (double)desc.logits_softcap);
    }
    model->embedding_scale = desc.embedding_scale;
    model->logits_softcap = desc.logits_softcap;
    if (const int32_t code = open_linear(*model, desc.head, "head", desc.vocab_size, desc.hidden_size, &model->head)) {
        return code;
    }
    if (const int32_t code = open_ops(desc, model.get())) return code;
    if (desc.threads_of != nullptr) {
        model->pool = desc.threads_of->pool;
        if (desc.num_threads != model->pool->num_threads() || desc.cores != nullptr) {
            return fail(SOL_E_ARGUMENT,
                        "num_threads is %d, cores %s; the model that threads_of names has %d, and they are where they are",
                        (int)desc.num_threads, desc.cores == nullptr ? "null" : "not null", model->pool->num_threads());
        }
        take_workspace(model.get());
    } else {
        model->pool = std::make_shared<ThreadPool>(desc.num_threads, desc.cores);
        take_workspace(model.get());
        const std::string problem = model->pool->start();
        if (!problem.empty()) return fail(SOL_E_ARGUMENT, "%s", problem.c_str());
    }
    *out = std::move(model);
    return SOL_OK;
}

}  // namespace

}  // namespace sol

int64_t sol_kv_block_nbytes(int32_t isa, int32_t kv_dtype, int32_t num_kv_heads, int32_t head_dim,
                            int32_t block_size) {
    using sol::fail;
    if (sol::kernels_for(isa) == nullptr) {
        return fail(SOL_E_UNSUPPORTED, "isa is %d; this build does not have it", (int)isa);
    }
    if (kv_dtype < SOL_KV_F32 || kv_dtype > SOL_KV_INT8) return fail(SOL_E_ARGUMENT, "kv_dtype is %d", (int)kv_dtype);
    if (num_kv_heads < 1 || num_kv_heads > 1 << 16) {
        return fail(SOL_E_ARGUMENT, "num_kv_heads is %d", (int)num_kv_heads);
    }
    if (head_dim < 2 || head_dim > 256 || head_dim % 2 != 0) {
        return fail(SOL_E_ARGUMENT, "head_dim is %d; it is even, 2 to 256", (int)head_dim);
    }
    if (block_size < 1 || block_size > 256) {
        return fail(SOL_E_ARGUMENT, "block_size is %d; it can be 1 to 256", (int)block_size);
    }
    return sol::kv_layout(kv_dtype, num_kv_heads, head_dim, block_size).block_nbytes;
}

int32_t sol_model_create(const SolModelDesc* desc, SolModel** out) {
    if (desc == nullptr || out == nullptr) return sol::fail(SOL_E_ARGUMENT, "desc or out is null");
    *out = nullptr;
    try {
        std::unique_ptr<SolModel> model;
        if (const int32_t code = sol::create(*desc, &model)) return code;
        *out = model.release();
        return SOL_OK;
    } catch (const std::bad_alloc&) {
        return sol::fail(SOL_E_MEMORY, "no memory for the workspace of %d tokens a step", (int)desc->max_num_tokens);
    }
}

void sol_model_destroy(SolModel* model) { delete model; }

int64_t sol_model_workspace_nbytes(const SolModel* model) { return model == nullptr ? 0 : model->workspace.nbytes(); }

int32_t sol_model_step(SolModel* model, const SolBatch* batch, float* logits) {
    if (model == nullptr || batch == nullptr) return sol::fail(SOL_E_ARGUMENT, "model or batch is null");
    if (const int32_t code = sol::plan_step(*model, *batch, logits)) return code;
    model->pool->run(sol::walk_step, model);
    model->timing.seconds[6] += model->pool->take_wait_seconds();
    return SOL_OK;
}

void sol_model_times(SolModel* model, double seconds[7]) {
    if (model == nullptr) {
        std::fill_n(seconds, 7, 0.0);
        return;
    }
    std::copy_n(model->timing.seconds, 7, seconds);
    std::fill_n(model->timing.seconds, 7, 0.0);
}
