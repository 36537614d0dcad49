//! Generation: text is handed to a function of the caller's as it comes.

use std::ffi::{c_char, c_void};

use kvant::{Finish, GenerateOptions, SamplerParams, Stats};

use crate::border::{Failure, call, changed, place, values};
use crate::{KvantSession, KvantStatus};

/// How to continue a prompt. Begin with `kvant_generate_options_default`.
#[repr(C)]
pub struct KvantGenerateOptions {
    /// Tokens to generate at most; 0 is until the model ends its turn or the context is full.
    pub max_tokens: usize,
    /// Divides the logits before the draw; 0 always takes the likeliest token.
    pub temperature: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest likeliest tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Makes recent tokens less likely; 1 does nothing.
    pub repeat_penalty: f32,
    /// How many of the last tokens are recent.
    pub repeat_last_n: usize,
    /// Seed of the draws.
    pub seed: u64,
    /// Go on after an end-of-turn token.
    pub ignore_eos: bool,
}

/// Why a generation ended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvantFinish {
    /// The model ended its turn.
    Stop = 0,
    /// `max_tokens` were generated.
    Length = 1,
    /// The context is full.
    ContextFull = 2,
    /// The function that takes the text said so.
    Cancelled = 3,
}

/// What a generation came to.
#[repr(C)]
pub struct KvantGenerated {
    /// Prompt tokens that were read; those that the session held before are not counted.
    pub n_prompt: usize,
    /// Tokens generated.
    pub n_gen: usize,
    /// Prompt tokens per second; 0 when none was read.
    pub prompt_tps: f64,
    /// Generated tokens per second; 0 when none went through the model.
    pub decode_tps: f64,
    /// Why it ended.
    pub finish: KvantFinish,
}

/// Takes the text that became complete with a token, `n_bytes` and a zero, possibly none; it is gone when this returns. Returns
/// whether to go on. `user` is what was handed to `kvant_session_generate`; the session is not to be used within.
pub type KvantOnText =
    Option<unsafe extern "C" fn(user: *mut c_void, text: *const c_char, n_bytes: usize) -> bool>;

/// llama.cpp's settings, and seed 0.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_generate_options_default() -> KvantGenerateOptions {
    let GenerateOptions { max_tokens, sampler, ignore_eos, .. } = GenerateOptions::default();
    let SamplerParams { temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed, .. } = sampler;
    KvantGenerateOptions {
        max_tokens: max_tokens.unwrap_or(0),
        temperature,
        top_k,
        top_p,
        min_p,
        repeat_penalty,
        repeat_last_n,
        seed,
        ignore_eos,
    }
}

impl From<&KvantGenerateOptions> for GenerateOptions {
    fn from(options: &KvantGenerateOptions) -> Self {
        let &KvantGenerateOptions { max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos, .. } =
            options;
        let &KvantGenerateOptions { repeat_penalty, repeat_last_n, .. } = options;
        let sampler = SamplerParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            repeat_last_n,
            seed,
            ..SamplerParams::default()
        };
        let max_tokens = Some(max_tokens).filter(|&n| n > 0);
        GenerateOptions { max_tokens, sampler, ignore_eos, ..Self::default() }
    }
}

/// Reads a prompt and continues it. Tokens that the session shares with the beginning of the prompt are kept, others are
/// forgotten: a whole conversation can be passed each time. `options`, `on_text` and `generated` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_generate(
    session: *mut KvantSession,
    prompt: *const u32,
    n_prompt: usize,
    options: *const KvantGenerateOptions,
    on_text: KvantOnText,
    user: *mut c_void,
    generated: *mut KvantGenerated,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let prompt = values(prompt, n_prompt, "prompt")?;
            let options = options.as_ref().map_or_else(GenerateOptions::default, GenerateOptions::from);
            let hand_over = |text: String| on_text.is_none_or(|on_text| hand_over(text, on_text, user));
            let stats = generate(changed(session, "session")?, prompt, options, hand_over)?;
            if let Ok(place) = place(generated, "generated") {
                place.put(told(stats));
            }
            Ok(())
        })
    }
}

/// Calls the caller's function with a text that ends with a zero.
///
/// # Safety
/// `on_text` may be called with `user`.
unsafe fn hand_over(
    mut text: String,
    on_text: unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> bool,
    user: *mut c_void,
) -> bool {
    let n_bytes = text.len();
    text.push('\0');
    // SAFETY: as the caller promises; the text lives until it returns.
    unsafe { on_text(user, text.as_ptr().cast(), n_bytes) }
}

fn generate(
    session: &mut KvantSession,
    prompt: &[u32],
    options: GenerateOptions,
    hand_over: impl Fn(String) -> bool,
) -> Result<Stats, Failure> {
    let cancel = kvant::CancelFlag::default();
    let mut generation = session.0.generate_with(prompt, options, &cancel, &mut |_| ())?;
    for token in generation.by_ref() {
        if !hand_over(token?.text) {
            cancel.cancel();
        }
    }
    let rest = generation.finish_text();
    if !rest.is_empty() && !cancel.is_cancelled() {
        hand_over(rest);
    }
    Ok(generation.stats())
}

fn told(stats: Stats) -> KvantGenerated {
    let finish = match stats.finish {
        Some(Finish::Stop) => KvantFinish::Stop,
        Some(Finish::Length) => KvantFinish::Length,
        Some(Finish::ContextFull) => KvantFinish::ContextFull,
        Some(Finish::Cancelled) | None => KvantFinish::Cancelled,
    };
    let (prompt_tps, decode_tps) = (stats.prompt_tps(), stats.decode_tps());
    KvantGenerated { n_prompt: stats.n_prompt, n_gen: stats.n_gen, prompt_tps, decode_tps, finish }
}
