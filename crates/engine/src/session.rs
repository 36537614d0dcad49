//! A conversation with a model: one KV cache and the tokens in it.

use kvant_backend::Candidate;
use kvant_codec::random::Random;
use kvant_codec::{DType, Side};
use kvant_kv::{Plan, Policies};
use kvant_model::{Entry, Want};
use kvant_text::sampler::Sampler;

use crate::generate::{CancelFlag, GenerateOptions, Generation};
use crate::runtime::{MAX_ROWS, Room, Sequence};
use crate::{Error, Model};

/// What the KV cache stores.
#[derive(Debug, Clone, PartialEq)]
pub struct KvOptions {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// Rules that change the types of some heads or keep some tokens in f16.
    pub policies: Policies,
    /// Whether the youngest tokens, those that do not fill a tile yet, wait in f16. On except for measurements.
    pub tail: bool,
}

impl KvOptions {
    /// The same type for keys and values, with the default policies.
    pub fn symmetric(dtype: DType) -> Self {
        Self { k: dtype, v: dtype, ..Default::default() }
    }
}

impl Default for KvOptions {
    fn default() -> Self {
        Self { k: DType::F16, v: DType::F16, policies: Policies::default(), tail: true }
    }
}

/// How to make a session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionOptions {
    /// Tokens the context holds; the model's training length when `None`.
    pub n_ctx: Option<usize>,
    /// What the cache stores.
    pub kv: KvOptions,
}

/// What a cache takes, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct KvUse {
    /// Tokens stored.
    pub tokens: usize,
    /// Bytes allocated: pages, f16 parts and padding.
    pub bytes: usize,
    /// Bytes an f16 cache would have allocated for the same tokens.
    pub bytes_f16: usize,
    /// Name of the keys' type (`mixed` when heads differ).
    pub type_k: &'static str,
    /// Name of the values' type (`mixed` when heads differ).
    pub type_v: &'static str,
    /// Bits per key value, scales included.
    pub bpv_k: f64,
    /// Bits per value value, scales included.
    pub bpv_v: f64,
    /// What policies changed, one line each.
    pub notes: Vec<String>,
}

/// One sequence of tokens and its KV cache.
pub struct Session {
    model: Model,
    sequence: Box<dyn Sequence>,
    tokens: Vec<u32>,
    /// Which row of the last step the next token is drawn from.
    last_row: usize,
    /// A row of logits on the host, `[n_vocab]`.
    logits: Vec<f32>,
    /// The likeliest tokens, while one of them is drawn.
    likeliest: Vec<Candidate>,
}

impl Session {
    pub(crate) fn new(model: Model, options: SessionOptions) -> Result<Self, Error> {
        let room = options.n_ctx.map_or(Room::UpTo(model.config().n_ctx_train), Room::Exactly);
        if let Room::Exactly(0) = room {
            let expected = "at least 1 token of context".to_owned();
            return Err(Error::Setting { name: "n_ctx", expected, got: "0".to_owned() });
        }
        let shape = model.config().kv_shape();
        let kv = options.kv;
        let plan = Plan { tail: kv.tail, ..Plan::new(&shape, kv.k, kv.v, &kv.policies)? };
        let sequence = model.loaded().start(plan, room)?;
        let tokens = Vec::with_capacity(sequence.n_ctx());
        Ok(Self::from_parts(model, sequence, tokens))
    }

    pub(crate) fn from_parts(model: Model, sequence: Box<dyn Sequence>, tokens: Vec<u32>) -> Self {
        let logits = vec![0.0; model.n_vocab()];
        Self { sequence, tokens, last_row: 0, logits, likeliest: Vec::new(), model }
    }

    pub(crate) fn sequence(&self) -> &dyn Sequence {
        &*self.sequence
    }

    pub(crate) fn replace(&mut self, sequence: Box<dyn Sequence>, tokens: Vec<u32>) {
        (self.sequence, self.tokens) = (sequence, tokens);
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The tokens in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that fit.
    pub fn n_ctx(&self) -> usize {
        self.sequence.n_ctx()
    }

    /// What the cache takes right now.
    pub fn kv(&self) -> KvUse {
        let plan = self.sequence.plan();
        let ((type_k, type_v), (bpv_k, bpv_v)) = (plan.type_names(), plan.bits_per_value());
        KvUse {
            tokens: self.sequence.len(),
            bytes: self.sequence.n_bytes(),
            bytes_f16: self.sequence.f16_bytes(),
            type_k,
            type_v,
            bpv_k,
            bpv_v,
            notes: plan.notes.clone(),
        }
    }

    /// Reads `tokens` after what is there. Then [`Session::logits`] are those that follow the last one.
    ///
    /// `progress` is told the tokens read so far and can stop the reading by returning `false`.
    ///
    /// # Errors
    /// No token, a context too small for them (nothing is read then), a token out of range,
    /// [`Error::Cancelled`], or a device error. The session holds what it held before, or what was read whole.
    pub fn feed(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize) -> bool) -> Result<(), Error> {
        self.queue(tokens, progress)?;
        self.sequence.finish()
    }

