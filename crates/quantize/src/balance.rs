//! Balances the columns of matrices whose inputs are known, for types that rotate weights.
//!
//! A rotation spreads errors evenly over a block. Where few inputs are large, as those of the first
//! tokens are, that is the wrong place for most of the error. So columns are scaled before they are
//! rotated, and the inputs divided by the same factors (AWQ's idea, [arXiv
//! 2306.00978](https://arxiv.org/abs/2306.00978), with both sides known):
//!
//! ```text
//! W x = (W s) (x / s)       s_c = (E[x_c²] / mean_r W_rc²)^¼
//! ```
//!
//! which minimizes the sum of errors that are proportional to `Σ W² s²` in every column alike.
//! Nothing divides when the model runs: the layer before a matrix absorbs the division.
//!
//! | matrices | absorbed by |
//! |---|---|
//! | attn_q, attn_k, attn_v | attn_norm |
//! | ffn_gate, ffn_up | ffn_norm |
//! | attn_output | rows of attn_v: one factor for all query heads of a KV head |
//! | ffn_down | rows of ffn_up, which multiply the gate |

use std::collections::{BTreeMap, BTreeSet};

use kvant_codec::fields::FieldSpec;
use kvant_codec::{CodecError, DType};
use kvant_gguf::{Gguf, TensorInfo};

use crate::error::QuantizeError;
use crate::importance::ImportanceMatrix;
use crate::recipe::{layer, number_of_layer};

/// Architectures that use a layer's tensors as the module's table says, if it has no others than
/// [`KNOWN`].
const ARCHITECTURES: [&str; 8] =
    ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "smollm3"];

/// Tensors of a layer.
const KNOWN: [&str; 16] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_q_norm",
    "attn_k_norm",
    "attn_output",
    "attn_post_norm",
    "post_attention_norm",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ffn_post_norm",
    "post_ffw_norm",
    "attn_rot_embd",
];

/// Bounds of the factors, whose geometric mean is 1.
const RANGE: [f64; 2] = [1e-3, 1e3];
/// The least E[x²] of a column, relative to the mean of all.
const MIN_INPUT: f64 = 1e-4;

/// Factors of the rows and columns of tensors.
#[derive(Debug, Default)]
pub(crate) struct Balance {
    tensors: BTreeMap<String, Factors>,
}

/// Factors of a matrix; or, of a vector, those of its values, as columns.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Factors {
    rows: Option<Vec<f32>>,
    columns: Option<Vec<f32>>,
}

/// Matrices that share an input, and what absorbs the division.
struct Group {
    matrices: &'static [&'static str],
    /// A norm, or a matrix of which rows are divided.
    before: &'static str,
}

const GROUPS: [Group; 4] = [
    Group { matrices: &["attn_q", "attn_k", "attn_v"], before: "attn_norm" },
    Group { matrices: &["ffn_gate", "ffn_up"], before: "ffn_norm" },
    Group { matrices: &["attn_output"], before: "attn_v" },
    Group { matrices: &["ffn_down"], before: "ffn_up" },
];

impl Factors {
    /// Multiplies consecutive values of a tensor of rows of `n_in`, from index `first` on.
    pub(crate) fn apply(&self, n_in: usize, first: usize, values: &mut [f32]) {
        for (i, value) in (first..).zip(values) {
            let of = |factors: &Option<Vec<f32>>, at: usize| factors.as_ref().map_or(1.0, |all| all[at]);
            *value *= of(&self.rows, i / n_in) * of(&self.columns, i % n_in);
        }
    }

    /// Returns the importance of a value in a column whose inputs had this one before they were
    /// divided.
    pub(crate) fn importance(&self, column: usize, before: f32) -> f32 {
        self.columns.as_ref().map_or(before, |factors| before / factors[column].powi(2))
    }
}

impl Balance {
    /// Returns the factors for a file whose tensors are converted to the types of `becomes`; none
    /// where a layer is unlike those of the table, or has inputs that `importance` does not know.
    pub(crate) fn of(
        gguf: &Gguf,
        becomes: &[Option<DType>],
        importance: &ImportanceMatrix,
    ) -> Result<Self, QuantizeError> {
        let mut balance = Self::default();
        let arch = gguf.meta().find::<&str>("general.architecture").ok().flatten();
        if !arch.is_some_and(|arch| ARCHITECTURES.contains(&arch)) {
            return Ok(balance);
        }
        let rotated: BTreeSet<&str> = gguf
            .tensors()
            .iter()
            .zip(becomes)
            .filter(|(_, becomes)| becomes.is_some_and(FieldSpec::is_rotated))
            .map(|(info, _)| info.name.as_str())
            .collect();
        let layers: BTreeSet<usize> = gguf.tensors().iter().filter_map(|info| layer(&info.name)).collect();
        for layer in layers.into_iter().filter(|layer| is_known(gguf, *layer)) {
            for group in &GROUPS {
                balance.add(gguf, layer, group, &rotated, importance)?;
            }
        }
        Ok(balance)
    }

