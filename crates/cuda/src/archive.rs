//! The PTX of every listed kernel, compiled ahead: NVRTC is needed only for the others.
//!
//! `assets/ptx.index` lists the kernels by the hash of everything their PTX depends on except the
//! compiler; `assets/ptx.zst` holds them, in zstd frames of variants of a source, which are alike.
//! They are more alike with the number of each register and label written as the difference from
//! the last one of its kind, which halves the archive. `python3 tools/ptx_archive.py` writes both.

use std::collections::HashMap;
use std::fmt::Write;
use std::io::Read;
use std::ops::Range;
use std::sync::LazyLock;

use ruzstd::decoding::StreamingDecoder;

use crate::CudaVersion;

const INDEX: &str = include_str!("../assets/ptx.index");
const FRAMES: &[u8] = include_bytes!("../assets/ptx.zst");

/// The kernels of this binary.
static SHIPPED: LazyLock<Archive> =
    LazyLock::new(|| Archive::parse(INDEX).expect("the index is well-formed"));

/// PTX by the hash of its source.
#[derive(Debug)]
pub(crate) struct Archive {
    /// The compiler's version: a driver for an older one may reject the PTX.
    nvrtc: CudaVersion,
    texts: HashMap<&'static str, Text>,
}

/// Where the PTX of one kernel is.
#[derive(Debug, Clone)]
struct Text {
    /// Bytes of its frame in [`FRAMES`].
    frame: Range<usize>,
    /// Bytes in the decoded frame.
    range: Range<usize>,
}

impl Archive {
    /// Returns the archive of this binary.
    pub fn shipped() -> &'static Self {
        &SHIPPED
    }

    /// Reads an index: a line `nvrtc MAJOR.MINOR`; then, for each frame, a line `frame BYTES` and
    /// lines `HASH BYTES TARGET SOURCE MACROS..`, the texts in order.
    fn parse(index: &'static str) -> Option<Self> {
        let mut lines = index.lines();
        let nvrtc = lines.next()?.strip_prefix("nvrtc ")?.parse().ok()?;
        let (mut frame, mut end) = (0..0, 0);
        let mut texts = HashMap::new();
        for line in lines {
            let mut words = line.split(' ');
            let (name, n_bytes) = (words.next()?, words.next()?.parse::<usize>().ok()?);
            if name == "frame" {
                (frame, end) = (frame.end..frame.end + n_bytes, 0);
            } else {
                texts.insert(name, Text { frame: frame.clone(), range: end..end + n_bytes });
                end += n_bytes;
            }
        }
        Some(Self { nvrtc, texts })
    }

    /// Returns whether it has the PTX whose hash is `key`, and a driver for CUDA `driver` can load
    /// it.
    pub fn has(&self, key: &str, driver: CudaVersion) -> bool {
        self.nvrtc <= driver && self.texts.contains_key(key)
    }

    /// Returns the PTX whose hash is `key`, if a driver for CUDA `driver` can load it.
    pub fn ptx(&self, key: &str, driver: CudaVersion) -> Option<String> {
        let text = self.texts.get(key).filter(|_| self.nvrtc <= driver)?;
        Some(text.decode().expect("the archive holds what its index lists"))
    }
}

impl Text {
    fn decode(&self) -> Option<String> {
        let mut frame = StreamingDecoder::new(&FRAMES[self.frame.clone()]).ok()?;
        std::io::copy(&mut frame.by_ref().take(self.range.start as u64), &mut std::io::sink()).ok()?;
        let mut bytes = vec![0; self.range.len()];
        frame.read_exact(&mut bytes).ok()?;
        renumber(std::str::from_utf8(&bytes).ok()?)
    }
}

/// Restores the numbers of registers (`%r5`) and labels (`$L__BB0_5`); `None` for a number that is
/// too large.
fn renumber(text: &str) -> Option<String> {
    let mut last = HashMap::<&str, i64>::new();
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    let mut rest = text;
    while let Some(at) = rest.find(['%', '$']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let Some((kind, number)) = numbered(rest) else {
            out.push_str(&rest[..1]);
            rest = &rest[1..];
            continue;
        };
        let last = last.entry(kind).or_default();
        *last = last.checked_add(number.parse().ok()?)?;
        write!(out, "{kind}{last}").ok()?;
        rest = &rest[kind.len() + number.len()..];
    }
    out.push_str(rest);
    Some(out)
}

/// Returns the kind and the number of the register or label at the beginning of `text`: `%`,
/// lower-case letters and a whole number, or `$L__BB`, digits, `_` and a whole number.
fn numbered(text: &str) -> Option<(&str, &str)> {
    let after = |text: &'_ str, is_part: fn(&u8) -> bool| text.bytes().take_while(is_part).count();
    let kind = match text.strip_prefix("$L__BB") {
        Some(rest) => "$L__BB".len() + after(rest, u8::is_ascii_digit),
        None => text.strip_prefix('%').map(|rest| 1 + after(rest, u8::is_ascii_lowercase))?,
    };
    let kind = if text.starts_with('$') { kind + usize::from(text[kind..].starts_with('_')) } else { kind };
    let (kind, rest) = text.split_at(kind);
    let sign = usize::from(rest.starts_with('-'));
    let digits = after(&rest[sign..], u8::is_ascii_digit);
    let is_whole = kind.ends_with(|last: char| last == '_' || last.is_ascii_lowercase());
    (is_whole && digits > 0).then(|| (kind, &rest[..sign + digits]))
}

#[cfg(test)]
mod tests;
