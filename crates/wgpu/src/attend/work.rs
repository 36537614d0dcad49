//! Attention over a filled layer, as a workload for measurements.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use kvant_backend::{
    AttendParams, Backend, CountedPage, KvBatchEntry, KvLayer, KvMemory, KvTensorSpec, Page, PageAllocator,
    Result, TILES_PER_BLOCK, TOKENS_PER_BLOCK, TensorSizes, TileLocation, TokenSpan,
};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side, TILE};

use crate::{WgpuBuffer, WgpuDevice, WgpuPage};

const N_KV_HEADS: usize = 2;
const GROUP: usize = 6;
const HEAD_DIM: usize = 128;
/// Distinct tiles; the rest repeat them.
const DISTINCT: usize = 31;

/// The last rows of a sequence that attend to all of it, in one layer with the heads of
/// Qwen2.5-1.5B: 2 KV heads of 128, 6 query heads each. Keys and values are random tiles, repeated.
pub struct AttendWork {
    params: AttendParams,
    rows: TokenSpan,
    layer: KvLayer,
    memory: KvMemory<WgpuPage>,
    q: WgpuBuffer,
    out: WgpuBuffer,
}

impl AttendWork {
    /// Creates `n_rows` rows at the end of `tokens` tokens, all in whole tiles, with keys of type
    /// `k` and values of type `v`, on `device`.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &WgpuDevice, [k, v]: [DType; 2], tokens: usize, n_rows: usize) -> Result<Self> {
        let n_heads = N_KV_HEADS * GROUP;
        let mut values = vec![0.0; n_rows * n_heads * HEAD_DIM];
        Random::new(0).fill_gaussian(&mut values, 1.0);
        let (mut q, out) = (device.buffer(values.len())?, device.buffer(values.len())?);
        device.write(&mut q, &values)?;
        let params = AttendParams {
            n_heads,
            n_kv_heads: N_KV_HEADS,
            k_head_dim: HEAD_DIM,
            v_head_dim: HEAD_DIM,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            soft_cap: None,
        };
        let rows = TokenSpan { first: 0, n: n_rows, start: tokens - n_rows, first_tail_tile: 0 };
        let (layer, memory) = filled(device, [k, v], tokens)?;
        Ok(Self { params, rows, layer, memory, q, out })
    }

    /// Returns the number of pairs of query head and key.
    pub fn pairs(&self) -> usize {
        let keys = |row| self.rows.start + row + 1;
        (0..self.rows.n).map(keys).sum::<usize>() * self.params.n_heads
    }

    /// Returns the seconds of attention on `device`, on which this was created, or of its stage
    /// `stage` ([`Backend::attend_stages`]), `launches` times in one submission.
    ///
    /// # Errors
    /// Those of [`Backend::attend`].
    pub fn seconds(&mut self, device: &WgpuDevice, stage: Option<usize>, launches: usize) -> Result<f64> {
        let Self { params, rows, layer, memory, q, out } = self;
        device.finish()?;
        let started = Instant::now();
        for _ in 0..launches {
            let part = KvBatchEntry { rows: *rows, layer, memory, step_offset: 0, channel_scales: None };
            match stage {
                Some(stage) => device.attend_staged(stage, params, &[part], q, None, out)?,
                None => device.attend(params, &[part], q, None, None, out)?,
            }
        }
        device.finish()?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Allocator without a budget.
struct Fresh<'a>(&'a WgpuDevice, Arc<AtomicUsize>);

impl PageAllocator<WgpuPage> for Fresh<'_> {
    fn page(&self, n_bytes: usize) -> Result<CountedPage<WgpuPage>> {
        Ok(CountedPage::new(self.0.page(n_bytes)?, &self.1))
    }

    fn copy(&self, page: &WgpuPage) -> Result<CountedPage<WgpuPage>> {
        Ok(CountedPage::new(page.duplicate()?, &self.1))
    }
}

/// Returns a layer of `tokens` tokens in blocks, and its memory.
fn filled(device: &WgpuDevice, [k, v]: [DType; 2], tokens: usize) -> Result<(KvLayer, KvMemory<WgpuPage>)> {
    let mut sizes = TensorSizes::default();
    let tensor_specs = |dtype, side| {
        vec![KvTensorSpec { tail_tiles: 0, ..KvTensorSpec::new(dtype, side, HEAD_DIM) }; N_KV_HEADS]
    };
    let layer = KvLayer::new(tensor_specs(k, Side::K), tensor_specs(v, Side::V), None, &mut sizes);
    let mut memory = KvMemory::new(sizes);
    let blocks = tokens.div_ceil(TOKENS_PER_BLOCK);
    memory.reserve(0..blocks, false, &Fresh(device, Arc::default()))?;
    let mut random = Random::new(1);
    let tiles: Vec<Vec<Vec<u8>>> = layer
        .tensors()
        .map(|tensor| (0..DISTINCT).map(|_| tile(&tensor.spec, &mut random)).collect())
        .collect();
    for block in 0..blocks {
        let first = block * TILES_PER_BLOCK;
        let page = memory.page_mut(TileLocation::Main(first));
        let mut bytes = vec![0; page.n_bytes()];
        for (tensor, tiles) in layer.tensors().zip(&tiles) {
            for tile in first..first + TILES_PER_BLOCK {
                let (layout, offset) = tensor.locate(TileLocation::Main(tile));
                bytes[offset..][..layout.bytes()].copy_from_slice(&tiles[tile % DISTINCT]);
            }
        }
        device.write_page(page, &bytes)?;
    }
    Ok((layer, memory))
}

fn tile(spec: &KvTensorSpec, random: &mut Random) -> Vec<u8> {
    let layout = spec.main_layout();
    let mut row = vec![0.0; spec.stored_dim()];
    let mut tile = vec![0; layout.bytes()];
    for slot in 0..TILE {
        random.fill_gaussian(&mut row, 1.0);
        layout.put(&mut tile, slot, &row);
    }
    tile
}
