//! llama.cpp's base-logits file (`llama-perplexity --kl-divergence-base`), read and written byte
//! for byte. After the last row, files of Kvant have a [trailer](crate::base_trailer) with
//! checksums, which llama.cpp ignores.
//!
//! ```text
//!  0   8   "_logits_"
//!  8   4   n_ctx, u32
//! 12   4   n_vocab, i32
//! 16   4   n_chunk, i32
//! 20  ..   tokens, i32: n_chunk * n_ctx (as in the text; BOS may replace a chunk's first)
//! ..  ..   rows: for each chunk, positions n_ctx/2 .. n_ctx - 1, without the last
//! ```
//!
//! A row is `nv = 2 ((n_vocab + 1) / 2) + 4` words of 16 bits: two f32 (`scale`, `min`), then for
//! each token a word q with log p = scale q + min, then padding. Logits more than 16 below the
//! largest are clamped to that, so a row has a resolution of 16 / 65,535 nats, which gives
//! measurements against a file a floor: about 1e-9 nats of divergence from rounding, and the
//! clamped tail of the distribution (log p <= -16 is not counted on reading).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kvant::files;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::base_trailer::Trailer;
use crate::error::EvalError;
use crate::score::LogProbs;

const MAGIC: &[u8; 8] = b"_logits_";
/// Bytes before the tokens.
const HEAD: usize = 20;
/// Nats below the top at which a logit is clamped.
const RANGE: f32 = 16.0;
/// Words before a row's codes: two f32.
const ROW_HEAD: usize = 4;

/// Returns the words of a row.
fn row_words(n_vocab: usize) -> usize {
    2 * n_vocab.div_ceil(2) + ROW_HEAD
}

/// Returns the rows of a chunk: its second half without the last token, whose successor is unknown.
fn rows_per_chunk(n_ctx: usize) -> usize {
    n_ctx - 1 - n_ctx / 2
}

/// Encodes a row of finite logits as llama.cpp does, f32 arithmetic included.
fn encode_row(logits: &[f32], words: &mut Vec<u16>) {
    words.clear();
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - RANGE);
    let sum: f64 = logits.iter().map(|&v| f64::from((v - max).exp())).sum();
    let log_sum_exp = sum.ln() as f32;
    let scale = (max - min) / 65535.0;
    for float in [scale, min - max - log_sum_exp] {
        let bits = float.to_bits();
        words.extend([bits as u16, (bits >> 16) as u16]);
    }
    let inverse = 1.0 / scale;
    words.extend(logits.iter().map(|&v| match scale > 0.0 && v > min {
        true => nearest(inverse * (v - min)),
        false => 0,
    }));
    words.resize(row_words(logits.len()), 0);
}

/// Rounds as ggml does: to the nearest, ties to even, by adding 1.5 * 2^23. Codes above 65,535 can
/// only result from the rounding of `inverse`, and wrap as they do in ggml.
fn nearest(x: f32) -> u16 {
    ((x + 12_582_912.0).to_bits() & 0x007f_ffff).wrapping_sub(0x0040_0000) as u16
}

/// One row in file format.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodedRow<'a> {
    scale: f32,
    min: f32,
    codes: &'a [u16],
}

impl<'a> CodedRow<'a> {
    fn new(words: &'a [u16], n_vocab: usize) -> Self {
        let float = |i: usize| f32::from_bits(u32::from(words[i]) | u32::from(words[i + 1]) << 16);
        Self { scale: float(0), min: float(2), codes: &words[ROW_HEAD..][..n_vocab] }
    }
}

impl LogProbs for CodedRow<'_> {
    fn log_prob(&self, i: usize) -> f64 {
        f64::from(self.scale * f32::from(self.codes[i]) + self.min)
    }

    fn top(&self) -> usize {
        crate::score::argmax(self.codes)
    }

    fn floor(&self) -> f64 {
        -f64::from(RANGE)
    }

    fn n_vocab(&self) -> usize {
        self.codes.len()
    }
}

/// Reader of a base-logits file, chunk by chunk.
#[derive(Debug)]
pub struct BaseReader {
    path: PathBuf,
    file: BufReader<File>,
    n_ctx: usize,
    n_vocab: usize,
    tokens: Vec<u32>,
    /// Identifies the file; without checksums, independently of its rows.
    identity: String,
    trailer: Option<Trailer>,
    /// Chunks read or skipped.
    n_read: usize,
    /// Rows of the last chunk read.
    words: Vec<u16>,
}

