//! Attention heads of each layer: number, size, window, and the layer whose K and V they read.

use kvant_backend::Gate;
use kvant_gguf::Value;
use kvant_kv::KvLayerShape;

use super::{Keys, LayerState};
use crate::ModelError;
use crate::family::{Family, OutputGates, QkNorm, RecurrentFamily};

const HEADS: &str = "attention.head_count";
const KV_HEADS: &str = "attention.head_count_kv";
const K_DIM: &str = "attention.key_length";
const V_DIM: &str = "attention.value_length";
pub(super) const WINDOW: &str = "attention.sliding_window";
const SHARED: &str = "attention.shared_kv_layers";

/// The heads of models without attention.
const NONE: KvLayerShape = KvLayerShape {
    n_heads: 0,
    n_kv_heads: 0,
    k_head_dim: 0,
    v_head_dim: 0,
    window: None,
    shared_kv: false,
    index: None,
    pool: None,
};

/// Gates of the attention output: functions of a projection of the layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputGate {
    /// The function.
    pub function: Gate,
    /// Whether a head has one gate; otherwise each of its values has.
    pub is_per_head: bool,
}

/// Sliding-window layers of a model.
pub(super) struct LayerWindows {
    /// Which layers have a window.
    pub layers: Vec<bool>,
    /// Window length in tokens; unlimited when `None`.
    pub length: Option<usize>,
}

impl LayerWindows {
    /// Returns what full-attention layers have, and what sliding-window layers have; where there
    /// are none, what the others have.
    pub fn of_kinds<T: Copy>(&self, of_layers: &[T]) -> [T; 2] {
        let first = |is_windowed: bool| self.layers.iter().position(|&windowed| windowed == is_windowed);
        [false, true].map(|is_windowed| of_layers[first(is_windowed).unwrap_or(0)])
    }
}

/// Reads which layers have a window, and its length.
pub(super) fn read_windows(
    keys: &Keys,
    family: &Family,
    n_layers: usize,
) -> Result<LayerWindows, ModelError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let Some(windows) = family.windows else {
        keys.refuse(WINDOW, "sliding-window attention")?;
        return Ok(LayerWindows { layers: vec![false; n_layers], length: None });
    };
    // The head sizes depend on the window.
    let own_heads = windows.own_heads || family.mla;
    let length = match own_heads {
        true => Some(keys.size(WINDOW)?),
        false => {
            let named = keys.gguf.meta().find::<u32>(&keys.key(WINDOW))?;
            // 0 disables windows.
            named.map_or(windows.length, |n| Some(n as usize).filter(|&n| n > 0))
        }
    };
    let mut layers: Vec<bool> = match keys.gguf.meta().value(&keys.key(PATTERN)) {
        Some(Value::Array(_)) if windows.are_numbers => {
            keys.gguf.meta().get::<Vec<u32>>(&keys.key(PATTERN))?.into_iter().map(|n| n != 0).collect()
        }
        value if own_heads || matches!(value, Some(Value::Array(_))) => {
            keys.gguf.meta().get(&keys.key(PATTERN))?
        }
        value => {
            let period = if value.is_some() { keys.size(PATTERN)? } else { windows.period };
            let start = usize::from(!windows.starts_full);
            (start..start + n_layers).map(|layer| period == 0 || layer % period != 0).collect()
        }
    };
    if layers.len() < n_layers {
        return Err(keys.bad(PATTERN, &format!("{n_layers} layers"), layers.len()));
    }
    layers.truncate(n_layers);
    Ok(LayerWindows { layers, length })
}

/// Reads the number of KV heads of each layer; 0 for layers without KV heads.
pub(super) fn read_kv_heads(keys: &Keys, family: &Family, n_layers: usize) -> Result<Vec<usize>, ModelError> {
    if !family.attends {
        return Ok(vec![0; n_layers]);
    }
    let key = if keys.has(KV_HEADS) { KV_HEADS } else { HEADS };
    let of_layers = keys.of_layers(key, n_layers)?;
    let may_have_none = matches!(
        family.recurrence,
        Some(
            RecurrentFamily::ShortConv
                | RecurrentFamily::KimiDelta { .. }
                | RecurrentFamily::Mamba2 { is_beside: false }
        )
    );
    match of_layers.iter().all(|&n| n == 0) || !may_have_none && of_layers.contains(&0) {
        true if may_have_none => Err(keys.bad(key, "a layer with KV heads", 0)),
        true => Err(keys.bad(key, "KV heads in every layer", 0)),
        false => Ok(of_layers),
    }
}

