//! Integer codes with scales and zeros, as blocks of a kernel type.

use half::f16;
use kvant_codec::DType;
use kvant_codec::block32::{LEN as BLOCK, Q4_0_ZERO, Q5_0_ZERO, Q8_0_ZERO, ScaledBlock};
use kvant_codec::grouped::{self, GroupBlock};

use super::{floats, order};
use crate::safetensors::{ElementKind, Shards, Stored};

/// A matrix of integer codes: `value = (code - zero) · scale`, with a zero and a scale for each
/// group of inputs of an output.
#[derive(Debug, Clone)]
pub(crate) struct Integers {
    pub n_out: usize,
    pub n_in: usize,
    pub groups: usize,
    pub codes: Stored,
    pub packing: Packing,
    pub scales: Stored,
    /// Whether scales and zeros are `[groups, out]`, not `[out, groups]`.
    pub groups_first: bool,
    pub zeros: Zeros,
    /// The group of each input; `None` if they are in order and of one size.
    pub group_of: Option<Vec<u32>>,
    /// The type of [`Integers::rows`].
    pub dtype: DType,
}

/// Where codes are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Packing {
    /// `[in / n, out]`: n inputs share a word.
    Inputs { bits: usize },
    /// `[in, out / n]`: n outputs share a word, in this order.
    Outputs { bits: usize, order: &'static [usize; 8] },
    /// `[out, in / n]`: n inputs share a word.
    Rows { bits: usize },
    /// `[out, in]` signed bytes.
    Bytes,
}

/// The codes of zero.
#[derive(Debug, Clone)]
pub(crate) enum Zeros {
    /// One for all groups.
    All(u8),
    /// Packed; `offset` is added. Groups are the inputs of [`Packing::Outputs`], and the outputs of
    /// [`Packing::Inputs`].
    Words { stored: Stored, packing: Packing, offset: u8 },
}

impl Packing {
    fn bits(self) -> usize {
        match self {
            Self::Inputs { bits } | Self::Outputs { bits, .. } | Self::Rows { bits } => bits,
            Self::Bytes => 8,
        }
    }

    /// Unpacks codes to `[rows, columns]`, of which words hold one after the other.
    fn unpack(self, bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
        let mut out = vec![0; rows * columns];
        let n = 32 / self.bits();
        match self {
            Self::Bytes => out.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte ^ 128),
            Self::Rows { bits } => {
                let words: Vec<u32> = order::words(bytes).collect();
                let rows = out.chunks_exact_mut(columns).zip(words.chunks_exact(columns.div_ceil(n)));
                for (row, words) in rows {
                    row.iter_mut()
                        .enumerate()
                        .for_each(|(i, code)| *code = order::value(words[i / n], i % n, bits));
                }
            }
            Self::Inputs { bits } => {
                // A word is a column of n inputs of one output.
                for (at, word) in order::words(bytes).enumerate() {
                    let (first, row) = (at / rows * n, at % rows);
                    let left = columns.saturating_sub(first).min(n);
                    let codes = &mut out[row * columns + first..][..left];
                    codes.iter_mut().enumerate().for_each(|(i, code)| *code = order::value(word, i, bits));
                }
            }
            Self::Outputs { bits, order } => {
                let per_row = rows.div_ceil(n);
                for (at, word) in order::words(bytes).enumerate() {
                    let (column, first) = (at / per_row, at % per_row * n);
                    for (i, position) in order[..n].iter().enumerate() {
                        if let Some(code) = out.get_mut((first + position) * columns + column) {
                            *code = order::value(word, i, bits);
                        }
                    }
                }
            }
        }
        out
    }
}

/// Largest magnitude of values that devices multiply in f16.
const LARGEST: f32 = kvant_codec::finite::F16_MAX;

impl Integers {
    /// Returns a matrix whose tensors are still to be set.
    pub fn new(n_out: usize, n_in: usize, groups: usize) -> Self {
        let none = Stored::empty();
        Self {
            n_out,
            n_in,
            groups,
            codes: none.clone(),
            packing: Packing::Bytes,
            scales: none,
            groups_first: false,
            zeros: Zeros::All(0),
            group_of: None,
            dtype: DType::F32,
        }
    }

    /// Chooses the smallest kernel type that holds the same numbers.
    ///
    /// | codes | groups of | type | bits per value |
    /// |---|---|---|---|
    /// | 4 bits | multiples of 128 inputs | q4_g128 | 4.25 |
    /// | 4 bits, zero 8 | multiples of 32 | q4_0 | 4.5 |
    /// | 4 bits | multiples of 32 | q5_0 | 5.5 |
    /// | 8 bits, zero 128 | multiples of 32 | q8_0 | 8.5 |
    /// | others, and scales that are no f16 | | that of the scales | 16 or 32 |
    ///
    /// Groups out of order (GPTQ by activation order without static groups) are of the last kind:
    /// the values are rounded to the type of the scales, as the libraries do.
    pub fn with_dtype(mut self, shards: &Shards) -> Self {
        self.dtype = self.block_dtype(shards).unwrap_or(self.dense_dtype());
        self
    }

    /// Returns the matrix in values instead of blocks.
    pub fn dense(mut self) -> Self {
        self.dtype = self.dense_dtype();
        self
    }

