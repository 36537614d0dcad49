//! safetensors files: locates their tensors. (The `safetensors` crate parses them too, but its
//! errors do not name the tensor.)
//!
//! ```text
//! header length u64, little endian | header, JSON | data
//! header: {"NAME": {"dtype": "BF16", "shape": [outermost first], "data_offsets": [begin, end]},
//!          "__metadata__": {...}}
//! ```

mod header;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use kvant_codec::DType;
use kvant_gguf::{Source, SourceFile};
use serde_json::Value;

use crate::error::{HfError, TensorFault};
use crate::folder::{Folder, shown};
use crate::quantized::Quantized;

/// Maximum header length of the format.
const MAX_HEADER: u64 = 100_000_000;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Non-weight tensors in some files, which are computed from the configuration.
const DERIVED_TENSORS: [&str; 3] = [".rotary_emb.inv_freq", ".attn.masked_bias", ".attention.masked_bias"];

/// The tensors of a folder, in mapped files.
pub(crate) struct Shards {
    files: Vec<Shard>,
    tensors: BTreeMap<String, Stored>,
}

struct Shard {
    stamp: SourceFile,
    bytes: Source,
}

/// Location of a tensor.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    place: Place,
    pub holds: ElementKind,
    /// Outermost first, none zero; a scalar has one dimension of 1.
    pub shape: Vec<usize>,
}

/// Where the bytes of a tensor are.
#[derive(Debug, Clone)]
enum Place {
    File {
        file: usize,
        /// Within the file.
        range: Range<usize>,
    },
    /// Made of several tensors.
    Made(Arc<Quantized>),
}

impl Stored {
    /// Returns a tensor without values.
    pub fn empty() -> Self {
        let place = Place::File { file: 0, range: 0..0 };
        Self { place, holds: ElementKind::Bytes, shape: vec![0] }
    }

    /// Returns its bytes within its file; none if it is made of others.
    fn range(&self) -> Range<usize> {
        match &self.place {
            Place::File { range, .. } => range.clone(),
            Place::Made(_) => 0..0,
        }
    }

    /// Describes a quantized matrix.
    pub fn made(quantized: Quantized) -> Self {
        let holds = ElementKind::Values(quantized.dtype());
        let shape = quantized.shape().to_vec();
        Self { place: Place::Made(Arc::new(quantized)), holds, shape }
    }

    /// Returns what [`Stored::dense`] holds.
    pub fn dense_kind(&self) -> ElementKind {
        match &self.place {
            Place::Made(quantized) => ElementKind::Values(quantized.dense_dtype()),
            Place::File { .. } => self.holds,
        }
    }

    /// Returns the tensor in values, if it is in blocks.
    pub fn dense(&self) -> Self {
        match &self.place {
            Place::Made(quantized) => Self::made(Quantized::clone(quantized).dense()),
            Place::File { .. } => self.clone(),
        }
    }
}

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementKind {
    /// Values, or blocks of values, of this type.
    Values(DType),
    /// Bytes: codes that are combined with other tensors.
    Bytes,
    /// Flags, which no weights are made of.
    Flags,
    /// Integers, of which quantized weights are made.
    I8,
    I32,
    I64,
    /// 8-bit floats, of which quantized weights are made.
    E4M3,
    E8M0,
}

impl ElementKind {
    /// Bytes per element, or per block.
    pub fn size(self) -> usize {
        match self {
            Self::Values(dtype) => dtype.block_bytes(),
            Self::Bytes | Self::Flags | Self::I8 | Self::E4M3 | Self::E8M0 => 1,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Values per block.
    pub fn block_len(self) -> usize {
        if let Self::Values(dtype) = self { dtype.block_len() } else { 1 }
    }
}

impl fmt::Display for ElementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Values(dtype) => dtype.fmt(f),
            Self::Bytes => f.write_str("U8"),
            Self::Flags => f.write_str("BOOL"),
            Self::I8 => f.write_str("I8"),
            Self::I32 => f.write_str("I32"),
            Self::I64 => f.write_str("I64"),
            Self::E4M3 => f.write_str("F8_E4M3"),
            Self::E8M0 => f.write_str("F8_E8M0"),
        }
    }
}

