//! Sequences on a device beside the same on the CPU, for tests: the reference is the CPU's scalar code.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{
    AttendParams, Backend, Held, KvLayer, KvMemory, KvPart, Page, Pages, Place, Result, Rows, StreamSizes,
    StreamSpec, TILES_PER_BLOCK, TOKENS_PER_BLOCK,
};
use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_codec::tile::{Side, TILE, TileLayout, prepare_row};
use kvant_cpu::{CpuDevice, CpuPage, Isa};

use crate::{CudaDevice, CudaPage, emulator};

/// What a layer is like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub k: DType,
    pub v: DType,
    pub n_kv_heads: usize,
    pub group: usize,
    pub k_head_dim: usize,
    pub v_head_dim: usize,
    pub sink_tiles: usize,
    /// Of the tail, if there is one.
    pub tail_tiles: usize,
    pub alpha: f32,
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
}

impl Case {
    /// Two KV heads of 128 with three query heads each.
    pub fn new(k: DType, v: DType) -> Self {
        Self {
            k,
            v,
            n_kv_heads: 2,
            group: 3,
            k_head_dim: 128,
            v_head_dim: 128,
            sink_tiles: 0,
            tail_tiles: 2,
            alpha: 1.0,
            window: None,
            soft_cap: None,
        }
    }

    pub fn spec(&self, side: Side) -> StreamSpec {
        let (dtype, head_dim) = match side {
            Side::K => (self.k, self.k_head_dim),
            Side::V => (self.v, self.v_head_dim),
        };
        let spec = StreamSpec::new(dtype, side, head_dim);
        if dtype.code().is_none() {
            return spec;
        }
        StreamSpec { sink_tiles: self.sink_tiles, tail_tiles: self.tail_tiles, alpha: self.alpha, ..spec }
    }

    pub fn params(&self) -> AttendParams {
        AttendParams {
            n_heads: self.n_kv_heads * self.group,
            n_kv_heads: self.n_kv_heads,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
            scale: 1.0 / (self.k_head_dim as f32).sqrt(),
            soft_cap: self.soft_cap,
        }
    }
}

/// The rows of one stream `[tokens][dim]`, padded and rotated as stored: as they are read in 16 bit, and from the blocks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    sixteen: Vec<Vec<f32>>,
    main: Vec<Vec<f32>>,
}

impl Record {
    /// The row of `token` as a query at `position` sees it, and whether that is its code.
    pub fn seen(&self, spec: &StreamSpec, position: usize, token: usize) -> (&[f32], bool) {
        let tile = token / TILE;
        let in_16_bit = tile < spec.sink_tiles || tile >= spec.window(position / TILE);
        if in_16_bit { (&self.sixteen[token], false) } else { (&self.main[token], true) }
    }

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

/// A sequence of one layer twice.
pub(crate) struct Twins {
    pub case: Case,
    pub layer: KvLayer,
    pub device: KvMemory<CudaPage>,
    pub host: KvMemory<CpuPage>,
    /// The rows of the last step.
    pub rows: Rows,
    /// Where its share of the last step's band begins.
    pub band: usize,
    pub keys: Vec<Record>,
    pub values: Vec<Record>,
    /// Factors on the keys and on the values that are appended.
    pub k_gain: f32,
    pub v_gain: f32,
    random: Random,
}

impl Twins {
    pub fn new(case: Case, seed: u64) -> Self {
        Self::with(case, seed, |_| ())
    }

    /// A layer that is a little different from `case`.
    pub fn with(case: Case, seed: u64, change: impl FnOnce(&mut KvLayer)) -> Self {
        let mut sizes = StreamSizes::default();
        let streams = |side| vec![case.spec(side); case.n_kv_heads];
        let mut layer = KvLayer::new(streams(Side::K), streams(Side::V), case.window, &mut sizes);
        change(&mut layer);
        let records = vec![Record::default(); case.n_kv_heads];
        Self {
            case,
            layer,
            device: KvMemory::new(sizes),
            host: KvMemory::new(sizes),
            rows: Rows { first: 0, n: 0, start: 0, coded: case.sink_tiles },
            band: 0,
            keys: records.clone(),
            values: records,
            k_gain: 1.0,
            v_gain: 1.0,
            random: Random::new(seed),
        }
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.rows.end()
    }

    /// As the device has it.
    pub fn on_device(&mut self) -> KvPart<'_, CudaPage> {
        KvPart { rows: self.rows, layer: &self.layer, memory: &mut self.device, band: self.band }
    }

