//! Cross-compiles the kernels to the languages of Metal and DX12, which no test machine compiles:
//! the output has every entry point, generated as wgpu does; and its resource use stays within the
//! limits that WebGPU guarantees.

use naga::back::{hlsl, msl};
use naga::proc::Layouter;
use naga::valid::{Capabilities, ModuleInfo, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, Module};

use crate::arena::MAX_SLABS;
use crate::constants::Constants;
use crate::shader::{Source, Text};
use crate::{append, attend, elementwise, experts, matmul, norm, recurrent, rope, streams, top_k};

static PLAIN: [&Source; 10] = [
    &elementwise::SOURCE,
    &experts::ROUTE,
    &experts::COMBINE,
    &norm::SOURCE,
    &matmul::OPERAND,
    &matmul::ORDER,
    &recurrent::SOURCE,
    &rope::SOURCE,
    &streams::SOURCE,
    &top_k::SOURCE,
];

/// Default limits of WebGPU: invocations of a workgroup, bytes of workgroup memory, buffers of an
/// entry point.
const MAX_INVOCATIONS: u32 = 256;
const MAX_SHARED_BYTES: u32 = 16_384;
const MAX_BUFFERS: usize = 8;

/// Returns every source, and every variant of those that have several.
pub(crate) fn sources() -> impl Iterator<Item = (&'static Source, Constants)> {
    let plain = PLAIN.into_iter().map(|source| (source, Constants::default()));
    let appends = [1, MAX_SLABS].map(|n_slabs| (&append::SOURCE, append::variant(n_slabs)));
    plain.chain(appends).chain(matmul::variants()).chain(attend::variants())
}

/// Parses and validates a source without optional features, except subgroups in the variants that
/// use them. Packed f16 is part of WebGPU, but a feature in naga.
fn valid(source: &Source, variant: Constants) -> (Module, ModuleInfo) {
    let text = Text::new(source, &variant).whole;
    let module =
        naga::front::wgsl::parse_str(&text).unwrap_or_else(|error| panic!("{}", error.emit_to_string(&text)));
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    capabilities.set(Capabilities::SUBGROUP, text.contains("subgroupShuffle"));
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    validator.subgroup_stages(ShaderStages::COMPUTE).subgroup_operations(SubgroupOperationSet::all());
    let info = validator.validate(&module);
    let info = info.unwrap_or_else(|error| panic!("{}", error.emit_to_string(&text)));
    (module, info)
}

fn names(module: &Module) -> Vec<&str> {
    module.entry_points.iter().map(|entry| entry.name.as_str()).collect()
}

#[test]
fn every_kernel_becomes_text_for_metal() {
    for (source, variant) in sources() {
        let (module, info) = valid(source, variant);
        let options = msl::Options { lang_version: (2, 4), ..Default::default() };
        let (text, translation) = msl::write_string(&module, &info, &options, &Default::default()).unwrap();
        for (name, emitted) in names(&module).into_iter().zip(&translation.entry_point_names) {
            let emitted = emitted.as_ref().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(text.contains(&format!("kernel void {emitted}(")), "{name} is missing");
        }
    }
}

#[test]
fn every_kernel_becomes_text_for_dx12() {
    for (source, variant) in sources() {
        let (module, info) = valid(source, variant);
        let (mut text, options, pipeline) = (String::new(), hlsl::Options::default(), Default::default());
        let reflection =
            hlsl::Writer::new(&mut text, &options, &pipeline).write(&module, &info, None).unwrap();
        for (name, emitted) in names(&module).into_iter().zip(&reflection.entry_point_names) {
            let emitted = emitted.as_ref().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(text.contains(&format!("void {emitted}(")), "{name} is missing");
        }
    }
}

#[test]
fn no_kernel_asks_for_more_than_every_gpu_has() {
    let mut n_kernels = 0;
    for (source, variant) in sources() {
        let (module, info) = valid(source, variant);
        let mut layouter = Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        for (index, entry) in module.entry_points.iter().enumerate() {
            let used = |space: fn(AddressSpace) -> bool| {
                let info = info.get_entry_point(index);
                module
                    .global_variables
                    .iter()
                    .filter(move |(handle, variable)| !info[*handle].is_empty() && space(variable.space))
            };
            let invocations: u32 = entry.workgroup_size.iter().product();
            let shared: u32 = used(|space| space == AddressSpace::WorkGroup)
                .map(|(_, variable)| layouter[variable.ty].size)
                .sum();
            let buffers = used(|space| matches!(space, AddressSpace::Storage { .. })).count();
            assert!(
                (1..=MAX_INVOCATIONS).contains(&invocations),
                "{}: {invocations} invocations",
                entry.name
            );
            assert!(shared <= MAX_SHARED_BYTES, "{}: {shared} bytes are shared", entry.name);
            assert!(buffers <= MAX_BUFFERS, "{}: {buffers} buffers", entry.name);
            n_kernels += 1;
        }
    }
    assert!(n_kernels >= PLAIN.len(), "{n_kernels} kernels");
}
