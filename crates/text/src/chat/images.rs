//! Images in conversations.
//!
//! Templates of vision models write an image token of their vocabulary for a part
//! `{"type": "image"}` of a message. Other templates do not support parts. For them the message is
//! flattened to text, and an unpredictable placeholder marks each image.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use serde_json::{Value as Json, json};

use super::{ChatTemplate, RenderOptions, Rendered, TemplateError};

impl ChatTemplate {
    /// Renders a conversation whose messages may hold parts of type `image`. Also returns the text
    /// before, between and after the images. `mark` is the image token that templates of the
    /// model's family write.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; [`TemplateError::Images`] if the template drops images.
    pub fn render_images(
        &self,
        messages: &[Json],
        options: &RenderOptions,
        mark: &str,
    ) -> Result<(Rendered, Vec<Rendered>), TemplateError> {
        let expected = messages.iter().map(n_images).sum();
        if expected == 0 {
            let rendered = self.render(messages, options)?;
            return Ok((rendered.clone(), vec![rendered]));
        }
        if let Ok(rendered) = self.render(messages, options) {
            let parts = rendered.split(mark, true);
            if parts.len() == expected + 1 {
                return Ok((rendered, parts));
            }
        }
        let hidden = format!("<image-{:016x}{:016x}>", random(), random());
        let flat: Vec<Json> = messages.iter().map(|message| flat(message, &hidden)).collect();
        let rendered = self.render(&flat, options)?;
        let parts = rendered.split(&hidden, false);
        match parts.len() - 1 {
            got if got == expected => Ok((rendered, parts)),
            got => Err(TemplateError::Images { expected, got }),
        }
    }
}

/// Returns a number that message authors cannot predict.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

fn is_image(part: &Json) -> bool {
    part["type"] == "image"
}

fn n_images(message: &Json) -> usize {
    let parts = message["content"].as_array();
    parts.map_or(0, |parts| parts.iter().filter(|part| is_image(part)).count())
}

/// Flattens the message to text, with `mark` for each image.
fn flat(message: &Json, mark: &str) -> Json {
    let Some(parts) = message["content"].as_array() else { return message.clone() };
    let text = |part: &Json| match is_image(part) {
        true => format!("{mark}\n"),
        false => part["text"].as_str().unwrap_or_default().to_owned(),
    };
    let mut message = message.clone();
    message["content"] = parts.iter().map(text).collect::<String>().into();
    message
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
    /// Splits the text at all occurrences of `mark`, or only at those that the template wrote
    /// itself.
    fn split(&self, mark: &str, is_own: bool) -> Vec<Rendered> {
        let found = self.text.match_indices(mark).map(|(start, _)| start..start + mark.len());
        let owns = |mark: &std::ops::Range<usize>| {
            self.own.iter().any(|own| own.start <= mark.start && mark.end <= own.end)
        };
        let marks = found.filter(|mark| !is_own || owns(mark));
        let ends = marks.chain(std::iter::once(self.text.len()..self.text.len()));
        let parts = ends.scan(0, |start, mark| {
            let part = *start..mark.start;
            *start = mark.end;
            Some(self.part(part))
        });
        parts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The template of SmolVLM, which reads only lists of parts.
    const IN_PARTS: &str = "{% for m in messages %}{{ m.role }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}\
        {% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}\
        {% endif %}{% endfor %}{{ '\\n' }}{% endfor %}";
    const AS_TEXT: &str = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}";

    fn render(source: &str, content: Json) -> Result<(Rendered, Vec<String>), TemplateError> {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let messages = [json!({ "role": "user", "content": content })];
        let (whole, parts) = template.render_images(&messages, &RenderOptions::default(), "<image>")?;
        Ok((whole, parts.iter().map(ToString::to_string).collect()))
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
    fn part_templates_render_string_content() {
        assert_eq!(render(IN_PARTS, json!("some text")).unwrap().1, ["user: some text\n"]);
        assert_eq!(render(AS_TEXT, json!("some text")).unwrap().1, ["<s>user: some text\n"]);
    }

    #[test]
    fn a_template_that_drops_images_is_an_error() {
        let content = json!([{ "type": "image" }, { "type": "text", "text": "x" }]);
        let error = render("{{ messages|length }}", content).unwrap_err();
        assert!(matches!(error, TemplateError::Images { expected: 1, got: 0 }), "{error}");
    }
}