    /// Reads one token for each of several sessions of one model, in one pass over its weights: together they take little
    /// longer than one of them, as long as the weights are what takes the time. Afterwards each stands as if it had been
    /// fed alone.
    ///
    /// # Errors
    /// As [`Session::feed`]; sessions of several models, or another number of tokens. A session that was not fed holds
    /// what it held.
    pub fn feed_together(sessions: &mut [&mut Self], tokens: &[u32]) -> Result<(), Error> {
        if tokens.len() != sessions.len() {
            let expected = format!("a token for each of {} sessions", sessions.len());
            return Err(Error::Setting { name: "tokens", expected, got: tokens.len().to_string() });
        }
        for (session, token) in sessions.iter().zip(tokens) {
            session.check_room(std::slice::from_ref(token))?;
        }
        // The activations of the first session of each share hold the rows of all.
        let most = sessions.iter().map(|session| session.n_ctx()).min().unwrap_or(1).min(MAX_ROWS);
        for (sessions, tokens) in sessions.chunks_mut(most).zip(tokens.chunks(most)) {
            let mut sequences =
                sessions.iter_mut().map(|session| &mut *session.sequence as &mut dyn Sequence);
            let Some(first) = sequences.next() else { return Ok(()) };
            let mut others: Vec<_> = sequences.collect();
            first.step_together(&mut others, Entry::Tokens(tokens), Want::From(0))?;
            first.finish()?;
            for (session, &token) in sessions.iter_mut().zip(tokens) {
                session.tokens.push(token);
                session.last_row = 0;
            }
        }
        Ok(())
    }

    /// [`Session::feed`] that need not be done when this returns.
    pub(crate) fn queue(
        &mut self,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<(), Error> {
        self.check_room(tokens)?;
        self.last_row = 0;
        for (done, chunk) in self.chunks(tokens) {
            let last = done + chunk.len() == tokens.len();
            self.step(chunk, if last { Want::Last } else { Want::Nothing })?;
            if !progress(done + chunk.len()) && !last {
                return Err(Error::Cancelled);
            }
        }
        Ok(())
    }

    /// Draws the token that follows the last one that was fed.
    ///
    /// # Errors
    /// What the sampler finds wrong with its settings or with the logits, or a device error.
    pub fn draw(&mut self, sampler: &mut Sampler) -> Result<u32, Error> {
        let Some(k) = sampler.n_candidates(self.tokens.len()) else {
            self.sequence.logits(self.last_row, &mut self.logits)?;
            return Ok(sampler.sample(&self.logits, &self.tokens)?);
        };
        self.sequence.top_k(self.last_row, k, &mut self.likeliest)?;
        Ok(sampler.sample_likeliest(&self.likeliest, &self.tokens)?)
    }

    /// Reads `tokens` and hands the logits after each token from index `from` on to `visit`, as
    /// `(index into tokens, logits [n_vocab])`: what quality measurements need.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_scored(
        &mut self,
        tokens: &[u32],
        from: usize,
        visit: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        self.check_room(tokens)?;
        for (done, chunk) in self.chunks(tokens) {
            let first = from.saturating_sub(done).min(chunk.len());
            self.step(chunk, Want::From(first))?;
            for row in first..chunk.len() {
                self.last_row = row - first;
                self.sequence.logits(self.last_row, &mut self.logits)?;
                visit(done + row, &self.logits);
            }
        }
        Ok(())
    }

    /// Appends `n` tokens with random keys and values: a context of any depth in little time, to measure speed at it.
    /// What the model then says means nothing.
    ///
    /// # Errors
    /// A context too small for them, or a device error.
    pub fn fill_random(&mut self, n: usize, seed: u64) -> Result<(), Error> {
        let mut random = Random::new(seed);
        let size = MAX_ROWS.min(self.n_ctx());
        for done in (0..n).step_by(size) {
            let rows = size.min(n - done);
            self.sequence.append_random(rows, &mut random)?;
            self.tokens.resize(self.tokens.len() + rows, 0);
        }
        Ok(())
    }

