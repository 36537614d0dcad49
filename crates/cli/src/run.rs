//! `kvant run`: one prompt, one answer, one summary line.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::exit;

use clap::Args;
use kvant::gguf::printable;
use kvant::{
    CancelFlag, Error, Finish, GenerateOptions, Generation, KvUse, Message, Model, Needs, SamplerParams,
    Session, Special, Stats, TOKENS_PER_BLOCK, TemplateError,
};
use serde_json::json;

use crate::args::{
    CacheArgs, DecodeArgs, ModelArgs, Resolved, SamplingArgs, Wanted, check_target, from_env, read_prompt,
};
use crate::failure::Failure;
use crate::interrupt::{INTERRUPTED, Interrupt};
use crate::sight::{Sight, SightArgs, look};
use crate::template::TemplateArgs;
use crate::{console, log, output, progress};

/// Arguments of `kvant run`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvant run \"What is the capital of France?\" -ctk turbo3 -ctv turbo3 --temp 0"
)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// The prompt, in any number of words; without one, what is piped in
    #[arg(value_name = "PROMPT")]
    words: Vec<String>,
    /// The prompt [env: KVANT_PROMPT]
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file, without the line break at its end; - for stdin. Goes behind the prompt of -p
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Continue the text as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// With --raw: special tokens written in the text are just text
    #[arg(long, requires = "raw")]
    no_special: bool,
    /// Picture to show before the prompt, PNG, JPEG, WebP, GIF or BMP; may be given several times, or as a comma list
    #[arg(long, value_name = "FILE", value_delimiter = ',', conflicts_with_all = ["raw", "prompt_cache"])]
    image: Vec<PathBuf>,
    #[command(flatten)]
    sight: SightArgs,
    #[command(flatten)]
    template: TemplateArgs,
    /// System message, before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system_prompt: Option<String>,
    #[command(flatten)]
    decode: DecodeArgs,
    /// Go on after the model has ended its turn
    #[arg(long)]
    ignore_eos: bool,
    /// Keep the context in this file: read what fits the prompt, write all at the end, also when Ctrl-C ends the answer
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
pub fn run(mut args: RunArgs) -> Result<(), Failure> {
    args.model.place.leave_prompt(&mut args.words)?;
    check_target(args.prompt_cache.as_deref())?;
    let text = args.text()?;
    let mut options = args.generate_options()?;
    let session_options = args.cache.session_options()?;
    let quiet = args.quiet || args.json;
    let needs = if args.raw { Needs::Tokenizer } else { Needs::NoBadTemplate };
    // Who shows nothing needs nobody who looks.
    let sight = (!args.image.is_empty()).then_some(Sight { args: &args.sight, is_needed: true });
    let (chat_template, draft) = (args.template.source()?, Some(&args.decode.draft));
    let model = args.model.open_for(quiet, Wanted { needs, chat_template, draft, sight })?;
    let (sampler, recommended) = args.sampling.params_for(&model)?;
    options.sampler = sampler;
    let Resolved { options: session_options, auto } = args.cache.resolve(session_options, &model)?;
    let mut session = model.session(session_options)?;
    args.cache.note_length(&session);
    // By now what another program writes has come.
    args.note_pipe();
    let prompt = args.tokens(&session, &text, quiet)?;
    if let Some(path) = args.prompt_cache.as_deref().filter(|path| path.exists()) {
        session.load_prefix(path, &prompt)?;
    }
    // Without a context to keep, Ctrl-C ends the program as ever.
    let interrupt = args.prompt_cache.as_ref().map(|_| Interrupt::listen(false)).transpose()?;
    let cancel = interrupt.as_ref().map_or_else(CancelFlag::default, |interrupt| interrupt.cancel.clone());
    let answered = match &interrupt {
        Some(interrupt) => interrupt.during(|| args.answer(&mut session, &prompt, options, &cancel, quiet)),
        None => args.answer(&mut session, &prompt, options, &cancel, quiet),
    };
    let (answer, stats) = match answered {
        // It has come while the prompt was read.
        Err(_) if cancel.is_cancelled() => return args.leave(&session),
        answered => answered?,
    };
    if stats.finish == Some(Finish::ContextFull) && !quiet {
        log::note(format!("the context of {} tokens is full (raise it with -c)", session.n_ctx()));
    }
    if args.json {
        let object = json_result(&model, &session, &answer.text, &stats, &sampler);
        console::print_json(&object)?;
    } else if !args.quiet {
        let (name, sampler) = (&args.model.label(), &sampler);
        let (auto, recommended, kv) = (auto.as_deref(), recommended.as_deref(), &session.kv());
        console::say(Summary { name, model: &model, kv, auto, stats: &stats, sampler, recommended });
    }
    if cancel.is_cancelled() {
        return args.leave(&session);
    }
    args.save(&session)
}