impl Shards {
    /// Maps the files that hold weights and reads their headers.
    pub fn open(folder: &mut Folder) -> Result<Self, HfError> {
        let Some(index) = folder.json(INDEX)? else {
            if !folder.has(SINGLE) {
                let has = |ending: &str| folder.has(&format!("pytorch_model{ending}"));
                let why = match has(".bin") || has(".bin.index.json") {
                    true => {
                        "has its weights in pytorch_model.bin, which is not read, and no model.safetensors"
                    }
                    false => "has no model.safetensors and no model.safetensors.index.json",
                };
                return Err(HfError::Folder { path: folder.path().to_owned(), why });
            }
            return Self::open_file(folder, SINGLE);
        };
        let index = index.object()?;
        let mut places: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let map = index.object("weight_map")?;
        for (name, file) in map.map {
            let file = file.as_str().filter(|file| is_file_name(file));
            let file = file.ok_or_else(|| map.bad(name, "the name of a file", shown(&map.map[name])))?;
            places.entry(file).or_default().insert(name);
        }
        let mut shards = Self { files: Vec::new(), tensors: BTreeMap::new() };
        for (file, names) in places {
            let path = folder.path().join(file);
            let mut stored_tensors = shards.add(&path)?;
            for name in names {
                let stored = stored_tensors.remove(name).ok_or_else(|| HfError::Missing {
                    name: name.to_owned(),
                    of: Some(format!("{INDEX} lists it in {file}")),
                });
                shards.tensors.insert(name.to_owned(), stored?);
            }
        }
        Ok(shards)
    }

    /// Maps one file and reads its header.
    pub fn open_file(folder: &Folder, name: &str) -> Result<Self, HfError> {
        let mut shards = Self { files: Vec::new(), tensors: BTreeMap::new() };
        shards.tensors = shards.add(&folder.path().join(name))?.into_iter().collect();
        Ok(shards)
    }

    /// Maps a further file of a folder and returns its tensors, which are not listed among the
    /// others.
    pub fn add_file(&mut self, folder: &Folder, name: &str) -> Result<HashMap<String, Stored>, HfError> {
        self.add(&folder.path().join(name))
    }

    /// Maps a further file and returns its tensors.
    fn add(&mut self, path: &Path) -> Result<HashMap<String, Stored>, HfError> {
        let (bytes, modified) = Source::map(path)?;
        let tensors = read_header(path, &bytes, self.files.len())?;
        let stamp = SourceFile { path: path.to_owned(), n_bytes: bytes.len() as u64, modified };
        self.files.push(Shard { stamp, bytes });
        Ok(tensors)
    }

    /// Returns every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Stored)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), stored))
    }

    /// Returns the bytes of a tensor.
    pub fn data(&self, stored: &Stored) -> Cow<'_, [u8]> {
        match &stored.place {
            Place::File { file, range } => Cow::Borrowed(&self.files[*file].bytes[range.clone()]),
            Place::Made(quantized) => Cow::Owned(quantized.rows(self)),
        }
    }

    /// Returns the file of a tensor, or of the codes of a quantized one.
    pub fn path(&self, stored: &Stored) -> &Path {
        match &stored.place {
            Place::File { file, .. } => &self.files[*file].stamp.path,
            Place::Made(quantized) => self.path(quantized.codes()),
        }
    }

    /// Removes the tensors that do not satisfy `keeps`.
    pub fn retain(&mut self, keeps: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| keeps(name));
    }

    /// Replaces several tensors by one that is made of them.
    pub fn replace(&mut self, parts: impl Iterator<Item = String>, name: String, stored: Stored) {
        parts.for_each(|part| drop(self.tensors.remove(&part)));
        self.tensors.insert(name, stored);
    }

    /// Releases the memory of mapped files.
    pub fn release(&self) {
        self.files.iter().for_each(|shard| shard.bytes.release());
    }

    /// Returns the files with size and modification time at opening.
    pub fn stamps(&self) -> impl Iterator<Item = SourceFile> {
        self.files.iter().map(|shard| shard.stamp.clone())
    }
}

