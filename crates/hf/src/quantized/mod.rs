//! Weights that a folder stores quantized: several tensors of a module, described as one.
//!
//! ```text
//! gptq                       qweight [in / n, out], qzeros [groups, out / n],
//!                            scales [groups, out], g_idx [in]                    integers
//! awq                        qweight [in, out / n], qzeros [groups, out / n],
//!                            scales [groups, out]                                integers
//! compressed-tensors         weight_packed I32 [out, in / n], weight_scale [out, groups],
//!                            weight_zero_point [out / n, groups], weight_g_idx [in]
//!                                                                                integers
//!                            weight I8 [out, in], weight_scale [out, groups]     integers
//!                            weight_packed U8 [out, in / 2], weight_scale [out, blocks],
//!                            weight_global_scale                                 4-bit floats
//! deepseek-v4                weight I8 [out, in / 2], scale [out, blocks]       4-bit floats
//! modelopt                   weight U8 [out, in / 2], weight_scale [out, blocks],
//!                            weight_scale_2                                      4-bit floats
//! fp8, fbgemm_fp8, all       weight E4M3 [out, in], weight_scale_inv, weight_scale
//! above                      or scale                                            floats
//! bitsandbytes               weight U8 [out in / 2, 1], weight.absmax [groups],
//!                            weight.quant_map [16], weight.quant_state (JSON)    tabled
//!                            weight I8 [out, in], SCB [out]                      row bytes
//! ```
//!
//! `n` values of 4 or 8 bits share a word. [`Integers`] and [`Floats`] become blocks of a kernel
//! type that holds the same numbers ([`Integers::with_dtype`], [`Floats::with_dtype`]). Scales of
//! floats are one, `[out]`, or one for each block.
//!
//! Other methods are refused by name.

mod bitsandbytes;
mod floats;
mod fp4;
mod integers;
mod module;
mod order;
mod row_bytes;
mod tabled;

use std::collections::BTreeMap;

use kvant_codec::DType;

use crate::error::HfError;
use crate::family::Family;
use crate::folder::{Object, shown};
use crate::safetensors::{ElementKind, Shards, Stored};

use floats::Floats;
use fp4::Fp4;
use integers::Integers;
use module::Module;
use row_bytes::RowBytes;
use tabled::Tabled;

/// A matrix made of the tensors of a module.
#[derive(Debug, Clone)]
pub(crate) enum Quantized {
    Integers(Integers),
    Floats(Floats),
    Fp4(Fp4),
    Tabled(Tabled),
    RowBytes(RowBytes),
}

impl Quantized {
    /// Returns the type of [`Quantized::rows`].
    pub fn dtype(&self) -> DType {
        match self {
            Self::Integers(integers) => integers.dtype,
            Self::Floats(floats) => floats.dtype,
            Self::Fp4(fp4) => fp4.dtype,
            Self::Tabled(tabled) => tabled.dtype,
            Self::RowBytes(bytes) => bytes.dtype,
        }
    }

    /// Returns outputs and inputs.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Integers(integers) => [integers.n_out, integers.n_in],
            Self::Floats(floats) => [floats.n_out, floats.n_in],
            Self::Fp4(fp4) => [fp4.n_out, fp4.n_in],
            Self::Tabled(tabled) => [tabled.n_out, tabled.n_in],
            Self::RowBytes(bytes) => [bytes.n_out, bytes.n_in],
        }
    }

    /// Returns the rows, in blocks or values.
    pub fn rows(&self, shards: &Shards) -> Vec<u8> {
        match self {
            Self::Integers(integers) => integers.rows(shards),
            Self::Floats(floats) => floats.rows(shards),
            Self::Fp4(fp4) => fp4.rows(shards),
            Self::Tabled(tabled) => tabled.rows(shards),
            Self::RowBytes(bytes) => bytes.rows(shards),
        }
    }

    /// Returns the matrix in values.
    pub fn dense(self) -> Self {
        match self {
            Self::Integers(integers) => Self::Integers(integers.dense()),
            Self::Floats(floats) => Self::Floats(Floats { dtype: floats.dense_dtype, ..floats }),
            Self::Fp4(fp4) => Self::Fp4(Fp4 { dtype: fp4.dense_dtype, ..fp4 }),
            Self::Tabled(tabled) => Self::Tabled(Tabled { dtype: tabled.dense_dtype, ..tabled }),
            Self::RowBytes(bytes) => Self::RowBytes(bytes),
        }
    }

    /// Returns the type of [`Quantized::dense`].
    pub fn dense_dtype(&self) -> DType {
        match self {
            Self::Integers(integers) => integers.dense_dtype(),
            Self::Floats(floats) => floats.dense_dtype,
            Self::Fp4(fp4) => fp4.dense_dtype,
            Self::Tabled(tabled) => tabled.dense_dtype,
            Self::RowBytes(bytes) => bytes.dtype,
        }
    }

    /// Returns the tensor of the codes.
    pub fn codes(&self) -> &Stored {
        match self {
            Self::Integers(integers) => &integers.codes,
            Self::Floats(floats) => &floats.codes,
            Self::Fp4(fp4) => &fp4.codes,
            Self::Tabled(tabled) => &tabled.codes,
            Self::RowBytes(bytes) => &bytes.codes,
        }
    }
}

