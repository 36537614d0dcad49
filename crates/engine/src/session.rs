//! A session: one KV cache and the tokens in it.

mod batch;
mod drafter;
mod logits;
mod measure;
mod media;
mod options;
mod sequence_step;
mod speculative;

use std::sync::Arc;

use kvant_backend::limits::{MAX_TOKENS, check_size};
use kvant_backend::{Candidate, DeviceInfo, TOKENS_PER_BLOCK};
use kvant_generate::sampler::{SampleError, Sampler};
use kvant_model::{EmbeddingRows, Entry, LogitsFor, OnQueries};

use crate::error::Error;
use crate::generation::{CancelFlag, GenerateOptions, Generation, GenerationState};
use crate::model::Model;
use crate::runtime::{ContextSize, Sequence};

pub use batch::BatchItem;
use logits::LogitsLoan;
pub use measure::Measure;
pub use options::{KvBalance, KvOptions, KvUse, SessionOptions};
pub use sequence_step::SequenceStep;

/// One sequence of tokens and its KV cache.
///
/// The session owns the cache alone: activations and logits belong to the model and are lent for a
/// step or until the next one.
pub struct Session {
    model: Model,
    sequence: Sequence,
    tokens: Vec<u32>,
    /// Draft tokens already computed: the cache holds them behind `tokens`, unless they have been
    /// discarded.
    draft_tokens: Vec<u32>,
    /// Session of the draft model, which follows this one.
    drafter: Option<Box<Session>>,
    /// Logits of the last step, and the row that follows the last token.
    logits_loan: Option<LogitsLoan>,
    /// That row on the host, `[n_vocab]`, once it has been read.
    row: Vec<f32>,
    /// Most probable tokens of that row, as many as its loan states; reused between steps.
    candidates: Vec<Candidate>,
    /// Whether the cache holds computed keys and values rather than random ones.
    has_real_kv: bool,
    owner: Option<Arc<str>>,
    /// Rows of the images and audio in the context, kept while they may have to be recomputed.
    media: Vec<Arc<EmbeddingRows>>,
}

impl Session {
    pub(crate) fn new(model: Model, options: SessionOptions) -> Result<Self, Error> {
        model.check_generates()?;
        let room = options.n_ctx.map_or(ContextSize::UpTo(model.config().n_ctx_train), ContextSize::Exactly);
        if let ContextSize::Exactly(n_ctx) = room {
            check_size("n_ctx", n_ctx, 1..=MAX_TOKENS)?;
        }
        let plan = options.kv.plan(&model.config().kv_shape())?;
        let sequence = Sequence::start(Arc::clone(model.loaded()), plan, room)?;
        Self::of_sequence(model, sequence, Vec::new())
    }

    /// Creates a session whose cache holds `tokens`.
    pub(crate) fn of_sequence(model: Model, sequence: Sequence, tokens: Vec<u32>) -> Result<Self, Error> {
        let drafter = Self::drafter_of(&model)?;
        Ok(Self::from_parts(model, sequence, tokens, drafter, None))
    }

    fn from_parts(
        model: Model,
        sequence: Sequence,
        tokens: Vec<u32>,
        drafter: Option<Box<Self>>,
        owner: Option<Arc<str>>,
    ) -> Self {
        let root = model.prefix_root(&sequence, owner.as_deref());
        sequence.caches(|cache| cache.set_prefix_root(root));
        let (ahead, row, likeliest) = (Vec::new(), Vec::new(), Vec::new());
        let media = Vec::new();
        Self {
            model,
            sequence,
            tokens,
            draft_tokens: ahead,
            drafter,
            logits_loan: None,
            row,
            candidates: likeliest,
            has_real_kv: true,
            owner,
            media,
        }
    }

    /// Assigns an empty session to `owner`: it shares KV blocks with sessions of the same owner
    /// alone, so that response times do not reveal the prompts of other owners.
    #[must_use]
    pub fn with_cache_salt(self, owner: Option<Arc<str>>) -> Self {
        let drafter = self.drafter.map(|drafter| Box::new(drafter.with_cache_salt(owner.clone())));
        Self::from_parts(self.model, self.sequence, self.tokens, drafter, owner)
    }

