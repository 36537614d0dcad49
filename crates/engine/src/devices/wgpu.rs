//! Vulkan, Metal and DX12 adapters: reports them, tunes them and loads models onto them.

use std::sync::Arc;

use kvant_backend::{Backend, BackendError};
use kvant_gguf::{Gguf, printable};
use kvant_model::{Config, LayerRange};
use kvant_wgpu::{AdapterReport, AttendTrial, AttendVariant, CodebookLookup, TypeClass, WgpuDevice};

use super::OpenDevice;
use super::report::{DeviceReport, VariantTrial, WgpuDetails};
use super::tuning_file::{self, AdapterId, AttendVariantName, TuningFile};
use crate::error::Error;
use crate::runtime::{self, LoadedModel};

/// Characters of a foreign name shown in an error.
const MAX_SHOWN: usize = 40;

/// Reports the adapters of this machine, in the order of their indices.
pub fn adapters() -> Result<Vec<DeviceReport<WgpuDetails>>, Error> {
    let saved = tuning_file::saved();
    Ok(kvant_wgpu::adapters().into_iter().map(|adapter| report(adapter, &saved)).collect())
}

/// Opens adapter `index` with the attention variants tuned for it.
pub fn open(index: usize) -> Result<Box<dyn OpenDevice>, Error> {
    let mut device = WgpuDevice::open(index)?;
    if let Some(Ok(variants)) = tuned(device.report(), &tuning_file::saved()) {
        for (class, variant) in variants {
            device = device.with_attend_variant(&[class], variant)?;
        }
    }
    Ok(Box::new(device))
}

impl OpenDevice for WgpuDevice {
    fn memory_bandwidth(&self) -> Result<f64, Error> {
        Err(Error::Device(BackendError::Unsupported {
            op: "memory_bandwidth",
            requested: self.report().device.clone(),
            has: "clocks for cpu and cuda:N".to_owned(),
        }))
    }

    fn free_bytes(&self) -> Result<Option<usize>, Error> {
        Ok(Backend::free_bytes(self)?)
    }

    fn load(
        self: Box<Self>,
        config: Config,
        part: &LayerRange,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        runtime::load(*self, config, part, gguf, progress)
    }
}

/// Reports an adapter with the attention variants that models on it use.
fn report(adapter: AdapterReport, saved: &TuningFile) -> DeviceReport<WgpuDetails> {
    let (tuned, default) = (tuned(&adapter, saved).and_then(Result::ok), AttendVariant::of_adapter(&adapter));
    let variant = |class| {
        let found = tuned.iter().flatten().find(|(of, _)| *of == class);
        named(class, found.map_or(default, |(_, variant)| *variant))
    };
    DeviceReport {
        device: adapter.device,
        product: Some(adapter.product),
        driver: Some(adapter.driver),
        details: WgpuDetails {
            interface: adapter.interface,
            is_software: adapter.is_software,
            max_binding: adapter.max_binding,
            features: adapter.features.into_iter().map(str::to_owned).collect(),
            variants: TypeClass::ALL.map(variant).into(),
            is_tuned: tuned.is_some(),
        },
    }
}

/// Times the attention variants of adapter `index`.
pub fn tune(index: usize, progress: &mut dyn FnMut(f32)) -> Result<(AdapterId, Vec<VariantTrial>), Error> {
    let mut device = WgpuDevice::open(index)?;
    let trials = device.tune(progress)?;
    let trial = |AttendTrial { class, variant: way, seconds, is_taken }| VariantTrial {
        variant: named(class, way),
        seconds,
        is_selected: is_taken,
    };
    Ok((name_of(device.report()), trials.into_iter().map(trial).collect()))
}

/// Returns the indices of adapters that cannot use their saved attention variants, and why.
pub fn unfit(saved: &TuningFile) -> Vec<(usize, String)> {
    if saved.adapters.is_empty() {
        return Vec::new();
    }
    let reports = kvant_wgpu::adapters();
    let why = |report: &AdapterReport| tuned(report, saved)?.err();
    let reasons = (0..).zip(&reports).filter_map(|(index, report)| Some((index, why(report)?)));
    reasons.map(|(index, why)| (index, format!("wgpu:{index}: {why}"))).collect()
}

