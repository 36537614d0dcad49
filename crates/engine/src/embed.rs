//! Texts as vectors, for search and comparison: what a model has made of a text when it has read it.

use std::fmt;
use std::str::FromStr;

use kvant_text::tokenizer::Special;

use crate::{Error, Feed, KvOptions, Model, Session, SessionOptions};

/// Texts that are read together: short ones share the time of a step.
const TEXTS_AT_ONCE: usize = 32;

/// How the states of a text's tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the last token, which alone has seen all others.
    Last,
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mean => "mean",
            Self::Last => "last",
        })
    }
}

impl FromStr for Pooling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "mean" => Ok(Self::Mean),
            "last" => Ok(Self::Last),
            other => Err(unknown(other)),
        }
    }
}

fn unknown(got: &str) -> Error {
    Error::Setting { name: "pooling", expected: "mean or last".to_owned(), got: got.to_owned() }
}

/// The states of a text's tokens, as far as they are there, on their way to one vector. A state is what leaves the last layer, normalised
/// as it is before the logits.
#[derive(Debug, Clone)]
pub struct Pooled {
    pooling: Pooling,
    /// Tokens whose states are there.
    n: usize,
    /// The sum of their states, or the last of them, `[n_embd]`.
    sum: Vec<f64>,
}

impl Pooled {
    /// Nothing yet, for states of `model`.
    pub fn new(model: &Model, pooling: Pooling) -> Self {
        Self { pooling, n: 0, sum: vec![0.0; model.config().n_embd] }
    }

