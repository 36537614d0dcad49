//! C API of Kvant.
//!
//! C programs include [`include/kvant.h`](../include/kvant.h), generated from this crate; its
//! preamble states the rules of all calls. Link with `libkvant_capi`, shared or static. This is a
//! thin layer; behaviour is documented in the library [`kvant`].
//!
//! # Safety
//! One contract applies to every function, that of the header's preamble: a pointer is NULL or
//! valid for the call, texts end with a zero, objects come from this library and are not freed, a
//! session is used by one thread at a time.
#![allow(clippy::missing_safety_doc)] // See above.

mod chat;
mod ffi;
mod generate;
mod linear;
mod model;
mod session;

pub use chat::{KvantChat, kvant_session_chat};
pub use ffi::{KvantStatus, kvant_string_free};
pub use generate::{
    KvantFinish, KvantGenerateOptions, KvantGenerated, KvantOnText, kvant_generate_options_default,
    kvant_session_generate,
};
pub use linear::{
    KvantCall, KvantLinear, KvantMatrix, kvant_fused_rmsnorm_gemv_quantized, kvant_gemv_quantized,
    kvant_linear_free, kvant_linear_new, kvant_linear_run, kvant_matrix_free, kvant_matrix_from_gguf,
    kvant_matrix_new, kvant_matrix_shape, kvant_quantize_weights, kvant_quantized_size,
};
pub use model::{
    KvantImage, KvantLora, KvantMessage, KvantModel, KvantModelOptions, kvant_model_bundled,
    kvant_model_chat_prompt, kvant_model_decode, kvant_model_free, kvant_model_n_vocab, kvant_model_open,
    kvant_model_text_prompt,
};
pub use session::{
    KvantKvUse, KvantSession, KvantSessionOptions, kvant_session_feed, kvant_session_free, kvant_session_kv,
    kvant_session_logits, kvant_session_new, kvant_session_rewind, kvant_session_tokens,
};
