//! Images in messages, in the formats of all APIs.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::{Value, json};

use super::error::ApiError;
use super::unknown_blocks;

/// Maximum images of a conversation.
const MAX_IMAGES: usize = 128;

/// Accepts padding or none: clients send both.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Converts a list of content parts to a text or, with images, to a list for templates; the image
/// files are appended to `images`.
pub(super) fn content(parts: &[Value], images: &mut Vec<Vec<u8>>) -> Result<Value, ApiError> {
    let before = images.len();
    let mut content: Vec<Value> = Vec::new();
    for part in parts {
        let kind = part["type"].as_str().unwrap_or("none");
        match (kind, part["text"].as_str()) {
            ("text" | "input_text" | "output_text", Some(text)) => add_text(&mut content, text),
            ("image_url" | "input_image" | "image", _) => {
                if images.len() == MAX_IMAGES {
                    return Err(ApiError::field("content", "at most 128 images", "more"));
                }
                images.push(file(part)?);
                content.push(json!({ "type": "image" }));
            }
            _ => add_text(&mut content, &unknown_blocks::as_text(part)?),
        }
    }
    if images.len() > before {
        return Ok(content.into());
    }
    Ok(content.first().map_or_else(|| "".into(), |part| part["text"].clone()))
}

/// Appends a text; adjacent texts are merged.
fn add_text(content: &mut Vec<Value>, text: &str) {
    match content.last_mut() {
        Some(Value::Object(last)) if last["type"] == "text" => {
            let existing = last["text"].as_str().unwrap_or_default();
            let text = format!("{existing}{text}");
            last.insert("text".to_owned(), text.into());
        }
        _ => content.push(json!({ "type": "text", "text": text })),
    }
}

/// Returns the file of an image: OpenAI's part `{"image_url": {"url": ..}}` or `{"image_url": ..}`,
/// Anthropic's `{"source": {"data": ..}}`.
fn file(part: &Value) -> Result<Vec<u8>, ApiError> {
    const EXPECTED: &str = "an image as data:image/...;base64,... (this server fetches nothing)";
    if let Some(data) = part["source"]["data"].as_str() {
        return decode(data);
    }
    let places = [&part["image_url"]["url"], &part["image_url"], &part["image"], &part["source"]["url"]];
    let url = places.iter().find_map(|place| place.as_str()).unwrap_or("nothing");
    let data = url.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
    match data {
        Some((_, data)) => decode(data),
        None => Err(ApiError::field("image_url", EXPECTED, url.chars().take(64).collect::<String>())),
    }
}

/// Decodes base64.
fn decode(data: &str) -> Result<Vec<u8>, ApiError> {
    let decoded = BASE64.decode(data.trim());
    decoded.map_err(|error| ApiError::field("image_url", "an image in base64", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: Value) -> Result<(Value, Vec<Vec<u8>>), String> {
        let mut images = Vec::new();
        let content = content(parts.as_array().unwrap(), &mut images);
        content.map(|content| (content, images)).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn images_of_all_apis_are_read_and_texts_are_merged() {
        let parts = json!([
            { "type": "text", "text": "a" },
            { "type": "text", "text": "b" },
            { "type": "image_url", "image_url": { "url": "data:image/png;base64,AQI=" } },
            { "type": "input_image", "image_url": "data:image/png;base64,AQI" },
            { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AQI=" } },
            { "type": "input_text", "text": "c" },
        ]);
        let image = json!({ "type": "image" });
        let text_part = |text: &str| json!({ "type": "text", "text": text });
        let expected = json!([text_part("ab"), image, image, image, text_part("c")]);
        assert_eq!(read(parts).unwrap(), (expected, vec![vec![1, 2]; 3]));
        let texts = json!([{ "type": "text", "text": "a" }, { "type": "output_text", "text": "b" }]);
        assert_eq!(read(texts).unwrap(), (json!("ab"), Vec::new()));
        assert_eq!(read(json!([])).unwrap(), (json!(""), Vec::new()));
    }

    #[test]
    fn invalid_images_are_rejected_and_nothing_is_fetched() {
        for (part, line) in [
            (
                json!({ "type": "image_url", "image_url": { "url": "http://10.0.0.1/a.png" } }),
                "fetches nothing",
            ),
            (json!({ "type": "image_url", "image_url": { "url": "file:///etc/passwd" } }), "fetches nothing"),
            (json!({ "type": "image_url" }), "fetches nothing"),
            (json!({ "type": "image", "source": { "data": "%%%" } }), "base64"),
            (json!({ "type": "input_audio" }), "text and images"),
        ] {
            let error = read(json!([part])).unwrap_err();
            assert!(error.contains(line), "{error}");
        }
        let many = vec![json!({ "type": "image_url", "image_url": "data:;base64,AA" }); MAX_IMAGES + 1];
        assert!(read(many.into()).unwrap_err().contains("at most 128 images"));
    }
}