/// Reads the heads of each layer, given its number of KV heads; a layer without KV heads belongs to
/// another mixer.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    n_embd: usize,
    n_kv_heads: &[usize],
    windows: &LayerWindows,
) -> Result<Vec<KvLayerShape>, ModelError> {
    if !family.attends {
        return Ok(vec![NONE; n_kv_heads.len()]);
    }
    let n_heads = read_query_heads(keys, n_kv_heads)?;
    let dims = read_dims(keys, "", n_embd / n_heads[0])?;
    let own_dims = match family.windows.is_some_and(|windows| windows.own_heads) {
        true => read_dims(keys, "_swa", dims[0])?,
        false => dims,
    };
    if family.gates == OutputGates::InQueries && dims[1] != dims[0] {
        let what = format!("the {} of a query, followed by the rows of its gate", dims[0]);
        return Err(keys.bad(V_DIM, &what, dims[1]));
    }
    if dims[1] != dims[0] && are_values_of_keys(keys, family, windows) {
        return Err(keys.bad(
            V_DIM,
            &format!("the {} of a key, as values are key projections", dims[0]),
            dims[1],
        ));
    }
    let any = n_kv_heads.iter().copied().find(|&n| n > 0).unwrap_or(n_heads[0]);
    let of_layer = |(index, &n): (usize, &usize)| {
        let (n_heads, n_kv_heads) = (n_heads[index], if n > 0 { n } else { any });
        if n_heads % n_kv_heads != 0 {
            let what = format!("a multiple of the {n_kv_heads} KV heads");
            return Err(keys.bad(HEADS, &what, n_heads));
        }
        let [k_head_dim, v_head_dim] = if windows.layers[index] { own_dims } else { dims };
        let window = windows.length.filter(|_| windows.layers[index]);
        let shared_kv = false;
        Ok(KvLayerShape {
            n_heads,
            n_kv_heads,
            k_head_dim,
            v_head_dim,
            window,
            shared_kv,
            index: None,
            pool: None,
        })
    };
    n_kv_heads.iter().enumerate().map(of_layer).collect()
}

/// Reads the number of query heads of each layer, where layers without KV heads have as many as the
/// first layer with some. If numbers differ, the size of heads does not follow from them.
fn read_query_heads(keys: &Keys, n_kv_heads: &[usize]) -> Result<Vec<usize>, ModelError> {
    let mut all = keys.of_layers(HEADS, n_kv_heads.len())?;
    let first = all.iter().zip(n_kv_heads).find(|(_, n_kv)| **n_kv > 0).map_or(0, |(&n, _)| n);
    for (n, &n_kv) in all.iter_mut().zip(n_kv_heads) {
        *n = if n_kv > 0 { *n } else { first };
        if !(1..=0x7fff_ffff).contains(n) {
            return Err(keys.bad(HEADS, "a positive number", *n));
        }
        if *n != first && !keys.has(K_DIM) {
            let expected = format!("the same number in all layers without {}", keys.key(K_DIM));
            return Err(keys.bad(HEADS, &expected, format!("{first} and {n}")));
        }
    }
    Ok(all)
}

/// Returns the gates of the attention output of a layer with these heads: in a tensor of their own,
/// one for each head if it has as many rows.
pub(super) fn read_gate(
    keys: &Keys,
    family: &Family,
    index: usize,
    heads: KvLayerShape,
) -> Option<OutputGate> {
    match family.gates {
        OutputGates::None => None,
        OutputGates::InQueries => Some(OutputGate { function: Gate::Sigmoid, is_per_head: false }),
        OutputGates::Own(function) => {
            let gates = keys.gguf.find_tensor(&format!("blk.{index}.attn_gate.weight"));
            let is_per_head = gates.is_some_and(|gates| gates.info.rows() == heads.n_heads);
            Some(OutputGate { function, is_per_head })
        }
    }
}

/// Reads the head sizes of keys and values, from keys with this suffix.
fn read_dims(keys: &Keys, suffix: &str, default: usize) -> Result<[usize; 2], ModelError> {
    let [k_key, v_key] = [K_DIM, V_DIM].map(|key| format!("{key}{suffix}"));
    let k = keys.size_or(&k_key, default)?;
    let dims = [k, keys.size_or(&v_key, k)?];
    for (key, dim) in [k_key, v_key].iter().zip(dims) {
        if dim == 0 || dim % 2 != 0 || dim > 1024 {
            return Err(keys.bad(key, "an even head size from 2 to 1024", dim));
        }
    }
    Ok(dims)
}

/// Returns whether full-attention layers use V = K: none of them has a V tensor then.
pub(super) fn are_values_of_keys(keys: &Keys, family: &Family, windows: &LayerWindows) -> bool {
    let has = |index: usize, suffix: &str| {
        let name = format!("blk.{index}.{suffix}.weight");
        keys.gguf.find_tensor(&name).is_some()
    };
    let mut full = (0..windows.layers.len()).filter(|&index| !windows.layers[index]);
    family.values_of_keys && !full.any(|index| has(index, "attn_v") || has(index, "attn_qkv"))
}

