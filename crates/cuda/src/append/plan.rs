//! What an append is to do, as a list for the kernel.

use std::ops::Range;

use kvant_backend::{KvPart, KvStream, Place, Result, StreamSpec, TileWrite};

use super::{OP, streams_of};
use crate::CudaPage;
use crate::kv::{has_centres, small};

/// `Plan`, `Write` or `Centre` of `append.cu`.
pub(super) type Entry = [u32; 4];

/// Flag of a tile that goes to the band too.
const IN_BAND: u32 = 4;
/// The next tile of a chain counts in this.
const NEXT: u32 = 8;

/// More kinds of streams than a launch has streams.
pub(super) const MAX_KINDS: usize = 1 << 8;

/// What is written of a stream, and where its share of the band lies, depends on these of it.
type Kind = [usize; 2];

fn kind(spec: &StreamSpec) -> Kind {
    [spec.sink_tiles, spec.tail_tiles]
}

/// For each part the plans of all kinds of streams, for each plan its tiles, and the centres that are set.
pub(super) struct List {
    kinds: Vec<Kind>,
    entries: Vec<Entry>,
    most_chains: u32,
    first_centre: usize,
}

impl List {
    /// What a step does to the streams of some heads, in all parts, which are of one layer.
    ///
    /// # Errors
    /// [`Unsupported`](kvant_backend::BackendError::Unsupported) beyond 32 bits.
    pub fn new(parts: &[KvPart<'_, CudaPage>], heads: &Range<usize>) -> Result<Self> {
        let layer = parts[0].layer;
        let mut streams: Vec<&KvStream> = Vec::new();
        for stream in streams_of(layer, heads) {
            if streams.iter().all(|known| kind(&known.spec) != kind(&stream.spec)) {
                streams.push(stream);
            }
        }
        let kinds = streams.iter().map(|stream| kind(&stream.spec)).collect();
        let n_plans = parts.len() * streams.len();
        let mut list = Self { kinds, entries: vec![[0; 4]; n_plans], most_chains: 0, first_centre: 0 };
        for (index, part) in parts.iter().enumerate() {
            for (of_part, stream) in streams.iter().enumerate() {
                let first = small(OP, "tiles", list.entries.len())?;
                let band = part.band_tiles(stream);
                let chains = list.push(&stream.spec, part)?;
                list.entries[index * streams.len() + of_part] =
                    [first, chains, small(OP, "tiles", band.start)?, band.len() as u32];
                list.most_chains = list.most_chains.max(chains);
            }
        }
        list.first_centre = list.entries.len();
        let specs = streams_of(layer, heads).map(|stream| &stream.spec);
        for of_part in 0..streams.len() {
            let is_meant = |spec: &&StreamSpec| has_centres(spec) && kind(spec) == list.kinds[of_part];
            let Some(spec) = specs.clone().find(is_meant) else { continue };
            for (index, part) in parts.iter().enumerate() {
                list.push_centres(spec, part, [index, of_part])?;
            }
        }
        Ok(list)
    }

    /// Takes down the centres that a step sets in streams of plan `of_part` of part `index`.
    fn push_centres(
        &mut self,
        spec: &StreamSpec,
        part: &KvPart<'_, CudaPage>,
        [index, of_part]: [usize; 2],
    ) -> Result<()> {
        for write in spec.writes(part.rows) {
            let Some([own, next]) = spec.centre_rows(&write, part.rows) else { continue };
            // Both begin with their first slots, so that the rows lie side by side.
            let n_rows = own.new.end + next.new.end;
            self.entries.push([
                small(OP, "tiles", own.tile)?,
                (index * MAX_KINDS + of_part) as u32,
                n_rows as u32,
                small(OP, "tokens", part.rows.end())? - part.rows.n as u32,
            ]);
        }
        Ok(())
    }

    /// Where the centres begin among the entries, and how many there are.
    pub fn centres(&self) -> (usize, usize) {
        (self.first_centre, self.entries.len() - self.first_centre)
    }

    /// Takes down the tiles of one plan: the first ones of the chains, then the others. Says how many chains there are.
    fn push(&mut self, spec: &StreamSpec, part: &KvPart<'_, CudaPage>) -> Result<u32> {
        let chains = chains(spec.writes(part.rows), spec.tail_tiles);
        let n_chains = small(OP, "tiles", chains.len())?;
        let mut next = n_chains;
        let mut rest = Vec::new();
        for chain in &chains {
            for (i, write) in chain.iter().enumerate() {
                let is_last = i + 1 == chain.len();
                let entry = entry(write, if is_last { 0 } else { next })?;
                next += u32::from(!is_last);
                if i == 0 { self.entries.push(entry) } else { rest.push(entry) }
            }
        }
        self.entries.append(&mut rest);
        Ok(n_chains)
    }

    /// All of it: the plans, part by part, then their tiles, then the centres.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Which of a part's plans is that of such a stream.
    pub fn plan_of(&self, spec: &StreamSpec) -> u16 {
        let index = self.kinds.iter().position(|&known| known == kind(spec));
        index.expect("the kinds of all streams are known") as u16
    }

    /// The first plan of part `index`.
    pub fn plans_of_part(&self, index: usize) -> u32 {
        (index * self.kinds.len()) as u32
    }

    /// Most chains of a plan.
    pub fn most_chains(&self) -> u32 {
        self.most_chains
    }
}

/// Tiles that share a place in the ring of the tail, one of which is read there, one after the other; all others by themselves.
fn chains(writes: impl Iterator<Item = TileWrite>, tail_tiles: usize) -> Vec<Vec<TileWrite>> {
    let ring = |write: &TileWrite| {
        let touches = !write.old.is_empty() || matches!(write.place, Place::Tail(_));
        touches.then(|| write.tile % tail_tiles)
    };
    let mut chains: Vec<Vec<TileWrite>> = Vec::new();
    for write in writes {
        let place = ring(&write);
        match chains.iter_mut().find(|chain| place.is_some() && ring(&chain[0]) == place) {
            Some(chain) => chain.push(write),
            None => chains.push(vec![write]),
        }
    }
    chains
}

fn entry(write: &TileWrite, next: u32) -> Result<Entry> {
    let place = match write.place {
        Place::Sink(_) => 0,
        Place::Main(_) => 1,
        Place::Tail(_) => 2,
    };
    let band = if write.in_band { IN_BAND } else { 0 };
    let slots = [write.old.start, write.old.end, write.new.start, write.new.end].map(|slot| slot as u8);
    Ok([
        small(OP, "tiles", write.tile)?,
        place | band | (next * NEXT),
        u32::from_le_bytes(slots),
        small(OP, "rows", write.first_row)?,
    ])
}
