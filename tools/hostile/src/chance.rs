//! Random choices of a seeded generator.

use kvant_codec::random::Random;

/// Edge cases of parsers and allocators.
pub const NUMBERS: [u64; 12] = [
    0,
    1,
    0x7f,
    0xffff,
    0x7fc0_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 61,
    u64::MAX >> 1,
    u64::MAX - 7,
    u64::MAX,
];

/// Random choices of one input.
pub struct Choices(Random);

impl Choices {
    /// Creates the choices of input `number` of a kind.
    pub fn new(kind: &str, number: usize) -> Self {
        let name = kind.bytes().fold(0x6b76_616e, |hash: u64, b| hash.wrapping_mul(31) ^ u64::from(b));
        Self(Random::new(name.wrapping_mul(0x9e37_79b9) ^ number as u64))
    }

    /// Returns a number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.0.bits() % n.max(1) as u64) as usize
    }

    /// Returns true once in `n` times on average.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Returns one of several values.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns up to `n` arbitrary bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..self.below(n + 1)).map(|_| self.below(256) as u8).collect()
    }

    /// Applies one to eight changes to the first `until` bytes: a bit, a byte, a number, or a piece
    /// moved, doubled or removed. The result differs.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, until: usize) {
        let before = bytes.clone();
        while *bytes == before {
            for _ in 0..=self.below(8) {
                self.mutate_once(bytes, until);
            }
        }
    }

    fn mutate_once(&mut self, bytes: &mut Vec<u8>, until: usize) {
        let until = until.min(bytes.len());
        let (at, other, len) = (self.below(until), self.below(until), self.below(64));
        let piece = at..(at + len).min(until);
        match self.below(8) {
            _ if until == 0 => bytes.push(self.below(256) as u8),
            0..=2 => bytes[at] ^= 1 << self.below(8),
            3 => bytes[at] = self.below(256) as u8,
            4 | 5 => {
                let width = [4, 8][self.below(2)].min(bytes.len() - at);
                let number = self.of(&NUMBERS);
                bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            6 => {
                let piece = bytes[piece].to_vec();
                bytes.splice(other..other, piece);
            }
            _ => drop(bytes.drain(piece)),
        }
    }
}
