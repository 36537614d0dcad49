//! Needle in a haystack: a sentence hidden at some depth of a long text, and a question about it at
//! the end.
//!
//! The answer is scored under teacher forcing: the model reads the prompt and the correct answer,
//! and each token of the answer counts if it is the most probable one. All tokens correct is
//! equivalent to an exact greedy answer, and the share of correct tokens distinguishes near misses
//! from failures.

use std::path::Path;

use kvant::limits::check_size;
use kvant::{KvOptions, Message, Model, RenderOptions, Session, Special};
use kvant_codec::random::Random;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::chunk_eval;
use crate::config::KvConfig;
use crate::error::EvalError;
use crate::haystack::Haystack;
use crate::needle_form::{NeedleForm, fill};
use crate::progress::{OnProgress, Progress};
use crate::run_state::RunState;
use crate::score::{LogProbs, Row};

/// Options of the measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct NiahOptions {
    /// Lengths of prompt and answer together, in tokens.
    pub lengths: Vec<usize>,
    /// Number of depths, from the beginning of the haystack to its end.
    pub depths: usize,
    /// Needles per haystack; each has its own question.
    pub needles: usize,
    /// Their wording.
    pub form: NeedleForm,
    /// Applies the model's chat template to haystack and question, with the cue at the start of the
    /// answer.
    pub chat: bool,
    /// Cache configurations.
    pub configs: Vec<KvOptions>,
}

/// One cell of the grid, for one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NiahCell {
    /// Tokens of prompt and answer.
    pub n_ctx: usize,
    /// Depth of the (first) needle: 0 at the beginning, 1 at the end.
    pub depth: f64,
    /// Type of K.
    pub type_k: String,
    /// Type of V.
    pub type_v: String,
    /// Share of the needles with an exact answer.
    pub exact: f64,
    /// Share of correct tokens in the answers.
    pub token_accuracy: f64,
}

/// Runs the grid over every configuration. With a `state` file, an interrupted run resumes.
///
/// # Errors
///
/// A haystack that is shorter than the longest length or does not fill it, lengths without room for
/// a haystack, more needles than the form has names or words, a state file of another run, logits
/// that are not finite, an engine error.
pub fn niah(
    model: &Model,
    haystack: &str,
    options: &NiahOptions,
    state: Option<&Path>,
    progress: OnProgress<'_>,
) -> Result<Vec<NiahCell>, EvalError> {
    check(options)?;
    let haystack = Haystack::new(model, haystack)?;
    let configs = options.configs.iter().map(|kv| KvConfig::new(model, kv, 1));
    let configs = configs.collect::<Result<Vec<_>, _>>()?;
    let what = || {
        json!({
            "measure": "niah", "version": 2, "model": model.compute_fingerprint(), "haystack": haystack.fingerprint,
            "lengths": options.lengths, "depths": options.depths, "needles": options.needles,
            "form": options.form, "chat": options.chat,
            "kv": configs.iter().map(KvConfig::identity).collect::<Vec<_>>(),
        })
    };
    let (mut state, mut cells) = RunState::<NiahCell>::open(state, what)?;
    let resumed = cells.len();
    let total = configs.len() * options.lengths.len() * options.depths;
    progress(&Progress { done: resumed.min(total), total, resumed, note: String::new() });
    let mut index = 0;
    for (kv, config) in options.configs.iter().zip(&configs) {
        for &n_ctx in &options.lengths {
            let mut session = chunk_eval::session(model, kv, n_ctx)?;
            let haystack = haystack.cut(model, n_ctx / MAX_PART)?;
            for step in 0..options.depths {
                index += 1;
                if index <= resumed {
                    continue;
                }
                let depth = if options.depths == 1 { 0.5 } else { step as f64 / (options.depths - 1) as f64 };
                let prompt = haystack.build_prompt(model, options, n_ctx, depth)?;
                let (exact, token_accuracy) = run_questions(&mut session, &prompt, index - 1)?;
                let (type_k, type_v) = (config.type_k.clone(), config.type_v.clone());
                let cell = NiahCell { n_ctx, depth, type_k, type_v, exact, token_accuracy };
                let note = format!("{}, {n_ctx} tokens, depth {:.0} %", config.name(), 100.0 * depth);
                state.push(&cell)?;
                cells.push(cell);
                progress(&Progress { done: index, total, resumed, note });
            }
        }
    }
    Ok(cells)
}

/// Inverse of the maximum share of a piece in the prompt, which bounds the unused room.
const MAX_PART: usize = 4;
/// Inverse of the minimum share of the nominal length that a prompt must fill.
const MIN_PART: usize = 2;
/// Maximum number of depths: more than needle positions in any prompt.
const MAX_DEPTHS: usize = 100_000;

fn check(options: &NiahOptions) -> Result<(), EvalError> {
    let form = &options.form;
    let max = form.names.len().min(form.words.len());
    let bad =
        |name, expected: String, got: usize| Err(EvalError::Setting { name, expected, got: got.to_string() });
    if !(1..=max).contains(&options.needles) {
        return bad(
            "needles",
            format!("1 to {max}, the number of names in the form {}", form.name),
            options.needles,
        );
    }
    check_size("depths", options.depths, 1..=MAX_DEPTHS).map_err(kvant::Error::from)?;
    Ok(())
}

