//! Parses and validates one file's bytes in a single pass.
//!
//! Layout (little-endian; <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>):
//!
//! ```text
//! "GGUF" | version u32 | tensor count u64 | metadata count u64
//! per metadata record: key string | value type u32 | value
//! per tensor record:   name string | dims u32 | dim u64 each, fastest first
//!                      | type u32 | data offset u64
//! padding to general.alignment | data section, to which data offsets are relative
//! ```
//!
//! Versions 2 and 3 share it; 3 only added a big-endian twin. Time and memory are proportional to
//! the bytes present: every count is checked against the bytes left before a loop relies on it.

use std::ops::Range;

use kvant_codec::DType;

use crate::cursor::Cursor;
use crate::error::{Fault, GgufError, Item, Problem};
use crate::load_only::LoadOnlyType;
use crate::tensor::TensorInfo;
use crate::value::{Value, ValueType, convert};

/// Maximum key length in bytes, by the specification.
pub(crate) const MAX_KEY: u64 = 65_535;
/// Maximum tensor name length in bytes, by the specification.
pub(crate) const MAX_TENSOR_NAME: u64 = 64;
/// Maximum dimensions of a tensor, by the specification.
pub(crate) const MAX_DIMS: usize = 4;
/// Maximum nesting of arrays. No known file has more than one level; the limit bounds recursion on
/// the stack.
pub(crate) const MAX_DEPTH: usize = 8;
/// Alignment of files that do not state one.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// The key of the alignment.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";

/// Key length, one byte of key, type and one byte of value.
const MIN_ENTRY: u64 = 8 + 1 + 4 + 1;
/// Name length, one byte of name, number of dimensions (perhaps none), type and offset.
const MIN_TENSOR: u64 = 8 + 1 + 4 + 4 + 8;

/// A metadata record with the location of its value.
pub(crate) struct Entry {
    pub key: String,
    pub value_type: ValueType,
    /// Byte range of the value in the file.
    pub payload: Range<usize>,
    /// Offset of the record.
    pub offset: u64,
}

/// Locations of a file's contents.
pub(crate) struct Parsed {
    pub version: u32,
    pub alignment: u64,
    pub entries: Vec<Entry>,
    /// Indices of `entries`, ordered by key.
    pub by_key: Vec<usize>,
    /// In the order of the file, with shard 0.
    pub tensors: Vec<TensorInfo>,
    /// Bytes of the head: all records.
    pub n_head: usize,
}

/// Parses and validates a whole file.
pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed, GgufError> {
    parse_head(bytes, bytes.len() as u64)
}

/// Parses and validates a file of `file_len` bytes, of which `bytes` contains at least the head.
pub(crate) fn parse_head(bytes: &[u8], file_len: u64) -> Result<Parsed, GgufError> {
    let mut cursor = Cursor::new(bytes);
    let (version, n_tensors, n_entries) = header(&mut cursor, bytes)?;
    let entries = (0..n_entries).map(|n| entry(&mut cursor, n)).collect::<Result<Vec<_>, _>>()?;
    let by_key = sorted(&entries, |e| &e.key).map_err(|(first, second)| {
        let problem = Problem::Duplicate { first: entries[first].offset, first_file: None };
        GgufError::new(Item::Key(entries[second].key.clone()), entries[second].offset, problem)
    })?;
    let alignment = alignment(&entries, bytes)?;
    let records = (0..n_tensors).map(|n| tensor(&mut cursor, n)).collect::<Result<Vec<_>, _>>()?;
    let n_head = cursor.index();
    let tensors = locate_tensors(records, cursor.offset(), alignment, file_len)?;
    Ok(Parsed { version, alignment, entries, by_key, tensors, n_head })
}

/// Reads version, tensor count and metadata count.
fn header(cursor: &mut Cursor<'_>, bytes: &[u8]) -> Result<(u32, u64, u64), GgufError> {
    let fail = |offset, problem| GgufError::new(Item::Header, offset, problem);
    if bytes.is_empty() {
        return Err(fail(0, Problem::Empty));
    }
    if !bytes.starts_with(b"GGUF") {
        return Err(fail(0, Problem::Magic { got: bytes[..bytes.len().min(4)].to_vec() }));
    }
    let mut read = || -> Result<_, Fault> {
        cursor.take(4)?;
        let start = *cursor;
        let version = cursor.u32()?;
        match version {
            2 | 3 => {}
            // In the other byte order, a small version has all its bits in the high half.
            v if v != 0 && v & 0xffff == 0 => {
                return Err(start.fault(Problem::BigEndian { version: v.swap_bytes() }));
            }
            got => return Err(start.fault(Problem::Version { got })),
        }
        let n_tensors = cursor.count("tensors", MIN_TENSOR, 8)?;
        let n_entries = cursor.count("metadata records", MIN_ENTRY, n_tensors * MIN_TENSOR)?;
        Ok((version, n_tensors, n_entries))
    };
    read().map_err(|f| f.in_item(Item::Header))
}

