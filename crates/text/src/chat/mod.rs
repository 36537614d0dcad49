//! Chat templates: a conversation as the text that a model was trained to continue.
//!
//! A model file carries its format as a Jinja template (`tokenizer.chat_template`), written for Hugging
//! Face `transformers`. [`ChatTemplate`] gives it the same environment on `minijinja`: trimmed blocks,
//! `tojson` without HTML escapes, `raise_exception`, `strftime_now`, loop controls, `{% generation %}`,
//! Python's string and dictionary methods, and Python's way of printing values.
//!
//! A template is a program from a stranger. It sees nothing but the conversation, can load nothing, and
//! is stopped after 50 million steps or 64 MiB of output. What it may gather in variables within those
//! steps is not limited.

mod error;
mod python;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;

use jiff::civil::DateTime;
use kvant_gguf::Gguf;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value};
use regex_automata::meta::Regex;
use serde::Serialize;

pub use error::{Line, TemplateError};

use crate::tokenizer::Tokenizer;

/// Steps of the template machine after which a template is stopped: a few seconds. A conversation of
/// ten thousand messages takes a few million.
const MAX_STEPS: u64 = 50_000_000;
const MAX_STEPS_TEXT: &str = "50 million steps";
/// Bytes of output after which a template is stopped: beyond any context.
const MAX_OUTPUT: usize = 64 << 20;
const MAX_OUTPUT_TEXT: &str = "64 MiB of output";

/// The format of a file without a template whose vocabulary knows `<|im_start|>`.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' \
                      + message.content + '<|im_end|>\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The name under which the environment knows the template.
const NAME: &str = "chat";

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into() }
    }

    /// Instructions for the whole conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// The person.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// The model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// What a template is told besides the messages.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RenderOptions {
    /// End with the opening of the assistant's next turn.
    pub add_generation_prompt: bool,
    /// Descriptions of the tools that the model may call: a JSON array.
    pub tools: Option<serde_json::Value>,
    /// Variables of this template's own, such as `enable_thinking`. They come before all others.
    pub extra: serde_json::Map<String, serde_json::Value>,
}

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and the like, as text.
    tokens: BTreeMap<&'static str, String>,
}

impl ChatTemplate {
    /// Compiles `source`, which may write `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, TemplateError> {
        let compile = || {
            let mut environment = environment()?;
            environment.add_template_owned(NAME, without_generation_tags(source).into_owned())?;
            Ok(environment)
        };
        let environment = compile().map_err(|e: minijinja::Error| TemplateError::syntax(&e))?;
        let tokens = [("bos_token", bos_token.to_owned()), ("eos_token", eos_token.to_owned())];
        Ok(ChatTemplate { environment, tokens: tokens.into() })
    }

    /// The template of a model file; where it has none and the vocabulary knows `<|im_start|>`, ChatML.
    ///
    /// # Errors
    /// [`TemplateError::Missing`], [`TemplateError::Metadata`], [`TemplateError::Syntax`].
    pub fn from_gguf(gguf: &Gguf, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let source: Option<&str> = gguf.meta().find("tokenizer.chat_template")?;
        let knows_chatml = tokenizer.token_id("<|im_start|>").is_some();
        let source = source.or(knows_chatml.then_some(CHATML)).ok_or(TemplateError::Missing)?;
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

    /// The text of a conversation, to be encoded with [`Special::Parse`](crate::tokenizer::Special).
    ///
    /// # Errors
    /// [`TemplateError::Refused`] with the template's own words where it does not know such a
    /// conversation (roles that do not alternate, a system message, ...), [`TemplateError::Render`] where
    /// it fails, [`TemplateError::Limit`] where it does not end.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        self.render_at(messages, options, jiff::Zoned::now().datetime())
    }

    /// [`render`](Self::render) with `now` as the time that `strftime_now` tells.
    fn render_at(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        now: DateTime,
    ) -> Result<String, TemplateError> {
        let mut context: BTreeMap<&str, Value> =
            self.tokens.iter().map(|(name, text)| (*name, Value::from(text.as_str()))).collect();
        context.insert("messages", Value::from(Serde(messages)));
        context.insert("add_generation_prompt", Value::from(options.add_generation_prompt));
        // `transformers` defines both, as none where there are none.
        context.insert("tools", Value::from(Serde(&options.tools)));
        context.insert("documents", Value::from(()));
        let clock = move |format: &str| python::strftime(now, format);
        context.insert("strftime_now", Value::from_function(clock));
        let extra = options.extra.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        context.extend(extra);
        let template = self.environment.get_template(NAME).map_err(|e| TemplateError::render(&e))?;
        let mut out = Limited(Vec::new());
        template
            .render_captured_to(Value::from_pairs(context), &mut out)
            .map_err(|e| TemplateError::render(&e))?;
        // Only whole strings are written, so nothing is lost.
        Ok(String::from_utf8_lossy(&out.0).into_owned())
    }
}

/// The environment that `transformers` gives to templates.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_fuel(Some(MAX_STEPS));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, _, value| Ok(out.write_str(&python::str(value))?));
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_filter("string", python::str);
    env.add_filter("tojson", python::tojson);
    env.add_function("raise_exception", python::raise_exception);
    Ok(env)
}

/// `{% generation %}` marks what to train on; here it only has to group, as `{% if true %}` does.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    let Ok(tag) = Regex::new(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}") else {
        return Cow::Borrowed(source);
    };
    let mut out = Cow::Borrowed("");
    let mut at = 0;
    for m in tag.find_iter(source) {
        let text = &source[m.range()];
        let plain = text.replace("endgeneration", "endif").replace("generation", "if true");
        out.to_mut().push_str(&source[at..m.start()]);
        out.to_mut().push_str(&plain);
        at = m.end();
    }
    if at == 0 {
        return Cow::Borrowed(source);
    }
    out.to_mut().push_str(&source[at..]);
    out
}

/// A buffer that refuses to grow beyond [`MAX_OUTPUT`].
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other(error::TooLong));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
