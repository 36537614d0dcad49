//! Sequences of random logits, without a model: constraints, stop strings across tokens, limits and
//! drafts at any step.

use std::convert::Infallible;
use std::sync::Arc;

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
}

impl Scripted {
    fn new(seed: u64, n_vocab: usize) -> Self {
        Self { seed, tokens: Vec::new(), logits: vec![0.0; n_vocab] }
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
        Ok(sampler.sample(&self.logits, &self.tokens).unwrap())
    }

    fn sample_with(
        &mut self,
        sampler: &mut Sampler,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<u32, Infallible> {
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

/// Runs a sequence to its end, with at most `draft_max` draft tokens behind each token. As in an
/// engine, a draft token is accepted when the token sampled equals it.
fn run(
    tokenizer: &Tokenizer,
    seed: u64,
    options: &DecodingOptions,
    constraints: Constraints,
    draft_max: usize,
) -> (Answer, DraftCounts) {
    let prompt = vec![1, 2, 3, 1, 2, 3, 1];
    let mut model = Scripted::new(seed, tokenizer.n_vocab());
    model.feed(&prompt);
    let mut sequence = Sequence::new(prompt, SequenceDecoder::new(Arc::new(options.clone()), constraints, 0));
    let (mut text, mut drafted, mut finish) = (String::new(), Vec::new(), None);
    while finish.is_none() && sequence.tokens().len() < 300 {
        if let Some(&token) = sequence.tokens().get(model.tokens.len()) {
            if drafted.first() == Some(&token) {
                drafted.remove(0);
                sequence.record_step(true, 0);
            } else {
                let max = sequence.max_draft_tokens(draft_max);
                assert!(max < sequence.decoder().n_left().max(1), "drafts that the answer has no room for");
                drafted = sequence.drafting().1.draft(&model.tokens, token, max).to_vec();
                sequence.record_step(false, drafted.len());
            }
            model.feed(&[token]);
        }
        match sequence.sample(&mut model, tokenizer) {
            Ok(SampleResult::Token(output, end)) => {
                text += &output.text;
                finish = end;
            }
            Ok(SampleResult::End) => finish = Some(Finish::Stop),
            Err(SamplingError::Source(never)) => match never {},
            Err(SamplingError::Constraint(error)) => panic!("{error}"),
        }
    }
    text += &sequence.decoder_mut().finish().text;
    let answer = Answer { tokens: sequence.tokens().to_vec(), text, finish };
    (answer, sequence.drafts())
}

/// Returns random options: sampler, stop strings that begin within tokens, limits.
fn options(random: &mut Random) -> DecodingOptions {
    let mut below = |n: u64| random.bits() % n;
    let sampler = match below(2) {
        0 => SamplerParams::greedy(),
        _ => SamplerParams { seed: below(1000), temperature: 0.3, ..SamplerParams::default() },
    };
    let letter = |n: u64| char::from(b'a' + n as u8);
    let stop = (0..below(3)).map(|_| (0..2).map(|_| letter(below(8))).collect()).collect();
    DecodingOptions {
        sampler,
        max_tokens: 1 + below(120) as usize,
        stop,
        include_stop: below(2) == 0,
        min_tokens: below(8) as usize,
        bias: vec![(below(20) as u32, 3.0)],
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
        }
    }
}
