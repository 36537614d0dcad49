//! `kvant chat`: a conversation in the terminal.

mod command;
mod conversation;
mod input;
mod reasoning_view;

use std::io::{IsTerminal, stdin};
use std::path::PathBuf;

use clap::Args;
use kvant::gguf::printable;
use kvant::{ChatTemplate, Message, RenderOptions, Requirements, Session, SessionOptions};

use crate::args::cache::CacheArgs;
use crate::args::decode::DecodeArgs;
use crate::args::mmproj::MmprojArgs;
use crate::args::model::ModelArgs;
use crate::args::sampling::SamplingArgs;
use crate::args::template::TemplateArgs;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::kv_cache::ResolvedCache;
use crate::media::{MediaOptions, encode_media, media_files};
use crate::open::ModelRequirements;
use crate::{console, output};
use command::Input;
use conversation::Chat;
use input::{Lines, Read};
use reasoning_view::ReasoningDisplay;

/// Arguments of `kvant chat`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvant chat -ctk turbo3 -ctv turbo3\n\nCtrl-C stops an answer, Ctrl-D or /exit ends the program, /help lists commands."
)]
pub struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// First message, in any number of words
    #[arg(value_name = "PROMPT")]
    words: Vec<String>,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    #[command(flatten)]
    template: TemplateArgs,
    /// Image for the first message; /image adds others
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    image: Vec<PathBuf>,
    /// Audio for the first message; /audio adds more
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    audio: Vec<PathBuf>,
    #[command(flatten)]
    mmproj: MmprojArgs,
    /// First message
    #[arg(short, long, value_name = "TEXT", conflicts_with = "words")]
    prompt: Option<String>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Context shift: when the context is full, drop the oldest turns and continue
    #[arg(long, env = "KVANT_CONTEXT_SHIFT", value_parser = clap::builder::BoolishValueParser::new())]
    context_shift: bool,
    /// Enable or disable reasoning, if the chat template supports that
    #[arg(long, value_name = "on|off", value_parser = clap::builder::BoolishValueParser::new())]
    think: Option<bool>,
    /// Hide the model's reasoning
    #[arg(long, env = "KVANT_HIDE_THINKING", value_parser = clap::builder::BoolishValueParser::new())]
    hide_thinking: bool,
}

/// Runs the command.
pub fn chat(mut args: ChatArgs) -> Result<(), Failure> {
    args.model.place.split_off_prompt(&mut args.words)?;
    let first = args.prompt.clone().or_else(|| (!args.words.is_empty()).then(|| args.words.join(" ")));
    // Reports invalid settings before anything is loaded.
    args.sampling.params()?;
    let options = args.cache.session_options()?;
    let files = &media_files(&args.image, &args.audio)[..];
    let media = Some(MediaOptions { args: &args.mmproj, files });
    let (chat_template, draft) = (args.template.source()?, Some(&args.decode.draft));
    let requirements = ModelRequirements {
        needs: Requirements::ChatTemplate,
        chat_template,
        draft,
        media,
        ..Default::default()
    };
    let model = args.model.open_with(false, requirements)?;
    let (sampler, recommended) = args.sampling.params_for(&model)?;
    let render = render_options(model.chat_template()?, args.think)?;
    let ResolvedCache { options, auto } = args.cache.resolve(options, &model)?;
    let session = model.session(options.clone())?;
    args.cache.note_length(&session);
    let interrupt = Interrupt::install(stdin().is_terminal())?;
    console::eprint_line(banner(
        &args.model.label(),
        &session,
        &options,
        [auto.as_deref(), recommended.as_deref()],
    )?);
    let mut chat = Chat {
        name: args.model.label(),
        messages: args.system_prompt.as_deref().map(Message::system).into_iter().collect(),
        system: args.system_prompt,
        loaded: None,
        last: None,
        generate: args.decode.options(sampler)?,
        recommended,
        n_answers: 0,
        context_shift: args.context_shift,
        render,
        reasoning: ReasoningDisplay::of(args.hide_thinking),
        media: encode_media(&model, files, session.n_ctx(), false)?,
        options,
        interrupt,
        session,
        model,
    };
    let mut lines = Lines::open()?;
    if let Some(message) = first {
        report_turn(chat.handle(Input::Message(message)))?;
    }
    loop {
        let line = match lines.next()? {
            Read::Message(line) => line,
            Read::Interrupted => {
                console::eprint_line("(Ctrl-D or /exit ends the program)");
                continue;
            }
            Read::End => return Ok(()),
        };
        match command::parse(&line) {
            Ok(Input::Exit) => return Ok(()),
            Ok(input) => report_turn(chat.handle(input))?,
            Err(line) => report_turn(Err(Failure::Usage(line)))?,
        }
    }
}

/// Returns the template's options: a generation prompt, and whether to reason.
fn render_options(template: &ChatTemplate, thinks: Option<bool>) -> Result<RenderOptions, Failure> {
    const THINKS: &str = "enable_thinking";
    let mut options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    if let Some(thinks) = thinks {
        if !template.source().contains(THINKS) {
            return Err(Failure::Usage(format!("--think: this model's template does not use {THINKS}")));
        }
        options.extra.insert(THINKS.to_owned(), thinks.into());
    }
    Ok(options)
}

/// Prints the error of a failed turn and continues, unless the output is closed.
fn report_turn(result: Result<(), Failure>) -> Result<(), Failure> {
    match result {
        Err(lost @ (Failure::BrokenPipe | Failure::Output(_))) => Err(lost),
        Err(failure) => {
            failure.print();
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Prints model, context, cache, and how to exit.
fn banner(
    name: &str,
    session: &Session,
    options: &SessionOptions,
    [auto, recommended]: [Option<&str>; 2],
) -> Result<String, Failure> {
    let model = session.model();
    let (shape, kv, n_ctx) = (model.config().kv_shape(), &options.kv, session.n_ctx());
    let plan = kv.plan(&shape).map_err(kvant::Error::from)?;
    let (type_k, type_v) = plan.type_names();
    let name = printable(name, 128);
    let (device, full) = (model.device().name, output::bytes(plan.n_bytes(&shape, n_ctx)));
    let auto = auto.map_or_else(String::new, |why| format!(" ({why})"));
    let recommended = recommended.map_or_else(String::new, |settings| format!(" | {settings}"));
    Ok(format!(
        "{name} on {device} | context {n_ctx} tokens | KV {type_k}/{type_v}{auto}, {full} when full{recommended}\n/help lists commands, /exit or Ctrl-D leaves"
    ))
}
