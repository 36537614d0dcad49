//! Reranking: relevance scores of documents for a query, with reranker models. The head of a model
//! that generates (Qwen3-Reranker) has two rows in place of the output matrix, one of which stands
//! for "yes". A cross-encoder (arXiv 1901.04085) reads query and document as a pair of texts, and
//! its head scores the first token.

use std::ops::Range;

use kvant_model::SCORE_HEAD as HEAD;
use kvant_text::tokenizer::Special;

use crate::embed::{HiddenStatePool, Pooling};
use crate::error::Error;
use crate::model::Model;
use crate::session::KvOptions;

/// GGUF's pooling type of rerankers.
const RANK: u32 = 4;
/// Metadata key of the prompt template.
const TEMPLATE: &str = "tokenizer.chat_template.rerank";
const PLACES: [&str; 2] = ["{query}", "{document}"];

/// The scorer of a reranker.
#[derive(Debug, Clone)]
pub struct Reranker {
    form: Form,
}

#[derive(Debug, Clone)]
enum Form {
    /// A prompt, and the answer to it.
    Answers(AnswerHead),
    /// A pair of texts for the head of a text encoder, with this mark behind each.
    Pairs {
        /// The mark.
        mark: u32,
    },
}

/// The scoring head and prompt template of a model that generates.
#[derive(Debug, Clone)]
struct AnswerHead {
    template: String,
    /// A row for each answer, the first for "yes", `[n_out, n_embd]`.
    head: Vec<f32>,
    n_embd: usize,
}

impl Model {
    /// Returns the scorer of the model.
    ///
    /// # Errors
    /// A model that is not a reranker, or one of an unsupported form.
    pub fn scorer(&self) -> Result<Reranker, Error> {
        let refused = |expected: String, got: String| Err(Error::Setting { name: "model", expected, got });
        let (gguf, pooling) = (self.gguf(), self.pooling_type()?.unwrap_or(0));
        if pooling != RANK {
            let expected = format!(
                "one that scores documents (pooling_type {RANK}, as Qwen3-Reranker and cross-encoders have)"
            );
            return refused(expected, format!("one of pooling_type {pooling}"));
        }
        if let Some(encoder) = self.encoder() {
            let mark = self.tokenizer()?.eos();
            return match mark.filter(|_| encoder.has_classifier()) {
                Some(mark) => Ok(Reranker { form: Form::Pairs { mark } }),
                None => refused("a head (cls.output) and a mark behind a text".to_owned(), "none".to_owned()),
            };
        }
        let (view, n_embd) = (gguf.tensor(HEAD)?, self.config().n_embd);
        if !matches!(view.info.shape[..], [width, n] if width == n_embd && n >= 2) {
            let expected = format!("{HEAD} with two rows of {n_embd} or more");
            return refused(expected, format!("shape {:?}", view.info.shape));
        }
        let mut head = vec![0.0; view.info.elements()];
        kvant_codec::decode(view.info.dtype, &view.bytes, &mut head)?;
        if head.iter().any(|weight| !weight.is_finite()) {
            return refused(format!("numbers in {HEAD}"), "NaN or an infinity".to_owned());
        }
        let template: &str = gguf.meta().get(TEMPLATE)?;
        if let Some(place) = PLACES.iter().find(|place| !template.contains(**place)) {
            return refused(format!("{place} in {TEMPLATE}"), "none".to_owned());
        }
        Ok(Reranker { form: Form::Answers(AnswerHead { template: template.to_owned(), head, n_embd }) })
    }

    /// Returns the probability that each document answers the query, from 0 to 1. `kv` sets the
    /// KV-cache types.
    ///
    /// # Errors
    /// As [`Model::scorer`] and [`Model::embed`].
    pub fn rerank(&self, query: &str, documents: &[&str], kv: &KvOptions) -> Result<Vec<f32>, Error> {
        let scorer = self.scorer()?;
        let prompts = documents.iter().map(|document| scorer.prompt(self, query, document));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let pooled = self.pooled(&prompts, &scorer.pool(self), kv)?;
        pooled.iter().map(|pooled| scorer.score(self, &pooled.vector()?)).collect()
    }
}

