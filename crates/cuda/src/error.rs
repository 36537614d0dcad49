//! What can go wrong between us and the device.

use std::fmt;

use kvant_backend::BackendError;

/// A version of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion {
    /// Before the dot.
    pub major: u32,
    /// After it.
    pub minor: u32,
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why CUDA could not do what was asked. `Display` is one line that says what was found and what is needed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CudaError {
    /// The driver's library is not on this machine.
    #[error("no NVIDIA driver: libcuda was not found; needed: a driver for CUDA {needed} or later")]
    NoDriver {
        /// The oldest version that would do.
        needed: CudaVersion,
    },
    /// The driver is there but does not start.
    #[error("the NVIDIA driver does not start: {problem}")]
    DriverInit {
        /// What it says.
        problem: String,
    },
    /// The driver is older than the compiler whose output it is to load, or than the functions we call.
    #[error("the NVIDIA driver supports CUDA {found}; needed: {needed} or later, {why}")]
    OldDriver {
        /// What the driver supports.
        found: CudaVersion,
        /// The oldest version that would do.
        needed: CudaVersion,
        /// Who needs it.
        why: &'static str,
    },
    /// The run-time compiler is not on this machine.
    #[error(
        "no NVRTC: libnvrtc was not found; needed to compile the kernels (python3 -m pip install nvidia-cuda-nvrtc, \
         and its lib folder on LD_LIBRARY_PATH)"
    )]
    NoNvrtc,
    /// There is no such device.
    #[error("no device cuda:{index}: this machine has {count}; needed: an index below that")]
    NoDevice {
        /// What was asked for.
        index: usize,
        /// Devices there are.
        count: usize,
    },
    /// The device is too old.
    #[error("{name} has compute capability {}.{}; needed: 8.0 or later", arch / 10, arch % 10)]
    OldDevice {
        /// The device's name.
        name: String,
        /// Its compute capability times ten.
        arch: u32,
    },
    /// Memory could not be had.
    #[error("out of device memory: {bytes} bytes wanted, {free} free")]
    OutOfMemory {
        /// How much was asked for.
        bytes: usize,
        /// How much is free.
        free: usize,
    },
    /// A kernel does not compile: a bug of ours, or a compiler that is too old.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// The source's name.
        kernel: String,
        /// What the compiler says.
        log: String,
    },
    /// A call failed.
    #[error("{call}: {problem}")]
    Call {
        /// What was called.
        call: String,
        /// What it answered.
        problem: String,
    },
}

impl CudaError {
    /// [`CudaError::Call`].
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
