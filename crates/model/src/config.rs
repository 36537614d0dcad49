//! Hyper-parameters, read from a GGUF file's metadata.

use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{Activation, AttendParams, Routing};
use kvant_gguf::{Gguf, Value};
use kvant_kv::{KvLayerShape, KvShape, WeightStatistics};

mod experts;
mod heads;
mod latent;
mod recurrence;
mod ropes;

pub(crate) use experts::SELECTION_BIAS;
pub use latent::Latent;
pub use recurrence::{Recurrence, StateKind};
pub(crate) use ropes::DIVISORS;

use crate::ModelError;
use crate::SharedExpert;
use crate::family::{Factors, Family, HeadNorms, NormKind, Norms, Scale, Unturned};
use crate::rope::Rope;

/// The shape of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Which family's conventions hold.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// The decoder layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Layers behind them in the file that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv 2412.19437).
    pub n_mtp: usize,
    /// The first of those, where this engine runs it: from the residual stream of a token and the next token it predicts the one after that.
    pub mtp: Option<LayerSpec>,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Which norm comes before the logits.
    pub output_norm: NormKind,
    /// Context length the model was trained for.
    pub n_ctx_train: usize,
    /// The rotary embeddings that its layers name.
    pub ropes: Vec<Rope>,
    /// Factor on the embeddings of tokens.
    pub embedding_scale: f32,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Bound on the logits, after that factor.
    pub logit_soft_cap: Option<f32>,
    /// How many numbers of each token every layer is given, beside the stream.
    pub n_per_layer: Option<usize>,
    /// What the weights say of the layers' keys and values, once [they have been looked at](Self::weight_statistics).
    pub statistics: Option<Arc<WeightStatistics>>,
}

/// What a decoder layer is and does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// Its heads, and what its queries see.
    pub heads: KvLayerShape,
    /// Where the keys and values lie that its queries meet.
    pub state: LayerState,
    /// What it does with a state of fixed size that each token changes, in the place of attention or beside it.
    pub recurrence: Option<Recurrence>,
    /// Width of the feed-forward layer that every row goes through: of a layer of experts, of the one that all rows share; 0
    /// where there is none.
    pub n_ff: usize,
    /// The experts of its feed-forward layer.
    pub experts: Option<ExpertSpec>,
    /// Which of [`Config::ropes`] turns its keys.
    pub rope: usize,
    /// Which of them turns its queries: most often the same.
    pub q_rope: usize,
    /// Factor on its scores.
    pub scale: f32,
    /// Bound on its scores.
    pub soft_cap: Option<f32>,
    /// The sizes of its heads as the model says them, where all are made of one latent vector: [its heads](Self::heads) are those
    /// that meet it then.
    pub latent: Option<Latent>,
    /// Whether its values are what its keys are made of: what is multiplied for them, before norms and RoPE.
    pub values_of_keys: bool,
    /// Whether each query head has a sink.
    pub sinks: bool,
    /// Whether what attention gives is multiplied by a gate.
    pub gated: bool,
    /// Of the gate of its feed-forward layer.
    pub activation: Activation,
    /// Whether what is gated there is its own gate.
    pub gates_itself: bool,
    /// Where it normalises.
    pub norms: Norms,
}

/// The experts of a feed-forward layer, of which each row goes through a few.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertSpec {
    /// How many there are.
    pub n: usize,
    /// Width of each.
    pub n_ff: usize,
    /// How a row chooses among them.
    pub routing: Routing,
    /// What every row goes through besides.
    pub shared: SharedExpert,
    /// Numbers that a row is made before it goes through experts, which the sum of what they give is made a row of again; `None` where
    /// rows go through as they are.
    pub latent: Option<usize>,
}

/// The keys and values of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LayerState {
    /// Keys and values of its own.
    Own,
    /// Nothing: its queries meet the keys and values of this earlier layer, which has the same KV heads.
    Shared(usize),
    /// Nothing: it does not attend.
    Nothing,
}

