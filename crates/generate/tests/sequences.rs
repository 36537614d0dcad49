//! Sequences of random logits, without a model: constraints, stop strings across tokens, limits and
//! drafts at any step, alone and in batches that select candidates for all sequences first.

use std::convert::Infallible;
use std::sync::Arc;

use kvant_codec::candidate::{Candidate, top_k};
use kvant_codec::random::Random;
use kvant_generate::constraint::Constraints;
use kvant_generate::decoding::{DecodingOptions, Finish, SampleResult, SamplingError, SequenceDecoder};
use kvant_generate::sampler::{Sampler, SamplerParams};
use kvant_generate::{DraftCounts, LogitSource, Sequence};
use kvant_text::tokenizer::{Tokenizer, TokenizerModel, VocabData};

/// A model whose logits are a function of the last two tokens: its texts repeat themselves.
struct Scripted {
    seed: u64,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// The most probable tokens, once they have been selected.
    candidates: Option<Vec<Candidate>>,
    n_sampled_from_candidates: usize,
}

impl Scripted {
    fn new(seed: u64, n_vocab: usize) -> Self {
        let (tokens, logits) = (Vec::new(), vec![0.0; n_vocab]);
        Self { seed, tokens, logits, candidates: None, n_sampled_from_candidates: 0 }
    }

    /// Selects the `k` most probable tokens.
    fn select(&mut self, k: usize) {
        top_k(&self.logits, k, self.candidates.insert(Vec::new()));
    }

    fn feed(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        let last =
            self.tokens.iter().rev().take(2).fold(self.seed, |hash, &token| hash * 131 + u64::from(token));
        let mut random = Random::new(last);
        self.logits.fill_with(|| (random.bits() % 1000) as f32 / 100.0);
    }
}

impl LogitSource for Scripted {
    type Error = Infallible;

    fn logits(&mut self) -> Result<&[f32], Infallible> {
        Ok(&self.logits)
    }

    fn sample(&mut self, sampler: &mut Sampler) -> Result<u32, Infallible> {
        Ok(match self.candidates.take() {
            Some(candidates) => {
                self.n_sampled_from_candidates += 1;
                sampler.sample_likeliest(&candidates, &self.tokens).unwrap()
            }
            None => sampler.sample(&self.logits, &self.tokens).unwrap(),
        })
    }

    fn sample_with(
        &mut self,
        sampler: &mut Sampler,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<u32, Infallible> {
        assert_eq!(self.candidates, None, "candidates of logits that are then changed");
        let mut logits = self.logits.clone();
        change(&mut logits);
        Ok(sampler.sample(&logits, &self.tokens).unwrap())
    }
}

/// Letters, pairs of letters and an end.
fn tokenizer() -> Tokenizer {
    let letters = || "abcdefgh".chars();
    let pairs = letters().flat_map(|a| letters().take(3).map(move |b| format!("{a}{b}")));
    let tokens: Vec<String> = letters()
        .map(String::from)
        .chain(pairs)
        .chain(["{", "}", "\"", ":", "</s>"].map(String::from))
        .collect();
    let mut data = VocabData::new(TokenizerModel::Gpt2, tokens);
    data.merges = Some(Vec::new());
    data.special.eos = Some(data.tokens.len() as u32 - 1);
    Tokenizer::new(data).unwrap()
}

#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    text: String,
    finish: Option<Finish>,
}

/// A sequence with its model.
struct Run<'t> {
    tokenizer: &'t Tokenizer,
    model: Scripted,
    sequence: Sequence,
    draft_max: usize,
    drafted: Vec<u32>,
    text: String,
    finish: Option<Finish>,
}

impl<'t> Run<'t> {
    fn new(
        tokenizer: &'t Tokenizer,
        seed: u64,
        options: &DecodingOptions,
        constraints: Constraints,
        draft_max: usize,
    ) -> Self {
        let prompt = vec![1, 2, 3, 1, 2, 3, 1];
        let mut model = Scripted::new(seed, tokenizer.n_vocab());
        model.feed(&prompt);
        let decoder = SequenceDecoder::new(Arc::new(options.clone()), constraints, 0);
        let sequence = Sequence::new(prompt, decoder);
        Self { tokenizer, model, sequence, draft_max, drafted: Vec::new(), text: String::new(), finish: None }
    }

