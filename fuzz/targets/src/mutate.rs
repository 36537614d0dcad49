//! Mutation of inputs by a seeded generator: the same seed gives the same inputs.

use kvant_codec::random::Random;

/// Maximum length of an input, in bytes.
const MAX_LEN: usize = 8192;
/// Maximum number of mutated inputs in the pool, besides the seeds.
const MAX_POOL: usize = 256;
/// Edge cases of parsers, and of float bits.
const NUMBERS: [u64; 14] = [
    0,
    1,
    9,
    0x7f,
    0xffff,
    0x7c00_7c00,
    0x7f80_0000,
    0x7fc0_0000,
    0x8000_0001,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 61,
    u64::MAX >> 1,
    u64::MAX,
];

/// Modifies a valid file: every five bytes of `by` are an offset and the change of its byte; four
/// remaining bytes truncate the file.
pub(crate) fn changed(sound: &[u8], by: &[u8]) -> Vec<u8> {
    let mut file = sound.to_vec();
    let (changes, cut) = by.as_chunks::<5>();
    for [a, b, c, d, bits] in changes {
        let at = u32::from_le_bytes([*a, *b, *c, *d]) as usize % file.len();
        file[at] ^= bits;
    }
    if let Ok(len) = <[u8; 4]>::try_from(cut) {
        file.truncate(u32::from_le_bytes(len) as usize);
    }
    file
}

/// Derives inputs from inputs.
pub struct Mutator {
    random: Random,
    pool: Vec<Vec<u8>>,
    n_seeds: usize,
}

impl Mutator {
    /// Creates a mutator with initial `seeds`.
    ///
    /// # Panics
    ///
    /// Without seeds.
    pub fn new(seed: u64, seeds: Vec<Vec<u8>>) -> Self {
        assert!(!seeds.is_empty(), "nothing to change");
        Self { random: Random::new(seed), n_seeds: seeds.len(), pool: seeds }
    }

    fn below(&mut self, n: usize) -> usize {
        (self.random.bits() % n.max(1) as u64) as usize
    }

    /// Returns the next input: one of the pool after one to four changes.
    pub fn next_input(&mut self) -> Vec<u8> {
        let index = self.below(self.pool.len());
        let mut bytes = self.pool[index].clone();
        for _ in 0..=self.below(4) {
            self.mutate(&mut bytes);
        }
        bytes.truncate(MAX_LEN);
        bytes
    }

    /// Adds an accepted input, replacing another one if the pool is full. Seeds stay.
    pub fn keep(&mut self, bytes: Vec<u8>) {
        if self.pool.len() < self.n_seeds + MAX_POOL {
            self.pool.push(bytes);
        } else {
            let index = self.n_seeds + self.below(MAX_POOL);
            self.pool[index] = bytes;
        }
    }

    /// Applies one change: a bit, a byte, an edge-case number, a piece copied, removed or doubled,
    /// a piece of another input.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        let (at, other, len) = (self.below(bytes.len()), self.below(bytes.len()), self.below(64));
        let piece = at..(at + len).min(bytes.len());
        match self.below(9) {
            _ if bytes.is_empty() => bytes.push(self.below(256) as u8),
            0 | 1 => bytes[at] ^= 1 << self.below(8),
            2 => bytes[at] = self.below(256) as u8,
            3 | 4 => {
                let width = [2, 4, 8][self.below(3)].min(bytes.len() - at);
                let number =
                    NUMBERS[self.below(NUMBERS.len())].wrapping_add(self.below(3) as u64).wrapping_sub(1);
                bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            5 => {
                let piece = bytes[piece].to_vec();
                bytes.splice(other..other, piece);
            }
            6 => drop(bytes.drain(piece)),
            7 => {
                let n = piece.len().min(bytes.len() - other);
                bytes.copy_within(piece.start..piece.start + n, other);
            }
            _ => {
                let donor = self.below(self.pool.len());
                let donor = &self.pool[donor];
                let piece = donor[at.min(donor.len())..(at + len).min(donor.len())].to_vec();
                bytes.splice(other..other, piece);
            }
        }
    }
}
