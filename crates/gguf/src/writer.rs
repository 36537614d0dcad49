//! Writes GGUF v3 files.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::Path;

use kvant_codec::DType;

use crate::error::{GgufError, Item, Problem};
use crate::load_only::LoadOnlyType;
use crate::meta::Meta;
use crate::parse::{self, ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_DIMS, MAX_KEY, MAX_TENSOR_NAME, StoredType};
use crate::tensor::TensorInfo;
use crate::value::{Element, Value, ValueType, convert};

/// The metadata and tensor records of a file to be written; [`GgufWriter::save`] streams the data.
#[derive(Debug, Clone)]
pub struct GgufWriter {
    entries: Vec<Entry>,
    /// Index of each key in `entries`.
    entry_of: HashMap<String, usize>,
    tensors: Vec<Tensor>,
    /// Index of each name in `tensors`.
    tensor_of: HashMap<String, usize>,
    alignment: u64,
}

/// A key and its encoded value, without the type.
#[derive(Debug, Clone)]
struct Entry {
    key: String,
    value_type: ValueType,
    encoded: Vec<u8>,
}

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    type_id: u32,
    n_bytes: u64,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufWriter {
    /// Creates a writer without metadata or tensors.
    pub fn new() -> Self {
        Self {
            entries: Vec::new(),
            entry_of: HashMap::new(),
            tensors: Vec::new(),
            tensor_of: HashMap::new(),
            alignment: DEFAULT_ALIGNMENT,
        }
    }

    /// Copies the metadata of another file, except the keys that describe its split.
    ///
    /// # Errors
    /// None for metadata of an opened file.
    pub fn with_meta(meta: Meta<'_>) -> Result<Self, GgufError> {
        let mut writer = Self::new();
        for (key, value) in meta.iter().filter(|(key, _)| !crate::split::is_split_key(key)) {
            writer.set(key, value)?;
        }
        Ok(writer)
    }

    /// Sets a key. An existing key keeps its position; `general.alignment` takes effect.
    ///
    /// # Errors
    /// [`Problem::NameLength`] for an empty or too long key, [`Problem::WrongType`] or
    /// [`Problem::Alignment`] for an alignment that is not a power of two.
    pub fn set<'a>(&mut self, key: &str, value: impl Into<Value<'a>>) -> Result<(), GgufError> {
        let mut value = value.into();
        if key == ALIGNMENT_KEY {
            let fail = |problem| GgufError::new(Item::Key(key.to_owned()), None, problem);
            let alignment = convert::<u32>(value).map_err(fail)?;
            self.alignment = parse::check_alignment(alignment.into()).map_err(fail)?;
            // The only type that other readers accept.
            value = Value::from(alignment);
        }
        let mut encoded = Vec::new();
        value.encode(&mut encoded);
        self.put(key, value.value_type(), encoded)
    }

    /// Sets a key to an array of numbers, bools, `&str`, or `&[u8]` for strings that need not be
    /// UTF-8.
    ///
    /// # Errors
    /// [`Problem::NameLength`] for an empty or too long key, [`Problem::WrongType`] for
    /// `general.alignment`.
    pub fn set_array<'a, T: Element<'a>>(
        &mut self,
        key: &str,
        elements: impl IntoIterator<Item = T>,
    ) -> Result<(), GgufError> {
        if key == ALIGNMENT_KEY {
            let problem = Problem::WrongType { expected: "u32".to_owned(), got: "an array".to_owned() };
            return Err(GgufError::new(Item::Key(key.to_owned()), None, problem));
        }
        let mut encoded = T::TYPE.id().to_le_bytes().to_vec();
        let count_at = encoded.len();
        encoded.extend(0u64.to_le_bytes());
        let mut count = 0u64;
        for element in elements {
            element.into().encode(&mut encoded);
            count += 1;
        }
        encoded[count_at..count_at + 8].copy_from_slice(&count.to_le_bytes());
        self.put(key, ValueType::Array, encoded)
    }

    fn put(&mut self, key: &str, value_type: ValueType, encoded: Vec<u8>) -> Result<(), GgufError> {
        check_name(key, MAX_KEY).map_err(|p| GgufError::new(Item::Key(key.to_owned()), None, p))?;
        let entry = Entry { key: key.to_owned(), value_type, encoded };
        match self.entry_of.get(key) {
            Some(&at) => self.entries[at] = entry,
            None => {
                self.entry_of.insert(key.to_owned(), self.entries.len());
                self.entries.push(entry);
            }
        }
        Ok(())
    }

    /// Adds a tensor; data is written in the order of these calls. `shape` is in GGUF order, row
    /// length first.
    ///
    /// # Errors
    /// [`Problem::NameLength`], [`Problem::Declared`], [`Problem::Dims`], [`Problem::Shape`],
    /// [`Problem::Row`], or [`Problem::NotStorable`] for the turbo formats.
    pub fn add_tensor(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<(), GgufError> {
        self.add(name, shape, StoredType::Plain(dtype))
    }

    /// Adds a tensor in a type that loading converts, as [`encode_iq3_s`](crate::encode_iq3_s)
    /// writes one.
    ///
    /// # Errors
    /// [`Problem::Declared`].
    pub fn add_packed(&mut self, name: &str, shape: &[usize], dtype: LoadOnlyType) -> Result<(), GgufError> {
        self.add(name, shape, StoredType::Packed(dtype))
    }

    /// Adds a tensor in the type that the file of `info` has; its data is
    /// [`Gguf::stored_data`](crate::Gguf::stored_data).
    ///
    /// # Errors
    /// [`Problem::Declared`].
    pub fn add_stored(&mut self, info: &TensorInfo) -> Result<(), GgufError> {
        self.add(&info.name, &info.shape, StoredType::of(info))
    }

    fn add(&mut self, name: &str, shape: &[usize], stored: StoredType) -> Result<(), GgufError> {
        let tensor = self
            .checked_tensor(name, shape, stored)
            .map_err(|problem| GgufError::new(Item::Tensor(name.to_owned()), None, problem))?;
        self.tensor_of.insert(name.to_owned(), self.tensors.len());
        self.tensors.push(tensor);
        Ok(())
    }

    fn checked_tensor(&self, name: &str, shape: &[usize], stored: StoredType) -> Result<Tensor, Problem> {
        check_name(name, MAX_TENSOR_NAME)?;
        if let Some(&first) = self.tensor_of.get(name) {
            return Err(Problem::Declared { first });
        }
        if shape.is_empty() || shape.len() > MAX_DIMS {
            return Err(Problem::Dims { got: shape.len() as u64, max: MAX_DIMS });
        }
        let shape: Vec<u64> = shape.iter().map(|d| *d as u64).collect();
        let (_, n_bytes) = parse::checked_shape(&shape, stored)?;
        let type_id = stored.ggml_id().ok_or(Problem::NotStorable { dtype: stored.dtype() })?;
        Ok(Tensor { name: name.to_owned(), shape, type_id, n_bytes: n_bytes as u64 })
    }

    /// Writes the file: `fill` passes the data of every tensor in order.
    ///
    /// # Errors
    /// Those of `fill`, and [`Problem::Io`], [`Problem::Order`], [`Problem::DataSize`].
    pub fn write_to<E: From<GgufError>>(
        &self,
        out: &mut dyn Write,
        fill: impl FnOnce(&mut TensorSink<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.write(out, None, fill)
    }

    fn write<E: From<GgufError>>(
        &self,
        out: &mut dyn Write,
        path: Option<&Path>,
        fill: impl FnOnce(&mut TensorSink<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut head = self.head().map_err(|e| e.in_file(path))?;
        if !self.tensors.is_empty() {
            head.resize(head.len().next_multiple_of(self.alignment as usize), 0);
        }
        out.write_all(&head).map_err(|e| io_error(e, path))?;
        let mut sink = TensorSink { out, path, tensors: &self.tensors, alignment: self.alignment };
        fill(&mut sink)?;
        sink.finish()?;
        Ok(())
    }

    /// Writes the file at `path` atomically: see [`kvant_files::write_atomic`].
    ///
    /// # Errors
    /// As [`GgufWriter::write_to`]; those of this crate name the file.
    pub fn save<E: From<GgufError>>(
        &self,
        path: impl AsRef<Path>,
        fill: impl FnOnce(&mut TensorSink<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = path.as_ref();
        let at_path = |e: io::Error| E::from(GgufError::of_file(path, e));
        kvant_files::write_atomic(path, at_path, |out| self.write(out, Some(path), fill))
    }

    /// Returns everything before the data section, and the length of the whole file.
    pub(crate) fn layout(&self) -> Result<(Vec<u8>, u64), GgufError> {
        let mut head = self.head()?;
        head.resize(head.len().next_multiple_of(self.alignment as usize), 0);
        // Cannot overflow: `head` has added the same numbers with checks.
        let data: u64 = self.tensors.iter().map(|t| t.n_bytes.next_multiple_of(self.alignment)).sum();
        let file_len = data.saturating_add(head.len() as u64);
        Ok((head, file_len))
    }

    /// Returns everything before the padding of the data section.
    fn head(&self) -> Result<Vec<u8>, GgufError> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for entry in &self.entries {
            Value::from(entry.key.as_str()).encode(&mut out);
            out.extend(entry.value_type.id().to_le_bytes());
            out.extend(&entry.encoded);
        }
        let mut offset = 0u64;
        for t in &self.tensors {
            Value::from(t.name.as_str()).encode(&mut out);
            out.extend((t.shape.len() as u32).to_le_bytes());
            t.shape.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.type_id.to_le_bytes());
            out.extend(offset.to_le_bytes());
            let end =
                offset.checked_add(t.n_bytes).and_then(|end| end.checked_next_multiple_of(self.alignment));
            offset = end.ok_or_else(|| {
                GgufError::new(Item::Tensor(t.name.clone()), None, Problem::Shape { shape: t.shape.clone() })
            })?;
        }
        Ok(out)
    }
}

/// Accepts the tensors' data in the order of [`GgufWriter::add_tensor`].
pub struct TensorSink<'a> {
    out: &'a mut dyn Write,
    /// The final path of the file.
    path: Option<&'a Path>,
    /// The tensors still missing.
    tensors: &'a [Tensor],
    alignment: u64,
}

