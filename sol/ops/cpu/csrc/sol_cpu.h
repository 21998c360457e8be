/* The CPU backend's C ABI: what sol/ops/cpu/native.py calls through ctypes. No Python, no torch, no C++ types.
 *
 * Functions that can fail return 0 and leave nothing behind, or a negative SOL_E_* and a message in sol_last_error()
 * (thread-local, English, names the field and the value). They never throw, never abort, and check every pointer's
 * size that they are given. A model belongs to one calling thread at a time, together with those it shares threads with.
 */
#ifndef SOL_CPU_H
#define SOL_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SOL_API __attribute__((visibility("default")))
#define SOL_ABI_VERSION 6

enum { SOL_OK = 0, SOL_E_ARGUMENT = -1, SOL_E_MEMORY = -2, SOL_E_UNSUPPORTED = -3, SOL_E_DATA = -4 };

/* Instruction sets, in order of preference on their architecture. A packed weight's layout depends on
 * sol_group_rows(isa) alone: 16 for AVX-512, 8 for the others. */
enum { SOL_ISA_PORTABLE = 0, SOL_ISA_NEON = 1, SOL_ISA_AVX2 = 2, SOL_ISA_AVX512 = 3, SOL_ISA_AVX512VNNI = 4 };

/* Weight formats. INT8: int8 codes, one float32 scale a row. INT4: unsigned 4-bit codes, one float32 scale and one
 * 4-bit zero point for each `group_size` columns of a row: w = (code - zero) * scale. The rest: ggml's. */
enum {
    SOL_F32 = 0, SOL_F16 = 1, SOL_BF16 = 2,
    SOL_Q4_0 = 10, SOL_Q4_1 = 11, SOL_Q5_0 = 12, SOL_Q5_1 = 13, SOL_Q8_0 = 14,
    SOL_Q4_K = 20, SOL_Q5_K = 21, SOL_Q6_K = 22,
    SOL_INT8 = 30, SOL_INT4 = 31
};

enum { SOL_KV_F32 = 0, SOL_KV_F16 = 1, SOL_KV_INT8 = 2 };

enum { SOL_OP_ATTENTION_INPUT = 0, SOL_OP_PAGED_ATTENTION = 1, SOL_OP_PROJECT_RESIDUAL = 2, SOL_OP_MLP_INPUT = 3,
       SOL_OP_MOE = 4 };

/* What MLP_INPUT does to gate: SiLU, or GELU in its approximation by tanh. */
enum { SOL_ACT_SILU = 0, SOL_ACT_GELU_TANH = 1 };

SOL_API int32_t sol_abi_version(void);
SOL_API const char *sol_last_error(void);
SOL_API int32_t sol_isa_supported(int32_t isa);  /* 1 if built in and this processor (and its OS) has it */
SOL_API int32_t sol_group_rows(int32_t isa);

/* ---- Weights ------------------------------------------------------------------------------------------------- */

/* Bytes of a packed [rows, cols]; negative on error (cols not a multiple of the format's block, ...). Packed weights
 * are independent of the machine's memory: they may be written to a file and mapped again, 64-byte aligned. */
SOL_API int64_t sol_packed_nbytes(int32_t isa, int32_t format, int64_t rows, int64_t cols, int32_t group_size);

/* Packs [rows, cols]. `data`: F32/F16/BF16 row-major; ggml's blocks row by row; INT8 int8 row-major; INT4 two codes a
 * byte, column 2i low, row-major [rows, cols/2]. `scales`: float32 [rows] for INT8, [rows, cols/group_size] for INT4,
 * else null. `zeros`: uint8 [rows, cols/group_size] for INT4 (null: all 8), else null. SOL_E_DATA for a scale that is
 * not finite, naming its row. */
SOL_API int32_t sol_pack(int32_t isa, int32_t format, int64_t rows, int64_t cols, int32_t group_size,
                         const void *data, int64_t data_nbytes, const float *scales, int64_t num_scales,
                         const uint8_t *zeros, int64_t num_zeros, void *out, int64_t out_nbytes);

/* Whether packed bytes from a file can be computed with: sizes fit, every scale is finite. */
SOL_API int32_t sol_check_packed(int32_t isa, int32_t format, int64_t rows, int64_t cols, int32_t group_size,
                                 const void *packed, int64_t packed_nbytes);

/* One segment of a projection: `rows` output features in one format. `perm` (int32 [cols], a permutation, or null):
 * packed column i multiplies x[perm[i]] (GPTQ's act-order); quantised formats only. */
typedef struct {
    int32_t format;
    int32_t group_size;
    int64_t rows;
    int64_t cols;
    const void *packed;
    int64_t packed_nbytes;
    const int32_t *perm;
} SolSegment;