/// Reads the nth metadata record.
fn entry(cursor: &mut Cursor<'_>, n: u64) -> Result<Entry, GgufError> {
    let offset = cursor.offset();
    let key = cursor.name(MAX_KEY).map_err(|f| f.in_item(Item::NthKey(n)))?;
    let mut value = || -> Result<_, Fault> {
        let value_type = value_type(cursor)?;
        let start = cursor.index();
        skip(value_type, cursor, 0)?;
        Ok((value_type, start..cursor.index()))
    };
    let (value_type, payload) = value().map_err(|f| f.in_item(Item::Key(key.to_owned())))?;
    Ok(Entry { key: key.to_owned(), value_type, payload, offset })
}

fn value_type(cursor: &mut Cursor<'_>) -> Result<ValueType, Fault> {
    let start = *cursor;
    let id = cursor.u32()?;
    ValueType::from_id(id).ok_or_else(|| start.fault(Problem::ValueType { id }))
}

/// Skips a value inside `depth` arrays.
fn skip(value_type: ValueType, cursor: &mut Cursor<'_>, depth: usize) -> Result<(), Fault> {
    match value_type {
        ValueType::Array => skip_array(cursor, depth + 1),
        ValueType::String => cursor.string().map(drop),
        ValueType::Bool => skip_bools(cursor, 1),
        _ => cursor.take(value_type.min_size() as u64).map(drop),
    }
}

fn skip_array(cursor: &mut Cursor<'_>, depth: usize) -> Result<(), Fault> {
    if depth > MAX_DEPTH {
        return Err(cursor.fault(Problem::Depth { max: MAX_DEPTH }));
    }
    let element = value_type(cursor)?;
    let len = cursor.count("array elements", element.min_size() as u64, 0)?;
    match element {
        ValueType::Bool => skip_bools(cursor, len),
        ValueType::String | ValueType::Array => (0..len).try_for_each(|_| skip(element, cursor, depth)),
        // The count was checked against the bytes left, so the product cannot overflow.
        _ => cursor.take(len * element.min_size() as u64).map(drop),
    }
}

fn skip_bools(cursor: &mut Cursor<'_>, len: u64) -> Result<(), Fault> {
    let start = cursor.offset();
    let bytes = cursor.take(len)?;
    match bytes.iter().position(|b| *b > 1) {
        Some(i) => Err(Fault { offset: start + i as u64, problem: Problem::Bool { got: bytes[i] } }),
        None => Ok(()),
    }
}

/// Returns `general.alignment`, or the default.
fn alignment(entries: &[Entry], bytes: &[u8]) -> Result<u64, GgufError> {
    let Some(entry) = entries.iter().find(|e| e.key == ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    convert::<u32>(Value::read_checked(entry.value_type, &bytes[entry.payload.clone()]))
        .and_then(|a| check_alignment(a.into()))
        .map_err(|problem| GgufError::new(Item::Key(entry.key.clone()), entry.payload.start as u64, problem))
}

pub(crate) fn check_alignment(alignment: u64) -> Result<u64, Problem> {
    if alignment.is_power_of_two() { Ok(alignment) } else { Err(Problem::Alignment { got: alignment }) }
}

/// The type of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredType {
    /// A type with kernels.
    Plain(DType),
    /// A load-only type.
    Packed(LoadOnlyType),
}