impl TensorSink<'_> {
    /// Writes the next tensor's data from a slice.
    ///
    /// # Errors
    /// [`Problem::Order`] if the next tensor is not `name`, [`Problem::DataSize`], [`Problem::Io`].
    pub fn bytes(&mut self, name: &str, mut bytes: &[u8]) -> Result<(), GgufError> {
        let given = bytes.len() as u64;
        self.next(name, Some(given), &mut bytes)
    }

    /// Writes the next tensor's data in parts, one at a time.
    ///
    /// # Errors
    /// As [`TensorSink::bytes`], and those of the parts.
    pub fn parts<E: From<GgufError>>(
        &mut self,
        name: &str,
        parts: impl IntoIterator<Item = Result<Vec<u8>, E>>,
    ) -> Result<(), E> {
        let want = self.begin(name)?;
        let mut got = 0;
        for part in parts {
            let part = part?;
            got += part.len() as u64;
            if got <= want {
                self.out.write_all(&part).map_err(|e| self.failed(name, Problem::Io(e)))?;
            }
        }
        if got != want {
            return Err(self.failed(name, Problem::DataSize { want, got }).into());
        }
        Ok(self.end(name, want)?)
    }

    /// Writes the next tensor's data from a reader, which is read no further than needed.
    ///
    /// # Errors
    /// As [`TensorSink::bytes`]; [`Problem::DataSize`] if the reader ends early.
    pub fn reader(&mut self, name: &str, reader: &mut dyn Read) -> Result<(), GgufError> {
        self.next(name, None, reader)
    }

    fn next(&mut self, name: &str, given: Option<u64>, reader: &mut dyn Read) -> Result<(), GgufError> {
        let want = self.begin(name)?;
        if let Some(got) = given.filter(|got| *got != want) {
            return Err(self.failed(name, Problem::DataSize { want, got }));
        }
        let got =
            io::copy(&mut reader.take(want), self.out).map_err(|e| self.failed(name, Problem::Io(e)))?;
        if got != want {
            return Err(self.failed(name, Problem::DataSize { want, got }));
        }
        self.end(name, want)
    }

    /// Returns the bytes of the next tensor, which is `name`.
    fn begin(&self, name: &str) -> Result<u64, GgufError> {
        match self.tensors.first() {
            Some(tensor) if tensor.name == name => Ok(tensor.n_bytes),
            _ => Err(self.failed(name, Problem::Order { want: self.expected_next() })),
        }
    }

    /// Pads a tensor of `n_bytes`, which is written.
    fn end(&mut self, name: &str, n_bytes: u64) -> Result<(), GgufError> {
        let padding = n_bytes.next_multiple_of(self.alignment) - n_bytes;
        io::copy(&mut io::repeat(0).take(padding), self.out)
            .map_err(|e| self.failed(name, Problem::Io(e)))?;
        self.tensors = &self.tensors[1..];
        Ok(())
    }

    fn failed(&self, name: &str, problem: Problem) -> GgufError {
        GgufError::new(Item::Tensor(name.to_owned()), None, problem).in_file(self.path)
    }

    /// Names the next tensor, for messages.
    fn expected_next(&self) -> String {
        self.tensors.first().map_or("the end".to_owned(), |t| format!("{:?}", t.name))
    }

    fn finish(self) -> Result<(), GgufError> {
        match self.tensors.first() {
            Some(t) => {
                let problem = Problem::DataSize { want: t.n_bytes, got: 0 };
                Err(GgufError::new(Item::Tensor(t.name.clone()), None, problem).in_file(self.path))
            }
            None => self.out.flush().map_err(|e| io_error(e, self.path)),
        }
    }
}

fn io_error(error: io::Error, path: Option<&Path>) -> GgufError {
    GgufError::from(Problem::Io(error)).in_file(path)
}

fn check_name(name: &str, max: u64) -> Result<(), Problem> {
    let got = name.len() as u64;
    if (1..=max).contains(&got) { Ok(()) } else { Err(Problem::NameLength { got, max }) }
}