/// A method of quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Method {
    kind: Kind,
    /// Outputs and inputs that share a scale, where blocks do.
    block: [usize; 2],
    /// The type in which the model computes.
    dtype: DType,
    /// Whether it may concern the KV cache alone.
    may_keep_weights: bool,
}

/// What a method stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Block formats that GGUF has too: a family's own tensors.
    Mxfp4Experts,
    Gptq {
        bits: usize,
        /// Added to a stored zero.
        zero_offset: u8,
    },
    Awq {
        bits: usize,
    },
    /// Integers, or floats.
    CompressedTensors,
    /// 8-bit or 4-bit floats.
    Floats,
    /// Indices of levels, or signed bytes.
    BitsAndBytes,
}

impl Method {
    /// Returns how the weights of a model are quantized; `None` if they are not.
    ///
    /// # Errors
    /// A method that is not supported, or values that it does not have.
    pub fn of(config: Object<'_>) -> Result<Option<Self>, HfError> {
        let Some(how) = config.find_object("quantization_config")? else { return Ok(None) };
        let method = how.find_str("quant_method")?.unwrap_or("an unnamed method");
        let refused = |method: String| Err(HfError::Quantized { method });
        let kind = match method {
            "mxfp4" if Family::of(config).is_ok_and(|family| family.has_mxfp4_experts) => Kind::Mxfp4Experts,
            "gptq" => {
                let format = how.find_str("checkpoint_format")?.unwrap_or("gptq");
                let zero_offset = match format {
                    "gptq" => 1,
                    "gptq_v2" => 0,
                    other => return refused(format!("gptq in the format {other}")),
                };
                Kind::Gptq { bits: bits(how, "bits")?, zero_offset }
            }
            "awq" => match how.find_str("version")?.or(how.find_str("format")?).unwrap_or("gemm") {
                "gemm" | "GEMM" => Kind::Awq { bits: bits(how, "bits")? },
                other => return refused(format!("awq in the format {other}")),
            },
            "compressed-tensors" => Kind::CompressedTensors,
            "fp8" | "fbgemm_fp8" | "modelopt" => Kind::Floats,
            "bitsandbytes" => Kind::BitsAndBytes,
            other => return refused(other.to_owned()),
        };
        let may_keep_weights = ["compressed-tensors", "modelopt"].contains(&method);
        Ok(Some(Self { kind, block: block(how)?, dtype: dtype(config)?, may_keep_weights }))
    }
}

/// Reads the bits of a code: 4 or 8.
fn bits(how: Object<'_>, key: &str) -> Result<usize, HfError> {
    match how.size(key)? {
        bits @ (4 | 8) => Ok(bits as usize),
        other => Err(how.bad(key, "4 or 8", other.to_string())),
    }
}

/// Reads the outputs and inputs of a block of floats.
fn block(how: Object<'_>) -> Result<[usize; 2], HfError> {
    const KEY: &str = "weight_block_size";
    let Some(sizes) = how.find_array(KEY)? else { return Ok(BLOCK) };
    let size = |i: usize| sizes.get(i)?.as_u64().filter(|size| (1..1 << 31).contains(size));
    match (size(0), size(1), sizes.len()) {
        (Some(rows), Some(columns), 2) => Ok([rows as usize, columns as usize]),
        _ => Err(how.bad(KEY, "two sizes", shown(&how.map[KEY]))),
    }
}

/// The block of DeepSeek, which others use too.
const BLOCK: [usize; 2] = [128, 128];

/// Reads the type in which a model computes.
fn dtype(config: Object<'_>) -> Result<DType, HfError> {
    let name = config.find_str("dtype")?.or(config.find_str("torch_dtype")?);
    Ok(match name {
        Some("float16") => DType::F16,
        Some("float32") => DType::F32,
        _ => DType::BF16,
    })
}

/// The tensors of a module by what follows its name.
type Parts = BTreeMap<&'static str, Stored>;

/// Ends of the names of tensors that belong to a quantized weight.
const ENDS: [&str; 14] = [
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "scale",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "weight",
];
/// Ends of the names of scales for activations and KV caches, which are kept in other types here.
const UNUSED: [&str; 6] =
    ["input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale"];

