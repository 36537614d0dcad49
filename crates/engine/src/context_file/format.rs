//! Byte format of a context file: prelude, header, section table, sections.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kvant_backend::limits;
use xxhash_rust::xxh3::xxh3_64;

use super::ContextFileError;

const MAGIC: &[u8; 8] = b"KVANTCTX";
pub(super) const VERSION: u32 = 3;
/// Alignment of sections, in bytes.
const ALIGN: u64 = 64;
const PRELUDE: u64 = 64;
/// Bytes of one table entry.
const ENTRY: u64 = 32;
/// Maximum bytes of header and table: enough for more tokens than any machine has memory for. A
/// sparse file may be as long as it declares, so the length alone bounds nothing.
const MAX_FRONT_BYTES: u64 = 1 << 28;

/// Position and checksum of a section.
#[derive(Debug, Clone, Copy)]
struct Section {
    offset: u64,
    len: u64,
    checksum: u64,
}

impl Section {
    fn to_bytes(self) -> [u8; ENTRY as usize] {
        let mut bytes = [0; ENTRY as usize];
        let words = [self.offset, self.len, self.checksum];
        for (field, word) in bytes.chunks_exact_mut(8).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let word = |i: usize| u64_at(bytes, 8 * i);
        Self { offset: word(0), len: word(1), checksum: word(2) }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Returns the bytes of a file with this header and sections of these sizes.
pub(super) fn n_bytes(json: &str, sections: &[usize]) -> u64 {
    let room = PRELUDE + (json.len() as u64).next_multiple_of(ALIGN) + sections.len() as u64 * ENTRY;
    sections.iter().fold(room, |at, &section| at.next_multiple_of(ALIGN) + section as u64)
}

/// Writes sections in order; prelude and table last, into the space reserved for them.
pub(super) struct Writer<W> {
    out: W,
    header: Vec<u8>,
    n_sections: usize,
    table: Vec<u8>,
    at: u64,
}

impl<W: Write + Seek> Writer<W> {
    /// Reserves space for the header and a table of `n_sections`.
    pub(super) fn new(out: W, json: &str, n_sections: usize) -> io::Result<Self> {
        let mut header = json.as_bytes().to_vec();
        header.resize(header.len().next_multiple_of(ALIGN as usize), b' ');
        let room = PRELUDE + header.len() as u64 + n_sections as u64 * ENTRY;
        let mut writer = Self { out, header, n_sections, table: Vec::new(), at: 0 };
        writer.zeros(room)?;
        Ok(writer)
    }

    pub(super) fn section(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.zeros(self.at.next_multiple_of(ALIGN) - self.at)?;
        let section = Section { offset: self.at, len: bytes.len() as u64, checksum: xxh3_64(bytes) };
        self.table.extend_from_slice(&section.to_bytes());
        self.out.write_all(bytes)?;
        self.at += section.len;
        Ok(())
    }

    /// Writes the front and returns the length of the file.
    ///
    /// # Panics
    /// Unless as many sections were written as announced.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        assert_eq!(self.table.len(), self.n_sections * ENTRY as usize, "sections written and announced");
        let mut front = vec![0; PRELUDE as usize];
        front[..8].copy_from_slice(MAGIC);
        front[8..12].copy_from_slice(&VERSION.to_le_bytes());
        front[12..16].copy_from_slice(&(self.header.len() as u32).to_le_bytes());
        front[16..20].copy_from_slice(&(self.n_sections as u32).to_le_bytes());
        front[24..32].copy_from_slice(&self.at.to_le_bytes());
        front.extend_from_slice(&self.header);
        front.extend_from_slice(&self.table);
        let checksum = xxh3_64(&front[PRELUDE as usize..]);
        front[32..40].copy_from_slice(&checksum.to_le_bytes());
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&front)?;
        Ok(self.at)
    }

    fn zeros(&mut self, n: u64) -> io::Result<()> {
        self.at += n;
        io::copy(&mut io::repeat(0).take(n), &mut self.out).map(drop)
    }
}

/// A file or byte buffer with a valid prelude, header and table. Sections are checked when read.
pub(super) struct Reader<R> {
    source: R,
    path: PathBuf,
    header: Vec<u8>,
    sections: Vec<Section>,
}

impl Reader<File> {
    pub(super) fn open(path: &Path) -> Result<Self, ContextFileError> {
        let io = |source| ContextFileError::Io { path: path.to_owned(), source };
        Self::new(kvant_files::open(path).map_err(io)?, path)
    }
}

