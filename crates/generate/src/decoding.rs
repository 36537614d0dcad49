//! Decoding of a sequence: samples tokens, converts them to text and applies stop conditions.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvant_text::tokenizer::{DecodeStream, Special, Tokenizer, TokenizerError};

use crate::constraint::{ConstraintError, Constraints};
use crate::reasoning_budget::ReasoningBudget;
use crate::sampler::{Sampler, SamplerParams, SequenceBreakers};
use crate::source::LogitSource;

/// Options of decoding.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DecodingOptions {
    /// Sampling parameters.
    pub sampler: SamplerParams,
    /// DRY sequence breakers.
    pub breakers: SequenceBreakers,
    /// Maximum tokens of the answer.
    pub max_tokens: usize,
    /// Stop strings; excluded from the answer.
    pub stop: Vec<String>,
    /// Whether the stop string is included in the answer.
    pub include_stop: bool,
    /// Stop tokens; excluded from the answer.
    pub stop_tokens: Vec<u32>,
    /// Minimum tokens, unless a constraint ends the answer.
    pub min_tokens: usize,
    /// Forbidden texts, as tokens.
    pub bad_words: Vec<Vec<u32>>,
    /// Number of top logprobs per token, if logprobs are requested.
    pub logprobs: Option<usize>,
    /// Logprobs of the sampling distribution, after all changes; otherwise those of the model.
    pub post_sampling_probs: bool,
    /// Biases added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Subtracted from the logit of a token that has been generated.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it has been generated.
    pub frequency_penalty: f32,
    /// Continue after an end-of-turn token.
    pub ignore_eos: bool,
    /// Detects reasoning and enforces its budget, if the model may reason.
    pub reasoning_budget: Option<ReasoningBudget>,
    /// Control tokens whose text is part of the answer.
    pub call_marks: Vec<u32>,
}

impl DecodingOptions {
    fn changes_logits(&self) -> bool {
        let has_penalty = self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        has_penalty || !self.bias.is_empty() || !self.bad_words.is_empty() || self.min_tokens > 0
    }
}

/// Tokenizes texts as [`DecodingOptions::bad_words`], both at the beginning of a word and within
/// one.
///
/// # Errors
/// A text that cannot be encoded.
pub fn bad_words(tokenizer: &Tokenizer, texts: &[String]) -> Result<Vec<Vec<u32>>, TokenizerError> {
    let texts = texts.iter().flat_map(|text| [text.clone(), format!(" {}", text.trim_start())]);
    let tokens = texts.map(|text| tokenizer.encode(&text, Special::AsText, false));
    let tokens = tokens.filter(|tokens| !tokens.as_ref().is_ok_and(Vec::is_empty));
    tokens.collect()
}

/// Reason why no token could be sampled.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError<E> {
    /// The source of logits failed.
    #[error(transparent)]
    Source(E),
    /// The constraint cannot be applied.
    #[error("the constraint cannot be applied: {0}")]
    Constraint(#[from] ConstraintError),
}

/// Token and its log probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logprob {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Logprobs at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token at this position.
    pub token: Logprob,
    /// Its rank by probability among all tokens, from 1.
    pub rank: u32,
    /// Most probable tokens there, in descending order.
    pub top: Vec<Logprob>,
}

/// Reason why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    Stop,
    /// A stop string was generated: the one of [`DecodingOptions::stop`] at this index.
    Word(usize),
    /// The token limit or the context was reached.
    Length,
}

impl Finish {
    /// Returns `stop` or `length`, as in OpenAI's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop | Self::Word(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// Token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOutput {
    /// Token id.
    pub token: u32,
    /// Text that became final; it may belong to earlier tokens.
    pub text: String,
    /// Logprobs of the tokens whose text became final, if requested.
    pub logprobs: Vec<TokenLogprobs>,
}

/// Withheld text of an answer, once no more tokens follow.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FinalOutput {
    /// Text.
    pub text: String,
    /// Logprobs of its tokens, if requested.
    pub logprobs: Vec<TokenLogprobs>,
}

/// Result of a sampling step.
pub enum SampleResult {
    /// Token and, if it is the last one, the reason.
    Token(TokenOutput, Option<Finish>),
    /// The model ended its turn.
    End,
}