impl RunArgs {
    /// Prints the answer, unless it is to be told as JSON, and returns it.
    fn answer(
        &self,
        session: &mut Session,
        prompt: &[u32],
        options: GenerateOptions,
        cancel: &CancelFlag,
        quiet: bool,
    ) -> Result<(Answer, Stats), Failure> {
        let bar = progress::bar("reading", prompt.len() as u64, quiet || prompt.len() < 512);
        let mut generation =
            session.generate_with(prompt, options, cancel, &mut |done| bar.set_position(done as u64))?;
        bar.finish_and_clear();
        let mut answer = Answer::default();
        let (mut out, is_obeyed) = (console::results(), console::is_obeyed());
        take_tokens(&mut generation, &mut answer, &mut |piece| match self.json {
            true => Ok(()),
            false => out.write_all(console::spoken(piece, is_obeyed).as_bytes()).and_then(|()| out.flush()),
        })?;
        drop(out);
        if !self.json {
            end_line()?;
        }
        Ok((answer, generation.stats()))
    }

    /// Keeps the context, if it is to be kept.
    fn save(&self, session: &Session) -> Result<(), Failure> {
        if let Some(path) = self.prompt_cache.as_deref().filter(|_| !session.tokens().is_empty()) {
            session.save(path)?;
        }
        Ok(())
    }

    /// Ends the program as Ctrl-C does, with the context kept.
    fn leave(&self, session: &Session) -> Result<(), Failure> {
        self.save(session)?;
        exit(INTERRUPTED)
    }

    fn text(&self) -> Result<String, Failure> {
        let words = (!self.words.is_empty()).then(|| self.words.join(" "));
        if let (Some(words), Some(_)) = (&words, &self.prompt) {
            return Err(Failure::Usage(format!("two prompts: '{words}' and that of -p")));
        }
        let file = self.file.as_deref().map(read_prompt).transpose()?;
        let text = match (words.or_else(|| self.prompt.clone()), file) {
            (Some(text), Some(file)) => format!("{text}\n{file}"),
            (Some(text), None) | (None, Some(text)) => text,
            (None, None) => match from_env("KVANT_PROMPT")? {
                Some(text) => text,
                None => self.piped()?,
            },
        };
        if text.is_empty() {
            return Err(Failure::Usage("the prompt is empty".to_owned()));
        }
        Ok(text)
    }

    /// Tells that a pipe is not read, which others read beside a prompt: it may be a script's own, or never end.
    fn note_pipe(&self) {
        let is_read = self.file.as_deref() == Some(Path::new("-"));
        let has_prompt = !self.words.is_empty() || self.prompt.is_some() || self.file.is_some();
        if has_prompt && !is_read && !self.quiet && console::is_piped_to() {
            log::note("what is piped in is not read beside a prompt (-f - puts it behind)");
        }
    }

    /// What is piped in, when no prompt was given.
    fn piped(&self) -> Result<String, Failure> {
        let text = if std::io::stdin().is_terminal() { String::new() } else { read_prompt(Path::new("-"))? };
        if text.is_empty() {
            let talk = format!("kvant chat {}", self.model.name());
            let line = format!(
                "no prompt: expected one behind the model, with -p TEXT or -f FILE, or piped in ({talk} holds a conversation)"
            );
            return Err(Failure::Usage(line));
        }
        Ok(text)
    }

    fn generate_options(&self) -> Result<GenerateOptions, Failure> {
        let options = self.decode.options(self.sampling.params()?)?;
        Ok(GenerateOptions { ignore_eos: self.ignore_eos, ..options })
    }

    /// The prompt in the model's chat format, when it has one; else as it is.
    fn tokens(&self, session: &Session, text: &str, quiet: bool) -> Result<Vec<u32>, Failure> {
        if self.raw {
            let special = if self.no_special { Special::AsText } else { Special::Parse };
            return Ok(session.text_prompt(text, special)?);
        }
        if let Err(missing @ Error::Template(TemplateError::Missing)) = session.model().chat_template() {
            if self.system_prompt.is_some() || !self.image.is_empty() {
                return Err(missing.into());
            }
            log::note("this model has no chat template, so the text is continued as it is");
            return Ok(session.text_prompt(text, Special::AsText)?);
        }
        let system = self.system_prompt.as_deref().map(Message::system);
        let question = Message::user(text).with_pictures(self.image.len());
        let messages: Vec<Message> = system.into_iter().chain([question]).collect();
        match &self.image[..] {
            [] => Ok(session.chat_prompt(&messages)?),
            files => {
                let pictures = look(session.model(), files, quiet)?;
                Ok(session.model().chat_prompt_with(&messages, &pictures)?)
            }
        }
    }
}

