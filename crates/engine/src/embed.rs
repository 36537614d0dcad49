//! Embeddings: pools the hidden states of a text into one vector, for search and comparison.

use std::fmt;
use std::str::FromStr;

use kvant_text::tokenizer::Special;

use crate::error::Error;
use crate::model::Model;
use crate::session::{BatchItem, KvOptions, Session, SessionOptions};

/// Texts per batch: short ones share the time of a step.
const TEXTS_AT_ONCE: usize = 32;

/// Pooling of the hidden states of a text's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all tokens.
    Mean,
    /// The last token, which alone attends to all others in a model that generates.
    Last,
    /// The first token: a mark that attends to all others, in text encoders alone.
    Cls,
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mean => "mean",
            Self::Last => "last",
            Self::Cls => "cls",
        })
    }
}

impl FromStr for Pooling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "mean" => Ok(Self::Mean),
            "last" => Ok(Self::Last),
            "cls" => Ok(Self::Cls),
            other => Err(unknown(other)),
        }
    }
}

fn unknown(got: &str) -> Error {
    Error::Setting {
        name: "pooling",
        expected: "mean, last, or cls in a text encoder".to_owned(),
        got: got.to_owned(),
    }
}

/// A running pool of hidden states `[n_embd]`: the output of the last layer, normalized as before
/// the output matrix.
#[derive(Debug, Clone)]
pub struct HiddenStatePool {
    pooling: Pooling,
    /// Tokens pooled so far.
    n: usize,
    /// The sum of their hidden states, or one of them, `[n_embd]`.
    sum: Vec<f64>,
    /// The mark between two texts, where each input is a pair of texts: see [`Reranker`].
    ///
    /// [`Reranker`]: crate::Reranker
    pub(crate) of_pairs: Option<u32>,
}

impl HiddenStatePool {
    /// Creates an empty pool for hidden states of `model`.
    pub fn new(model: &Model, pooling: Pooling) -> Self {
        Self { pooling, n: 0, sum: vec![0.0; model.config().n_embd], of_pairs: None }
    }

    /// Reads each input as a pair of texts, with this mark behind each.
    pub(crate) fn with_pairs(self, mark: u32) -> Self {
        Self { of_pairs: Some(mark), ..self }
    }

    /// Adds the hidden states `[n_embd]` of the tokens from position `at` on. Tokens that were
    /// recomputed count once.
    pub(crate) fn add_states<'s>(&mut self, at: usize, states: impl Iterator<Item = &'s [f32]>) {
        for state in states.skip(self.n.saturating_sub(at)) {
            for (sum, &value) in self.sum.iter_mut().zip(state) {
                match self.pooling {
                    Pooling::Mean => *sum += f64::from(value),
                    Pooling::Cls if self.n > 0 => {}
                    Pooling::Cls | Pooling::Last => *sum = f64::from(value),
                }
            }
            self.n += 1;
        }
    }

    /// Replaces the pooled vector by a function of it.
    ///
    /// # Errors
    /// Those of [`Self::vector`] and of `f`.
    pub(crate) fn map(&mut self, f: impl FnOnce(Vec<f32>) -> Result<Vec<f32>, Error>) -> Result<(), Error> {
        let vector = f(self.vector()?)?;
        self.sum = vector.into_iter().map(f64::from).collect();
        self.n = 1;
        Ok(())
    }

    /// Returns the pooled vector `[n_embd]`, not normalized; as wide as the last of the products
    /// behind pooling in text encoders that have some.
    ///
    /// # Errors
    /// A value that is NaN or infinite.
    pub fn vector(&self) -> Result<Vec<f32>, Error> {
        let n = if self.pooling == Pooling::Mean { self.n.max(1) } else { 1 };
        let state: Vec<f32> = self.sum.iter().map(|sum| (sum / n as f64) as f32).collect();
        match state.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(Error::StateNotFinite { index, got: state[index] }),
            None => Ok(state),
        }
    }

    /// Returns the pooled vector with L2 norm 1: its first `dimensions` values, for models trained
    /// for that (Matryoshka), or all.
    ///
    /// # Errors
    /// A value that is NaN or infinite; `dimensions` of 0 or above the hidden size.
    pub fn embedding(&self, dimensions: Option<usize>) -> Result<Vec<f32>, Error> {
        let mut state = self.vector()?;
        let n = dimensions.unwrap_or(state.len());
        if n == 0 || n > state.len() {
            let expected = format!("1 to {}", state.len());
            return Err(Error::Setting { name: "dimensions", expected, got: n.to_string() });
        }
        state.truncate(n);
        let length = state.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
        if length > 0.0 {
            state.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
        }
        Ok(state)
    }
}

/// Options of embeddings.
#[derive(Debug, Clone, Default)]
pub struct EmbedOptions {
    /// Pooling; the [file's](Model::pooling) when `None`.
    pub pooling: Option<Pooling>,
    /// Dimensions of each vector, counted from the first; all when `None`.
    pub dimensions: Option<usize>,
    /// KV-cache types during the prefill of a text.
    pub kv: KvOptions,
}