impl LayerSpec {
    /// What attention goes by.
    pub fn attend_params(&self) -> AttendParams {
        let KvLayerShape { n_heads, n_kv_heads, k_head_dim, v_head_dim, .. } = self.heads;
        let (scale, soft_cap) = (self.scale, self.soft_cap);
        AttendParams { n_heads, n_kv_heads, k_head_dim, v_head_dim, scale, soft_cap }
    }

    /// Whether it attends.
    pub fn attends(&self) -> bool {
        self.state != LayerState::Nothing
    }

    /// Values of all queries of a row.
    pub fn n_q(&self) -> usize {
        self.heads.n_heads * self.heads.k_head_dim
    }

    /// Values of all keys of a row.
    pub fn n_k(&self) -> usize {
        self.heads.n_kv_heads * self.heads.k_head_dim
    }

    /// Values of all values of a row.
    pub fn n_v(&self) -> usize {
        self.heads.n_kv_heads * self.heads.v_head_dim
    }

    /// Values of what attention gives for a row.
    pub fn n_out(&self) -> usize {
        self.heads.n_heads * self.heads.v_head_dim
    }
}

impl Config {
    /// Reads and checks the hyper-parameters.
    ///
    /// # Errors
    /// An unknown architecture, a missing or absurd value (the key is named), or a feature that is not implemented.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let arch = gguf.meta().get::<&str>("general.architecture")?;
        if gguf.meta().find("general.type").is_ok_and(|kind: Option<&str>| kind == Some("adapter")) {
            return Err(ModelError::Adapter);
        }
        if arch == "clip" {
            return Err(ModelError::Tower);
        }
        let family = Family::named(arch)?;
        let keys = Keys { gguf, arch };
        refuse_embedding_models(&keys)?;
        let n_embd = keys.size("embedding_length")?;
        let n_ctx_train = keys.size("context_length")?;
        let (n_layers, n_mtp) = read_layers(&keys)?;
        let n_kv_heads = heads::read_kv_heads(&keys, family, n_layers)?;
        let experts = experts::read(&keys, family, n_embd, n_layers)?;
        let is_other_half = |index: usize| family.halved && experts.has(index);
        let without_heads = n_kv_heads.iter().map(|&n| n == 0).collect();
        let recurrences = recurrence::read(&keys, family, n_embd, without_heads)?;
        let windows = heads::read_windows(&keys, family, n_layers)?;
        let (heads, latent) = match family.latent {
            true => {
                latent::read(&keys, n_layers).map(|(heads, latent)| (vec![heads; n_layers], Some(latent)))?
            }
            false => (heads::read(&keys, family, n_embd, &n_kv_heads, &windows)?, None),
        };
        let is_recurrent = |i: usize| recurrences.of_layer(i).is_some() && !family.recurs_beside();
        heads::check(&keys, (0..n_layers).filter(|&i| !is_recurrent(i)).map(|i| heads[i]))?;
        let states = heads::read_states(&keys, family, &heads, &windows)?;
        let turned_dims = latent.map_or_else(|| windows.head_dims(&heads), |latent| [latent.n_rot; 2]);
        let ropes = ropes::read(&keys, family, turned_dims, n_ctx_train)?;
        let scale = match latent {
            Some(latent) => Some(latent::read_scale(&keys, latent)?),
            None => keys.positive("attention.scale")?,
        };
        let [soft_cap, logit_soft_cap] = read_soft_caps(&keys, family)?;
        let norms = read_norms(&keys, family);
        let values_of_keys = heads::are_values_of_keys(&keys, family, &windows);
        let turns = keys.flag_or("rope.scaling.finetuned", true)?;
        let layer = |index: usize| {
            let (heads, is_windowed) = (heads[index], windows.layers[index]);
            let is_unturned = match family.unturned {
                Unturned::None => false,
                Unturned::Every(period) => (index + 1).is_multiple_of(period),
                Unturned::Unwindowed => !is_windowed,
                Unturned::BesideWindows => !is_windowed && windows.length.is_some(),
                Unturned::Said => !turns,
            };
            let rope = match heads.window {
                _ if is_unturned => ropes.unturned,
                Some(_) => ropes.windowed,
                None => 0,
            };
            LayerSpec {
                heads,
                state: match is_other_half(index) || is_recurrent(index) {
                    true => LayerState::Nothing,
                    false => states[index],
                },
                recurrence: recurrences.of_layer(index).filter(|_| !is_other_half(index)),
                n_ff: experts.n_ff(index),
                experts: experts.of_layer(index),
                rope,
                q_rope: rope + ropes.for_queries,
                scale: scale.unwrap_or_else(|| scale_of(family.scale, n_layers, n_embd, heads)),
                soft_cap,
                latent,
                values_of_keys: values_of_keys && !is_windowed,
                sinks: family.sinks,
                gated: family.gated,
                activation: family.activation,
                gates_itself: family.gates_itself,
                norms,
            }
        };
        let mut config = Self {
            family,
            n_embd,
            n_mtp,
            mtp: None,
            layers: (0..n_layers).map(layer).collect(),
            norm_eps: keys.float(match family.norms.kind {
                NormKind::Rms => "attention.layer_norm_rms_epsilon",
                NormKind::Layer => "attention.layer_norm_epsilon",
            })?,
            output_norm: family.norms.kind,
            n_ctx_train,
            ropes: ropes.all,
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap,
            n_per_layer: Some(keys.count(PER_LAYER)?).filter(|&n| n > 0),
            statistics: None,
        };
        config.read_factors(&keys)?;
        config.mtp = config.find_mtp(gguf);
        Ok(config)
    }

    /// The layer behind the last one that predicts, where the file has one of those that are known.
    fn find_mtp(&self, gguf: &Gguf) -> Option<LayerSpec> {
        let entry = format!("blk.{}.{EH_PROJ}", self.layers.len());
        if !self.family.predicts_further || self.n_mtp == 0 || gguf.find_info(&entry).is_none() {
            return None;
        }
        self.layers.iter().rfind(|layer| layer.attends()).copied()
    }

    /// The shape of [that layer](Self::mtp) as a model of its own.
    pub fn of_mtp(&self) -> Option<Self> {
        let layers = vec![self.mtp?];
        Some(Self { layers, n_mtp: 0, mtp: None, n_per_layer: None, ..self.clone() })
    }

    fn read_factors(&mut self, keys: &Keys) -> Result<(), ModelError> {
        match self.family.factors {
            Factors::None => {}
            Factors::Root => self.embedding_scale = (self.n_embd as f32).sqrt(),
            Factors::Named => {
                let factor = |key| Ok::<_, ModelError>(keys.positive(key)?.unwrap_or(1.0));
                let (embedding, branch) = (factor("embedding_scale")?, factor("residual_scale")?);
                // A residual stream x whose branches are scaled, x + r f(norm(x)), is r times the stream x / r + f(norm(x)): norms
                // see no factor, but for what is added to the mean square.
                self.embedding_scale = embedding / branch;
                self.norm_eps /= branch * branch;
                self.logit_scale = 1.0 / factor("logit_scale")?;
            }
            // 0 stands for none.
            Factors::Logits => {
                self.logit_scale = Some(keys.float("logit_scale")?).filter(|&x| x > 0.0).unwrap_or(1.0);
            }
        }
        Ok(())
    }

    /// The longest contexts whose positions are not turned as those of longer ones are (LongRoPE); `None` where all are turned
    /// alike.
    pub fn n_ctx_short(&self) -> Option<usize> {
        self.ropes.iter().find_map(Rope::n_ctx_short)
    }

    /// Whether positions of a context of `n_ctx` tokens are turned as those of long ones are, which is another thing.
    pub fn turns_long(&self, n_ctx: usize) -> bool {
        self.n_ctx_short().is_some_and(|short| n_ctx > short)
    }

    /// The KV heads, as the cache sees them.
    pub fn kv_shape(&self) -> KvShape {
        KvShape { statistics: self.statistics.clone(), ..self.kv_shape_of(0..self.layers.len()) }
    }

    /// Which keys and values layer `index` meets: their number among those that layers from `first` on keep; `None` when an
    /// earlier layer keeps them, or it meets none.
    pub fn kv_ordinal(&self, first: usize, index: usize) -> Option<usize> {
        let owner = match self.layers[index].state {
            LayerState::Own => index,
            LayerState::Shared(owner) => owner,
            LayerState::Nothing => return None,
        };
        let before = self.layers.get(first..owner)?;
        Some(before.iter().filter(|layer| layer.state == LayerState::Own).count())
    }

    /// The number of the first state of recurrent layer `index` among those of layers from `first` on; `None` when it is none.
    pub fn state_ordinal(&self, first: usize, index: usize) -> Option<usize> {
        self.layers[index].recurrence?;
        let before = self.layers.get(first..index)?.iter().filter_map(|layer| layer.recurrence);
        Some(before.map(|recurrence| recurrence.states().count()).sum())
    }

    /// What some of the layers keep.
    ///
    /// # Panics
    /// When the model has no such layers.
    pub fn kv_shape_of(&self, layers: Range<usize>) -> KvShape {
        let layers = &self.layers[layers];
        let own = layers.iter().filter(|layer| layer.state == LayerState::Own);
        let states = layers.iter().filter_map(|layer| layer.recurrence).flat_map(|of| of.states());
        KvShape { layers: own.map(|layer| layer.heads).collect(), states: states.collect(), statistics: None }
    }
}

