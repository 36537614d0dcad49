//! The one error type of every device.

/// Why a device could not do what was asked. A device never falls back silently: what it lacks is named.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A buffer, matrix or cache does not have the size the op needs.
    #[error("{op}: {what}: expected {expected}, got {got}")]
    Shape {
        /// The op that refused.
        op: &'static str,
        /// Which dimension or length is off.
        what: &'static str,
        /// The size the op needs.
        expected: usize,
        /// The size it was given.
        got: usize,
    },
    /// No kernel exists for this combination of types or shapes.
    #[error("{op}: no kernel for {wanted}; this device has {has}")]
    Unsupported {
        /// The op that refused.
        op: &'static str,
        /// What was asked for.
        wanted: String,
        /// What exists.
        has: String,
    },
    /// Memory could not be had.
    #[error("out of memory: {bytes} bytes for {what}")]
    OutOfMemory {
        /// How much was asked for, in bytes.
        bytes: usize,
        /// What it was for.
        what: &'static str,
    },
    /// The device, its driver or its compiler failed.
    #[error("{device}: {problem}")]
    Failed {
        /// The device.
        device: &'static str,
        /// What it says, in one line.
        problem: String,
    },
    /// A number that makes no sense, see [`check_size`](crate::limits::check_size).
    #[error("{name}: expected {least} to {most}, got {got}")]
    Size {
        /// What was given.
        name: &'static str,
        /// The least that is allowed.
        least: usize,
        /// The most that is allowed.
        most: usize,
        /// The number given.
        got: usize,
    },
    /// A thread that the system did not start.
    #[error("{started} of {wanted} threads started: {problem}")]
    Threads {
        /// Threads that were asked for.
        wanted: usize,
        /// Threads that there were then.
        started: usize,
        /// What the system says.
        problem: String,
    },
    /// A setting of the device (an environment variable, a thread count) cannot be honoured.
    #[error("{name}={got}: {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What is allowed.
        expected: String,
        /// What was found.
        got: String,
    },
}

impl BackendError {
    /// `Ok` when `got == expected`, else [`BackendError::Shape`].
    pub fn check(op: &'static str, what: &'static str, expected: usize, got: usize) -> Result<(), Self> {
        if expected == got { Ok(()) } else { Err(Self::Shape { op, what, expected, got }) }
    }

    /// `Ok` when `got >= least`, else [`BackendError::Shape`]; for buffers that may be longer than the step.
    pub fn check_at_least(
        op: &'static str,
        what: &'static str,
        least: usize,
        got: usize,
    ) -> Result<(), Self> {
        if got >= least { Ok(()) } else { Err(Self::Shape { op, what, expected: least, got }) }
    }
}
