// A model as the step walks it: every weight opened and checked, all workspace taken. model.cpp builds it, step.cpp
// walks it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "kv_cache.h"
#include "sol_cpu.h"
#include "threads.h"

namespace sol {

// Up to so many tokens each thread normalises and quantises the whole input for itself, which costs less than sharing
// the work and waiting for each other.
constexpr int64_t OWN_INPUT_TOKENS = 4;
// Most tokens that one chunk of a projection covers, and most rows (in units of 16): what keeps activations and
// results in a core's cache.
constexpr int64_t TILE_TOKENS = 256;
constexpr int64_t TILE_UNITS = 4;
constexpr int64_t UNIT_ROWS = 16;
// Requests with up to so many query tokens write their keys and values in the tasks that attend to them.
constexpr int64_t FUSED_QUERY_TOKENS = 16;

class Workspace {
   public:
    // Throws std::bad_alloc. 64-byte aligned; the memory is not touched.
    template <class T>
    T* take(int64_t count) {
        const size_t nbytes = ((size_t)count * sizeof(T) + 63) / 64 * 64;
        void* memory = std::aligned_alloc(64, nbytes == 0 ? 64 : nbytes);
        if (memory == nullptr) throw std::bad_alloc();
        pieces_.emplace_back(memory);
        nbytes_ += (int64_t)nbytes;
        return static_cast<T*>(memory);
    }
    int64_t nbytes() const { return nbytes_; }

   private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::vector<std::unique_ptr<void, Free>> pieces_;
    int64_t nbytes_ = 0;
};

struct LinearSegment {
    PackedMatrix matrix;
    int64_t row;  // of the projection's rows, its first
    int input;    // which quantised copy of the input it takes; -1: the floats
};

// About 16 rows of a projection, whole groups of one segment: what chunks are made of.
struct Unit {
    int64_t row;  // of the projection's rows
    int64_t num_rows;
    int64_t group_begin;
    int64_t group_end;
    int segment;
};

struct LinearPlan {
    std::vector<LinearSegment> segments;
    std::vector<const int32_t*> perms;  // one quantised copy of the input for each
    bool has_float = false;
    int64_t rows = 0;
    int64_t cols = 0;
    const float* bias = nullptr;
    std::vector<Unit> units;
    std::vector<Unit> partners;  // MLP_INPUT: the rows of `up` that belong to each unit of `gate`; empty if rows of the
                                 // two do not fall into the same units, then all rows are in `units`
};

struct Op {
    int32_t kind;
    int32_t layer;
    SolNorm norm;
    LinearPlan linear;
    const float* rope_cos;
    const float* rope_sin;
    float scale;
    float softcap;
    int32_t window;
    int32_t activation;
    SolNorm q_norm;  // null weight: none
    SolNorm k_norm;
    std::vector<LinearPlan> gate_up;  // MOE: of each expert
    std::vector<LinearPlan> down;
    int64_t experts_per_token = 0;
    bool normalise = false;
};

// Which tokens of a step go to which expert. Chosen by token, then grouped by expert.
struct Mixture {
    int64_t most_experts = 0;           // of any op; what the arrays have room for
    int64_t most_per_token = 0;
    float* scores = nullptr;            // [T, experts], the router's logits first
    float* mixed = nullptr;             // [T, hidden_size], what the experts give
    int32_t* chosen = nullptr;          // [T, experts_per_token]
    float* weights = nullptr;           // the same
    int64_t* tokens = nullptr;          // [T · experts_per_token], expert by expert, in order
    float* token_weights = nullptr;     // the same
    std::vector<int64_t> starts;        // [experts + 1] of `tokens`
};

// Attention of one request's rows [row_begin, row_end) of one key/value head over some segments. Row r is query head
// r % group of the request's query token r / group.
struct AttentionTask {
    int64_t request;
    int32_t kv_head;
    int32_t split;  // index into splits; -1: all segments are this task's
    int64_t row_begin;
    int64_t row_end;
    int64_t segment_begin;
    int64_t segment_end;
};

// Rows whose segments are tasks of their own. The task that finishes last merges them all.
struct AttentionSplit {
    int64_t num_rows;
    int64_t num_segments;
    int64_t first_state;  // of the partial states: segment after segment, row after row
    int64_t row_begin;
};

// What one thread has for itself.
struct Local {
    float* row;             // one normalised row
    float* x;               // input of up to OWN_INPUT_TOKENS tokens
    std::vector<void*> quantized;
    std::vector<QuantizedActivations> views;
    float* tile;            // results of a chunk: up to TILE_TOKENS · TILE_UNITS · UNIT_ROWS
    float* up_tile;
    void* scratch;          // of Kernels::linear
    float* query;           // [ATTENTION_ROWS, head_dim]
    float* key;             // [head_dim]
    AttentionState state;   // of ATTENTION_ROWS rows
    float* attention_scratch;
};

// One step's input, checked, and what is derived from it once for all layers.
struct Step {
    SolBatch batch{};
    float* logits = nullptr;
    std::vector<int64_t> starts;  // each request's first row of T
    bool fused = false;           // attention tasks write the keys and values themselves
    std::vector<AttentionTask> tasks;
    std::vector<AttentionSplit> splits;
};

struct Timing {
    double seconds[7] = {};  // embed, the four ops, logits, and the caller's waiting for others
};

}  // namespace sol

struct SolModel {
    const sol::Kernels* kernels = nullptr;
    sol::KVLayout kv{};
    uint8_t* kv_cache = nullptr;
    int64_t num_blocks = 0;
    int64_t layer_nbytes = 0;
    int64_t hidden_size = 0;
    int64_t intermediate_size = 0;
    int64_t vocab_size = 0;
    int64_t max_positions = 0;
    int64_t num_heads = 0;
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    int64_t max_num_tokens = 0;
    sol::PackedMatrix embedding{};
    SolNorm final_norm{};
    float embedding_scale = 1.0f;
    float logits_softcap = 0.0f;  // 0: none
    sol::LinearPlan head;
    std::vector<sol::Op> ops;

    sol::Workspace workspace;
    float* residual = nullptr;  // [T, hidden_size]
    float* qkv = nullptr;       // [T, (num_heads + 2 num_kv_heads) · head_dim]
    float* attended = nullptr;  // [T, num_heads · head_dim]
    float* hidden = nullptr;    // [T, intermediate_size]
    float* gate_up = nullptr;   // [T, 2 · intermediate_size] if an op's gate and up rows do not pair
    float* projected = nullptr; // [T, hidden_size] if what projections give is normed before it is added
    float* x = nullptr;         // [T, hidden_size], normalised, for float weights
    std::vector<void*> quantized;
    sol::Mixture mixture;
    std::vector<sol::Local> locals;

    // States of split attention: `max_states` rows of some segment each.
    int64_t max_states = 0;
    int64_t max_splits = 0;
    sol::AttentionState states{};
    std::unique_ptr<std::atomic<int64_t>[]> finished;  // tasks of each split, counted on from layer to layer

    std::vector<int64_t> writers;  // by block: which request writes to it, from 1; all 0 between steps
    sol::Step step;
    sol::Timing timing;
    // Nobody is inside a step when a model ends, so its threads may outlive it where other models have them too.
    std::shared_ptr<sol::ThreadPool> pool;
};

namespace sol {

// Checks a batch and plans its attention. 0, or an error with its message set.
int32_t plan_step(SolModel& model, const SolBatch& batch, float* logits);

// What every thread does in a step; `context` is the model.
void walk_step(void* context, Walker& walker);

}  // namespace sol
