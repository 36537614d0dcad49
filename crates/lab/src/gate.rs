//! The quality gate: what the bundled model says with the candidate's kernels.
//!
//! The candidate's distributions over a text, token by token and in steps of prefill, may diverge
//! from base's by [`MAX_KLD`] at most; and it answers ten questions, whose answers are known.

use kvant::{Message, Model};

use crate::case::{self, Case};
use crate::exam::{Exam, MAX_KLD, bundled, divergence, exam};
use crate::lane::{Contenders, failure_of};
use crate::race::Side;
use crate::subject::{Settings, answers_of};
use crate::verdict::Fault;
use crate::wire::{to_bytes, to_values};

/// The ten questions of the model's card, and a word of each answer.
pub const QUESTIONS: [(&str, &str); 10] = [
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Peru?", "Lima"),
    ("Oslo is the capital of which country?", "Norway"),
    ("What is the opposite of hot?", "cold"),
    ("What color is the sky?", "blue"),
    ("Which day comes after Monday?", "Tuesday"),
    ("Which month comes before March?", "February"),
    ("How do you spell river?", "R-I-V-E-R"),
    ("Count to five.", "one, two, three, four, five."),
];
/// Most tokens of an answer.
const MAX_ANSWER: usize = 24;
/// Tokens of text that are compared, and the steps of prefill.
const N_TEXT: usize = 256;
const STEPS: [usize; 2] = [1, 32];

/// Judges what the bundled model says on both sides.
///
/// # Errors
///
/// [`Fault::Wrong`] for the candidate, [`Fault::Broken`] for base.
pub fn check(
    contenders: &mut Contenders<'_>,
    target: &case::Model,
    settings: &Settings,
) -> Result<(), Fault> {
    let bundled = bundled().map_err(Fault::Broken)?;
    for rows in STEPS {
        let case = case::Model { name: "bundled".to_owned(), depth: 0, rows, ..target.clone() };
        check_divergence(contenders, &Case::Model(case), settings, bundled.n_vocab())?;
    }
    for (question, answer) in QUESTIONS {
        for side in [Side::Base, Side::Candidate] {
            let said = answer_to(contenders, side, question, target, settings, &bundled)?;
            if !said.contains(answer) {
                let failed = format!("'{question}' is answered '{}', not with {answer}", said.trim());
                return Err(match side {
                    Side::Candidate => Fault::Wrong(failed),
                    Side::Base => Fault::Broken(format!("base: {failed}")),
                });
            }
        }
    }
    Ok(())
}

fn check_divergence(
    contenders: &mut Contenders<'_>,
    case: &Case,
    settings: &Settings,
    n_vocab: usize,
) -> Result<(), Fault> {
    let Case::Model(case::Model { rows, .. }) = case else { unreachable!("the gate asks models") };
    let exam: Box<dyn Exam> = exam(case, 0).map_err(Fault::Broken)?;
    let inputs = exam.inputs(N_TEXT / rows, &mut kvant_codec::random::Random::new(1));
    let [candidate, base] = [Side::Candidate, Side::Base].map(|side| {
        let mut subject = contenders.start(side, case, exam.state(), settings)?;
        let failed = failure_of(side, case);
        let answers = answers_of(&mut *subject, &inputs).map_err(&failed)?;
        let n = n_vocab * N_TEXT / rows;
        let logits = to_values(&answers).filter(|logits| logits.len() == n);
        logits.ok_or_else(|| failed(format!("{} bytes of logits, want {}", answers.len(), 4 * n)))
    });
    let (candidate, base) = (candidate?, base?);
    let steps = base.chunks_exact(n_vocab).zip(candidate.chunks_exact(n_vocab));
    let mean = steps.map(|(base, got)| divergence(base, got)).sum::<f64>() / (N_TEXT / rows) as f64;
    match mean <= MAX_KLD {
        true => Ok(()),
        false => Err(Fault::Wrong(format!("{case}: {mean:.5} nats from base on a text, at most {MAX_KLD}"))),
    }
}

/// Returns the greedy answer of one side.
fn answer_to(
    contenders: &mut Contenders<'_>,
    side: Side,
    question: &str,
    target: &case::Model,
    settings: &Settings,
    bundled: &Model,
) -> Result<String, Fault> {
    let broken = |error: kvant::Error| Fault::Broken(error.to_string());
    let prompt = bundled.chat_prompt(&[Message::user(question)]).map_err(broken)?;
    let tokenizer = bundled.tokenizer().map_err(broken)?;
    let (&last, before) = prompt.split_last().expect("a prompt has tokens");
    let case = case::Model { name: "bundled".to_owned(), depth: before.len(), rows: 1, ..target.clone() };
    let case = Case::Model(case);
    let failed = failure_of(side, &case);
    let state: Vec<f32> = before.iter().map(|&token| token as f32).collect();
    let mut subject = contenders.start(side, &case, &to_bytes(&state), settings)?;
    let mut tokens = vec![last];
    let mut said = Vec::new();
    while tokens.len() <= MAX_ANSWER {
        let inputs: Vec<f32> = tokens.iter().map(|&token| token as f32).collect();
        let answers = answers_of(&mut *subject, &inputs).map_err(&failed)?;
        let logits = to_values(&answers).unwrap_or_default();
        let last = logits.len().checked_sub(bundled.n_vocab()).map(|from| &logits[from..]);
        let last = last.ok_or_else(|| failed(format!("{} logits", logits.len())))?;
        let next = (0..).zip(last).max_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(token, _)| token);
        if tokenizer.is_eog(next) {
            break;
        }
        tokens.push(next);
        said.extend_from_slice(tokenizer.token_bytes(next));
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}
