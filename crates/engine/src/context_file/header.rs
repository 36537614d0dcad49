//! Header of a context file: the fields that must agree, and the plan of the cache.

use std::io::{Read, Seek};
use std::path::Path;
use std::sync::Arc;

use kvant_codec::tile::TILE;
use kvant_codec::{DType, Rotation};
use kvant_kv::{CacheState, ChannelScales, HeadTypes, KeyPool, KvLayerShape, KvShape, LayerScales, Plan};
use kvant_model::{Config, Rope};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::ContextFileError;
use super::format::Reader;
use crate::model::Model;
use crate::runtime::Sequence;

/// Version of the tile layout and of the codes in it (`docs/formats.md`).
const LAYOUT_VERSION: u32 = 4;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    written_by: String,
    pub(super) n_tokens: usize,
    /// Tiles of 16 tokens that are coded.
    coded_tiles: usize,
    /// Tokens and coded tiles at the checkpoint.
    mark: Option<(usize, usize)>,
    /// Whether keys use the long RoPE factors, where the model has two sets (LongRoPE).
    #[serde(default)]
    turns_long: bool,
    /// Fields that must agree, in the order of their checks, each with its value as text.
    identity: serde_json::Map<String, serde_json::Value>,
    plan: StoredPlan,
}

/// A [`Plan`] on disk. Types are `[layers][heads][K, V]`.
#[derive(Debug, Serialize, Deserialize)]
struct StoredPlan {
    types: Vec<Vec<[String; 2]>>,
    sink_tokens: usize,
    recent_tokens: usize,
    tail: bool,
    alpha: f32,
    /// Channel scales of keys and of values, and centres of values, `[layers][3]`.
    #[serde(default)]
    balance: Option<Vec<[Vec<f32>; 3]>>,
    notes: Vec<String>,
}