/// What the model has said.
#[derive(Default)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Hands text to `show` as it comes, and adds it to `answer`.
pub fn take_tokens(
    generation: &mut Generation<'_>,
    answer: &mut Answer,
    show: &mut dyn FnMut(&str) -> io::Result<()>,
) -> Result<(), Failure> {
    let mut emit = |piece: &str| {
        answer.text.push_str(piece);
        show(piece)
    };
    for token in generation.by_ref() {
        let token = token?;
        answer.tokens.push(token.id);
        emit(&token.text)?;
    }
    Ok(emit(&generation.finish_text())?)
}

/// Ends the line of an answer.
pub fn end_line() -> Result<(), Failure> {
    Ok(writeln!(console::results())?)
}

/// The summary line: what ran, how fast, what the cache took, and the seed where one was used.
pub struct Summary<'a> {
    pub name: &'a str,
    pub model: &'a Model,
    pub kv: &'a KvUse,
    /// Why the cache has these types, where nobody named them.
    pub auto: Option<&'a str>,
    pub stats: &'a Stats,
    pub sampler: &'a SamplerParams,
    /// Which settings of it the model recommends.
    pub recommended: Option<&'a str>,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, kv, stats) = (self.model.device(), self.kv, self.stats);
        let ratio = kv.bytes_f16 as f64 / kv.bytes.max(1) as f64;
        // No token, no speed.
        let speed = |tps: Option<f64>| tps.map_or_else(String::new, |tps| format!(", {tps:.1} tok/s"));
        write!(f, "{} on {}", printable(self.name, 128), device.name)?;
        write!(f, " ({}, {} {})", device.kernels, device.n_threads, device.thread_unit)?;
        if let Some(experts) = self.model.config().layers.iter().find_map(|layer| layer.experts) {
            write!(f, " | {} of {} experts", experts.routing.n_used, experts.n)?;
        }
        if let Some(packed) = output::packed(self.model.gguf()) {
            write!(f, " | {packed}")?;
        }
        write!(f, " | prompt {} tok{}", stats.n_prompt, speed(prompt_tps(stats)))?;
        write!(f, " | decode {} tok{}", stats.n_gen, speed(decode_tps(stats)))?;
        if stats.n_drafted > 0 {
            write!(f, ", {} of {} guesses came true", stats.n_accepted, stats.n_drafted)?;
        }
        let (held, f16) = (output::bytes(kv.bytes), output::bytes(kv.bytes_f16));
        let auto = self.auto.map_or_else(String::new, |why| format!(" ({why})"));
        write!(f, " | KV {}/{}{auto}: {} tok in {held}, f16 {f16}", kv.type_k, kv.type_v, kv.tokens)?;
        // A saving within the first block is one of padding.
        if kv.tokens >= TOKENS_PER_BLOCK {
            write!(f, " ({ratio:.2}x)")?;
        }
        if kv.bytes_draft > 0 {
            write!(f, ", for drafts {}", output::bytes(kv.bytes_draft))?;
        }
        if self.sampler.temperature > 0.0 {
            write!(f, " | seed {}", self.sampler.seed)?;
        }
        if let Some(recommended) = self.recommended {
            write!(f, " | {recommended}")?;
        }
        kv.notes.iter().try_for_each(|note| write!(f, " | {note}"))
    }
}

/// Tokens per second of the prompt, where one was read.
fn prompt_tps(stats: &Stats) -> Option<f64> {
    (stats.n_prompt > 0).then(|| stats.prompt_tps())
}

/// Tokens per second of the answer, where one was fed back: the first is drawn from the prompt's logits.
fn decode_tps(stats: &Stats) -> Option<f64> {
    (stats.n_decoded > 0).then(|| stats.decode_tps())
}

fn json_result(
    model: &Model,
    session: &Session,
    text: &str,
    stats: &Stats,
    sampler: &SamplerParams,
) -> serde_json::Value {
    let (device, kv) = (model.device(), session.kv());
    json!({
        "text": text,
        "n_prompt": stats.n_prompt,
        "n_gen": stats.n_gen,
        "prompt_tps": prompt_tps(stats),
        "decode_tps": decode_tps(stats),
        "draft_n": stats.n_drafted,
        "draft_n_accepted": stats.n_accepted,
        "device": device.name,
        "kernels": device.kernels,
        "type_k": kv.type_k,
        "type_v": kv.type_v,
        "kv": { "tokens": kv.tokens, "bytes": kv.bytes, "bytes_f16": kv.bytes_f16, "bytes_draft": kv.bytes_draft, "notes": kv.notes },
        "seed": sampler.seed,
        "sampler": {
            "temperature": sampler.temperature, "top_k": sampler.top_k, "top_p": sampler.top_p, "min_p": sampler.min_p,
            "repeat_penalty": sampler.repeat_penalty, "repeat_last_n": sampler.repeat_last_n,
        },
        "finish": stats.finish.map(kvant::Finish::name),
    })
}