/// Refuses a model whose tokens see those that come after them: it makes embeddings and says nothing.
fn refuse_embedding_models(keys: &Keys) -> Result<(), ModelError> {
    const CAUSAL: &str = "attention.causal";
    if keys.flag_or(CAUSAL, true)? {
        return Ok(());
    }
    let what = format!("a model for embeddings, whose tokens see later ones ({} is false)", keys.key(CAUSAL));
    Err(ModelError::Unsupported { what })
}

/// The tensor that makes one row of a token's embedding and of the residual stream of the token before.
pub(crate) const EH_PROJ: &str = "nextn.eh_proj.weight";

/// Layers of the model, and those behind them that predict further tokens.
fn read_layers(keys: &Keys) -> Result<(usize, usize), ModelError> {
    const COUNT: &str = "block_count";
    const PREDICTING: &str = "nextn_predict_layers";
    let (n, n_tensors) = (keys.size(COUNT)?, keys.gguf.tensors().len());
    // Each layer has tensors; a number beyond them is checked before anything is made for each.
    if n > n_tensors {
        return Err(keys.bad(COUNT, &format!("at most one layer for each of {n_tensors} tensors"), n));
    }
    let n_mtp = keys.count(PREDICTING)?;
    if n_mtp >= n {
        return Err(keys.bad(PREDICTING, &format!("fewer than the {n} layers"), n_mtp));
    }
    Ok((n - n_mtp, n_mtp))
}

