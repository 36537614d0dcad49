// Run large language models on a compressed KV cache.
//
// An object that is made here is freed by the function that is named after it. Texts are UTF-8 and end with a zero. A pointer
// is NULL only where that is said to mean something, and else points to what its type says for as long as the call lasts;
// where it must not be NULL and is, the call is refused.
//
// A call that can fail returns a status. Where that is not KVANT_STATUS_OK and `error` is not NULL, `*error` is a line that
// says what was expected and what was found; free it with kvant_string_free. No call ends the process.
//
// A model may be used by any threads at once, a session by one at a time. A session keeps its model alive.
//
// Made by cbindgen from crates/capi/src: change it there.

#ifndef KVANT_H
#define KVANT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// How a call went.
typedef enum {
  // Done.
  KVANT_STATUS_OK = 0,
  // It cannot be done.
  KVANT_STATUS_REFUSED = 1,
  // An argument is NULL that must not be, or a text is not UTF-8.
  KVANT_STATUS_ARGUMENT = 2,
  // A fault of Kvant. The objects that were handed in are to be freed, and are good for nothing else.
  KVANT_STATUS_FAULT = 3,
} kvant_status;

// Why a generation ended.
typedef enum {
  // The model ended its turn.
  KVANT_FINISH_STOP = 0,
  // `max_tokens` were generated.
  KVANT_FINISH_LENGTH = 1,
  // The context is full.
  KVANT_FINISH_CONTEXT_FULL = 2,
  // The function that takes the text said so.
  KVANT_FINISH_CANCELLED = 3,
} kvant_finish;

// A loaded model.
typedef struct kvant_model kvant_model;

// A conversation with a model: tokens and their KV cache.
typedef struct kvant_session kvant_session;

// An adapter (LoRA), which changes a model.
typedef struct {
  // A GGUF file, or a folder as PEFT saves it.
  const char *path;
  // How much of it is added; 1 is what it was trained to.
  float strength;
} kvant_lora;

// How to load a model. Zeroes mean the defaults.
typedef struct {
  // `auto`, `cpu`, `cuda:N` or `wgpu:N`; NULL is `auto`, the first NVIDIA GPU where one can be used, else the CPU.
  const char *device;
  // Threads to work with; 0 is all cores.
  size_t n_threads;
  // Adapters of the model, `n_loras` of them; NULL is none.
  const kvant_lora *loras;
  // How many there are.
  size_t n_loras;
  // The file of the tower that makes tokens of pictures, `mmproj-*.gguf` of llama.cpp; NULL is none.
  const char *mmproj;
} kvant_model_options;

// A picture, as a PNG, JPEG, WebP, GIF or BMP file has it.
typedef struct {
  // The bytes of the file.
  const uint8_t *bytes;
  // How many there are.
  size_t n_bytes;
} kvant_picture;

// What someone says in a conversation.
typedef struct {
  // Who speaks: `system`, `user`, `assistant`, or what else the model's template knows.
  const char *role;
  // What is said.
  const char *content;
  // Pictures that are shown before that, `n_pictures` of them, for a model with a tower; NULL is none.
  const kvant_picture *pictures;
  // How many there are.
  size_t n_pictures;
} kvant_message;

// How to make a session. Zeroes mean the defaults.
typedef struct {
  // What the cache stores of keys, by name (`turbo3`, `q8_0`, ...); NULL is `f16`.
  const char *type_k;
  // What the cache stores of values; NULL is `f16`.
  const char *type_v;
  // Rules on top, as `sink:16,boundary:2` or `none`; NULL is `auto-keys,sink:16`.
  const char *kv_policy;
  // Tokens the context holds; 0 is the length the model was trained for.
  size_t n_ctx;
  // How much of each of the model's adapters is added, one number for each; NULL is as much as they were loaded with.
  const float *lora_strengths;
} kvant_session_options;

// What a cache takes, measured.
typedef struct {
  // Tokens stored.
  size_t tokens;
  // Bytes allocated: pages, f16 parts and padding.
  size_t bytes;
  // Bytes an f16 cache would have allocated for the same tokens.
  size_t bytes_f16;
  // Bits per key value, scales included.
  double bpv_k;
  // Bits per value value, scales included.
  double bpv_v;
} kvant_kv_use;

// How to continue a prompt. Begin with `kvant_generate_options_default`.
typedef struct {
  // Tokens to generate at most; 0 is until the model ends its turn or the context is full.
  size_t max_tokens;
  // Divides the logits before the draw; 0 always takes the likeliest token.
  float temperature;
  // Keep the `top_k` likeliest tokens; 0 keeps all.
  size_t top_k;
  // Keep the fewest likeliest tokens whose probabilities sum to at least this; 1 keeps all.
  float top_p;
  // Keep tokens at least this likely relative to the likeliest; 0 keeps all.
  float min_p;
  // Makes recent tokens less likely; 1 does nothing.
  float repeat_penalty;
  // How many of the last tokens are recent.
  size_t repeat_last_n;
  // Seed of the draws.
  uint64_t seed;
  // Go on after an end-of-turn token.
  bool ignore_eos;
} kvant_generate_options;

