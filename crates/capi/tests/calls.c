// Every call of kvant.h, with valid and invalid arguments. Prints `all held`, or the first failure.

#include "kvant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HOLDS(claim)                                                   \
    do {                                                               \
        if (!(claim)) {                                                \
            fprintf(stderr, "line %d: failed: %s\n", __LINE__, #claim); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static char *error = NULL;

// Returns whether a call failed with a text that contains `part`; frees the text.
static bool refused(kvant_status status, kvant_status expected, const char *part) {
    bool matches = status == expected && error != NULL && strstr(error, part) != NULL;
    if (!matches) {
        fprintf(stderr, "status %d: %s\n", (int)status, error == NULL ? "no text" : error);
    }
    kvant_string_free(error);
    error = NULL;
    return matches;
}

struct received {
    char text[4096];
    size_t n_bytes, n_calls, max_calls;
};

static bool receive(void *user, const char *text, size_t n_bytes) {
    struct received *received = user;
    HOLDS(text[n_bytes] == 0 && received->n_bytes + n_bytes < sizeof received->text);
    memcpy(received->text + received->n_bytes, text, n_bytes);
    received->n_bytes += n_bytes;
    received->n_calls += 1;
    return received->n_calls < received->max_calls;
}

static void faulty_models_are_refused_with_a_message(void) {
    kvant_model *model = NULL;
    HOLDS(refused(kvant_model_open(NULL, NULL, &model, &error), KVANT_STATUS_ARGUMENT, "path: expected a pointer"));
    HOLDS(refused(kvant_model_open("x", NULL, NULL, &error), KVANT_STATUS_ARGUMENT, "model: expected a pointer"));
    HOLDS(refused(kvant_model_open("\xff", NULL, &model, &error), KVANT_STATUS_ARGUMENT, "path: expected UTF-8"));
    HOLDS(refused(kvant_model_open("absent.gguf", NULL, &model, &error), KVANT_STATUS_REFUSED, "absent.gguf"));
    HOLDS(kvant_model_open("absent.gguf", NULL, &model, NULL) == KVANT_STATUS_REFUSED);
    kvant_model_options options = {.device = "toaster"};
    HOLDS(refused(kvant_model_bundled(&options, &model, &error), KVANT_STATUS_REFUSED, "toaster"));
    HOLDS(model == NULL && kvant_model_n_vocab(NULL) == 0);
    kvant_model_free(NULL);
    kvant_session_free(NULL);
    kvant_string_free(NULL);
}

static void quantized_products_need_no_model(const char *model_path) {
    enum { N_OUT = 3, N_IN = 64, ROWS = 2 };
    size_t size = 0;
    HOLDS(kvant_quantized_size("q8_0", N_OUT, N_IN, &size, &error) == KVANT_STATUS_OK && size == N_OUT * 68);
    HOLDS(refused(kvant_quantized_size("q8_0", N_OUT, 33, &size, &error), KVANT_STATUS_REFUSED, "multiple of the block"));
    HOLDS(refused(kvant_quantized_size("turbo3", N_OUT, 128, &size, &error), KVANT_STATUS_REFUSED, "turbo3"));
    HOLDS(refused(kvant_quantized_size("q9", N_OUT, N_IN, &size, &error), KVANT_STATUS_REFUSED, "q9"));
    HOLDS(refused(kvant_quantized_size(NULL, N_OUT, N_IN, &size, &error), KVANT_STATUS_ARGUMENT, "type"));
    float weights[N_OUT * N_IN], x[ROWS * N_IN], gain[N_IN], y[ROWS * N_OUT], z[ROWS * N_OUT];
    for (int i = 0; i < N_OUT * N_IN; i++) weights[i] = (float)(i % 7 - 3);
    for (int i = 0; i < ROWS * N_IN; i++) x[i] = (float)(i % 5);
    for (int i = 0; i < N_IN; i++) gain[i] = 2;
    uint8_t bytes[N_OUT * 68];
    HOLDS(refused(kvant_quantize_weights("q8_0", weights, N_OUT, N_IN, bytes, 7, &error), KVANT_STATUS_ARGUMENT, "capacity"));
    HOLDS(kvant_quantize_weights("q8_0", weights, N_OUT, N_IN, bytes, sizeof bytes, &error) == KVANT_STATUS_OK);
    kvant_linear *linear = NULL;
    HOLDS(refused(kvant_linear_new("double", 1, &linear, &error), KVANT_STATUS_ARGUMENT, "activations"));
    HOLDS(kvant_linear_new("float", 1, &linear, &error) == KVANT_STATUS_OK);
    kvant_matrix *matrix = NULL;
    HOLDS(refused(kvant_matrix_new(linear, "q8_0", N_OUT, N_IN, bytes, 7, &matrix, &error), KVANT_STATUS_REFUSED, "204 bytes"));
    HOLDS(kvant_matrix_new(linear, "q8_0", N_OUT, N_IN, bytes, sizeof bytes, &matrix, &error) == KVANT_STATUS_OK);
    size_t n_out = 0, n_in = 0;
    HOLDS(kvant_matrix_shape(matrix, &n_out, &n_in, &error) == KVANT_STATUS_OK && n_out == N_OUT && n_in == N_IN);
    HOLDS(kvant_gemv_quantized(linear, matrix, x, ROWS, y, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_fused_rmsnorm_gemv_quantized(linear, matrix, gain, 0, x, ROWS, z, &error) == KVANT_STATUS_OK);
    for (int row = 0; row < ROWS; row++) {
        double mean = 0;
        for (int i = 0; i < N_IN; i++) mean += x[row * N_IN + i] * x[row * N_IN + i] / (double)N_IN;
        for (int o = 0; o < N_OUT; o++) {
            double sum = 0;
            for (int i = 0; i < N_IN; i++) sum += weights[o * N_IN + i] * x[row * N_IN + i];
            // The scale of a block, 3 / 127, is rounded to 11 bits.
            HOLDS(fabs(y[row * N_OUT + o] - sum) <= 1e-3 * 600);
            HOLDS(fabs(z[row * N_OUT + o] - 2 * sum / sqrt(mean)) <= 1e-3 * 600);
        }
    }
    float together[2][ROWS * N_OUT];
    kvant_call calls[2] = {{matrix, x, ROWS, NULL, 0, together[0]}, {matrix, x, ROWS, gain, 0, together[1]}};
    HOLDS(kvant_linear_run(linear, calls, 2, &error) == KVANT_STATUS_OK);
    HOLDS(memcmp(together[0], y, sizeof y) == 0 && memcmp(together[1], z, sizeof z) == 0);
    calls[1].matrix = NULL;
    HOLDS(refused(kvant_linear_run(linear, calls, 2, &error), KVANT_STATUS_ARGUMENT, "matrix"));
    HOLDS(refused(kvant_gemv_quantized(linear, matrix, NULL, ROWS, y, &error), KVANT_STATUS_ARGUMENT, "x: expected"));
    HOLDS(refused(kvant_gemv_quantized(linear, matrix, x, SIZE_MAX, y, &error), KVANT_STATUS_ARGUMENT, "rows"));
    HOLDS(refused(kvant_fused_rmsnorm_gemv_quantized(linear, matrix, NULL, 0, x, ROWS, z, &error), KVANT_STATUS_ARGUMENT, "gain"));
    kvant_matrix *of_file = NULL;
    HOLDS(kvant_matrix_from_gguf(linear, model_path, "blk.0.attn_q.weight", &of_file, &error) == KVANT_STATUS_OK);
    HOLDS(refused(kvant_matrix_from_gguf(linear, model_path, "absent", &of_file, &error), KVANT_STATUS_REFUSED, "absent"));
    kvant_matrix_free(of_file);
    kvant_matrix_free(matrix);
    kvant_matrix_free(NULL);
    kvant_linear_free(linear);
    kvant_linear_free(NULL);
}

static void tokens_decode_to_their_text(const kvant_model *model) {
    uint32_t tokens[16];
    size_t n_tokens = 0;
    const char *text = "Once upon a time";
    HOLDS(kvant_model_text_prompt(model, text, NULL, 0, &n_tokens, &error) == KVANT_STATUS_OK && error == NULL);
    HOLDS(n_tokens > 1 && n_tokens <= 16);
    size_t n_again = 0;
    HOLDS(kvant_model_text_prompt(model, text, tokens, 16, &n_again, &error) == KVANT_STATUS_OK && n_again == n_tokens);
    char *decoded = NULL;
    HOLDS(kvant_model_decode(model, tokens, n_tokens, &decoded, &error) == KVANT_STATUS_OK);
    HOLDS(strcmp(decoded, text) == 0);
    kvant_string_free(decoded);
    HOLDS(refused(kvant_model_text_prompt(model, text, NULL, 1, &n_again, &error), KVANT_STATUS_ARGUMENT, "tokens"));
    HOLDS(refused(kvant_model_text_prompt(NULL, text, NULL, 0, &n_again, &error), KVANT_STATUS_ARGUMENT, "model"));
    kvant_message message = {.role = "user", .content = NULL};
    HOLDS(refused(kvant_model_chat_prompt(model, &message, 1, NULL, 0, &n_again, &error), KVANT_STATUS_ARGUMENT,
                  "content"));
}

static void texts_have_embeddings(const kvant_model *model) {
    size_t n_embd = kvant_model_n_embd(model);
    HOLDS(n_embd > 8 && kvant_model_n_embd(NULL) == 0);
    float *vectors = malloc(2 * n_embd * sizeof *vectors);
    const char *pooling_names[2] = {NULL, "mean"};
    for (size_t i = 0; i < 2; i++) {
        float *vector = vectors + i * n_embd, length = 0;
        HOLDS(kvant_model_embed(model, "A cat sleeps.", pooling_names[i], vector, n_embd, &error) == KVANT_STATUS_OK);
        for (size_t j = 0; j < n_embd; j++) {
            length += vector[j] * vector[j];
        }
        HOLDS(fabsf(length - 1) < 1e-5f);
    }
    HOLDS(memcmp(vectors, vectors + n_embd, n_embd * sizeof *vectors) != 0);
    HOLDS(refused(kvant_model_embed(model, "x", "cls", vectors, n_embd, &error), KVANT_STATUS_REFUSED, "cls, the first"));
    HOLDS(refused(kvant_model_embed(model, "", NULL, vectors, n_embd, &error), KVANT_STATUS_REFUSED, "prompt is empty"));
    HOLDS(refused(kvant_model_embed(model, "x", NULL, NULL, n_embd, &error), KVANT_STATUS_ARGUMENT, "values"));
    free(vectors);
}

static void sessions_feed_and_rewind(const kvant_model *model) {
    kvant_session *session = NULL;
    kvant_session_options options = {.type_k = "turbo9"};
    HOLDS(refused(kvant_session_new(model, &options, &session, &error), KVANT_STATUS_REFUSED, "turbo3"));
    options = (kvant_session_options){.type_k = "q8_0", .type_v = "turbo3", .kv_policy = "none", .n_ctx = 64};
    HOLDS(kvant_session_new(model, &options, &session, &error) == KVANT_STATUS_OK);

    size_t n_vocab = kvant_model_n_vocab(model);
    float *logits = malloc(n_vocab * sizeof *logits);
    HOLDS(refused(kvant_session_logits(session, logits, n_vocab, &error), KVANT_STATUS_REFUSED, "feed a token"));
    uint32_t tokens[65] = {1, 2, 3};
    HOLDS(kvant_session_feed(session, tokens, 3, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_session_logits(session, logits, n_vocab, &error) == KVANT_STATUS_OK);
    for (size_t i = 0; i < n_vocab; i++) {
        HOLDS(isfinite(logits[i]));
    }
    HOLDS(refused(kvant_session_feed(session, tokens, 65, &error), KVANT_STATUS_REFUSED, "the context holds 64"));
    HOLDS(kvant_session_rewind(session, 2, &error) == KVANT_STATUS_OK);
    uint32_t remaining[4] = {0};
    size_t n_remaining = 0;
    HOLDS(kvant_session_tokens(session, remaining, 4, &n_remaining, &error) == KVANT_STATUS_OK);
    HOLDS(n_remaining == 2 && remaining[0] == 1 && remaining[1] == 2 && remaining[2] == 0);
    kvant_kv_use kv;
    HOLDS(kvant_session_kv(session, &kv, &error) == KVANT_STATUS_OK);
    HOLDS(kv.tokens == 2 && kv.bpv_k == 8.625 && kv.bpv_v > 3 && kv.bpv_v < 4);
    HOLDS(refused(kvant_session_rewind(NULL, 0, &error), KVANT_STATUS_ARGUMENT, "session"));
    free(logits);
    kvant_session_free(session);
}

static void a_generation_runs_until_a_limit_or_cancel(kvant_model *model) {
    kvant_session *session = NULL;
    kvant_session_options options = {.type_k = "turbo3", .type_v = "turbo3"};
    HOLDS(kvant_session_new(model, &options, &session, &error) == KVANT_STATUS_OK);
    kvant_message message = {.role = "user", .content = "What is the capital of France?"};
    uint32_t prompt[64];
    size_t n_prompt = 0;
    HOLDS(kvant_model_chat_prompt(model, &message, 1, prompt, 64, &n_prompt, &error) == KVANT_STATUS_OK);
    // The session keeps the model alive.
    kvant_model_free(model);

    kvant_generate_options generate_options = kvant_generate_options_default();
    generate_options.temperature = 0;
    kvant_generated result;
    struct received all = {.max_calls = 1000}, two = {.max_calls = 2};
    HOLDS(kvant_session_generate(session, prompt, n_prompt, &generate_options, receive, &all, &result, &error) == KVANT_STATUS_OK);
    HOLDS(result.finish == KVANT_FINISH_STOP && result.n_prompt == n_prompt && strstr(all.text, "Paris") != NULL);
    HOLDS(kvant_session_generate(session, prompt, n_prompt, &generate_options, receive, &two, &result, &error) == KVANT_STATUS_OK);
    HOLDS(result.finish == KVANT_FINISH_CANCELLED && two.n_calls == 2 && result.n_gen == 2);
    HOLDS(strncmp(all.text, two.text, two.n_bytes) == 0);
    kvant_generate_options cut = generate_options;
    const char *stop[] = {"never", "aris"};
    cut.stop = stop;
    cut.n_stop = 2;
    struct received before = {.max_calls = 1000};
    HOLDS(kvant_session_generate(session, prompt, n_prompt, &cut, receive, &before, &result, &error) == KVANT_STATUS_OK);
    HOLDS(result.finish == KVANT_FINISH_STOP && before.n_bytes == (size_t)(strstr(all.text, "aris") - all.text));
    kvant_generate_options formed = generate_options;
    formed.constraint = "[0-9]{2}[ab]";
    formed.format = KVANT_FORMAT_REGEX;
    struct received code = {.max_calls = 1000};
    HOLDS(kvant_session_generate(session, prompt, n_prompt, &formed, receive, &code, &result, &error) == KVANT_STATUS_OK);
    HOLDS(code.n_bytes == 3 && code.text[0] >= '0' && code.text[0] <= '9' && (code.text[2] == 'a' || code.text[2] == 'b'));
    formed.format = KVANT_FORMAT_JSON_SCHEMA;
    HOLDS(refused(kvant_session_generate(session, prompt, n_prompt, &formed, NULL, NULL, NULL, &error),
                  KVANT_STATUS_REFUSED, "the schema"));
    kvant_logit_bias bias = {.token = prompt[0], .bias = 1000};
    kvant_generate_options biased = generate_options;
    biased.bias = &bias;
    biased.n_bias = 1;
    biased.max_tokens = 2;
    biased.ignore_eos = true;
    HOLDS(kvant_session_generate(session, prompt, n_prompt, &biased, NULL, NULL, &result, &error) == KVANT_STATUS_OK);
    generate_options.max_tokens = 3;
    HOLDS(kvant_session_generate(session, prompt, n_prompt, &generate_options, NULL, NULL, &result, &error) == KVANT_STATUS_OK);
    HOLDS(result.finish == KVANT_FINISH_LENGTH && result.n_gen == 3);
    generate_options.temperature = NAN;
    HOLDS(refused(kvant_session_generate(session, prompt, n_prompt, &generate_options, NULL, NULL, NULL, &error),
                  KVANT_STATUS_REFUSED, "temperature"));
    HOLDS(refused(kvant_session_generate(session, NULL, 0, NULL, NULL, NULL, NULL, &error), KVANT_STATUS_REFUSED,
                  "prompt is empty"));
    kvant_session_free(session);
}

static void a_chat_answers_with_a_message_in_json(const kvant_model *model) {
    kvant_session *session = NULL;
    HOLDS(kvant_session_new(model, NULL, &session, &error) == KVANT_STATUS_OK);
    kvant_generate_options options = kvant_generate_options_default();
    options.temperature = 0;
    kvant_chat chat = {.messages = "[{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]"};
    struct received content = {.max_calls = 1000}, one = {.max_calls = 1};
    kvant_generated result;
    char *message = NULL;
    HOLDS(kvant_session_chat(session, &chat, &options, receive, &content, &message, &result, &error) == KVANT_STATUS_OK);
    HOLDS(strstr(content.text, "Paris") != NULL && strstr(message, content.text) != NULL);
    HOLDS(result.finish == KVANT_FINISH_STOP && strstr(message, "\"role\":\"assistant\"") != NULL);
    kvant_string_free(message);
    HOLDS(kvant_session_chat(session, &chat, &options, receive, &one, NULL, &result, &error) == KVANT_STATUS_OK);
    HOLDS(result.finish == KVANT_FINISH_CANCELLED && one.n_calls == 1);

    chat.tools = "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\", "
                 "\"properties\": {\"city\": {\"enum\": [\"Oslo\", \"Rome\"]}}, \"required\": [\"city\"], "
                 "\"additionalProperties\": false}}}]";
    chat.tool_choice = "{\"name\": \"weather\"}";
    HOLDS(kvant_session_chat(session, &chat, &options, NULL, NULL, &message, &result, &error) == KVANT_STATUS_OK);
    HOLDS(strstr(message, "\"name\":\"weather\"") != NULL && strstr(message, "city") != NULL);
    kvant_string_free(message);
    chat.tool_choice = "weather";
    HOLDS(refused(kvant_session_chat(session, &chat, NULL, NULL, NULL, NULL, NULL, &error), KVANT_STATUS_REFUSED,
                  "tool_choice: expected"));
    chat.tool_choice = NULL;
    chat.tools = "{}";
    HOLDS(refused(kvant_session_chat(session, &chat, NULL, NULL, NULL, NULL, NULL, &error), KVANT_STATUS_REFUSED,
                  "tools: expected"));
    chat.messages = "Hello";
    HOLDS(refused(kvant_session_chat(session, &chat, NULL, NULL, NULL, NULL, NULL, &error), KVANT_STATUS_REFUSED,
                  "expected a JSON list"));
    HOLDS(refused(kvant_session_chat(session, NULL, NULL, NULL, NULL, NULL, NULL, &error), KVANT_STATUS_ARGUMENT, "chat"));
    kvant_session_free(session);
}

// Reads the logits of a session with this LoRA scale, or the default one.
static void logits_of(const kvant_model *model, const float *scale, float logits[64]) {
    const uint32_t tokens[3] = {1, 2, 3};
    kvant_session_options options = {.n_ctx = 64, .lora_strengths = scale};
    kvant_session *session = NULL;
    HOLDS(kvant_session_new(model, &options, &session, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_session_feed(session, tokens, 3, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_session_logits(session, logits, 64, &error) == KVANT_STATUS_OK);
    kvant_session_free(session);
}

// The model, its LoRA adapter as a file and as a folder.
static void sessions_have_their_own_lora_scales(char *paths[3]) {
    kvant_lora lora = {.path = paths[1], .strength = 1.0f}, half = {.path = paths[2], .strength = 0.5f};
    kvant_model_options of_lora = {.loras = &lora, .n_loras = 1}, of_half = {.loras = &half, .n_loras = 1};
    kvant_model *without_lora = NULL, *with_lora = NULL, *with_half_lora = NULL;
    HOLDS(kvant_model_open(paths[0], NULL, &without_lora, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_model_open(paths[0], &of_lora, &with_lora, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_model_open(paths[0], &of_half, &with_half_lora, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_model_n_vocab(without_lora) == 64);
    const float scales[] = {0.0f, 0.5f, INFINITY};
    float logits[5][64];
    logits_of(without_lora, NULL, logits[0]);
    logits_of(with_lora, &scales[0], logits[1]);
    logits_of(with_lora, NULL, logits[2]);
    logits_of(with_lora, &scales[1], logits[3]);
    logits_of(with_half_lora, NULL, logits[4]);
    HOLDS(memcmp(logits[0], logits[1], sizeof logits[0]) == 0);
    HOLDS(memcmp(logits[0], logits[2], sizeof logits[0]) != 0);
    HOLDS(memcmp(logits[3], logits[4], sizeof logits[0]) == 0);
    kvant_session *session = NULL;
    kvant_session_options options = {.lora_strengths = &scales[2]};
    HOLDS(refused(kvant_session_new(with_lora, &options, &session, &error), KVANT_STATUS_REFUSED, "a number for each of 1"));
    kvant_model *none = NULL;
    lora.path = NULL;
    HOLDS(refused(kvant_model_open(paths[0], &of_lora, &none, &error), KVANT_STATUS_ARGUMENT, "path of an adapter"));
    of_lora.loras = NULL;
    HOLDS(refused(kvant_model_open(paths[0], &of_lora, &none, &error), KVANT_STATUS_ARGUMENT, "loras"));
    kvant_model_free(without_lora);
    kvant_model_free(with_lora);
    kvant_model_free(with_half_lora);
}

// The model, its vision encoder, and an image.
static void a_vision_model_encodes_an_image(char *paths[3]) {
    kvant_model_options options = {.device = "cpu", .mmproj = paths[1]};
    kvant_model *vision_model = NULL, *text_model = NULL;
    HOLDS(kvant_model_open(paths[0], &options, &vision_model, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_model_open(paths[0], NULL, &text_model, &error) == KVANT_STATUS_OK);
    static uint8_t bytes[1 << 16];
    FILE *file = fopen(paths[2], "rb");
    HOLDS(file != NULL);
    kvant_image image = {.bytes = bytes, .n_bytes = fread(bytes, 1, sizeof bytes, file)};
    fclose(file);
    kvant_message message = {.role = "user", .content = "What?", .images = &image, .n_images = 1};
    uint32_t prompt[256];
    size_t n_with_image = 0, n_without_image = 0;
    HOLDS(kvant_model_chat_prompt(vision_model, &message, 1, prompt, 256, &n_with_image, &error) == KVANT_STATUS_OK);
    HOLDS(refused(kvant_model_chat_prompt(text_model, &message, 1, NULL, 0, &n_without_image, &error), KVANT_STATUS_REFUSED, "a model with a vision encoder"));
    kvant_session *session = NULL;
    HOLDS(kvant_session_new(vision_model, NULL, &session, &error) == KVANT_STATUS_OK);
    HOLDS(kvant_session_feed(session, prompt, n_with_image, &error) == KVANT_STATUS_OK);
    kvant_session_free(session);
    image.n_bytes = 8;
    HOLDS(refused(kvant_model_chat_prompt(vision_model, &message, 1, NULL, 0, &n_without_image, &error), KVANT_STATUS_REFUSED, "not a readable image"));
    message.n_images = 0;
    HOLDS(kvant_model_chat_prompt(vision_model, &message, 1, NULL, 0, &n_without_image, &error) == KVANT_STATUS_OK);
    HOLDS(n_with_image > n_without_image + 28);
    kvant_model_free(vision_model);
    kvant_model_free(text_model);
}

int main(int argc, char *argv[]) {
    faulty_models_are_refused_with_a_message();
    HOLDS(argc == 7);
    sessions_have_their_own_lora_scales(argv + 1);
    a_vision_model_encodes_an_image(argv + 4);
    quantized_products_need_no_model(argv[1]);
    kvant_model *model = NULL;
    HOLDS(kvant_model_bundled(NULL, &model, &error) == KVANT_STATUS_OK);
    tokens_decode_to_their_text(model);
    texts_have_embeddings(model);
    sessions_feed_and_rewind(model);
    a_chat_answers_with_a_message_in_json(model);
    a_generation_runs_until_a_limit_or_cancel(model);
    puts("all held");
    return 0;
}
