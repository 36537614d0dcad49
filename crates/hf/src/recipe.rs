//! Recipes: how GGUF tensors are converted from folder tensors on access.

use std::borrow::Cow;
use std::collections::HashMap;

use kvant_codec::DType;
use kvant_gguf::{GgufError, GgufWriter, LoadOnlyType, TensorSource};

use crate::ngrams;
use crate::safetensors::{ElementKind, Shards, Stored};
use crate::tensor_transform::View;

/// Source of a GGUF tensor.
pub(crate) enum Recipe {
    /// Tensors of the folder.
    Stored(ConvertedTensor),
    /// A computed constant.
    Constant {
        /// In GGUF order.
        shape: Vec<usize>,
        /// In f32.
        bytes: Vec<u8>,
    },
}

/// A tensor converted from the folder.
pub(crate) struct ConvertedTensor {
    /// Source tensors: one, one per expert, or parts of a table; at least one, all of one type, and
    /// those of experts of one shape.
    pub parts: Vec<Stored>,
    /// Views of each part, in its blocks; empty keeps the original order.
    pub views: Vec<View>,
    /// The scales of 4-bit blocks, whose codes are the part, and their views.
    pub scales: Option<(Stored, Vec<View>)>,
    /// In GGUF order: the row length first.
    pub shape: Vec<usize>,
    /// The resulting type: that of the parts, or f32.
    pub dtype: DType,
    /// Elementwise conversion; only for f32 results.
    pub values: Values,
}

/// Elementwise conversion of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Values {
    /// Unchanged.
    Kept,
    /// Adds 1: restores the weight of a norm.
    BeyondOne,
    /// Multiplied: includes the factor that follows a norm.
    Times(f32),
    /// The negated exponential: the decay of a state, from its stored logarithm.
    Decay,
    /// The exponential of a logarithm.
    Exponential,
    /// The product of two parts.
    Product,
    /// 32-bit integers, beyond whose range the nearest is taken.
    Integers,
}

impl Recipe {
    pub fn constant(values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::Constant { shape: vec![values.len()], bytes }
    }

    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Stored(made) => &made.shape,
            Self::Constant { shape, .. } => shape,
        }
    }

    pub fn dtype(&self) -> DType {
        match self {
            Self::Stored(made) => made.dtype,
            Self::Constant { .. } => DType::F32,
        }
    }

    /// Declares the tensor.
    pub fn declare(&self, name: &str, writer: &mut GgufWriter) -> Result<(), GgufError> {
        match self {
            Self::Stored(made) if made.values == Values::Integers => {
                writer.add_packed(name, &made.shape, LoadOnlyType::I32)
            }
            _ => writer.add_tensor(name, self.shape(), self.dtype()),
        }
    }
}

impl ConvertedTensor {
    /// Returns the tensor's bytes; borrows those of the file if unchanged.
    fn data<'a>(&self, shards: &'a Shards) -> Cow<'a, [u8]> {
        match &self.parts[..] {
            [one] => self.part(shards, one),
            [first, second] if self.values == Values::Product => {
                let [first, second] = [first, second].map(|part| self.part(shards, part));
                Cow::Owned(products(&first, &second))
            }
            parts => {
                let all: Vec<_> = parts.iter().map(|part| self.part(shards, part)).collect();
                Cow::Owned(all.concat())
            }
        }
    }

    /// Returns the bytes of a part; borrows those of the file if unchanged.
    fn part<'a>(&self, shards: &'a Shards, part: &Stored) -> Cow<'a, [u8]> {
        let stored = viewed_bytes(shards, part, &self.views);
        let from = match (&self.scales, self.parts[0].holds) {
            (Some((scales, views)), _) => {
                return Cow::Owned(blocks(&stored, &viewed_bytes(shards, scales, views)));
            }
            (None, ElementKind::Values(from)) => from,
            (None, ElementKind::I32) => return stored,
            (None, ElementKind::I64) => return Cow::Owned(narrowed(&stored)),
            (None, other) => unreachable!("{other} without scales is refused"),
        };
        match from == self.dtype && self.values == Values::Kept {
            true => stored,
            false => Cow::Owned(numbers(from, &stored, self.values)),
        }
    }
}

/// Multiplies f32 values.
fn products(first: &[u8], second: &[u8]) -> Vec<u8> {
    let [first, second] =
        [first, second].map(|bytes| bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes));
    first.zip(second).flat_map(|(a, b)| (a * b).to_le_bytes()).collect()
}

/// Converts 64-bit integers to 32-bit ones.
fn narrowed(bytes: &[u8]) -> Vec<u8> {
    let narrow = |number: i64| number.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    bytes.as_chunks().0.iter().flat_map(|bytes| narrow(i64::from_le_bytes(*bytes)).to_le_bytes()).collect()
}