    fn has_ended(&self) -> bool {
        self.finish.is_some() || self.sequence.tokens().len() >= 300
    }

    /// Feeds the last token, with at most `draft_max` draft tokens behind it. As in an engine, a
    /// draft token is accepted when the token sampled equals it.
    fn feed(&mut self) {
        let Self { model, sequence, drafted, .. } = self;
        let Some(&token) = sequence.tokens().get(model.tokens.len()) else { return };
        if drafted.first() == Some(&token) {
            drafted.remove(0);
            sequence.record_step(true, 0);
        } else {
            let max = sequence.max_draft_tokens(self.draft_max);
            assert!(max < sequence.decoder().n_left().max(1), "drafts that the answer has no room for");
            *drafted = sequence.drafting().1.draft(&model.tokens, token, max).to_vec();
            sequence.record_step(false, drafted.len());
        }
        model.feed(&[token]);
    }

    /// Selects the candidates that the next sample needs, if it needs no more.
    fn select(&mut self) {
        if let Some(k) = self.sequence.n_candidates() {
            self.model.select(k);
        }
    }

    fn sample(&mut self) {
        match self.sequence.sample(&mut self.model, self.tokenizer) {
            Ok(SampleResult::Token(output, end)) => {
                self.text += &output.text;
                self.finish = end;
            }
            Ok(SampleResult::End) => self.finish = Some(Finish::Stop),
            Err(SamplingError::Source(never)) => match never {},
            Err(SamplingError::Constraint(error)) => panic!("{error}"),
        }
    }

    fn into_answer(mut self) -> Answer {
        self.text += &self.sequence.decoder_mut().finish().text;
        Answer { tokens: self.sequence.tokens().to_vec(), text: self.text, finish: self.finish }
    }
}

/// Runs a sequence to its end, with at most `draft_max` draft tokens behind each token.
fn run(
    tokenizer: &Tokenizer,
    seed: u64,
    options: &DecodingOptions,
    constraints: Constraints,
    draft_max: usize,
) -> (Answer, DraftCounts) {
    let mut run = Run::new(tokenizer, seed, options, constraints, draft_max);
    while !run.has_ended() {
        run.feed();
        run.sample();
    }
    let drafts = run.sequence.drafts();
    (run.into_answer(), drafts)
}

/// Returns random options: sampler, stop strings that begin within tokens, limits, changes of
/// logits.
fn options(random: &mut Random) -> DecodingOptions {
    let mut below = |n: u64| random.bits() % n;
    let sampler = match below(2) {
        0 => SamplerParams::greedy(),
        _ => SamplerParams { seed: below(1000), temperature: 0.3, ..SamplerParams::default() },
    };
    let sampler = SamplerParams {
        top_k: [0, 2, 5, 40][below(4) as usize],
        repeat_penalty: if below(3) == 0 { 1.2 } else { 1.0 },
        repeat_last_n: below(9) as usize,
        ..sampler
    };
    let letter = |n: u64| char::from(b'a' + n as u8);
    let stop = (0..below(3)).map(|_| (0..2).map(|_| letter(below(8))).collect()).collect();
    DecodingOptions {
        sampler,
        max_tokens: 1 + below(120) as usize,
        stop,
        include_stop: below(2) == 0,
        min_tokens: if below(2) == 0 { below(8) as usize } else { 0 },
        bias: (0..below(2)).map(|_| (below(20) as u32, 3.0)).collect(),
        presence_penalty: if below(4) == 0 { 0.5 } else { 0.0 },
        ignore_eos: below(2) == 0,
        ..DecodingOptions::default()
    }
}