/// Decoder of a sequence: everything but the model.
pub struct SequenceDecoder {
    options: Arc<DecodingOptions>,
    sampler: Sampler,
    decode: DecodeStream,
    stops: Stops,
    guides: Constraints,
    thinking: Option<ReasoningBudget>,
    n_generated: usize,
    /// Token that ended the answer.
    end_token: Option<u32>,
    /// Occurrences of each generated token, counted only when logits are changed.
    counts: HashMap<u32, u32>,
    /// Last generated tokens, as many as the longest of the `bad_words`.
    recent: VecDeque<u32>,
    pending: PendingLogprobs,
}

impl SequenceDecoder {
    /// Creates the decoder of the `index`-th answer to a prompt, with its own seed.
    pub fn new(options: Arc<DecodingOptions>, guides: Constraints, index: usize) -> Self {
        let seed = options.sampler.seed.wrapping_add(index as u64);
        let sampler =
            Sampler::new(SamplerParams { seed, ..options.sampler }).with_breakers(options.breakers.clone());
        let stops = Stops::new(options.stop.clone(), options.include_stop);
        let decode = DecodeStream::default();
        let (thinking, counts) = (options.reasoning_budget.clone(), HashMap::new());
        let (recent, pending) = (VecDeque::new(), PendingLogprobs::default());
        Self {
            options,
            sampler,
            decode,
            stops,
            guides,
            thinking,
            n_generated: 0,
            end_token: None,
            counts,
            recent,
            pending,
        }
    }

    /// Returns the number of generated tokens.
    pub fn n_generated(&self) -> usize {
        self.n_generated
    }

    /// Returns the end-of-turn or stop token that ended the answer, which does not count as
    /// generated.
    pub fn end_token(&self) -> Option<u32> {
        self.end_token
    }

    /// Returns how many more tokens the answer may have.
    pub fn n_left(&self) -> usize {
        self.options.max_tokens.saturating_sub(self.n_generated)
    }

    /// Returns the number of reasoning tokens.
    pub fn n_reasoning(&self) -> usize {
        self.thinking.as_ref().map_or(0, ReasoningBudget::n_tokens)
    }