impl Model {
    /// Returns the pooling that the file declares, or else [`Pooling::Last`], in a text encoder
    /// [`Pooling::Mean`].
    ///
    /// # Errors
    /// A file that declares an unsupported pooling.
    pub fn pooling(&self) -> Result<Pooling, Error> {
        match self.pooling_type()? {
            None | Some(0) if self.is_encoder() => Ok(Pooling::Mean),
            None | Some(0 | 3) => Ok(Pooling::Last),
            Some(1) => Ok(Pooling::Mean),
            Some(2) if self.is_encoder() => Ok(Pooling::Cls),
            Some(2) => Err(unknown(CLS)),
            Some(4) => Err(unknown("rank: this model scores texts")),
            Some(other) => Err(unknown(&other.to_string())),
        }
    }

    /// Returns GGUF's id of the pooling type.
    pub(crate) fn pooling_type(&self) -> Result<Option<u32>, Error> {
        let meta = self.gguf().meta();
        let architecture: &str = meta.get("general.architecture")?;
        Ok(meta.find(&format!("{architecture}.pooling_type"))?)
    }

    /// Returns the tokens of a complete text, with the tokens that the vocabulary adds before and
    /// after it. Models with last-token pooling have their end-of-text token there. A text encoder
    /// does not read a text beyond its [longest](kvant_model::Config::n_ctx_train).
    ///
    /// # Errors
    /// When there is no tokenizer or the text cannot be encoded.
    pub fn embedding_tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        if let Some(encoder) = self.encoder() {
            return encoder.tokens(self.tokenizer()?, &[text], Special::Parse);
        }
        Ok(self.tokenizer()?.encode(text, Special::Parse, true)?)
    }

    /// Returns the embedding of each text, with L2 norm 1. Names of special tokens in the texts are
    /// parsed as those tokens.
    ///
    /// # Errors
    /// No tokenizer; an empty text, or one beyond the model's context, in models that generate;
    /// invalid options; a device error.
    pub fn embed(&self, texts: &[&str], options: &EmbedOptions) -> Result<Vec<Vec<f32>>, Error> {
        let pooling = options.pooling.map_or_else(|| self.pooling(), Ok)?;
        let tokens = texts.iter().map(|text| self.embedding_tokens(text));
        let empty = HiddenStatePool::new(self, pooling);
        let pooled = self.pooled(&tokens.collect::<Result<Vec<_>, _>>()?, &empty, &options.kv)?;
        pooled.iter().map(|pooled| pooled.embedding(options.dimensions)).collect()
    }

    /// Rejects a pooling that needs attention in both directions, unless the model has it.
    ///
    /// # Errors
    /// [`Pooling::Cls`] of a model that is no text encoder.
    pub fn check_pooling(&self, pooling: Pooling) -> Result<(), Error> {
        if pooling == Pooling::Cls && !self.is_encoder() { Err(unknown(CLS)) } else { Ok(()) }
    }

    /// Pools each text of a [text encoder](Self::is_encoder), in batches, from a copy of `empty`.
    ///
    /// # Errors
    /// A model that generates, whose texts are steps of a session; a text without tokens or beyond
    /// the model's positions; a device error.
    pub fn pool_encoded(
        &self,
        texts: &[Vec<u32>],
        empty: &HiddenStatePool,
    ) -> Result<Vec<HiddenStatePool>, Error> {
        let encoder = self.encoder().ok_or_else(|| Error::Setting {
            name: "model",
            expected: "a text encoder".to_owned(),
            got: self.config().family.name.to_owned(),
        })?;
        encoder.pooled(texts, empty)
    }

    /// Pools each text, in batches, from a copy of `empty`.
    pub(crate) fn pooled(
        &self,
        texts: &[Vec<u32>],
        empty: &HiddenStatePool,
        kv: &KvOptions,
    ) -> Result<Vec<HiddenStatePool>, Error> {
        if self.is_encoder() {
            return self.pool_encoded(texts, empty);
        }
        self.check_pooling(empty.pooling)?;
        let mut all = vec![empty.clone(); texts.len()];
        for (texts, pooled) in texts.chunks(TEXTS_AT_ONCE).zip(all.chunks_mut(TEXTS_AT_ONCE)) {
            let session = |_| self.session(SessionOptions { n_ctx: None, kv: kv.clone() });
            let mut sessions: Vec<Session> = texts.iter().map(session).collect::<Result<_, _>>()?;
            let feeds = sessions.iter_mut().zip(texts).zip(pooled);
            let feeds = feeds.map(|((session, tokens), pooled)| BatchItem {
                pooled: Some(pooled),
                ..BatchItem::new(session, tokens)
            });
            Session::step_batch(&mut feeds.collect::<Vec<_>>())?;
        }
        Ok(all)
    }
}

const CLS: &str = "cls, the first token: it attends to no other in this model";

#[cfg(test)]
mod tests {
    use kvant_gguf::{Gguf, GgufWriter};

    use super::*;
    use crate::fingerprint::tests::changed;
    use crate::model::OpenOptions;

    const TEXTS: [&str; 4] = [
        "A cat sleeps on the mat.",
        "x",
        "The capital of France is Paris, which lies on the Seine.",
        "A cat sleeps.",
    ];