/// Whether a name refers to a file directly in the folder.
fn is_file_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

fn read_header(path: &Path, bytes: &[u8], file: usize) -> Result<HashMap<String, Stored>, HfError> {
    let left = (bytes.len() as u64).saturating_sub(8);
    let length = bytes.first_chunk().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
    if length > left.min(MAX_HEADER) {
        let left = left.min(MAX_HEADER);
        return Err(HfError::HeaderLength { path: path.to_owned(), claimed: length, left });
    }
    // At most the file's length, which fits.
    let start = 8 + length as usize;
    let fail = |name: &str, what| HfError::Tensor { path: path.to_owned(), name: name.to_owned(), what };
    let mut tensors = HashMap::new();
    header::for_each(path, &bytes[8..start], |name, record| {
        if name != "__metadata__" && !DERIVED_TENSORS.iter().any(|ending| name.ends_with(ending)) {
            let stored = read_record(record, file, start..bytes.len()).map_err(|what| fail(&name, what))?;
            tensors.insert(name, stored);
        }
        Ok(())
    })?;
    let mut order: Vec<(&String, &Stored)> = tensors.iter().collect();
    order.sort_by_key(|(_, stored)| stored.range().start);
    for pair in order.windows(2) {
        let ((other, before), (name, stored)) = (pair[0], pair[1]);
        if stored.range().start < before.range().end {
            return Err(fail(name, TensorFault::Overlap { other: other.clone() }));
        }
    }
    Ok(tensors)
}