    /// Replaces the scales of the model's [LoRA adapters](crate::OpenOptions::loras) in an empty
    /// session. Sessions with different scales can share a batch.
    ///
    /// # Errors
    /// A number of scales other than the number of adapters, or a scale that is not finite.
    pub fn with_lora_scales(self, strengths: &[f32]) -> Result<Self, Error> {
        let loras = self.model.loras();
        if strengths.len() != loras.len() || strengths.iter().any(|strength| !strength.is_finite()) {
            let expected = format!("a number for each of {} adapters", loras.len());
            return Err(Error::Setting { name: "lora_strengths", expected, got: format!("{strengths:?}") });
        }
        let is_as_loaded = loras.iter().map(|lora| &lora.strength).eq(strengths);
        let sequence = self.sequence.with_strengths((!is_as_loaded).then(|| strengths.into()));
        Ok(Self::from_parts(self.model, sequence, self.tokens, self.drafter, self.owner))
    }

    /// Returns the sequence, whose cache then holds exactly the fed tokens, or fewer of them after
    /// a device error.
    pub(crate) fn sequence(&self) -> &Sequence {
        // A failure shows in the sequence's length.
        let _ = self.recommit();
        &self.sequence
    }

    pub(crate) fn replace(&mut self, sequence: Sequence, tokens: Vec<u32>) {
        let drafter = self.drafter.take();
        *self = Self::from_parts(self.model.clone(), sequence, tokens, drafter, self.owner.clone());
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the tokens in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the context length in tokens.
    pub fn n_ctx(&self) -> usize {
        self.sequence.n_ctx()
    }

    /// Returns the present size and types of the cache.
    pub fn kv(&self) -> KvUse {
        let (plan, shape) = (self.sequence.plan(), self.model.config().kv_shape());
        let ((type_k, type_v), (bpv_k, bpv_v)) = (plan.type_names(), plan.bits_per_value(&shape));
        KvUse {
            tokens: self.tokens.len(),
            bytes: self.n_bytes(),
            bytes_f16: self.sequence.f16_bytes(&shape),
            bytes_draft: self.drafter.as_ref().map_or(0, |drafter| drafter.n_bytes()),
            type_k,
            type_v,
            bpv_k,
            bpv_v,
            notes: plan.notes.clone(),
        }
    }

    /// Returns the bytes allocated by the session's own cache.
    fn n_bytes(&self) -> usize {
        self.sequence.n_bytes()
    }

    /// Appends `tokens` to the context (prefill or decode). Then [`Session::logits`] follow the
    /// last one.
    ///
    /// `progress` receives the number of tokens processed so far and cancels by returning `false`.
    ///
    /// # Errors
    /// No token, a context too small for them (the session is then unchanged), a token out of
    /// range, [`Error::Cancelled`], or a device error. The session keeps its previous tokens plus
    /// completed steps; after a device error, perhaps fewer tokens.
    pub fn feed(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize) -> bool) -> Result<(), Error> {
        self.check_capacity(tokens)?;
        let mut left = &tokens[self.accept_draft_tokens(tokens)..];
        if !left.is_empty() {
            self.recommit()?;
        }
        while let Some(chunk) = Self::take_chunk(self.max_tokens(), &mut left) {
            let last = left.is_empty();
            self.step(chunk, if last { LogitsFor::Last } else { LogitsFor::None }, None)?;
            self.commit_step(chunk);
            self.sync_drafter(chunk.len());
            if !progress(tokens.len() - left.len()) && !last {
                return Err(Error::Cancelled);
            }
        }
        self.sequence.loaded().finish()
    }

    /// Samples the token that follows the last one fed.
    ///
    /// # Errors
    /// No logits, as after a rewind; an error of the sampler about its settings or the logits; a
    /// device error.
    pub fn sample(&mut self, sampler: &mut Sampler) -> Result<u32, Error> {
        let Some(k) = sampler.n_candidates(self.tokens.len()) else {
            self.logits()?;
            return sampler.sample(&self.row, &self.tokens).map_err(|error| self.sample_error(error));
        };
        self.select_candidates(k)?;
        sampler.sample_likeliest(&self.candidates, &self.tokens).map_err(|error| self.sample_error(error))
    }