impl Header {
    pub(super) fn new(model: &Model, sequence: &Sequence) -> Self {
        let (plan, state) = (sequence.plan(), sequence.state());
        let names = |types: &HeadTypes| [types.k.name().to_owned(), types.v.name().to_owned()];
        Self {
            written_by: concat!("kvant ", env!("CARGO_PKG_VERSION")).to_owned(),
            n_tokens: state.len,
            coded_tiles: state.coded,
            mark: state.mark,
            turns_long: model.config().uses_long_rope(sequence.n_ctx()),
            identity: identity(model, sequence.lora_scales())
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value.into()))
                .collect(),
            plan: StoredPlan {
                types: plan.types.iter().map(|heads| heads.iter().map(names).collect()).collect(),
                sink_tokens: plan.sink_tokens,
                recent_tokens: plan.recent_tokens,
                tail: plan.tail,
                alpha: plan.alpha,
                balance: plan.channel_scales.as_deref().map(stored_balance),
                notes: plan.notes.clone(),
            },
        }
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("text, numbers and lists become JSON")
    }

    pub(super) fn parse(reader: &Reader<impl Read + Seek>) -> Result<Self, ContextFileError> {
        serde_json::from_slice(reader.header())
            .map_err(|error| reader.corrupt(format!("the header: {error}")))
    }

    /// Returns the state of the cache without its pages.
    pub(super) fn state(&self) -> CacheState {
        CacheState { len: self.n_tokens, coded: self.coded_tiles, mark: self.mark }
    }

    /// Checks that the file has this layout, model and RoPE.
    pub(super) fn check_identity(
        &self,
        model: &Model,
        strengths: Option<&Arc<[f32]>>,
        path: &Path,
    ) -> Result<(), ContextFileError> {
        for (field, expected) in identity(model, strengths) {
            let got = self.identity.get(field).and_then(|value| value.as_str()).unwrap_or("(absent)");
            if got != expected {
                return Err(mismatch(path, field, expected, got));
            }
        }
        Ok(())
    }

    /// Checks that a context of `n_ctx` tokens has the RoPE factors of the file.
    pub(super) fn check_rope_variant(
        &self,
        config: &Config,
        n_ctx: usize,
        path: &Path,
    ) -> Result<(), ContextFileError> {
        let uses_long_rope = config.uses_long_rope(n_ctx);
        if uses_long_rope == self.turns_long {
            return Ok(());
        }
        let n = config.n_ctx_short().unwrap_or(0);
        let of = |is_long: bool| {
            format!("those of a context of {} {n} tokens", if is_long { "more than" } else { "up to" })
        };
        Err(mismatch(path, "rope.frequencies", of(uses_long_rope), &of(self.turns_long)))
    }

    /// Returns the default context length for the file.
    pub(super) fn default_n_ctx(&self, config: &Config) -> usize {
        let max = if self.turns_long { None } else { config.n_ctx_short() };
        max.map_or(config.n_ctx_train, |max| max.min(config.n_ctx_train))
    }

    /// Checks that the file's cache has the plan `plan`.
    pub(super) fn check_plan(&self, plan: &Plan, path: &Path) -> Result<(), ContextFileError> {
        for (layer, (stored, heads)) in self.plan.types.iter().zip(&plan.types).enumerate() {
            for (head, ([k, v], types)) in stored.iter().zip(heads).enumerate() {
                for (side, got, expected) in [("K", k, types.k), ("V", v, types.v)] {
                    if got != expected.name() {
                        let field = format!("type of {side}, layer {layer}, head {head}");
                        return Err(mismatch(path, field, expected.name(), got));
                    }
                }
            }
        }
        let settings = [
            ("sink tokens", plan.sink_tokens.to_string(), self.plan.sink_tokens.to_string()),
            ("recent tokens", plan.recent_tokens.to_string(), self.plan.recent_tokens.to_string()),
            ("f16 tail", plan.tail.to_string(), self.plan.tail.to_string()),
            ("alpha", plan.alpha.to_string(), self.plan.alpha.to_string()),
        ];
        if let Some((field, expected, got)) = settings.into_iter().find(|(_, expected, got)| expected != got)
        {
            return Err(mismatch(path, field, expected, &got));
        }
        let expected = plan.channel_scales.as_deref().map(stored_balance);
        match (&expected, &self.plan.balance) {
            (None, Some(_)) => Err(mismatch(path, "balance", "none", "one")),
            (Some(_), None) => Err(mismatch(path, "balance", "one", "none")),
            (expected, got) if expected == got => Ok(()),
            _ => Err(mismatch(path, "balance", "that of this plan", "that of another")),
        }
    }

    /// Returns the plan of the file's cache.
    pub(super) fn plan(&self, shape: &KvShape, path: &Path) -> Result<Plan, ContextFileError> {
        let corrupt = |what: String| ContextFileError::Corrupt { path: path.to_owned(), what };
        let stored = &self.plan;
        let sound = stored.types.iter().map(Vec::len).eq(shape.layers.iter().map(|layer| layer.n_kv_heads))
            && stored.alpha.is_finite()
            && stored.sink_tokens.max(stored.recent_tokens) <= u32::MAX as usize;
        if !sound {
            return Err(corrupt("the plan does not fit the model".to_owned()));
        }
        let dtype = |name: &String| match name.parse::<DType>() {
            Ok(dtype) if dtype.is_kv() => Ok(dtype),
            _ => Err(corrupt(format!("'{name}' is no KV type"))),
        };
        let balance = stored.balance.clone().map(|layers| ChannelScales {
            layers: layers
                .into_iter()
                .map(|[k_scale, v_scale, v_centre]| LayerScales { k_scale, v_scale, v_centre })
                .collect(),
        });
        if let Some(error) = balance.as_ref().and_then(|balance| balance.check(shape).err()) {
            return Err(corrupt(error.to_string()));
        }
        let head = |[k, v]: &[String; 2]| Ok(HeadTypes { k: dtype(k)?, v: dtype(v)? });
        let heads = |heads: &Vec<[String; 2]>| heads.iter().map(head).collect();
        Ok(Plan {
            types: stored.types.iter().map(heads).collect::<Result<_, ContextFileError>>()?,
            sink_tokens: stored.sink_tokens,
            recent_tokens: stored.recent_tokens,
            tail: stored.tail,
            alpha: stored.alpha,
            channel_scales: balance.map(Arc::new),
            notes: stored.notes.clone(),
        })
    }
}

fn stored_balance(balance: &ChannelScales) -> Vec<[Vec<f32>; 3]> {
    let of_layer = |layer: &LayerScales| {
        let LayerScales { k_scale, v_scale, v_centre } = layer.clone();
        [k_scale, v_scale, v_centre]
    };
    balance.layers.iter().map(of_layer).collect()
}

