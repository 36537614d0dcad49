//! Simulates steps on a table of token numbers: after any history, each query must find each token
//! at its location.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvant_codec::{DType, Side};

use super::*;
use crate::device::{Page, PageTable, Result};

/// A size, and a unique page number.
struct FakePage(usize, u64);

impl FakePage {
    fn new(bytes: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(bytes, NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The page numbers.
#[derive(Debug, Clone, Default, PartialEq)]
struct FakeTable(Vec<u64>);

impl PageTable<FakePage> for FakeTable {
    fn set(&mut self, index: usize, page: &FakePage) {
        assert!(index <= self.0.len());
        match self.0.get_mut(index) {
            Some(number) => *number = page.1,
            None => self.0.push(page.1),
        }
    }

    fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }
}

impl Page for FakePage {
    type Table = FakeTable;

    fn n_bytes(&self) -> usize {
        self.0
    }

    fn duplicate(&self) -> Result<Self> {
        Ok(Self::new(self.0))
    }
}

/// Records the requested sizes.
#[derive(Default)]
struct FakePages {
    requested: RefCell<Vec<usize>>,
    live: Arc<AtomicUsize>,
}

impl PageAllocator<FakePage> for FakePages {
    fn page(&self, n_bytes: usize) -> Result<CountedPage<FakePage>> {
        self.requested.borrow_mut().push(n_bytes);
        Ok(CountedPage::new(FakePage::new(n_bytes), &self.live))
    }

    fn copy(&self, page: &FakePage) -> Result<CountedPage<FakePage>> {
        Ok(CountedPage::new(page.duplicate()?, &self.live))
    }
}

/// The token in each slot of each location of one KV tensor.
struct Tokens {
    spec: KvTensorSpec,
    slots: HashMap<(String, usize), usize>,
    len: usize,
    coded: usize,
}

impl Tokens {
    fn new(spec: KvTensorSpec) -> Self {
        Self { spec, slots: HashMap::new(), len: 0, coded: spec.sink_tiles }
    }

    /// Appends `n` tokens, and checks that each of them finds every token it attends to.
    fn step(&mut self, n: usize) {
        let rows = TokenSpan { first: 3, n, start: self.len, first_tail_tile: self.coded };
        let mut step_tiles: HashMap<usize, usize> = HashMap::new();
        for write in self.spec.writes(rows) {
            let tail = format!("{:?}", TileLocation::Tail(write.tile % self.spec.tail_tiles.max(1)));
            let place = format!("{:?}", write.place);
            for slot in write.old {
                let token = self.slots[&(tail.clone(), slot)];
                assert_eq!(token, write.tile * TILE + slot, "a tile waits in the tail");
                self.slots.insert((place.clone(), slot), token);
                step_tiles.extend(write.in_step_tiles.then_some((token, token)));
            }
            for (i, slot) in write.new.enumerate() {
                let token = rows.start + write.first_row + i;
                assert!(write.first_row + i < n);
                self.slots.insert((place.clone(), slot), token);
                step_tiles.extend(write.in_step_tiles.then_some((token, token)));
            }
        }
        (self.len, self.coded) = (rows.end(), self.spec.first_tail_tile(rows.end()));
        for position in rows.start..rows.end() {
            let window = self.spec.f16_window_start(position / TILE);
            for token in 0..=position {
                let tile = token / TILE;
                let place = if tile < window {
                    self.spec.location(tile, usize::MAX)
                } else if rows.spans_tiles() {
                    assert_eq!(
                        step_tiles.get(&token),
                        Some(&token),
                        "{position} sees {token} in the step_tiles"
                    );
                    continue;
                } else {
                    self.spec.location(tile, self.coded)
                };
                let found = self.slots.get(&(format!("{place:?}"), token % TILE));
                assert_eq!(found, Some(&token), "{:?}: {position} looks for {token} at {place:?}", self.spec);
            }
        }
    }

    fn truncate(&mut self, n: usize) -> usize {
        let n = self.spec.exact_truncation(n.min(self.len), self.coded);
        (self.len, self.coded) = (n, self.coded.min(n.div_ceil(TILE)).max(self.spec.sink_tiles));
        n
    }
}

fn specs() -> Vec<KvTensorSpec> {
    let mut specs = Vec::new();
    for dtype in [DType::F16, DType::Turbo3, DType::Q8_0] {
        let base = KvTensorSpec::new(dtype, Side::K, 96);
        specs.push(base);
        specs.push(KvTensorSpec { tail_tiles: 0, ..base });
        specs.push(KvTensorSpec { tail_tiles: 0, sink_tiles: 2, ..base });
        if dtype.code().is_some() {
            specs.push(KvTensorSpec { tail_tiles: 3, sink_tiles: 1, ..base });
            specs.push(KvTensorSpec { sink_tiles: 1, ..base });
        }
    }
    specs
}

#[test]
fn every_query_finds_its_tokens_after_any_sequence_of_steps() {
    for spec in specs() {
        for lens in
            [vec![1; 100], vec![15, 1, 1, 16, 17, 33], vec![300, 1, 1, 128, 5], vec![500, 40], vec![16; 4]]
        {
            let mut tokens = Tokens::new(spec);
            lens.iter().for_each(|&n| tokens.step(n));
        }
    }
}

#[test]
fn every_query_finds_its_tokens_after_truncation() {
    for spec in specs() {
        for cut in [0, 1, 15, 16, 17, 31, 32, 40, 500, 511, 512, 513, 560, 575, 576, 590, 599, 600] {
            let mut tokens = Tokens::new(spec);
            tokens.step(600);
            let exact = tokens.truncate(cut);
            assert!(
                exact <= cut && (cut - exact < PREFIX_ALIGNMENT || spec.tail_tiles > 2),
                "{spec:?} {cut}: {exact}"
            );
            tokens.step(1);
            tokens.step(30);
            tokens.truncate(exact + 20);
            tokens.step(50);
        }
    }
}

/// 17 to 32 tokens are in f16, fewer only after a prefix boundary.
#[test]
fn the_f16_window_restarts_at_the_prefix_alignment() {
    let spec = KvTensorSpec::new(DType::Turbo2, Side::V, 128);
    for position in 0..2000 {
        let in_16_bit = position + 1 - TILE * spec.f16_window_start(position / TILE).min(position / TILE);
        let since_border = position % PREFIX_ALIGNMENT + 1;
        assert!(
            (17..=32).contains(&in_16_bit) || in_16_bit == since_border && since_border <= 16,
            "{position}"
        );
    }
    assert_eq!(spec.exact_truncation(PREFIX_ALIGNMENT, 100), PREFIX_ALIGNMENT);
    assert_eq!(spec.exact_truncation(PREFIX_ALIGNMENT + 100, 100), PREFIX_ALIGNMENT);
    assert_eq!(KvTensorSpec { tail_tiles: 0, ..spec }.exact_truncation(77, 100), 77);
}

/// For all step sizes, the centre of a block is set once, by its first coded tile, and from
/// the same 32 tokens.
#[test]
fn a_centre_is_set_once_and_from_whole_tiles() {
    for (sink_tiles, tail_tiles) in [(0, 2), (1, 2), (9, 2), (0, 4), (7, 3)] {
        let spec = KvTensorSpec { sink_tiles, tail_tiles, ..KvTensorSpec::new(DType::Turbo3, Side::K, 128) };
        for chunk in [1, 7, 16, 100, 1300] {
            let mut set = Vec::new();
            for start in (0..1300).step_by(chunk) {
                let n = chunk.min(1300 - start);
                let rows = TokenSpan { first: 0, n, start, first_tail_tile: spec.first_tail_tile(start) };
                for write in spec.writes(rows) {
                    let Some(tiles) = spec.centre_rows(&write, rows) else { continue };
                    for (i, TileRows { tile, old, new, first_row }) in tiles.into_iter().enumerate() {
                        assert_eq!((tile, old.end, new.end), (write.tile + i, new.start, TILE));
                        assert!(new.is_empty() || start + first_row == tile * TILE + new.start);
                        // Old rows are in the ring.
                        assert!(old.is_empty() || tile + tail_tiles > (start - 1) / TILE);
                    }
                    set.push(write.tile);
                }
            }
            let coded = spec.first_tail_tile(1300);
            let first = |block: usize| (block * TILES_PER_BLOCK).max(sink_tiles);
            let blocks = sink_tiles / TILES_PER_BLOCK..coded.div_ceil(TILES_PER_BLOCK);
            assert_eq!(
                set,
                blocks.map(first).collect::<Vec<_>>(),
                "sink {sink_tiles}, tail {tail_tiles}, {chunk}"
            );
        }
    }
}

#[test]
fn kv_tensors_are_contiguous_in_each_allocation() {
    let mut sizes = TensorSizes::default();
    let spec = |dtype, side| KvTensorSpec { sink_tiles: 1, ..KvTensorSpec::new(dtype, side, 64) };
    let layers: Vec<KvLayer> = [DType::Turbo3, DType::F16, DType::Q8_0]
        .map(|dtype| {
            KvLayer::new([spec(dtype, Side::K); 2], [spec(DType::Turbo2, Side::V); 2], None, &mut sizes)
        })
        .into();
    let (mut main, mut sink, mut tail) = (0, 0, 0);
    for layer in &layers {
        let mut step_tile_offset = 0;
        for tensor in layer.tensors() {
            assert_eq!(
                (tensor.main, tensor.sink, tensor.tail, tensor.step_tile_offset),
                (main, sink, tail, step_tile_offset)
            );
            let f16 = tensor.spec.f16_layout().bytes();
            main += TILES_PER_BLOCK * tensor.spec.main_layout().bytes();
            assert_eq!(tensor.centre, main);
            let has_centre = tensor.spec.side == Side::K && tensor.spec.dtype != DType::F16;
            main += if has_centre { 2 * 64 } else { 0 };
            sink += f16;
            tail += tensor.spec.tail_tiles * f16;
            step_tile_offset += if tensor.spec.tail_tiles > 0 { f16 } else { 0 };
            let (layout, offset) = tensor.locate(TileLocation::Main(13));
            assert_eq!(offset, tensor.main + 5 * layout.bytes());
        }
        assert_eq!(layer.step_tile_bytes, step_tile_offset);
    }
    assert_eq!(sizes, TensorSizes { block: main, sink, tail });
}

#[test]
fn a_shared_kv_tensor_serves_as_keys_and_values() {
    let values = |dtype, k, v| KvTensorSpec::new_shared_kv(dtype, k, v).stored_value_dim();
    // Values that end with a slice, and within one; floats are not rotated.
    assert_eq!(values(DType::Turbo3, 576, 512), 512);
    assert_eq!(values(DType::Q8_0, 224, 192), 192);
    assert_eq!([(40, 32), (160, 130)].map(|(k, v)| values(DType::Turbo2, k, v)), [64, 160]);
    assert_eq!([(40, 32), (40, 33)].map(|(k, v)| values(DType::F16, k, v)), [32, 48]);

    let keys = KvTensorSpec::new_shared_kv(DType::Turbo3, 576, 512);
    assert!(keys.centres && !KvTensorSpec::new_shared_kv(DType::F16, 576, 512).centres);
    assert_eq!((keys.v_head_dim(), keys.stored_dim()), (512, 576));
    let mut sizes = TensorSizes::default();
    let layer = KvLayer::new([keys], [], None, &mut sizes);
    assert!(layer.is_shared_kv() && std::ptr::eq(layer.values(0), &layer.k[0]));
    // Eight tiles of four blocks of 128 dims and one of 64, and the centre.
    assert_eq!(sizes.block, 8 * (4 * 800 + 416) + 2 * 576);
    let mut sizes = TensorSizes::default();
    let of = |side, dim| KvTensorSpec::new(DType::Turbo3, side, dim);
    let apart = KvLayer::new([of(Side::K, 576)], [of(Side::V, 512)], None, &mut sizes);
    assert!(!apart.is_shared_kv() && std::ptr::eq(apart.values(0), &apart.v[0]));
    assert_eq!(sizes.block, 8 * (8 * 800 + 416) + 2 * 576);
}

#[test]
fn shared_memory_is_copied_on_write() {
    let sizes = TensorSizes { block: 100, sink: 10, tail: 20 };
    let pages = FakePages::default();
    let mut memory = KvMemory::new(sizes);
    memory.reserve(0..2, true, &pages).unwrap();
    memory.reserve(1..3, false, &pages).unwrap();
    let fork = memory.clone();
    let before = fork.table().clone();
    memory.reserve(2..4, false, &pages).unwrap();
    assert_eq!(*pages.requested.borrow(), [10, 20, 100, 100, 100, 100]);
    // Sink, tail and four blocks, and copies of the tail and of block 2 only.
    assert_eq!(pages.live.load(Ordering::Relaxed), 10 + 20 + 400 + 20 + 100);
    assert_eq!(fork.table(), &before);
    for index in 0..4 {
        assert_eq!(memory.table().0[index], memory.blocks()[index].as_ref().unwrap().1);
        let is_same = before.0.get(index) == memory.table().0.get(index);
        assert_eq!(is_same, index < 2, "block {index}");
    }
    assert_eq!(memory.pages().count(), 6);
    memory.page_mut(TileLocation::Main(20)).0 += 1;
    assert_eq!(fork.blocks()[2].as_ref().unwrap().0, 100);
    memory.release_before(1);
    memory.truncate(3);
    assert_eq!((memory.blocks().len(), memory.blocks()[0].is_none(), memory.table().0.len()), (3, true, 3));
}