    /// Works as [`Session::sample`] on logits `[n_vocab]` that `change` has edited; negative
    /// infinity excludes a token.
    ///
    /// # Errors
    /// As [`Session::sample`].
    pub fn sample_with(
        &mut self,
        sampler: &mut Sampler,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<u32, Error> {
        self.logits()?;
        change(&mut self.row);
        sampler.sample(&self.row, &self.tokens).map_err(|error| self.sample_error(error))
    }

    /// Converts an error of the sampler; adds the position to a logit that is NaN or infinite.
    fn sample_error(&self, error: SampleError) -> Error {
        match error {
            SampleError::NotANumber { id, got } => {
                Error::LogitNotFinite { position: self.tokens.len().saturating_sub(1), token: id, got }
            }
            error => error.into(),
        }
    }

    /// Feeds `tokens` and passes the logits after each token from index `from` on to `visit`, as
    /// `(index into tokens, logits [n_vocab])`, for quality measurements.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_scored(
        &mut self,
        tokens: &[u32],
        from: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        self.check_capacity(tokens)?;
        self.recommit()?;
        let mut left = tokens;
        // The logits of a step are held in memory.
        let max = self.max_tokens().min(DeviceInfo::MAX_STEP_ROWS);
        while let Some(chunk) = Self::take_chunk(max, &mut left) {
            let done = tokens.len() - left.len() - chunk.len();
            let first = from.saturating_sub(done).min(chunk.len());
            self.step(chunk, LogitsFor::From(first), None)?;
            self.commit_step(chunk);
            for row in first..chunk.len() {
                self.logits_loan = self.logits_loan.take().map(|loan| loan.at(row - first));
                visit(done + row, self.logits()?);
            }
        }
        Ok(())
    }

    /// Returns the maximum number of tokens of the next step.
    pub fn max_tokens(&self) -> usize {
        self.sequence.max_step_rows()
    }

    /// Reads the logits that follow the last token fed, `[n_vocab]`, from the device.
    ///
    /// # Errors
    /// [`Error::NoLogits`] after a rewind, a fork, a restored context or a finished generation,
    /// until the next token is fed; a failed read.
    pub fn logits(&mut self) -> Result<&[f32], Error> {
        let LogitsLoan { logits, row, .. } = self.logits_loan.as_ref().ok_or(Error::NoLogits)?;
        self.row.resize(self.model.n_vocab(), 0.0);
        logits.read(*row, &mut self.row)?;
        Ok(&self.row)
    }

    /// Releases the lent logits until the next token is fed, and memory reserved for further
    /// tokens.
    pub fn release_scratch(&mut self) {
        self.sequence.caches(|cache| cache.release_scratch());
        self.tokens.truncate(self.sequence.len());
        self.tokens.shrink_to_fit();
        (self.logits_loan, self.row) = (None, Vec::new());
        (self.draft_tokens, self.candidates) = (Vec::new(), Vec::new());
        if let Some(drafter) = &mut self.drafter {
            drafter.release_scratch();
        }
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.truncate(0);
        self.has_real_kv = true;
        self.media.clear();
    }

