//! Carries out plans on a table of token numbers: after any history, each token must be found where the stream says.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

/// A size, and a number that no other page has.
struct FakePage(usize, u64);

impl FakePage {
    fn new(bytes: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(bytes, NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The numbers of the pages.
#[derive(Debug, Clone, Default)]
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

type Slots = HashMap<(String, usize), usize>;

fn key(place: Place, slot: usize) -> (String, usize) {
    (format!("{place:?}"), slot)
}

fn append(stream: &mut Stream<FakePage>, slots: &mut Slots, n: usize) {
    stream.reserve(n, &mut |bytes| Ok(FakePage::new(bytes))).unwrap();
    let plan = stream.plan(n);
    let start = stream.len();
    for write in plan.writes() {
        let (layout, page, offset) = stream.tile_mut(write.place);
        assert!(offset + layout.bytes() <= page.n_bytes());
        if let Some((from, range)) = write.from_tail {
            for slot in range {
                let token = slots[&key(from, slot)];
                slots.insert(key(write.place, slot), token);
            }
        }
        for (i, slot) in write.from_rows.enumerate() {
            slots.insert(key(write.place, slot), start + write.first_row + i);
        }
    }
    stream.commit(plan);
}

fn assert_all_found(stream: &Stream<FakePage>, slots: &Slots, context: &str) {
    for token in 0..stream.len() {
        let place = stream.place(token / TILE);
        assert_eq!(
            slots.get(&key(place, token % TILE)),
            Some(&token),
            "token {token} at {place:?}, {context}"
        );
        let tile = stream.tile(token / TILE);
        assert!(tile.offset + tile.layout.bytes() <= tile.page.n_bytes(), "{context}");
        if let Place::Main(index) = place {
            assert_eq!(stream.table().0[index / TILES_PER_PAGE], tile.page.1, "{context}");
        }
    }
    assert_eq!(stream.table().0.len(), stream.pages.len(), "{context}");
}

fn specs() -> Vec<StreamSpec> {
    let mut specs = Vec::new();
    for dtype in [DType::F16, DType::Turbo3, DType::Q8_0] {
        let base = StreamSpec::new(dtype, Side::K, 96);
        specs.push(base);
        specs.push(StreamSpec { tail_tiles: 0, ..base });
        specs.push(StreamSpec { tail_tiles: 0, sink_tiles: 2, ..base });
        specs.push(StreamSpec { tail_tiles: 3, sink_tiles: 1, ..base });
    }
    specs
}

#[test]
fn every_token_is_found_after_any_sequence_of_appends() {
    for spec in specs() {
        for lens in [vec![1; 100], vec![15, 1, 1, 16, 17, 33], vec![300, 1, 1, 128, 5], vec![16, 16, 16, 16]]
        {
            let mut stream = Stream::new(spec, &mut |bytes| Ok(FakePage::new(bytes))).unwrap();
            let mut slots = Slots::new();
            for &n in &lens {
                append(&mut stream, &mut slots, n);
                assert_all_found(&stream, &slots, &format!("{spec:?} {lens:?}"));
            }
            assert_eq!(stream.len(), lens.iter().sum::<usize>());
        }
    }
}

#[test]
fn every_token_is_found_after_a_cut_and_more_appends() {
    for spec in specs() {
        for cut in [0, 1, 15, 16, 17, 31, 32, 40, 100, 127, 128, 129, 150, 159, 160] {
            let mut stream = Stream::new(spec, &mut |bytes| Ok(FakePage::new(bytes))).unwrap();
            let mut slots = Slots::new();
            append(&mut stream, &mut slots, 160);
            if let Some((place, range)) = stream.truncate(cut) {
                let to = stream.place(cut / TILE);
                for slot in range {
                    let token = slots[&key(place, slot)];
                    slots.insert(key(to, slot), token);
                }
            }
            assert_all_found(&stream, &slots, &format!("{spec:?} cut {cut}"));
            append(&mut stream, &mut slots, 1);
            append(&mut stream, &mut slots, 50);
            assert_all_found(&stream, &slots, &format!("{spec:?} cut {cut}, grown"));
        }
    }
}

#[test]
fn the_tail_holds_at_most_its_tiles_and_starts_on_a_tile() {
    let spec = StreamSpec { tail_tiles: 2, ..StreamSpec::new(DType::Turbo2, Side::V, 128) };
    let mut stream = Stream::new(spec, &mut |bytes| Ok(FakePage::new(bytes))).unwrap();
    let mut slots = Slots::new();
    for _ in 0..200 {
        append(&mut stream, &mut slots, 1);
        assert_eq!(stream.main_end() % TILE, 0);
        assert!(stream.len() - stream.main_end() <= 2 * TILE);
    }
}

#[test]
fn bytes_are_those_of_the_allocations_and_can_be_told_in_advance() {
    for spec in specs() {
        for n in [0, 1, 16, 17, 128, 129, 144, 145, 2000] {
            let mut total = 0;
            let mut alloc = |bytes| {
                total += bytes;
                Ok(FakePage::new(bytes))
            };
            let mut stream = Stream::new(spec, &mut alloc).unwrap();
            stream.reserve(n, &mut alloc).unwrap();
            assert_eq!(stream.n_bytes(), total, "{spec:?} {n}");
            assert_eq!(spec.n_bytes(n), total, "{spec:?} {n}");
        }
    }
    // 1968 tokens in 16 pages of 128 tokens (50 bytes each), and an f16 tail of 32 tokens.
    let spec = StreamSpec::new(DType::Turbo3, Side::K, 128);
    assert_eq!(spec.n_bytes(2000), 16 * 128 * 50 + 32 * 128 * 2);
}

#[test]
fn a_shared_page_is_copied_before_it_is_written() {
    let mut stream =
        Stream::new(StreamSpec::new(DType::F16, Side::K, 64), &mut |b| Ok(FakePage::new(b))).unwrap();
    append(&mut stream, &mut Slots::new(), 10);
    let fork = stream.fork().unwrap();
    assert_eq!(fork.tile(0).page.1, stream.tile(0).page.1);
    stream.reserve(1, &mut |b| Ok(FakePage::new(b))).unwrap();
    let (_, page, _) = stream.tile_mut(Place::Main(0));
    page.0 += 1;
    assert_ne!(fork.tile(0).page.0, stream.tile(0).page.0);
    assert_eq!((fork.table().0[0], stream.table().0[0]), (fork.pages[0].1, stream.pages[0].1));
    assert_ne!(fork.pages[0].1, stream.pages[0].1);
}

#[test]
fn a_restored_stream_has_every_token_in_its_old_place() {
    for spec in specs() {
        for (grown, cut) in
            [(0, 0), (5, 5), (16, 16), (40, 40), (300, 300), (160, 150), (160, 31), (400, 129)]
        {
            let mut alloc = |bytes| Ok(FakePage::new(bytes));
            let mut stream = Stream::new(spec, &mut alloc).unwrap();
            append(&mut stream, &mut Slots::new(), grown);
            stream.truncate(cut);
            assert!(spec.admits(stream.len(), stream.main_end()), "{spec:?} {grown} {cut}");
            let restored = Stream::restored(spec, stream.len(), stream.main_end(), &mut alloc).unwrap();
            assert_eq!((restored.len(), restored.main_end()), (stream.len(), stream.main_end()));
            for tile in 0..stream.n_tiles() {
                assert_eq!(restored.place(tile), stream.place(tile));
                assert!(restored.tile(tile).offset < restored.tile(tile).page.n_bytes());
            }
        }
    }
}

#[test]
fn impossible_ends_of_the_main_pages_are_not_admitted() {
    let spec = StreamSpec { sink_tiles: 1, tail_tiles: 1, ..StreamSpec::new(DType::Turbo3, Side::K, 128) };
    for (len, main_end) in [(0, 0), (0, 32), (20, 0), (20, 20), (20, 32), (64, 32), (usize::MAX, 16)] {
        assert!(!spec.admits(len, main_end), "{len} {main_end}");
    }
    let direct = StreamSpec { tail_tiles: 0, ..spec };
    assert!(direct.admits(3, 16) && direct.admits(40, 40) && !direct.admits(40, 32));
}
