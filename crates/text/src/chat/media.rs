//! Images and audio clips in conversations.
//!
//! Templates of multimodal models write a token of their vocabulary for a part `{"type": "image"}`
//! or `{"type": "audio"}` of a message. Other templates do not support parts. For them the message
//! is flattened to text, and an unpredictable placeholder marks each part.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::Range;

use serde_json::{Value as Json, json};

use super::{ChatTemplate, RenderOptions, Rendered, TemplateError};

/// A kind of media: a type of content parts other than text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// `image`
    Image,
    /// `audio`
    Audio,
}

impl MediaKind {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Image, Self::Audio];

    /// Returns the type of its content parts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
        }
    }

    /// Returns the kind of a content part.
    fn of(part: &Json) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| part["type"] == kind.name())
    }
}

/// The placeholders that templates of a model's family write, where it accepts a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MediaMarks<'a> {
    /// Of an image.
    pub image: Option<&'a str>,
    /// Of an audio clip.
    pub audio: Option<&'a str>,
}

impl<'a> MediaMarks<'a> {
    fn of(&self, kind: MediaKind) -> Option<&'a str> {
        match kind {
            MediaKind::Image => self.image,
            MediaKind::Audio => self.audio,
        }
    }
}

/// A rendered conversation, with its media.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedMedia {
    /// The text with placeholders.
    pub whole: Rendered,
    /// The text before, between and behind the media.
    pub texts: Vec<Rendered>,
    /// The kinds of the media, in order.
    pub kinds: Vec<MediaKind>,
}

/// A placeholder in a rendered text.
struct Found {
    kind: MediaKind,
    range: Range<usize>,
}

impl ChatTemplate {
    /// Renders a conversation whose messages may hold parts of the types of [`MediaKind`].
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; [`TemplateError::Media`] if the template drops, repeats or
    /// reorders media.
    pub fn render_media(
        &self,
        messages: &[Json],
        options: &RenderOptions,
        marks: MediaMarks<'_>,
    ) -> Result<RenderedMedia, TemplateError> {
        let kinds: Vec<_> = messages.iter().flat_map(kinds_of).collect();
        if kinds.is_empty() {
            let whole = self.render(messages, options)?;
            return Ok(RenderedMedia { texts: vec![whole.clone()], whole, kinds });
        }
        if let Ok(whole) = self.render(messages, options) {
            let found = whole.find(marks, true);
            if found.iter().map(|found| found.kind).eq(kinds.iter().copied()) {
                return Ok(RenderedMedia { texts: whole.split(&found), whole, kinds });
            }
        }
        let [image, audio] = MediaKind::ALL.map(hidden);
        let marks = MediaMarks { image: Some(&image), audio: Some(&audio) };
        let flat: Vec<Json> = messages.iter().map(|message| flat(message, marks)).collect();
        let whole = self.render(&flat, options)?;
        let found = whole.find(marks, false);
        let got: Vec<_> = found.iter().map(|found| found.kind).collect();
        if got != kinds {
            return Err(TemplateError::Media { expected: named(&kinds), got: named(&got) });
        }
        Ok(RenderedMedia { texts: whole.split(&found), whole, kinds })
    }
}

/// Returns a placeholder that message authors cannot predict.
fn hidden(kind: MediaKind) -> String {
    let random = || RandomState::new().hash_one(0);
    format!("<{}-{:016x}{:016x}>", kind.name(), random(), random())
}

fn parts_of(message: &Json) -> &[Json] {
    message["content"].as_array().map_or(&[], |parts| parts)
}

fn kinds_of(message: &Json) -> impl Iterator<Item = MediaKind> {
    parts_of(message).iter().filter_map(MediaKind::of)
}

