//! Sequences of one batch on a device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvant_backend::{
    AttendParams, Backend, BlockSelection, CountedPage, KvBatchEntry, KvLayer, KvMemory, KvTensor, Page,
    PageAllocator, PooledBatchEntry, PooledKeys, Result, Rope, Selected, SelectedKeys, Selection,
    TILES_PER_BLOCK, TOKENS_PER_BLOCK, TensorSizes, TileLocation, TokenSpan,
};
use kvant_codec::Side;
use kvant_codec::tile::TILE;

use super::{Answer, Record, Shape, Tokens};
use crate::DeviceUnderTest;

/// Guard bytes around the step tiles, which must stay unchanged.
const MARGIN: usize = 64;
/// Initial content of the step tiles: finite numbers, as of an earlier step.
const STALE: u8 = 0x3c;

/// Sequences, and the step tiles of their last step.
pub struct Batch<'a, B: Backend> {
    subject: &'a DeviceUnderTest<B>,
    sequences: Vec<Sequence<'a, B>>,
    step_tiles: Option<B::Page>,
}

struct Sequence<'a, B: Backend> {
    tokens: &'a Tokens,
    layer: Arc<KvLayer>,
    memory: KvMemory<B::Page>,
    /// Rows of the last step.
    rows: TokenSpan,
    /// Offset of its step tiles.
    step_tiles: usize,
    /// Factors on its rows.
    balance: Option<B::Page>,
}

/// All bytes of a sequence's memory.
#[derive(Debug, PartialEq)]
pub struct MemoryBytes {
    sink: Vec<u8>,
    tail: Vec<u8>,
    blocks: Vec<Vec<u8>>,
}

/// Blocks of tokens that rows attend to, as in [`Selected`].
#[derive(Debug, Clone, Copy)]
pub struct Blocks {
    /// Blocks that a row attends to.
    pub n_used: usize,
    /// Tokens of a block.
    pub size: usize,
    /// One list for all KV heads, or one for each.
    pub n_lists: usize,
    /// Whether rows attend to the tokens behind the last whole block too.
    pub with_rest: bool,
}

impl Blocks {
    /// Returns the operand of the op with these numbers.
    fn with<'b, Buffer>(self, numbers: &'b Buffer, sinks: Option<&'b Buffer>) -> Selected<'b, Buffer> {
        let Self { n_used, size: block, n_lists, with_rest } = self;
        Selected { numbers, n_used, block, n_lists, with_rest, sinks }
    }
}

