//! Chat templates: render a conversation as the prompt format that a model was trained on.
//!
//! A model file carries its format as a Jinja template (`tokenizer.chat_template`), written for
//! Hugging Face `transformers`. [`ChatTemplate`] provides the same environment: trimmed blocks,
//! `tojson` without HTML escapes, `raise_exception`, `strftime_now`, loop controls,
//! `{% generation %}`, Python's string and dictionary methods, and Python's formatting of values.
//!
//! Templates are untrusted programs: they see only the conversation, cannot load files, and have
//! bounded time, memory and stack. Messages are untrusted text: [`Rendered`] separates the text
//! that the template wrote from the text of its inputs, and only the former is parsed for special
//! tokens.

mod builtin;
mod error;
mod media;
mod reasoning;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::iter::{once, repeat_n};
use std::ops::Range;
use std::sync::OnceLock;

use jiff::civil::DateTime;
use kvant_gguf::Gguf;
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

pub use builtin::{BUILTIN, builtin};
pub use error::{Line, TemplateError};
use media::in_parts;
pub use media::{MediaKind, MediaMarks, RenderedMedia};
pub use reasoning::{ReasoningParser, THINK_CLOSE, TextPart, partial_match_len, take_until};

use crate::jinja::{Inputs, Template};
use crate::tokenizer::{Special, Tokenizer};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The author: `system`, `user`, `assistant`, or another role that the template accepts.
    pub role: String,
    /// The text of the message.
    pub content: String,
    /// The images and audio clips that precede the text.
    pub media: Vec<MediaKind>,
}

/// Serializes the content as a string or, with media, as a list of parts.
impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { role, content, media } = self;
        let content = match &media[..] {
            [] => json!(content),
            media => {
                let media = media.iter().map(|kind| json!({ "type": kind.name() }));
                media.chain([json!({ "type": "text", "text": content })]).collect()
            }
        };
        json!({ "role": role, "content": content }).serialize(serializer)
    }
}

impl Message {
    /// Creates a message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into(), media: Vec::new() }
    }

    /// Places `n_images` images before the text.
    #[must_use]
    pub fn with_images(self, n_images: usize) -> Self {
        self.with_media(repeat_n(MediaKind::Image, n_images))
    }

    /// Places images and audio clips before the text.
    #[must_use]
    pub fn with_media(self, media: impl IntoIterator<Item = MediaKind>) -> Self {
        Self { media: media.into_iter().collect(), ..self }
    }

    /// Creates a system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// Creates a user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// Creates an assistant message.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// Inputs of a template besides the messages.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RenderOptions {
    /// Ends the prompt with the opening of the assistant's next turn.
    pub add_generation_prompt: bool,
    /// Ends the prompt directly after the text of the final message, so that the model continues
    /// it.
    pub continue_final_message: bool,
    /// Descriptions of the available tools: a JSON array.
    pub tools: Option<serde_json::Value>,
    /// Template-specific variables such as `enable_thinking`. They override all others.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// The local time, in seconds since 1970. `None` reads the system clock, which WebAssembly does
    /// not have.
    pub now: Option<i64>,
}

impl RenderOptions {
    /// Returns the time for `strftime_now`.
    fn now(&self) -> DateTime {
        match self.now {
            Some(seconds) => jiff::civil::date(1970, 1, 1)
                .at(0, 0, 0, 0)
                .saturating_add(jiff::SignedDuration::from_secs(seconds)),
            None => jiff::Zoned::now().datetime(),
        }
    }
}

/// A rendered conversation. Displays as its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    text: String,
    own: Vec<Range<usize>>,
}