/// The norms of the family, of which a file may lack some.
fn read_norms(keys: &Keys, family: &Family) -> Norms {
    match family.norms.heads {
        HeadNorms::EachIfThere if !keys.has_tensor("attn_q_norm.weight") => {
            Norms { heads: HeadNorms::None, ..family.norms }
        }
        _ => family.norms,
    }
}

/// Bounds on scores and on logits.
fn read_soft_caps(keys: &Keys, family: &Family) -> Result<[Option<f32>; 2], ModelError> {
    let [scores, logits] = family.soft_caps;
    let scores = keys.positive_or("attn_logit_softcapping", scores)?;
    Ok([scores, keys.positive_or("final_logit_softcapping", logits)?])
}

/// The factor on scores where the file names none.
fn scale_of(scale: Scale, n_layers: usize, n_embd: usize, heads: KvLayerShape) -> f32 {
    let over_root = |dim: usize| 1.0 / (dim as f32).sqrt();
    match scale {
        Scale::WidthAt(n) if n == n_layers => over_root(n_embd / heads.n_heads),
        Scale::HeadSize | Scale::WidthAt(_) => over_root(heads.k_head_dim),
        Scale::None => 1.0,
    }
}

/// How many numbers of each token every layer is given.
pub(crate) const PER_LAYER: &str = "embedding_length_per_layer_input";
/// Reads `{arch}.key` values.
struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn has(&self, key: &str) -> bool {
        self.gguf.meta().value(&self.key(key)).is_some()
    }

    /// Whether some layer has a tensor of this name.
    fn has_tensor(&self, name: &str) -> bool {
        let is_it = |rest: &str| rest.split_once('.').is_some_and(|(_, rest)| rest == name);
        self.gguf.tensors().iter().any(|info| info.name.strip_prefix("blk.").is_some_and(is_it))
    }

    /// A size from 1 to 2³¹.
    fn size(&self, key: &str) -> Result<usize, ModelError> {
        let value: u32 = self.gguf.meta().get(&self.key(key))?;
        match value {
            1..=0x7fff_ffff => Ok(value as usize),
            _ => Err(self.bad(key, "a positive number", value)),
        }
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.has(key) { self.size(key) } else { Ok(default) }
    }

    /// A number for each layer, or one that stands for all.
    fn of_layers(&self, key: &str, n_layers: usize) -> Result<Vec<usize>, ModelError> {
        if !matches!(self.gguf.meta().value(&self.key(key)), Some(Value::Array(_))) {
            return Ok(vec![self.size(key)?; n_layers]);
        }
        let numbers: Vec<u32> = self.gguf.meta().get(&self.key(key))?;
        if numbers.len() < n_layers {
            return Err(self.bad(key, &format!("{n_layers} layers"), numbers.len()));
        }
        Ok(numbers.into_iter().take(n_layers).map(|n| n as usize).collect())
    }

    /// A size that files may say of each layer, and that is the same in all of these.
    fn size_of(&self, key: &str, layers: &[bool]) -> Result<usize, ModelError> {
        let all = self.of_layers(key, layers.len())?;
        let of_these: Vec<usize> =
            all.into_iter().zip(layers).filter(|(_, is)| **is).map(|(n, _)| n).collect();
        match of_these.iter().find(|&n| n != &of_these[0]) {
            None => match of_these.first().copied().unwrap_or(0) {
                n @ 1..=0x7fff_ffff => Ok(n),
                n => Err(self.bad(key, "a positive number", n)),
            },
            Some(other) => {
                Err(self.bad(key, "the same number in all layers", format!("{} and {other}", of_these[0])))
            }
        }
    }

    /// A number, 0 where the file has none.
    fn count(&self, key: &str) -> Result<usize, ModelError> {
        Ok(self.gguf.meta().find::<u32>(&self.key(key))?.unwrap_or(0) as usize)
    }

    fn float(&self, key: &str) -> Result<f32, ModelError> {
        let value: f32 = self.gguf.meta().get(&self.key(key))?;
        if value.is_finite() && value >= 0.0 {
            Ok(value)
        } else {
            Err(self.bad(key, "a finite number", value))
        }
    }

    fn float_or(&self, key: &str, default: f32) -> Result<f32, ModelError> {
        if self.has(key) { self.float(key) } else { Ok(default) }
    }

    /// A number above 0; `None` where the file has none, or 0, which stands for none.
    fn positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.positive_or(key, None)
    }

    fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.gguf.meta().find(&self.key(key))?.unwrap_or(default))
    }

    /// As [`Keys::positive`], but `default` where the file has none.
    fn positive_or(&self, key: &str, default: Option<f32>) -> Result<Option<f32>, ModelError> {
        if self.has(key) { Ok(Some(self.float(key)?).filter(|&x| x > 0.0)) } else { Ok(default) }
    }

    fn str_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str, ModelError> {
        Ok(self.gguf.meta().find(&self.key(key))?.unwrap_or(default))
    }

    fn refuse(&self, key: &str, feature: &str) -> Result<(), ModelError> {
        if self.count(key)? > 0 {
            return Err(ModelError::Unsupported { what: format!("{feature} ({})", self.key(key)) });
        }
        Ok(())
    }

    /// Refuses a number above 0.
    fn refuse_positive(&self, key: &str, feature: &str) -> Result<(), ModelError> {
        match self.positive(key)? {
            Some(_) => Err(ModelError::Unsupported { what: format!("{feature} ({})", self.key(key)) }),
            None => Ok(()),
        }
    }

    fn bad(&self, key: &str, expected: &str, got: impl std::fmt::Display) -> ModelError {
        ModelError::Value { key: self.key(key), expected: expected.to_owned(), got: got.to_string() }
    }
}
