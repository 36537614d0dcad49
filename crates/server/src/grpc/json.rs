//! JSON in messages: `google.protobuf.Struct`.

use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value as Message};
use serde_json::{Map, Value};

use crate::http::ApiError;

/// Maximum bytes of an encoded object: decoded, it may take a hundred times as many.
const MAX_BYTES: usize = 16 << 10;

/// Decodes the object of transfer parameters.
pub(super) fn decode(bytes: &[u8]) -> Result<Value, ApiError> {
    if bytes.len() > MAX_BYTES {
        let expected = format!("at most {MAX_BYTES} bytes");
        return Err(ApiError::field("kv_transfer_params", &expected, bytes.len()));
    }
    let decoded = Struct::decode(bytes);
    let error = |error| ApiError::field("kv_transfer_params", "a google.protobuf.Struct", error);
    decoded.map(|object| from_struct(&object)).map_err(error)
}

/// Encodes an object; `None` for another value.
pub(super) fn encode(value: &Value) -> Option<Vec<u8>> {
    value.as_object().map(|object| to_struct(object).encode_to_vec())
}

/// Returns the JSON object of a message.
fn from_struct(message: &Struct) -> Value {
    let field = |(name, value): (&String, &Message)| (name.clone(), from_value(value));
    Value::Object(message.fields.iter().map(field).collect())
}

fn from_value(message: &Message) -> Value {
    match &message.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        // Not finite: null, as in JSON.
        Some(Kind::NumberValue(number)) => (*number).into(),
        Some(Kind::StringValue(text)) => text.as_str().into(),
        Some(Kind::BoolValue(flag)) => (*flag).into(),
        Some(Kind::StructValue(object)) => from_struct(object),
        Some(Kind::ListValue(list)) => list.values.iter().map(from_value).collect(),
    }
}

fn to_struct(object: &Map<String, Value>) -> Struct {
    Struct { fields: object.iter().map(|(name, value)| (name.clone(), to_value(value))).collect() }
}

fn to_value(value: &Value) -> Message {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(flag) => Kind::BoolValue(*flag),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or(f64::NAN)),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(items) => Kind::ListValue(ListValue { values: items.iter().map(to_value).collect() }),
        Value::Object(object) => Kind::StructValue(to_struct(object)),
    };
    Message { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_is_the_same_in_a_message() {
        let object = json!({ "text": "a", "flag": true, "none": null, "number": 0.5, "list": [[], {}] });
        assert_eq!(decode(&encode(&object).unwrap()).unwrap(), object);
        assert_eq!(encode(&json!([1])), None);
    }

    #[test]
    fn malformed_and_large_messages_are_refused() {
        assert!(decode(&[0xff]).is_err());
        assert!(decode(&encode(&json!({ "text": "a".repeat(MAX_BYTES) })).unwrap()).is_err());
        let mut deep = json!([]);
        (0..1000).for_each(|_| deep = json!([deep]));
        assert!(decode(&encode(&json!({ "deep": deep })).unwrap()).is_err());
    }
}