impl BaseReader {
    /// Opens a file and reads its head and tokens.
    ///
    /// # Errors
    ///
    /// [`EvalError::File`] for an invalid, truncated or (with checksums) modified file, or invalid
    /// numbers.
    pub fn open(path: &Path) -> Result<Self, EvalError> {
        let file = files::open(path).map_err(EvalError::io(path))?;
        let file_len = file.metadata().map_err(EvalError::io(path))?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut head = [0; HEAD];
        match file.read_exact(&mut head) {
            Ok(()) if head[..8] == *MAGIC => {}
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                return Err(EvalError::io(path)(error));
            }
            _ => return Err(EvalError::file(path, "not a base-logits file (it should begin with _logits_)")),
        }
        let number = |at: usize| i32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let [n_ctx, n_vocab, n_chunks] = [number(8), number(12), number(16)];
        if n_ctx < 4 || n_vocab < 1 || n_chunks < 1 {
            let what =
                format!("n_ctx {n_ctx}, n_vocab {n_vocab}, chunks {n_chunks}: expected positive numbers");
            return Err(EvalError::file(path, what));
        }
        let [n_ctx, n_vocab, n_chunks] = [n_ctx, n_vocab, n_chunks].map(|n| n as usize);
        // The product of three factors up to 2^31 exceeds 64 bits.
        let row_bytes = 2 * row_words(n_vocab) as u128;
        let chunk_bytes = 4 * n_ctx as u128 + rows_per_chunk(n_ctx) as u128 * row_bytes;
        let expected = HEAD as u128 + n_chunks as u128 * chunk_bytes;
        let with_trailer = expected + Trailer::n_bytes(n_chunks) as u128;
        let has_trailer = u128::from(file_len) == with_trailer;
        if u128::from(file_len) != expected && !has_trailer {
            let what = format!("expected {expected} bytes for {n_chunks} chunks, got {file_len}");
            return Err(EvalError::file(path, what));
        }
        let mut bytes = vec![0; 4 * n_ctx * n_chunks];
        file.read_exact(&mut bytes).map_err(EvalError::io(path))?;
        let tokens: Vec<u32> =
            bytes.as_chunks::<4>().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= n_vocab) {
            return Err(EvalError::file(path, format!("token {token} of a vocabulary of {n_vocab}")));
        }
        let mut front = Xxh3::new();
        front.update(&head);
        front.update(&bytes);
        let mut identity = format!("{:016x}", front.digest());
        let trailer = match has_trailer {
            true => Some(read_trailer(&mut file, expected as u64, n_chunks).map_err(EvalError::io(path))?),
            false => None,
        };
        let trailer = match trailer.map(|bytes| (Trailer::from_bytes(&bytes), xxh3_64(&bytes))) {
            Some((Ok(trailer), sum)) => {
                identity += &format!(":{sum:016x}");
                Some(trailer)
            }
            Some((Err(what), _)) => return Err(corrupt(path, &what)),
            None => None,
        };
        if trailer.as_ref().is_some_and(|trailer| trailer.sums[0] != front.digest()) {
            return Err(corrupt(path, "the checksum of the head and the tokens"));
        }
        let path = path.to_owned();
        Ok(Self { path, file, n_ctx, n_vocab, tokens, identity, trailer, n_read: 0, words: Vec::new() })
    }

    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tokens per chunk.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Returns the size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Returns the tokens of every chunk, in order.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the [fingerprint](kvant::Model::fingerprint) of the file's model; `None` for files
    /// of llama.cpp.
    pub fn fingerprint(&self) -> Option<&str> {
        self.trailer.as_ref().map(|trailer| trailer.fingerprint.as_str())
    }

    /// Returns whether the file was computed with an f16 cache, as a base should be; `None` if
    /// unknown.
    pub fn is_f16(&self) -> Option<bool> {
        self.trailer.as_ref().and_then(|trailer| trailer.is_f16)
    }

    /// Identifies files by their text and their rows: all rows with checksums, else the first and
    /// the last of each chunk, since hashing all would take as long as reading the file.
    pub(crate) fn identity(&self) -> Result<String, EvalError> {
        if self.trailer.is_some() {
            return Ok(self.identity.clone());
        }
        let rows = self.outer_rows().map_err(EvalError::io(&self.path))?;
        Ok(format!("{}:{rows:016x}", self.identity))
    }

    /// Hashes the first and the last row of each chunk.
    fn outer_rows(&self) -> io::Result<u64> {
        let row = 2 * row_words(self.n_vocab);
        let chunk = rows_per_chunk(self.n_ctx) * row;
        let first = HEAD + 4 * self.tokens.len();
        let mut file = files::open(&self.path)?;
        let (mut bytes, mut hash) = (vec![0; row], Xxh3::new());
        for start in (0..self.tokens.len() / self.n_ctx).map(|index| first + index * chunk) {
            for at in [start, start + chunk - row] {
                file.seek(SeekFrom::Start(at as u64))?;
                file.read_exact(&mut bytes)?;
                hash.update(&bytes);
            }
        }
        Ok(hash.digest())
    }

    /// Reads the rows of the next chunk, or skips them.
    pub(crate) fn next_chunk(&mut self, is_needed: bool) -> Result<(), EvalError> {
        let n_words = rows_per_chunk(self.n_ctx) * row_words(self.n_vocab);
        self.n_read += 1;
        if !is_needed {
            return self.file.seek_relative(2 * n_words as i64).map_err(EvalError::io(&self.path));
        }
        let mut bytes = vec![0; 2 * n_words];
        self.file.read_exact(&mut bytes).map_err(EvalError::io(&self.path))?;
        let sum = self.trailer.as_ref().and_then(|trailer| trailer.sums.get(self.n_read));
        if sum.is_some_and(|&sum| sum != xxh3_64(&bytes)) {
            return Err(corrupt(&self.path, &format!("the checksum of chunk {}", self.n_read)));
        }
        self.words.clear();
        self.words.extend(bytes.as_chunks::<2>().0.iter().map(|&bytes| u16::from_le_bytes(bytes)));
        Ok(())
    }

    /// Returns row `index` of the last chunk read.
    pub(crate) fn row(&self, index: usize) -> Result<CodedRow<'_>, EvalError> {
        let n = row_words(self.n_vocab);
        let row = CodedRow::new(&self.words[index * n..][..n], self.n_vocab);
        // Range of valid rows: log probabilities from 0 to 16 nats and the logarithm of the
        // vocabulary below, with a margin for the rounding of other programs. Outside, divergences
        // would not be finite.
        let (max_scale, lowest) = (1.001 * RANGE / 65535.0, -1.001 * (RANGE + (self.n_vocab as f32).ln()));
        if !((0.0..=max_scale).contains(&row.scale) && (lowest..=0.001).contains(&row.min)) {
            let what = format!(
                "a row has the scale {} and the minimum {}, expected 0 to {max_scale} and {lowest} to 0",
                row.scale, row.min
            );
            return Err(EvalError::file(&self.path, what));
        }
        Ok(row)
    }
}

