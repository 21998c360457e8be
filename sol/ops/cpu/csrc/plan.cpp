// A step's batch: checked against the model, and its attention cut into tasks.
#include <algorithm>

#include "error.h"
#include "step.h"

namespace sol {

namespace {

long long number(int64_t n) { return (long long)n; }

int32_t check_sizes(const SolModel& model, const SolBatch& batch, const float* logits) {
    if (batch.num_tokens < 1 || batch.num_tokens > model.max_num_tokens) {
        return fail(SOL_E_ARGUMENT, "num_tokens is %lld; this model was made for 1 to %lld", number(batch.num_tokens),
                    number(model.max_num_tokens));
    }
    if (batch.num_requests < 1 || batch.num_requests > batch.num_tokens) {
        return fail(SOL_E_ARGUMENT, "num_requests is %lld; %lld tokens belong to 1 to %lld requests",
                    number(batch.num_requests), number(batch.num_tokens), number(batch.num_tokens));
    }
    if (batch.num_logits_rows < 0 || batch.num_logits_rows > batch.num_tokens) {
        return fail(SOL_E_ARGUMENT, "num_logits_rows is %lld; there are %lld tokens", number(batch.num_logits_rows),
                    number(batch.num_tokens));
    }
    if (batch.max_blocks < 1) return fail(SOL_E_ARGUMENT, "max_blocks is %lld", number(batch.max_blocks));
    const struct {
        const char* name;
        const void* value;
    } arrays[] = {{"token_ids", batch.token_ids},       {"positions", batch.positions},
                  {"slot_mapping", batch.slot_mapping}, {"block_table", batch.block_table},
                  {"query_lens", batch.query_lens},     {"seq_lens", batch.seq_lens}};
    for (const auto& array : arrays) {
        if (array.value == nullptr) return fail(SOL_E_ARGUMENT, "%s is null", array.name);
    }
    if (batch.num_logits_rows > 0 && (batch.logits_rows == nullptr || logits == nullptr)) {
        return fail(SOL_E_ARGUMENT, "%s is null", batch.logits_rows == nullptr ? "logits_rows" : "logits");
    }
    return SOL_OK;
}

int32_t check_range(const char* name, const int64_t* values, int64_t count, int64_t limit, const char* of) {
    for (int64_t i = 0; i < count; i++) {
        if (values[i] < 0 || values[i] >= limit) {
            return fail(SOL_E_ARGUMENT, "%s[%lld] is %lld; there are %lld %s", name, number(i), number(values[i]),
                        number(limit), of);
        }
    }
    return SOL_OK;
}

int32_t check_requests(const SolModel& model, const SolBatch& batch) {
    const int64_t block_size = model.kv.block_size;
    int64_t tokens = 0;
    for (int64_t i = 0; i < batch.num_requests; i++) {
        const int64_t query_len = batch.query_lens[i], seq_len = batch.seq_lens[i];
        if (query_len < 1 || query_len > batch.num_tokens - tokens) {
            return fail(SOL_E_ARGUMENT,
                        "query_lens[%lld] is %lld; each is at least 1 and their sum is num_tokens, %lld", number(i),
                        number(query_len), number(batch.num_tokens));
        }
        tokens += query_len;
        if (seq_len < query_len || seq_len > model.max_positions) {
            return fail(SOL_E_ARGUMENT,
                        "seq_lens[%lld] is %lld; it is at least query_lens[%lld], %lld, and at most %lld", number(i),
                        number(seq_len), number(i), number(query_len), number(model.max_positions));
        }
        const int64_t blocks = (seq_len + block_size - 1) / block_size;
        if (blocks > batch.max_blocks) {
            return fail(SOL_E_ARGUMENT, "seq_lens[%lld] is %lld; block_table's %lld blocks of %lld tokens hold less",
                        number(i), number(seq_len), number(batch.max_blocks), number(block_size));
        }
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t block = batch.block_table[i * batch.max_blocks + j];
            if (block < 0 || block >= model.num_blocks) {
                return fail(SOL_E_ARGUMENT, "block_table[%lld, %lld] is %lld; there are %lld blocks", number(i),
                            number(j), number(block), number(model.num_blocks));
            }
        }
    }
    if (tokens != batch.num_tokens) {
        return fail(SOL_E_ARGUMENT, "query_lens add up to %lld; num_tokens is %lld", number(tokens),
                    number(batch.num_tokens));
    }
    return SOL_OK;
}

// Whether attention tasks can write the keys and values of their own requests: no request reads a block that another
// one writes in this step (as those do that share a prefix which is being computed), and tokens are written where the
// block table says.
bool can_fuse(SolModel& model, const SolBatch& batch) {
    const int64_t block_size = model.kv.block_size;
    for (int64_t i = 0; i < batch.num_requests; i++) {
        if (batch.query_lens[i] > FUSED_QUERY_TOKENS) return false;
    }
    bool fuse = true;
    for (int64_t i = 0, token = 0; i < batch.num_requests; i++) {
        for (int64_t j = 0; j < batch.query_lens[i]; j++, token++) {
            const int64_t index = batch.seq_lens[i] - batch.query_lens[i] + j, slot = batch.slot_mapping[token];
            const int64_t block = batch.block_table[i * batch.max_blocks + index / block_size];
            if (slot != block * block_size + index % block_size) fuse = false;
            model.writers[(size_t)(slot / block_size)] = i + 1;
        }
    }
    for (int64_t i = 0; i < batch.num_requests && fuse; i++) {
        const int64_t blocks = (batch.seq_lens[i] + block_size - 1) / block_size;
        for (int64_t j = 0; j < blocks; j++) {
            const int64_t writer = model.writers[(size_t)batch.block_table[i * batch.max_blocks + j]];
            if (writer != 0 && writer != i + 1) fuse = false;
        }
    }
    for (int64_t token = 0; token < batch.num_tokens; token++) {
        model.writers[(size_t)(batch.slot_mapping[token] / block_size)] = 0;
    }
    return fuse;
}

void plan_attention(SolModel& model, const SolBatch& batch) {
    Step& step = model.step;
    const int64_t group = model.num_heads / model.num_kv_heads, segment_tokens = model.kv.segment_tokens();
    step.fused = can_fuse(model, batch);
    step.starts.clear();
    step.tasks.clear();
    step.splits.clear();
    int64_t start = 0, tiles = 0, states = 0, most_segments = 0;
    for (int64_t i = 0; i < batch.num_requests; i++) {
        step.starts.push_back(start);
        start += batch.query_lens[i];
        const int64_t rows = batch.query_lens[i] * group, segments = (batch.seq_lens[i] - 1) / segment_tokens + 1;
        tiles += model.num_kv_heads * (step.fused ? 1 : (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS);
        states += model.num_kv_heads * rows * segments;
        most_segments = std::max(most_segments, segments);
    }
    // Enough tasks keep every thread busy; few of them over long contexts do not.
    const bool split = model.pool->num_threads() > 1 && most_segments > 1 && tiles < 4 * model.pool->num_threads() &&
                       tiles <= model.max_splits && states <= model.max_states;
    states = 0;
    for (int64_t i = 0; i < batch.num_requests; i++) {
        const int64_t rows = batch.query_lens[i] * group, segments = (batch.seq_lens[i] - 1) / segment_tokens + 1;
        const int64_t tile = step.fused ? rows : ATTENTION_ROWS;
        for (int32_t head = 0; head < (int32_t)model.num_kv_heads; head++) {
            for (int64_t row = 0; row < rows; row += tile) {
                const int64_t end = std::min(rows, row + tile);
                if (!split || segments == 1) {
                    step.tasks.push_back({i, head, -1, row, end, 0, segments});
                    continue;
                }
                const auto index = (int32_t)step.splits.size();
                model.finished[(size_t)index].store(0, std::memory_order_relaxed);
                step.splits.push_back({end - row, segments, states, row});
                states += (end - row) * segments;
                for (int64_t segment = 0; segment < segments; segment++) {
                    step.tasks.push_back({i, head, index, row, end, segment, segment + 1});
                }
            }
        }
    }
}

}  // namespace

int32_t plan_step(SolModel& model, const SolBatch& batch, float* logits) {
    if (const int32_t code = check_sizes(model, batch, logits)) return code;
    const int64_t tokens = batch.num_tokens, slots = model.num_blocks * model.kv.block_size;
    if (const int32_t code = check_range("token_ids", batch.token_ids, tokens, model.vocab_size, "tokens")) return code;
    if (const int32_t code = check_range("positions", batch.positions, tokens, model.max_positions, "positions")) {
        return code;
    }
    if (const int32_t code = check_range("slot_mapping", batch.slot_mapping, tokens, slots, "slots")) return code;
    if (const int32_t code = check_range("logits_rows", batch.logits_rows, batch.num_logits_rows, tokens, "tokens")) {
        return code;
    }
    if (const int32_t code = check_requests(model, batch)) return code;
    model.step.batch = batch;
    model.step.logits = logits;
    plan_attention(model, batch);
    return SOL_OK;
}

}  // namespace sol
