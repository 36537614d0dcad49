//! A needle in a haystack: a sentence hidden at some depth of a long text, and a question about it at the end.
//!
//! The answer is judged under teacher forcing: the model reads prompt and right answer, and each token of the answer counts
//! when it is the most probable one. All of them right is the same as an exact greedy answer, and the share of them tells
//! near misses from failures.

use std::path::Path;

use kvant::limits::check_size;
use kvant::{KvOptions, Message, Model, RenderOptions, Session, Special};
use kvant_codec::random::Random;
use serde::{Deserialize, Serialize};
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use crate::needle_form::fill;
use crate::run_state::RunState;
use crate::score::{LogProbs, Row};
use crate::{EvalError, KvConfig, NeedleForm, OnProgress, Progress, walk};

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct NiahOptions {
    /// Lengths of prompt and answer together, in tokens.
    pub lengths: Vec<usize>,
    /// Number of depths, from the beginning of the haystack to its end.
    pub depths: usize,
    /// Needles in one haystack; each is asked for.
    pub needles: usize,
    /// Their wording.
    pub form: NeedleForm,
    /// Put haystack and question into the model's chat template, and the cue at the start of its answer.
    pub chat: bool,
    /// Cache configurations.
    pub configs: Vec<KvOptions>,
}

/// One cell of the grid, for one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NiahCell {
    /// Tokens of prompt and answer.
    pub n_ctx: usize,
    /// Where the (first) needle is: 0 at the beginning, 1 at the end.
    pub depth: f64,
    /// Type of the keys.
    pub type_k: String,
    /// Type of the values.
    pub type_v: String,
    /// Share of the needles whose answer is right to the last token.
    pub exact: f64,
    /// Share of the answers' tokens that are right.
    pub token_accuracy: f64,
}

/// Runs the grid over every configuration. With a `state` file, a run that was cut short goes on where it stopped.
///
/// # Errors
/// A haystack shorter than the longest length, lengths without room for a haystack, more needles than the form has names
/// or words for, a state file of another run, logits that are not finite, an engine error.
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
            "measure": "niah", "version": 1, "model": model.computed_by(), "haystack": haystack.fingerprint,
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
            let mut session = walk::session(model, kv, n_ctx)?;
            for step in 0..options.depths {
                index += 1;
                if index <= resumed {
                    continue;
                }
                let depth = if options.depths == 1 { 0.5 } else { step as f64 / (options.depths - 1) as f64 };
                let prompt = haystack.hide(model, options, n_ctx, depth)?;
                let (exact, token_accuracy) = ask(&mut session, &prompt, index - 1)?;
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

/// The most depths: more than prompts have places.
const MAX_DEPTHS: usize = 100_000;

fn check(options: &NiahOptions) -> Result<(), EvalError> {
    let form = &options.form;
    let most = form.names.len().min(form.words.len());
    let bad =
        |name, expected: String, got: usize| Err(EvalError::Setting { name, expected, got: got.to_string() });
    if !(1..=most).contains(&options.needles) {
        return bad(
            "needles",
            format!("1 to {most}, what the form {} has names for", form.name),
            options.needles,
        );
    }
    check_size("depths", options.depths, 1..=MAX_DEPTHS).map_err(kvant::Error::from)?;
    Ok(())
}

/// The answers to one prompt, each as all tokens of prompt and answer, and where the answer begins.
type Questions = Vec<(Vec<u32>, usize)>;

/// Asks each question of a prompt. Returns the share of exact answers and of right tokens.
fn ask(session: &mut Session, questions: &Questions, cell: usize) -> Result<(f64, f64), EvalError> {
    let (mut exact, mut right, mut all) = (0, 0, 0);
    for (tokens, answer) in questions {
        let kept = session.tokens().iter().zip(tokens).take_while(|(a, b)| a == b).count().min(answer - 1);
        session.rewind(kept)?;
        let (mut right_here, mut fault) = (0, None);
        session.feed_scored(&tokens[kept..], answer - 1 - kept, &mut |index, logits| {
            let position = kept + index;
            match (Row::new(logits), tokens.get(position + 1)) {
                (Ok(row), Some(&next)) => right_here += usize::from(row.top() == next as usize),
                (Err(value), _) => fault = Some(EvalError::NotFinite { chunk: cell, position, value }),
                (Ok(_), None) => {}
            }
        })?;
        fault.map_or(Ok(()), Err)?;
        let n = tokens.len() - answer;
        (exact, right, all) = (exact + usize::from(right_here == n), right + right_here, all + n);
    }
    session.clear();
    Ok((exact as f64 / questions.len() as f64, right as f64 / all as f64))
}

/// A text in sentences, each with its number of tokens.
struct Haystack {
    sentences: Vec<(String, usize)>,
    n_tokens: usize,
    fingerprint: String,
}

impl Haystack {
    fn new(model: &Model, text: &str) -> Result<Self, EvalError> {
        let mut sentences = Vec::new();
        for sentence in split_sentences(text) {
            let tokens = model.tokenizer()?.encode(sentence, Special::AsText, false);
            let n = tokens.map_err(kvant::Error::from)?.len();
            sentences.push((sentence.to_owned(), n));
        }
        let n_tokens = sentences.iter().map(|(_, n)| n).sum();
        Ok(Self { sentences, n_tokens, fingerprint: format!("{:016x}", xxh3_64(text.as_bytes())) })
    }

    /// A prompt of at most `n_ctx` tokens (answer included) with needles in it, the first at `depth` and the others spread
    /// evenly from there, and a question for each. The stretch of text, names and words follow from length and depth.
    fn hide(
        &self,
        model: &Model,
        options: &NiahOptions,
        n_ctx: usize,
        depth: f64,
    ) -> Result<Questions, EvalError> {
        if self.n_tokens < n_ctx {
            return Err(EvalError::ShortText { tokens: self.n_tokens, n_ctx });
        }
        let mut random = Random::new(n_ctx as u64 ^ depth.to_bits());
        let mut pick = |n: usize| (random.uniform() * n as f64) as usize;
        let (form, first) = (&options.form, pick(self.sentences.len()));
        let (name, word) = (pick(form.names.len()), pick(form.words.len()));
        let needles: Vec<(&str, &str)> = (0..options.needles)
            .map(|i| (&form.names[(name + i) % form.names.len()], &form.words[(word + i) % form.words.len()]))
            .map(|(name, word)| (name.as_str(), word.as_str()))
            .collect();
        // As many sentences as fit, by their own counts; then fewer until the whole fits.
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
            if questions.iter().all(|(tokens, _)| tokens.len() <= n_ctx) {
                return Ok(questions);
            }
            let Some(fewer) = n.checked_sub(1) else {
                let expected = format!("room for {} needles and a question", needles.len());
                return Err(EvalError::Setting { name: "n_ctx", expected, got: n_ctx.to_string() });
            };
            n = fewer;
        }
    }

    /// Sentence `index`, from the start again after the last.
    fn at(&self, index: usize) -> &(String, usize) {
        &self.sentences[index % self.sentences.len()]
    }

    /// `n` sentences from `first` on, each needle at the sentence end nearest to its depth.
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
            let wanted = depth * total as f64;
            (0..=n)
                .min_by(|&a, &b| (ends[a] as f64 - wanted).abs().total_cmp(&(ends[b] as f64 - wanted).abs()))
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
                text += &self.at(first + i).0;
            }
        }
        text.trim_start().to_owned()
    }
}