impl<R: Read + Seek> Reader<R> {
    /// Checks the front of `source`, which errors name `path`.
    pub(super) fn new(mut source: R, path: &Path) -> Result<Self, ContextFileError> {
        let io = |source| ContextFileError::Io { path: path.to_owned(), source };
        let corrupt = |what: String| ContextFileError::Corrupt { path: path.to_owned(), what };
        let file_len = source.seek(SeekFrom::End(0)).map_err(io)?;
        source.rewind().map_err(io)?;
        let mut prelude = [0; PRELUDE as usize];
        let n = read_up_to(&mut source, &mut prelude).map_err(io)?;
        if n < 12 || prelude[..8] != *MAGIC {
            return Err(ContextFileError::NotOurs { path: path.to_owned() });
        }
        let got = u32_at(&prelude, 8);
        if got != VERSION {
            return Err(ContextFileError::Version { path: path.to_owned(), expected: VERSION, got });
        }
        let expected = u64_at(&prelude, 24);
        if n < prelude.len() || expected != file_len {
            return Err(corrupt(format!("expected {expected} bytes, got {file_len}")));
        }
        let header_len = u64::from(u32_at(&prelude, 12));
        let n_sections = u64::from(u32_at(&prelude, 16));
        let data_start = PRELUDE + header_len + n_sections * ENTRY;
        if data_start > file_len || data_start > MAX_FRONT_BYTES || n_sections == 0 {
            return Err(corrupt(format!("a header of {header_len} bytes, {n_sections} sections")));
        }
        let mut header = vec![0; (data_start - PRELUDE) as usize];
        source.read_exact(&mut header).map_err(io)?;
        if xxh3_64(&header) != u64_at(&prelude, 32) {
            return Err(corrupt("the checksum of the header".to_owned()));
        }
        let table = header.split_off(header_len as usize);
        let sections: Vec<Section> = table.chunks_exact(ENTRY as usize).map(Section::from_bytes).collect();
        for (index, section) in sections.iter().enumerate() {
            let end = section.offset.checked_add(section.len);
            let sound = section.offset >= data_start && end.is_some_and(|end| end <= file_len);
            if !sound || !section.offset.is_multiple_of(ALIGN) {
                return Err(corrupt(format!("section {index} lies outside the file")));
            }
        }
        Ok(Self { source, path: path.to_owned(), header, sections })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn header(&self) -> &[u8] {
        &self.header
    }

    pub(super) fn corrupt(&self, what: String) -> ContextFileError {
        ContextFileError::Corrupt { path: self.path.clone(), what }
    }

    /// Returns the tokens, which must be as many as the header announces.
    pub(super) fn tokens(&mut self, announced: usize) -> Result<Vec<u32>, ContextFileError> {
        let bytes = self.section(0)?;
        if Some(bytes.len()) != announced.checked_mul(4) {
            return Err(self.corrupt(format!("expected {announced} tokens, got {} bytes", bytes.len())));
        }
        Ok(bytes.chunks_exact(4).map(|token| u32_at(token, 0)).collect())
    }

    /// Returns the number of sections.
    pub(super) fn n_sections(&self) -> usize {
        self.sections.len()
    }

    /// Returns the bytes of a section, after checking its checksum.
    pub(super) fn section(&mut self, index: usize) -> Result<Vec<u8>, ContextFileError> {
        let n = self.sections.len();
        let section = *self
            .sections
            .get(index)
            .ok_or_else(|| self.corrupt(format!("section {index} is missing, there are {n}")))?;
        let read = allocate(section.len).and_then(|mut bytes| {
            self.source.seek(SeekFrom::Start(section.offset))?;
            self.source.read_exact(&mut bytes)?;
            Ok(bytes)
        });
        let bytes = read.map_err(|source| ContextFileError::Io { path: self.path.clone(), source })?;
        if xxh3_64(&bytes) != section.checksum {
            return Err(self.corrupt(format!("the checksum of section {index} of {n}")));
        }
        Ok(bytes)
    }
}

/// Allocates a buffer of `n` bytes, if the machine has that much memory.
fn allocate(n: u64) -> io::Result<Vec<u8>> {
    let n = usize::try_from(n).unwrap_or(usize::MAX);
    if limits::machine_bytes().is_some_and(|available| n > available) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(n)?;
    bytes.resize(n, 0);
    Ok(bytes)
}

fn read_up_to(source: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    while n < buffer.len() {
        match source.read(&mut buffer[n..])? {
            0 => break,
            got => n += got,
        }
    }
    Ok(n)
}
