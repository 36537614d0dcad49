//! The layers of a model on each device: resolves what the user asked for and loads the parts.

use std::sync::Arc;

use kvant_backend::limits;
use kvant_codec::DType;
use kvant_cpu::PrefillPrecision;
use kvant_gguf::Gguf;
use kvant_kv::KvGuard;
use kvant_model::{Config, InputStatistics, LayerRange, Lora};

use super::{DeviceChoice, DeviceList, OpenDevice, cpu, open_gpu};
use crate::error::Error;
use crate::runtime::{LayerPipeline, LoadedModel};

/// Distribution of the layers over devices, with load options.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    /// The devices; see [`OpenOptions::device`](crate::OpenOptions::device).
    pub devices: DeviceList,
    /// Layers on GPUs; see [`OpenOptions::n_gpu_layers`](crate::OpenOptions::n_gpu_layers).
    pub n_gpu_layers: Option<usize>,
    /// Shares of the layers; see [`OpenOptions::layer_split`](crate::OpenOptions::layer_split).
    pub layer_split: Vec<f32>,
    /// Converted weight type; see [`OpenOptions::weights`](crate::OpenOptions::weights).
    pub weights: Option<DType>,
    /// See [`OpenOptions::maps_experts`](crate::OpenOptions::maps_experts).
    pub maps_experts: bool,
    /// See [`OpenOptions::mtp`](crate::OpenOptions::mtp).
    pub mtp: bool,
    /// See [`OpenOptions::prefill_precision`](crate::OpenOptions::prefill_precision).
    pub prefill_precision: PrefillPrecision,
    /// See [`OpenOptions::loras`](crate::OpenOptions::loras).
    pub loras: Vec<Lora>,
    /// See [`OpenOptions::input_statistics`](crate::OpenOptions::input_statistics).
    pub input_statistics: Option<Arc<InputStatistics>>,
    /// The file of a draft head; see [`OpenOptions::draft`](crate::OpenOptions::draft).
    pub draft_head: Option<Arc<Gguf>>,
    /// The guard of the caches; see [`OpenOptions::kv_guard`](crate::OpenOptions::kv_guard).
    pub kv_guard: Option<Arc<KvGuard>>,
}

/// An open device, and the number of layers that it gets.
struct Part {
    device: Box<dyn OpenDevice>,
    n_layers: usize,
}

fn setting(name: &'static str, expected: String, got: impl ToString) -> Error {
    Error::Setting { name, expected, got: got.to_string() }
}

impl Placement {
    /// Applies the load options of all parts to `part`.
    fn resolve(&self, part: LayerRange) -> LayerRange {
        part.with_weights(self.weights)
            .with_mapped_experts(self.maps_experts)
            .with_mtp(self.mtp && !self.maps_experts)
            .with_draft_head(self.draft_head.clone())
            .with_loras(self.loras.clone())
            .with_input_statistics(self.input_statistics.clone())
            .with_kv_guard(self.kv_guard.clone())
    }

    /// Returns the devices to open: the CPU where it takes all layers, and never `Auto` with a
    /// given number of GPU layers.
    fn devices(&self) -> Result<DeviceList, Error> {
        match self.n_gpu_layers {
            Some(0) => Ok(DeviceChoice::Cpu.into()),
            Some(_) if self.devices == DeviceChoice::Auto => Ok(DeviceChoice::Cuda(0).into()),
            Some(n) if self.devices.devices().contains(&DeviceChoice::Cpu) => {
                let expected = format!("0 layers for a GPU with device {}", self.devices);
                Err(setting("n_gpu_layers", expected, n))
            }
            _ => Ok(self.devices.clone()),
        }
    }

