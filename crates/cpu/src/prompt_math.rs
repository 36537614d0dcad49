//! What blocked products of prompts are computed in.

use std::fmt;

use kvant_backend::BackendError;

use crate::{Isa, MatrixUnit};

/// What products of many rows, those of prompts, are computed in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PromptMath {
    /// As those of few rows, bit for bit: what a token gives does not depend on how it was read.
    #[default]
    Exact,
    /// Weights with their scales and activations are rounded to bf16, products of these are summed in f32, by a matrix unit: no scale
    /// stands in the inner loop, and activations lose less than in 8 bits. f32 weights and experts are left as they are. What a token
    /// gives depends on whether it was read among many.
    Bf16,
}

impl PromptMath {
    /// # Errors
    /// [`BackendError::Setting`] for bf16 where `isa` has no matrix unit.
    pub(crate) fn check(self, isa: Isa) -> Result<(), BackendError> {
        if self == Self::Exact || isa.has_matrix_unit() {
            return Ok(());
        }
        Err(BackendError::Setting {
            name: "prompt_math",
            expected: format!(
                "exact, since {} has no matrix unit (the CPU's: {})",
                isa.name(),
                MatrixUnit::find()
            ),
            got: self.to_string(),
        })
    }
}

impl fmt::Display for PromptMath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Bf16 => "bf16",
        })
    }
}