/// Checks the KV heads of all layers against the tensors: each head needs rows of them, at least
/// one value per dimension.
pub(super) fn check(keys: &Keys, layers: impl Iterator<Item = KvLayerShape>) -> Result<(), ModelError> {
    let stored: u128 = keys.gguf.tensors().iter().map(|info| info.elements() as u128).sum();
    let (mut taken, mut max_heads) = (0, 0);
    for KvLayerShape { n_kv_heads, k_head_dim: k, v_head_dim: v, .. } in layers {
        taken += n_kv_heads as u128 * (k + v) as u128;
        max_heads = max_heads.max(n_kv_heads);
    }
    if taken <= stored {
        return Ok(());
    }
    Err(keys.bad(KV_HEADS, &format!("heads that {stored} values in tensors suffice for"), max_heads))
}

/// Reads which layer stores the K and V of each layer: the last layers of some models read those of
/// the last earlier layer of their kind (cross-layer KV sharing).
pub(super) fn read_states(
    keys: &Keys,
    family: &Family,
    heads: &[KvLayerShape],
    windows: &LayerWindows,
) -> Result<Vec<LayerState>, ModelError> {
    // Queries on another layer's keys are normalized before RoPE.
    let norms_after_rope = family.norms.heads == QkNorm::QkNormAfterRope;
    if family.mla || family.recurrence.is_some() || norms_after_rope {
        keys.refuse(SHARED, "shared keys and values")?;
    }
    let n_shared = keys.count(SHARED)?;
    if n_shared >= heads.len() {
        return Err(keys.bad(SHARED, &format!("fewer than the {} layers", heads.len()), n_shared));
    }
    let n_own = heads.len() - n_shared;
    let of_layer = |index: usize| {
        if index < n_own {
            return Ok(LayerState::Own);
        }
        let owner = (0..n_own).rev().find(|&owner| windows.layers[owner] == windows.layers[index]);
        match owner {
            Some(owner) if heads[owner] == heads[index] => Ok(LayerState::Shared(owner)),
            Some(owner) => {
                let what = format!("{} in layer {index}, as in layer {owner}", heads[owner].n_kv_heads);
                Err(keys.bad(KV_HEADS, &what, heads[index].n_kv_heads))
            }
            None => {
                let kind = if windows.layers[index] { "with" } else { "without" };
                let what =
                    format!("a layer {kind} a window before the last ones, for layer {index} to share with");
                Err(keys.bad(SHARED, &what, n_shared))
            }
        }
    };
    (0..heads.len()).map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use kvant_codec::DType;
    use kvant_gguf::{Gguf, GgufWriter};

    use crate::Config;

    /// Returns the query heads of a file with these numbers of heads and KV heads per layer.
    fn heads(arch: &str, heads: &[u32], kv_heads: &[u32]) -> Result<Vec<usize>, String> {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", arch).unwrap();
        let sizes = [
            ("block_count", 4),
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 48),
            ("shortconv.l_cache", 3),
            ("attention.kv_lora_rank", 16),
            ("rope.dimension_count", 8),
            ("attention.key_length", if arch == "deepseek2" { 24 } else { 8 }),
            ("attention.value_length", 8),
        ];
        for (key, value) in sizes {
            writer.set(&format!("{arch}.{key}"), value as u32).unwrap();
        }
        for (key, all) in [("head_count", heads), ("head_count_kv", kv_heads)] {
            writer.set_array(&format!("{arch}.attention.{key}"), all.iter().copied()).unwrap();
        }
        writer.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5_f32).unwrap();
        let names = ["a", "b", "c", "d"];
        names.iter().for_each(|name| writer.add_tensor(name, &[32, 32], DType::F32).unwrap());
        let mut bytes = Vec::new();
        let zeros = [0; 4 * 32 * 32];
        writer
            .write_to(&mut bytes, |sink| names.iter().try_for_each(|name| sink.bytes(name, &zeros)))
            .unwrap();
        let config = Config::from_gguf(&Gguf::from_bytes(bytes).unwrap());
        let of_layers = |config: Config| config.layers.iter().map(|layer| layer.heads.n_heads).collect();
        config.map(of_layers).map_err(|error| error.to_string())
    }

    #[test]
    fn heads_may_be_given_per_layer() {
        for arch in ["llama", "deepseek2"] {
            assert_eq!(heads(arch, &[4; 4], &[2; 4]), Ok(vec![4; 4]), "{arch}");
            for (all, expected) in [
                (&[4, 4][..], "attention.head_count: expected 4 layers, got 2"),
                (&[0; 4], "attention.head_count: expected a positive number, got 0"),
                (&[u32::MAX; 4], "expected a positive number, got 4294967295"),
            ] {
                let error = heads(arch, all, &[2; 4]).unwrap_err();
                assert!(error.replace(&format!("{arch}."), "").contains(expected), "{arch}: {error}");
            }
        }
        assert_eq!(heads("llama", &[4, 4, 8, 4], &[2; 4]), Ok(vec![4, 4, 8, 4]));
        let error = heads("deepseek2", &[4, 4, 8, 4], &[2; 4]).unwrap_err();
        assert!(error.contains("expected the same number in all layers, got 4 and 8"), "{error}");
        // Layers without heads are ignored.
        assert_eq!(heads("lfm2", &[0, 4, 0, 2], &[0, 2, 0, 2]), Ok(vec![4, 4, 4, 2]));
    }
}
