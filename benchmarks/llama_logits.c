/* llama.cpp's logits of given tokens, through its public API; rivals.py compiles it.

       llama_logits MODEL THREADS CHUNK < tokens > logits

   reads int32 token ids in chunks of CHUNK, evaluates each from an empty context, and writes float32 logits of every
   token, [CHUNK, vocabulary], before it reads the next.

       llama_logits MODEL THREADS CHUNK OUTPUTS

   fills a context of CHUNK tokens, of which the last has logits, with buffers for logits of OUTPUTS tokens a batch
   (llama-server sets that to its number of streams; 0 is the library's default, a whole batch), and writes its resident
   memory. What llama.cpp says about its buffers goes to stderr in both cases, as it does in its own programs. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

static void fail(const char *what) {
    fprintf(stderr, "llama_logits: %s\n", what);
    exit(1);
}

static void log_line(enum ggml_log_level level, const char *text, void *unused) {
    static int shown; /* a line may come in parts */
    (void)unused;
    if (level != GGML_LOG_LEVEL_CONT) shown = level >= GGML_LOG_LEVEL_INFO;
    if (shown) fputs(text, stderr);
}

int main(int argc, char **argv) {
    if (argc < 4) fail("usage: llama_logits MODEL THREADS CHUNK [OUTPUTS]");
    const int threads = atoi(argv[2]), chunk = atoi(argv[3]);
    const int memory_only = argc > 4;
    if (threads < 1 || chunk < 1) fail("THREADS and CHUNK must be at least 1");

    llama_log_set(log_line, NULL);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (model == NULL) fail("the model cannot be read");
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = chunk;
    params.n_threads = params.n_threads_batch = threads;
    if (memory_only) {
        params.n_outputs_max = atoi(argv[4]);
    } else {
        params.n_batch = params.n_outputs_max = params.n_outputs_max_per_seq = chunk;
    }
    struct llama_context *context = llama_init_from_model(model, params);
    if (context == NULL) fail("no context of this size");
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    struct llama_batch batch = llama_batch_init(chunk, 0, 1);
    int32_t *tokens = malloc(sizeof(int32_t) * chunk);
    if (tokens == NULL) fail("out of memory");
    for (int i = 0; i < chunk; i++) tokens[i] = 1000 + i;
    while (memory_only || fread(tokens, sizeof(int32_t), chunk, stdin) == (size_t)chunk) {
        llama_memory_clear(llama_get_memory(context), true);
        batch.n_tokens = chunk;
        for (int i = 0; i < chunk; i++) {
            batch.token[i] = tokens[i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = !memory_only || i == chunk - 1;
        }
        if (llama_decode(context, batch) != 0) fail("llama_decode failed");
        if (memory_only) break;
        for (int i = 0; i < chunk; i++) {
            const float *logits = llama_get_logits_ith(context, i);
            if (logits == NULL || fwrite(logits, sizeof(float), vocabulary, stdout) != (size_t)vocabulary) {
                fail("the logits cannot be written");
            }
        }
        fflush(stdout);
    }
    if (memory_only) {
        FILE *status = fopen("/proc/self/status", "r");
        char line[256];
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            if (strncmp(line, "VmRSS", 5) == 0 || strncmp(line, "VmHWM", 5) == 0) fputs(line, stdout);
        }
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
