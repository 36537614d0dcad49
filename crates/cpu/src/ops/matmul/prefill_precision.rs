//! The precision of prefill GEMMs.

use std::fmt;

use kvant_backend::BackendError;

use crate::simd::amx::MatrixUnit;
use crate::simd::isa::Isa;

/// The precision of products of many rows, as in prefill.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PrefillPrecision {
    /// As for few rows, bit for bit: the result for a token does not depend on its batch.
    #[default]
    Exact,
    /// Weights, with their scales, and activations are rounded to bf16, and their products are
    /// summed in f32: the inner loop needs no scale, and activations lose less than in 8 bits. A
    /// matrix unit computes so for all weights but f32; [`Bf16`](crate::simd::tokens::Bf16) beside
    /// [`Isa::I8mm`] for float weights, since codes would gain next to nothing. Experts are
    /// unaffected. The result for a token depends on whether it was processed in a large batch.
    Bf16,
}

impl PrefillPrecision {
    /// Rejects a precision that `isa` lacks.
    ///
    /// # Errors
    /// [`BackendError::Setting`] for bf16 where `isa` cannot multiply it.
    pub(crate) fn check(self, isa: Isa) -> Result<(), BackendError> {
        if self == Self::Exact || isa.multiplies_bf16() {
            return Ok(());
        }
        Err(BackendError::Setting {
            name: "prefill_precision",
            expected: format!(
                "exact, since {} has no matrix unit (the CPU's: {})",
                isa.name(),
                MatrixUnit::find()
            ),
            got: self.to_string(),
        })
    }
}

impl fmt::Display for PrefillPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Bf16 => "bf16",
        })
    }
}