impl Rendered {
    /// Returns the whole text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns how to encode the text: special tokens are recognized only in text that the template
    /// wrote. Text from messages, tools or other values stays plain, even after the template has
    /// sliced, joined or changed it.
    pub fn special(&self) -> Special<'_> {
        Special::Within(&self.own)
    }

    /// Returns the text between two that the template might have written.
    pub fn surrounded(&self, before: &str, after: &str) -> Rendered {
        let (start, end) = (before.len(), before.len() + self.text.len());
        let within = self.own.iter().map(|own| own.start + start..own.end + start);
        let own = once(0..start).chain(within).chain(once(end..end + after.len()));
        let own = own.filter(|own| !own.is_empty()).collect();
        Rendered { text: [before, &self.text, after].concat(), own }
    }

    /// Returns the text after the first occurrence of `mark`.
    pub fn after(&self, mark: &str) -> Option<Rendered> {
        let start = self.text.find(mark)? + mark.len();
        Some(self.part(start..self.text.len()))
    }

    /// Returns the text up to the end of the last occurrence of `text`. Templates may trim their
    /// inputs.
    fn up_to_last(&self, text: &str) -> Option<Rendered> {
        let trimmed = text.trim();
        let start = self.text.rfind(trimmed)?;
        let whole = text.trim_start();
        let len = if self.text[start..].starts_with(whole) { whole.len() } else { trimmed.len() };
        Some(self.part(0..start + len))
    }

    fn part(&self, part: Range<usize>) -> Rendered {
        let own = self.own.iter().filter(|own| own.end > part.start && own.start < part.end);
        let own = own.map(|own| own.start.max(part.start) - part.start..own.end.min(part.end) - part.start);
        Rendered { text: self.text[part.clone()].to_owned(), own: own.collect() }
    }
}

impl fmt::Display for Rendered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns the content of a message, or its last text part.
fn final_text(message: &Json) -> Option<String> {
    let content = &message["content"];
    let part = || content.as_array()?.iter().rev().find_map(|part| part["text"].as_str());
    content.as_str().or_else(part).map(str::to_owned)
}

/// A parsed chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    template: Template,
    source: String,
    /// `bos_token`, `eos_token` and the other special tokens, as text.
    tokens: BTreeMap<&'static str, String>,
    /// Whether the template reads content as lists of parts only.
    wants_parts: OnceLock<bool>,
    /// The separate template for conversations with tools.
    with_tools: Option<Box<Result<ChatTemplate, TemplateError>>>,
}

impl ChatTemplate {
    /// Parses `source`, which may refer to `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, TemplateError> {
        let template = Template::parse(source).map_err(TemplateError::syntax)?;
        let tokens = [("bos_token", bos_token.to_owned()), ("eos_token", eos_token.to_owned())];
        Ok(ChatTemplate {
            template,
            source: source.to_owned(),
            tokens: tokens.into(),
            wants_parts: OnceLock::new(),
            with_tools: None,
        })
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Reads the template of a model file, and its separate `tool_use` template if present. A
    /// `tool_use` template that is the only one serves all conversations. The name of a built-in
    /// template selects it (RWKV's files say `rwkv-world`). Without a template, a vocabulary with
    /// `<|im_start|>` selects ChatML.
    ///
    /// # Errors
    /// [`TemplateError::Missing`], [`TemplateError::Metadata`], [`TemplateError::Syntax`].
    pub fn from_gguf(gguf: &Gguf, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let usual: Option<&str> = gguf.meta().find("tokenizer.chat_template")?;
        let usual = usual.map(|source| builtin(source).unwrap_or(source));
        let with_tools: Option<&str> = gguf.meta().find("tokenizer.chat_template.tool_use")?;
        let knows_chatml = tokenizer.token_id("<|im_start|>").is_some();
        let source = usual.or(with_tools).or_else(|| builtin("chatml").filter(|_| knows_chatml));
        let mut template = Self::for_tokenizer(source.ok_or(TemplateError::Missing)?, tokenizer)?;
        let with_tools = with_tools.filter(|_| usual.is_some());
        template.with_tools = with_tools.map(|source| Box::new(Self::for_tokenizer(source, tokenizer)));
        Ok(template)
    }

    /// Returns the template for conversations with or without tools. Returns this template unless
    /// the model has a separate one for tools.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] of the separate template.
    pub fn for_tools(&self, has_tools: bool) -> Result<&Self, TemplateError> {
        match self.with_tools.as_deref().filter(|_| has_tools) {
            Some(with_tools) => with_tools.as_ref().map_err(Clone::clone),
            None => Ok(self),
        }
    }

