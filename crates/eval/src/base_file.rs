//! llama.cpp's base-logits file (`llama-perplexity --kl-divergence-base`), read and written byte for byte.
//!
//! ```text
//!  0   8   "_logits_"
//!  8   4   n_ctx, u32
//! 12   4   n_vocab, i32
//! 16   4   n_chunk, i32
//! 20  ..   the tokens, i32: n_chunk * n_ctx (as in the text; a chunk's first one is read as BOS where the model adds it)
//! ..  ..   rows: for each chunk, positions n_ctx/2 .. n_ctx - 1, the last left out
//! ```
//!
//! A row is `nv = 2 ((n_vocab + 1) / 2) + 4` words of 16 bits: two f32 (`scale`, `min`), then for each token a word q with
//! log p = scale q + min, then padding. Logits more than 16 below the largest are cut to there, so a row has a
//! resolution of 16 / 65,535 nats, which gives measurements against a file a floor: about 1e-9 nats of divergence from
//! rounding, and what the cut tail of the distribution held (log p <= -16 is not counted when it is read).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::EvalError;
use crate::score::LogProbs;

const MAGIC: &[u8; 8] = b"_logits_";
/// Nats below the top at which a logit is cut.
const RANGE: f32 = 16.0;
/// Words in front of a row's codes: two f32.
const ROW_HEAD: usize = 4;

/// Words of a row.
fn row_words(n_vocab: usize) -> usize {
    2 * n_vocab.div_ceil(2) + ROW_HEAD
}

/// Rows of a chunk: its second half without the last token, which has nothing to predict.
fn rows_per_chunk(n_ctx: usize) -> usize {
    n_ctx - 1 - n_ctx / 2
}

