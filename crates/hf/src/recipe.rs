//! How tensors of GGUF are made of those of a folder, when they are asked for.

use std::borrow::Cow;
use std::collections::HashMap;

use kvant_codec::DType;
use kvant_gguf::TensorSource;

use crate::safetensors::{Shards, Stored};

/// How a tensor is made.
pub(crate) enum Recipe {
    /// Of tensors in the folder.
    Stored(Made),
    /// Of nothing.
    Constant {
        /// In GGUF order.
        shape: Vec<usize>,
        /// In f32.
        bytes: Vec<u8>,
    },
}

/// A tensor that is in the folder.
pub(crate) struct Made {
    /// One, or one for each expert; at least one, all of one type and shape.
    pub parts: Vec<Stored>,
    /// In GGUF order: the row length first.
    pub shape: Vec<usize>,
    /// What it becomes: the type of its parts, or f32.
    pub dtype: DType,
    /// Heads whose rows change places; as many rows as theirs.
    pub reordered_heads: Option<usize>,
    /// What is added to each value; for those in f32.
    pub added: f32,
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
}

impl Made {
    /// Its bytes: those in the file where they are the same.
    fn data<'a>(&self, shards: &'a Shards) -> Cow<'a, [u8]> {
        let stored = match &self.parts[..] {
            [one] => Cow::Borrowed(shards.data(one)),
            parts => Cow::Owned(parts.iter().map(|part| shards.data(part)).collect::<Vec<_>>().concat()),
        };
        let stored = match self.reordered_heads {
            Some(heads) => {
                let rows = self.parts[0].shape[0];
                Cow::Owned(neighbours(&stored, heads, stored.len() / rows))
            }
            None => stored,
        };
        match self.parts[0].dtype {
            from if from == self.dtype && self.added == 0.0 => stored,
            from => Cow::Owned(numbers(from, &stored, self.added)),
        }
    }
}

/// Rows of `heads`, reordered so that values lie side by side that were half a head apart.
fn neighbours(bytes: &[u8], heads: usize, row_bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for head in bytes.chunks_exact(bytes.len() / heads) {
        let (first, second) = head.split_at(head.len() / 2);
        for (a, b) in first.chunks_exact(row_bytes).zip(second.chunks_exact(row_bytes)) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    out
}

/// Values in f32, with something added to each.
fn numbers(from: DType, bytes: &[u8], added: f32) -> Vec<u8> {
    let mut values = vec![0.0; bytes.len() / from.block_bytes()];
    kvant_codec::decode(from, bytes, &mut values).expect("types of single values have whole blocks");
    // Nothing is added to -0, which would be another number then.
    let sum = |value: &f32| if added == 0.0 { *value } else { value + added };
    values.iter().flat_map(|value| sum(value).to_le_bytes()).collect()
}

/// The weights of a folder, under their names in GGUF.
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

    fn release(&self) {
        self.shards.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_each_head_become_neighbours() {
        // Two heads of four rows of two bytes.
        let rows: Vec<u8> = (0..8).flat_map(|row| [row, 100 + row]).collect();
        let order: Vec<u8> = neighbours(&rows, 2, 2).chunks(2).map(|row| row[0]).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert!(neighbours(&rows, 2, 2).chunks(2).all(|row| row[1] == 100 + row[0]));
    }

    #[test]
    fn a_norm_beyond_one_is_made_whole_in_f32() {
        // -0.5, 0.25 and 3 in bf16.
        let bytes = [0x00, 0xbf, 0x80, 0x3e, 0x40, 0x40];
        let whole: Vec<u8> = [0.5_f32, 1.25, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(numbers(DType::BF16, &bytes, 1.0), whole);
    }
}
