//! *Slots*, each an expert of a row, in the order of their experts, so that weights are read once
//! for several rows. The device computes the order from the router's result, which the host does
//! not read; the launches fit any selection.

use bytemuck::{Pod, Zeroable};

use super::Shape;
use crate::constants::Constants;
use crate::kv::NONE;
use crate::scratch::Scratch;
use crate::{Gpu, Part, Source, WgpuError};

pub(crate) static SOURCE: Source = Source {
    parts: &[Part { name: "order.wgsl", text: include_str!("order.wgsl") }],
    constants: || {
        let constants = Constants::default().whole("THREADS", 256).whole("NONE", NONE as usize);
        constants.whole("MAX_EXPERTS", MAX_EXPERTS)
    },
};

/// Maximum number of experts whose slots are ordered: a workgroup shares a counter for each.
const MAX_EXPERTS: usize = 2048;
/// Minimum number of slots per expert for an order: with fewer, most experts fill only a part of a
/// block.
const MIN_SLOTS: usize = 2;

/// Slots in blocks, each of one expert, as many as a thread has rows.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    /// `[n_positions]`: slots, or [`NONE`].
    pub list: Scratch<'a>,
    /// A whole number of blocks.
    pub n_positions: usize,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    slots: u32,
    n_experts: u32,
    n_positions: u32,
    block: u32,
}

impl<'a> Order<'a> {
    /// Orders slots whose experts, of `n_experts`, are in `experts` `[slots]`; `None` where it
    /// costs more than it saves.
    pub fn new(
        gpu: &'a Gpu,
        experts: &wgpu::Buffer,
        slots: usize,
        n_experts: usize,
    ) -> Result<Option<Self>, WgpuError> {
        if slots < MIN_SLOTS * n_experts || n_experts > MAX_EXPERTS {
            return Ok(None);
        }
        let block = Shape::for_block(gpu).rows;
        let n_positions = max_blocks(slots, n_experts, block) * block;
        let list = gpu.scratch(n_positions * size_of::<u32>(), "slots of experts")?;
        let [slots, n_experts, n_listed, block] = [slots, n_experts, n_positions, block].map(|n| n as u32);
        let params = Params { slots, n_experts, n_positions: n_listed, block };
        let kernel = gpu.kernel(&SOURCE, "order_slots")?;
        gpu.launch::<_, u32>(&kernel, [1; 3], &params, &[], &[(1, experts), (2, &list)])?;
        Ok(Some(Self { list, n_positions }))
    }
}

/// Returns the maximum number of blocks of `slots`, at least as many as there are experts: the last
/// block of every expert may hold a single slot.
fn max_blocks(slots: usize, n_experts: usize, block: usize) -> usize {
    (slots + (block - 1) * n_experts) / block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every distribution of 12 slots over 3 experts: the worst takes all blocks, and none takes
    /// more.
    #[test]
    fn blocks_suffice_for_every_choice() {
        for block in [1, 4, 8] {
            let splits = (0..=12).flat_map(|a| (0..=12 - a).map(move |b| [a, b, 12 - a - b]));
            let max = splits.map(|n| n.iter().map(|n: &usize| n.div_ceil(block)).sum::<usize>()).max();
            assert_eq!(max, Some(max_blocks(12, 3, block)), "blocks of {block}");
        }
    }
}