fn question(
    model: &Model,
    options: &NiahOptions,
    text: &str,
    &(name, word): &(&str, &str),
) -> Result<(Vec<u32>, usize), EvalError> {
    let form = &options.form;
    let asked = format!("{text}{}", fill(&form.question, name, word));
    let (cue, answer) = (fill(&form.cue, name, word), fill(&form.answer, name, word));
    let rendered;
    let (prompt, special, add_bos) = if options.chat {
        let render = RenderOptions { add_generation_prompt: true, ..Default::default() };
        rendered =
            model.chat_template()?.render(&[Message::user(&asked)], &render).map_err(kvant::Error::from)?;
        // The template writes the begin-of-text token itself.
        (format!("{rendered}{}", cue.trim_start()), rendered.special(), false)
    } else {
        (format!("{asked}{cue}"), Special::AsText, true)
    };
    let encode = |text: &str| model.tokenizer()?.encode(text, special, add_bos).map_err(kvant::Error::from);
    let (prompt, whole) = (encode(&prompt)?, encode(&format!("{prompt}{answer}"))?);
    // A token may reach from the prompt into the answer; it belongs to the answer then.
    let answer = prompt.iter().zip(&whole).take_while(|(a, b)| a == b).count();
    Ok((whole, answer))
}

/// Cuts after `.`, `!` or `?` where white space follows; the white space goes with the next sentence.
fn split_sentences(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut chars = rest.char_indices().peekable();
        let end = std::iter::from_fn(|| {
            let (i, c) = chars.next()?;
            let ends = matches!(c, '.' | '!' | '?') && chars.peek().is_some_and(|(_, c)| c.is_whitespace());
            Some((i + c.len_utf8(), ends))
        })
        .find_map(|(end, ends)| ends.then_some(end));
        let (sentence, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(sentence)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_join_to_the_text_they_were_cut_from() {
        let text = "One. Two? It was 3.5 miles!\n\nThe end";
        let sentences: Vec<&str> = split_sentences(text).collect();
        assert_eq!(sentences, ["One.", " Two?", " It was 3.5 miles!", "\n\nThe end"]);
        assert_eq!(sentences.concat(), text);
    }
}
