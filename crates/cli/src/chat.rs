//! `kvant chat`: a conversation in the terminal.

use std::path::Path;

use clap::Args;
use kvant::gguf::printable;
use kvant::{
    CancelFlag, Finish, GenerateOptions, KvUse, Message, Model, Needs, Session, SessionOptions, Stats,
};
use rustyline::error::ReadlineError;

use crate::args::{CacheArgs, ModelArgs, SamplingArgs};
use crate::console;
use crate::failure::Failure;
use crate::run::{print_tokens, summary};
use crate::template::TemplateArgs;

/// Arguments of `kvant chat`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvant chat -ctk turbo3 -ctv turbo3\n\nCtrl-C stops an answer, Ctrl-D ends the program."
)]
pub struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    template: TemplateArgs,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
}

const HELP: &str = "\
/reset        forget the conversation
/stats        speed of the last answer and size of the cache
/save FILE    keep the conversation's cache in a file
/load FILE    go on with a saved conversation
/quit         leave (also Ctrl-D); Ctrl-C stops an answer";

/// Stands for the last answer of a loaded conversation while its continuation is rendered.
const MARK: &str = "KvantMarksThisAnswer";

/// Runs the command.
pub fn chat(args: ChatArgs) -> Result<(), Failure> {
    let sampler = args.sampling.params()?;
    let options = args.cache.session_options()?;
    let model = args.model.open_for(false, Needs::ChatTemplate, args.template.source()?)?;
    let cancel = CancelFlag::default();
    let handler = cancel.clone();
    ctrlc::set_handler(move || handler.cancel()).map_err(|error| Failure::work("Ctrl-C", error))?;
    let mut chat = Chat {
        session: model.session(options.clone())?,
        messages: args.system_prompt.as_deref().map(Message::system).into_iter().collect(),
        system: args.system_prompt,
        loaded: None,
        last: None,
        generate: GenerateOptions { sampler, ..Default::default() },
        options,
        cancel,
        model,
    };
    console::say(format_args!("{}: /help lists commands", printable(&args.model.name(), 128)));
    let mut editor = rustyline::DefaultEditor::new().map_err(|error| Failure::work("terminal", error))?;
    loop {
        match editor.readline("> ") {
            Ok(line) => {
                let line = line.trim();
                if line.is_empty() {
                    continue;
                }
                let _ = editor.add_history_entry(line);
                if line == "/quit" {
                    return Ok(());
                }
                match chat.take(line) {
                    Err(Failure::BrokenPipe) => return Err(Failure::BrokenPipe),
                    // A turn that failed is told; the conversation goes on.
                    Err(failure) => failure.tell(),
                    Ok(()) => {}
                }
            }
            Err(ReadlineError::Interrupted) => console::say("(Ctrl-D or /quit ends the program)"),
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(Failure::work("terminal", error)),
        }
    }
}

struct Chat {
    model: Model,
    session: Session,
    options: SessionOptions,
    generate: GenerateOptions,
    cancel: CancelFlag,
    system: Option<String>,
    /// The conversation since the start, or since `loaded`.
    messages: Vec<Message>,
    /// Tokens of a conversation that was loaded; its messages are not known.
    loaded: Option<Vec<u32>>,
    last: Option<Stats>,
}

impl Chat {
    fn take(&mut self, line: &str) -> Result<(), Failure> {
        let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
        match (command, argument.trim()) {
            ("/help", _) => console::say(HELP),
            ("/reset", _) => self.reset(),
            ("/stats", _) => self.print_stats(),
            ("/save" | "/load", "") => return Err(Failure::Usage(format!("{command} needs a file name"))),
            ("/save", file) => {
                let bytes = self.session.save(file)?;
                let (tokens, size) = (self.session.tokens().len(), crate::output::bytes(bytes as usize));
                console::say(format_args!("{tokens} tokens in {file}, {size}"));
            }
            ("/load", file) => self.load(Path::new(file))?,
            _ if command.starts_with('/') => {
                return Err(Failure::Usage(format!("no command {command}; /help lists them")));
            }
            _ => self.answer(line)?,
        }
        Ok(())
    }

    fn answer(&mut self, question: &str) -> Result<(), Failure> {
        self.cancel.reset();
        self.messages.push(Message::user(question));
        match self.try_answer() {
            Ok(answer) => {
                self.messages.push(Message::assistant(answer));
                Ok(())
            }
            Err(failure) => {
                // The question is taken back, so that it can be asked again.
                self.messages.pop();
                Err(failure)
            }
        }
    }

    fn try_answer(&mut self) -> Result<String, Failure> {
        let prompt = self.prompt()?;
        let mut generation =
            self.session.generate_with(&prompt, self.generate.clone(), &self.cancel, &mut |_| ())?;
        let text = print_tokens(&mut generation, false)?;
        let stats = generation.stats();
        if stats.finish == Some(Finish::ContextFull) {
            let n_ctx = self.session.n_ctx();
            console::say(format_args!("(the context of {n_ctx} tokens is full; /reset starts anew)"));
        }
        self.last = Some(stats);
        Ok(text)
    }

    /// The whole conversation as tokens. After a load only the tokens of the first part are known: the template
    /// renders the rest behind a marked answer, and what follows the mark is appended.
    fn prompt(&self) -> Result<Vec<u32>, Failure> {
        let Some(loaded) = &self.loaded else { return Ok(self.session.chat_prompt(&self.messages)?) };
        let before = [Message::user("-"), Message::assistant(MARK)];
        let messages: Vec<Message> = before.into_iter().chain(self.messages.iter().cloned()).collect();
        let options = kvant::RenderOptions { add_generation_prompt: true, ..Default::default() };
        let text = self.model.chat_template()?.render(&messages, &options).map_err(kvant::Error::from)?;
        let Some(rest) = text.after(MARK) else {
            return Err(Failure::Work(
                "this model's template cannot go on with a loaded conversation".to_owned(),
            ));
        };
        let rest = self.model.tokenizer()?.encode(rest.as_str(), rest.special(), false);
        let rest = rest.map_err(kvant::Error::from)?;
        Ok([loaded.as_slice(), &rest].concat())
    }

    fn reset(&mut self) {
        self.session.clear();
        self.loaded = None;
        self.messages = self.system.as_deref().map(Message::system).into_iter().collect();
    }

    fn load(&mut self, path: &Path) -> Result<(), Failure> {
        self.session = self.model.load_session(path, self.options.n_ctx)?;
        self.loaded = Some(self.session.tokens().to_vec());
        self.messages.clear();
        console::say(format_args!("{} tokens from {}", self.session.tokens().len(), path.display()));
        Ok(())
    }

    fn print_stats(&self) {
        let kv: KvUse = self.session.kv();
        console::say(summary(&self.model, &kv, &self.last.unwrap_or_default()));
    }
}