    /// Reports whether a token can be sampled, after at most `patience`: token masks are computed
    /// on other threads.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        self.guides.active().is_none_or(|guide| guide.is_ready(patience))
    }

    /// Returns how many of the most probable tokens a sample needs after `n_recent` tokens; `None`
    /// if it needs all logits, as for a constraint.
    pub fn n_candidates(&mut self, n_recent: usize) -> Option<usize> {
        match self.changes_logits() {
            true => None,
            false => self.sampler.n_candidates(n_recent),
        }
    }

    /// Reports whether the next token is sampled from changed logits.
    fn changes_logits(&mut self) -> bool {
        self.guides.active().is_some() || self.options.changes_logits() || self.forced_token().is_some()
    }

    /// Returns the next token of the end of reasoning, once its budget is used up.
    fn forced_token(&self) -> Option<u32> {
        self.thinking.as_ref().and_then(ReasoningBudget::forced_token)
    }

    /// Samples the token that follows the context of `source`.
    ///
    /// # Errors
    /// An error of `source`; a constraint that leaves no token, or whose mask takes too long.
    pub fn sample<S: LogitSource>(
        &mut self,
        source: &mut S,
        tokenizer: &Tokenizer,
    ) -> Result<SampleResult, SamplingError<S::Error>> {
        let options = Arc::clone(&self.options);
        let n_top = options.logprobs.filter(|_| !options.post_sampling_probs);
        let before = n_top.map(|_| source.logits().map(<[f32]>::to_vec)).transpose();
        let before = before.map_err(SamplingError::Source)?;
        let token = self.choose(source, tokenizer, &options)?;
        if tokenizer.is_eog(token) && !options.ignore_eos || options.stop_tokens.contains(&token) {
            self.end_token = Some(token);
            return Ok(SampleResult::End);
        }
        self.n_generated += 1;
        let logprob = options.logprobs.map(|n| match before {
            Some(logits) => token_logprobs(&logits, token, n),
            None => sampled_logprobs(&self.sampler, token, n),
        });
        let text = match options.call_marks.contains(&token) {
            true => self.decode.flush() + tokenizer.token_text(token).unwrap_or_default(),
            false => self.decode.push(tokenizer, token),
        };
        if let Some(thinking) = &mut self.thinking {
            thinking.push(&text);
        }
        let is_thinking = self.thinking.as_ref().is_some_and(ReasoningBudget::is_open);
        let is_complete = self.guides.record(tokenizer, token, &text, is_thinking)?;
        self.pending.push(logprob, text.len());
        let (text, stopped) = self.stops.push(text);
        let logprobs = self.pending.release(text.len(), stopped.is_some());
        let ended = stopped.map(Finish::Word).or(is_complete.then_some(Finish::Stop));
        let finish = ended.or((self.n_generated >= options.max_tokens).then_some(Finish::Length));
        Ok(SampleResult::Token(TokenOutput { token, text, logprobs }, finish))
    }

    fn choose<S: LogitSource>(
        &mut self,
        source: &mut S,
        tokenizer: &Tokenizer,
        options: &DecodingOptions,
    ) -> Result<u32, SamplingError<S::Error>> {
        if !self.changes_logits() {
            return source.sample(&mut self.sampler).map_err(SamplingError::Source);
        }
        // The output of a constraint contains no reasoning.
        let is_free = self.guides.active().is_none();
        let must = self.forced_token().filter(|_| is_free);
        let ends: Vec<u32> = match self.n_generated < options.min_tokens && is_free {
            true => tokenizer.eog_ids().iter().chain(&options.stop_tokens).copied().collect(),
            false => Vec::new(),
        };
        let (counts, recent, mut guide) = (&self.counts, &self.recent, self.guides.active());
        let mut guided = Ok(());
        let token = source.sample_with(&mut self.sampler, &mut |logits| {
            apply_penalties(logits, options, counts);
            exclude(logits, &ends, &options.bad_words, recent);
            if let Some(guide) = &mut guide {
                guided = guide.mask(logits);
            }
            if let Some(must) = must {
                logits.fill(f32::NEG_INFINITY);
                logits[must as usize] = 0.0;
            }
        });
        guided?;
        let token = token.map_err(SamplingError::Source)?;
        *self.counts.entry(token).or_default() += 1;
        self.recent.push_back(token);
        if self.recent.len() > options.bad_words.iter().map(Vec::len).max().unwrap_or(0) {
            self.recent.pop_front();
        }
        Ok(token)
    }

    /// Returns the withheld text, once no more tokens follow.
    pub fn finish(&mut self) -> FinalOutput {
        let text = self.decode.flush();
        let (text, stopped) = self.stops.push(text);
        let text = if stopped.is_some() { text } else { text + &self.stops.rest() };
        FinalOutput { text, logprobs: std::mem::take(&mut self.pending).logprobs() }
    }
}

/// Logprobs of tokens whose text may still become part of a stop string, which is excluded from the
/// answer.
#[derive(Default)]
struct PendingLogprobs {
    /// Byte range of the text of each token, with its logprobs.
    logprobs: VecDeque<(Range<usize>, TokenLogprobs)>,
    n_pushed: usize,
    n_final: usize,
}

impl PendingLogprobs {
    /// Adds a generated token whose text has `n` bytes.
    fn push(&mut self, logprob: Option<TokenLogprobs>, n: usize) {
        let text = self.n_pushed..self.n_pushed + n;
        self.n_pushed = text.end;
        self.logprobs.extend(logprob.map(|logprob| (text, logprob)));
    }

    /// Returns the logprobs of the tokens covered by `n` more final bytes. After the last ones no
    /// more follow.
    fn release(&mut self, n: usize, are_last: bool) -> Vec<TokenLogprobs> {
        self.n_final += n;
        let n_final = self.n_final;
        let is_final = |(text, _): &&(Range<usize>, TokenLogprobs)| {
            text.end <= n_final || (are_last && text.start < n_final)
        };
        let n = self.logprobs.iter().take_while(is_final).count();
        let released = self.logprobs.drain(..n).map(|(_, logprob)| logprob).collect();
        if are_last {
            self.logprobs.clear();
        }
        released
    }

    fn logprobs(self) -> Vec<TokenLogprobs> {
        self.logprobs.into_iter().map(|(_, logprob)| logprob).collect()
    }
}

