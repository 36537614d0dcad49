//! Agreement of long greedy answers: where the answer with a compressed cache first differs from
//! that with an f16 cache.
//!
//! Each cache is run under teacher forcing along the f16 answer, and its most probable token is
//! compared at each position. Up to the first difference this equals the cache's own greedy answer;
//! after it, the texts cannot be compared token by token, but the share of agreeing predictions
//! can.

use kvant::{DType, KvOptions, Message, Model, Policies, Session};
use serde::{Deserialize, Serialize};

use crate::chunk_eval;
use crate::chunks::Chunks;
use crate::config::KvConfig;
use crate::error::EvalError;
use crate::progress::{OnProgress, Progress};
use crate::score::{LogProbs, Row};

/// Options of the measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct AgreeOptions {
    /// The configurations.
    pub configs: Vec<KvOptions>,
    /// Maximum tokens of an answer; an answer may end earlier, and its end token counts.
    pub max_tokens: usize,
}

/// The answers of one configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// The cache configuration.
    pub kv: KvConfig,
    /// One answer per prompt.
    pub answers: Vec<Answer>,
}

/// One answer compared with that of f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Tokens of the f16 answer.
    pub tokens: usize,
    /// Tokens before the first difference; all of them if the answers are equal.
    pub alike: usize,
    /// Tokens that this cache predicts too, under teacher forcing along the f16 answer.
    pub same: usize,
}

impl Agreement {
    /// Returns the mean number of tokens before the first difference.
    pub fn alike(&self) -> f64 {
        self.sum(|answer| answer.alike) / self.answers.len() as f64
    }

    /// Returns the share of answers without a difference.
    pub fn unchanged(&self) -> f64 {
        self.sum(|answer| usize::from(answer.alike == answer.tokens)) / self.answers.len() as f64
    }

    /// Returns the share of equal predictions under teacher forcing along the f16 answers.
    pub fn same(&self) -> f64 {
        self.sum(|answer| answer.same) / self.sum(|answer| answer.tokens)
    }

    fn sum(&self, of: impl Fn(&Answer) -> usize) -> f64 {
        self.answers.iter().map(of).sum::<usize>() as f64
    }
}

/// Returns the chunks of a text as prompts.
pub fn text_prompts(chunks: &Chunks) -> Vec<Vec<u32>> {
    (0..chunks.len()).map(|i| chunks.input(i)).collect()
}

/// Renders each line of `questions` in the model's chat template.
///
/// # Errors
///
/// A model without a usable template.
pub fn question_prompts(model: &Model, questions: &str) -> Result<Vec<Vec<u32>>, EvalError> {
    let lines = questions.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| Ok(model.chat_prompt(&[Message::user(line)])?)).collect()
}

/// Compares the answers of each configuration with those of the f16 cache.
///
/// # Errors
///
/// No prompts or answers of no tokens, logits that are not finite, an engine error.
pub fn agree(
    model: &Model,
    prompts: &[Vec<u32>],
    options: &AgreeOptions,
    progress: OnProgress<'_>,
) -> Result<Vec<Agreement>, EvalError> {
    let setting = |name, got: usize| {
        Err(EvalError::Setting { name, expected: "1 or more".to_owned(), got: got.to_string() })
    };
    match (prompts.len(), options.max_tokens) {
        (0, _) => return setting("prompts", 0),
        (_, 0) => return setting("tokens of an answer", 0),
        _ => {}
    }
    let n_ctx = prompts.iter().map(Vec::len).max().unwrap_or(0) + options.max_tokens;
    let f16 = KvOptions { policies: Policies::none(), ..KvOptions::symmetric(DType::F16) };
    let mut base = chunk_eval::session(model, &f16, n_ctx)?;
    let mut sessions = Vec::new();
    for kv in &options.configs {
        sessions.push((chunk_eval::session(model, kv, n_ctx)?, KvConfig::new(model, kv, n_ctx)?, Vec::new()));
    }
    for (index, prompt) in prompts.iter().enumerate() {
        let step = |done| Progress { done, total: prompts.len(), resumed: 0, note: String::new() };
        progress(&step(index));
        let tokens = answered(model, &mut base, index, prompt, options.max_tokens)?;
        for (session, _, answers) in &mut sessions {
            answers.push(compare(session, index, &tokens, prompt.len())?);
        }
        progress(&step(index + 1));
    }
    Ok(sessions.into_iter().map(|(_, kv, answers)| Agreement { kv, answers }).collect())
}

/// Returns the prompt and its greedy answer, with the end token.
fn answered(
    model: &Model,
    session: &mut Session,
    index: usize,
    prompt: &[u32],
    max_tokens: usize,
) -> Result<Vec<u32>, EvalError> {
    let tokenizer = model.tokenizer()?;
    let mut tokens = prompt.to_vec();
    session.clear();
    session.feed(prompt, &mut |_| true)?;
    loop {
        let not_finite = |value| EvalError::NotFinite { chunk: index, position: tokens.len() - 1, value };
        let next = Row::new(session.logits()?).map_err(not_finite)?.top() as u32;
        tokens.push(next);
        if tokenizer.is_eog(next) || tokens.len() == prompt.len() + max_tokens {
            return Ok(tokens);
        }
        session.feed(&[next], &mut |_| true)?;
    }
}

/// Compares the predictions of another cache along an answer that begins at `first`.
fn compare(session: &mut Session, index: usize, tokens: &[u32], first: usize) -> Result<Answer, EvalError> {
    let mut is_same = Vec::with_capacity(tokens.len() - first);
    let mut fault = None;
    session.clear();
    session.feed_scored(&tokens[..tokens.len() - 1], first - 1, &mut |position, logits| match Row::new(
        logits,
    ) {
        Ok(row) if position + 1 >= first => is_same.push(row.top() == tokens[position + 1] as usize),
        Ok(_) => {}
        Err(value) => fault = Some(EvalError::NotFinite { chunk: index, position, value }),
    })?;
    fault.map_or(Ok(()), Err)?;
    let alike = is_same.iter().take_while(|same| **same).count();
    let same = is_same.iter().filter(|same| **same).count();
    Ok(Answer { tokens: is_same.len(), alike, same })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_whole_and_token_by_token() {
        let model = Model::bundled(Default::default()).unwrap();
        let kv = KvConfig::new(&model, &KvOptions::default(), 64).unwrap();
        let answer = |tokens, alike, same| Answer { tokens, alike, same };
        let agreement = Agreement { kv, answers: vec![answer(10, 10, 10), answer(30, 5, 25)] };
        assert_eq!((agreement.alike(), agreement.unchanged(), agreement.same()), (7.5, 0.5, 0.875));
    }
}
