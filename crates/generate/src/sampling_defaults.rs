//! Sampling defaults of a model: the metadata keys `general.sampling.*`, named as in llama.cpp.

use kvant_gguf::{Gguf, GgufError, Value};

use crate::sampler::SamplerParams;

/// Sampling settings that a model recommends; `None` where unspecified.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingDefaults {
    /// `general.sampling.temp`.
    pub temperature: Option<f32>,
    /// `general.sampling.top_k`; negative values become 0.
    pub top_k: Option<usize>,
    /// `general.sampling.top_p`.
    pub top_p: Option<f32>,
    /// `general.sampling.min_p`.
    pub min_p: Option<f32>,
    /// `general.sampling.penalty_repeat`.
    pub repeat_penalty: Option<f32>,
    /// `general.sampling.penalty_last_n`; a negative value, the whole context, becomes
    /// `usize::MAX`.
    pub repeat_last_n: Option<usize>,
}

impl SamplingDefaults {
    /// Reads the settings of a file. [`SamplerParams::validate`] checks their ranges.
    ///
    /// # Errors
    /// The value of a key is not a number; the error names the key.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, GgufError> {
        let number = |name| number(gguf, &format!("general.sampling.{name}"));
        let of_f32 = |name| Ok::<_, GgufError>(number(name)?.map(|value| value as f32));
        Ok(Self {
            temperature: of_f32("temp")?,
            // Float casts saturate: values below 0 become 0, which keeps all tokens.
            top_k: number("top_k")?.map(|k| k as usize),
            top_p: of_f32("top_p")?,
            min_p: of_f32("min_p")?,
            repeat_penalty: of_f32("penalty_repeat")?,
            repeat_last_n: number("penalty_last_n")?.map(|n| if n < 0.0 { usize::MAX } else { n as usize }),
        })
    }

    /// Applies these settings on top of `others`.
    pub fn or(self, others: &SamplerParams) -> SamplerParams {
        SamplerParams {
            temperature: self.temperature.unwrap_or(others.temperature),
            top_k: self.top_k.unwrap_or(others.top_k),
            top_p: self.top_p.unwrap_or(others.top_p),
            min_p: self.min_p.unwrap_or(others.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(others.repeat_penalty),
            repeat_last_n: self.repeat_last_n.unwrap_or(others.repeat_last_n),
            ..*others
        }
    }

    /// Removes the settings that `given` specifies.
    #[must_use]
    pub fn without(self, given: &Self) -> Self {
        fn left<T>(ours: Option<T>, given: &Option<T>) -> Option<T> {
            ours.filter(|_| given.is_none())
        }
        Self {
            temperature: left(self.temperature, &given.temperature),
            top_k: left(self.top_k, &given.top_k),
            top_p: left(self.top_p, &given.top_p),
            min_p: left(self.min_p, &given.min_p),
            repeat_penalty: left(self.repeat_penalty, &given.repeat_penalty),
            repeat_last_n: left(self.repeat_last_n, &given.repeat_last_n),
        }
    }
}

/// Reads a number of any type.
fn number(gguf: &Gguf, key: &str) -> Result<Option<f64>, GgufError> {
    Ok(Some(match gguf.meta().value(key) {
        None => return Ok(None),
        Some(Value::F32(value)) => f64::from(value),
        Some(Value::F64(value)) => value,
        Some(Value::U8(value)) => f64::from(value),
        Some(Value::I8(value)) => f64::from(value),
        Some(Value::U16(value)) => f64::from(value),
        Some(Value::I16(value)) => f64::from(value),
        Some(Value::U32(value)) => f64::from(value),
        Some(Value::I32(value)) => f64::from(value),
        Some(Value::U64(value)) => value as f64,
        Some(Value::I64(value)) => value as f64,
        // `get` returns an error that names the expected type.
        Some(Value::Bool(_) | Value::String(_) | Value::Array(_)) => {
            return gguf.meta().get::<f32>(key).map(|value| Some(value.into()));
        }
    }))
}

#[cfg(test)]
mod tests {
    use kvant_gguf::GgufWriter;

    use super::*;

    fn file(write: impl FnOnce(&mut GgufWriter)) -> Gguf {
        let (mut writer, mut bytes) = (GgufWriter::new(), Vec::new());
        write(&mut writer);
        writer.write_to::<GgufError>(&mut bytes, |_| Ok(())).unwrap();
        Gguf::from_bytes(bytes).unwrap()
    }

    #[test]
    fn settings_are_read_from_any_number_type_and_overridden() {
        let gguf = file(|writer| {
            writer.set("general.sampling.temp", 0.6_f32).unwrap();
            writer.set("general.sampling.top_k", 20_i32).unwrap();
            writer.set("general.sampling.top_p", 0.5_f64).unwrap();
            writer.set("general.sampling.penalty_last_n", -1_i32).unwrap();
        });
        let model = SamplingDefaults::from_gguf(&gguf).unwrap();
        let usual = SamplerParams { seed: 7, ..Default::default() };
        let want =
            SamplerParams { temperature: 0.6, top_k: 20, top_p: 0.5, repeat_last_n: usize::MAX, ..usual };
        assert_eq!(model.or(&usual), want);
        let request = SamplingDefaults { top_k: Some(5), min_p: Some(0.0), ..Default::default() };
        assert_eq!(model.without(&request), SamplingDefaults { top_k: None, ..model });
        assert_eq!(SamplingDefaults::from_gguf(&file(|_| ())).unwrap(), SamplingDefaults::default());
    }

    #[test]
    fn a_value_that_is_not_a_number_is_rejected_by_key() {
        let gguf = file(|writer| writer.set("general.sampling.temp", "hot").unwrap());
        let error = SamplingDefaults::from_gguf(&gguf).unwrap_err().to_string();
        assert!(error.contains("general.sampling.temp"), "{error}");
    }
}