    /// Opens the devices and distributes `n_layers` layers: those that [GPU
    /// layers](Self::n_gpu_layers) leave over to the CPU, which comes first.
    fn open(&self, n_threads: Option<usize>, n_layers: usize) -> Result<Vec<Part>, Error> {
        let devices = self.devices()?;
        let mut opened =
            devices.devices().iter().map(|&device| open_gpu(device)).collect::<Result<Vec<_>, _>>()?;
        if self.prefill_precision != PrefillPrecision::Exact && opened.iter().any(Option::is_some) {
            let expected = "exact with layers on a GPU".to_owned();
            return Err(setting("prefill_precision", expected, self.prefill_precision));
        }
        let n_gpu_layers = self.n_gpu_layers.filter(|&n| 0 < n && n < n_layers);
        if n_gpu_layers.is_some() {
            opened.insert(0, None);
        }
        // The CPU devices share the threads.
        let n_cpus = opened.iter().filter(|gpu| gpu.is_none()).count();
        let n_threads = match n_cpus {
            0 | 1 => n_threads,
            _ => Some(n_threads.unwrap_or_else(limits::n_cores).div_ceil(n_cpus)),
        };
        let open_cpu = || cpu::open(n_threads, self.prefill_precision);
        let opened = opened.into_iter().map(|gpu| match gpu {
            Some(gpu) => Ok(gpu),
            None => Ok(Box::new(open_cpu()?) as Box<dyn OpenDevice>),
        });
        let opened = opened.collect::<Result<Vec<_>, Error>>()?;
        let n_shared = n_gpu_layers.unwrap_or(n_layers);
        let listed = &opened[usize::from(n_gpu_layers.is_some())..];
        let mut counts = self.split(&devices, listed, n_shared)?;
        if n_gpu_layers.is_some() {
            counts.insert(0, n_layers - n_shared);
        }
        Ok(opened.into_iter().zip(counts).map(|(device, n_layers)| Part { device, n_layers }).collect())
    }

    /// Splits `n_layers` over the devices of the list, in the given shares or else in proportion to
    /// their free memory.
    fn split(
        &self,
        list: &DeviceList,
        opened: &[Box<dyn OpenDevice>],
        n_layers: usize,
    ) -> Result<Vec<usize>, Error> {
        let n = opened.len();
        if n > n_layers {
            let name = if self.n_gpu_layers.is_some() { "n_gpu_layers" } else { "device" };
            let expected = format!("a layer for each of the devices {list}");
            return Err(setting(name, expected, format!("{n_layers} layers")));
        }
        let given = &self.layer_split;
        if !given.is_empty() && given.len() != n {
            return Err(setting("layer_split", format!("{n} shares, for {list}"), given.len()));
        }
        if let Some(share) = given.iter().find(|share| !(share.is_finite() && **share > 0.0)) {
            return Err(setting("layer_split", "shares above 0".to_owned(), share));
        }
        if n == 1 {
            return Ok(vec![n_layers]);
        }
        if !given.is_empty() {
            return Ok(counts(n_layers, given.iter().copied().map(f64::from)));
        }
        let known = opened.iter().zip(list.devices()).map(|(device, name)| {
            let expected = || format!("a share for each device, as {name} does not report its free memory");
            device.free_bytes()?.ok_or_else(|| setting("layer_split", expected(), "none"))
        });
        let free = known.collect::<Result<Vec<_>, _>>()?;
        Ok(counts(n_layers, free.into_iter().map(|bytes| bytes.max(1) as f64)))
    }
}

/// Splits `n` into one number of at least 1 for each of the shares, which are above 0 and no more
/// than `n`.
fn counts(n: usize, shares: impl ExactSizeIterator<Item = f64> + Clone) -> Vec<usize> {
    let (n_shares, sum) = (shares.len(), shares.clone().sum::<f64>());
    let (mut end, mut until) = (0, 0.0);
    let counts = shares.enumerate().map(|(index, share)| {
        until += share;
        let first = end;
        let rounded = (n as f64 * until / sum).round() as usize;
        end = rounded.clamp(first + 1, n - (n_shares - 1 - index));
        end - first
    });
    counts.collect()
}