// Takes the text that became complete with a token, `n_bytes` and a zero, possibly none; it is gone when this returns. Returns
// whether to go on. `user` is what was handed to `kvant_session_generate`; the session is not to be used within.
typedef bool (*kvant_on_text)(void *user, const char *text, size_t n_bytes);

// What a generation came to.
typedef struct {
  // Prompt tokens that were read; those that the session held before are not counted.
  size_t n_prompt;
  // Tokens generated.
  size_t n_gen;
  // Prompt tokens per second; 0 when none was read.
  double prompt_tps;
  // Generated tokens per second; 0 when none went through the model.
  double decode_tps;
  // Why it ended.
  kvant_finish finish;
} kvant_generated;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Frees a text that was handed out. NULL is gone over.
void kvant_string_free(char *text);

// Loads a GGUF file (any shard of a split one). `options` may be NULL.
kvant_status kvant_model_open(const char *path, const kvant_model_options *options, kvant_model **model, char **error);

// Loads the small model that is built into this library. `options` may be NULL.
kvant_status kvant_model_bundled(const kvant_model_options *options, kvant_model **model, char **error);

// Frees a model; its sessions go on. NULL is gone over.
void kvant_model_free(kvant_model *model);

// Size of the vocabulary; 0 for NULL.
size_t kvant_model_n_vocab(const kvant_model *model);

// Values of a text's vector; 0 for NULL.
size_t kvant_model_n_embd(const kvant_model *model);

// The vector of a text, in which special tokens mean what they are called, of length 1, for search and comparison: the first `capacity` of `kvant_model_n_embd` values are written.
// `pooling` says what of the states of its tokens it is made of, `mean` or `last`; NULL is what the model's file says, or else `last`.
kvant_status kvant_model_embed(const kvant_model *model,
                               const char *prompt,
                               const char *pooling,
                               float *values,
                               size_t capacity,
                               char **error);

// Tokens of a plain text, with the model's begin-of-text token where it wants one. What looks like a special token in the text
// is just text. The first `capacity` tokens are written to `tokens` and the number of all to `n_tokens`: a capacity of 0 asks
// for the number.
kvant_status kvant_model_text_prompt(const kvant_model *model,
                                     const char *prompt,
                                     uint32_t *tokens,
                                     size_t capacity,
                                     size_t *n_tokens,
                                     char **error);

// Tokens of a conversation in the model's own chat format, ending where the assistant is to answer, written as by
// `kvant_model_text_prompt`.
kvant_status kvant_model_chat_prompt(const kvant_model *model,
                                     const kvant_message *messages,
                                     size_t n_messages,
                                     uint32_t *tokens,
                                     size_t capacity,
                                     size_t *n_tokens,
                                     char **error);

// The text of tokens, to be freed with `kvant_string_free`.
kvant_status kvant_model_decode(const kvant_model *model,
                                const uint32_t *tokens,
                                size_t n_tokens,
                                char **text,
                                char **error);

// Makes a session with an empty cache. `options` may be NULL.
kvant_status kvant_session_new(const kvant_model *model,
                               const kvant_session_options *options,
                               kvant_session **session,
                               char **error);

// Frees a session and its cache. NULL is gone over.
void kvant_session_free(kvant_session *session);

// Reads tokens after those that are there.
kvant_status kvant_session_feed(kvant_session *session, const uint32_t *tokens, size_t n_tokens, char **error);

// The logits that follow the last token that was fed: the first `capacity` of `kvant_model_n_vocab` are written.
kvant_status kvant_session_logits(kvant_session *session, float *logits, size_t capacity, char **error);

// Forgets everything but the first `n_tokens`.
kvant_status kvant_session_rewind(kvant_session *session, size_t n_tokens, char **error);

// The tokens in the cache: the first `capacity` are written to `tokens` and the number of all to `n_tokens`.
kvant_status kvant_session_tokens(const kvant_session *session,
                                  uint32_t *tokens,
                                  size_t capacity,
                                  size_t *n_tokens,
                                  char **error);

// What the cache takes right now.
kvant_status kvant_session_kv(const kvant_session *session, kvant_kv_use *kv, char **error);

// llama.cpp's settings, and seed 0.
kvant_generate_options kvant_generate_options_default(void);

// Reads a prompt and continues it. Tokens that the session shares with the beginning of the prompt are kept, others are
// forgotten: a whole conversation can be passed each time. `options`, `on_text` and `generated` may be NULL.
kvant_status kvant_session_generate(kvant_session *session,
                                    const uint32_t *prompt,
                                    size_t n_prompt,
                                    const kvant_generate_options *options,
                                    kvant_on_text on_text,
                                    void *user,
                                    kvant_generated *generated,
                                    char **error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVANT_H */