    /// Parses `source` and binds the special tokens of `tokenizer`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn for_tokenizer(source: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
        let special = tokenizer.special();
        let [bos, eos] = [special.bos, special.eos].map(|id| text(id).unwrap_or_default());
        let mut template = Self::new(source, bos, eos)?;
        let others = [
            ("unk_token", special.unk),
            ("sep_token", special.sep),
            ("pad_token", special.pad),
            ("cls_token", special.cls),
            ("mask_token", special.mask),
        ];
        let others = others.into_iter().filter_map(|(name, id)| Some((name, text(id)?.to_owned())));
        template.tokens.extend(others);
        Ok(template)
    }

    /// Renders a conversation of [`Message`]s, or of any other values that the template reads.
    /// Encode the result as [`Rendered::special`] specifies.
    ///
    /// # Errors
    /// [`TemplateError::Refused`] with the template's message if the template rejects the
    /// conversation (roles that do not alternate, a system message, ...), [`TemplateError::Render`]
    /// if rendering fails, [`TemplateError::Limit`] if rendering exceeds a limit.
    pub fn render(
        &self,
        messages: &[impl Serialize],
        options: &RenderOptions,
    ) -> Result<Rendered, TemplateError> {
        let has_tools = options.tools.as_ref().is_some_and(|tools| tools != &json!([]) && !tools.is_null());
        self.for_tools(has_tools)?.render_any(json!(messages), options)
    }

    fn render_any(&self, mut messages: Json, options: &RenderOptions) -> Result<Rendered, TemplateError> {
        let last = messages.as_array().and_then(|messages| messages.last()).and_then(final_text);
        let last = last.filter(|_| options.continue_final_message);
        if let Some(messages) = messages.as_array_mut().filter(|_| self.reads_parts_only()) {
            messages.iter_mut().for_each(|message| *message = in_parts(message));
        }
        let rendered = self.render_as_given(messages, options)?;
        match last {
            Some(last) => rendered.up_to_last(&last).ok_or(TemplateError::FinalMessage),
            None => Ok(rendered),
        }
    }

    /// Probes whether the template ignores string content but renders the text of a list of parts.
    fn reads_parts_only(&self) -> bool {
        const PROBE: &str = "KvantSaysThis";
        *self.wants_parts.get_or_init(|| {
            let options = RenderOptions { now: Some(0), ..RenderOptions::default() };
            let render = |message: &Json| self.render_as_given(json!([message]), &options).ok();
            let message = |content: &str| json!({ "role": "user", "content": content });
            let of_part = render(&in_parts(&message(PROBE)));
            let reads_parts = of_part.is_some_and(|rendered| rendered.text.contains(PROBE));
            reads_parts && render(&message(PROBE)) == render(&message("Another"))
        })
    }

    fn render_as_given(&self, messages: Json, options: &RenderOptions) -> Result<Rendered, TemplateError> {
        let own = self.tokens.iter().map(|(name, text)| (*name, text.as_str())).collect();
        // `transformers` always defines `tools` and `documents`, as `none` if absent.
        let inputs = [
            ("messages", messages),
            ("add_generation_prompt", json!(options.add_generation_prompt)),
            ("tools", json!(options.tools)),
            ("documents", Json::Null),
        ];
        // Firefunction's template reads variables that its authors' server defines.
        let of_makers = self.source.contains("+ datetime").then(|| {
            let tools = options.tools.as_ref().map(|tools| format!("{tools:#}")).unwrap_or_default();
            let now = options.now().strftime("%b %d %Y %H:%M:%S GMT").to_string();
            [("datetime", json!(now)), ("functions", json!(tools))]
        });
        let extra = options.extra.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let given =
            Inputs { own, untrusted: extra.chain(of_makers.into_iter().flatten()).chain(inputs).collect() };
        let (text, own) = self.template.render(&given, options.now()).map_err(TemplateError::render)?;
        Ok(Rendered { text, own })
    }
}
