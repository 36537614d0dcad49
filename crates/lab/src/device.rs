//! Devices by name, and their arithmetic.

use kvant_backend::Backend;
use kvant_conformance::{Arithmetic, Attention, Coverage, CpuSet, DeviceUnderTest};
use kvant_cpu::{CpuDevice, Isa};

use crate::subject::Settings;

/// Arithmetic of a device: it determines error bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceArithmetic {
    /// Of products.
    pub products: Arithmetic,
    /// Of attention.
    pub attention: Attention,
}

/// Arithmetic of GPUs through wgpu, as in their conformance tests.
const WGPU: DeviceArithmetic =
    DeviceArithmetic { products: Arithmetic::EightBit, attention: Attention::Exact };
/// Arithmetic of NVIDIA GPUs, as in their conformance tests.
const CUDA: DeviceArithmetic =
    DeviceArithmetic { products: Arithmetic::Halves { from: 17 }, attention: Attention::Halves };

/// What is done with a device once it is open.
pub(crate) trait Visitor {
    /// Which combinations of edge sizes suites run.
    const COVERAGE: Coverage = Coverage::Every;

    /// Visits the device.
    fn visit<B: Backend>(self, device: &DeviceUnderTest<B>) -> Result<(), String>;
}

/// Returns the arithmetic of a device.
///
/// # Errors
///
/// A device or kernel set that this machine or build lacks, in one line.
pub fn arithmetic(settings: &Settings) -> Result<DeviceArithmetic, String> {
    match kind(&settings.device)? {
        Kind::Cpu => {
            let set = cpu_set(isa(settings)?)?;
            Ok(DeviceArithmetic { products: set.arithmetic, attention: set.attention })
        }
        Kind::Wgpu(_) => Ok(WGPU),
        Kind::Cuda(_) => Ok(CUDA),
    }
}

/// Opens a device and visits it.
///
/// # Errors
///
/// As [`arithmetic`], and those of the device and the visitor.
pub(crate) fn open<V: Visitor>(settings: &Settings, visitor: V) -> Result<(), String> {
    match kind(&settings.device)? {
        Kind::Cpu => {
            let isa = isa(settings)?;
            let set = cpu_set(isa)?;
            let device = CpuDevice::new(isa, settings.threads).map_err(|error| error.to_string())?;
            let device = DeviceUnderTest::new(set.name, device, set.arithmetic, set.attention);
            visitor.visit(&device.with_coverage(V::COVERAGE))
        }
        #[cfg(feature = "wgpu")]
        Kind::Wgpu(index) => {
            let device = kvant_wgpu::WgpuDevice::open(index).map_err(|error| error.to_string())?;
            let device = DeviceUnderTest::new("wgpu", device, WGPU.products, WGPU.attention);
            visitor.visit(&device.with_coverage(V::COVERAGE))
        }
        #[cfg(feature = "cuda")]
        Kind::Cuda(index) => {
            let device = kvant_cuda::CudaDevice::open(index).map_err(|error| error.to_string())?;
            let device = DeviceUnderTest::new("cuda", device, CUDA.products, CUDA.attention);
            visitor.visit(&device.with_coverage(V::COVERAGE))
        }
        #[allow(unreachable_patterns, reason = "with both features there is no other device")]
        _ => Err(format!("{}: this program is built without it", settings.device)),
    }
}

/// Returns why a device is unavailable here in one line; `None` if it is available.
pub fn unavailable(device: &str) -> Option<String> {
    struct Opens;
    impl Visitor for Opens {
        fn visit<B: Backend>(self, _: &DeviceUnderTest<B>) -> Result<(), String> {
            Ok(())
        }
    }
    open(&Settings { device: device.to_owned(), isa: None, threads: 1 }, Opens).err()
}

/// Returns the kernel sets of this CPU.
pub fn kernel_sets() -> Vec<&'static str> {
    Isa::available().iter().map(|isa| isa.name()).collect()
}

/// A kind of device, and the index of a GPU.
enum Kind {
    Cpu,
    #[cfg_attr(not(feature = "wgpu"), expect(dead_code, reason = "the device is absent"))]
    Wgpu(usize),
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the device is absent"))]
    Cuda(usize),
}

fn kind(device: &str) -> Result<Kind, String> {
    let index = |name: &str| match device.strip_prefix(name)? {
        "" => Some(0),
        rest => rest.strip_prefix(':')?.parse().ok(),
    };
    match device {
        "cpu" => Ok(Kind::Cpu),
        _ => index("wgpu")
            .map(Kind::Wgpu)
            .or_else(|| index("cuda").map(Kind::Cuda))
            .ok_or_else(|| format!("device: expected cpu, wgpu:N or cuda:N, got '{device}'")),
    }
}

fn isa(settings: &Settings) -> Result<Isa, String> {
    let Some(name) = settings.isa else { return Isa::from_env().map_err(|error| error.to_string()) };
    let set = Isa::available().into_iter().find(|isa| isa.name() == name);
    set.ok_or_else(|| format!("this CPU has no {name}"))
}

fn cpu_set(isa: Isa) -> Result<CpuSet, String> {
    let name = isa.name();
    CpuSet::of(name).ok_or_else(|| format!("no arithmetic is known of the kernel set {name}"))
}