impl<'a, B: Backend> Batch<'a, B> {
    /// Creates empty sequences for these tokens. Sequences of one shape share a layer; all have
    /// heads of the same number and size.
    pub fn new(subject: &'a DeviceUnderTest<B>, tokens: &[&'a Tokens]) -> Self {
        let mut layers: Vec<(Shape, Arc<KvLayer>, TensorSizes)> = Vec::new();
        let empty = |&tokens: &&'a Tokens| {
            let shape = tokens.shape;
            let known = layers.iter().position(|(known, ..)| *known == shape).unwrap_or_else(|| {
                let mut sizes = TensorSizes::default();
                let specs = |side, n| vec![shape.spec(side); n];
                let n_v = if shape.shared_kv { 0 } else { shape.n_kv_heads };
                let (keys, values) = (specs(Side::K, shape.n_kv_heads), specs(Side::V, n_v));
                let layer = KvLayer {
                    scales_values: shape.scales_values(),
                    ..KvLayer::new(keys, values, shape.window, &mut sizes)
                };
                layers.push((shape, Arc::new(layer), sizes));
                layers.len() - 1
            });
            let (layer, memory) = (Arc::clone(&layers[known].1), KvMemory::new(layers[known].2));
            let rows = TokenSpan { first: 0, n: 0, start: 0, first_tail_tile: shape.sink_tiles };
            let balance = shape.balance().map(|values| balance_page(subject, &values));
            Sequence { tokens, layer, memory, rows, step_tiles: 0, balance }
        };
        Self { subject, sequences: tokens.iter().map(empty).collect(), step_tiles: None }
    }

    /// Creates one sequence with the first `n` of `tokens`, appended `chunk` at a time.
    pub fn fed(subject: &'a DeviceUnderTest<B>, tokens: &'a Tokens, n: usize, chunk: usize) -> Result<Self> {
        let mut batch = Self::new(subject, &[tokens]);
        batch.feed(&[n], chunk)?;
        Ok(batch)
    }

    /// Appends the next `counts` tokens of each sequence, at most `chunk` of one per step.
    pub fn feed(&mut self, counts: &[usize], chunk: usize) -> Result<()> {
        let mut left = counts.to_vec();
        while left.iter().any(|&n| n > 0) {
            let step: Vec<usize> = left.iter().map(|&n| n.min(chunk)).collect();
            left.iter_mut().zip(&step).for_each(|(left, n)| *left -= n);
            self.append(&step)?;
        }
        Ok(())
    }

    /// Appends the next `counts` tokens of each sequence in one step; sequences with a count of 0
    /// are not in the step.
    pub fn append(&mut self, counts: &[usize]) -> Result<()> {
        self.begin(counts)?;
        let [k, v] = self.step_rows();
        self.append_rows(&k, &v)
    }

    /// As [`Batch::append`], with these keys and values.
    pub fn append_from(&mut self, counts: &[usize], k: &[f32], v: &[f32]) -> Result<()> {
        self.begin(counts)?;
        self.append_rows(k, v)
    }

    fn append_rows(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        let [k, v] = [k, v].map(|rows| self.subject.upload(rows));
        let mut entries = entries(&mut self.sequences);
        self.subject.device().kv_append(&mut entries, &k, &v, self.step_tiles.as_mut())
    }

    /// As [`Batch::append`], with RoPE on the keys, together with the queries `q`.
    pub fn rope_append(
        &mut self,
        counts: &[usize],
        rope: &Rope<'_, B::Buffer>,
        q: &mut B::Buffer,
    ) -> Result<()> {
        self.begin(counts)?;
        let [mut k, v] = self.step_rows().map(|rows| self.subject.upload(&rows));
        let mut entries = entries(&mut self.sequences);
        self.subject.device().rope_append(&mut entries, rope, q, &mut k, &v, self.step_tiles.as_mut())
    }

    /// The equivalent of [`Batch::rope_append`] in two ops.
    pub fn rope_then_append(
        &mut self,
        counts: &[usize],
        rope: &Rope<'_, B::Buffer>,
        q: &mut B::Buffer,
    ) -> Result<()> {
        self.begin(counts)?;
        let (device, rows) = (self.subject.device(), counts.iter().sum());
        let [mut k, v] = self.step_rows().map(|rows| self.subject.upload(&rows));
        device.rope(q, rows, rope.q_heads, rope.q_norm, rope.params, rope.angles)?;
        device.rope(&mut k, rows, rope.k_heads, rope.k_norm, rope.params, rope.angles)?;
        device.kv_append(&mut entries(&mut self.sequences), &k, &v, self.step_tiles.as_mut())
    }

    /// Computes attention of the rows of the last step, `q` and result `[rows, n_heads, head_dim]`.
    pub fn attend(&mut self, q: &[f32], what: &dyn Fn() -> String) -> Result<Vec<f32>> {
        let sinks = self.shape().sinks().map(|sinks| self.subject.upload(&sinks));
        self.attend_by(q, what, |device, params, entries, q, step_tiles, out| {
            device.attend(params, entries, q, sinks.as_ref(), step_tiles, out)
        })
    }

    /// As [`Batch::attend`], up to one stage.
    pub fn attend_staged(&mut self, stage: usize, q: &[f32], what: &dyn Fn() -> String) -> Result<Vec<f32>> {
        self.attend_by(q, what, |device, params, entries, q, step_tiles, out| {
            device.attend_staged(stage, params, entries, q, step_tiles, out)
        })
    }

    /// Selects the tokens of the rows of the last step by their keys, as those of an index, into
    /// `selected`.
    pub fn select(
        &mut self,
        selection: Selection,
        [q, weights]: [&[f32]; 2],
        selected: &mut B::Buffer,
    ) -> Result<()> {
        let [q, weights] = [q, weights].map(|values| self.subject.upload(values));
        let entries = entries(&mut self.sequences);
        let (device, step_tiles) = (self.subject.device(), self.step_tiles.as_ref());
        device.select_tokens(selection, &entries, &q, &weights, step_tiles, selected)
    }

    /// Selects blocks by the keys of the first KV head, as those of an index.
    ///
    /// # Errors
    /// As the op.
    pub fn select_blocks(
        &mut self,
        selection: BlockSelection,
        q: &[f32],
        selected: &mut B::Buffer,
    ) -> Result<()> {
        let q = self.subject.upload(q);
        let entries = entries(&mut self.sequences);
        self.subject.device().select_blocks(selection, &entries, &q, self.step_tiles.as_ref(), selected)
    }

    /// As [`Batch::attend`], over the tokens of `blocks` with the numbers `[rows, n_lists,
    /// n_used]`. Rows that attend to all tokens are NaN.
    pub fn attend_selected(
        &mut self,
        q: &[f32],
        numbers: &[f32],
        blocks: Blocks,
        what: &dyn Fn() -> String,
    ) -> Result<Vec<f32>> {
        let numbers = self.subject.upload(numbers);
        let sinks = self.shape().sinks().map(|sinks| self.subject.upload(&sinks));
        let selected = blocks.with(&numbers, sinks.as_ref());
        self.attend_by(q, what, |device, params, entries, q, step_tiles, out| {
            device.attend_selected(params, entries, q, selected, step_tiles, out)
        })
    }

    /// Returns the sequences as pooled keys of the tokens of the last step of `tokens`.
    pub fn pooled<'s>(
        &'s mut self,
        tokens: &Batch<'_, B>,
        stride: usize,
    ) -> Vec<PooledBatchEntry<'s, B::Page>> {
        let spans = tokens.sequences.iter().map(|sequence| sequence.rows);
        let keys = all_entries(&mut self.sequences).map(|(keys, _)| keys);
        spans.zip(keys).map(|(tokens, keys)| PooledBatchEntry { tokens, stride, keys }).collect()
    }

    /// As [`Batch::attend`], over pooled keys too: all that a row sees, or the numbers `[rows,
    /// n_used]`.
    ///
    /// # Errors
    /// As the op.
    pub fn attend_pooled(
        &mut self,
        keys: &mut Batch<'_, B>,
        stride: usize,
        q: &[f32],
        selected: Option<(&[f32], usize)>,
        what: &dyn Fn() -> String,
    ) -> Result<Vec<f32>> {
        let sinks = self.shape().sinks().map(|sinks| self.subject.upload(&sinks));
        let numbers = selected.map(|(numbers, n_used)| (self.subject.upload(numbers), n_used));
        let selected = numbers.as_ref().map(|(numbers, n_used)| SelectedKeys { numbers, n_used: *n_used });
        let parts = &keys.pooled(self, stride);
        let pooled = PooledKeys { parts, selected, sinks: sinks.as_ref() };
        self.attend_by(q, what, |device, params, entries, q, step_tiles, out| {
            device.attend_pooled(params, entries, q, pooled, step_tiles, out)
        })
    }

    /// Returns the sequence and the position of each row of the last step.
    pub fn positions(&self) -> Vec<(&'a Tokens, usize)> {
        let of = |sequence: &Sequence<'a, B>| {
            let Sequence { tokens, rows, .. } = *sequence;
            (rows.start..rows.end()).map(move |position| (tokens, position))
        };
        self.sequences.iter().flat_map(of).collect()
    }

    fn attend_by(
        &mut self,
        q: &[f32],
        what: &dyn Fn() -> String,
        attend: impl FnOnce(
            &B,
            &AttendParams,
            &[KvBatchEntry<'_, B::Page>],
            &B::Buffer,
            Option<&B::Page>,
            &mut B::Buffer,
        ) -> Result<()>,
    ) -> Result<Vec<f32>> {
        let shape = self.shape();
        let rows: usize = self.sequences.iter().map(|sequence| sequence.rows.n).sum();
        let len = rows * shape.n_heads() * shape.v_head_dim;
        let (q, mut out) = (self.subject.upload(q), self.subject.poisoned(len));
        let entries = entries(&mut self.sequences);
        attend(self.subject.device(), &shape.params(), &entries, &q, self.step_tiles.as_ref(), &mut out)?;
        Ok(self.subject.results(&out, len, what))
    }

    /// Checks the outputs of the queries `q` of the last step.
    ///
    /// # Panics
    ///
    /// With the first wrong output.
    #[track_caller]
    pub fn assert_answers(&self, q: &[f32], got: &[f32], what: &dyn Fn() -> String) {
        let shape = self.shape();
        let (mut queries, mut outs) = (q.chunks_exact(shape.k_head_dim), got.chunks_exact(shape.v_head_dim));
        for Sequence { tokens, layer, rows, .. } in &self.sequences {
            for (position, head) in product(rows.start..rows.end(), 0..shape.n_heads()) {
                let (q, got) =
                    queries.next().zip(outs.next()).expect("a query and an output for each row and head");
                let visible = layer.window_start(position)..=position;
                let answer = Answer::new(tokens, visible, position, head, q, self.subject.attention());
                if let Some(fault) = answer.fault(got) {
                    panic!("{}: position {position}, head {head}: {fault}", what());
                }
            }
        }
    }

    /// Releases the blocks that no later query attends to.
    pub fn forget(&mut self) {
        for Sequence { layer, memory, rows, .. } in &mut self.sequences {
            memory.release_before(layer.window_start(rows.end()) / TOKENS_PER_BLOCK);
        }
    }

    /// Returns the shape that attention uses for all sequences.
    fn shape(&self) -> Shape {
        self.sequences[0].tokens.shape
    }

    /// Returns the bytes of sequence `index`.
    pub fn memory_bytes(&self, index: usize) -> MemoryBytes {
        let read = |page: &Arc<CountedPage<B::Page>>| self.subject.page_bytes(page);
        let memory = &self.sequences[index].memory;
        let optional = |page: Option<_>| page.map(read).unwrap_or_default();
        let blocks = memory.blocks().iter().map(|block| optional(block.as_ref())).collect();
        MemoryBytes { sink: optional(memory.sink()), tail: optional(memory.tail()), blocks }
    }

    /// Returns the bytes of the last step's tiles with their guard bytes; empty without step tiles.
    pub fn step_tile_bytes(&self) -> Vec<u8> {
        self.step_tiles.as_ref().map(|page| self.subject.page_bytes(page)).unwrap_or_default()
    }

    /// Begins a step: reserves cache and step tiles.
    fn begin(&mut self, counts: &[usize]) -> Result<()> {
        let pages = FreshAllocator { device: self.subject.device(), live: Arc::default() };
        let mut first = 0;
        for (Sequence { tokens, layer, memory, rows, .. }, &n) in self.sequences.iter_mut().zip(counts) {
            let start = rows.end();
            let tailed = layer.tensors().find(|tensor| tensor.spec.tail_tiles > 0);
            let coded = tailed.map_or(tokens.shape.sink_tiles, |tensor| tensor.spec.first_tail_tile(start));
            *rows = TokenSpan { first, n, start, first_tail_tile: coded };
            first += n;
            let written = |tensor: &KvTensor| {
                tensor.spec.writes(*rows).find_map(|write| match write.place {
                    TileLocation::Main(tile) => Some(tile / TILES_PER_BLOCK),
                    _ => None,
                })
            };
            let end = layer.tensors().map(|tensor| tensor.spec.main_end(rows.end())).max();
            let end = end.unwrap_or(0).div_ceil(TOKENS_PER_BLOCK);
            let blocks = layer.tensors().filter_map(written).min().unwrap_or(end)..end;
            memory.reserve(blocks, true, &pages)?;
        }
        self.make_step_tiles()
    }

    fn make_step_tiles(&mut self) -> Result<()> {
        let sizes: Vec<usize> =
            all_entries(&mut self.sequences).map(|(entry, _)| entry.step_bytes()).collect();
        let mut end = MARGIN;
        for (sequence, bytes) in self.sequences.iter_mut().zip(sizes) {
            sequence.step_tiles = end;
            end += bytes;
        }
        self.step_tiles = None;
        if end > MARGIN {
            let device = self.subject.device();
            let mut step_tiles = device.page(end + MARGIN)?;
            let stale = vec![STALE; step_tiles.n_bytes()];
            device.write_page(&mut step_tiles, &stale)?;
            self.step_tiles = Some(step_tiles);
        }
        Ok(())
    }

    /// Returns keys and values of the step's rows, `[rows, n_kv_heads, head_dim]`.
    fn step_rows(&self) -> [Vec<f32>; 2] {
        let side = |of: fn(&Tokens) -> &[f32], head_dim: fn(&Shape) -> usize| {
            let rows = |s: &Sequence<'a, B>| {
                let width = s.tokens.shape.n_kv_heads * head_dim(&s.tokens.shape);
                of(s.tokens)[s.rows.start * width..s.rows.end() * width].to_vec()
            };
            self.sequences.iter().flat_map(rows).collect()
        };
        [
            side(|tokens| &tokens.k, |shape| shape.k_head_dim),
            side(|tokens| &tokens.v, |shape| if shape.shared_kv { 0 } else { shape.v_head_dim }),
        ]
    }

    /// Returns the tokens of sequence `index` as stored, `[n_tensors][tokens][dim]`: those of K,
    /// then those of V.
    pub fn stored_tokens(&self, index: usize) -> Vec<Vec<Vec<f32>>> {
        let memory_bytes = self.memory_bytes(index);
        let Sequence { layer, rows, .. } = &self.sequences[index];
        let stored = |tensor: &KvTensor| {
            let coded = tensor.spec.first_tail_tile(rows.end());
            let read = |token: usize| {
                let location = tensor.spec.location(token / TILE, coded);
                let (layout, offset) = tensor.locate(location);
                let mut row = vec![f32::NAN; layout.dim()];
                let tile = &memory_bytes.page(location)[offset..][..layout.bytes()];
                layout.get(tile, token % TILE, &mut row);
                row
            };
            (0..rows.end()).map(read).collect()
        };
        layer.tensors().map(stored).collect()
    }

    /// Checks every stored token against the codec, in each form of storage.
    ///
    /// # Panics
    ///
    /// With the first token that differs.
    #[track_caller]
    pub fn assert_stored_tokens(&mut self, what: &dyn Fn() -> String) {
        for index in 0..self.sequences.len() {
            let stored = self.stored_tokens(index);
            let Sequence { tokens, layer, rows, .. } = &self.sequences[index];
            for ((tensor, record), stored) in tensors(layer, tokens).zip(stored) {
                for (token, got) in stored.iter().enumerate() {
                    let want = record.stored_since(0, token, rows.end());
                    assert!(
                        got == want,
                        "{}: sequence {index}, {:?}, token {token} is {got:?}, want {want:?}",
                        what(),
                        tensor.spec,
                    );
                }
            }
        }
        self.assert_step_tiles_hold_what_was_fed(what);
    }

    #[track_caller]
    fn assert_step_tiles_hold_what_was_fed(&mut self, what: &dyn Fn() -> String) {
        let bytes = self.step_tile_bytes();
        let mut end = MARGIN;
        for (entry, tokens) in all_entries(&mut self.sequences) {
            for (tensor, record) in tensors(entry.layer, tokens) {
                let (tiles, layout) = (entry.step_tiles(tensor), tensor.spec.f16_layout());
                for token in tiles.start * TILE..entry.rows.end().min(tiles.end * TILE) {
                    let offset = entry.step_tile_offset(tensor, token / TILE);
                    let mut got = vec![f32::NAN; layout.dim()];
                    layout.get(&bytes[offset..][..layout.bytes()], token % TILE, &mut got);
                    let want = &record.sixteen(token).stored;
                    assert!(
                        got == *want,
                        "{}: {:?}, token {token} in the step_tiles is {got:?}, want {want:?}",
                        what(),
                        tensor.spec
                    );
                }
            }
            end += entry.step_bytes();
        }
        if !bytes.is_empty() {
            let around = bytes[..MARGIN].iter().chain(&bytes[end..]);
            assert!(
                around.copied().all(|byte| byte == STALE),
                "{}: bytes around the step_tiles are written",
                what()
            );
        }
    }
}