fn corrupt(path: &Path, what: &str) -> EvalError {
    EvalError::file(path, format!("corrupt base-logits file: {what}"))
}

/// Reads the bytes of the trailer at `at`; restores the file position.
fn read_trailer(file: &mut BufReader<File>, at: u64, n_chunks: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; Trailer::n_bytes(n_chunks)];
    let here = file.stream_position()?;
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(&mut bytes)?;
    file.seek(SeekFrom::Start(here))?;
    Ok(bytes)
}

/// Writer of a base-logits file.
pub struct BaseWriter<'a> {
    file: &'a mut BufWriter<File>,
    rows_per_chunk: usize,
    words: Vec<u16>,
    /// Checksums of head and tokens, and of finished chunks.
    sums: Vec<u64>,
    /// Checksum of the current chunk, and the number of its rows written.
    chunk: Xxh3,
    n_rows: usize,
}

impl<'a> BaseWriter<'a> {
    /// Writes the head and the tokens of every chunk, `[n_chunks, n_ctx]`.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn new(
        file: &'a mut BufWriter<File>,
        n_ctx: usize,
        n_vocab: usize,
        tokens: &[u32],
    ) -> io::Result<Self> {
        let numbers = [n_ctx, n_vocab, tokens.len() / n_ctx].map(|number| (number as u32).to_le_bytes());
        let mut front = [MAGIC.as_slice(), numbers.as_flattened()].concat();
        front.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        file.write_all(&front)?;
        let (rows_per_chunk, sums) = (rows_per_chunk(n_ctx), vec![xxh3_64(&front)]);
        Ok(Self { file, rows_per_chunk, words: Vec::new(), sums, chunk: Xxh3::new(), n_rows: 0 })
    }

    /// Writes the next row, `[n_vocab]` finite logits.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn row(&mut self, logits: &[f32]) -> io::Result<()> {
        encode_row(logits, &mut self.words);
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.chunk.update(&bytes);
        self.n_rows += 1;
        if self.n_rows == self.rows_per_chunk {
            self.sums.push(self.chunk.digest());
            (self.chunk, self.n_rows) = (Xxh3::new(), 0);
        }
        self.file.write_all(&bytes)
    }

    /// Writes the trailer after all rows, with the [fingerprint](kvant::Model::fingerprint) of the
    /// model, and whether its cache was f16.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn finish(self, fingerprint: &str, is_f16: bool) -> io::Result<()> {
        let trailer = Trailer { fingerprint: fingerprint.to_owned(), is_f16: Some(is_f16), sums: self.sums };
        self.file.write_all(&trailer.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::Row;

    fn coded(logits: &[f32]) -> Vec<u16> {
        let mut words = Vec::new();
        encode_row(logits, &mut words);
        words
    }

    #[test]
    fn rows_are_encoded_as_in_llama_cpp() {
        // Three tokens make four words of codes: padded to an even number. Computed by hand from
        // perplexity.cpp: max 16, min -0, scale 16/65535; log_sum_exp = ln(1 + e^-8 + e^-16) =
        // 3.355e-4.
        let words = coded(&[0.0, 8.0, 16.0]);
        assert_eq!(words.len(), 8);
        assert_eq!(words[4..], [0, 32768, 65535, 0]);
        let row = CodedRow::new(&words, 3);
        assert_eq!(row.scale, 16.0 / 65535.0);
        assert!((row.min + 16.000_336).abs() <= 2e-6, "{}", row.min);
    }

    #[test]
    fn the_tail_is_clamped_and_equal_logits_have_scale_zero() {
        assert_eq!(coded(&[-100.0, 0.0, -15.0, -16.0])[4..], [0, 65535, 4096, 0]);
        let row = coded(&[2.0; 4]);
        assert_eq!(row[4..], [0; 4]);
        assert!((CodedRow::new(&row, 4).log_prob(3) + 4f64.ln()).abs() <= 1e-6);
    }

    #[test]
    fn decoded_log_probabilities_are_within_half_a_step() {
        let mut random = kvant_codec::random::Random::new(1);
        let mut logits = [0.0; 301];
        random.fill_gaussian(&mut logits, 3.0);
        let (words, exact) = (coded(&logits), Row::new(&logits).unwrap());
        let row = CodedRow::new(&words, logits.len());
        assert_eq!(row.top(), exact.top());
        for i in (0..logits.len()).filter(|&i| exact.log_prob(i) > exact.log_prob(exact.top()) - 16.0) {
            // Half a step of 16/65,535 and the rounding of f32 at 32 nats.
            assert!((row.log_prob(i) - exact.log_prob(i)).abs() <= 1.23e-4 + 4e-6, "{i}");
        }
    }

    const FINGERPRINT: &str = "00112233445566778899aabbccddeeff";

    /// Writes a file of two chunks of 6 tokens, of which positions 3 and 4 are scored; returns the
    /// offset of its trailer.
    fn sample(path: &Path) -> (Vec<u8>, usize) {
        files::write_atomic(path, std::convert::identity, |file| {
            let mut writer = BaseWriter::new(file, 6, 3, &[0, 1, 2, 0, 1, 2, 2, 2, 1, 1, 0, 0])?;
            let rows = [[0.5, 1.0, 2.0], [3.0, 2.0, 1.0], [-1.0, 0.0, 5.0], [2.0, 2.5, 2.25]];
            rows.iter().try_for_each(|row| writer.row(row))?;
            writer.finish(FINGERPRINT, false)
        })
        .unwrap();
        (std::fs::read(path).unwrap(), HEAD + 48 + 4 * 16)
    }

    /// Returns the tokens and every row of a file, as bits.
    fn contents(path: &Path) -> Result<(Vec<u32>, Vec<u64>), EvalError> {
        let mut reader = BaseReader::open(path)?;
        let mut bits = Vec::new();
        for _ in 0..reader.tokens().len() / reader.n_ctx() {
            reader.next_chunk(true)?;
            for index in 0..rows_per_chunk(reader.n_ctx()) {
                let row = reader.row(index)?;
                bits.extend((0..row.n_vocab()).map(|i| row.log_prob(i).to_bits()));
            }
        }
        Ok((reader.tokens().to_vec(), bits))
    }

    #[test]
    fn written_files_are_read_and_invalid_ones_rejected() {
        let path = std::env::temp_dir().join(format!("kvant-base-{}", std::process::id()));
        let (whole, end) = sample(&path);
        assert_eq!(whole.len(), end + Trailer::n_bytes(2));
        let mut reader = BaseReader::open(&path).unwrap();
        assert_eq!((reader.n_ctx(), reader.n_vocab(), reader.tokens().len()), (6, 3, 12));
        assert_eq!((reader.fingerprint(), reader.is_f16()), (Some(FINGERPRINT), Some(false)));
        reader.next_chunk(true).unwrap();
        assert_eq!(reader.row(0).unwrap().top(), 2);
        assert_eq!(reader.row(1).unwrap().top(), 0);
        // The format of llama.cpp, without a trailer.
        let all = contents(&path).unwrap();
        std::fs::write(&path, &whole[..end]).unwrap();
        assert_eq!(contents(&path).unwrap(), all);
        assert_eq!(BaseReader::open(&path).unwrap().fingerprint(), None);

        let refused = |change: &dyn Fn(&mut Vec<u8>), expected: &str| {
            let mut bytes = whole[..end].to_vec();
            change(&mut bytes);
            std::fs::write(&path, bytes).unwrap();
            let error = BaseReader::open(&path).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        };
        // The first row's scale and minimum: numbers outside any distribution.
        for (at, float) in [(68, 2.0f32), (68, -1e-9), (68, f32::NAN), (72, 3.0), (72, -40.0)] {
            let mut bytes = whole[..end].to_vec();
            bytes[at..at + 4].copy_from_slice(&float.to_le_bytes());
            std::fs::write(&path, bytes).unwrap();
            let error = contents(&path).unwrap_err().to_string();
            assert!(error.contains("a row has the scale") && !error.contains('\n'), "{error}");
        }

        refused(&|b| b[0] = b'x', "not a base-logits file");
        refused(&|b| b.truncate(10), "not a base-logits file");
        refused(&|b| b.truncate(130), "expected 132 bytes");
        refused(&|b| b[16] = 3, "expected 188 bytes");
        refused(&|b| b[12..16].fill(0xff), "n_vocab -1");
        refused(&|b| b[8..20].fill(0x7f), "for 2139062143 chunks");
        refused(&|b| b[20] = 9, "token 9 of a vocabulary of 3");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn files_of_one_text_with_other_rows_are_distinguished() {
        let path = std::env::temp_dir().join(format!("kvant-base-identity-{}", std::process::id()));
        let (whole, end) = sample(&path);
        let identity = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            BaseReader::open(&path).unwrap().identity().unwrap()
        };
        let bare = identity(&whole[..end]);
        assert_eq!(bare, identity(&whole[..end]));
        assert_ne!(bare, identity(&whole));
        // The first codes of the first chunk's first row and of the last chunk's last.
        for at in [68 + 8, end - 16 + 8] {
            let mut bytes = whole[..end].to_vec();
            bytes[at] ^= 1;
            assert_ne!(bare, identity(&bytes), "byte {at}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn every_bit_flip_and_truncation_is_rejected_or_harmless() {
        let path = std::env::temp_dir().join(format!("kvant-base-flips-{}", std::process::id()));
        let (whole, end) = sample(&path);
        let all = contents(&path).unwrap();
        for bit in 0..8 * whole.len() {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, bytes).unwrap();
            let error = contents(&path).expect_err("a flip").to_string();
            assert!(!error.contains('\n'), "bit {bit}: {error}");
        }
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            match contents(&path) {
                // Without the trailer the file equals one of llama.cpp.
                Ok(found) => assert_eq!((len, found), (end, all.clone())),
                Err(error) => {
                    assert!(len != end && !error.to_string().contains('\n'), "cut to {len}: {error}")
                }
            }
        }
        std::fs::remove_file(&path).unwrap();
    }
}
