//! The errors of the CUDA device, and versions of CUDA.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use kvant_backend::BackendError;

/// A version of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion {
    /// The number before the dot.
    pub major: u32,
    /// The number after the dot.
    pub minor: u32,
}

impl FromStr for CudaVersion {
    type Err = ParseIntError;

    /// Reads `13.0`; without a dot, the minor version is 0.
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
        Ok(Self { major: major.parse()?, minor: minor.parse()? })
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why a CUDA operation failed. `Display` states what was found and what is needed, in one line
/// except for the compiler's log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CudaError {
    /// The driver library is missing.
    #[error("no NVIDIA driver: libcuda was not found; needed: a driver for CUDA {needed} or later")]
    NoDriver {
        /// The oldest sufficient version.
        needed: CudaVersion,
    },
    /// The driver is installed but does not start.
    #[error("the NVIDIA driver does not start: {problem}")]
    DriverInit {
        /// The driver's message.
        problem: String,
    },
    /// The driver is older than the compiler whose output it must load, or than the functions
    /// called here.
    #[error("the NVIDIA driver supports CUDA {found}; needed: {needed} or later, {why}")]
    OldDriver {
        /// The version that the driver supports.
        found: CudaVersion,
        /// The oldest sufficient version.
        needed: CudaVersion,
        /// The component that needs it.
        why: &'static str,
    },
    /// A kernel is not part of this binary, and the run-time compiler is missing.
    #[error(
        "no NVRTC: libnvrtc was not found; needed to compile {kernel}, which is not part of this binary \
         (python3 -m pip install nvidia-cuda-nvrtc, and its lib folder on LD_LIBRARY_PATH)"
    )]
    NoNvrtc {
        /// The source and its macros.
        kernel: String,
    },
    /// The device index is out of range.
    #[error("no device cuda:{index}: this machine has {count}; needed: an index below that")]
    NoDevice {
        /// The requested index.
        index: usize,
        /// Number of devices.
        count: usize,
    },
    /// The compute capability is too low.
    #[error("{name} has compute capability {}.{}; needed: 8.0 or later", arch / 10, arch % 10)]
    OldDevice {
        /// The device's name.
        name: String,
        /// Its compute capability times ten.
        arch: u32,
    },
    /// More values than a launch has threads.
    #[error("{op}: expected fewer than 2^32 values, got {n}")]
    TooManyValues {
        /// The op.
        op: &'static str,
        /// Its values.
        n: usize,
    },
    /// Device memory is exhausted.
    #[error("out of device memory: {bytes} bytes wanted, {free} free")]
    OutOfMemory {
        /// Requested bytes.
        bytes: usize,
        /// Free bytes.
        free: usize,
    },
    /// A kernel does not compile: a bug in Kvant, or an outdated compiler.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// The source and its macros.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// A call failed.
    #[error("{call}: {problem}")]
    Call {
        /// The function called.
        call: String,
        /// Its error message.
        problem: String,
    },
}

impl CudaError {
    /// Creates [`CudaError::Call`].
    pub(crate) fn call(call: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Call { call: call.into(), problem: problem.into() }
    }
}

impl From<CudaError> for BackendError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory { bytes, .. } => Self::OutOfMemory { bytes, what: "the CUDA device" },
            error => Self::Failed { device: "cuda", problem: error.to_string() },
        }
    }
}
