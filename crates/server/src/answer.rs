//! What is said: tokens drawn, turned into text, and stopped where they are to stop.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvant::{
    Breakers, DecodeStream, Error, Picture, SampleError, Sampler, SamplerParams, Session, Tokenizer,
};

use crate::guide::{FormError, Guides};
use crate::thinking::Thinking;

/// How to answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct AnswerOptions {
    /// How tokens are drawn.
    pub sampler: SamplerParams,
    /// Texts that break the repetitions that DRY penalises.
    pub breakers: Breakers,
    /// Tokens at most.
    pub max_tokens: usize,
    /// Texts that end the answer, and are not part of it.
    pub stop: Vec<String>,
    /// Whether the text that ends the answer is part of it.
    pub keeps_stop: bool,
    /// Tokens that end the answer, and are not part of it.
    pub stop_tokens: Vec<u32>,
    /// Tokens that the answer has at least, unless its form ends it.
    pub min_tokens: usize,
    /// Texts that are never said, as tokens.
    pub bad_words: Vec<Vec<u32>>,
    /// With the log probability of each token, and those of so many likeliest beside it.
    pub logprobs: Option<usize>,
    /// Those among which a token was drawn, with all that changes them; else those of the model.
    pub after_sampling: bool,
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Taken from the logit of a token that has been said.
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time that it has been said.
    pub frequency_penalty: f32,
    /// Go on after an end-of-turn token.
    pub ignore_eos: bool,
    /// Tells thoughts, and ends them, where there may be any.
    pub thinking: Option<Thinking>,
    /// The pictures of the prompt: their rows are to be there for as long as it may have to be read.
    pub pictures: Vec<Picture>,
    /// Control tokens whose text is part of the answer.
    pub call_marks: Vec<u32>,
}

impl AnswerOptions {
    fn changes_logits(&self) -> bool {
        let penalises = self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        penalises || !self.bias.is_empty() || !self.bad_words.is_empty() || self.min_tokens > 0
    }
}

/// Why a token could not be drawn.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DrawError {
    #[error(transparent)]
    Model(#[from] Error),
    #[error("the answer cannot be held to its form: {0}")]
    Form(#[from] FormError),
}

impl DrawError {
    /// Whether it is the request that asks for what cannot be done.
    pub fn is_of_request(&self) -> bool {
        matches!(self, Self::Form(_) | Self::Model(Error::Sample(SampleError::NoCandidate)))
    }
}

/// A token and its log probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Logprob {
    pub token: u32,
    pub logprob: f32,
}

/// What is known of how likely a token was.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Likelihood {
    pub token: Logprob,
    /// The likeliest tokens there, likeliest first.
    pub top: Vec<Logprob>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended its turn.
    Stop,
    /// It said a text that it was to stop at: that of [`AnswerOptions::stop`] with this index.
    Word(usize),
    /// As many tokens as were asked for, or as there is room for.
    Length,
}

impl Finish {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop | Self::Word(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// One token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Said {
    pub token: u32,
    /// Text that has become certain; it may be that of tokens before.
    pub text: String,
    /// Of tokens whose text is certain with it, where they are asked for.
    pub likelihoods: Vec<Likelihood>,
}

/// What was held back of an answer, once it is certain that no more comes.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Rest {
    pub text: String,
    pub likelihoods: Vec<Likelihood>,
}

/// What comes of a draw.
pub(crate) enum Drawn {
    /// A token; and, where it is the last one, why.
    Token(Said, Option<Finish>),
    /// The model ended its turn.
    End,
}

/// The answering side of a sequence: everything but the model.
pub(crate) struct Voice {
    options: Arc<AnswerOptions>,
    sampler: Sampler,
    decode: DecodeStream,
    stops: Stops,
    guides: Guides,
    thinking: Option<Thinking>,
    n_said: usize,
    /// How often each token was said, where that matters.
    said: HashMap<u32, u32>,
    /// The last tokens that were said, as many as the longest text has that is never said.
    recent: VecDeque<u32>,
    untold: Untold,
}

impl Voice {
    /// The `index`-th answer to a prompt: each draws with a seed of its own.
    pub fn new(options: Arc<AnswerOptions>, guides: Guides, index: usize) -> Self {
        let seed = options.sampler.seed.wrapping_add(index as u64);
        let sampler =
            Sampler::new(SamplerParams { seed, ..options.sampler }).with_breakers(options.breakers.clone());
        let stops = Stops::new(options.stop.clone(), options.keeps_stop);
        let decode = DecodeStream::default();
        let (thinking, said) = (options.thinking.clone(), HashMap::new());
        let (recent, untold) = (VecDeque::new(), Untold::default());
        Self { options, sampler, decode, stops, guides, thinking, n_said: 0, said, recent, untold }
    }

