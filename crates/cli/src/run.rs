//! `kvant run`: generates the answer to one prompt and prints a summary line.

mod choice;

use std::env::var_os;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::exit;

use clap::Args;
use kvant::gguf::printable;
use kvant::{
    CancelFlag, Error, FinishReason, GenerateOptions, Generation, GenerationStats, KvUse, Message, Model,
    Requirements, SamplerParams, Session, Special, TOKENS_PER_BLOCK, TemplateError,
};
use serde_json::json;

use crate::args::cache::CacheArgs;
use crate::args::decode::DecodeArgs;
use crate::args::mmproj::MmprojArgs;
use crate::args::model::ModelArgs;
use crate::args::sampling::SamplingArgs;
use crate::args::template::TemplateArgs;
use crate::env_var::from_env;
use crate::failure::Failure;
use crate::files::{check_output_path, read_prompt};
use crate::interrupt::{INTERRUPTED, Interrupt};
use crate::kv_cache::ResolvedCache;
use crate::media::{MediaFile, MediaOptions, encode_media, media_files};
use crate::open::ModelRequirements;
use crate::{console, log, output, progress};
use choice::Choice;

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
    /// The prompt, in any number of words [default: stdin, if piped]
    #[arg(value_name = "PROMPT")]
    words: Vec<String>,
    /// The prompt [env: KVANT_PROMPT]
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file, without its last line break; - for stdin. Appended to the
    /// prompt of -p
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Continue the text without the model's chat template
    #[arg(long)]
    raw: bool,
    /// With --raw: treat special tokens in the text as plain text
    #[arg(long, requires = "raw")]
    no_special: bool,
    /// Image before the prompt: PNG, JPEG, WebP, GIF or BMP; may be repeated, or a comma-separated
    /// list
    #[arg(long, value_name = "FILE", value_delimiter = ',', conflicts_with_all = ["raw", "prompt_cache"])]
    image: Vec<PathBuf>,
    /// Audio before the prompt: WAV, MP3, FLAC or Ogg Vorbis; may be repeated, or a comma-separated
    /// list
    #[arg(long, value_name = "FILE", value_delimiter = ',', conflicts_with_all = ["raw", "prompt_cache"])]
    audio: Vec<PathBuf>,
    #[command(flatten)]
    mmproj: MmprojArgs,
    #[command(flatten)]
    template: TemplateArgs,
    /// System message, before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system_prompt: Option<String>,
    #[command(flatten)]
    decode: DecodeArgs,
    /// Ignore end-of-turn tokens and continue generating
    #[arg(long)]
    ignore_eos: bool,
    /// Context file: read the prefix that matches the prompt, write all at the end, also after
    /// Ctrl-C
    #[arg(long, value_name = "FILE")]
    prompt_cache: Option<PathBuf>,
    /// Print one JSON object instead of text and summary
    #[arg(long)]
    json: bool,
    /// Print neither progress nor summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn run(mut args: RunArgs) -> Result<(), Failure> {
    args.model.place.split_off_prompt(&mut args.words)?;
    check_output_path(args.prompt_cache.as_deref())?;
    if args.asks() {
        let Some(Choice { model, prompt }) = choice::ask(args.model.place.is_given())? else { return Ok(()) };
        args.prompt = Some(prompt);
        args.model.place = model.map_or(args.model.place.clone(), |model| args.model.place.named(&model));
    }
    let text = args.text()?;
    let mut options = args.generate_options()?;
    let session_options = args.cache.session_options()?;
    let quiet = args.quiet || args.json;
    let needs = if args.raw { Requirements::Tokenizer } else { Requirements::NoBadTemplate };
    let files = &media_files(&args.image, &args.audio)[..];
    // Without files, no encoder is needed.
    let media = (!files.is_empty()).then_some(MediaOptions { args: &args.mmproj, files });
    let (chat_template, draft) = (args.template.source()?, Some(&args.decode.draft));
    let model = args
        .model
        .open_with(quiet, ModelRequirements { needs, chat_template, draft, media, ..Default::default() })?;
    let (sampler, recommended) = args.sampling.params_for(&model)?;
    options.sampler = sampler;
    let ResolvedCache { options: session_options, auto } = args.cache.resolve(session_options, &model)?;
    let mut session = model.session(session_options)?;
    args.cache.note_length(&session);
    // By now the output of another program in the pipe has arrived.
    args.note_pipe();
    let prompt = args.tokens(&session, &text, files, quiet)?;
    if let Some(path) = args.prompt_cache.as_deref().filter(|path| path.exists()) {
        session.load_prefix(path, &prompt)?;
    }
    // Without a context to save, Ctrl-C ends the program as usual.
    let interrupt = args.prompt_cache.as_ref().map(|_| Interrupt::install(false)).transpose()?;
    let cancel = interrupt.as_ref().map_or_else(CancelFlag::default, |interrupt| interrupt.cancel.clone());
    let answered = match &interrupt {
        Some(interrupt) => {
            interrupt.cancellable(|| args.answer(&mut session, &prompt, options, &cancel, quiet))
        }
        None => args.answer(&mut session, &prompt, options, &cancel, quiet),
    };
    let (answer, stats) = match answered {
        // Ctrl-C arrived during prefill.
        Err(_) if cancel.is_cancelled() => return args.leave(&session),
        answered => answered?,
    };
    if stats.finish == Some(FinishReason::ContextFull) && !quiet {
        log::note(format!("the context of {} tokens is full (raise it with -c)", session.n_ctx()));
    }
    if args.json {
        let object = json_result(&model, &session, &answer.text, &stats, &sampler);
        console::print_json(&object)?;
    } else if !args.quiet {
        let (name, sampler) = (&args.model.label(), &sampler);
        let (auto, recommended, kv) = (auto.as_deref(), recommended.as_deref(), &session.kv());
        console::eprint_line(Summary { name, model: &model, kv, auto, stats: &stats, sampler, recommended });
    }
    if cancel.is_cancelled() {
        return args.leave(&session);
    }
    args.save(&session)
}

