//! Layers on a device beside the same on the host, for tests: the reference is the codec, one row at a time.

use kvant_backend::{AttendParams, Backend, KvLayer, Page, Place, Result, Stream, StreamSpec};
use kvant_codec::random::Random;
use kvant_codec::tile::{Side, prepare_row};
use kvant_codec::{DType, Rotation};

use crate::{CudaDevice, CudaPage};

/// A page in host memory.
#[derive(Debug)]
pub(crate) struct HostPage(pub Vec<u8>);

impl Page for HostPage {
    type Table = ();

    fn n_bytes(&self) -> usize {
        self.0.len()
    }

    fn duplicate(&self) -> Result<Self> {
        Ok(Self(self.0.clone()))
    }
}

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
    pub has_tail: bool,
    pub alpha: f32,
}

impl Case {
    /// Two KV heads of 128 with three query heads each.
    pub fn new(k: DType, v: DType) -> Self {
        let (k_head_dim, v_head_dim) = (128, 128);
        Self {
            k,
            v,
            n_kv_heads: 2,
            group: 3,
            k_head_dim,
            v_head_dim,
            sink_tiles: 0,
            has_tail: true,
            alpha: 1.0,
        }
    }

    fn spec(&self, side: Side) -> StreamSpec {
        let (dtype, head_dim) = match side {
            Side::K => (self.k, self.k_head_dim),
            Side::V => (self.v, self.v_head_dim),
        };
        let spec = StreamSpec::new(dtype, side, head_dim);
        let tail_tiles = if self.has_tail { spec.tail_tiles } else { 0 };
        StreamSpec { sink_tiles: self.sink_tiles, tail_tiles, alpha: self.alpha, ..spec }
    }

    /// Parameters of attention for the last `rows` of `tokens`.
    pub fn params(&self, tokens: usize, rows: usize) -> AttendParams {
        AttendParams {
            n_heads: self.n_kv_heads * self.group,
            n_kv_heads: self.n_kv_heads,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
            scale: 1.0 / (self.k_head_dim as f32).sqrt(),
            first_row: 0,
            start: tokens - rows,
            rows,
        }
    }
}

/// A layer twice.
pub(crate) struct Twins {
    pub case: Case,
    pub device: KvLayer<CudaPage>,
    pub host: KvLayer<HostPage>,
    /// Factor on the values that are appended.
    pub v_gain: f32,
    random: Random,
}

impl Twins {
    pub fn new(device: &CudaDevice, case: Case, seed: u64) -> Self {
        fn layer<P: Page>(case: Case, alloc: &mut dyn FnMut(usize) -> Result<P>) -> KvLayer<P> {
            let mut streams = |side| {
                (0..case.n_kv_heads).map(|_| Stream::new(case.spec(side), alloc).unwrap()).collect::<Vec<_>>()
            };
            KvLayer { k: streams(Side::K), v: streams(Side::V) }
        }
        Self {
            case,
            device: layer(case, &mut |bytes| device.page(bytes)),
            host: layer(case, &mut |bytes| Ok(HostPage(vec![0; bytes]))),
            v_gain: 1.0,
            random: Random::new(seed),
        }
    }

    /// Appends `rows` rows of Gaussian numbers, with an outlier here and there, to both.
    pub fn append(&mut self, device: &CudaDevice, rows: usize) {
        let Case { n_kv_heads, k_head_dim, v_head_dim, .. } = self.case;
        let [k, v] = [(k_head_dim, 1.0), (v_head_dim, self.v_gain)].map(|(dim, gain)| {
            let mut values = vec![0.0; rows * n_kv_heads * dim];
            self.random.fill_gaussian(&mut values, 1.0);
            values.iter_mut().step_by(97).for_each(|value| *value *= 9.0);
            values.iter_mut().for_each(|value| *value *= gain);
            values
        });
        for stream in self.device.k.iter_mut().chain(&mut self.device.v) {
            stream.reserve(rows, &mut |bytes| device.page(bytes)).unwrap();
        }
        let upload = |values: &[f32]| {
            let mut buffer = device.buffer(values.len()).unwrap();
            device.write(&mut buffer, values).unwrap();
            buffer
        };
        device.kv_append(&mut self.device, &upload(&k), &upload(&v), 0..rows).unwrap();
        for (streams, x, dim) in [(&mut self.host.k, &k, k_head_dim), (&mut self.host.v, &v, v_head_dim)] {
            for (head, stream) in streams.iter_mut().enumerate() {
                stream.reserve(rows, &mut |bytes| Ok(HostPage(vec![0; bytes]))).unwrap();
                append(stream, rows, |row| &x[(row * n_kv_heads + head) * dim..][..dim]);
            }
        }
    }
}

/// Appends `row(0) .. row(rows)` to one stream, through the codec.
fn append<'a>(stream: &mut Stream<HostPage>, rows: usize, row: impl Fn(usize) -> &'a [f32]) {
    let spec = *stream.spec();
    let is_coded = !matches!(spec.dtype, DType::F32 | DType::F16 | DType::BF16);
    let rotation = spec.rotates().then(Rotation::kv);
    let mut value = vec![0.0; spec.dim()];
    let plan = stream.plan(rows);
    for write in plan.writes() {
        let is_main = matches!(write.place, Place::Main(_));
        let alpha = if is_main && is_coded { spec.alpha } else { 1.0 };
        if let Some((tail, slots)) = write.from_tail {
            for slot in slots {
                let from = stream.tile_at(tail);
                from.layout.get(&from.page.0[from.offset..][..from.layout.bytes()], slot, &mut value);
                put(stream, write.place, slot, alpha, &mut value);
            }
        }
        for (i, slot) in write.from_rows.enumerate() {
            prepare_row(rotation.as_ref(), row(write.first_row + i), &mut value);
            put(stream, write.place, slot, alpha, &mut value);
        }
    }
    stream.commit(plan);
}

fn put(stream: &mut Stream<HostPage>, place: Place, slot: usize, alpha: f32, value: &mut [f32]) {
    value.iter_mut().for_each(|v| *v *= alpha);
    let (layout, page, offset) = stream.tile_mut(place);
    layout.put(&mut page.0[offset..][..layout.bytes()], slot, value);
}