    /// Tokens said.
    pub fn n_said(&self) -> usize {
        self.n_said
    }

    /// Tokens of its thought.
    pub fn n_thought(&self) -> usize {
        self.thinking.as_ref().map_or(0, Thinking::n_said)
    }

    /// Whether a token can be drawn, after `patience` at the latest: what may be said next is worked out elsewhere.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        self.guides.holding().is_none_or(|guide| guide.is_ready(patience))
    }

    /// Draws what follows the last token that `session` has read.
    pub fn draw(&mut self, session: &mut Session) -> Result<Drawn, DrawError> {
        let options = Arc::clone(&self.options);
        let told = options.logprobs.filter(|_| !options.after_sampling);
        let before = told.map(|_| session.logits().map(<[f32]>::to_vec)).transpose()?;
        let token = self.choose(session, &options)?;
        let tokenizer = session.model().tokenizer()?;
        if tokenizer.is_eog(token) && !options.ignore_eos || options.stop_tokens.contains(&token) {
            return Ok(Drawn::End);
        }
        self.n_said += 1;
        let likelihood = options.logprobs.map(|n| match before {
            Some(logits) => likelihood(&logits, token, n),
            None => drawn(&self.sampler, token, n),
        });
        let text = match options.call_marks.contains(&token) {
            true => self.decode.flush() + tokenizer.token_text(token).unwrap_or_default(),
            false => self.decode.push(tokenizer, token),
        };
        if let Some(thinking) = &mut self.thinking {
            thinking.said(&text);
        }
        let is_thinking = self.thinking.as_ref().is_some_and(Thinking::is_going_on);
        let is_complete = self.guides.said(tokenizer, token, &text, is_thinking)?;
        self.untold.said(likelihood, text.len());
        let (text, stopped) = self.stops.push(&text);
        let likelihoods = self.untold.told(text.len(), stopped.is_some());
        let ended = stopped.map(Finish::Word).or(is_complete.then_some(Finish::Stop));
        let finish = ended.or((self.n_said >= options.max_tokens).then_some(Finish::Length));
        Ok(Drawn::Token(Said { token, text, likelihoods }, finish))
    }

    fn choose(&mut self, session: &mut Session, options: &AnswerOptions) -> Result<u32, DrawError> {
        // What a form asks for has no thoughts in it.
        let is_free = self.guides.holding().is_none();
        let must = self.thinking.as_ref().and_then(Thinking::must_say).filter(|_| is_free);
        if is_free && !options.changes_logits() && must.is_none() {
            return Ok(session.draw(&mut self.sampler)?);
        }
        let ends: Vec<u32> = match self.n_said < options.min_tokens && is_free {
            true => {
                session.model().tokenizer()?.eog_ids().iter().chain(&options.stop_tokens).copied().collect()
            }
            false => Vec::new(),
        };
        let (said, recent, mut guide) = (&self.said, &self.recent, self.guides.holding());
        let mut guided = Ok(());
        let token = session.draw_changed(&mut self.sampler, &mut |logits| {
            change(logits, options, said);
            rule_out(logits, &ends, &options.bad_words, recent);
            if let Some(guide) = &mut guide {
                guided = guide.mask(logits);
            }
            if let Some(must) = must {
                logits.fill(f32::NEG_INFINITY);
                logits[must as usize] = 0.0;
            }
        });
        guided?;
        let token = token?;
        *self.said.entry(token).or_default() += 1;
        self.recent.push_back(token);
        if self.recent.len() > options.bad_words.iter().map(Vec::len).max().unwrap_or(0) {
            self.recent.pop_front();
        }
        Ok(token)
    }

    /// What was held back, once it is certain that no more comes.
    pub fn rest(&mut self) -> Rest {
        let text = self.decode.flush();
        let (text, stopped) = self.stops.push(&text);
        let text = if stopped.is_some() { text } else { text + &self.stops.rest() };
        Rest { text, likelihoods: std::mem::take(&mut self.untold).likelihoods() }
    }
}

/// Likelihoods of tokens whose text may still be that of a text to stop at, which is no part of the answer.
#[derive(Default)]
struct Untold {
    /// Each with where the text of its token begins and ends, in bytes.
    likelihoods: VecDeque<(Range<usize>, Likelihood)>,
    n_said: usize,
    n_told: usize,
}

