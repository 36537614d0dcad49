//! A conversation: its messages, their KV cache, and the handling of a full context.

use std::path::Path;

use kvant::gguf::printable_path;
use kvant::{
    EncodedMedia, Error, FinishReason, GenerateOptions, GenerationStats, MediaKind, Message, Model,
    RenderOptions, Rendered, Session, SessionOptions,
};

use super::command::{HELP, Input};
use super::reasoning_view::{ReasoningDisplay, ReasoningView};
use crate::failure::Failure;
use crate::files::check_output_path;
use crate::interrupt::Interrupt;
use crate::media::{MediaFile, encode_media};
use crate::run::{Answer, Summary, end_line, take_tokens};
use crate::{console, output};

/// Stands for the last answer of a loaded conversation while its continuation is rendered.
const MARK: &str = "KvantMarksThisAnswer";

pub struct Chat {
    pub name: String,
    pub model: Model,
    pub session: Session,
    /// The requested options; a loaded session may have others.
    pub options: SessionOptions,
    pub generate: GenerateOptions,
    /// Sampler settings that the model recommends.
    pub recommended: Option<String>,
    /// Number of answers so far. Each has its own seed, so that regeneration gives another answer.
    pub n_answers: u64,
    pub context_shift: bool,
    /// Options of the template besides the messages.
    pub render: RenderOptions,
    /// How reasoning is displayed.
    pub reasoning: ReasoningDisplay,
    pub interrupt: Interrupt,
    pub system: Option<String>,
    /// Messages since the start, or since `loaded`.
    pub messages: Vec<Message>,
    /// Images and audio of those messages, in their order, then those for the next message.
    pub media: Vec<EncodedMedia>,
    /// Tokens of a loaded conversation, whose messages are unknown.
    pub loaded: Option<Vec<u32>>,
    pub last: Option<GenerationStats>,
}

impl Chat {
    pub fn handle(&mut self, input: Input) -> Result<(), Failure> {
        match input {
            Input::Message(text) => self.answer(&text)?,
            Input::Regenerate => self.regenerate()?,
            Input::Clear => self.clear()?,
            Input::System(Some(text)) => self.set_system(text),
            Input::System(None) => {
                console::eprint_line(self.system.as_deref().unwrap_or("(no system message)"))
            }
            Input::Stats => self.print_stats(),
            Input::Kv => self.print_kv(),
            Input::Save(file) => {
                check_output_path(Some(Path::new(&file)))?;
                let bytes = self.session.save(&file)?;
                let (tokens, size) = (self.session.tokens().len(), output::bytes(bytes as usize));
                console::eprint_line(format_args!(
                    "{tokens} tokens in {}, {size}",
                    printable_path(file.as_ref())
                ));
            }
            Input::Load(file) => self.load(Path::new(&file))?,
            Input::Media(kind, file) => self.attach(MediaFile { kind, path: file.into() })?,
            Input::Help => console::eprint_line(HELP),
            Input::Exit => {}
        }
        Ok(())
    }