/// Names kinds in order.
fn named(kinds: &[MediaKind]) -> String {
    if kinds.is_empty() {
        return "none".to_owned();
    }
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

/// Flattens the message to text, with a mark for each medium: an image on a line of its own, audio
/// within the text, as templates of their families write them.
fn flat(message: &Json, marks: MediaMarks<'_>) -> Json {
    if message["content"].as_array().is_none() {
        return message.clone();
    }
    let text = |part: &Json| match MediaKind::of(part) {
        Some(kind @ MediaKind::Image) => format!("{}\n", marks.of(kind).unwrap_or_default()),
        Some(kind @ MediaKind::Audio) => marks.of(kind).unwrap_or_default().to_owned(),
        None => part["text"].as_str().unwrap_or_default().to_owned(),
    };
    let mut flat = message.clone();
    flat["content"] = parts_of(message).iter().map(text).collect::<String>().into();
    flat
}

/// Converts string content to a list of one text part.
pub(super) fn in_parts(message: &Json) -> Json {
    let mut message = message.clone();
    if let Some(text) = message["content"].as_str() {
        message["content"] = json!([{ "type": "text", "text": text }]);
    }
    message
}

impl Rendered {
    /// Finds all marks in order, or only those that the template wrote itself.
    fn find(&self, marks: MediaMarks<'_>, is_own: bool) -> Vec<Found> {
        let owns =
            |mark: &Range<usize>| self.own.iter().any(|own| own.start <= mark.start && mark.end <= own.end);
        let mut found = Vec::new();
        for kind in MediaKind::ALL {
            let Some(mark) = marks.of(kind) else { continue };
            let ranges = self.text.match_indices(mark).map(|(start, _)| start..start + mark.len());
            found.extend(ranges.filter(|mark| !is_own || owns(mark)).map(|range| Found { kind, range }));
        }
        found.sort_by_key(|found| found.range.start);
        found
    }

    /// Returns the texts before, between and behind these placeholders.
    fn split(&self, found: &[Found]) -> Vec<Rendered> {
        let end = self.text.len()..self.text.len();
        let ends = found.iter().map(|found| found.range.clone()).chain([end]);
        let texts = ends.scan(0, |start, mark| {
            let text = *start..mark.start;
            *start = mark.end;
            Some(self.part(text))
        });
        texts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The template of SmolVLM, which reads only lists of parts.
    const IN_PARTS: &str = "{% for m in messages %}{{ m.role }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}\
        {% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}\
        {% elif line['type'] == 'audio' %}{{ '<audio>' }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}";
    const AS_TEXT: &str = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}";

    fn render(source: &str, content: Json) -> Result<(Rendered, Vec<String>), TemplateError> {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let messages = [json!({ "role": "user", "content": content })];
        let marks = MediaMarks { image: Some("<image>"), audio: Some("<audio>") };
        let rendered = template.render_media(&messages, &RenderOptions::default(), marks)?;
        Ok((rendered.whole, rendered.texts.iter().map(ToString::to_string).collect()))
    }

    #[test]
    fn images_split_the_text_where_the_template_puts_them() {
        let image = || json!({ "type": "image" });
        let text_part = |text: &str| json!({ "type": "text", "text": text });
        let content = json!([image(), text_part("a <image> b"), image(), text_part("c")]);
        let (whole, parts) = render(IN_PARTS, content.clone()).unwrap();
        assert_eq!(whole.as_str(), "user:<image>a <image> b<image>c\n");
        assert_eq!(parts, ["user:", "a <image> b", "c\n"]);
        // Each piece keeps the ranges that the template wrote.
        assert_eq!(render(AS_TEXT, content).unwrap().1, ["<s>user: ", "\na <image> b", "\nc\n"]);
        assert_eq!(render(IN_PARTS, json!([text_part("x")])).unwrap().1, ["user: x\n"]);
    }

    #[test]
    fn audio_and_images_keep_their_order() {
        let part = |kind: &str| json!({ "type": kind });
        let content = json!([part("audio"), { "type": "text", "text": "a" }, part("image"), part("audio")]);
        let texts = render(IN_PARTS, content.clone()).unwrap().1;
        assert_eq!(texts, ["user: ", "a", "", "\n"]);
        assert_eq!(render(AS_TEXT, content).unwrap().1, ["<s>user: ", "a", "\n", "\n"]);
    }

    #[test]
    fn part_templates_render_string_content() {
        assert_eq!(render(IN_PARTS, json!("some text")).unwrap().1, ["user: some text\n"]);
        assert_eq!(render(AS_TEXT, json!("some text")).unwrap().1, ["<s>user: some text\n"]);
    }

    #[test]
    fn a_template_that_drops_images_is_an_error() {
        let content = json!([{ "type": "image" }, { "type": "text", "text": "x" }]);
        let error = render("{{ messages|length }}", content).unwrap_err();
        assert!(
            matches!(&error, TemplateError::Media { expected, got } if expected == "image" && got == "none"),
            "{error}"
        );
    }
}
