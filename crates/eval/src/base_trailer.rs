//! Trailer of Kvant's base-logits files, after the part that llama.cpp writes and reads: checksums,
//! and the model's fingerprint.
//!
//! ```text
//!  0   8   "kvantsum"
//!  8   4   version, u32: 1
//! 12   4   the cache, u32: 0 unknown, 1 f16, 2 another
//! 16  32   fingerprint of the model, hexadecimal digits
//! 48   8   checksum of the head and the tokens
//! ..   8   checksum of the rows of each chunk
//! ..   8   checksum of the trailer up to here
//! ```
//!
//! Checksums are XXH3-64. llama.cpp stops reading after the last row.

use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"kvantsum";
const VERSION: u32 = 1;
const DIGITS: usize = 32;
const SUMS: usize = 16 + DIGITS;

/// The trailer of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trailer {
    /// See [`Model::fingerprint`](kvant::Model::fingerprint).
    pub fingerprint: String,
    /// Whether the file was computed with an f16 cache; `None` in older files without this field.
    pub is_f16: Option<bool>,
    /// Checksum of head and tokens, then of the rows of each chunk.
    pub sums: Vec<u64>,
}

impl Trailer {
    /// Returns the bytes of the trailer for this number of chunks.
    pub fn n_bytes(n_chunks: usize) -> usize {
        SUMS + 8 * (n_chunks + 2)
    }

    /// Encodes the trailer.
    ///
    /// # Panics
    ///
    /// Unless the fingerprint has 32 digits.
    pub fn to_bytes(&self) -> Vec<u8> {
        assert_eq!(self.fingerprint.len(), DIGITS, "digits of a fingerprint");
        let cache: u32 = self.is_f16.map_or(0, |is_f16| if is_f16 { 1 } else { 2 });
        let numbers = [VERSION.to_le_bytes(), cache.to_le_bytes()];
        let mut bytes = [&MAGIC[..], numbers.as_flattened(), self.fingerprint.as_bytes()].concat();
        self.sums.iter().for_each(|sum| bytes.extend(sum.to_le_bytes()));
        let own = xxh3_64(&bytes);
        bytes.extend(own.to_le_bytes());
        bytes
    }

    /// Decodes `[n_bytes(n_chunks)]` bytes; `Err` describes the fault.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let (rest, own) = bytes.split_at(bytes.len() - 8);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        if rest[..8] != *MAGIC || xxh3_64(rest) != word(own) {
            return Err("the checksum of the trailer".to_owned());
        }
        let version = u32::from_le_bytes(rest[8..12].try_into().expect("four bytes"));
        if version != VERSION {
            return Err(format!("trailer version {version}, expected {VERSION}"));
        }
        let is_f16 = match u32::from_le_bytes(rest[12..16].try_into().expect("four bytes")) {
            0 => None,
            1 => Some(true),
            2 => Some(false),
            cache => return Err(format!("cache {cache}, expected 0 to 2")),
        };
        let fingerprint = String::from_utf8_lossy(&rest[16..SUMS]).into_owned();
        Ok(Self { fingerprint, is_f16, sums: rest[SUMS..].chunks_exact(8).map(word).collect() })
    }
}