    fn answer(&mut self, question: &str) -> Result<(), Failure> {
        let kinds = self.media[self.n_sent_media()..].iter().map(EncodedMedia::kind);
        self.messages.push(Message::user(question).with_media(kinds));
        match self.generate_answer() {
            Ok(answer) => self.messages.push(Message::assistant(answer)),
            Err(failure) => {
                // Removes the question, so that it can be sent again.
                self.messages.pop();
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Encodes a file for the next message.
    fn attach(&mut self, file: MediaFile) -> Result<(), Failure> {
        let what = match file.kind {
            MediaKind::Image => "an image",
            MediaKind::Audio => "audio",
        };
        let media = encode_media(&self.model, &[file], self.session.n_ctx(), false)?;
        let n_tokens: usize = media.iter().map(|media| media.tokens().len()).sum();
        console::eprint_line(format_args!("({what} of {n_tokens} tokens, for the next message)"));
        self.media.extend(media);
        Ok(())
    }

    fn regenerate(&mut self) -> Result<(), Failure> {
        let Some(before) = self.messages.pop_if(|message| message.role == "assistant") else {
            return Err(Failure::Usage("/regenerate: no answer yet".to_owned()));
        };
        let answer = self.generate_answer().map(Message::assistant);
        let (answer, result) =
            answer.map_or_else(|failure| (before, Err(failure)), |answer| (answer, Ok(())));
        self.messages.push(answer);
        result
    }

    /// Generates the answer to the conversation. If the context is full and context shift is on,
    /// drops the oldest turns, prefills the rest again and continues the answer.
    fn generate_answer(&mut self) -> Result<String, Failure> {
        let interrupt = self.interrupt.clone();
        let (mut answer, mut view) = (Answer::default(), None);
        interrupt.cancellable(|| {
            while self.continue_answer(&mut answer, &mut view)? == Some(FinishReason::ContextFull) {
                if !(self.context_shift && self.shift_context(answer.tokens.len())?) {
                    let n_ctx = self.session.n_ctx();
                    console::eprint_line(format_args!(
                        "(the context of {n_ctx} tokens is full: {})",
                        self.full_context_advice()
                    ));
                    break;
                }
            }
            Ok::<_, Failure>(())
        })?;
        if let Some(view) = &mut view {
            view.end(&mut console::results())?;
        }
        end_line()?;
        Ok(answer.text)
    }

    fn continue_answer(
        &mut self,
        answer: &mut Answer,
        view: &mut Option<ReasoningView>,
    ) -> Result<Option<FinishReason>, Failure> {
        let (mut prompt, text) = self.prompt()?;
        let source = self.model.chat_template()?.source();
        let view = view.get_or_insert_with(|| ReasoningView::new(source, text.as_str(), self.reasoning));
        let (n_ctx, n_generated) = (self.session.n_ctx(), answer.tokens.len());
        if prompt.len() + n_generated > n_ctx && self.context_shift && self.shift_context(n_generated)? {
            prompt = self.prompt()?.0;
        }
        prompt.extend_from_slice(&answer.tokens);
        let mut options = self.generate.clone();
        options.sampler.seed = options.sampler.seed.wrapping_add(self.n_answers);
        options.max_tokens = options.max_tokens.map(|max| max.saturating_sub(n_generated));
        self.n_answers += 1;
        let (cancel, advice) = (self.interrupt.cancel.clone(), self.full_context_advice());
        let generation = self.session.generate_with(&prompt, options, &cancel, &mut |_| ());
        let mut generation = generation.map_err(|error| too_long(error, advice))?;
        let mut out = console::results();
        take_tokens(&mut generation, answer, &mut |piece| view.write(piece, &mut out))?;
        drop(out);
        let stats = generation.stats();
        self.last = Some(stats);
        // A failure in the middle of an answer leaves its last token unprefilled: it belongs to the
        // saved tokens.
        let last = answer
            .tokens
            .last()
            .filter(|_| matches!(stats.finish, Some(FinishReason::Length | FinishReason::Cancelled)));
        if let Some(&last) = last.filter(|_| stats.n_gen > 0 && self.session.tokens().len() < n_ctx) {
            self.session.feed(&[last], &mut |_| true)?;
        }
        Ok(stats.finish)
    }

    /// Returns the advice for a full context.
    fn full_context_advice(&self) -> &'static str {
        if self.context_shift {
            "/clear starts anew"
        } else {
            "/clear starts a new conversation; kvant chat --context-shift drops the oldest turns instead"
        }
    }

    /// Returns the number of media in the messages; the rest belong to the next message.
    fn n_sent_media(&self) -> usize {
        self.messages.iter().map(|message| message.media.len()).sum()
    }

    /// Returns the conversation's tokens and the text rendered by the template. After a load only
    /// the tokens of the first part are known: the template renders the rest after a marked answer,
    /// and the text after the mark is appended.
    fn prompt(&self) -> Result<(Vec<u32>, Rendered), Failure> {
        let template = self.model.chat_template()?;
        let n_sent = self.n_sent_media();
        if n_sent > 0 {
            return self.prompt_with(&self.media[..n_sent]);
        }
        let Some(loaded) = &self.loaded else {
            let text = template.render(&self.messages, &self.render).map_err(Error::from)?;
            let prompt = match self.context_shift {
                // A prompt that is too long now may fit without its oldest turns.
                true => self.model.rendered_prompt(&text),
                false => self.session.rendered_prompt(&text),
            };
            return Ok((prompt.map_err(|error| too_long(error, self.full_context_advice()))?, text));
        };
        let before = [Message::user("-"), Message::assistant(MARK)];
        let messages: Vec<Message> = before.into_iter().chain(self.messages.iter().cloned()).collect();
        let text = template.render(&messages, &self.render).map_err(Error::from)?;
        let Some(rest) = text.after(MARK) else {
            return Err(Failure::Work(
                "this model's template cannot continue a loaded conversation".to_owned(),
            ));
        };
        let tokens = self.model.tokenizer()?.encode(rest.as_str(), rest.special(), false);
        let tokens = tokens.map_err(Error::from)?;
        Ok(([loaded.as_slice(), &tokens].concat(), rest))
    }

    /// Returns the same for a conversation with media.
    fn prompt_with(&self, media: &[EncodedMedia]) -> Result<(Vec<u32>, Rendered), Failure> {
        if self.loaded.is_some() {
            let line = "a loaded conversation takes no images and no audio; /clear starts one that does";
            return Err(Failure::Work(line.to_owned()));
        }
        let messages: Vec<_> = self.messages.iter().map(|message| serde_json::json!(message)).collect();
        let (text, tokens) = self.model.media_prompt(&messages, &self.render, media)?;
        Ok((tokens, text))
    }

    /// Drops the oldest turns until the conversation and `n_generated` answer tokens leave a
    /// quarter of the context free. Returns `false` if no turn could be dropped.
    fn shift_context(&mut self, n_generated: usize) -> Result<bool, Failure> {
        let limit = self.session.n_ctx() - self.session.n_ctx() / 4;
        let mut n_turns = 0;
        while (n_turns == 0 || self.prompt()?.0.len() + n_generated > limit) && self.drop_oldest_turn() {
            n_turns += 1;
        }
        if n_turns > 0 {
            console::eprint_line(format_args!("(the context is full: dropped the oldest {n_turns} turns)"));
        }
        Ok(n_turns > 0)
    }

    /// Drops the loaded tokens, or else the oldest question and its answer; never the last
    /// question.
    fn drop_oldest_turn(&mut self) -> bool {
        if self.loaded.take().is_some() {
            self.messages.splice(0..0, self.system.as_deref().map(Message::system));
            return true;
        }
        let first = usize::from(self.messages.first().is_some_and(|message| message.role == "system"));
        let has_two = self.messages.len() > first + 2;
        if has_two {
            let n_media: usize =
                self.messages.drain(first..first + 2).map(|message| message.media.len()).sum();
            self.media.drain(..n_media);
        }
        has_two
    }

    /// Drops the conversation and returns to the requested KV types.
    fn clear(&mut self) -> Result<(), Failure> {
        self.session = self.model.session(self.options.clone())?;
        (self.loaded, self.last) = (None, None);
        self.media.clear();
        self.messages = self.system.as_deref().map(Message::system).into_iter().collect();
        Ok(())
    }

    /// Sets the system message; the conversation continues with it.
    fn set_system(&mut self, text: String) {
        if self.loaded.is_some() {
            console::eprint_line(
                "(a loaded conversation keeps its original system message; this one applies after /clear)",
            );
        } else {
            let n_old = usize::from(self.messages.first().is_some_and(|message| message.role == "system"));
            self.messages.splice(0..n_old, [Message::system(&text)]);
        }
        self.system = Some(text);
    }

    fn load(&mut self, path: &Path) -> Result<(), Failure> {
        let requested = self.model.session(self.options.clone())?.kv();
        self.session = self.model.load_session(path, self.options.n_ctx)?;
        self.loaded = Some(self.session.tokens().to_vec());
        self.messages.clear();
        self.media.clear();
        console::eprint_line(format_args!(
            "{} tokens from {}",
            self.session.tokens().len(),
            printable_path(path)
        ));
        let kv = self.session.kv();
        if (kv.type_k, kv.type_v) != (requested.type_k, requested.type_v) {
            console::eprint_line(format_args!(
                "(its cache is {}/{}, not {}/{} as requested; /clear returns to those)",
                kv.type_k, kv.type_v, requested.type_k, requested.type_v
            ));
        }
        Ok(())
    }

    fn print_stats(&self) {
        let sampler = &self.generate.sampler;
        let (kv, stats) = (self.session.kv(), self.last.unwrap_or_default());
        console::eprint_line(Summary {
            name: &self.name,
            model: &self.model,
            kv: &kv,
            auto: None,
            stats: &stats,
            sampler,
            recommended: self.recommended.as_deref(),
        });
    }

    fn print_kv(&self) {
        let (kv, n_ctx) = (self.session.kv(), self.session.n_ctx());
        let (size, f16) = (output::bytes(kv.bytes), output::bytes(kv.bytes_f16));
        console::eprint_line(format_args!(
            "{} of {n_ctx} tokens, {}/{}: {size}, as f16 {f16}",
            kv.tokens, kv.type_k, kv.type_v
        ));
        kv.notes.iter().for_each(console::eprint_line);
    }
}

/// Converts an error; adds advice to that of a conversation that is too long.
fn too_long(error: Error, advice: &str) -> Failure {
    let (tokens, n_ctx) = match error {
        Error::PromptTooLong { tokens, n_ctx } => (tokens.to_string(), n_ctx),
        Error::TextTooLong { fewest, n_ctx } => (format!("{fewest} or more"), n_ctx),
        error => return error.into(),
    };
    Failure::Work(format!("the conversation has {tokens} tokens, the context holds {n_ctx}: {advice}"))
}
