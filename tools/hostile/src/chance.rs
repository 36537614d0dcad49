//! Choices of a seeded generator.

use kvant_codec::random::Random;

/// Numbers that parsers and allocators stumble over.
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

/// Makes the choices of one input.
pub struct Chance(Random);

impl Chance {
    /// Those of input `number` of the kind of this name.
    pub fn new(kind: &str, number: usize) -> Self {
        let name = kind.bytes().fold(0x6b76_616e, |hash: u64, b| hash.wrapping_mul(31) ^ u64::from(b));
        Self(Random::new(name.wrapping_mul(0x9e37_79b9) ^ number as u64))
    }

    /// A number below `n`; 0 where there is none.
    pub fn below(&mut self, n: usize) -> usize {
        (self.0.bits() % n.max(1) as u64) as usize
    }

    /// Whether something that happens one time in `n` does.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of several.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Up to `n` bytes of anything.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..self.below(n + 1)).map(|_| self.below(256) as u8).collect()
    }

    /// Changes one to eight places of the first `until` bytes: a bit, a byte, a number, or a piece moved, doubled or lost. The
    /// result differs.
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