impl Reranker {
    /// Returns the empty pool of a prompt: of the hidden state that gives its score.
    pub fn pool(&self, model: &Model) -> HiddenStatePool {
        match self.form {
            Form::Answers(_) => HiddenStatePool::new(model, Pooling::Last),
            Form::Pairs { mark } => {
                let reads_mean = model.encoder().is_some_and(|encoder| encoder.config().head.reads_mean);
                let pooling = if reads_mean { Pooling::Mean } else { Pooling::Cls };
                HiddenStatePool::new(model, pooling).with_pairs(mark)
            }
        }
    }

    /// Returns the prompt tokens of a document. Special tokens come from the template alone; those
    /// spelled in a query or a document are plain text. A text encoder reads a pair of texts up to
    /// its longest, and does not read the rest of the longer one.
    ///
    /// # Errors
    /// No tokenizer, or a text that cannot be encoded.
    pub fn prompt(&self, model: &Model, query: &str, document: &str) -> Result<Vec<u32>, Error> {
        match (&self.form, model.encoder()) {
            (Form::Answers(head), _) => head.prompt(model, query, document),
            (Form::Pairs { .. }, Some(encoder)) => {
                encoder.tokens(model.tokenizer()?, &[query, document], Special::AsText)
            }
            (Form::Pairs { .. }, None) => Err(other_model()),
        }
    }

    /// Returns the score of a prompt by its [pooled](Self::pool) hidden state `[n_embd]`: the
    /// probability of "yes", from 0 to 1, or that of the logit of a text encoder.
    ///
    /// # Errors
    /// A device error; a text encoder whose score is not a number.
    pub fn score(&self, model: &Model, state: &[f32]) -> Result<f32, Error> {
        match (&self.form, model.encoder()) {
            (Form::Answers(head), _) => Ok(head.score(state)),
            (Form::Pairs { .. }, Some(encoder)) => {
                let logit = encoder.score(state)?;
                if logit.is_nan() {
                    return Err(Error::StateNotFinite { index: 0, got: logit });
                }
                Ok((1.0 / (1.0 + (-f64::from(logit)).exp())) as f32)
            }
            (Form::Pairs { .. }, None) => Err(other_model()),
        }
    }
}

fn other_model() -> Error {
    let (expected, got) = ("the text encoder of this reranker".to_owned(), "another model".to_owned());
    Error::Setting { name: "model", expected, got }
}

impl AnswerHead {
    fn prompt(&self, model: &Model, query: &str, document: &str) -> Result<Vec<u32>, Error> {
        let (mut text, mut own): (String, Vec<Range<usize>>) = Default::default();
        let mut rest = self.template.as_str();
        let next = |rest: &str| {
            let places = PLACES.iter().zip([query, document]);
            places.filter_map(|(place, with)| Some((rest.find(place)?, place.len(), with.to_owned()))).min()
        };
        while let Some((at, len, with)) = next(rest) {
            own.push(text.len()..text.len() + at);
            text.extend([&rest[..at], &with]);
            rest = &rest[at + len..];
        }
        own.push(text.len()..text.len() + rest.len());
        text += rest;
        Ok(model.tokenizer()?.encode(&text, Special::Within(&own), false)?)
    }

    /// Returns the probability of "yes", from 0 to 1, for the hidden state `[n_embd]` of the last
    /// token.
    fn score(&self, state: &[f32]) -> f32 {
        let rows = self.head.chunks_exact(self.n_embd);
        let dot =
            |row: &[f32]| row.iter().zip(state).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
        let logits: Vec<f64> = rows.map(dot).collect();
        // Softmax with the first logit as reference: cannot overflow to NaN.
        (1.0 / logits.iter().map(|logit| (logit - logits[0]).exp()).sum::<f64>()) as f32
    }
}

#[cfg(test)]
mod tests {
    use kvant_gguf::{Gguf, GgufError, GgufWriter, Value};

    use super::*;
    use crate::model::OpenOptions;
    use crate::session::SessionOptions;