/// The questions of one prompt: all tokens of prompt and answer, and the start of the answer.
type Questions = Vec<(Vec<u32>, usize)>;

/// Runs each question of a prompt. Returns the shares of exact answers and of correct tokens.
fn run_questions(session: &mut Session, questions: &Questions, cell: usize) -> Result<(f64, f64), EvalError> {
    let (mut exact, mut right, mut all) = (0, 0, 0);
    for (tokens, answer) in questions {
        let n_cached =
            session.tokens().iter().zip(tokens).take_while(|(a, b)| a == b).count().min(answer - 1);
        session.rewind(n_cached)?;
        let (mut n_correct, mut fault) = (0, None);
        session.feed_scored(&tokens[n_cached..], answer - 1 - n_cached, &mut |index, logits| {
            let position = n_cached + index;
            match (Row::new(logits), tokens.get(position + 1)) {
                (Ok(row), Some(&next)) => n_correct += usize::from(row.top() == next as usize),
                (Err(value), _) => fault = Some(EvalError::NotFinite { chunk: cell, position, value }),
                (Ok(_), None) => {}
            }
        })?;
        fault.map_or(Ok(()), Err)?;
        let n = tokens.len() - answer;
        (exact, right, all) = (exact + usize::from(n_correct == n), right + n_correct, all + n);
    }
    session.clear();
    Ok((exact as f64 / questions.len() as f64, right as f64 / all as f64))
}

impl Haystack {
    /// Builds a prompt of at most `n_ctx` tokens (answer included) with needles, the first at
    /// `depth` and the others evenly spaced from there, and a question for each. Length and depth
    /// determine the section of text, the names and the words.
    fn build_prompt(
        &self,
        model: &Model,
        options: &NiahOptions,
        n_ctx: usize,
        depth: f64,
    ) -> Result<Questions, EvalError> {
        if self.n_tokens() < n_ctx {
            return Err(EvalError::ShortText { tokens: self.n_tokens(), n_ctx });
        }
        let mut random = Random::new(n_ctx as u64 ^ depth.to_bits());
        let mut pick = |n: usize| (random.uniform() * n as f64) as usize;
        let (form, first) = (&options.form, pick(self.len()));
        let (name, word) = (pick(form.names.len()), pick(form.words.len()));
        let needles: Vec<(&str, &str)> = (0..options.needles)
            .map(|i| (&form.names[(name + i) % form.names.len()], &form.words[(word + i) % form.words.len()]))
            .map(|(name, word)| (name.as_str(), word.as_str()))
            .collect();
        // As many pieces as fit by their own token counts; then fewer until the whole fits.
        let mut n = 0;
        let mut room = n_ctx;
        while room > self.at(first + n).1 {
            room -= self.at(first + n).1;
            n += 1;
        }
        loop {
            let text = self.with_needles(form, &needles, first, n, depth);
            let questions = needles.iter().map(|needle| question(model, options, &text, needle));
            let questions = questions.collect::<Result<Questions, EvalError>>()?;
            let lens = || questions.iter().map(|(tokens, _)| tokens.len());
            if lens().all(|len| len <= n_ctx) {
                let shortest = lens().min().unwrap_or(0);
                return if MIN_PART * shortest < n_ctx {
                    Err(unfilled(n_ctx, shortest))
                } else {
                    Ok(questions)
                };
            }
            let Some(fewer) = n.checked_sub(1) else {
                let expected = format!("room for {} needles and a question", needles.len());
                return Err(EvalError::Setting { name: "n_ctx", expected, got: n_ctx.to_string() });
            };
            n = fewer;
        }
    }

    /// Joins `n` pieces from `first` on, with each needle at the piece boundary nearest to its
    /// depth.
    fn with_needles(
        &self,
        form: &NeedleForm,
        needles: &[(&str, &str)],
        first: usize,
        n: usize,
        depth: f64,
    ) -> String {
        let total: usize = (0..n).map(|i| self.at(first + i).1).sum();
        let mut ends = vec![0];
        ends.extend((0..n).scan(0, |end, i| {
            *end += self.at(first + i).1;
            Some(*end)
        }));
        let nearest = |depth: f64| {
            let target = depth * total as f64;
            (0..=n)
                .min_by(|&a, &b| (ends[a] as f64 - target).abs().total_cmp(&(ends[b] as f64 - target).abs()))
        };
        let places: Vec<usize> = (0..needles.len())
            .map(|i| match i {
                0 => depth,
                _ => (depth + i as f64 / needles.len() as f64) % 1.0,
            })
            .map(|depth| nearest(depth).unwrap_or(0))
            .collect();
        let mut text = String::new();
        for i in 0..=n {
            for (&(name, word), _) in needles.iter().zip(&places).filter(|(_, place)| **place == i) {
                text += &fill(&form.needle, name, word);
            }
            if i < n {
                text += self.at(first + i).0;
            }
        }
        text.trim_start().to_owned()
    }
}

