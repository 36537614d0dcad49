//! Sessions: feeding tokens, reading logits, measuring the cache.

use std::ffi::c_char;

use kvant::{DType, KvOptions, Policies, Session, SessionOptions};

use crate::ffi::{
    CallError, KvantStatus, borrowed, call, changed, copy, copy_counted, out_ptr, text_or_null, values,
};
use crate::model::KvantModel;

/// A conversation with a model: tokens and their KV cache.
pub struct KvantSession(pub(crate) Session);

/// Options of a session. Zeroes are the defaults.
#[repr(C)]
pub struct KvantSessionOptions {
    /// KV-cache type of keys, by name (`turbo3`, `q8_0`, ...); NULL is `f16`.
    pub type_k: *const c_char,
    /// KV-cache type of values; NULL is `f16`.
    pub type_v: *const c_char,
    /// KV policies, such as `sink:16,boundary:2` or `none`; NULL is `auto-keys,sink:16`.
    pub kv_policy: *const c_char,
    /// Context length in tokens; 0 is the model's training length.
    pub n_ctx: usize,
    /// Scale of each of the model's LoRA adapters; NULL keeps the scales of loading.
    pub lora_strengths: *const f32,
}

/// Measured size of a KV cache.
#[repr(C)]
pub struct KvantKvUse {
    /// Tokens stored.
    pub tokens: usize,
    /// Bytes allocated: pages, f16 windows and padding.
    pub bytes: usize,
    /// Bytes that an f16 cache of the same tokens would allocate.
    pub bytes_f16: usize,
    /// Bits per value of the keys, scales included.
    pub bpv_k: f64,
    /// Bits per value of the values, scales included.
    pub bpv_v: f64,
}

/// # Safety
/// `options` is NULL or valid.
unsafe fn session_options(options: *const KvantSessionOptions) -> Result<SessionOptions, CallError> {
    // SAFETY: guaranteed by the caller.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(SessionOptions::default()) };
    let dtype = |name: Option<&str>| name.map_or(Ok(DType::F16), str::parse);
    // SAFETY: texts or NULL, by the contract of this library.
    let (k, v, policy) = unsafe {
        let types = (text_or_null(options.type_k, "type_k")?, text_or_null(options.type_v, "type_v")?);
        (types.0, types.1, text_or_null(options.kv_policy, "kv_policy")?)
    };
    let policies = policy.map_or(Ok(Policies::default()), str::parse)?;
    let kv = KvOptions { k: dtype(k)?, v: dtype(v)?, policies, ..Default::default() };
    Ok(SessionOptions { n_ctx: Some(options.n_ctx).filter(|&n| n > 0), kv })
}

/// Creates a session with an empty cache. `options` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_new(
    model: *const KvantModel,
    options: *const KvantSessionOptions,
    session: *mut *mut KvantSession,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(session, "session")?;
            let model = &borrowed(model, "model")?.0;
            let mut session = model.session(session_options(options)?)?;
            if let Some(options) = options.as_ref().filter(|options| !options.lora_strengths.is_null()) {
                let strengths = values(options.lora_strengths, model.loras().len(), "lora_strengths")?;
                session = session.with_lora_scales(strengths)?;
            }
            out_ptr.write(Box::into_raw(Box::new(KvantSession(session))));
            Ok(())
        })
    }
}

/// Frees a session and its cache. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_free(session: *mut KvantSession) {
    if !session.is_null() {
        // SAFETY: it was made by `Box::into_raw` above and has not been freed.
        drop(unsafe { Box::from_raw(session) });
    }
}

/// Appends tokens to the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_feed(
    session: *mut KvantSession,
    tokens: *const u32,
    n_tokens: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let tokens = values(tokens, n_tokens, "tokens")?;
            Ok(changed(session, "session")?.0.feed(tokens, &mut |_| true)?)
        })
    }
}

/// Reads the logits that follow the last token fed: writes the first `capacity` of
/// `kvant_model_n_vocab`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_logits(
    session: *mut KvantSession,
    logits: *mut f32,
    capacity: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe { call(error, || copy(changed(session, "session")?.0.logits()?, logits, capacity, "logits")) }
}

/// Truncates the context to its first `n_tokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_rewind(
    session: *mut KvantSession,
    n_tokens: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe { call(error, || Ok(changed(session, "session")?.0.rewind(n_tokens)?)) }
}

/// Reads the tokens in the cache: writes the first `capacity` to `tokens` and the number of all to
/// `n_tokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_tokens(
    session: *const KvantSession,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(n_tokens, "n_tokens")?;
            let all = borrowed(session, "session")?.0.tokens();
            copy_counted(all, tokens, capacity, "tokens", out_ptr)
        })
    }
}

/// Reads the present size of the cache.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_kv(
    session: *const KvantSession,
    kv: *mut KvantKvUse,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(kv, "kv")?;
            let kvant::KvUse { tokens, bytes, bytes_f16, bpv_k, bpv_v, .. } =
                borrowed(session, "session")?.0.kv();
            out_ptr.write(KvantKvUse { tokens, bytes, bytes_f16, bpv_k, bpv_v });
            Ok(())
        })
    }
}

/// Checks the header's guarantees about threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    const fn handed_on<T: Send>() {}
    shared::<KvantModel>();
    handed_on::<KvantSession>();
};