/// Parses the header entry of a tensor; `data` is the data section of the file.
fn read_record(record: &Value, file: usize, data: Range<usize>) -> Result<Stored, TensorFault> {
    let numbers = |key: &str| {
        let list = record.get(key)?.as_array()?;
        list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
    };
    let name = record.get("dtype").and_then(Value::as_str).ok_or(TensorFault::Record)?;
    let (shape, offsets) = numbers("shape").zip(numbers("data_offsets")).ok_or(TensorFault::Record)?;
    let [begin, end] = offsets[..] else { return Err(TensorFault::Record) };
    let holds = match name {
        "F32" => ElementKind::Values(DType::F32),
        "F16" => ElementKind::Values(DType::F16),
        "BF16" => ElementKind::Values(DType::BF16),
        "U8" => ElementKind::Bytes,
        "BOOL" => ElementKind::Flags,
        "I8" => ElementKind::I8,
        "I32" => ElementKind::I32,
        "I64" => ElementKind::I64,
        "F8_E4M3" => ElementKind::E4M3,
        "F8_E8M0" => ElementKind::E8M0,
        got => return Err(TensorFault::Type { got: got.chars().take(32).collect() }),
    };
    let len = data.len() as u64;
    if begin > end || end > len {
        return Err(TensorFault::Range { begin, end, len });
    }
    let impossible = || TensorFault::Shape { shape: shape.clone() };
    let elements = shape.iter().try_fold(1_u64, |n, size| n.checked_mul(*size)).filter(|n| *n > 0);
    let want = elements.and_then(|n| n.checked_mul(holds.size() as u64)).ok_or_else(impossible)?;
    if want != end - begin {
        return Err(TensorFault::Size { want, got: end - begin });
    }
    // All are at most the file's length.
    let mut sizes: Vec<usize> = shape.iter().map(|size| *size as usize).collect();
    if sizes.is_empty() {
        sizes.push(1);
    }
    let range = data.start + begin as usize..data.start + end as usize;
    Ok(Stored { place: Place::File { file, range }, holds, shape: sizes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, n_data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + n_data, 0);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<HashMap<String, Stored>, String> {
        read_header(Path::new("x.safetensors"), bytes, 0).map_err(|error| error.to_string())
    }

    fn record(dtype: &str, shape: &str, offsets: &str) -> String {
        format!(r#"{{"a": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
    }

    #[test]
    fn tensors_are_located_by_their_header() {
        let header = r#"{"__metadata__": {"format": "pt"}, "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
            "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "l.rotary_emb.inv_freq": {}}"#;
        let found = read(&file(header, 16)).unwrap();
        let (start, b) = (8 + header.len(), &found["b"]);
        assert_eq!(
            (b.range(), b.holds, &b.shape[..]),
            (start + 4..start + 16, ElementKind::Values(DType::BF16), &[2, 3][..])
        );
        assert_eq!((found["a"].range(), &found["a"].shape[..]), (start..start + 4, &[1][..]));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn inconsistent_headers_are_rejected_by_tensor() {
        let huge = u64::MAX.to_string();
        let two = r#"{"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}, "b": {"dtype": "F16", "shape": [2], "data_offsets": [2, 6]}}"#;
        let cases = [
            (record("F32", "[2]", "[0, 12]"), "lies from byte 0 to 12 of 8 bytes"),
            (record("F32", "[2]", &format!("[0, {huge}]")), "lies from byte 0 to 18446744073709551615"),
            (record("F32", "[2]", "[8, 0]"), "lies from byte 8 to 0"),
            (record("F32", "[3]", "[0, 8]"), "takes 12 bytes, but has 8"),
            (record("F16", "[2]", "[0, 8]"), "takes 4 bytes, but has 8"),
            (record("F32", "[0, 2]", "[0, 0]"), "impossible shape [0, 2]"),
            (record("F32", &format!("[{huge}, 4]"), "[0, 8]"), "impossible shape"),
            (record("F8_E5M2", "[8]", "[0, 8]"), "holds F8_E5M2; weights are read in F32, F16 and BF16"),
            (record("F32", "[-2]", "[0, 8]"), "expected dtype, shape and data_offsets"),
            (record("F32", "[2]", "[0]"), "expected dtype, shape and data_offsets"),
            (r#"{"a": 7}"#.to_owned(), "expected dtype, shape and data_offsets"),
            (two.to_owned(), "tensor 'b': overlaps tensor 'a'"),
            ("[]".to_owned(), "not sound JSON"),
            ("{".to_owned(), "not sound JSON"),
        ];
        for (header, want) in cases {
            let error = read(&file(&header, 8)).unwrap_err();
            assert!(error.starts_with("x.safetensors: ") && error.contains(want), "{error}");
        }
    }

    #[test]
    fn oversized_headers_are_rejected_before_allocation() {
        for (claimed, n_bytes, left) in [(100_000_000_u64, 64, 64), (u64::MAX, 8, 8), (9, 8, 8)] {
            let mut bytes = claimed.to_le_bytes().to_vec();
            bytes.resize(8 + n_bytes, b' ');
            let error = read(&bytes).unwrap_err();
            assert!(
                error.contains(&format!("claims a header of {claimed} bytes, at most {left} are")),
                "{error}"
            );
        }
        assert!(read(&[1, 2, 3]).unwrap_err().contains("at most 0 are possible"));
    }

    #[test]
    fn a_header_of_too_many_tensors_is_rejected_before_its_end() {
        let mut header = String::from("{");
        for i in 0..=header::MAX_TENSORS {
            header.push_str(&format!(
                r#""{i}": {{"dtype": "U8", "shape": [1], "data_offsets": [{i}, {}]}},"#,
                i + 1
            ));
        }
        // What follows is not read.
        header.push_str("no JSON");
        let error = read(&file(&header, header::MAX_TENSORS + 1)).unwrap_err();
        assert_eq!(error, "x.safetensors: more than 262144 tensors in one file");
    }

    #[test]
    fn an_index_refers_only_to_files_of_its_folder() {
        assert!(is_file_name("model-00001-of-00002.safetensors"));
        for file in ["../a", "/etc/passwd", "a/b", "..", ".", ""] {
            assert!(!is_file_name(file), "{file}");
        }
    }
}
