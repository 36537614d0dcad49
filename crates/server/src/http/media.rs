//! Images and audio in messages, in the formats of all APIs.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use kvant::MediaKind;
use serde_json::{Value, json};

use super::error::ApiError;
use super::unknown_blocks;

/// Maximum images and audio clips of a conversation.
const MAX_FILES: usize = 128;

/// An image or audio file of a message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MediaFile {
    pub kind: MediaKind,
    pub bytes: Vec<u8>,
}

/// Accepts padding or none: clients send both.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Converts a list of content parts to a text or, with media, to a list for templates; the files
/// are appended to `files`.
pub(super) fn content(parts: &[Value], files: &mut Vec<MediaFile>) -> Result<Value, ApiError> {
    let before = files.len();
    let mut content: Vec<Value> = Vec::new();
    for part in parts {
        let kind = part["type"].as_str().unwrap_or("none");
        let media = match (kind, part["text"].as_str()) {
            ("text" | "input_text" | "output_text", Some(text)) => {
                add_text(&mut content, text);
                continue;
            }
            ("image_url" | "input_image" | "image", _) => MediaKind::Image,
            ("input_audio" | "audio_url", _) => MediaKind::Audio,
            _ => {
                add_text(&mut content, &unknown_blocks::as_text(part)?);
                continue;
            }
        };
        if files.len() == MAX_FILES {
            return Err(ApiError::field("content", "at most 128 images and audio clips", "more"));
        }
        let bytes = match media {
            MediaKind::Image => image(part)?,
            MediaKind::Audio => audio(part)?,
        };
        files.push(MediaFile { kind: media, bytes });
        content.push(json!({ "type": media.name() }));
    }
    if files.len() > before {
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
fn image(part: &Value) -> Result<Vec<u8>, ApiError> {
    if let Some(data) = part["source"]["data"].as_str() {
        return decode(data, "image_url", "an image");
    }
    let places = [&part["image_url"]["url"], &part["image_url"], &part["image"], &part["source"]["url"]];
    let url = places.iter().find_map(|place| place.as_str()).unwrap_or("nothing");
    let expected = "an image as data:image/...;base64,... (this server fetches nothing)";
    decode(in_data_url(url, "image_url", expected)?, "image_url", "an image")
}

/// Returns the file of an audio clip: OpenAI's part `{"input_audio": {"data": ..}}`, whose format
/// the file states itself, or vLLM's `{"audio_url": {"url": ..}}`.
fn audio(part: &Value) -> Result<Vec<u8>, ApiError> {
    if part["type"] == "input_audio" {
        let data = &part["input_audio"]["data"];
        let expected = "an object with audio in base64, named data";
        let data = data.as_str().ok_or_else(|| ApiError::field("input_audio", expected, data))?;
        return decode(data, "input_audio", "audio");
    }
    let places = [&part["audio_url"]["url"], &part["audio_url"]];
    let url = places.iter().find_map(|place| place.as_str()).unwrap_or("nothing");
    let expected = "audio as data:audio/...;base64,... (this server fetches nothing)";
    decode(in_data_url(url, "audio_url", expected)?, "audio_url", "audio")
}

/// Returns the base64 of a `data:` URL.
fn in_data_url<'u>(url: &'u str, field: &'static str, expected: &str) -> Result<&'u str, ApiError> {
    let data = url.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
    let shown = || url.chars().take(64).collect::<String>();
    data.map(|(_, data)| data).ok_or_else(|| ApiError::field(field, expected, shown()))
}

/// Decodes base64.
fn decode(data: &str, field: &'static str, what: &str) -> Result<Vec<u8>, ApiError> {
    let decoded = BASE64.decode(data.trim());
    decoded.map_err(|error| ApiError::field(field, &format!("{what} in base64"), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: Value) -> Result<(Value, Vec<MediaFile>), String> {
        let mut files = Vec::new();
        let content = content(parts.as_array().unwrap(), &mut files);
        content.map(|content| (content, files)).map_err(|error| error.message().to_owned())
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
        let (content, files) = read(parts).unwrap();
        assert_eq!((content, files.len()), (expected, 3));
        assert!(files.iter().all(|file| file.kind == MediaKind::Image && file.bytes == [1, 2]));
        let texts = json!([{ "type": "text", "text": "a" }, { "type": "output_text", "text": "b" }]);
        assert_eq!(read(texts).unwrap(), (json!("ab"), Vec::new()));
        assert_eq!(read(json!([])).unwrap(), (json!(""), Vec::new()));
    }

    #[test]
    fn audio_is_read_beside_images() {
        let parts = json!([
            { "type": "input_audio", "input_audio": { "data": "AQI=", "format": "wav" } },
            { "type": "image_url", "image_url": { "url": "data:image/png;base64,AwQ=" } },
            { "type": "audio_url", "audio_url": { "url": "data:audio/mp3;base64,BQY=" } },
        ]);
        let (content, files) = read(parts).unwrap();
        assert_eq!(content, json!([{ "type": "audio" }, { "type": "image" }, { "type": "audio" }]));
        let file = |kind, bytes: [u8; 2]| MediaFile { kind, bytes: bytes.to_vec() };
        let expected =
            [file(MediaKind::Audio, [1, 2]), file(MediaKind::Image, [3, 4]), file(MediaKind::Audio, [5, 6])];
        assert_eq!(files, expected);
    }

    #[test]
    fn invalid_media_are_rejected_and_nothing_is_fetched() {
        for (part, line) in [
            (
                json!({ "type": "image_url", "image_url": { "url": "http://10.0.0.1/a.png" } }),
                "fetches nothing",
            ),
            (json!({ "type": "image_url", "image_url": { "url": "file:///etc/passwd" } }), "fetches nothing"),
            (json!({ "type": "image_url" }), "fetches nothing"),
            (json!({ "type": "image", "source": { "data": "%%%" } }), "base64"),
            (json!({ "type": "input_audio" }), "an object with audio in base64, named data"),
            (json!({ "type": "input_audio", "input_audio": { "data": "%%%" } }), "audio in base64"),
            (
                json!({ "type": "audio_url", "audio_url": { "url": "http://10.0.0.1/a.mp3" } }),
                "fetches nothing",
            ),
            (json!({ "type": "video_url" }), "text, images and audio"),
        ] {
            let error = read(json!([part])).unwrap_err();
            assert!(error.contains(line), "{error}");
        }
        let many = vec![json!({ "type": "image_url", "image_url": "data:;base64,AA" }); MAX_FILES + 1];
        assert!(read(many.into()).unwrap_err().contains("at most 128 images"));
    }
}
