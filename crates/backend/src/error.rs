//! The error type of every device.

use crate::Activation;

/// Reports why a device could not run a request. A device never falls back silently: the error
/// names the missing feature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A buffer, matrix or cache does not have the size that the op needs.
    #[error("{op}: {what}: expected {expected}, got {got}")]
    Shape {
        /// The op that returned the error.
        op: &'static str,
        /// The dimension or length at fault.
        what: &'static str,
        /// The size that the op needs.
        expected: usize,
        /// The size given.
        got: usize,
    },
    /// A buffer or cache is shorter than the op needs.
    #[error("{op}: {what}: expected at least {min}, got {got}")]
    TooShort {
        /// The op that returned the error.
        op: &'static str,
        /// The length at fault.
        what: &'static str,
        /// The length that the op needs.
        min: usize,
        /// The length given.
        got: usize,
    },
    /// No kernel exists for this combination of types or shapes.
    #[error("{op}: no kernel for {requested}; this device has {has}")]
    Unsupported {
        /// The op that returned the error.
        op: &'static str,
        /// The requested combination.
        requested: String,
        /// The supported combinations.
        has: String,
    },
    /// An allocation failed.
    #[error("out of memory: {bytes} bytes for {what}")]
    OutOfMemory {
        /// Bytes requested.
        bytes: usize,
        /// Purpose of the allocation.
        what: &'static str,
    },
    /// The device, its driver or its compiler failed.
    #[error("{device}: {problem}")]
    Failed {
        /// The device.
        device: &'static str,
        /// Its message, in one line.
        problem: String,
    },
    /// A number out of range, see [`check_size`](crate::limits::check_size).
    #[error("{name}: expected {min} to {max}, got {got}")]
    OutOfRange {
        /// Name of the number.
        name: &'static str,
        /// The smallest allowed value.
        min: usize,
        /// The largest allowed value.
        max: usize,
        /// The number given.
        got: usize,
    },
    /// The system failed to start a thread.
    #[error("{started} of {requested} threads started: {problem}")]
    Threads {
        /// Threads requested.
        requested: usize,
        /// Threads running by then.
        started: usize,
        /// The system's message.
        problem: String,
    },
    /// A setting of the device (an environment variable, a thread count) is invalid.
    #[error("{name}={got}: {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// The allowed values.
        expected: String,
        /// The value found.
        got: String,
    },
}

impl BackendError {
    /// Returns `Ok` when `got == expected`, else [`BackendError::Shape`].
    pub fn check_equal(
        op: &'static str,
        what: &'static str,
        expected: usize,
        got: usize,
    ) -> Result<(), Self> {
        if expected == got { Ok(()) } else { Err(Self::Shape { op, what, expected, got }) }
    }

    /// Returns the error of a device that lacks what was requested of an op.
    pub(crate) fn unsupported(op: &'static str, requested: &str, has: &str) -> Self {
        Self::Unsupported { op, requested: requested.to_owned(), has: has.to_owned() }
    }

    /// Returns the error of a device whose LayerNorm has no bias.
    pub fn no_layer_norm_bias() -> Self {
        Self::unsupported("layer_norm", "a bias", "LayerNorm without a bias")
    }

    /// Returns `Ok` for an activation of a device without SiTU.
    pub fn check_activation(op: &'static str, activation: Activation) -> Result<(), Self> {
        match activation {
            Activation::Situ { .. } => Err(Self::unsupported(op, "SiTU", "SiLU and GELU")),
            _ => Ok(()),
        }
    }

    /// Returns `Ok` when `got >= min`, else [`BackendError::TooShort`]; for buffers that may be
    /// longer than the step.
    pub fn check_at_least(op: &'static str, what: &'static str, min: usize, got: usize) -> Result<(), Self> {
        if got >= min { Ok(()) } else { Err(Self::TooShort { op, what, min, got }) }
    }
}

/// Returns the error of a device without pooled keys.
pub(crate) fn no_pools(op: &'static str) -> BackendError {
    BackendError::unsupported(op, "pooled keys", "keys of tokens")
}

/// Returns the error of a device without token selection.
pub(crate) fn no_selection(op: &'static str) -> BackendError {
    BackendError::unsupported(op, "attention to selected tokens", "attention to all")
}

/// Returns the error of a device with `n` stages of attention.
pub(crate) fn no_stage(stage: usize, n: usize) -> BackendError {
    BackendError::unsupported("attend", &format!("stage {stage}"), &format!("{n} stages"))
}