    fn model() -> Model {
        Model::bundled(OpenOptions { n_threads: Some(2), ..Default::default() }).unwrap()
    }

    fn pooled_alone(model: &Model, text: &str, pooling: Pooling, pieces: usize) -> HiddenStatePool {
        let tokens = model.embedding_tokens(text).unwrap();
        let mut session = model.session(SessionOptions::default()).unwrap();
        let mut pooled = HiddenStatePool::new(model, pooling);
        for tokens in tokens.chunks(pieces) {
            let feed = BatchItem { pooled: Some(&mut pooled), ..BatchItem::new(&mut session, tokens) };
            Session::step_batch(&mut [feed]).unwrap();
        }
        pooled
    }

    #[test]
    fn embeddings_are_invariant_to_batch_and_chunking() {
        let model = model();
        let long = TEXTS.concat().repeat(40);
        let mut texts = TEXTS.to_vec();
        texts.push(&long);
        for pooling in [Pooling::Mean, Pooling::Last] {
            let options = EmbedOptions { pooling: Some(pooling), ..Default::default() };
            let together = model.embed(&texts, &options).unwrap();
            for (text, vector) in texts.iter().zip(&together) {
                for pieces in [7, 1000] {
                    let alone = pooled_alone(&model, text, pooling, pieces).embedding(None).unwrap();
                    assert_eq!(alone, *vector, "{pooling}, {pieces} tokens at once");
                }
                let length: f32 = vector.iter().map(|value| value * value).sum();
                assert!((length - 1.0).abs() < 1e-5, "{length}");
            }
        }
    }

    #[test]
    fn mean_pooling_counts_each_hidden_state_once() {
        let model = model();
        let tokens = model.embedding_tokens(TEXTS[2]).unwrap();
        let mut session = model.session(SessionOptions::default()).unwrap();
        let mut mean = HiddenStatePool::new(&model, Pooling::Mean);
        let mut states: Vec<Vec<f32>> = Vec::new();
        for token in &tokens {
            let mut last = HiddenStatePool::new(&model, Pooling::Last);
            let feed = BatchItem {
                pooled: Some(&mut last),
                ..BatchItem::new(&mut session, std::slice::from_ref(token))
            };
            Session::step_batch(&mut [feed]).unwrap();
            states.push(last.vector().unwrap());
        }
        // As after a preemption.
        for (at, n) in [(0, 3), (0, 5), (5, tokens.len() - 5)] {
            mean.add_states(at, states[at..at + n].iter().map(Vec::as_slice));
        }
        for (index, got) in mean.vector().unwrap().into_iter().enumerate() {
            let sum: f64 = states.iter().map(|state| f64::from(state[index])).sum();
            assert_eq!(got, (sum / tokens.len() as f64) as f32);
        }
    }

    #[test]
    fn fewer_dimensions_are_the_first_ones_with_length_1_again() {
        let model = model();
        let pooled = pooled_alone(&model, TEXTS[0], Pooling::Last, 100);
        let (all, few) = (pooled.embedding(None).unwrap(), pooled.embedding(Some(16)).unwrap());
        let length = all[..16].iter().map(|value| value * value).sum::<f32>().sqrt();
        assert_eq!(few.len(), 16);
        assert!(few.iter().zip(&all).all(|(few, all)| (few - all / length).abs() < 1e-6), "{few:?}");
        let error = |n| pooled.embedding(Some(n)).unwrap_err().to_string();
        let n_embd = all.len();
        assert_eq!(error(0), format!("dimensions: expected 1 to {n_embd}, got 0"));
        assert_eq!(error(n_embd + 1), format!("dimensions: expected 1 to {n_embd}, got {}", n_embd + 1));
    }

    #[test]
    fn a_non_finite_hidden_state_is_an_error() {
        let mut pooled = HiddenStatePool::new(&model(), Pooling::Mean);
        let mut state = vec![1.0; pooled.sum.len()];
        state[3] = f32::NAN;
        pooled.add_states(0, [&state[..]].into_iter());
        assert_eq!(
            pooled.vector().unwrap_err().to_string(),
            "the state of the text is broken: value 3 is NaN"
        );
    }

    #[test]
    fn the_file_selects_the_pooling() {
        let pooling = |value: Option<u32>| {
            let set = |writer: &mut GgufWriter| {
                value.into_iter().for_each(|value| writer.set("qwen3.pooling_type", value).unwrap());
            };
            let file = Gguf::from_bytes(changed(set, None)).unwrap();
            Model::from_gguf(file, OpenOptions::default())
                .unwrap()
                .pooling()
                .map_err(|error| error.to_string())
        };
        assert_eq!([None, Some(0), Some(3)].map(pooling), [(); 3].map(|()| Ok(Pooling::Last)));
        assert_eq!(pooling(Some(1)), Ok(Pooling::Mean));
        let refused = pooling(Some(4)).unwrap_err();
        assert_eq!(
            refused,
            "pooling: expected mean, last, or cls in a text encoder, got rank: this model scores texts"
        );
    }
}