    /// Takes up the states `[n_embd]` of the tokens from position `at` on. Those of tokens that are read again count once.
    pub(crate) fn take<'s>(&mut self, at: usize, states: impl Iterator<Item = &'s [f32]>) {
        for state in states.skip(self.n.saturating_sub(at)) {
            for (sum, &value) in self.sum.iter_mut().zip(state) {
                *sum = f64::from(value) + if self.pooling == Pooling::Mean { *sum } else { 0.0 };
            }
            self.n += 1;
        }
    }

    /// The vector `[n_embd]`, as long as it comes.
    ///
    /// # Errors
    /// A state that is no number.
    pub fn state(&self) -> Result<Vec<f32>, Error> {
        let n = if self.pooling == Pooling::Mean { self.n.max(1) } else { 1 };
        let state: Vec<f32> = self.sum.iter().map(|sum| (sum / n as f64) as f32).collect();
        match state.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(Error::StateNotFinite { index, got: state[index] }),
            None => Ok(state),
        }
    }

    /// The vector with length 1: its first `dimensions` values, of models that are made for that (Matryoshka), or all.
    ///
    /// # Errors
    /// A state that is no number; more dimensions than there are, or none.
    pub fn embedding(&self, dimensions: Option<usize>) -> Result<Vec<f32>, Error> {
        let mut state = self.state()?;
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

/// How texts become vectors.
#[derive(Debug, Clone, Default)]
pub struct EmbedOptions {
    /// How states become one vector; as the [file](Model::pooling) says when `None`.
    pub pooling: Option<Pooling>,
    /// So many values of each, from the first; all when `None`.
    pub dimensions: Option<usize>,
    /// What the cache stores of a text while it is read.
    pub kv: KvOptions,
}

impl Model {
    /// How its makers would have the states of a text become one vector: as the file says, or else the last.
    ///
    /// # Errors
    /// A file that asks for what this engine cannot do.
    pub fn pooling(&self) -> Result<Pooling, Error> {
        match self.pooling_type()? {
            None | Some(0 | 3) => Ok(Pooling::Last),
            Some(1) => Ok(Pooling::Mean),
            Some(2) => Err(unknown("cls, the first token: it has seen no other in this model")),
            Some(4) => Err(unknown("rank: this model scores texts")),
            Some(other) => Err(unknown(&other.to_string())),
        }
    }

    /// GGUF's number for what states of a text become.
    pub(crate) fn pooling_type(&self) -> Result<Option<u32>, Error> {
        let meta = self.gguf().meta();
        let architecture: &str = meta.get("general.architecture")?;
        Ok(meta.find(&format!("{architecture}.pooling_type"))?)
    }

    /// The tokens of a text that is not continued: with the tokens that the vocabulary puts before and behind a text. Models that make
    /// embeddings of the last state have it behind the end-of-text token.
    ///
    /// # Errors
    /// When there is no tokenizer or the text cannot be encoded.
    pub fn embedding_tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.tokenizer()?.encode(text, Special::Parse, true)?)
    }

    /// The vector of each text, of length 1. What a special token is called means that token in them.
    ///
    /// # Errors
    /// No tokenizer; an empty text, or one that is longer than the model's context; options that make no sense; a device error.
    pub fn embed(&self, texts: &[&str], options: &EmbedOptions) -> Result<Vec<Vec<f32>>, Error> {
        let pooling = options.pooling.map_or_else(|| self.pooling(), Ok)?;
        let tokens = texts.iter().map(|text| self.embedding_tokens(text));
        let pooled = self.pooled(&tokens.collect::<Result<Vec<_>, _>>()?, pooling, &options.kv)?;
        pooled.iter().map(|pooled| pooled.embedding(options.dimensions)).collect()
    }

    /// The states of each text, some read together.
    pub(crate) fn pooled(
        &self,
        texts: &[Vec<u32>],
        pooling: Pooling,
        kv: &KvOptions,
    ) -> Result<Vec<Pooled>, Error> {
        let mut all = vec![Pooled::new(self, pooling); texts.len()];
        for (texts, pooled) in texts.chunks(TEXTS_AT_ONCE).zip(all.chunks_mut(TEXTS_AT_ONCE)) {
            let session = |_| self.session(SessionOptions { n_ctx: None, kv: kv.clone() });
            let mut sessions: Vec<Session> = texts.iter().map(session).collect::<Result<_, _>>()?;
            let feeds = sessions.iter_mut().zip(texts).zip(pooled);
            let feeds = feeds.map(|((session, tokens), pooled)| Feed {
                pooled: Some(pooled),
                ..Feed::new(session, tokens)
            });
            Session::feed_together(&mut feeds.collect::<Vec<_>>())?;
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use kvant_gguf::{Gguf, GgufWriter};

    use super::*;
    use crate::OpenOptions;
    use crate::fingerprint::tests::changed;

    const TEXTS: [&str; 4] = [
        "A cat sleeps on the mat.",
        "x",
        "The capital of France is Paris, which lies on the Seine.",
        "A cat sleeps.",
    ];

    fn model() -> Model {
        Model::bundled(OpenOptions { n_threads: Some(2), ..Default::default() }).unwrap()
    }

    fn pooled_alone(model: &Model, text: &str, pooling: Pooling, pieces: usize) -> Pooled {
        let tokens = model.embedding_tokens(text).unwrap();
        let mut session = model.session(SessionOptions::default()).unwrap();
        let mut pooled = Pooled::new(model, pooling);
        for tokens in tokens.chunks(pieces) {
            let feed = Feed { pooled: Some(&mut pooled), ..Feed::new(&mut session, tokens) };
            Session::feed_together(&mut [feed]).unwrap();
        }
        pooled
    }

    #[test]
    fn a_text_has_the_same_vector_in_any_company_and_in_any_pieces() {
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
    fn the_mean_is_that_of_the_states_of_all_tokens_and_each_counts_once() {
        let model = model();
        let tokens = model.embedding_tokens(TEXTS[2]).unwrap();
        let mut session = model.session(SessionOptions::default()).unwrap();
        let mut mean = Pooled::new(&model, Pooling::Mean);
        let mut states: Vec<Vec<f32>> = Vec::new();
        for token in &tokens {
            let mut last = Pooled::new(&model, Pooling::Last);
            let feed =
                Feed { pooled: Some(&mut last), ..Feed::new(&mut session, std::slice::from_ref(token)) };
            Session::feed_together(&mut [feed]).unwrap();
            states.push(last.state().unwrap());
        }
        // As after a sequence had to give its memory away.
        for (at, n) in [(0, 3), (0, 5), (5, tokens.len() - 5)] {
            mean.take(at, states[at..at + n].iter().map(Vec::as_slice));
        }
        for (index, got) in mean.state().unwrap().into_iter().enumerate() {
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
    fn a_state_that_is_no_number_is_told() {
        let mut pooled = Pooled::new(&model(), Pooling::Mean);
        let mut state = vec![1.0; pooled.sum.len()];
        state[3] = f32::NAN;
        pooled.take(0, [&state[..]].into_iter());
        assert_eq!(
            pooled.state().unwrap_err().to_string(),
            "the state of the text is broken: value 3 is NaN"
        );
    }

    #[test]
    fn the_file_says_how_states_become_one_vector() {
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
        assert_eq!(refused, "pooling: expected mean or last, got rank: this model scores texts");
    }
}