    /// Returns the factors of a tensor, if it has some.
    pub(crate) fn factors(&self, name: &str) -> Option<&Factors> {
        self.tensors.get(name)
    }

    /// Adds the factors of a group of a layer, where some of its matrices become rotated and all
    /// can be written anew.
    fn add(
        &mut self,
        gguf: &Gguf,
        layer: usize,
        group: &Group,
        rotated: &BTreeSet<&str>,
        importance: &ImportanceMatrix,
    ) -> Result<(), QuantizeError> {
        let name = |part: &str, kind: &str| format!("blk.{layer}.{part}.{kind}");
        let find = |part: &str| gguf.find_info(&name(part, "weight")).filter(|info| info.packed.is_none());
        let matrices: Option<Vec<&TensorInfo>> = group.matrices.iter().map(|part| find(part)).collect();
        let (Some(matrices), Some(before)) = (matrices, find(group.before)) else { return Ok(()) };
        if !matrices.iter().any(|info| rotated.contains(&*info.name)) {
            return Ok(());
        }
        let n_in = matrices[0].row_len();
        // The values that are divided: those of a norm, or the rows of a matrix.
        let n = if before.shape.len() == 1 { before.row_len() } else { before.rows() };
        if matrices.iter().any(|info| info.row_len() != n_in) || n == 0 || n_in % n != 0 {
            return Ok(());
        }
        let Some(inputs) = importance.mean_squares(matrices[0])? else { return Ok(()) };
        let mut weights = vec![0.0; n_in];
        for info in &matrices {
            add_squares(info, &gguf.data(info), &mut weights)?;
        }
        let head_dim = if n == n_in { n_in } else { head_dim(gguf, layer, n) };
        let of = |column: usize| divided_row(column, [n_in, n], head_dim);
        let (mut x, mut w) = (vec![0.0; n], vec![0.0; n]);
        for column in 0..n_in {
            x[of(column)] += f64::from(inputs[column]);
            w[of(column)] += weights[column];
        }
        let factors = factors(&x, &w);
        let columns = (0..n_in).map(|column| factors[of(column)]).collect::<Vec<f32>>();
        for info in matrices {
            self.tensors.entry(info.name.clone()).or_default().columns = Some(columns.clone());
        }
        let divided: Vec<f32> = factors.iter().map(|factor| 1.0 / factor).collect();
        let bias = name(group.before, "bias");
        if gguf.find_info(&bias).is_some() {
            self.tensors.entry(bias).or_default().columns = Some(divided.clone());
        }
        let of_before = self.tensors.entry(before.name.clone()).or_default();
        if before.shape.len() == 1 {
            of_before.columns = Some(divided);
        } else {
            of_before.rows = Some(divided);
        }
        Ok(())
    }
}

/// Returns whether a layer has known tensors only.
fn is_known(gguf: &Gguf, of: usize) -> bool {
    let part = |name: &str| -> Option<String> {
        let (_, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, _) = rest.rsplit_once('.')?;
        Some(part.to_owned())
    };
    let mut tensors = gguf.tensors().iter().filter(|info| layer(&info.name) == Some(of));
    // A layer without a norm of its own before the feed-forward network shares that of attention.
    let shares_norm = gguf.find_info(&format!("blk.{of}.attn_norm.weight")).is_some()
        && gguf.find_info(&format!("blk.{of}.ffn_norm.weight")).is_none();
    !shares_norm && tensors.all(|info| part(&info.name).is_some_and(|part| KNOWN.contains(&&*part)))
}

/// Returns the values of a head of a layer whose KV heads have `n_kv` values in total.
fn head_dim(gguf: &Gguf, layer: usize, n_kv: usize) -> usize {
    let arch = gguf.meta().find::<&str>("general.architecture").ok().flatten().unwrap_or_default();
    let n_heads = number_of_layer(gguf, &format!("{arch}.attention.head_count_kv"), layer);
    n_heads.filter(|n| *n > 0 && n_kv.is_multiple_of(*n)).map_or(n_kv, |n| n_kv / n)
}

/// Returns the value row that becomes a column of the output projection: query heads share those of
/// their KV head.
fn divided_row(column: usize, [n_in, n]: [usize; 2], head_dim: usize) -> usize {
    let heads_per_kv = n_in / n;
    column / head_dim / heads_per_kv * head_dim + column % head_dim
}

/// Adds the squares of a matrix by column.
fn add_squares(info: &TensorInfo, bytes: &[u8], sums: &mut [f64]) -> Result<(), CodecError> {
    let n_in = sums.len();
    let mut row = vec![0.0; n_in];
    for bytes in bytes.chunks_exact(info.dtype.row_bytes(n_in)?) {
        kvant_codec::decode(info.dtype, bytes, &mut row)?;
        sums.iter_mut().zip(&row).for_each(|(sum, w)| *sum += f64::from(*w).powi(2));
    }
    Ok(())
}