    /// The logits that follow the last token that was fed, `[n_vocab]`, read from the device. After a rewind, a fork or a
    /// restored context they are those of no token until the next one is fed.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn logits(&mut self) -> Result<&[f32], Error> {
        self.sequence.logits(self.last_row, &mut self.logits)?;
        Ok(&self.logits)
    }

    /// The cached keys or values of one KV head as numbers, `[tokens, head_dim]`: what the codes stand for.
    /// For measurements.
    ///
    /// # Errors
    /// When the device cannot be read.
    ///
    /// # Panics
    /// When the model has no such layer or head.
    pub fn kv_rows(&self, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        self.sequence.rows(layer, head, side)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.sequence.clear();
        self.tokens.clear();
    }

    /// Forgets everything but the first `n` tokens.
    ///
    /// # Errors
    /// When the device cannot be read or written.
    pub fn rewind(&mut self, n: usize) -> Result<(), Error> {
        let n = n.min(self.tokens.len());
        self.sequence.truncate(n)?;
        self.tokens.truncate(n);
        Ok(())
    }

    /// A second session that starts with the same tokens; the full pages are shared until one side writes.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn fork(&self) -> Result<Self, Error> {
        let mut tokens = Vec::with_capacity(self.n_ctx());
        tokens.extend_from_slice(&self.tokens);
        Ok(Self::from_parts(self.model.clone(), self.sequence.fork()?, tokens))
    }

    /// Reads `prompt` and returns an iterator over the tokens that follow. Tokens the session shares with the
    /// beginning of `prompt` are kept; others are forgotten, so that a whole conversation can be passed each time.
    ///
    /// # Errors
    /// As [`Session::feed`], and [`Error::PromptTooLong`].
    pub fn generate(&mut self, prompt: &[u32], options: GenerateOptions) -> Result<Generation<'_>, Error> {
        Generation::start(self, prompt, options, &CancelFlag::default(), &mut |_| ())
    }

    /// [`Session::generate`] with a flag that stops it, and a listener for the share of the prompt read.
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

    /// Tokens at the start of `prompt` that the cache holds already. At least one token is left to read, so that
    /// there are logits to go on from.
    pub(crate) fn shared_prefix(&self, prompt: &[u32]) -> usize {
        let same = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        same.min(prompt.len().saturating_sub(1))
    }

    fn check_room(&self, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let total = self.tokens.len() + tokens.len();
        if total > self.n_ctx() {
            return Err(Error::PromptTooLong { tokens: total, n_ctx: self.n_ctx() });
        }
        Ok(())
    }

    /// The chunks a prompt is read in, each with the number of tokens before it.
    fn chunks<'t>(&self, tokens: &'t [u32]) -> impl Iterator<Item = (usize, &'t [u32])> + use<'t> {
        let size = MAX_ROWS.min(self.n_ctx());
        tokens.chunks(size).enumerate().map(move |(i, chunk)| (i * size, chunk))
    }

    fn step(&mut self, tokens: &[u32], want: Want) -> Result<(), Error> {
        self.sequence.step(Entry::Tokens(tokens), want)?;
        self.tokens.extend_from_slice(tokens);
        Ok(())
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
    use crate::OpenOptions;

    fn session(model: &Model, kv: &str, n_tokens: u32) -> Session {
        let kv = KvOptions::symmetric(kv.parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(200), kv }).unwrap();
        let prompt: Vec<u32> = (0..n_tokens).map(|i| i * 37 % 500 + n_tokens).collect();
        session.feed(&prompt, &mut |_| true).unwrap();
        session
    }

    fn bits(session: &mut Session) -> Vec<u32> {
        session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
    }

    /// Of other lengths and cache types: whatever is next to them, sessions say the same to the bit.
    #[test]
    fn sessions_fed_together_say_what_each_says_alone() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let lots = [("turbo3", 50), ("f16", 3), ("q8_0", 33), ("turbo2", 1), ("turbo3", 120)];
        for n in 1..=lots.len() {
            let mut together: Vec<_> = lots[..n].iter().map(|&(kv, len)| session(&model, kv, len)).collect();
            let mut alone: Vec<_> = lots[..n].iter().map(|&(kv, len)| session(&model, kv, len)).collect();
            for step in 0..3 {
                let tokens: Vec<u32> = (0..n as u32).map(|i| 7 * i + step).collect();
                Session::feed_together(&mut together.iter_mut().collect::<Vec<_>>(), &tokens).unwrap();
                for ((together, alone), token) in together.iter_mut().zip(&mut alone).zip(tokens) {
                    alone.feed(&[token], &mut |_| true).unwrap();
                    assert_eq!(together.tokens(), alone.tokens());
                    assert_eq!(bits(together), bits(alone), "one of {n}, step {step}");
                }
            }
        }
    }

    #[test]
    fn sessions_that_cannot_be_fed_together_stay_as_they_are() {
        let models = [(); 2].map(|()| Model::bundled(OpenOptions::default()).unwrap());
        let [mut a, mut b] = [0, 1].map(|i| session(&models[i], "f16", 5));
        let error = Session::feed_together(&mut [&mut a, &mut b], &[1, 2]).unwrap_err().to_string();
        assert_eq!(error, "sessions: expected sessions of one model, got one of another");
        let error = Session::feed_together(&mut [&mut a], &[1, 2]).unwrap_err().to_string();
        assert_eq!(error, "tokens: expected a token for each of 1 sessions, got 2");
        let mut c = session(&models[0], "f16", 8);
        Session::feed_together(&mut [&mut a, &mut c], &[1, u32::MAX]).unwrap_err();
        assert_eq!((a.tokens().len(), c.tokens().len(), a.kv().tokens, c.kv().tokens), (5, 8, 5, 8));
    }
}
