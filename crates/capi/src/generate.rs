//! Generation: passes text to a callback of the caller.

use std::ffi::{c_char, c_void};
use std::ptr;

use kvant::generate::constraint::OutputFormat;
use kvant::{FinishReason, GenerateOptions, GenerationStats, SamplerParams};

use crate::ffi::{CallError, KvantStatus, call, changed, out_ptr, text, values};
use crate::session::KvantSession;

/// Options of a generation. Start from `kvant_generate_options_default`.
#[repr(C)]
pub struct KvantGenerateOptions {
    /// Maximum of generated tokens; 0 is until end of generation or a full context.
    pub max_tokens: usize,
    /// Divides the logits before sampling; 0 is greedy sampling.
    pub temperature: f32,
    /// Keeps the `top_k` most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most probable tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this probability relative to the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Penalizes recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Number of last tokens that count as recent.
    pub repeat_last_n: usize,
    /// Sampling seed.
    pub seed: u64,
    /// Continues after an end-of-generation token.
    pub ignore_eos: bool,
    /// Texts that end the generation; excluded from its text.
    pub stop: *const *const c_char,
    /// Number of those texts.
    pub n_stop: usize,
    /// Biases added to the logits of tokens.
    pub bias: *const KvantLogitBias,
    /// Number of those biases.
    pub n_bias: usize,
    /// What the text is constrained to, as stated by `format`; NULL is nothing.
    pub constraint: *const c_char,
    /// Notation of `constraint`.
    pub format: KvantFormat,
}

/// Value added to the logit of a token.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KvantLogitBias {
    /// Token id.
    pub token: u32,
    /// Bias.
    pub bias: f32,
}

/// Notation of a constraint.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvantFormat {
    /// A JSON schema.
    JsonSchema = 0,
    /// A regular expression.
    Regex = 1,
    /// A grammar in Lark's notation.
    Lark = 2,
}

/// Why a generation ended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvantFinish {
    /// The model sampled an end-of-generation token.
    Stop = 0,
    /// `max_tokens` were generated.
    Length = 1,
    /// The context is full.
    ContextFull = 2,
    /// The callback returned false.
    Cancelled = 3,
}

/// Results of a generation.
#[repr(C)]
pub struct KvantGenerated {
    /// Prompt tokens processed, without cached tokens.
    pub n_prompt: usize,
    /// Tokens generated.
    pub n_gen: usize,
    /// Prefill speed in tok/s; 0 when no prompt token was processed.
    pub prompt_tps: f64,
    /// Decode speed in tok/s; 0 when no token was decoded.
    pub decode_tps: f64,
    /// Why the generation ended.
    pub finish: KvantFinish,
}

/// Receives the text completed by a token: `n_bytes` bytes, possibly 0, and a zero, valid during
/// the call. Returns whether to continue. `user` is the argument of `kvant_session_generate`; the
/// session must not be used within.
pub type KvantOnText =
    Option<unsafe extern "C" fn(user: *mut c_void, text: *const c_char, n_bytes: usize) -> bool>;

/// Returns llama.cpp's defaults, with seed 0.
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
        stop: ptr::null(),
        n_stop: 0,
        bias: ptr::null(),
        n_bias: 0,
        constraint: ptr::null(),
        format: KvantFormat::JsonSchema,
    }
}

impl KvantGenerateOptions {
    /// Reads the options.
    ///
    /// # Safety
    /// The pointers satisfy the contract of this library.
    pub(crate) unsafe fn read(&self) -> Result<GenerateOptions, CallError> {
        let &Self { max_tokens, temperature, top_k, top_p, min_p, seed, ignore_eos, .. } = self;
        let &Self { repeat_penalty, repeat_last_n, .. } = self;
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
        // SAFETY: guaranteed by the caller.
        let (stop, bias, format) = unsafe {
            let stop = values(self.stop, self.n_stop, "stop")?.iter();
            let stop =
                stop.map(|&stop| Ok(text(stop, "stop")?.to_owned())).collect::<Result<_, CallError>>()?;
            let bias = values(self.bias, self.n_bias, "bias")?.iter().map(|bias| (bias.token, bias.bias));
            (stop, bias.collect(), self.output_format()?)
        };
        Ok(GenerateOptions { max_tokens, sampler, ignore_eos, stop, bias, format, ..Default::default() })
    }

    /// Reads the constraint.
    ///
    /// # Safety
    /// As [`KvantGenerateOptions::read`].
    unsafe fn output_format(&self) -> Result<Option<OutputFormat>, CallError> {
        if self.constraint.is_null() {
            return Ok(None);
        }
        // SAFETY: guaranteed by the caller.
        let constraint = unsafe { text(self.constraint, "constraint")? };
        Ok(Some(match self.format {
            KvantFormat::JsonSchema => OutputFormat::json_schema(constraint).map_err(kvant::Error::from)?,
            KvantFormat::Regex => OutputFormat::Regex(constraint.to_owned()),
            KvantFormat::Lark => OutputFormat::Lark(constraint.to_owned()),
        }))
    }
}

/// Feeds a prompt and generates its continuation. The common prefix of the context and the prompt
/// is reused and the rest is dropped, so a whole conversation can be passed each time. `options`,
/// `on_text` and `generated` may be NULL.
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
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let prompt = values(prompt, n_prompt, "prompt")?;
            let options = options.as_ref().map(|options| options.read()).transpose()?.unwrap_or_default();
            let send_text = |text: String| on_text.is_none_or(|on_text| call_on_text(text, on_text, user));
            let stats = generate(changed(session, "session")?, prompt, options, send_text)?;
            if let Ok(out_ptr) = out_ptr(generated, "generated") {
                out_ptr.write(to_c(stats));
            }
            Ok(())
        })
    }
}

/// Calls the caller's function with a text that ends with a zero.
///
/// # Safety
/// `on_text` may be called with `user`.
pub(crate) unsafe fn call_on_text(
    mut text: String,
    on_text: unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> bool,
    user: *mut c_void,
) -> bool {
    let n_bytes = text.len();
    text.push('\0');
    // SAFETY: guaranteed by the caller; the text lives until it returns.
    unsafe { on_text(user, text.as_ptr().cast(), n_bytes) }
}

fn generate(
    session: &mut KvantSession,
    prompt: &[u32],
    options: GenerateOptions,
    send_text: impl Fn(String) -> bool,
) -> Result<GenerationStats, CallError> {
    let cancel = kvant::CancelFlag::default();
    let mut generation = session.0.generate_with(prompt, options, &cancel, &mut |_| ())?;
    for token in generation.by_ref() {
        if !send_text(token?.text) {
            cancel.cancel();
        }
    }
    let rest = generation.finish_text();
    if !rest.is_empty() && !cancel.is_cancelled() {
        send_text(rest);
    }
    Ok(generation.stats())
}

pub(crate) fn to_c(stats: GenerationStats) -> KvantGenerated {
    let finish = match stats.finish {
        Some(FinishReason::Stop) => KvantFinish::Stop,
        Some(FinishReason::Length) => KvantFinish::Length,
        Some(FinishReason::ContextFull) => KvantFinish::ContextFull,
        Some(FinishReason::Cancelled) | None => KvantFinish::Cancelled,
    };
    let (prompt_tps, decode_tps) = (stats.prefill_tps(), stats.decode_tps());
    KvantGenerated { n_prompt: stats.n_prompt, n_gen: stats.n_gen, prompt_tps, decode_tps, finish }
}
