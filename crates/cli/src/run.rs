//! `kvant run`: one prompt, one answer, one summary line.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kvant::{
    CancelFlag, Error, GenerateOptions, Generation, KvUse, Message, Model, Needs, Session, Special, Stats,
    TemplateError,
};
use serde_json::json;

use crate::args::{CacheArgs, ModelArgs, SamplingArgs, check_target, read_text};
use crate::failure::Failure;
use crate::template::TemplateArgs;
use crate::{console, output, progress};

/// Arguments of `kvant run`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvant run -p \"What is the capital of France?\" -ctk turbo3 -ctv turbo3 --temp 0"
)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// The prompt
    #[arg(short, long, value_name = "TEXT", env = "KVANT_PROMPT", conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from a file; - for stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Continue the text as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// With --raw: special tokens written in the text are just text
    #[arg(long, requires = "raw")]
    no_special: bool,
    #[command(flatten)]
    template: TemplateArgs,
    /// System message, before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system_prompt: Option<String>,
    /// Tokens to generate at most; -1: until the model stops or the context is full
    #[arg(short = 'n', long, value_name = "N", env = "KVANT_PREDICT", default_value_t = -1, allow_negative_numbers = true)]
    predict: i64,
    /// Go on after the model has ended its turn
    #[arg(long)]
    ignore_eos: bool,
    /// Keep the context in this file: read what fits the prompt, write all at the end
    #[arg(long, value_name = "FILE")]
    prompt_cache: Option<PathBuf>,
    /// Print one JSON object instead of text and summary
    #[arg(long)]
    json: bool,
    /// No progress and no summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn run(args: RunArgs) -> Result<(), Failure> {
    check_target(args.prompt_cache.as_deref())?;
    let text = args.text()?;
    let options = args.generate_options()?;
    let session_options = args.cache.session_options()?;
    let quiet = args.quiet || args.json;
    let needs = if args.raw { Needs::Tokenizer } else { Needs::NoBadTemplate };
    let model = args.model.open_for(quiet, needs, args.template.source()?)?;
    let mut session = model.session(session_options)?;
    let prompt = args.tokens(&session, &text)?;
    if let Some(path) = args.prompt_cache.as_deref().filter(|path| path.exists()) {
        session.load_prefix(path, &prompt)?;
    }
    let cancel = CancelFlag::default();
    let bar = progress::bar("reading", prompt.len() as u64, quiet || prompt.len() < 512);
    let mut generation =
        session.generate_with(&prompt, options, &cancel, &mut |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();

    let text = print_tokens(&mut generation, args.json)?;
    let stats = generation.stats();
    if args.json {
        let object = json_result(&model, &session, &text, &stats);
        console::print_json(&object)?;
    } else if !args.quiet {
        console::say(summary(&model, &session.kv(), &stats));
    }
    if let Some(path) = &args.prompt_cache {
        session.save(path)?;
    }
    Ok(())
}

impl RunArgs {
    fn text(&self) -> Result<String, Failure> {
        let text = match (&self.prompt, &self.file) {
            (Some(text), _) => text.clone(),
            (None, Some(path)) => read_text(path)?,
            (None, None) => {
                return Err(Failure::Usage("no prompt: give one with -p TEXT or -f FILE".to_owned()));
            }
        };
        if text.is_empty() {
            return Err(Failure::Usage("the prompt is empty".to_owned()));
        }
        Ok(text)
    }

    fn generate_options(&self) -> Result<GenerateOptions, Failure> {
        let max_tokens = match self.predict {
            -1 => None,
            n => Some(
                usize::try_from(n)
                    .map_err(|_| Failure::Usage(format!("-n: expected -1 or more, got {n}")))?,
            ),
        };
        Ok(GenerateOptions { max_tokens, sampler: self.sampling.params()?, ignore_eos: self.ignore_eos })
    }

    /// The prompt in the model's chat format, when it has one; else as it is.
    fn tokens(&self, session: &Session, text: &str) -> Result<Vec<u32>, Failure> {
        if self.raw {
            let special = if self.no_special { Special::AsText } else { Special::Parse };
            return Ok(session.text_prompt(text, special)?);
        }
        if let Err(missing @ Error::Template(TemplateError::Missing)) = session.model().chat_template() {
            if self.system_prompt.is_some() {
                return Err(missing.into());
            }
            console::say("note: this model has no chat template, so the text is continued as it is");
            return Ok(session.text_prompt(text, Special::AsText)?);
        }
        let system = self.system_prompt.as_deref().map(Message::system);
        let messages: Vec<Message> = system.into_iter().chain([Message::user(text)]).collect();
        Ok(session.chat_prompt(&messages)?)
    }
}

/// Prints tokens as they come (unless `silent`) and returns their text.
pub fn print_tokens(generation: &mut Generation<'_>, silent: bool) -> Result<String, Failure> {
    let mut out = console::results();
    let mut text = String::new();
    let mut emit = |piece: &str| {
        text.push_str(piece);
        if silent { Ok(()) } else { out.write_all(piece.as_bytes()).and_then(|()| out.flush()) }
    };
    for token in generation.by_ref() {
        emit(&token?.text)?;
    }
    emit(&generation.finish_text())?;
    if !silent {
        writeln!(out)?;
    }
    Ok(text)
}

/// The summary line: what ran, how fast, and what the cache took.
pub fn summary(model: &Model, kv: &KvUse, stats: &Stats) -> String {
    let device = model.device();
    let ratio = kv.bytes_f16 as f64 / kv.bytes.max(1) as f64;
    let notes: String = kv.notes.iter().map(|note| format!(" | {note}")).collect();
    format!(
        "{} ({}, {} {}) | prompt {} tok, {:.1} tok/s | decode {} tok, {:.1} tok/s | KV {}/{}: {} tok in {}, f16 {} ({ratio:.2}x){notes}",
        device.name,
        device.kernels,
        device.n_threads,
        device.thread_unit,
        stats.n_prompt,
        stats.prompt_tps(),
        stats.n_gen,
        stats.decode_tps(),
        kv.type_k,
        kv.type_v,
        kv.tokens,
        output::bytes(kv.bytes),
        output::bytes(kv.bytes_f16),
    )
}

fn json_result(model: &Model, session: &Session, text: &str, stats: &Stats) -> serde_json::Value {
    let (device, kv) = (model.device(), session.kv());
    json!({
        "text": text,
        "n_prompt": stats.n_prompt,
        "n_gen": stats.n_gen,
        "prompt_tps": stats.prompt_tps(),
        "decode_tps": stats.decode_tps(),
        "device": device.name,
        "kernels": device.kernels,
        "type_k": kv.type_k,
        "type_v": kv.type_v,
        "kv": { "tokens": kv.tokens, "bytes": kv.bytes, "bytes_f16": kv.bytes_f16, "notes": kv.notes },
        "finish": stats.finish.map(kvant::Finish::name),
    })
}
