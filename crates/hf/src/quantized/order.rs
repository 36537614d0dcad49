//! Orders in which values of 4 or 8 bits share words.

/// Values in order, from the low bits on.
pub(super) const IN_ORDER: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
/// AWQ: position of the value in each nibble, from the low bits on.
pub(super) const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Returns the words of little-endian bytes.
pub(super) fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word))
}

/// Returns value `i` of a word, counted from the low bits.
pub(super) fn value(word: u32, i: usize, bits: usize) -> u8 {
    (word >> (bits * i) & ((1 << bits) - 1)) as u8
}
