// Asks a model a question with a compressed KV cache.
//
//   cargo build --release -p kvant-capi
//   cc -I crates/capi/include crates/capi/examples/hello.c -L target/release -lkvant_capi -Wl,-rpath,target/release -o hello
//   ./hello [MODEL.gguf]

#include "kvant.h"

#include <stdio.h>
#include <stdlib.h>

static char *error = NULL;

// Exits if a call failed.
static void must(kvant_status status) {
    if (status == KVANT_STATUS_OK) {
        return;
    }
    fprintf(stderr, "hello: %s\n", error);
    kvant_string_free(error);
    exit(1);
}

static bool print(void *user, const char *text, size_t n_bytes) {
    fwrite(text, 1, n_bytes, user);
    fflush(user);
    return true;
}

int main(int argc, char **argv) {
    kvant_model *model = NULL;
    if (argc > 1) {
        must(kvant_model_open(argv[1], NULL, &model, &error));
    } else {
        must(kvant_model_bundled(NULL, &model, &error));
    }

    kvant_session *session = NULL;
    kvant_session_options options = {.type_k = "turbo3", .type_v = "turbo3"};
    must(kvant_session_new(model, &options, &session, &error));

    kvant_message message = {.role = "user", .content = "What is the capital of France?"};
    uint32_t prompt[256];
    size_t n_prompt = 0;
    must(kvant_model_chat_prompt(model, &message, 1, prompt, 256, &n_prompt, &error));
    if (n_prompt > 256) {
        fprintf(stderr, "hello: the prompt has %zu tokens, 256 fit\n", n_prompt);
        return 1;
    }

    kvant_generate_options how = kvant_generate_options_default();
    how.temperature = 0;
    kvant_generated done;
    must(kvant_session_generate(session, prompt, n_prompt, &how, print, stdout, &done, &error));

    kvant_kv_use kv;
    must(kvant_session_kv(session, &kv, &error));
    printf("\n%zu tokens, %zu bytes of KV cache, f16 %zu\n", done.n_gen, kv.bytes, kv.bytes_f16);
    kvant_session_free(session);
    kvant_model_free(model);
    return 0;
}