/// Returns the error of a prompt far shorter than its nominal length.
fn unfilled(n_ctx: usize, got: usize) -> EvalError {
    let expected = format!("a text that fills {n_ctx} tokens");
    EvalError::Setting { name: "haystack", expected, got: format!("a prompt of {got}") }
}

fn question(
    model: &Model,
    options: &NiahOptions,
    text: &str,
    &(name, word): &(&str, &str),
) -> Result<(Vec<u32>, usize), EvalError> {
    let form = &options.form;
    let content = format!("{text}{}", fill(&form.question, name, word));
    let (cue, answer) = (fill(&form.cue, name, word), fill(&form.answer, name, word));
    let rendered;
    let (prompt, special) = if options.chat {
        let render = RenderOptions { add_generation_prompt: true, ..Default::default() };
        rendered =
            model.chat_template()?.render(&[Message::user(&content)], &render).map_err(kvant::Error::from)?;
        (format!("{rendered}{}", cue.trim_start()), rendered.special())
    } else {
        (format!("{content}{cue}"), Special::AsText)
    };
    // If the template writes the BOS token itself, no second one is added.
    let encode = |text: &str| model.tokenizer()?.encode_prompt(text, special).map_err(kvant::Error::from);
    let (prompt, whole) = (encode(&prompt)?, encode(&format!("{prompt}{answer}"))?);
    // A token across the boundary of prompt and answer belongs to the answer.
    let answer = prompt.iter().zip(&whole).take_while(|(a, b)| a == b).count();
    Ok((whole, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROSE: &str =
        "The old man walked along the river. He was tired, but he did not stop. It was cold that morning. ";

    fn options(n_ctx: usize, chat: bool) -> NiahOptions {
        let form = NeedleForm::built_in("secret-word").unwrap();
        NiahOptions { lengths: vec![n_ctx], depths: 3, needles: 1, form, chat, configs: Vec::new() }
    }

    #[test]
    fn a_text_of_any_shape_fills_the_prompt() {
        let model = Model::bundled(kvant::OpenOptions::default()).unwrap();
        let words = PROSE.replace(['.', ','], "");
        for (text, what) in [
            (PROSE.repeat(30), "sentences"),
            (words.repeat(40), "words alone"),
            (words.replace(' ', "").repeat(40), "no words"),
            ("彼は川に沿って歩いた。とても寒い朝だった。".repeat(40), "Japanese sentences"),
            ("彼は川に沿って歩いたとても寒い朝だった".repeat(40), "Japanese without any"),
            (words.replace(' ', "\n").repeat(40), "lines"),
        ] {
            let haystack = Haystack::new(&model, &text).unwrap();
            for n_ctx in [128, 512] {
                let cut = haystack.cut(&model, n_ctx / MAX_PART).unwrap();
                for depth in [0.0, 0.5, 1.0] {
                    let questions = cut.build_prompt(&model, &options(n_ctx, false), n_ctx, depth).unwrap();
                    let n = questions[0].0.len();
                    assert!((2 * n_ctx / 3..=n_ctx).contains(&n), "{what}: {n} of {n_ctx} tokens");
                }
            }
        }
    }

    /// Returns the bundled model, modified to require a BOS token.
    fn bundled_with_bos() -> Model {
        let key = b"tokenizer.ggml.add_bos_token";
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/assets/pocket-q8_0.gguf");
        let mut bytes = std::fs::read(source).unwrap();
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
        // The name is followed by its type, bool.
        assert_eq!(bytes[at..at + 4], 7u32.to_le_bytes());
        bytes[at + 4] = 1;
        let path = std::env::temp_dir().join(format!("kvant-niah-bos-{}.gguf", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let model = Model::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        model
    }

    #[test]
    fn chat_questions_begin_with_one_bos_token() {
        let model = bundled_with_bos();
        let (tokens, _) = question(&model, &options(256, true), "Some text.", &("Paris", "apple")).unwrap();
        let form = NeedleForm::built_in("secret-word").unwrap();
        let content = format!("Some text.{}", fill(&form.question, "Paris", "apple"));
        let prompt = model.chat_prompt(&[Message::user(&content)]).unwrap();
        assert_eq!(Some(prompt[0]), model.tokenizer().unwrap().bos());
        assert_eq!(tokens[..prompt.len()], prompt);
    }

    #[test]
    fn a_prompt_far_below_its_length_is_rejected() {
        let model = Model::bundled(kvant::OpenOptions::default()).unwrap();
        // Without further splits, no whole piece fits.
        let haystack = Haystack::new(&model, &"word ".repeat(1000)).unwrap();
        let error = haystack.build_prompt(&model, &options(512, false), 512, 0.5).unwrap_err().to_string();
        assert!(
            error.starts_with("haystack: expected a text that fills 512 tokens, got a prompt of"),
            "{error}"
        );
    }
}