/// Loads a model onto the devices of its layers.
pub(crate) fn load(
    placement: Placement,
    n_threads: Option<usize>,
    config: Config,
    gguf: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn LoadedModel>, Error> {
    let n_layers = config.layers.len();
    let (mut first, mut loaded) = (0, Vec::new());
    let parts = placement.open(n_threads, n_layers)?;
    if placement.kv_guard.is_some() && parts.len() > 1 {
        let got = format!("{} devices", parts.len());
        return Err(setting("kv_guard", "one device for all layers".to_owned(), got));
    }
    if placement.draft_head.is_some() && parts.len() > 1 {
        let expected = "one device for all layers of a model with a draft head".to_owned();
        return Err(setting("draft", expected, format!("{} devices", parts.len())));
    }
    for part in parts {
        let layers = first..first + part.n_layers;
        let range = placement.resolve(LayerRange::new(layers.clone(), n_layers));
        let on_progress =
            &mut |done: f32| progress((first as f32 + done * part.n_layers as f32) / n_layers as f32);
        loaded.push(part.device.load(config.clone(), &range, gguf, on_progress)?);
        first = layers.end;
    }
    Ok(match loaded.len() {
        1 => loaded.remove(0),
        _ => Arc::new(LayerPipeline::new(loaded)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(devices: &str, n_gpu_layers: Option<usize>, layer_split: &[f32]) -> Placement {
        Placement {
            devices: devices.parse().unwrap(),
            n_gpu_layers,
            layer_split: layer_split.to_vec(),
            weights: None,
            maps_experts: false,
            mtp: false,
            prefill_precision: PrefillPrecision::Exact,
            loras: Vec::new(),
            input_statistics: None,
            draft_head: None,
            kv_guard: None,
        }
    }

    #[test]
    fn n_gpu_layers_selects_the_devices() {
        let devices = |devices, n| placement(devices, n, &[]).devices().map(|list| list.to_string());
        for any in ["auto", "cpu", "cuda:1", "cuda:0,cuda:1", "cpu,cpu"] {
            assert_eq!(devices(any, None).unwrap(), any);
            assert_eq!(devices(any, Some(0)).unwrap(), "cpu");
        }
        assert_eq!(devices("auto", Some(3)).unwrap(), "cuda:0");
        assert_eq!(devices("cuda:1,cuda:0", Some(3)).unwrap(), "cuda:1,cuda:0");
        for list in ["cpu", "cuda:0,cpu"] {
            let error = devices(list, Some(3)).unwrap_err().to_string();
            let want = format!("n_gpu_layers: expected 0 layers for a GPU with device {list}, got 3");
            assert_eq!(error, want);
        }
    }

    #[test]
    fn shares_are_rounded_to_layers_and_each_device_gets_one() {
        let split = |n, shares: &[f64]| counts(n, shares.iter().copied());
        assert_eq!(split(32, &[1.0]), [32]);
        assert_eq!(split(32, &[3.0, 1.0]), [24, 8]);
        assert_eq!(split(5, &[1.0, 1.0]), [3, 2]);
        assert_eq!(split(10, &[1.0, 1.0, 1.0]), [3, 4, 3]);
        assert_eq!(split(4, &[1e12, 1.0, 1.0]), [2, 1, 1]);
        assert_eq!(split(4, &[1.0, 1.0, 1e12]), [1, 1, 2]);
        assert_eq!(split(3, &[1.0, 1e12, 1.0]), [1, 1, 1]);
    }

    #[test]
    fn layers_follow_the_shares_or_the_free_memory() {
        let n_layers = |placement: Placement| {
            let parts = placement.open(Some(2), 8)?;
            Ok::<_, Error>(parts.into_iter().map(|part| part.n_layers).collect::<Vec<_>>())
        };
        assert_eq!(n_layers(placement("cpu", None, &[])).unwrap(), [8]);
        assert_eq!(n_layers(placement("cpu", None, &[2.0])).unwrap(), [8]);
        assert_eq!(n_layers(placement("cpu,cpu", None, &[3.0, 1.0])).unwrap(), [6, 2]);
        assert_eq!(n_layers(placement("cpu,cpu,cpu", None, &[1.0; 3])).unwrap(), [3, 2, 3]);
        assert_eq!(n_layers(placement("cpu,cpu", Some(0), &[])).unwrap(), [8]);
        // Where the system does not report its memory, the shares must be given.
        match limits::available_bytes() {
            Some(_) => assert_eq!(n_layers(placement("cpu,cpu", None, &[])).unwrap().len(), 2),
            None => assert!(n_layers(placement("cpu,cpu", None, &[])).is_err()),
        }
        let nine = ["cpu"; 9].join(",");
        for (placement, want) in [
            (
                placement(&nine, None, &[]),
                format!("device: expected a layer for each of the devices {nine}, got 8 layers"),
            ),
            (
                placement("cpu,cpu", None, &[1.0]),
                "layer_split: expected 2 shares, for cpu,cpu, got 1".to_owned(),
            ),
            (
                placement("cpu,cpu", None, &[1.0, 0.0]),
                "layer_split: expected shares above 0, got 0".to_owned(),
            ),
            (placement("cpu", None, &[f32::NAN]), "layer_split: expected shares above 0, got NaN".to_owned()),
        ] {
            assert_eq!(n_layers(placement).unwrap_err().to_string(), want);
        }
    }
}