/// Returns the viewed values, or blocks, of a tensor.
fn viewed_bytes<'a>(shards: &'a Shards, part: &Stored, views: &[View]) -> Cow<'a, [u8]> {
    let bytes = shards.data(part);
    if views.is_empty() {
        return bytes;
    }
    let mut out = Vec::new();
    views.iter().for_each(|view| view.copy(&bytes, part.holds.size(), &mut out));
    Cow::Owned(out)
}

/// Converts MXFP4 blocks of 32 4-bit codes, in 16 bytes with adjacent codes in each, and their
/// scales. GGUF puts the scale first and packs codes that are 16 apart into a byte.
pub(crate) fn blocks(codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(codes.len() + scales.len());
    for (codes, scale) in codes.chunks_exact(16).zip(scales) {
        let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
        out.push(*scale);
        out.extend((0..16).map(|i| code(i) | code(i + 16) << 4));
    }
    out
}

/// Converts values to f32 and applies `made`.
fn numbers(from: DType, bytes: &[u8], made: Values) -> Vec<u8> {
    let mut values = vec![0.0; bytes.len() / from.block_bytes() * from.block_len()];
    kvant_codec::decode(from, bytes, &mut values).expect("tensors have whole blocks");
    let make = |value: &f32| match made {
        Values::Kept | Values::Product | Values::Integers => *value,
        Values::BeyondOne => value + 1.0,
        Values::Times(by) => value * by,
        Values::Decay => -value.exp(),
        Values::Exponential => value.exp(),
    };
    values.iter().flat_map(|value| make(value).to_le_bytes()).collect()
}

/// The weights of a folder, under their GGUF names.
pub(crate) struct Weights {
    all: HashMap<String, Recipe>,
    shards: Shards,
}

impl Weights {
    pub fn new(all: impl Iterator<Item = (String, Recipe)>, shards: Shards) -> Self {
        Self { all: all.collect(), shards }
    }
}

impl TensorSource for Weights {
    fn data(&self, name: &str) -> Cow<'_, [u8]> {
        match &self.all[name] {
            Recipe::Stored(made) => made.data(&self.shards),
            Recipe::Constant { bytes, .. } => Cow::Borrowed(bytes),
        }
    }

    /// Tables are larger than other tensors.
    fn n_parts(&self, name: &str) -> usize {
        match &self.all[name] {
            Recipe::Stored(made) if name == ngrams::TABLE => made.parts.len(),
            _ => 1,
        }
    }

    fn part(&self, name: &str, index: usize) -> Cow<'_, [u8]> {
        match &self.all[name] {
            Recipe::Stored(made) => made.part(&self.shards, &made.parts[index]),
            Recipe::Constant { bytes, .. } => Cow::Borrowed(bytes),
        }
    }

    fn release(&self) {
        self.shards.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_weights_beyond_one_are_restored_in_f32() {
        // -0.5, 0.25 and 3 in bf16.
        let bytes = [0x00, 0xbf, 0x80, 0x3e, 0x40, 0x40];
        let whole: Vec<u8> = [0.5_f32, 1.25, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(numbers(DType::BF16, &bytes, Values::BeyondOne), whole);
    }

    #[test]
    fn a_decay_is_computed_from_its_logarithm() {
        let decay = |log: f32| numbers(DType::F32, &log.to_le_bytes(), Values::Decay);
        assert_eq!(decay(0.0), (-1.0_f32).to_le_bytes());
        assert_eq!(decay(f32::NEG_INFINITY), (-0.0_f32).to_le_bytes());
    }

    #[test]
    fn wide_integers_become_the_nearest_narrow_ones() {
        let wide: Vec<u8> =
            [7, -1, i64::from(i32::MAX) + 1, i64::MIN].into_iter().flat_map(i64::to_le_bytes).collect();
        assert_eq!(narrowed(&wide), [7, -1, i32::MAX, i32::MIN].map(i32::to_le_bytes).concat());
    }

    #[test]
    fn mxfp4_blocks_decode_to_their_codes_and_scales() {
        // Codes 0 to 15 twice, each 16 in order, two to a byte from the low bits on.
        let codes: Vec<u8> = (0..16).map(|byte| (2 * byte % 16) | (((2 * byte + 1) % 16) << 4)).collect();
        let blocks = blocks(&[&codes[..], &codes].concat(), &[127, 129]);
        let mut values = vec![0.0; 64];
        kvant_codec::decode(DType::MXFP4, &blocks, &mut values).unwrap();
        let known = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (i, value) in values.iter().enumerate() {
            let sign = if i % 16 < 8 { 1.0 } else { -1.0 };
            let scale = if i < 32 { 1.0 } else { 4.0 };
            assert_eq!(*value, sign * scale * known[i % 8], "value {i}");
        }
    }
}
