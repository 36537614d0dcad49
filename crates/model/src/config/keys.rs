//! Typed reads of a file's metadata.

use kvant_gguf::{Gguf, Value};

use crate::ModelError;

/// Reads `{arch}.key` values.
pub(crate) struct Keys<'a> {
    pub(crate) gguf: &'a Gguf,
    pub(crate) arch: &'a str,
}

impl Keys<'_> {
    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.gguf.meta().value(&self.key(key)).is_some()
    }

    /// Returns whether any layer has a tensor of this name.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        let matches = |rest: &str| rest.split_once('.').is_some_and(|(_, rest)| rest == name);
        self.gguf.tensors().iter().any(|info| info.name.strip_prefix("blk.").is_some_and(matches))
    }

    /// Reads a size from 1 to 2³¹.
    pub(crate) fn size(&self, key: &str) -> Result<usize, ModelError> {
        let value: u32 = self.gguf.meta().get(&self.key(key))?;
        match value {
            1..=0x7fff_ffff => Ok(value as usize),
            _ => Err(self.bad(key, "a positive number", value)),
        }
    }

    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.has(key) { self.size(key) } else { Ok(default) }
    }

    /// Reads a number per layer, or one for all layers.
    pub(crate) fn of_layers(&self, key: &str, n_layers: usize) -> Result<Vec<usize>, ModelError> {
        if !matches!(self.gguf.meta().value(&self.key(key)), Some(Value::Array(_))) {
            return Ok(vec![self.size(key)?; n_layers]);
        }
        let numbers: Vec<u32> = self.gguf.meta().get(&self.key(key))?;
        if numbers.len() < n_layers {
            return Err(self.bad(key, &format!("{n_layers} layers"), numbers.len()));
        }
        Ok(numbers.into_iter().take(n_layers).map(|n| n as usize).collect())
    }

    /// Reads a size that files may give per layer and that must be the same in all of these layers.
    pub(crate) fn size_of(&self, key: &str, layers: &[bool]) -> Result<usize, ModelError> {
        let all = self.of_layers(key, layers.len())?;
        let sizes: Vec<usize> = all.into_iter().zip(layers).filter(|(_, is)| **is).map(|(n, _)| n).collect();
        match sizes.iter().find(|&n| n != &sizes[0]) {
            None => match sizes.first().copied().unwrap_or(0) {
                n @ 1..=0x7fff_ffff => Ok(n),
                n => Err(self.bad(key, "a positive number", n)),
            },
            Some(other) => {
                let of_kind = if layers.contains(&false) { " of a kind" } else { "" };
                let expected = format!("the same number in all layers{of_kind}");
                Err(self.bad(key, &expected, format!("{} and {other}", sizes[0])))
            }
        }
    }

    /// Reads a number, 0 if absent.
    pub(crate) fn count(&self, key: &str) -> Result<usize, ModelError> {
        Ok(self.gguf.meta().find::<u32>(&self.key(key))?.unwrap_or(0) as usize)
    }

    pub(crate) fn float(&self, key: &str) -> Result<f32, ModelError> {
        let value: f32 = self.gguf.meta().get(&self.key(key))?;
        if value.is_finite() && value >= 0.0 {
            Ok(value)
        } else {
            Err(self.bad(key, "a finite number", value))
        }
    }

    pub(crate) fn float_or(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        if self.has(key) { self.float(key) } else { Ok(default) }
    }

    /// Reads a number above 0; `None` if absent or 0, which means disabled.
    pub(crate) fn positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.positive_or(key, None)
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.gguf.meta().find(&self.key(key))?.unwrap_or(default))
    }

    /// As [`Keys::positive`], but `default` if absent.
    pub(crate) fn positive_or(&self, key: &str, default: Option<f32>) -> Result<Option<f32>, ModelError> {
        if self.has(key) { Ok(Some(self.float(key)?).filter(|&x| x > 0.0)) } else { Ok(default) }
    }

    pub(crate) fn str_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str, ModelError> {
        Ok(self.gguf.meta().find(&self.key(key))?.unwrap_or(default))
    }

    pub(crate) fn refuse(&self, key: &str, feature: &str) -> Result<(), ModelError> {
        if self.count(key)? > 0 {
            return Err(ModelError::Unsupported { what: format!("{feature} ({})", self.key(key)) });
        }
        Ok(())
    }

    /// Rejects a number above 0.
    pub(crate) fn refuse_positive(&self, key: &str, feature: &str) -> Result<(), ModelError> {
        match self.positive(key)? {
            Some(_) => Err(ModelError::Unsupported { what: format!("{feature} ({})", self.key(key)) }),
            None => Ok(()),
        }
    }

    pub(crate) fn bad(&self, key: &str, expected: &str, got: impl std::fmt::Display) -> ModelError {
        ModelError::Value { key: self.key(key), expected: expected.to_owned(), got: got.to_string() }
    }
}
