//! The device that a user names, or several.

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

/// The devices of a model, at least one. The first has the embedding and the first layers, the last
/// has the last layers and the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceList(Vec<DeviceChoice>);

impl DeviceList {
    /// Creates a list. The CPU may be listed several times, each time with threads of its own.
    ///
    /// # Errors
    /// No device, a GPU that is listed twice, or [`DeviceChoice::Auto`] beside others.
    pub fn new(devices: Vec<DeviceChoice>) -> Result<Self, Error> {
        let error = |expected: &str, got: String| {
            Err(Error::Setting { name: "device", expected: expected.to_owned(), got })
        };
        let joined = || Self(devices.clone()).to_string();
        if devices.is_empty() {
            return error("at least one device", "none".to_owned());
        }
        if devices.len() > 1 && devices.contains(&DeviceChoice::Auto) {
            return error("auto alone, or devices by name", joined());
        }
        let is_repeated = |(index, device): (usize, &DeviceChoice)| {
            *device != DeviceChoice::Cpu && devices[..index].contains(device)
        };
        if devices.iter().enumerate().any(is_repeated) {
            return error("each GPU once", joined());
        }
        Ok(Self(devices))
    }

    /// Returns the devices, in the order of their layers.
    pub fn devices(&self) -> &[DeviceChoice] {
        &self.0
    }
}

impl Default for DeviceList {
    fn default() -> Self {
        DeviceChoice::default().into()
    }
}

impl From<DeviceChoice> for DeviceList {
    fn from(device: DeviceChoice) -> Self {
        Self(vec![device])
    }
}

impl PartialEq<DeviceChoice> for DeviceList {
    fn eq(&self, device: &DeviceChoice) -> bool {
        self.0 == [*device]
    }
}

impl FromStr for DeviceList {
    type Err = Error;

    /// Parses devices separated by commas.
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::new(text.split(',').map(str::parse).collect::<Result<_, _>>()?)
    }
}

impl fmt::Display for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(DeviceChoice::to_string).collect();
        f.write_str(&names.join(","))
    }
}

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
    #[test]
    fn a_list_is_read_as_it_is_written_and_names_each_gpu_once() {
        for text in ["auto", "cpu", "cuda:0,cuda:1", "cuda:1,cpu", "cpu,cpu", "wgpu:0,cuda:0,cpu"] {
            assert_eq!(text.parse::<DeviceList>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("cuda:0,cuda:0", "each GPU once"),
            ("cuda,cpu,cuda:0", "each GPU once"),
            ("cpu,auto", "auto alone, or devices by name"),
            ("cuda:0,gpu", "auto, cpu, cuda:N or wgpu:N, got gpu"),
            ("cpu,", "auto, cpu, cuda:N or wgpu:N, got "),
        ] {
            let error = text.parse::<DeviceList>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("device: expected {expected}")), "{error}");
        }
        assert!(DeviceList::new(Vec::new()).is_err());
    }
}