impl RunArgs {
    /// Prints the answer, unless the output is JSON, and returns it.
    fn answer(
        &self,
        session: &mut Session,
        prompt: &[u32],
        options: GenerateOptions,
        cancel: &CancelFlag,
        quiet: bool,
    ) -> Result<(Answer, GenerationStats), Failure> {
        let bar = progress::bar("reading", prompt.len() as u64, quiet || prompt.len() < 512);
        let mut generation =
            session.generate_with(prompt, options, cancel, &mut |done| bar.set_position(done as u64))?;
        bar.finish_and_clear();
        let mut answer = Answer::default();
        let (mut out, is_obeyed) = (console::results(), console::stdout_is_terminal());
        take_tokens(&mut generation, &mut answer, &mut |piece| match self.json {
            true => Ok(()),
            false => out
                .write_all(console::sanitized_output(piece, is_obeyed).as_bytes())
                .and_then(|()| out.flush()),
        })?;
        drop(out);
        if !self.json {
            end_line()?;
        }
        Ok((answer, generation.stats()))
    }

    /// Saves the context if requested.
    fn save(&self, session: &Session) -> Result<(), Failure> {
        if let Some(path) = self.prompt_cache.as_deref().filter(|_| !session.tokens().is_empty()) {
            session.save(path)?;
        }
        Ok(())
    }

    /// Saves the context and ends the program with Ctrl-C's exit code.
    fn leave(&self, session: &Session) -> Result<(), Failure> {
        self.save(session)?;
        exit(INTERRUPTED)
    }