impl MemoryBytes {
    /// Returns all of them in one list.
    pub fn concat(&self) -> Vec<u8> {
        [&self.sink[..], &self.tail[..], &self.blocks.concat()[..]].concat()
    }

    fn page(&self, location: TileLocation) -> &[u8] {
        match location {
            TileLocation::Sink(_) => &self.sink,
            TileLocation::Main(tile) => &self.blocks[tile / TILES_PER_BLOCK],
            TileLocation::Tail(_) => &self.tail,
        }
    }
}

/// Returns the KV tensors of a layer, each with its expected content.
fn tensors<'a>(layer: &'a KvLayer, tokens: &'a Tokens) -> impl Iterator<Item = (&'a KvTensor, &'a Record)> {
    layer.k.iter().zip(&tokens.keys).chain(layer.v.iter().zip(&tokens.values))
}

/// Uploads factors and shifts.
fn balance_page<B: Backend>(subject: &DeviceUnderTest<B>, values: &[f32]) -> B::Page {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let device = subject.device();
    let mut page = device.page(bytes.len()).expect("memory for the balance");
    let mut all = vec![0; page.n_bytes()];
    all[..bytes.len()].copy_from_slice(&bytes);
    device.write_page(&mut page, &all).expect("the balance is written");
    page
}

/// Returns the sequences of the step as a device receives them.
fn entries<'s, B: Backend>(sequences: &'s mut [Sequence<'_, B>]) -> Vec<KvBatchEntry<'s, B::Page>> {
    all_entries(sequences).map(|(entry, _)| entry).filter(|entry| entry.rows.n > 0).collect()
}

fn all_entries<'s, 't, B: Backend>(
    sequences: &'s mut [Sequence<'t, B>],
) -> impl Iterator<Item = (KvBatchEntry<'s, B::Page>, &'t Tokens)> {
    sequences.iter_mut().map(|Sequence { tokens, layer, memory, rows, step_tiles, balance }| {
        (
            KvBatchEntry {
                rows: *rows,
                layer,
                memory,
                step_offset: *step_tiles,
                channel_scales: balance.as_ref(),
            },
            *tokens,
        )
    })
}

/// Returns every pair, in order.
fn product(a: Range<usize>, b: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    a.flat_map(move |a| b.clone().map(move |b| (a, b)))
}

/// Allocates new memory for every request.
struct FreshAllocator<'a, B> {
    device: &'a B,
    live: Arc<AtomicUsize>,
}

impl<B: Backend> PageAllocator<B::Page> for FreshAllocator<'_, B> {
    fn page(&self, n_bytes: usize) -> Result<CountedPage<B::Page>> {
        Ok(CountedPage::new(self.device.page(n_bytes)?, &self.live))
    }

    fn copy(&self, page: &B::Page) -> Result<CountedPage<B::Page>> {
        Ok(CountedPage::new(page.duplicate()?, &self.live))
    }
}