/// Replaces the tensors of each quantized module in `shards` by its `weight`.
///
/// # Errors
/// Parts that are missing, of another type, or whose shapes contradict each other.
pub(crate) fn join(shards: &mut Shards, method: Method) -> Result<(), HfError> {
    if method.kind == Kind::Mxfp4Experts {
        return Ok(());
    }
    shards.retain(|name| !UNUSED.iter().any(|end| module_of(name, end).is_some()));
    let modules = modules(shards, method.kind);
    if modules.is_empty() && !method.may_keep_weights {
        let name = match method.kind {
            Kind::Floats => "weight_scale",
            Kind::BitsAndBytes => "weight.absmax",
            _ => "qweight",
        };
        let of = Some("config.json says that weights are quantized".to_owned());
        return Err(HfError::Missing { name: name.to_owned(), of });
    }
    for (module, parts) in modules {
        let of = Module { name: &module, parts: &parts, shards, method };
        let whole = |integers: Integers| Quantized::Integers(integers.with_dtype(shards));
        let quantized = match method.kind {
            Kind::Gptq { bits, zero_offset } => whole(of.gptq(bits, zero_offset)?),
            Kind::Awq { bits } => whole(of.awq(bits)?),
            Kind::BitsAndBytes if parts.contains_key("SCB") => Quantized::RowBytes(of.row_bytes()?),
            Kind::BitsAndBytes => Quantized::Tabled(of.tabled()?),
            _ => match of.codes()?.holds {
                ElementKind::Bytes => Quantized::Fp4(of.fp4()?),
                ElementKind::I8 if of.has_powers() => Quantized::Fp4(of.fp4()?),
                ElementKind::I8 => whole(of.bytes()?),
                ElementKind::I32 => whole(of.packed()?),
                _ => Quantized::Floats(of.floats()?),
            },
        };
        let names = parts.keys().map(|end| format!("{module}.{end}"));
        shards.replace(names, format!("{module}.weight"), Stored::made(quantized));
    }
    Ok(())
}

fn module_of<'a>(name: &'a str, end: &str) -> Option<&'a str> {
    name.strip_suffix(end)?.strip_suffix('.')
}

/// Returns the parts of every quantized module.
fn modules(shards: &Shards, kind: Kind) -> Vec<(String, Parts)> {
    let mut modules: BTreeMap<&str, Parts> = BTreeMap::new();
    for (name, stored) in shards.tensors() {
        let ends = match kind {
            Kind::Gptq { .. } | Kind::Awq { .. } => &ENDS[..4],
            Kind::BitsAndBytes => &bitsandbytes::ENDS,
            _ => &ENDS[4..],
        };
        if let Some((module, end)) = ends.iter().find_map(|end| Some((module_of(name, end)?, *end))) {
            modules.entry(module).or_default().insert(end, stored.clone());
        }
    }
    // A `scale` without a weight is a tensor of the model.
    let alone = ["weight", "scale"];
    let is_quantized = |parts: &Parts| parts.len() > 1 || parts.keys().any(|end| !alone.contains(end));
    let modules = modules.into_iter().filter(|(_, parts)| is_quantized(parts));
    modules.map(|(module, parts)| (module.to_owned(), parts)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::folder::Folder;

    fn values(stored: &Stored, shards: &Shards) -> Vec<f32> {
        let ElementKind::Values(dtype) = stored.holds else { panic!("{}", stored.holds) };
        let mut values = vec![0.0; stored.shape.iter().product()];
        kvant_codec::decode(dtype, &shards.data(stored), &mut values).unwrap();
        values
    }

    /// A view that divides blocks selects from the values.
    #[test]
    fn matrices_have_the_same_values_without_blocks() {
        let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/quantized");
        // Of the value: its rounding to 16 bits, and that of a q8_0 scale. Of the largest: half a
        // step.
        for (name, of_value, of_largest) in [
            ("gptq-g128", 1.0 / 2048.0, 0.0),
            ("gptq-asymmetric-g32", 1.0 / 2048.0, 0.0),
            ("gptq-8-bit", 1.0 / 2048.0, 0.0),
            ("compressed-w8a8", 1.0 / 256.0, 0.0),
            ("compressed-fp8", 1.0 / 256.0, 0.0),
            ("compressed-fp8-blocks", 1.0 / 256.0, 0.0),
            ("compressed-mxfp4", 0.0, 0.0),
            ("compressed-nvfp4", 1.0 / 256.0 + 1.0 / 2048.0, 1.0 / 254.0),
            ("bnb-nf4", 1.0 / 256.0, 0.0),
            ("bnb-nf4-double", 1.0 / 2048.0, 0.0),
            ("bnb-fp4", 1.0 / 256.0, 0.0),
        ] {
            let mut folder = Folder::new(&all.join(name));
            let config = folder.json("config.json").unwrap().unwrap();
            let method = Method::of(config.object().unwrap()).unwrap().unwrap();
            let mut shards = Shards::open(&mut folder).unwrap();
            join(&mut shards, method).unwrap();
            let is_coded = |stored: &&Stored| stored.holds.block_len() > 1;
            let coded: Vec<&Stored> = shards.tensors().map(|(_, stored)| stored).filter(is_coded).collect();
            assert_eq!(coded.len(), 7, "{name}");
            for stored in coded {
                let dense = stored.dense();
                assert_eq!((dense.holds, dense.holds.block_len()), (stored.dense_kind(), 1), "{name}");
                let (got, want) = (values(&dense, &shards), values(stored, &shards));
                let largest = want.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                for (got, want) in got.iter().zip(&want) {
                    let bound = of_value * want.abs() + of_largest * largest;
                    assert!((got - want).abs() <= bound, "{name}: {got}, {want}");
                }
            }
        }
    }
}
