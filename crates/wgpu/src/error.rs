//! What can go wrong between this crate and an adapter.

use kvant_backend::BackendError;

/// Why the device could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WgpuError {
    /// There is no adapter of this number.
    #[error("no adapter {index}; {has}")]
    NoAdapter { index: usize, has: String },
    /// The adapter gives no device.
    #[error("{adapter}: {problem}")]
    NoDevice { adapter: String, problem: String },
    /// A kernel that this adapter does not take.
    #[error("{place}: {problem}: {line}")]
    Compile { place: String, problem: String, line: String },
    /// wgpu refused a command, or the device is lost.
    #[error("{0}")]
    Refused(String),
    /// Memory could not be had.
    #[error("out of memory: {bytes} bytes for {what}")]
    OutOfMemory { bytes: usize, what: &'static str },
}

impl From<WgpuError> for BackendError {
    fn from(error: WgpuError) -> Self {
        match error {
            WgpuError::OutOfMemory { bytes, what } => Self::OutOfMemory { bytes, what },
            error => Self::Failed { device: "wgpu", problem: one_line(&error.to_string()) },
        }
    }
}

/// `text` in one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