    const FORM: &str =
        "<|im_start|>user\nDoes it answer {query}? {document}<|im_end|>\n<|im_start|>assistant\n";
    const QUERY: &str = "What is the capital of France?";

    /// The bundled model as a reranker with this template: its rows of these two tokens are the
    /// head.
    fn scorer(answers: [u32; 2], form: &str) -> Model {
        let file = Model::bundled_file().unwrap();
        let table = file.tensor("token_embd.weight").unwrap();
        let row_bytes = table.bytes.len() / table.info.shape[1];
        let row = |token: u32| &table.bytes[token as usize * row_bytes..][..row_bytes];
        let head = answers.map(row).concat();
        let mut writer = GgufWriter::with_meta(file.meta()).unwrap();
        writer.set("qwen3.pooling_type", Value::U32(RANK)).unwrap();
        writer.set(TEMPLATE, form).unwrap();
        for info in file.tensors() {
            writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
        }
        writer.add_tensor(HEAD, &[table.info.shape[0], 2], table.info.dtype).unwrap();
        let mut bytes = Vec::new();
        writer
            .write_to::<GgufError>(&mut bytes, |data| {
                file.tensors().iter().try_for_each(|info| data.bytes(&info.name, &file.data(info)))?;
                data.bytes(HEAD, &head)
            })
            .unwrap();
        Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), OpenOptions::default()).unwrap()
    }

    #[test]
    fn a_score_is_the_probability_of_yes_against_no() {
        let answers = [300, 40];
        let model = scorer(answers, FORM);
        let documents = ["Paris is the capital of France.", "Cats sleep.", "<|im_end|>"];
        let scores = model.rerank(QUERY, &documents, &KvOptions::default()).unwrap();
        for (document, score) in documents.iter().zip(scores) {
            let mut session = model.session(SessionOptions::default()).unwrap();
            let prompt = model.scorer().unwrap().prompt(&model, QUERY, document).unwrap();
            session.feed(&prompt, &mut |_| true).unwrap();
            let logits = session.logits().unwrap();
            let [yes, no] = answers.map(|token| logits[token as usize]);
            let expected = 1.0 / (1.0 + (no - yes).exp());
            // The output matrix multiplies hidden states quantized to 8 bits, which shifts a logit
            // of order 10 by hundredths.
            assert!((score - expected).abs() < 0.02, "{document}: {score}, {expected}");
            assert!(score > 0.0 && score < 1.0);
        }
    }

    #[test]
    fn documents_fill_the_template_as_plain_text() {
        let model = scorer([1, 2], FORM);
        let prompt = |query: &str, document: &str| {
            let tokens = model.scorer().unwrap().prompt(&model, query, document).unwrap();
            (model.tokenizer().unwrap().decode(&tokens), tokens)
        };
        // Inserted text is not searched for placeholders. Decoding omits the text of special
        // tokens.
        assert_eq!(prompt("a {document}", "b").0, "user\nDoes it answer a {document}? b\nassistant\n");
        let end = model.tokenizer().unwrap().eot().unwrap();
        let ends = |tokens: &[u32]| tokens.iter().filter(|&&token| token == end).count();
        assert_eq!(ends(&prompt("a", "b").1), 1);
        assert_eq!(ends(&prompt("<|im_end|>", "<|im_end|><|im_start|>").1), 1);
    }

    #[test]
    fn models_that_are_no_rerankers_are_refused() {
        let error = |model: &Model| model.scorer().unwrap_err().to_string();
        let plain = Model::bundled(OpenOptions::default()).unwrap();
        assert!(error(&plain).contains("one that scores documents (pooling_type 4"), "{}", error(&plain));
        let model = scorer([1, 2], "{query}");
        assert!(error(&model).contains("expected {document} in tokenizer"), "{}", error(&model));
    }

    #[test]
    fn scores_of_extreme_states_are_finite() {
        let scorer = AnswerHead { template: String::new(), head: vec![1.0, 0.0, 0.0, 1.0], n_embd: 2 };
        assert_eq!([[1e4, -1e4], [-1e4, 1e4], [3.0, 3.0]].map(|state| scorer.score(&state)), [1.0, 0.0, 0.5]);
    }
}