typedef struct {
    int32_t num_segments;
    int32_t reserved;
    const SolSegment *segments;
    const float *bias; /* [sum of rows] or null */
} SolLinear;

/* Rows of a packed matrix, dequantised: out [num_ids, cols] float32. What `embed` does; also for tests. */
SOL_API int32_t sol_unpack_rows(int32_t isa, const SolSegment *segment, const int64_t *ids, int64_t num_ids,
                                float *out);

/* ---- Models --------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *weight; /* [hidden_size] */
    float eps;
    float offset; /* added to the weight: 0, or 1 for Gemma */
} SolNorm;

/* One op. Fields that its kind does not use are zero. */
typedef struct {
    int32_t kind;
    int32_t layer;
    SolNorm norm;         /* ATTENTION_INPUT, MLP_INPUT, MOE; PROJECT_RESIDUAL: of the projection, before it is added; null
                             weight: none */
    SolLinear linear;     /* ATTENTION_INPUT: q, k, v rows; MLP_INPUT: gate, up rows; PROJECT_RESIDUAL */
    const float *rope_cos; /* ATTENTION_INPUT: [max_positions, head_dim / 2]; element i pairs with i + head_dim / 2 */
    const float *rope_sin;
    float scale;          /* PAGED_ATTENTION */
    float softcap;        /* PAGED_ATTENTION; 0: none */
    int32_t window;       /* PAGED_ATTENTION; 0: none */
    int32_t activation;   /* MLP_INPUT */
    SolNorm q_norm;       /* ATTENTION_INPUT: of each head before it is rotated, weight [head_dim]; null weight: none */
    SolNorm k_norm;
    /* MOE: a mixture of experts, from the residual to the residual. `norm`, `linear`: the router, a row an expert. Each
     * token goes to the experts of the largest scores, which are the softmax of the router's logits. */
    int32_t num_experts;
    int32_t experts_per_token;
    int32_t normalise;                 /* 1: a token's scores are divided by their sum */
    int32_t reserved;
    const SolLinear *expert_gate_up;   /* [num_experts]: gate, up rows, 2 * intermediate_size */
    const SolLinear *expert_down;      /* [num_experts] */
} SolOp;

typedef struct SolModel SolModel;

typedef struct {
    int32_t isa;
    int32_t num_threads;      /* the caller is one of them */
    const int32_t *cores;     /* [num_threads] core of each thread; null: not pinned. The caller itself is pinned only
                                 while it is in a step, and gets its affinity back */
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t vocab_size;
    int64_t max_positions;
    int32_t num_layers;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t num_ops;
    int32_t kv_dtype;
    int32_t block_size;       /* tokens in a block of the KV cache, 1 to 256 */
    int32_t max_num_tokens;   /* most tokens in a step */
    int64_t num_blocks;
    void *kv_cache;           /* num_layers * num_blocks * sol_kv_block_nbytes(...) bytes, 64-byte aligned; contents may
                                 be anything at first */
    int64_t kv_cache_nbytes;
    SolSegment embedding;     /* [vocab_size, hidden_size]; may be the head's packed weight */
    SolNorm final_norm;
    SolLinear head;
    const SolOp *ops;
    const SolModel *threads_of; /* null: threads of its own. A model whose threads this one uses too, so that the two do
                                 not take each other's cores: num_threads is that model's, cores is null. Threads live
                                 as long as any of their models */
    float embedding_scale;    /* what embeddings are multiplied by */
    float logits_softcap;     /* 0: none */
} SolModelDesc;

/* Bytes that one block takes in one layer (keys and values, and scales for INT8). */
SOL_API int64_t sol_kv_block_nbytes(int32_t isa, int32_t kv_dtype, int32_t num_kv_heads, int32_t head_dim,
                                    int32_t block_size);

/* The description is copied; weights, tables and the KV cache it points to must outlive the model. Starts threads and
 * takes all the workspace a step can need: a step allocates nothing. */
SOL_API int32_t sol_model_create(const SolModelDesc *desc, SolModel **out);
SOL_API void sol_model_destroy(SolModel *model);
SOL_API int64_t sol_model_workspace_nbytes(const SolModel *model);

/* T tokens of R requests, flattened. Every index is checked before anything is computed. */
typedef struct {
    int64_t num_tokens;
    int64_t num_requests;
    int64_t num_logits_rows;
    int64_t max_blocks;            /* width of block_table */
    const int64_t *token_ids;      /* [T] */
    const int64_t *positions;      /* [T] */
    const int64_t *slot_mapping;   /* [T] block id * block_size + offset */
    const int64_t *block_table;    /* [R, max_blocks] */
    const int64_t *query_lens;     /* [R] */
    const int64_t *seq_lens;       /* [R] */
    const int64_t *logits_rows;    /* [S] rows of T */
} SolBatch;

