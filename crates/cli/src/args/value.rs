//! Parsers of values that several arguments have.

use kvant::{DType, DeviceChoice, DeviceList, Error, Policies};

/// Parses a number from 1 up.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a number from 1 up".to_owned()),
    }
}

/// Parses a KV type.
pub fn kv_type(text: &str) -> Result<DType, String> {
    let names = || DType::KV.map(DType::name).join(" ");
    match text.parse::<DType>() {
        Ok(dtype) if dtype.is_kv() => Ok(dtype),
        _ => Err(format!("not a KV type; known: {}", names())),
    }
}

/// Parses KV cache policies.
pub fn policies(text: &str) -> Result<Policies, String> {
    text.parse().map_err(|error: kvant::KvError| error.to_string())
}

/// Parses a number of layers; `all`, and llama.cpp's `auto` and -1, give more than any model has.
pub fn layers(text: &str) -> Result<usize, String> {
    if ["all", "auto", "-1"].contains(&text) {
        Ok(usize::MAX)
    } else {
        text.parse().map_err(|_| "expected a number or all".to_owned())
    }
}

/// Parses a device name.
pub fn device(text: &str) -> Result<DeviceChoice, String> {
    text.parse().map_err(|error| expected(&error))
}

/// Parses device names, separated by commas.
pub fn devices(text: &str) -> Result<DeviceList, String> {
    text.parse().map_err(|error| expected(&error))
}

/// Returns what an error expected; the parser of arguments adds the rest.
fn expected(error: &Error) -> String {
    match error {
        Error::Setting { expected, .. } => format!("expected {expected}"),
        other => other.to_string(),
    }
}

/// Parses a share.
pub fn share(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && f32::is_finite(share) => Ok(share),
        _ => Err("expected numbers above 0, separated by commas".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_layers_have_several_spellings() {
        for all in ["all", "auto", "-1"] {
            assert_eq!(layers(all), Ok(usize::MAX));
        }
        assert_eq!(layers("7"), Ok(7));
        assert!(layers("-2").is_err() && layers("").is_err());
    }
}