/// Returns the saved attention variants of an adapter, or why it cannot use them; `None` where no
/// variants are saved for it.
fn tuned(
    report: &AdapterReport,
    saved: &TuningFile,
) -> Option<Result<Vec<(TypeClass, AttendVariant)>, String>> {
    let name = name_of(report);
    let kept = saved.adapters.iter().find(|kept| kept.adapter == name)?;
    Some(kept.ways.iter().map(|way| resolve_variant(report, way)).collect())
}

fn name_of(report: &AdapterReport) -> AdapterId {
    let AdapterReport { product, interface, driver, .. } = report.clone();
    AdapterId { product, interface, driver }
}

fn named(class: TypeClass, AttendVariant { look_ups, queries, words }: AttendVariant) -> AttendVariantName {
    let look_ups = (class == TypeClass::Codebooks).then(|| look_ups.name().to_owned());
    AttendVariantName { types: class.name().to_owned(), look_ups, queries, words }
}

/// Resolves the variant that `way` names on an adapter.
fn resolve_variant(
    report: &AdapterReport,
    way: &AttendVariantName,
) -> Result<(TypeClass, AttendVariant), String> {
    let AttendVariantName { types, look_ups, queries, words } = way;
    let class = TypeClass::ALL.into_iter().find(|class| class.name() == types);
    let class = class.ok_or_else(|| format!("unknown type class {}", printable(types, MAX_SHOWN)))?;
    let named = |name: &String| CodebookLookup::ALL.into_iter().find(|look_ups| look_ups.name() == name);
    let look_ups = match look_ups {
        Some(name) => {
            named(name).ok_or_else(|| format!("unknown look-ups {}", printable(name, MAX_SHOWN)))?
        }
        None => AttendVariant::of_adapter(report).look_ups,
    };
    let way = AttendVariant { look_ups, queries: *queries, words: *words };
    way.check(report).map_err(|error| error.to_string())?;
    Ok((class, way))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::tuning_file::AdapterTuning;

    fn report(has_subgroups: bool) -> AdapterReport {
        AdapterReport {
            device: "wgpu:0".to_owned(),
            product: "a card".to_owned(),
            interface: "vulkan".to_owned(),
            driver: "its driver 1".to_owned(),
            is_software: false,
            has_own_memory: true,
            max_binding: 1 << 30,
            has_subgroups,
            features: Vec::new(),
        }
    }

    fn load_tuning(ways: Vec<AttendVariantName>) -> TuningFile {
        TuningFile { cpu: None, adapters: vec![AdapterTuning { adapter: name_of(&report(true)), ways }] }
    }

    #[test]
    fn saved_attention_variants_apply_to_the_same_driver_only() {
        let ways = [
            (TypeClass::Floats, AttendVariant { queries: 8, ..AttendVariant::of_adapter(&report(true)) }),
            (TypeClass::Codebooks, AttendVariant { look_ups: CodebookLookup::Shuffle, queries: 4, words: 2 }),
        ];
        let kept = load_tuning(ways.map(|(class, way)| named(class, way)).into());
        assert_eq!(tuned(&report(true), &kept), Some(Ok(ways.into())));
        let updated = AdapterReport { driver: "its driver 2".to_owned(), ..report(true) };
        assert_eq!(tuned(&updated, &kept), None, "another driver compiles otherwise");
    }

    #[test]
    fn unusable_saved_attention_variants_are_ignored_with_a_reason() {
        let way = |types: &str, look_ups: &str, queries| {
            let look_ups = Some(look_ups.to_owned());
            load_tuning(vec![AttendVariantName { types: types.to_owned(), look_ups, queries, words: 1 }])
        };
        for (kept, want) in [
            (way("codebooks", "shuffle", 4), "without subgroups"),
            (way("codebooks", "select", usize::MAX), "4 or 8 queries"),
            (way("codebooks", "magic\n", 4), r"unknown look-ups magic\n"),
            (way("lions", "select", 4), "unknown type class lions"),
        ] {
            let why = tuned(&report(false), &kept).unwrap().unwrap_err();
            assert!(why.contains(want), "{why}, want {want}");
        }
    }
}