    /// As the CPU has it.
    pub fn on_host(&mut self) -> KvPart<'_, CpuPage> {
        KvPart { rows: self.rows, layer: &self.layer, memory: &mut self.host, band: self.band }
    }

    /// Makes room for `n` more tokens, which are rows of a step from `first` on.
    pub fn reserve(&mut self, device: &CudaDevice, first: usize, n: usize) {
        let tailed = self.layer.streams().map(|stream| stream.spec).find(|spec| spec.tail_tiles > 0);
        let coded = match tailed {
            Some(spec) if self.len() > 0 => spec.coded_tiles(self.len()),
            _ => self.rows.coded,
        };
        self.rows = Rows { first, n, start: self.len(), coded };
        let rows = self.rows;
        let first_block = |spec: &StreamSpec| {
            spec.writes(rows).find_map(|write| match write.place {
                Place::Main(tile) => Some(tile / TILES_PER_BLOCK),
                _ => None,
            })
        };
        let end = self.layer.streams().map(|stream| stream.spec.main_end(rows.end())).max().unwrap_or(0);
        let end = end.div_ceil(TOKENS_PER_BLOCK);
        let first = self.layer.streams().filter_map(|stream| first_block(&stream.spec)).min().unwrap_or(end);
        self.device.reserve(first..end, true, &Fresh::on(device)).unwrap();
        self.host.reserve(first..end, true, &Fresh::on(&cpu())).unwrap();
    }

    /// The rows of the step: Gaussian keys and values, with an outlier here and there.
    fn gaussian(&mut self) -> [Vec<f32>; 2] {
        let Case { n_kv_heads, k_head_dim, v_head_dim, .. } = self.case;
        let [mut k, mut v] = [const { Vec::new() }; 2];
        // Token by token, so that the same come whatever the chunks.
        for token in self.rows.start..self.rows.end() {
            for (x, dim, gain) in [(&mut k, k_head_dim, self.k_gain), (&mut v, v_head_dim, self.v_gain)] {
                let from = x.len();
                x.resize(from + n_kv_heads * dim, 0.0);
                self.random.fill_gaussian(&mut x[from..], 1.0);
                x[from..].iter_mut().skip(31 * token % 97).step_by(97).for_each(|value| *value *= 9.0);
                x[from..].iter_mut().for_each(|value| *value *= gain);
            }
        }
        [k, v]
    }

    fn record(&mut self, k: &[f32], v: &[f32]) {
        let (n, n_kv_heads) = (self.rows.n, self.case.n_kv_heads);
        let sides = [(&self.layer.k, &mut self.keys, k), (&self.layer.v, &mut self.values, v)];
        for (streams, records, x) in sides {
            for (head, (stream, record)) in streams.iter().zip(records).enumerate() {
                let dim = stream.spec.head_dim;
                (0..n)
                    .for_each(|row| record.push(&stream.spec, &x[(row * n_kv_heads + head) * dim..][..dim]));
            }
        }
    }

    /// Appends `rows` rows by themselves.
    pub fn append(&mut self, device: &CudaDevice, rows: usize) -> Step {
        Step::append(device, &mut [self], &[rows])
    }

    /// Appends `tokens` rows, at most `chunk` at a time.
    pub fn fill(&mut self, device: &CudaDevice, tokens: usize, chunk: usize) {
        (0..tokens).step_by(chunk).for_each(|from| drop(self.append(device, chunk.min(tokens - from))));
    }
}

/// The reference.
pub(crate) fn cpu() -> CpuDevice {
    CpuDevice::new(Isa::Scalar, 1).unwrap()
}

/// New memory whenever it is asked for.
struct Fresh<'a, B: Backend>(&'a B, Arc<AtomicUsize>);

impl<'a, B: Backend> Fresh<'a, B> {
    fn on(backend: &'a B) -> Self {
        Self(backend, Arc::default())
    }
}

impl<B: Backend> Pages<B::Page> for Fresh<'_, B> {
    fn page(&self, n_bytes: usize) -> Result<Held<B::Page>> {
        Ok(Held::new(self.0.page(n_bytes)?, &self.1))
    }

    fn copy(&self, page: &B::Page) -> Result<Held<B::Page>> {
        Ok(Held::new(page.duplicate()?, &self.1))
    }
}

