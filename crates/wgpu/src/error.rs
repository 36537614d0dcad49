//! The errors of the wgpu device.

use kvant_backend::BackendError;

/// Why an operation of the device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WgpuError {
    /// The adapter index is out of range.
    #[error("no adapter {index}; {has}")]
    NoAdapter { index: usize, has: String },
    /// The adapter opens no device.
    #[error("{adapter}: {problem}")]
    NoDevice { adapter: String, problem: String },
    /// This adapter does not compile the kernel.
    #[error("{place}: {problem}: {line}")]
    Compile { place: String, problem: String, line: String },
    /// wgpu rejected a command, or the device is lost.
    #[error("{0}")]
    Refused(String),
    /// Device memory is exhausted.
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

/// Joins the lines of `text`.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
