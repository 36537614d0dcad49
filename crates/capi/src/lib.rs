//! Kvant for C.
//!
//! What a C program sees is in [`include/kvant.h`](../include/kvant.h), made from this crate: its preamble says what holds for
//! every call. Link with `libkvant_capi`, shared or static. This is a skin: what things do is told by the library [`kvant`].
//!
//! # Safety
//! One contract holds for every function, that of the header's preamble: a pointer is NULL or valid for the call, texts end
//! with a zero, objects are ours and not freed, a session is used by one thread at a time.
#![allow(clippy::missing_safety_doc)] // See above.

mod border;
mod generate;
mod model;
mod session;

pub use border::{KvantStatus, kvant_string_free};
pub use generate::{
    KvantFinish, KvantGenerateOptions, KvantGenerated, KvantOnText, kvant_generate_options_default,
    kvant_session_generate,
};
pub use model::{
    KvantLora, KvantMessage, KvantModel, KvantModelOptions, KvantPicture, kvant_model_bundled,
    kvant_model_chat_prompt, kvant_model_decode, kvant_model_free, kvant_model_n_vocab, kvant_model_open,
    kvant_model_text_prompt,
};
pub use session::{
    KvantKvUse, KvantSession, KvantSessionOptions, kvant_session_feed, kvant_session_free, kvant_session_kv,
    kvant_session_logits, kvant_session_new, kvant_session_rewind, kvant_session_tokens,
};