/// Excludes tokens that would end the answer and those that would complete one of the `bad_words`.
fn exclude(logits: &mut [f32], ends: &[u32], bad_words: &[Vec<u32>], recent: &VecDeque<u32>) {
    let completes = |word: &&Vec<u32>| {
        let before = &word[..word.len() - 1];
        before.len() <= recent.len() && recent.iter().skip(recent.len() - before.len()).eq(before)
    };
    let last = bad_words.iter().filter(completes).filter_map(|word| word.last());
    for &token in ends.iter().chain(last) {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Applies biases and penalties.
fn apply_penalties(logits: &mut [f32], options: &DecodingOptions, counts: &HashMap<u32, u32>) {
    for &(token, bias) in &options.bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    for (&token, &times) in counts {
        logits[token as usize] -= options.presence_penalty + times as f32 * options.frequency_penalty;
    }
}

/// Returns the logprobs of `token` and of the `n` most probable tokens, at temperature 1 and before
/// any change.
pub fn token_logprobs(logits: &[f32], token: u32, n: usize) -> TokenLogprobs {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let logprob = |token: u32| {
        let logprob = f64::from(logits[token as usize] - largest) - sum.ln();
        // JSON has no infinity.
        Logprob { token, logprob: logprob.max(-9999.0) as f32 }
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let rank = 1 + ids.iter().filter(|id| by_logit(id, &token).is_lt()).count() as u32;
    let n = n.min(ids.len());
    if n > 0 {
        ids.select_nth_unstable_by(n - 1, by_logit);
    }
    ids.truncate(n);
    ids.sort_unstable_by(by_logit);
    TokenLogprobs { token: logprob(token), rank, top: ids.into_iter().map(logprob).collect() }
}

/// Returns the logprobs of `token` and of the `n` most probable tokens in the distribution it was
/// sampled from.
fn sampled_logprobs(sampler: &Sampler, token: u32, n: usize) -> TokenLogprobs {
    let logprob = |(token, chance): (u32, f64)| Logprob { token, logprob: chance.ln() as f32 };
    let among = sampler.sampled_candidates().filter(|(_, chance)| *chance > 0.0);
    let own = sampler.sampled_candidates().zip(1..).find(|((id, _), _)| *id == token);
    let (own, rank) = own.unwrap_or(((token, 1.0), 1));
    TokenLogprobs { token: logprob(own), rank, top: among.take(n).map(logprob).collect() }
}

/// Finds stop strings in streamed text.
struct Stops {
    strings: Vec<String>,
    /// Whether the stop string is included in the answer.
    keeps: bool,
    /// Possible beginning of a stop string.
    held: String,
}

impl Stops {
    fn new(strings: Vec<String>, keeps: bool) -> Self {
        Self { strings, keeps, held: String::new() }
    }

    /// Returns the non-empty stop strings with their indices.
    fn nonempty(&self) -> impl Iterator<Item = (usize, &str)> {
        self.strings.iter().map(String::as_str).enumerate().filter(|(_, text)| !text.is_empty())
    }

    /// Returns the text that is final now, and the index of the stop string that follows it.
    fn push(&mut self, text: String) -> (String, Option<usize>) {
        if self.strings.is_empty() {
            return (text, None);
        }
        self.held.push_str(&text);
        let found = self.nonempty().filter_map(|(index, stop)| Some((self.held.find(stop)?, index))).min();
        if let Some((at, index)) = found {
            self.held.truncate(if self.keeps { at + self.strings[index].len() } else { at });
            return (std::mem::take(&mut self.held), Some(index));
        }
        let may_begin = |at: &usize| self.nonempty().any(|(_, stop)| stop.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(self.held.len());
        let held = self.held.split_off(at);
        (std::mem::replace(&mut self.held, held), None)
    }

    fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the text of a token as a key that distinguishes bytes that are not UTF-8, in OpenAI's
/// format.
pub fn token_key(tokenizer: &Tokenizer, token: u32) -> String {
    let bytes = tokenizer.token_bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |key, byte| key + &format!("\\x{byte:02x}")),
    }
}

/// Returns the text of a token, and its bytes.
pub fn token_text(tokenizer: &Tokenizer, token: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(token).to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the output for every chunk size of the text.
    fn through(strings: &[&str], text: &str) -> Vec<(String, Option<usize>)> {
        let chars: Vec<char> = text.chars().collect();
        let mut ways = Vec::new();
        for size in 1..=chars.len().max(1) {
            let mut stops = Stops::new(strings.iter().map(|&text| text.to_owned()).collect(), false);
            let (mut output, mut stopped) = (String::new(), None);
            for piece in chars.chunks(size) {
                let (text, hit) = stops.push(piece.iter().collect::<String>());
                output += &text;
                stopped = hit;
                if hit.is_some() {
                    break;
                }
            }
            if stopped.is_none() {
                output += &stops.rest();
            }
            ways.push((output, stopped));
        }
        ways
    }

    #[test]
    fn a_stop_string_is_found_in_chunks_of_any_size() {
        let cases: [(&[&str], &str, &str, Option<usize>); 7] = [
            (&[], "abc", "abc", None),
            (&["\n\n"], "one\ntwo\n\nthree", "one\ntwo", Some(0)),
            (&["END", "ENDE"], "aENDE", "a", Some(0)),
            (&["!", "xyz"], "xxyxyxyz!", "xxyxy", Some(1)),
            (&["xyz"], "xxyxy", "xxyxy", None),
            (&["", "ö"], "grün, schön", "grün, sch", Some(1)),
            (&[""], "abc", "abc", None),
        ];
        for (strings, text, expected, stopped) in cases {
            for way in through(strings, text) {
                assert_eq!(way, (expected.to_owned(), stopped), "{strings:?} in {text:?}");
            }
        }
    }

    #[test]
    fn tokens_of_a_stop_string_have_no_logprobs() {
        let of = |token| TokenLogprobs { token: Logprob { token, logprob: 0.0 }, rank: 1, top: Vec::new() };
        let tokens =
            |logprobs: Vec<TokenLogprobs>| logprobs.iter().map(|of| of.token.token).collect::<Vec<_>>();
        let (mut stops, mut pending) = (Stops::new(vec!["cd".to_owned()], false), PendingLogprobs::default());
        let mut released = Vec::new();
        // The third token may begin a stop string, the last one does: its first letter belongs to
        // the answer.
        for (token, text) in [(0, "a"), (1, ""), (2, "c"), (3, "b"), (4, "bc"), (5, "d")] {
            pending.push(Some(of(token)), text.len());
            let (text, stopped) = stops.push(text.to_owned());
            released.push(tokens(pending.release(text.len(), stopped.is_some())));
        }
        assert_eq!(released, [vec![0], vec![1], vec![], vec![2, 3], vec![], vec![4]]);
        assert!(pending.logprobs().is_empty());
        let mut pending = PendingLogprobs::default();
        pending.push(Some(of(7)), 1);
        assert_eq!(tokens(pending.release(0, false)), [0; 0]);
        assert_eq!(tokens(pending.logprobs()), [7]);
    }

    #[test]
    fn tokens_that_are_not_utf8_have_distinct_keys() {
        let tokens = ["a", "Ã", "©"].map(str::to_owned).to_vec();
        let mut data =
            kvant_text::tokenizer::VocabData::new(kvant_text::tokenizer::TokenizerModel::Gpt2, tokens);
        data.merges = Some(vec![]);
        let tokenizer = Tokenizer::new(data).unwrap();
        let keys = [0, 1, 2].map(|token| token_key(&tokenizer, token));
        assert_eq!(keys, ["a", "bytes:\\xc3", "bytes:\\xa9"]);
    }

    #[test]
    fn probabilities_are_those_of_the_logits() {
        let logits = [1.0f32, 3.0, f32::NEG_INFINITY, 3.0];
        let found = token_logprobs(&logits, 0, 3);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let want = |logit: f64| (logit - sum.ln()) as f32;
        assert!((found.token.logprob - want(1.0)).abs() < 1e-6);
        let tokens: Vec<u32> = found.top.iter().map(|top| top.token).collect();
        assert_eq!(tokens, [1, 3, 0]);
        assert!((found.top[0].logprob - want(3.0)).abs() < 1e-6);
        assert_eq!(token_logprobs(&logits, 2, 9).token.logprob, -9999.0);
        assert_eq!(token_logprobs(&logits, 2, 0).top, []);
    }
}