/* One step: embedding, every op, final norm and head of the rows asked for. logits [S, vocab_size] float32. */
SOL_API int32_t sol_model_step(SolModel *model, const SolBatch *batch, float *logits);

/* Seconds spent in each kind of work since the last call, for the profiler: embed, attention_input, paged_attention,
 * project_residual, mlp_input (and mixtures of experts), logits, and waiting at barriers (caller's thread). */
SOL_API void sol_model_times(SolModel *model, double seconds[7]);

/* ---- Single ops, for tests and micro-benchmarks (one thread, the same code as a step) ---------------------------- */

/* y [T, sum of rows] = x [T, cols] · Wᵀ + bias, as the ops compute it (activations quantised where the format says). */
SOL_API int32_t sol_linear(int32_t isa, const SolLinear *linear, const float *x, int64_t num_tokens, float *y);

/* ---- Speculation: which drafts are verified, and what came of them ------------------------------------------------
 *
 * The arithmetic of sol/speculation/plan, whose Python says what each number means and why (arithmetic.py has the same
 * functions, which give the same numbers to the last bit). All state is the caller's. */

enum { SOL_SCORE_BINS = 13, SOL_POSITIONS = 16, SOL_SURVIVAL_BINS = 8, SOL_SCORE_LEVELS = 258 };

/* Of one drafter: an `Acceptance`'s state, double [SOL_ACCEPTANCE_SIZE], by these offsets. */
enum {
    SOL_BY_SCORE = 0, SOL_SCORE_PRECISION = 13, SOL_BY_POSITION = 26, SOL_POSITION_PRECISION = 42, SOL_CURVE = 58,
    SOL_CURVE_WEIGHT = 74, SOL_NUM_RIGHT = 90, SOL_HAS_CURVE = 91, SOL_ACCEPTANCE_SIZE = 92
};

/* Drafts at hand, one row ("slot") a request, and the constants of what learns from them. */
typedef struct {
    int64_t num_slots;
    int64_t width;               /* drafts of a request that are looked at, at most */
    const double *scores;        /* [num_slots, width]; negative: the drafter gave none */
    double *predicted;           /* [num_slots, width] survivals */
    double *expected;            /* [num_slots, width] the same, corrected for being chosen */
    int64_t *counts;             /* [num_slots] how many of both there are */
    int64_t num_drafters;
    double *habits;              /* [num_slots, num_drafters, 2] log-odds and precision of each request's `Habit` */
    double *const *acceptance;   /* [num_drafters] */
    const double *log_odds;      /* [SOL_SCORE_LEVELS] of each level of scores; the last one is for no score */
    const int64_t *bins;         /* [SOL_SCORE_LEVELS] */
    double most_bin_precision;
    double most_position_precision;
    double most_request_precision;
    double least_information;
    double curve_observations;
    double prior_drafts;
    double unverified;
    double most_drafts;
} SolDrafts;

/* What a step takes with more tokens, see `CostModel.curve`. */
typedef struct {
    int64_t num_tokens;          /* of the tables below */
    int64_t num_knots;
    const double *per_token;     /* [num_tokens] */
    const int64_t *knots;        /* [num_tokens] */
    const double *shares;        /* [num_tokens] */
    const double *factors;       /* [num_knots] */
} SolStepCosts;

/* How many drafts are verified for each of `num_items` requests, into `chosen` [num_items]: see `Arithmetic.choose`.
 * `items` [num_items, 4]: slot, drafter, drafts to judge first (-1: judged), drafts that may be verified. `regime`
 * [num_drafters, 3, SOL_SURVIVAL_BINS]: predicted, accepted, kept. `step`: rows of
 * logits, seconds that all its requests and tokens share, seconds of each draft beside the table's, factor of both,
 * seconds paid already, seconds of deciding. `limits`: survival below which nothing is judged, margin, share of the
 * best goodput. `seen`: the least survival chosen, 0 if none, and how many there were to choose from. */
SOL_API int32_t sol_choose_drafts(const SolDrafts *drafts, const SolStepCosts *costs, const double *regime,
                                  const int64_t *items, int64_t num_items, const double step[6], const double limits[3],
                                  int64_t max_tokens, int64_t max_lengths, int64_t *chosen, double seen[2]);

/* What became of drafts at hand: see `Arithmetic.learn`. `items` [num_items, 7]: slot, drafter, drafts to judge first
 * (-1: judged), right, known, verified, whether it is learned from. `gains` [num_items]: tokens that the survivals above `price` are worth. */
SOL_API int32_t sol_learn_drafts(const SolDrafts *drafts, double *regime, const int64_t *items, int64_t num_items,
                                 double least, double price, double *gains);

#ifdef __cplusplus
}
#endif
#endif