    /// Returns whether the user is asked for a prompt: none was given, and a person is at the
    /// terminal.
    fn asks(&self) -> bool {
        let is_given = !self.words.is_empty() || self.prompt.is_some() || self.file.is_some();
        let is_interactive = io::stdin().is_terminal() && console::stderr_is_terminal();
        is_interactive && !is_given && !self.json && !self.quiet && var_os("KVANT_PROMPT").is_none()
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

    /// Notes that stdin is not read, which other programs read beside a prompt: the pipe may belong
    /// to a script, or never end.
    fn note_pipe(&self) {
        let is_read = self.file.as_deref() == Some(Path::new("-"));
        let has_prompt = !self.words.is_empty() || self.prompt.is_some() || self.file.is_some();
        if has_prompt && !is_read && !self.quiet && console::is_piped_to() {
            log::note("stdin is not read beside a prompt (-f - appends it)");
        }
    }

    /// Returns the piped text, if no prompt was given.
    fn piped(&self) -> Result<String, Failure> {
        let text = if std::io::stdin().is_terminal() { String::new() } else { read_prompt(Path::new("-"))? };
        if text.is_empty() {
            let command = format!("kvant chat {}", self.model.name());
            let line = format!(
                "no prompt: expected one after the model, with -p TEXT or -f FILE, or piped in ({command} holds a conversation)"
            );
            return Err(Failure::Usage(line));
        }
        Ok(text)
    }

    fn generate_options(&self) -> Result<GenerateOptions, Failure> {
        let options = self.decode.options(self.sampling.params()?)?;
        Ok(GenerateOptions { ignore_eos: self.ignore_eos, ..options })
    }

    /// Returns the tokens of the prompt in the model's chat format, or of the plain text without
    /// one.
    fn tokens(
        &self,
        session: &Session,
        text: &str,
        files: &[MediaFile],
        quiet: bool,
    ) -> Result<Vec<u32>, Failure> {
        if self.raw {
            let special = if self.no_special { Special::AsText } else { Special::Parse };
            return Ok(session.text_prompt(text, special)?);
        }
        if let Err(missing @ Error::Template(TemplateError::Missing)) = session.model().chat_template() {
            if self.system_prompt.is_some() || !files.is_empty() {
                return Err(missing.into());
            }
            log::note("this model has no chat template, so the text is continued as it is");
            return Ok(session.text_prompt(text, Special::AsText)?);
        }
        let system = self.system_prompt.as_deref().map(Message::system);
        let question = Message::user(text).with_media(files.iter().map(|file| file.kind));
        let messages: Vec<Message> = system.into_iter().chain([question]).collect();
        if files.is_empty() {
            return Ok(session.chat_prompt(&messages)?);
        }
        let media = encode_media(session.model(), files, session.n_ctx(), quiet)?;
        Ok(session.model().chat_prompt_with_media(&messages, &media)?)
    }
}

/// Generated text and its tokens.
#[derive(Default)]
pub struct Answer {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Passes text to `show` as it is generated, and appends it to `answer`.
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

/// The summary line: model, device, speed, KV cache, and the seed where one was used.
pub struct Summary<'a> {
    pub name: &'a str,
    pub model: &'a Model,
    pub kv: &'a KvUse,
    /// Reason for automatic KV types.
    pub auto: Option<&'a str>,
    pub stats: &'a GenerationStats,
    pub sampler: &'a SamplerParams,
    /// Sampler settings that the model recommends.
    pub recommended: Option<&'a str>,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, kv, stats) = (self.model.device(), self.kv, self.stats);
        let ratio = kv.bytes_f16 as f64 / kv.bytes.max(1) as f64;
        // Without tokens, the speed is undefined.
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
            write!(f, ", accepted {} of {} draft tokens", stats.n_accepted, stats.n_drafted)?;
        }
        let (size, f16) = (output::bytes(kv.bytes), output::bytes(kv.bytes_f16));
        let auto = self.auto.map_or_else(String::new, |why| format!(" ({why})"));
        write!(f, " | KV {}/{}{auto}: {} tok in {size}, f16 {f16}", kv.type_k, kv.type_v, kv.tokens)?;
        // Within the first block, a saving would be that of padding.
        if kv.tokens >= TOKENS_PER_BLOCK {
            write!(f, " ({ratio:.2}x)")?;
        }
        if kv.bytes_draft > 0 {
            write!(f, ", draft KV {}", output::bytes(kv.bytes_draft))?;
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

/// Returns the tok/s of prefill, if tokens were prefilled.
fn prompt_tps(stats: &GenerationStats) -> Option<f64> {
    (stats.n_prompt > 0).then(|| stats.prefill_tps())
}

/// Returns the tok/s of decode, if a token was decoded: the first is sampled from the prompt's
/// logits.
fn decode_tps(stats: &GenerationStats) -> Option<f64> {
    (stats.n_decode_steps > 0).then(|| stats.decode_tps())
}

fn json_result(
    model: &Model,
    session: &Session,
    text: &str,
    stats: &GenerationStats,
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
        "finish": stats.finish.map(kvant::FinishReason::name),
    })
}
