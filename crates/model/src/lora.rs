//! Low-rank adapters (LoRA, arXiv 2106.09685): the changes of a fine-tuned model to matrices of its
//! base model.
//!
//! ```text
//! W' = W + scale (alpha / rank) B A,  A [rank, n_in], B [n_out, rank]
//! ```
//!
//! A file of `convert_lora_to_gguf.py` stores `A` and `B` under the tensor's name with `.lora_a`
//! and `.lora_b` appended.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kvant_codec::DType;
use kvant_codec::finite::F16_MAX;
use kvant_gguf::{Gguf, TensorInfo};

use crate::weights::decode_values;
use crate::{ModelError, check_finite};

const ARCHITECTURE: &str = "general.architecture";
const ALPHA: &str = "adapter.lora.alpha";
const SUFFIXES: [&str; 2] = [".lora_a", ".lora_b"];

/// An adapter that fits a model.
#[derive(Clone)]
pub struct Lora {
    gguf: Arc<Gguf>,
    /// Rank per tensor, by its name.
    ranks: BTreeMap<String, usize>,
    alpha: f32,
    strength: f32,
}

/// The change of a matrix: `b a`.
pub(crate) struct Pair {
    /// `[rank, n_in]`
    pub(crate) a: Vec<f32>,
    /// `[n_out, rank]`, scaled by the adapter's load-time scale; see [`Lora::factor`].
    pub(crate) b: Vec<f32>,
}

impl Lora {
    /// Opens the adapter in a file, for the model in `base`, with a LoRA scale of `strength`: 1 is
    /// full strength.
    ///
    /// # Errors
    ///
    /// A file that is not an adapter, or one for another architecture or for other tensors.
    pub fn new(gguf: impl Into<Arc<Gguf>>, strength: f32, base: &Gguf) -> Result<Self, ModelError> {
        let gguf = gguf.into();
        let architecture: &str = base.meta().get(ARCHITECTURE)?;
        for (key, expected) in
            [("general.type", "adapter"), ("adapter.type", "lora"), (ARCHITECTURE, architecture)]
        {
            let got = gguf.meta().find::<&str>(key)?.unwrap_or("nothing");
            if got != expected {
                return Err(value(key, expected, got));
            }
        }
        if gguf.meta().value("adapter.alora.invocation_tokens").is_some() {
            let what = "adapters with invocation tokens (adapter.alora.invocation_tokens)".to_owned();
            return Err(ModelError::Unsupported { what });
        }
        let alpha: f32 = gguf.meta().get(ALPHA)?;
        for (key, got) in [(ALPHA, alpha), ("strength", strength)] {
            if !got.is_finite() {
                return Err(value(key, "a number", &got.to_string()));
            }
        }
        let ranks = ranks(&gguf, base)?;
        Ok(Self { gguf, ranks, alpha, strength })
    }

    /// Returns the names of the tensors that the adapter changes.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &str> {
        self.ranks.keys().map(String::as_str)
    }

    /// Returns the scale folded into `B`: the load-time scale, so that the usual factor is 1.
    fn unit(&self) -> f32 {
        if self.strength == 0.0 { 1.0 } else { self.strength }
    }

    /// Returns the LoRA scale; 1 is full strength.
    pub(crate) fn scale(&self) -> f32 {
        self.strength
    }

    /// Returns the factor on its [pairs](Self::pair) for another scale.
    pub(crate) fn factor(&self, strength: f32) -> f32 {
        strength / self.unit()
    }

    /// Returns the bytes of `A` and `B` of a tensor, in f16.
    pub(crate) fn n_bytes(&self, tensor: &str) -> usize {
        let parts = SUFFIXES.iter().filter_map(|suffix| self.gguf.find_info(&format!("{tensor}{suffix}")));
        parts.map(|info| info.elements() * DType::F16.block_bytes()).sum()
    }

    /// Returns the change of a tensor, and its rank; `None` if the tensor is unchanged.
    pub(crate) fn pair(&self, tensor: &str) -> Result<Option<(usize, Pair)>, ModelError> {
        let Some(&rank) = self.ranks.get(tensor) else { return Ok(None) };
        let [a, b] = SUFFIXES.map(|suffix| self.values(&format!("{tensor}{suffix}")));
        let (mut a, mut b) = (a?, b?);
        // As llama.cpp does for files without alpha.
        let scale = if self.alpha == 0.0 { 1.0 } else { self.alpha / rank as f32 };
        b.iter_mut().for_each(|x| *x *= scale * self.unit());
        let [of_a, of_b] = [&a, &b].map(|values| values.iter().fold(0.0f32, |max, x| max.max(x.abs())));
        if of_a > 0.0 && of_b > 0.0 {
            // Balances A and B, since small numbers lose precision in f16. Powers of two are exact.
            let power = ((of_b.log2() - of_a.log2()) / 2.0).round().exp2();
            a.iter_mut().for_each(|x| *x *= power);
            b.iter_mut().for_each(|x| *x /= power);
        }
        match a.iter().chain(&b).find(|x| x.is_nan() || x.abs() > F16_MAX) {
            Some(x) => Err(value(tensor, "an adapter with numbers in the range of f16", &x.to_string())),
            None => Ok(Some((rank, Pair { a, b }))),
        }
    }

    fn values(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.tensor(name)?;
        check_finite(tensor.info, &tensor.bytes)?;
        decode_values(&tensor, &tensor.info.shape)
    }
}

impl fmt::Debug for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, alpha, strength, .. } = self;
        write!(f, "Lora {{ ranks: {ranks:?}, alpha: {alpha}, strength: {strength} }}")
    }
}

/// Returns the rank of the change of each tensor of `base`.
fn ranks(gguf: &Gguf, base: &Gguf) -> Result<BTreeMap<String, usize>, ModelError> {
    let mut ranks = BTreeMap::new();
    for info in gguf.tensors() {
        let tensor = SUFFIXES.iter().find_map(|suffix| info.name.strip_suffix(suffix));
        let Some((tensor, of)) = tensor.and_then(|tensor| Some((tensor, base.find_info(tensor)?))) else {
            let what = format!("'{}' of an adapter, for a tensor that the model lacks", info.name);
            return Err(ModelError::Unsupported { what });
        };
        let [a, b] = SUFFIXES.map(|suffix| gguf.tensor(&format!("{tensor}{suffix}")));
        let rank = rank(of, [a?.info, b?.info])?;
        ranks.insert(tensor.to_owned(), rank);
    }
    Ok(ranks)
}

/// Returns the rank of `B A` for a tensor.
fn rank(of: &TensorInfo, [a, b]: [&TensorInfo; 2]) -> Result<usize, ModelError> {
    let &[n_in, n_out] = &of.shape[..] else {
        let what = format!("'{}', as '{}' is not a single matrix", a.name, of.name);
        return Err(ModelError::Unsupported { what });
    };
    let rank = a.rows();
    for (info, expected) in [(a, [n_in, rank]), (b, [rank, n_out])] {
        if rank == 0 || info.shape != expected {
            let (name, expected) = (info.name.clone(), expected.to_vec());
            return Err(ModelError::TensorShape { name, expected, got: info.shape.clone() });
        }
    }
    Ok(rank)
}

fn value(key: &str, expected: &str, got: &str) -> ModelError {
    let (key, expected, got) = (key.to_owned(), expected.to_owned(), got.to_owned());
    ModelError::Value { key, expected, got }
}