impl StoredType {
    /// Returns all types that files may contain.
    fn all() -> impl Iterator<Item = Self> {
        let plain = DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some()).map(Self::Plain);
        plain.chain(LoadOnlyType::stored().map(Self::Packed))
    }

    fn from_ggml_id(id: u32) -> Option<Self> {
        DType::from_ggml_id(id).map(Self::Plain).or_else(|| LoadOnlyType::from_ggml_id(id).map(Self::Packed))
    }

    /// Returns the type in the file of a parsed tensor.
    pub fn of(info: &TensorInfo) -> Self {
        match info.packed {
            None => Self::Plain(info.dtype),
            Some(LoadOnlyType::ScaledNvfp4) => Self::Plain(DType::NVFP4),
            Some(packed) => Self::Packed(packed),
        }
    }

    pub fn ggml_id(self) -> Option<u32> {
        match self {
            Self::Plain(dtype) => dtype.ggml_id(),
            Self::Packed(packed) => packed.ggml_id(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Packed(packed) => packed.name(),
        }
    }

    /// Returns values and bytes per block.
    fn block(self) -> [usize; 2] {
        match self {
            Self::Plain(dtype) => [dtype.block_len(), dtype.block_bytes()],
            Self::Packed(packed) => [packed.block_len(), packed.block_bytes()],
        }
    }

    /// Returns the type after loading.
    pub fn dtype(self) -> DType {
        match self {
            Self::Plain(dtype) => dtype,
            Self::Packed(packed) => packed.loaded_type(),
        }
    }

    fn packed(self) -> Option<LoadOnlyType> {
        match self {
            Self::Plain(_) => None,
            Self::Packed(packed) => Some(packed),
        }
    }
}

/// A tensor record whose data range is not validated yet.
struct Record {
    name: String,
    shape: Vec<usize>,
    stored: StoredType,
    n_bytes: usize,
    /// Offset of the data, relative to the data section.
    data: u64,
    /// Offset of the record.
    offset: u64,
}

impl Record {
    fn fail(&self, problem: Problem) -> GgufError {
        GgufError::new(Item::Tensor(self.name.clone()), self.offset, problem)
    }

    /// Returns whether `got` bytes up to the end of the file are compatible with this tensor.
    /// Padding there is customary, not required, and other programs may append to a file: only a
    /// size that matches another type exactly contradicts this one. Two types of another program
    /// may use our private ids, with any block size: after those, nothing may follow.
    fn is_last_of(&self, got: u64, alignment: u64) -> bool {
        let is_space_of = |n_bytes: u64| (n_bytes..=n_bytes.next_multiple_of(alignment)).contains(&got);
        let is_private = matches!(self.stored, StoredType::Plain(DType::TQ3_1S | DType::TQ4_1S));
        let is_of = |stored: StoredType| {
            let shape: Vec<u64> = self.shape.iter().map(|d| *d as u64).collect();
            checked_shape(&shape, stored).is_ok_and(|(_, n_bytes)| is_space_of(n_bytes as u64))
        };
        is_space_of(self.n_bytes as u64) || !is_private && !StoredType::all().any(is_of)
    }
}

/// Reads the nth tensor record.
fn tensor(cursor: &mut Cursor<'_>, n: u64) -> Result<Record, GgufError> {
    let offset = cursor.offset();
    let name = cursor.name(MAX_TENSOR_NAME).map_err(|f| f.in_item(Item::NthTensor(n)))?;
    let mut rest = || -> Result<_, Fault> {
        let start = *cursor;
        let n_dims = cursor.u32()?;
        if n_dims as usize > MAX_DIMS {
            return Err(start.fault(Problem::Dims { got: n_dims.into(), max: MAX_DIMS }));
        }
        let shape_at = *cursor;
        let mut shape = (0..n_dims).map(|_| cursor.u64()).collect::<Result<Vec<_>, _>>()?;
        // A single number; some writers omit its size.
        if shape.is_empty() {
            shape.push(1);
        }
        let type_at = *cursor;
        let id = cursor.u32()?;
        let stored = StoredType::from_ggml_id(id).ok_or_else(|| type_at.fault(Problem::TensorType { id }))?;
        let (shape, n_bytes) = checked_shape(&shape, stored).map_err(|p| shape_at.fault(p))?;
        Ok(Record { name: name.to_owned(), shape, stored, n_bytes, data: cursor.u64()?, offset })
    };
    rest().map_err(|f| f.in_item(Item::Tensor(name.to_owned())))
}

