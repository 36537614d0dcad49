//! The device that a user names.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The device to run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first NVIDIA GPU where one is usable, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this index.
    Cuda(usize),
    /// The Vulkan, Metal or DX12 adapter with this index; see [`adapters`](super::adapters).
    Wgpu(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    /// Parses `auto`, `cpu`, `cuda:N` or `wgpu:N`; `cuda` and `wgpu` have index 0.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => return Ok(Self::Auto),
            "cpu" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda(0)),
            "wgpu" => return Ok(Self::Wgpu(0)),
            _ => {}
        }
        let of_kind = |kind, choice: fn(usize) -> Self| {
            let index = text.strip_prefix(kind).and_then(|index| index.parse().ok());
            index.map(choice)
        };
        of_kind("cuda:", Self::Cuda).or_else(|| of_kind("wgpu:", Self::Wgpu)).ok_or_else(|| Error::Setting {
            name: "device",
            expected: EXPECTED.to_owned(),
            got: text.to_owned(),
        })
    }
}

/// The accepted forms.
const EXPECTED: &str = "auto, cpu, cuda:N or wgpu:N";

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Wgpu(index) => write!(f, "wgpu:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_as_it_is_written_and_others_are_refused() {
        use DeviceChoice::{Auto, Cpu, Cuda, Wgpu};
        for choice in [Auto, Cpu, Cuda(0), Cuda(7), Wgpu(0), Wgpu(3)] {
            assert_eq!(choice.to_string().parse::<DeviceChoice>().unwrap(), choice);
        }
        assert_eq!("cuda".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(0));
        assert_eq!("wgpu".parse::<DeviceChoice>().unwrap(), DeviceChoice::Wgpu(0));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:1x", "wgpu:", "CPU"] {
            let error = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert_eq!(error, format!("device: expected {EXPECTED}, got {text}"));
        }
    }
}