    /// Returns the type of [`Integers::dense`].
    pub fn dense_dtype(&self) -> DType {
        match self.scales.holds {
            ElementKind::Values(dtype) => dtype,
            other => unreachable!("scales in {other} are refused"),
        }
    }

    fn block_dtype(&self, shards: &Shards) -> Option<DType> {
        let group = self.group_len()?;
        let largest = if self.packing.bits() == 4 { 16.0 } else { 128.0 };
        let is_exact =
            |scale: f32| f16::from_f32(scale).to_f32() == scale && scale.abs() * largest <= LARGEST;
        if !self.scales(shards).into_iter().all(is_exact) {
            return None;
        }
        // Unpacked only where the type depends on them.
        let all_are = |middle: u8| self.zeros(shards).into_iter().all(|zero| zero == middle);
        match self.packing.bits() {
            4 if group.is_multiple_of(grouped::LEN) => Some(DType::Q4G128),
            4 if group.is_multiple_of(BLOCK) && all_are(Q4_0_ZERO) => Some(DType::Q4_0),
            4 if group.is_multiple_of(BLOCK) => Some(DType::Q5_0),
            8 if group.is_multiple_of(BLOCK) && all_are(Q8_0_ZERO) => Some(DType::Q8_0),
            _ => None,
        }
    }

    /// Returns the inputs of each group if groups are in order and whole.
    fn group_len(&self) -> Option<usize> {
        let len = self.n_in / self.groups;
        let is_ordered = |of: &Vec<u32>| of.iter().enumerate().all(|(i, group)| i / len == *group as usize);
        (len * self.groups == self.n_in && self.group_of.as_ref().is_none_or(is_ordered)).then_some(len)
    }

    /// Returns the scales `[out, groups]`.
    fn scales(&self, shards: &Shards) -> Vec<f32> {
        let values = floats::scales(&self.scales, shards);
        if self.groups_first { transposed(&values, self.groups) } else { values }
    }

    /// Returns the zeros `[out, groups]`.
    fn zeros(&self, shards: &Shards) -> Vec<u8> {
        let (stored, packing, offset) = match &self.zeros {
            Zeros::All(zero) => return vec![*zero; self.n_out * self.groups],
            Zeros::Words { stored, packing, offset } => (stored, packing, offset),
        };
        let bytes = shards.data(stored);
        let mut zeros = match packing {
            Packing::Inputs { .. } => {
                transposed(&packing.unpack(&bytes, self.groups, self.n_out), self.groups)
            }
            _ => packing.unpack(&bytes, self.n_out, self.groups),
        };
        // A zero of 255 stays: no library writes it before its offset.
        zeros.iter_mut().for_each(|zero| *zero = zero.saturating_add(*offset));
        zeros
    }

    /// Returns the rows, in blocks or values of the chosen type.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        let codes = self.packing.unpack(&shards.data(&self.codes), self.n_out, self.n_in);
        let (scales, zeros) = (self.scales(shards), self.zeros(shards));
        let row_bytes = self.dtype.row_bytes(self.n_in).expect("rows of whole blocks");
        let mut out = vec![0; self.n_out * row_bytes];
        let rows = codes.chunks_exact(self.n_in).zip(out.chunks_exact_mut(row_bytes));
        let groups = scales.chunks_exact(self.groups).zip(zeros.chunks_exact(self.groups));
        for ((codes, out), (scales, zeros)) in rows.zip(groups) {
            self.put_row(codes, scales, zeros, out);
        }
        out
    }

    fn put_row(&self, codes: &[u8], scales: &[f32], zeros: &[u8], out: &mut [u8]) {
        let (len, bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        let group_len = self.n_in / self.groups;
        if len == 1 {
            let group_of = |i: usize| match &self.group_of {
                Some(of) => of[i] as usize,
                None => i / group_len,
            };
            for (i, (code, out)) in codes.iter().zip(out.chunks_exact_mut(bytes)).enumerate() {
                let group = group_of(i);
                let value = (f32::from(*code) - f32::from(zeros[group])) * scales[group];
                floats::put(self.dtype, value, out);
            }
            return;
        }
        for (b, (codes, out)) in codes.chunks_exact(len).zip(out.chunks_exact_mut(bytes)).enumerate() {
            let group = b * len / group_len;
            put_block(self.dtype, codes, f16::from_f32(scales[group]), zeros[group], out);
        }
    }
}

/// Writes a block of `dtype`, whose values are `(code - zero) · scale`.
fn put_block(dtype: DType, codes: &[u8], scale: f16, zero: u8, out: &mut [u8]) {
    if dtype == DType::Q4G128 {
        let codes = codes.try_into().expect("a group");
        out.copy_from_slice(&GroupBlock { scale, zero, codes }.to_bytes());
        return;
    }
    let middle = match dtype {
        DType::Q5_0 => Q5_0_ZERO,
        DType::Q4_0 => Q4_0_ZERO,
        _ => Q8_0_ZERO,
    };
    let codes = std::array::from_fn(|i| codes[i].wrapping_add(middle).wrapping_sub(zero));
    ScaledBlock { scale, codes }.write(dtype, out);
}

fn transposed<T: Copy>(values: &[T], rows: usize) -> Vec<T> {
    let columns = values.len() / rows;
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}