/// Returns the shape as `usize`, and the bytes of its data.
pub(crate) fn checked_shape(shape: &[u64], stored: StoredType) -> Result<(Vec<usize>, usize), Problem> {
    let impossible = || Problem::Shape { shape: shape.to_vec() };
    let sizes: Vec<usize> = shape
        .iter()
        .map(|d| usize::try_from(*d).ok().filter(|d| *d != 0))
        .collect::<Option<_>>()
        .ok_or_else(impossible)?;
    let (row, [block, block_bytes]) = (sizes[0], stored.block());
    if !row.is_multiple_of(block) {
        return Err(Problem::Row { type_name: stored.name(), block, row });
    }
    // Elements are checked too: the bytes of a format below one byte per value could fit where the
    // element count overflows.
    let elements = sizes.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).ok_or_else(impossible)?;
    let bytes = |[len, bytes]: [usize; 2]| (elements / len).checked_mul(bytes).ok_or_else(impossible);
    // Checks the size after loading as well.
    let dtype = stored.dtype();
    bytes([dtype.block_len(), dtype.block_bytes()])?;
    let n_bytes = bytes([block, block_bytes])?;
    Ok((sizes, n_bytes))
}

/// Validates names and extents against each other and the file, whose tensor records end at
/// `records_end`.
fn locate_tensors(
    records: Vec<Record>,
    records_end: u64,
    alignment: u64,
    file_len: u64,
) -> Result<Vec<TensorInfo>, GgufError> {
    sorted(&records, |r| &r.name).map_err(|(first, second)| {
        records[second].fail(Problem::Duplicate { first: records[first].offset, first_file: None })
    })?;
    // Neither addition overflows: a file is no longer than isize::MAX, the alignment at most 2^31.
    let data_start = records_end.next_multiple_of(alignment);
    let data_len = file_len.saturating_sub(data_start);
    for r in &records {
        if !r.data.is_multiple_of(alignment) {
            return Err(r.fail(Problem::Misaligned { got: r.data, alignment }));
        }
        if r.data.checked_add(r.n_bytes as u64).is_none_or(|end| end > data_len) {
            return Err(r.fail(Problem::PastEnd { bytes: r.n_bytes as u64, offset: r.data, file_len }));
        }
    }
    check_neighbours(&records, data_start, data_len, alignment)?;
    let info = |r: Record| TensorInfo {
        name: r.name,
        n_bytes: r.shape.iter().product::<usize>() / r.stored.dtype().block_len()
            * r.stored.dtype().block_bytes(),
        shape: r.shape,
        dtype: r.stored.dtype(),
        packed: r.stored.packed(),
        offset: data_start + r.data,
        stored_bytes: r.n_bytes,
        scales: None,
        shard: 0,
        record: r.offset,
    };
    Ok(records.into_iter().map(info).collect())
}

/// Rejects data that overlaps, and data that does not fill the space up to the next tensor: its
/// type or shape is not the one it was written with. GGML writes and reads only such contiguous
/// data.
fn check_neighbours(
    records: &[Record],
    data_start: u64,
    data_len: u64,
    alignment: u64,
) -> Result<(), GgufError> {
    let mut order: Vec<&Record> = records.iter().collect();
    order.sort_by_key(|r| r.data);
    for (i, r) in order.iter().enumerate() {
        let end = r.data + r.n_bytes as u64;
        let next = order.get(i + 1);
        if let Some(next) = next.filter(|next| next.data < end) {
            return Err(next.fail(Problem::Overlap { other: r.name.clone(), other_end: data_start + end }));
        }
        let got = next.map_or(data_len, |next| next.data) - r.data;
        let fits = match next {
            Some(_) => got == (r.n_bytes as u64).next_multiple_of(alignment),
            None => r.is_last_of(got, alignment),
        };
        if !fits {
            let (type_name, id, want) =
                (r.stored.name(), r.stored.ggml_id().unwrap_or_default(), r.n_bytes as u64);
            return Err(r.fail(Problem::Space { id, type_name, want, got, is_last: next.is_none() }));
        }
    }
    Ok(())
}

/// Returns the indices of `items` ordered by name, or the first two indices with equal names.
pub(crate) fn sorted<T>(items: &[T], name: impl Fn(&T) -> &str) -> Result<Vec<usize>, (usize, usize)> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    // Stable, so that equal names keep the order of the file.
    order.sort_by_key(|i| name(&items[*i]));
    match order.windows(2).find(|w| name(&items[w[0]]) == name(&items[w[1]])) {
        Some(pair) => Err((pair[0], pair[1])),
        None => Ok(order),
    }
}