/// A buffer that holds `values`.
pub(crate) fn buffer<B: Backend>(backend: &B, values: &[f32]) -> B::Buffer {
    let mut buffer = backend.buffer(values.len()).unwrap();
    backend.write(&mut buffer, values).unwrap();
    buffer
}

/// The bytes of a page, without those it is rounded up by.
pub(crate) fn bytes_of<B: Backend>(backend: &B, page: &B::Page, n_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; page.n_bytes()];
    backend.read_page(page, &mut bytes).unwrap();
    bytes.truncate(n_bytes);
    bytes
}

/// What several sequences have appended together: its bands.
pub(crate) struct Step {
    pub device: CudaPage,
    pub host: CpuPage,
    pub band_bytes: usize,
    rows: usize,
}

impl Step {
    /// Reserves `ns[i]` rows for sequence i, and its share of the band.
    pub fn reserve(device: &CudaDevice, twins: &mut [&mut Twins], ns: &[usize]) -> Self {
        // Something before, so that offsets count.
        let (mut rows, mut band_bytes) = (0, 64);
        for (twins, &n) in twins.iter_mut().zip(ns) {
            twins.reserve(device, rows, n);
            twins.band = band_bytes;
            band_bytes += twins.on_device().band_bytes();
            rows += n;
        }
        let (device, host) = (device.page(band_bytes).unwrap(), cpu().page(band_bytes).unwrap());
        Self { device, host, band_bytes, rows }
    }

    /// Appends `ns[i]` rows to sequence i.
    pub fn append(device: &CudaDevice, twins: &mut [&mut Twins], ns: &[usize]) -> Self {
        let mut step = Self::reserve(device, twins, ns);
        let [mut k, mut v] = [const { Vec::new() }; 2];
        for twins in twins.iter_mut() {
            let [more_k, more_v] = twins.gaussian();
            twins.record(&more_k, &more_v);
            k.extend(more_k);
            v.extend(more_v);
        }
        let mut parts: Vec<_> = twins.iter_mut().map(|twins| twins.on_device()).collect();
        let (on_k, on_v) = (buffer(device, &k), buffer(device, &v));
        device.kv_append(&mut parts, &on_k, &on_v, Some(&mut step.device)).unwrap();
        let mut parts: Vec<_> = twins.iter_mut().map(|twins| twins.on_host()).collect();
        let (cpu, band) = (cpu(), Some(&mut step.host));
        cpu.kv_append(&mut parts, &buffer(&cpu, &k), &buffer(&cpu, &v), band).unwrap();
        step
    }

    /// Attention of rows of some of the sequences, which take `rows` of its rows together, on the device.
    fn attend_on_device(
        &self,
        device: &CudaDevice,
        twins: &mut [&mut Twins],
        q: &[f32],
        rows: Range<usize>,
    ) -> Vec<f32> {
        let params = twins[0].case.params();
        let width = params.n_heads * params.v_head_dim;
        // Reading a value that no kernel has written is an error.
        let mut out = emulator::poisoned(device.context(), self.rows * width);
        let parts: Vec<_> = twins.iter_mut().map(|twins| twins.on_device()).collect();
        device.attend(&params, &parts, &buffer(device, q), Some(&self.device), &mut out).unwrap();
        let mut got = vec![f32::NAN; rows.len() * width];
        device.read(&out, rows.start * width, &mut got).unwrap();
        got
    }

    /// Attention of the rows of one sequence alone, on the device.
    pub fn attend_alone(&self, device: &CudaDevice, twins: &mut Twins, q: &[f32]) -> Vec<f32> {
        let rows = twins.rows.range();
        self.attend_on_device(device, &mut [twins], q, rows)
    }

    /// Attention of its rows on the device, and on the CPU.
    pub fn attend(&self, device: &CudaDevice, twins: &mut [&mut Twins], q: &[f32]) -> [Vec<f32>; 2] {
        let got = self.attend_on_device(device, twins, q, 0..self.rows);
        let (params, cpu) = (twins[0].case.params(), cpu());
        let len = self.rows * params.n_heads * params.v_head_dim;
        let (mut on_out, mut want) = (cpu.buffer(len).unwrap(), vec![f32::NAN; len]);
        let parts: Vec<_> = twins.iter_mut().map(|twins| twins.on_host()).collect();
        cpu.attend(&params, &parts, &buffer(&cpu, q), Some(&self.host), &mut on_out).unwrap();
        cpu.read(&on_out, 0, &mut want).unwrap();
        [got, want]
    }
}