/// Returns the factors of columns with these sums of squares of inputs `x` and of weights `w`.
fn factors(x: &[f64], w: &[f64]) -> Vec<f32> {
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    let (min_x, min_w) = (MIN_INPUT * mean(x), f64::MIN_POSITIVE.max(1e-12 * mean(w)));
    if min_x <= 0.0 {
        return vec![1.0; x.len()];
    }
    let raw: Vec<f64> = x.iter().zip(w).map(|(x, w)| ((x + min_x) / w.max(min_w)).powf(0.25)).collect();
    let by = (-mean(&raw.iter().map(|factor| factor.ln()).collect::<Vec<_>>())).exp();
    let [min, max] = RANGE;
    raw.iter().map(|factor| (factor * by).clamp(min, max) as f32).collect()
}

#[cfg(test)]
mod tests {
    use kvant_gguf::GgufWriter;

    use super::*;
    use crate::importance::InputSums;

    const N: usize = 128;

    /// A layer of four query heads of 32 that share two KV heads, and one more tensor.
    fn file(arch: &str, extra: Option<&str>) -> Gguf {
        let parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
        let mut tensors: Vec<_> =
            parts.iter().map(|part| (format!("blk.0.{part}.weight"), vec![N, N])).collect();
        tensors[1].1[1] = N / 2;
        tensors[2].1[1] = N / 2;
        tensors.push(("blk.0.attn_v.bias".to_owned(), vec![N / 2]));
        tensors.extend(["attn_norm", "ffn_norm"].map(|norm| (format!("blk.0.{norm}.weight"), vec![N])));
        tensors.extend(extra.map(|name| (name.to_owned(), vec![N])));
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", arch).unwrap();
        writer.set(&format!("{arch}.attention.head_count_kv"), 2_u32).unwrap();
        for (name, shape) in &tensors {
            writer.add_tensor(name, shape, DType::F32).unwrap();
        }
        let mut bytes = Vec::new();
        let values = |shape: &[usize]| {
            (0..shape.iter().product()).flat_map(|i: usize| (1.0 + (i % 7) as f32).to_le_bytes()).collect()
        };
        writer
            .write_to(&mut bytes, |sink| {
                tensors.iter().try_for_each(|(name, shape)| {
                    let bytes: Vec<u8> = values(shape);
                    sink.bytes(name, &bytes)
                })
            })
            .unwrap();
        Gguf::from_bytes(bytes).unwrap()
    }

    fn balance(gguf: &Gguf, dtype: DType) -> Balance {
        let mut importance = ImportanceMatrix::new(512);
        for (seed, info) in gguf.tensors().iter().enumerate().filter(|(_, info)| info.shape.len() == 2) {
            let sums = (0..N).map(|i| 1.0 + ((31 * i + seed) % 17) as f32).collect();
            importance.add(&info.name, InputSums { sums, counts: vec![1.0] }).unwrap();
        }
        let becomes: Vec<_> =
            gguf.tensors().iter().map(|info| (info.shape.len() == 2).then_some(dtype)).collect();
        Balance::of(gguf, &becomes, &importance).unwrap()
    }

    /// Multiplied with the factors of both sides, every product is what it was.
    #[test]
    fn the_layer_before_absorbs_what_columns_gain() {
        let gguf = file("llama", None);
        let balance = balance(&gguf, DType::TQ3T);
        let factors = |name: &str| balance.factors(&format!("blk.0.{name}")).unwrap().clone();
        let columns = |name: &str| factors(&format!("{name}.weight")).columns.unwrap();
        let assert_one = |a: f32, b: f32| assert!((a * b - 1.0).abs() <= 1e-6, "{a} {b}");
        for (norm, matrices) in
            [("attn_norm", &["attn_q", "attn_k", "attn_v"][..]), ("ffn_norm", &["ffn_gate", "ffn_up"])]
        {
            for matrix in matrices {
                columns(norm).iter().zip(columns(matrix)).for_each(|(a, b)| assert_one(*a, b));
            }
        }
        let up = factors("ffn_up.weight").rows.unwrap();
        up.iter().zip(columns("ffn_down")).for_each(|(a, b)| assert_one(*a, b));
        let v = factors("attn_v.weight").rows.unwrap();
        assert_eq!(Some(&v), factors("attn_v.bias").columns.as_ref());
        for (column, factor) in columns("attn_output").into_iter().enumerate() {
            // Heads 0 and 1 read KV head 0, heads 2 and 3 the other.
            assert_one(v[column / 64 * 32 + column % 32], factor);
        }
        let spread = columns("attn_q").iter().fold(0f32, |max, factor| max.max(*factor));
        assert!(spread > 1.2, "{spread}");
    }

    #[test]
    fn layers_that_may_use_tensors_otherwise_stay() {
        let is_empty = |gguf: &Gguf, dtype| balance(gguf, dtype).tensors.is_empty();
        assert!(!is_empty(&file("llama", None), DType::TQ4_1S));
        assert!(is_empty(&file("llama", None), DType::Q4K), "not rotated");
        assert!(is_empty(&file("mamba", None), DType::TQ3T), "another architecture");
        assert!(is_empty(&file("llama", Some("blk.0.ffn_gate_inp.weight")), DType::TQ3T), "a router");
    }
}