#[test]
fn drafts_change_no_token_text_or_finish_reason() {
    let tokenizer = tokenizer();
    let mut random = Random::new(5);
    let (mut n_accepted, mut finishes) = (0, [0; 3]);
    for seed in 0..300 {
        let options = options(&mut random);
        let (plain, none) = run(&tokenizer, seed, &options, Constraints::default(), 0);
        assert_eq!(none, DraftCounts::default());
        for draft_max in [1, 3, 7] {
            let (drafted, counts) = run(&tokenizer, seed, &options, Constraints::default(), draft_max);
            assert_eq!(drafted, plain, "{options:?}");
            assert!(counts.n_accepted <= counts.n_verified);
            n_accepted += counts.n_accepted;
        }
        match plain.finish.unwrap() {
            Finish::Stop => finishes[0] += 1,
            Finish::Length => finishes[1] += 1,
            Finish::Word(index) => {
                finishes[2] += 1;
                assert_eq!(
                    plain.text.ends_with(&options.stop[index]),
                    options.include_stop,
                    "{}",
                    plain.text
                );
            }
        }
        // A stop string occurs at the end alone, if at all.
        for word in &options.stop {
            let at = plain.text.find(word.as_str());
            assert!(at.is_none_or(|at| options.include_stop && at + word.len() == plain.text.len()));
        }
    }
    assert!(n_accepted > 1000 && finishes.iter().all(|&n| n > 10), "{n_accepted}, {finishes:?}");
}

/// 300 batches: sequences join and end at any step, and each step samples them in another order.
#[test]
fn candidates_selected_for_a_whole_batch_change_no_answer() {
    let tokenizer = tokenizer();
    let mut random = Random::new(7);
    let mut n_from_candidates = 0;
    for batch in 0..300 {
        let cases: Vec<_> =
            (0..1 + random.bits() % 6).map(|i| (100 * batch + i, options(&mut random))).collect();
        let started =
            |(seed, options): &(u64, _)| Run::new(&tokenizer, *seed, options, Constraints::default(), 3);
        let mut runs: Vec<_> = cases.iter().map(started).collect();
        while runs.iter().any(|run| !run.has_ended()) {
            let joins = |run: &&mut Run<'_>| !run.has_ended() && !random.bits().is_multiple_of(4);
            let mut step: Vec<_> = runs.iter_mut().filter(joins).collect();
            step.iter_mut().for_each(|run| run.feed());
            step.iter_mut().for_each(|run| run.select());
            while !step.is_empty() {
                step.swap_remove((random.bits() % step.len() as u64) as usize).sample();
            }
        }
        for (run, (seed, options)) in runs.into_iter().zip(&cases) {
            n_from_candidates += run.model.n_sampled_from_candidates;
            let (alone, _) = self::run(&tokenizer, *seed, options, Constraints::default(), 0);
            assert_eq!(run.into_answer(), alone, "batch {batch}: {options:?}");
        }
    }
    assert!(n_from_candidates > 1000, "{n_from_candidates}");
}

#[test]
#[cfg(feature = "constraint")]
fn constrained_texts_match_their_format_with_any_drafts() {
    use kvant_generate::constraint::{ConstraintCompiler, OutputFormat};

    let tokenizer = tokenizer();
    let compiler = ConstraintCompiler::new().unwrap();
    let mut random = Random::new(6);
    for (pattern, is_match) in [
        ("(ab|cd){3}", &(|text: &str| text.len() == 6) as &dyn Fn(&str) -> bool),
        ("\\{\"[a-h]{1,4}\":\"[a-h]{2}\"\\}", &|text| text.starts_with("{\"") && text.ends_with("\"}")),
    ] {
        let constraint = compiler.constraint(&tokenizer, &OutputFormat::Regex(pattern.to_owned())).unwrap();
        for seed in 0..40 {
            let free = options(&mut random);
            let options = DecodingOptions { stop: Vec::new(), max_tokens: 60, ignore_eos: false, ..free };
            let forked = || Constraints::now(constraint.fork().unwrap());
            let (plain, _) = run(&tokenizer, seed, &options, forked(), 0);
            assert!(is_match(&plain.text), "{pattern}: {}", plain.text);
            assert_eq!(plain.finish, Some(Finish::Stop), "{pattern}: {}", plain.text);
            assert_eq!(run(&tokenizer, seed, &options, forked(), 7).0, plain);
            // They need whole rows, and no candidates.
            assert_eq!(Run::new(&tokenizer, seed, &options, forked(), 0).sequence.n_candidates(), None);
        }
    }
}