/// Encodes a row of finite logits as llama.cpp does, f32 arithmetic included.
fn encode_row(logits: &[f32], words: &mut Vec<u16>) {
    words.clear();
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = logits.iter().copied().fold(f32::INFINITY, f32::min).max(max - RANGE);
    let sum: f64 = logits.iter().map(|&v| f64::from((v - max).exp())).sum();
    let log_sum = sum.ln() as f32;
    let scale = (max - min) / 65535.0;
    for float in [scale, min - max - log_sum] {
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

/// ggml's rounding: to the nearest, ties to even, by adding 1.5 * 2^23. Codes above 65,535 cannot occur but by rounding of
/// `inverse`, and wrap as they do there.
fn nearest(x: f32) -> u16 {
    ((x + 12_582_912.0).to_bits() & 0x007f_ffff).wrapping_sub(0x0040_0000) as u16
}

/// One row as it is in the file.
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

/// A base-logits file being read, chunk by chunk.
#[derive(Debug)]
pub struct BaseReader {
    path: PathBuf,
    file: BufReader<File>,
    n_ctx: usize,
    n_vocab: usize,
    tokens: Vec<u32>,
    /// Rows of the chunk read last.
    words: Vec<u16>,
}

impl BaseReader {
    /// Opens a file and reads its head and tokens.
    ///
    /// # Errors
    /// [`EvalError::File`] when it is no such file, is cut short, or holds senseless numbers.
    pub fn open(path: &Path) -> Result<Self, EvalError> {
        let file = File::open(path).map_err(EvalError::io(path))?;
        let file_len = file.metadata().map_err(EvalError::io(path))?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut head = [0; 20];
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
        // Three factors of up to 2^31 do not fit 64 bits.
        let row_bytes = 2 * row_words(n_vocab) as u128;
        let chunk_bytes = 4 * n_ctx as u128 + rows_per_chunk(n_ctx) as u128 * row_bytes;
        let expected = 20 + n_chunks as u128 * chunk_bytes;
        if u128::from(file_len) != expected {
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
        Ok(Self { path: path.to_owned(), file, n_ctx, n_vocab, tokens, words: Vec::new() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tokens of a chunk.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// The tokens of every chunk, one after the other.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads the rows of the next chunk, or passes over them.
    pub(crate) fn next_chunk(&mut self, wanted: bool) -> Result<(), EvalError> {
        let n_words = rows_per_chunk(self.n_ctx) * row_words(self.n_vocab);
        let read = if wanted {
            let mut bytes = vec![0; 2 * n_words];
            let read = self.file.read_exact(&mut bytes);
            self.words.clear();
            self.words.extend(bytes.as_chunks::<2>().0.iter().map(|&bytes| u16::from_le_bytes(bytes)));
            read
        } else {
            self.file.seek_relative(2 * n_words as i64)
        };
        read.map_err(EvalError::io(&self.path))
    }

    /// Row `index` of the chunk read last.
    pub(crate) fn row(&self, index: usize) -> Result<CodedRow<'_>, EvalError> {
        let n = row_words(self.n_vocab);
        let row = CodedRow::new(&self.words[index * n..][..n], self.n_vocab);
        if !(row.scale.is_finite() && row.min.is_finite()) {
            let what = format!("a row has the scale {} and the minimum {}", row.scale, row.min);
            return Err(EvalError::file(&self.path, what));
        }
        Ok(row)
    }
}

/// Writes a base-logits file.
#[derive(Debug)]
pub struct BaseWriter<'a> {
    file: &'a mut BufWriter<File>,
    words: Vec<u16>,
}

impl<'a> BaseWriter<'a> {
    /// Writes the head and the tokens of every chunk, `[n_chunks, n_ctx]`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn new(
        file: &'a mut BufWriter<File>,
        n_ctx: usize,
        n_vocab: usize,
        tokens: &[u32],
    ) -> io::Result<Self> {
        file.write_all(MAGIC)?;
        for number in [n_ctx, n_vocab, tokens.len() / n_ctx] {
            file.write_all(&(number as u32).to_le_bytes())?;
        }
        for token in tokens {
            file.write_all(&token.to_le_bytes())?;
        }
        Ok(Self { file, words: Vec::new() })
    }

    /// Writes the next row, `[n_vocab]` finite logits.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn row(&mut self, logits: &[f32]) -> io::Result<()> {
        encode_row(logits, &mut self.words);
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.file.write_all(&bytes)
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
    fn a_row_is_coded_as_llama_cpp_does() {
        // Three tokens make four words of codes: padded to an even number. Computed by hand from perplexity.cpp:
        // max 16, min -0, scale 16/65535; log_sum = ln(1 + e^-8 + e^-16) = 3.355e-4.
        let words = coded(&[0.0, 8.0, 16.0]);
        assert_eq!(words.len(), 8);
        assert_eq!(words[4..], [0, 32768, 65535, 0]);
        let row = CodedRow::new(&words, 3);
        assert_eq!(row.scale, 16.0 / 65535.0);
        assert!((row.min + 16.000_336).abs() <= 2e-6, "{}", row.min);
    }

    #[test]
    fn the_tail_is_cut_16_nats_below_the_top_and_equal_logits_have_no_scale() {
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

    #[test]
    fn what_is_written_is_read_and_bad_files_are_refused() {
        let path = std::env::temp_dir().join(format!("kvant-base-{}", std::process::id()));
        let rows = [[0.5, 1.0, 2.0], [3.0, 2.0, 1.0]];
        let write = |file: &mut BufWriter<File>| {
            // Chunks of 6: positions 3 and 4 are scored.
            let mut writer = BaseWriter::new(file, 6, 3, &[0, 1, 2, 0, 1, 2])?;
            rows.iter().try_for_each(|row| writer.row(row))
        };
        kvant::durable::write_whole(&path, write).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole.len(), 20 + 24 + 2 * 16);
        let mut reader = BaseReader::open(&path).unwrap();
        assert_eq!((reader.n_ctx(), reader.n_vocab(), reader.tokens().len()), (6, 3, 6));
        reader.next_chunk(true).unwrap();
        assert_eq!(reader.row(0).unwrap().top(), 2);
        assert_eq!(reader.row(1).unwrap().top(), 0);

        let refused = |change: &dyn Fn(&mut Vec<u8>), says: &str| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            std::fs::write(&path, bytes).unwrap();
            let error = BaseReader::open(&path).unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        };
        refused(&|b| b[0] = b'x', "not a base-logits file");
        refused(&|b| b.truncate(10), "not a base-logits file");
        refused(&|b| b.truncate(70), "expected 76 bytes");
        refused(&|b| b[16] = 2, "expected 132 bytes");
        refused(&|b| b[12..16].fill(0xff), "n_vocab -1");
        refused(&|b| b[8..20].fill(0x7f), "for 2139062143 chunks");
        refused(&|b| b[20] = 9, "token 9 of a vocabulary of 3");
        std::fs::remove_file(&path).unwrap();
    }
}