    /// Truncates the context to its first `n` tokens. Where following tokens would attend in 16
    /// bits to tokens that the cache holds in codes only, up to 511 of them are recomputed: the
    /// session is then bit-identical to one that was fed those tokens alone.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn rewind(&mut self, n: usize) -> Result<(), Error> {
        let n = n.min(self.tokens.len());
        let again = self.tokens[..n].to_vec();
        let left = self.truncate(n);
        self.queue(&again[left..], LogitsFor::None)
    }

    /// Truncates to the first `n` tokens, or to fewer where that would need recomputation. Returns
    /// the tokens left.
    fn truncate(&mut self, n: usize) -> usize {
        self.logits_loan = None;
        let left = self.sequence.truncate(n.min(self.sequence.len()));
        self.tokens.truncate(left);
        if let Some(drafter) = &mut self.drafter {
            drafter.truncate(n);
        }
        left
    }

    /// Fills an empty session with the longest prefix of `tokens`, without the last token, that
    /// other sessions of the model with the same options hold. It shares their memory, and equals a
    /// session that was fed that prefix. Returns its length.
    pub fn attach_prefix(&mut self, tokens: &[u32]) -> usize {
        if !self.tokens.is_empty() {
            return 0;
        }
        // Image rows that have been freed cannot be recomputed, so the prefix ends before them.
        let tokens = match self.sequence.loaded().properties().soft_tokens.of(tokens) {
            Ok(_) => tokens,
            Err(freed) => &tokens[..tokens.iter().take_while(|&&token| token != freed).count()],
        };
        let n = self.sequence.attach_prefix(tokens, self.n_ctx());
        self.tokens.extend_from_slice(&tokens[..n]);
        self.keep_media(&tokens[..n]);
        n
    }

    /// Creates a second session with the same tokens; all memory is copy-on-write.
    pub fn fork(&self) -> Self {
        Self {
            model: self.model.clone(),
            sequence: self.sequence().fork(),
            tokens: self.tokens.clone(),
            draft_tokens: Vec::new(),
            drafter: self.drafter.as_ref().map(|drafter| Box::new(drafter.fork())),
            logits_loan: None,
            row: Vec::new(),
            candidates: Vec::new(),
            has_real_kv: self.has_real_kv,
            owner: self.owner.clone(),
            media: self.media.clone(),
        }
    }

    /// Feeds `prompt` and returns an iterator over the tokens that follow. The common prefix of the
    /// context and `prompt` is reused and the rest is dropped, so that a whole conversation can be
    /// passed each time.
    ///
    /// # Errors
    /// As [`Session::feed`], and [`Error::PromptTooLong`].
    pub fn generate(&mut self, prompt: &[u32], options: GenerateOptions) -> Result<Generation<'_>, Error> {
        Generation::start(self, prompt, options, &CancelFlag::default(), &mut |_| ())
    }

    /// Works as [`Session::generate`] with a flag that cancels it, and a callback for the prefill
    /// progress.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn generate_with(
        &mut self,
        prompt: &[u32],
        options: GenerateOptions,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Generation<'_>, Error> {
        Generation::start(self, prompt, options, cancel, progress)
    }

    /// Works as [`Session::generate_with`] for a generation that borrows the session per token.
    ///
    /// # Errors
    /// As [`Session::generate`].
    pub fn begin(
        &mut self,
        prompt: &[u32],
        options: GenerateOptions,
        cancel: &CancelFlag,
        progress: &mut dyn FnMut(usize),
    ) -> Result<GenerationState, Error> {
        GenerationState::start(self, prompt, options, cancel, progress)
    }

    /// Reuses the longest prefix of `prompt` in this cache or in those of other sessions, and drops
    /// the rest. At least one token is left to feed, so that there are logits to sample from.
    /// Returns the number of reused tokens.
    pub fn reuse_prefix(&mut self, prompt: &[u32]) -> usize {
        let same = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = self.truncate(same.min(prompt.len().saturating_sub(1)));
        // Other sessions share whole blocks alone.
        if prompt.len() - kept <= TOKENS_PER_BLOCK {
            return kept;
        }
        let mut other = self.fork();
        other.clear();
        let attached = other.attach_prefix(prompt);
        if attached <= kept {
            return kept;
        }
        *self = other;
        attached
    }

    /// Sets the checkpoint, of which there is one: truncating to it, or to the tokens just before
    /// it, needs no recomputation. Contexts of fewer than 128 tokens have no checkpoint. It costs
    /// two tiles in f16, 32 tokens, once more tokens are fed.
    pub fn set_checkpoint(&mut self) {
        self.sequence.caches(|cache| cache.set_checkpoint());
    }

    fn check_capacity(&self, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let total = self.tokens.len() + tokens.len();
        if total > self.n_ctx() {
            return Err(Error::PromptTooLong { tokens: total, n_ctx: self.n_ctx() });
        }
        Ok(())
    }

    /// Takes the tokens of the next step from `left`, at most `max`; `None` when it is empty.
    fn take_chunk<'t>(max: usize, left: &mut &'t [u32]) -> Option<&'t [u32]> {
        if left.is_empty() {
            return None;
        }
        let (chunk, rest) = left.split_at(max.min(left.len()));
        *left = rest;
        Some(chunk)
    }

    /// Runs steps over `tokens` behind the cached ones, without waiting for the device. The last
    /// step has the logits `logits_for`, the others none.
    fn queue(&mut self, tokens: &[u32], logits_for: LogitsFor) -> Result<(), Error> {
        let mut left = tokens;
        while let Some(chunk) = Self::take_chunk(self.max_tokens(), &mut left) {
            self.step(chunk, if left.is_empty() { logits_for } else { LogitsFor::None }, None)?;
            self.commit_step(chunk);
        }
        Ok(())
    }

    /// Runs one step over `tokens` behind the cached ones; records none of them.
    fn step(&mut self, tokens: &[u32], want: LogitsFor, queries: OnQueries<'_>) -> Result<(), Error> {
        self.logits_loan = None;
        self.keep_media(tokens);
        let row = self.batch_entry(tokens, want);
        let logits = self.sequence.loaded().step(&[row], Entry::Tokens(tokens), None, queries);
        let logits = logits.map_err(|error| self.rollback_step(error))?;
        self.logits_loan = logits.map(|logits| LogitsLoan::new(logits, want.count(tokens.len()) - 1));
        Ok(())
    }

    /// Records the tokens of a completed step.
    fn commit_step(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        if self.has_real_kv {
            self.sequence.caches(|cache| cache.register_prefix(&self.tokens));
        }
    }

    /// Records a failed step.
    fn rollback_step(&mut self, error: Error) -> Error {
        self.tokens.truncate(self.sequence.len());
        error
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("tokens", &self.tokens.len()).field("kv", &self.kv()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::OpenOptions;

    fn session(model: &Model, kv: &str, n_tokens: u32) -> Session {
        let kv = KvOptions::symmetric(kv.parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(300), kv }).unwrap();
        let prompt: Vec<u32> = (0..n_tokens).map(|i| i * 37 % 500 + n_tokens).collect();
        session.feed(&prompt, &mut |_| true).unwrap();
        session
    }

    fn bits(session: &mut Session) -> Vec<u32> {
        session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
    }

    /// Sessions of different lengths and KV types produce the same bits in any batch.
    #[test]
    fn batched_sessions_give_the_same_bits_as_alone() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let cases = [("turbo3", 50), ("f16", 3), ("q8_0", 33), ("turbo2", 1), ("turbo3", 120)];
        for n in 1..=cases.len() {
            let mut together: Vec<_> = cases[..n].iter().map(|&(kv, len)| session(&model, kv, len)).collect();
            let mut alone: Vec<_> = cases[..n].iter().map(|&(kv, len)| session(&model, kv, len)).collect();
            for step in 0..3 {
                // Some prefill while others decode a token.
                let tokens: Vec<Vec<u32>> = (0..n as u32)
                    .map(|i| (0..1 + 17 * (i * step % 3)).map(|t| 7 * i + step + t).collect())
                    .collect();
                let mut feeds: Vec<_> = together
                    .iter_mut()
                    .zip(&tokens)
                    .map(|(session, tokens)| BatchItem::new(session, tokens))
                    .collect();
                Session::step_batch(&mut feeds).unwrap();
                for ((together, alone), tokens) in together.iter_mut().zip(&mut alone).zip(tokens) {
                    tokens.iter().for_each(|&token| alone.feed(&[token], &mut |_| true).unwrap());
                    assert_eq!(together.tokens(), alone.tokens());
                    assert_eq!(bits(together), bits(alone), "one of {n}, step {step}");
                }
            }
        }
    }

    #[test]
    fn sessions_that_cannot_be_batched_stay_unchanged() {
        let models = [(); 2].map(|()| Model::bundled(OpenOptions::default()).unwrap());
        let [mut a, mut b] = [0, 1].map(|i| session(&models[i], "f16", 5));
        let together = |feeds: [(&mut Session, &[u32]); 2]| {
            Session::step_batch(&mut feeds.map(|(session, tokens)| BatchItem::new(session, tokens)))
        };
        let error = together([(&mut a, &[1]), (&mut b, &[2])]).unwrap_err().to_string();
        assert_eq!(error, "sessions: expected sessions of one model, got one of another");
        let mut c = session(&models[0], "f16", 8);
        assert!(together([(&mut a, &[1]), (&mut c, &[])]).is_err());
        together([(&mut a, &[1]), (&mut c, &[u32::MAX])]).unwrap_err();
        assert_eq!((a.tokens().len(), c.tokens().len(), a.kv().tokens, c.kv().tokens), (5, 8, 5, 8));
    }

    #[test]
    fn an_observed_step_passes_the_queries_of_every_layer() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let (mut observed, mut plain) = (session(&model, "f16", 20), session(&model, "f16", 20));
        let text: Vec<u32> = (0..40).map(|i| i * 29 % 500).collect();
        let mut seen = Vec::new();
        let mut on_queries = |layer: usize, q: &[f32]| {
            assert!(q.iter().all(|q| q.is_finite()) && q.iter().any(|q| *q != 0.0));
            seen.push((layer, q.len()));
        };
        observed.feed_observed(&text, &mut on_queries).unwrap();
        let widths = model.config().layers.iter().map(|layer| text.len() * layer.n_q());
        assert_eq!(seen, widths.enumerate().collect::<Vec<_>>());
        plain.feed(&text, &mut |_| true).unwrap();
        for session in [&mut observed, &mut plain] {
            session.feed(&text[..3], &mut |_| true).unwrap();
        }
        assert_eq!(bits(&mut observed), bits(&mut plain));
        let max = observed.max_tokens();
        let error = observed.feed_observed(&vec![1; max + 1], &mut |_, _| ()).unwrap_err();
        assert!(matches!(error, Error::PromptTooLong { .. } | Error::Device(_)), "{error}");
    }

    #[test]
    fn a_rewound_session_has_no_logits_until_it_is_fed() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let mut session = session(&model, "turbo3", 60);
        assert!(session.logits().is_ok());
        session.rewind(30).unwrap();
        assert!(matches!(session.logits(), Err(Error::NoLogits)));
        assert!(matches!(session.fork().logits(), Err(Error::NoLogits)));
        session.feed(&[1], &mut |_| true).unwrap();
        assert_eq!(session.logits().unwrap().len(), model.n_vocab());
    }
}
