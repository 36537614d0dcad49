//! Parses names of weight types.

use kvant::DType;

/// Parses a weight type.
///
/// # Errors
///
/// The known types, for an unknown name.
pub fn weight_type(text: &str) -> Result<DType, String> {
    let weights = || DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some());
    match text.parse::<DType>() {
        Ok(dtype) if dtype.ggml_id().is_some() => Ok(dtype),
        _ => Err(format!(
            "not a weight type{}; known: {}",
            mix_of(text).map_or_else(String::new, |dtype| format!(
                " (kvant quantize writes mixes; on load all matrices get one type, such as {dtype})"
            )),
            weights().map(DType::name).collect::<Vec<_>>().join(" ")
        )),
    }
}

/// Returns the main type of a llama.cpp mix, such as `Q4_K_M`.
fn mix_of(text: &str) -> Option<DType> {
    let (name, _) = text.rsplit_once('_').filter(|(_, size)| ["S", "M", "L"].contains(size))?;
    name.parse().ok().filter(|dtype: &DType| dtype.ggml_id().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_is_rejected_with_its_main_type() {
        assert_eq!(weight_type("Q4_K"), Ok(DType::Q4K));
        let error = |text: &str| weight_type(text).unwrap_err();
        assert!(
            error("Q4_K_M")
                .starts_with("not a weight type (kvant quantize writes mixes; on load all matrices get one type, such as q4_K); known: ")
        );
        for other in ["COPY", "_M", "q4_K_XL", "turbo3_M"] {
            assert!(error(other).starts_with("not a weight type; known: f32 "), "{}", error(other));
        }
    }
}
