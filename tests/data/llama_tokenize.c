// Tokenizes strings with llama.cpp, for record_tokenizer_fixture.py.
//
//   llama_tokenize MODEL.gguf < strings > tokens
//
// Each string is a 32-bit length and so many bytes. The answer to each, with special tokens parsed and then with
// special-token text taken as plain text: a 32-bit count and so many 32-bit ids; and after the first of the two lists
// the text its tokens stand for, a 32-bit length and so many bytes. Little endian. The vocabulary alone is loaded.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "llama.h"

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static void put(int32_t value) {
    fwrite(&value, sizeof value, 1, stdout);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf < strings > tokens\n", argv[0]);
        return 2;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    struct llama_model * model = llama_model_load_from_file(argv[1], params);
    if (model == NULL) {
        return 1;
    }
    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    int32_t length;
    while (fread(&length, sizeof length, 1, stdin) == 1) {
        char * text = malloc(length + 1);
        llama_token * tokens = malloc((length + 8) * sizeof *tokens);
        char * piece = malloc(1 << 16);
        if (text == NULL || tokens == NULL || piece == NULL || fread(text, 1, length, stdin) != (size_t) length) {
            return 1;
        }
        for (int parse_special = 1; parse_special >= 0; parse_special--) {
            int32_t count = llama_tokenize(vocab, text, length, tokens, length + 8, true, parse_special);
            put(count);
            fwrite(tokens, sizeof *tokens, count, stdout);
            if (parse_special) {
                int32_t total = 0;
                for (int32_t i = 0; i < count; i++) {
                    total += llama_token_to_piece(vocab, tokens[i], piece, 1 << 16, 0, true);
                }
                put(total);
                for (int32_t i = 0; i < count; i++) {
                    fwrite(piece, 1, llama_token_to_piece(vocab, tokens[i], piece, 1 << 16, 0, true), stdout);
                }
            }
        }
        free(text);
        free(tokens);
        free(piece);
    }
    llama_model_free(model);
    return 0;
}