impl Untold {
    /// A token has been said whose text has so many bytes.
    fn said(&mut self, likelihood: Option<Likelihood>, n: usize) {
        let text = self.n_said..self.n_said + n;
        self.n_said = text.end;
        self.likelihoods.extend(likelihood.map(|likelihood| (text, likelihood)));
    }

    /// So many bytes more are certain: the likelihoods of their tokens. After the last ones none follow.
    fn told(&mut self, n: usize, are_last: bool) -> Vec<Likelihood> {
        self.n_told += n;
        let n_told = self.n_told;
        let is_told =
            |(text, _): &&(Range<usize>, Likelihood)| text.end <= n_told || (are_last && text.start < n_told);
        let n = self.likelihoods.iter().take_while(is_told).count();
        let told = self.likelihoods.drain(..n).map(|(_, likelihood)| likelihood).collect();
        if are_last {
            self.likelihoods.clear();
        }
        told
    }

    fn likelihoods(self) -> Vec<Likelihood> {
        self.likelihoods.into_iter().map(|(_, likelihood)| likelihood).collect()
    }
}

/// Rules out tokens that would end the answer, and those that would complete a text that is never said.
fn rule_out(logits: &mut [f32], ends: &[u32], bad_words: &[Vec<u32>], recent: &VecDeque<u32>) {
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

/// Biases and penalties.
fn change(logits: &mut [f32], options: &AnswerOptions, said: &HashMap<u32, u32>) {
    for &(token, bias) in &options.bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    for (&token, &times) in said {
        logits[token as usize] -= options.presence_penalty + times as f32 * options.frequency_penalty;
    }
}

/// How likely `token` and the `n` likeliest were, at temperature 1 and before anything was changed.
pub(crate) fn likelihood(logits: &[f32], token: u32, n: usize) -> Likelihood {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let logprob = |token: u32| {
        let logprob = f64::from(logits[token as usize] - largest) - sum.ln();
        // JSON knows no infinity.
        Logprob { token, logprob: logprob.max(-9999.0) as f32 }
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let n = n.min(ids.len());
    if n > 0 {
        ids.select_nth_unstable_by(n - 1, likelier);
    }
    ids.truncate(n);
    ids.sort_unstable_by(likelier);
    Likelihood { token: logprob(token), top: ids.into_iter().map(logprob).collect() }
}

/// How likely `token` and the `n` likeliest were when it was drawn.
fn drawn(sampler: &Sampler, token: u32, n: usize) -> Likelihood {
    let logprob = |(token, chance): (u32, f64)| Logprob { token, logprob: chance.ln() as f32 };
    let among = sampler.drawn_among().filter(|(_, chance)| *chance > 0.0);
    let own = sampler.drawn_among().find(|(id, _)| *id == token).unwrap_or((token, 1.0));
    Likelihood { token: logprob(own), top: among.take(n).map(logprob).collect() }
}

/// Finds texts to stop at in text that comes in pieces.
struct Stops {
    wanted: Vec<String>,
    /// Whether a text that was found is part of the answer.
    keeps: bool,
    /// What may be the beginning of one.
    held: String,
}

impl Stops {
    fn new(wanted: Vec<String>, keeps: bool) -> Self {
        Self { wanted, keeps, held: String::new() }
    }

    /// Those that are not empty, with their indices: an empty one is nowhere to be found.
    fn wanted(&self) -> impl Iterator<Item = (usize, &str)> {
        self.wanted.iter().map(String::as_str).enumerate().filter(|(_, text)| !text.is_empty())
    }

    /// Text that is certain now, and which text to stop at follows it.
    fn push(&mut self, text: &str) -> (String, Option<usize>) {
        if self.wanted.is_empty() {
            return (text.to_owned(), None);
        }
        self.held.push_str(text);
        let found = self.wanted().filter_map(|(index, wanted)| Some((self.held.find(wanted)?, index))).min();
        if let Some((at, index)) = found {
            self.held.truncate(if self.keeps { at + self.wanted[index].len() } else { at });
            return (std::mem::take(&mut self.held), Some(index));
        }
        let may_begin = |at: &usize| self.wanted().any(|(_, wanted)| wanted.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(self.held.len());
        let held = self.held.split_off(at);
        (std::mem::replace(&mut self.held, held), None)
    }

    fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The text of a token as a key, by which bytes that are no text can be told apart: as OpenAI writes them.
pub(crate) fn token_key(tokenizer: &Tokenizer, token: u32) -> String {
    let bytes = tokenizer.token_bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |key, byte| key + &format!("\\x{byte:02x}")),
    }
}

/// The text of a token, and its bytes.
pub(crate) fn token_text(tokenizer: &Tokenizer, token: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(token).to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes through, however the text is cut.
    fn through(wanted: &[&str], text: &str) -> Vec<(String, Option<usize>)> {
        let chars: Vec<char> = text.chars().collect();
        let mut ways = Vec::new();
        for size in 1..=chars.len().max(1) {
            let mut stops = Stops::new(wanted.iter().map(|&text| text.to_owned()).collect(), false);
            let (mut said, mut stopped) = (String::new(), None);
            for piece in chars.chunks(size) {
                let (text, hit) = stops.push(&piece.iter().collect::<String>());
                said += &text;
                stopped = hit;
                if hit.is_some() {
                    break;
                }
            }
            if stopped.is_none() {
                said += &stops.rest();
            }
            ways.push((said, stopped));
        }
        ways
    }

    #[test]
    fn a_stop_text_is_found_however_the_text_is_cut() {
        let cases: [(&[&str], &str, &str, Option<usize>); 7] = [
            (&[], "abc", "abc", None),
            (&["\n\n"], "one\ntwo\n\nthree", "one\ntwo", Some(0)),
            (&["END", "ENDE"], "aENDE", "a", Some(0)),
            (&["!", "xyz"], "xxyxyxyz!", "xxyxy", Some(1)),
            (&["xyz"], "xxyxy", "xxyxy", None),
            (&["", "ö"], "grün, schön", "grün, sch", Some(1)),
            (&[""], "abc", "abc", None),
        ];
        for (wanted, text, expected, stopped) in cases {
            for way in through(wanted, text) {
                assert_eq!(way, (expected.to_owned(), stopped), "{wanted:?} in {text:?}");
            }
        }
    }

    #[test]
    fn tokens_of_a_text_to_stop_at_have_no_likelihoods() {
        let of = |token| Likelihood { token: Logprob { token, logprob: 0.0 }, top: Vec::new() };
        let tokens = |told: Vec<Likelihood>| told.iter().map(|of| of.token.token).collect::<Vec<_>>();
        let (mut stops, mut untold) = (Stops::new(vec!["cd".to_owned()], false), Untold::default());
        let mut told = Vec::new();
        // The third may begin what is stopped at, the last does: its first letter is part of the answer.
        for (token, text) in [(0, "a"), (1, ""), (2, "c"), (3, "b"), (4, "bc"), (5, "d")] {
            untold.said(Some(of(token)), text.len());
            let (text, stopped) = stops.push(text);
            told.push(tokens(untold.told(text.len(), stopped.is_some())));
        }
        assert_eq!(told, [vec![0], vec![1], vec![], vec![2, 3], vec![], vec![4]]);
        assert!(untold.likelihoods().is_empty());
        let mut untold = Untold::default();
        untold.said(Some(of(7)), 1);
        assert_eq!(tokens(untold.told(0, false)), [0; 0]);
        assert_eq!(tokens(untold.likelihoods()), [7]);
    }

    #[test]
    fn tokens_that_are_no_text_have_keys_of_their_own() {
        let tokens = ["a", "Ã", "©"].map(str::to_owned).to_vec();
        let mut data = kvant::tokenizer::VocabData::new(kvant::tokenizer::TokenizerModel::Gpt2, tokens);
        data.merges = Some(vec![]);
        let tokenizer = Tokenizer::new(data).unwrap();
        let keys = [0, 1, 2].map(|token| token_key(&tokenizer, token));
        assert_eq!(keys, ["a", "bytes:\\xc3", "bytes:\\xa9"]);
    }

    #[test]
    fn probabilities_are_those_of_the_logits() {
        let logits = [1.0f32, 3.0, f32::NEG_INFINITY, 3.0];
        let found = likelihood(&logits, 0, 3);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let want = |logit: f64| (logit - sum.ln()) as f32;
        assert!((found.token.logprob - want(1.0)).abs() < 1e-6);
        let tokens: Vec<u32> = found.top.iter().map(|top| top.token).collect();
        assert_eq!(tokens, [1, 3, 0]);
        assert!((found.top[0].logprob - want(3.0)).abs() < 1e-6);
        assert_eq!(likelihood(&logits, 2, 9).token.logprob, -9999.0);
        assert_eq!(likelihood(&logits, 2, 0).top, []);
    }
}