fn mismatch(
    path: &Path,
    field: impl Into<String>,
    expected: impl Into<String>,
    got: &str,
) -> ContextFileError {
    let (path, field, expected) = (path.to_owned(), field.into(), expected.into());
    ContextFileError::Mismatch { path, field, expected, got: got.to_owned() }
}

/// Formats the shapes of the layers, run-length encoded.
fn heads(shape: &KvShape) -> String {
    let runs = shape.layers.chunk_by(|a, b| a == b);
    let mut states =
        shape.states.chunk_by(|a, b| a == b).map(|run| format!("{} x state of {}", run.len(), run[0]));
    let run = |run: &[KvLayerShape]| {
        let KvLayerShape { n_heads, n_kv_heads, k_head_dim, v_head_dim, window, shared_kv, index, pool } =
            run[0];
        let window = window.map_or_else(String::new, |window| format!(" window {window}"));
        let values =
            if shared_kv { format!(" with values of {v_head_dim}") } else { format!(", {v_head_dim}") };
        let index = index.map_or_else(String::new, |dim| format!(" index {dim}"));
        let pool = pool.map_or_else(String::new, |KeyPool { stride, of_index }| {
            format!("{} of {stride}", if of_index { " index pools" } else { " pools" })
        });
        format!("{} x {n_heads}/{n_kv_heads} of {k_head_dim}{values}{window}{index}{pool}", run.len())
    };
    runs.map(run).chain(&mut states).collect::<Vec<_>>().join("; ")
}

/// Returns the fields that decide whether cached keys and values are interchangeable: the layout of
/// the bytes, the model, and the rotary embedding of the keys. Numbers are text, so that equal
/// means identical.
pub(super) fn identity(model: &Model, strengths: Option<&Arc<[f32]>>) -> Vec<(&'static str, String)> {
    let config = model.config();
    let (ropes, shape, rotation) = (&config.ropes, config.kv_shape(), Rotation::kv(128));
    let longest = config.n_ctx_train.max(config.n_ctx_short().unwrap_or(0).saturating_add(1));
    let frequencies: Vec<u8> =
        ropes.iter().flat_map(|rope| rope.frequencies(longest)).flat_map(|f| f.to_le_bytes()).collect();
    let of_each = |what: fn(&Rope) -> String| ropes.iter().map(what).collect::<Vec<_>>().join(", ");
    let mut fields = vec![
        ("layout.version", LAYOUT_VERSION.to_string()),
        ("layout.tile", TILE.to_string()),
        ("layout.rotation", format!("{:032x}:{:032x}", rotation.before(), rotation.after())),
        ("rope.pairing", of_each(|rope| format!("{:?}", rope.params.pairing).to_lowercase())),
        ("rope.n_rot", of_each(|rope| rope.params.n_rot.to_string())),
        ("rope.frequencies", format!("{:016x}", xxh3_64(&frequencies))),
        ("rope.magnitude", of_each(|rope| rope.magnitude().to_string())),
        ("model.architecture", config.family.name.to_owned()),
        ("model.layers", shape.layers.len().to_string()),
        ("model.heads", heads(&shape)),
        ("model.vocabulary", model.n_vocab().to_string()),
        ("model.fingerprint", model.compute_fingerprint()),
    ];
    if !model.loras().is_empty() {
        let strengths = strengths.map_or_else(|| model.lora_scales(), |strengths| strengths.to_vec());
        fields.push(("model.adapters", format!("{strengths:?}")));
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache whose values are part of its keys has another byte layout; this field makes files of
    /// the other layout a mismatch.
    #[test]
    fn the_cache_shape_shows_whether_values_are_part_of_keys() {
        let layer = KvLayerShape {
            n_heads: 16,
            n_kv_heads: 1,
            k_head_dim: 576,
            v_head_dim: 512,
            window: None,
            shared_kv: true,
            index: None,
            pool: None,
        };
        assert_eq!(heads(&KvShape::uniform(2, layer)), "2 x 16/1 of 576 with values of 512");
        let apart = KvLayerShape { shared_kv: false, ..layer };
        assert_eq!(heads(&KvShape::uniform(2, apart)), "2 x 16/1 of 576, 512");
    }
}
