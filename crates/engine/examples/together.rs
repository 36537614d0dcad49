//! Several conversations in one batch: each pass over the weights decodes a token for each.
//!
//! `cargo run --release -p kvant --example together -- [MODEL.gguf]`

use std::time::Instant;

use kvant::{BatchItem, KvOptions, Message, Model, Sampler, SamplerParams, Session, SessionOptions};

const QUESTIONS: [&str; 4] = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the capital of Italy?",
    "What is the capital of Egypt?",
];
const MAX_TOKENS: usize = 32;

fn main() -> Result<(), kvant::Error> {
    let model = match std::env::args().nth(1) {
        Some(path) => Model::open(path)?,
        None => Model::bundled(Default::default())?,
    };
    let tokenizer = model.tokenizer()?;
    let mut sessions =
        QUESTIONS.iter().map(|question| start_session(&model, question)).collect::<Result<Vec<_>, _>>()?;
    let mut sampler = Sampler::new(SamplerParams::greedy());
    let mut answers = vec![Vec::new(); sessions.len()];

    let (started, mut n_tokens) = (Instant::now(), 0);
    for _ in 0..MAX_TOKENS {
        // Unfinished conversations, each with its next token.
        let (mut open, mut tokens) = (Vec::new(), Vec::new());
        for (session, answer) in sessions.iter_mut().zip(&mut answers) {
            let is_over = answer.last().is_some_and(|&token| tokenizer.is_eog(token));
            if is_over {
                continue;
            }
            let token = session.sample(&mut sampler)?;
            answer.push(token);
            tokens.push([token]);
            open.push(session);
        }
        if open.is_empty() {
            break;
        }
        n_tokens += tokens.len();
        let feeds = open.into_iter().zip(&tokens).map(|(session, tokens)| BatchItem {
            n_candidates: sampler.n_candidates(session.tokens().len() + 1),
            ..BatchItem::new(session, tokens)
        });
        Session::step_batch(&mut feeds.collect::<Vec<_>>())?;
    }
    let speed = n_tokens as f64 / started.elapsed().as_secs_f64();
    for (question, answer) in QUESTIONS.iter().zip(&answers) {
        println!("{question} {}", tokenizer.decode(answer));
    }
    println!("{n_tokens} tokens at {speed:.0} per second");
    Ok(())
}

/// Creates a session and prefills a question.
fn start_session(model: &Model, question: &str) -> Result<Session, kvant::Error> {
    let kv = KvOptions::symmetric("turbo3".parse()?);
    let mut session = model.session(SessionOptions { n_ctx: Some(512), kv })?;
    session.feed(&model.chat_prompt(&[Message::user(question)])?, &mut |_| true)?;
    Ok(session)
}
