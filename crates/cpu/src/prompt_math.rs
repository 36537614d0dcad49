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
    /// Weights with their scales and activations are rounded to bf16, products of these are summed in f32: no scale stands in the
    /// inner loop, and activations lose less than in 8 bits. A matrix unit does so for all weights but f32; [`Bf16`](crate::Bf16) beside
    /// [`Isa::I8mm`] for those of f16 and bf16, since codes would gain next to nothing. Experts are left as they are.
    /// What a token gives depends on whether it was read among many.
    Bf16,
}

impl PromptMath {
    /// # Errors
    /// [`BackendError::Setting`] for bf16 where `isa` cannot multiply it.
    pub(crate) fn check(self, isa: Isa) -> Result<(), BackendError> {
        if self == Self::Exact || isa.multiplies_bf16() {
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
