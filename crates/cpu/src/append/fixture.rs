//! Caches for tests, with a record of what their streams must hold.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{
    AttendParams, Held, KvLayer, KvMemory, KvPart, KvStream, Pages, Place, Result, Rows as StepRows,
    StreamSizes, StreamSpec,
};
use kvant_codec::random::Random;
use kvant_codec::tile::{TILE, TileLayout, prepare_row};
use kvant_codec::{DType, Side};

use super::{Scratch, kv_append};
use crate::attend::{self, Stage};
use crate::{CpuPage, Isa, Pool};

/// The streams of a layer to test with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) k: DType,
    pub(crate) v: DType,
    pub(crate) k_head_dim: usize,
    pub(crate) v_head_dim: usize,
    pub(crate) n_kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) sink_tiles: usize,
    pub(crate) extra_tail_tiles: usize,
    pub(crate) tail: bool,
    pub(crate) alpha: f32,
    pub(crate) window: Option<usize>,
}

impl Case {
    pub(crate) fn new(k: DType, v: DType) -> Self {
        Self {
            k,
            v,
            k_head_dim: 128,
            v_head_dim: 128,
            n_kv_heads: 2,
            group: 2,
            sink_tiles: 0,
            extra_tail_tiles: 0,
            tail: true,
            alpha: 1.0,
            window: None,
        }
    }

    pub(crate) fn spec(&self, side: Side) -> StreamSpec {
        let (dtype, head_dim) = match side {
            Side::K => (self.k, self.k_head_dim),
            Side::V => (self.v, self.v_head_dim),
        };
        let spec = StreamSpec::new(dtype, side, head_dim);
        if dtype.code().is_none() {
            return spec;
        }
        let tail_tiles = if self.tail { spec.tail_tiles + self.extra_tail_tiles } else { 0 };
        StreamSpec { sink_tiles: self.sink_tiles, tail_tiles, alpha: self.alpha, ..spec }
    }

    pub(crate) fn params(&self) -> AttendParams {
        AttendParams {
            n_heads: self.n_kv_heads * self.group,
            n_kv_heads: self.n_kv_heads,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
            scale: 1.0 / (self.k_head_dim as f32).sqrt(),
            soft_cap: None,
        }
    }
}

/// The rows of one stream `[tokens][dim]`, padded and rotated as stored: as they are read in 16 bit, and from the blocks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    pub(crate) sixteen: Vec<Vec<f32>>,
    pub(crate) main: Vec<Vec<f32>>,
}

impl Record {
    /// The row of `token` as a query at `position` sees it.
    pub(crate) fn seen(&self, spec: &StreamSpec, position: usize, token: usize) -> &[f32] {
        let tile = token / TILE;
        let in_16_bit = tile < spec.sink_tiles || tile >= spec.window(position / TILE);
        if in_16_bit { &self.sixteen[token] } else { &self.main[token] }
    }
}

/// A layer of one sequence, and beside it what a reader must find in each stream.
pub(crate) struct Filled {
    pub(crate) case: Case,
    pub(crate) layer: KvLayer,
    pub(crate) memory: KvMemory<CpuPage>,
    /// The rows of the last step.
    pub(crate) rows: StepRows,
    band: CpuPage,
    pub(crate) keys: Vec<Record>,
    pub(crate) values: Vec<Record>,
}

impl Filled {
    pub(crate) fn empty(case: Case) -> Self {
        let mut sizes = StreamSizes::default();
        let streams = |side| vec![case.spec(side); case.n_kv_heads];
        let layer = KvLayer::new(streams(Side::K), streams(Side::V), case.window, &mut sizes);
        let none = vec![Record::default(); case.n_kv_heads];
        Self {
            case,
            layer,
            memory: KvMemory::new(sizes),
            rows: StepRows { first: 0, n: 0, start: 0, coded: case.sink_tiles },
            band: CpuPage::zeroed(0).unwrap(),
            keys: none.clone(),
            values: none,
        }
    }

    /// Gaussian keys and values of `tokens` tokens, appended `chunk` at a time; the same whatever the chunk.
    pub(crate) fn gaussian(case: Case, isa: Isa, tokens: usize, chunk: usize, seed: u64) -> Self {
        let mut filled = Self::empty(case);
        filled.append_gaussian(isa, tokens, chunk, seed);
        filled
    }

    pub(crate) fn append_gaussian(&mut self, isa: Isa, tokens: usize, chunk: usize, seed: u64) {
        let mut random = Random::new(seed);
        let mut left = tokens;
        while left > 0 {
            let n = chunk.min(left);
            let (mut k, mut v) = (Vec::new(), Vec::new());
            for _ in 0..n {
                for (x, head_dim) in [(&mut k, self.case.k_head_dim), (&mut v, self.case.v_head_dim)] {
                    let from = x.len();
                    x.resize(from + self.case.n_kv_heads * head_dim, 0.0);
                    random.fill_gaussian(&mut x[from..], 1.0);
                }
            }
            self.append(isa, &k, &v, n);
            left -= n;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.end()
    }

    /// Appends through the device's code, and to the record through the codec.
    pub(crate) fn append(&mut self, isa: Isa, k: &[f32], v: &[f32], n: usize) {
        let case = self.case;
        let tailed =
            [Side::K, Side::V].map(|side| case.spec(side)).into_iter().find(|spec| spec.tail_tiles > 0);
        let coded = match tailed {
            Some(spec) if self.rows.n > 0 => spec.coded_tiles(self.len()),
            _ => self.rows.coded,
        };
        self.rows = StepRows { first: 0, n, start: self.len(), coded };
        let main = |stream: &KvStream| {
            stream.spec.writes(self.rows).find_map(|write| match write.place {
                Place::Main(tile) => Some(tile / kvant_backend::TILES_PER_BLOCK),
                _ => None,
            })
        };
        let end = self.layer.streams().map(|s| s.spec.main_end(self.len())).max().unwrap_or(0);
        let end = end.div_ceil(kvant_backend::TOKENS_PER_BLOCK);
        let first = self.layer.streams().filter_map(main).min().unwrap_or(end);
        self.memory.reserve(first..end, true, &Fresh::default()).unwrap();
        for (streams, records, x) in
            [(&self.layer.k, &mut self.keys, k), (&self.layer.v, &mut self.values, v)]
        {
            for (head, (stream, record)) in streams.iter().zip(records).enumerate() {
                let head_dim = stream.spec.head_dim;
                for row in 0..n {
                    record.push(&stream.spec, &x[(row * case.n_kv_heads + head) * head_dim..][..head_dim]);
                }
            }
        }
        let part = KvPart { rows: self.rows, layer: &self.layer, memory: &mut self.memory, band: 64 };
        self.band = CpuPage::zeroed(64 + part.band_bytes()).unwrap();
        let (pool, band) = (Pool::new(2).unwrap(), Some(&mut self.band));
        kv_append(isa, &pool, &mut Scratch::default(), &mut [part], [k, v], band).unwrap();
    }

    /// Attention of the rows of the last step.
    pub(crate) fn attend(&mut self, isa: Isa, n_threads: usize, stage: Stage, q: &[f32]) -> Vec<f32> {
        let case = self.case;
        let part = KvPart { rows: self.rows, layer: &self.layer, memory: &mut self.memory, band: 64 };
        let mut out = vec![f32::NAN; self.rows.n * case.n_kv_heads * case.group * case.v_head_dim];
        let (pool, scratch) = (Pool::new(n_threads).unwrap(), &mut attend::Scratch::default());
        let (params, band) = (case.params(), Some(&self.band));
        attend::attend(isa, &pool, scratch, stage, &params, &[part], q, band, &mut out).unwrap();
        out
    }
}

/// New memory whenever it is asked for.
#[derive(Default)]
struct Fresh(Arc<AtomicUsize>);

impl Pages<CpuPage> for Fresh {
    fn page(&self, n_bytes: usize) -> Result<Held<CpuPage>> {
        Ok(Held::new(CpuPage::zeroed(n_bytes)?, &self.0))
    }

    fn copy(&self, page: &CpuPage) -> Result<Held<CpuPage>> {
        Ok(Held::new(page.clone(), &self.0))
    }
}

impl Record {
    fn push(&mut self, spec: &StreamSpec, row: &[f32]) {
        let mut padded = vec![0.0; spec.dim()];
        prepare_row(spec.rotates, row, &mut padded);
        let sixteen = through(spec.f16_layout(), &padded);
        if spec.tail_tiles > 0 {
            padded.clone_from(&sixteen);
        }
        if spec.dtype.code().is_some() {
            padded.iter_mut().for_each(|v| *v *= spec.alpha);
        }
        self.main.push(through(spec.main_layout(), &padded));
        self.sixteen.push(sixteen);
    }
}

fn through(layout: TileLayout, row: &[f32]) -> Vec<f32> {
    let (mut tile, mut back) = (vec![0; layout.bytes()], vec![0.0; row.len()]);
    layout.put(&mut tile, 0, row);
    layout.get(&tile, 0, &mut back);
    back
}
