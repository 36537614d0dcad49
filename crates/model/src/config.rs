//! Hyper-parameters of a model, read from the metadata of its GGUF file.

use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{Activation, AttendParams, Heads, Routing, TokenPool, Xielu};
use kvant_gguf::Gguf;
use kvant_kv::{KvLayerShape, KvShape, WeightStatistics};

mod experts;
mod heads;
mod index;
mod keys;
mod loops;
mod mla;
mod ngrams;
mod recurrence;
mod ropes;
mod shared_kv;
mod streams;
mod xielu;

pub(crate) use experts::SELECTION_BIAS;
pub use heads::OutputGate;
pub use index::{BlockKeys, TokenBlocks, TokenIndex};
pub(crate) use keys::Keys;
pub use loops::Loops;
pub use mla::Latent;
pub use ngrams::Ngrams;
pub use recurrence::{DecayBound, RecurrentMixer, StateKind};
pub(crate) use ropes::DIVISORS;
pub use shared_kv::{PooledIndexSpec, PooledKeySpec, SharedKv};
pub use streams::ResidualStreams;

use crate::ModelError;
use crate::SharedExpert;
use crate::draft_head::DraftHeadConfig;
use crate::encoder::EncoderConfig;
use crate::family::{Factors, Family, NoRope, NormKind, Norms, QkNorm, Scale, Sinks};
use crate::rope::Rope;

/// Hyper-parameters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The family, whose conventions apply.
    pub family: &'static Family,
    /// Hidden size: width of the residual stream.
    pub n_embd: usize,
    /// The decoder layers, in order, over all runs.
    pub layers: Vec<LayerSpec>,
    /// How often the layers of the file run.
    pub loops: Loops,
    /// Number of multi-token prediction (MTP) layers after them in the file (DeepSeek-V3, arXiv
    /// 2412.19437).
    pub n_mtp: usize,
    /// The first MTP layer, if supported: predicts token i + 2 from the hidden state of token i and
    /// the embedding of token i + 1.
    pub mtp: Option<LayerSpec>,
    /// Epsilon of every other norm, added to the mean square.
    pub norm_eps: f32,
    /// Epsilon of post-norms.
    pub after_eps: f32,
    /// Kind of the final norm, before the logits.
    pub output_norm: NormKind,
    /// Training context length.
    pub n_ctx_train: usize,
    /// Rotary embeddings that the layers refer to.
    pub ropes: Vec<Rope>,
    /// Factor on the token embeddings.
    pub embedding_scale: f32,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Soft cap of the logits, applied after that factor.
    pub logit_soft_cap: Option<f32>,
    /// Width of the per-layer embeddings, if the model has them (Gemma 3n and 4).
    pub per_layer_embedding_size: Option<usize>,
    /// The residual streams.
    pub streams: ResidualStreams,
    /// Embeddings of n-grams, if the model has them.
    pub ngrams: Option<Ngrams>,
    /// Statistics of the layers' K and V, once [computed from the
    /// weights](Self::weight_statistics).
    pub statistics: Option<Arc<WeightStatistics>>,
}

/// Specification of a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// Attention heads and attention window.
    pub heads: KvLayerShape,
    /// Where the K and V that its queries attend to are stored.
    pub state: LayerState,
    /// Recurrent token mixer with a state of fixed size, instead of attention or beside it.
    pub recurrence: Option<RecurrentMixer>,
    /// Heads of RWKV-7, which has states of its token mixer and of its feed-forward layer.
    pub wkv: Option<Heads>,
    /// Width of the dense feed-forward layer; in a MoE layer, of the shared expert; 0 if absent.
    pub n_ff: usize,
    /// The experts of a MoE layer.
    pub experts: Option<ExpertSpec>,
    /// Index into [`Config::ropes`] for its keys.
    pub rope: usize,
    /// Index for its queries: usually the same. In MLA another one has no rotation, and multiplies
    /// queries in the latent space.
    pub q_rope: usize,
    /// Factor on the attention scores.
    pub scale: f32,
    /// Soft cap of the attention scores.
    pub soft_cap: Option<f32>,
    /// Head sizes of multi-head latent attention (MLA) as the model defines them; [its
    /// heads](Self::heads) are then those of the absorbed form, which the cache stores.
    pub latent: Option<Latent>,
    /// Sizes of attention with one KV head whose keys are the values.
    pub shared_kv: Option<SharedKv>,
    /// Selection of the tokens that a query attends to, or of pooled keys; all of them when
    /// `None`.
    pub index: Option<TokenIndex>,
    /// Values of the state of n-grams that are added to the residual streams before the layer; 0
    /// where none are.
    pub ngram_state: usize,
    /// Whether V is the key projection, before norms and RoPE (V = K).
    pub values_of_keys: bool,
    /// Whether each query head has an attention sink.
    pub sinks: bool,
    /// Factor on values, applied to the attention output.
    pub value_scale: Option<f32>,
    /// The gates that multiply the attention output.
    pub gate: Option<OutputGate>,
    /// Activation of the feed-forward layer; in a MoE layer, of the shared expert.
    pub activation: Activation,
    /// Numbers of xIELU, if the feed-forward layer has it instead.
    pub xielu: Option<Xielu>,
    /// Standard deviations by which a gate must exceed the mean of its row, if the feed-forward
    /// layer is sparse.
    pub sparsity: Option<f32>,
    /// Whether the feed-forward layer has no gate matrix: `a(W_up n) * (W_up n)`.
    pub gates_itself: bool,
    /// Positions of its norms.
    pub norms: Norms,
}

/// The experts of a MoE layer, of which the router selects a few per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertSpec {
    /// Number of experts.
    pub n: usize,
    /// Intermediate size of each expert.
    pub n_ff: usize,
    /// Activation of each expert.
    pub activation: Activation,
    /// Routing: how the router selects experts and weights them.
    pub routing: Routing,
    /// The shared expert.
    pub shared: SharedExpert,
    /// Factor on its output.
    pub shared_scale: Option<f32>,
    /// Width to which tokens are projected before the experts; the weighted sum of the experts is
    /// projected back. `None` if experts read the hidden state directly.
    pub latent: Option<usize>,
    /// Whether a table gives the experts of a token, and the router their weights alone.
    pub has_table: bool,
}

/// Where the K and V of a layer are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LayerState {
    /// The layer has its own K and V.
    Own,
    /// The layer reads K and V of this earlier layer, which has the same KV heads.
    Shared(usize),
    /// The layer has no attention.
    Nothing,
}

impl LayerSpec {
    /// Returns the parameters of the attention op.
    pub fn attend_params(&self) -> AttendParams {
        let KvLayerShape { n_heads, n_kv_heads, k_head_dim, v_head_dim, .. } = self.heads;
        let (scale, soft_cap) = (self.scale, self.soft_cap);
        AttendParams { n_heads, n_kv_heads, k_head_dim, v_head_dim, scale, soft_cap }
    }

    /// Returns whether the layer has attention.
    pub fn attends(&self) -> bool {
        self.state != LayerState::Nothing
    }

    /// Returns whether the layer has recurrent states.
    pub fn is_recurrent(&self) -> bool {
        self.states().next().is_some()
    }

    /// Returns the pooled keys that queries attend to, whose unfinished pools are states.
    pub fn pooled_keys(&self) -> Option<PooledKeySpec> {
        self.shared_kv.and_then(|of| of.keys)
    }

    /// Returns how tokens become the keys of its index, if these are pooled.
    pub fn index_pool(&self) -> Option<TokenPool> {
        let of_pooled = self.pooled_keys().and_then(|keys| keys.index).map(|index| index.pool);
        of_pooled.or_else(|| self.index?.pool())
    }

    /// Returns the f32 values of each recurrent state, in order of use.
    pub fn states(&self) -> impl Iterator<Item = usize> {
        let of_mixer = self.recurrence.into_iter().flat_map(RecurrentMixer::states);
        // The row before, of both sublayers, and the heads between them.
        let of_wkv = |Heads { n, dim }: Heads| [n * dim, n * dim * dim, n * dim];
        let of_pools = self.pooled_keys().into_iter().flat_map(|keys| keys.states());
        let of_index = self.index.and_then(|index| index.pool()).map(|pool| pool.n_state());
        let of_ngrams = Some(self.ngram_state).filter(|&n| n > 0);
        of_mixer.chain(self.wkv.into_iter().flat_map(of_wkv)).chain(of_pools).chain(of_index).chain(of_ngrams)
    }

    /// Returns the values of all queries of a token.
    pub fn n_q(&self) -> usize {
        self.heads.n_heads * self.heads.k_head_dim
    }

    /// Returns the values of all keys of a token.
    pub fn n_k(&self) -> usize {
        self.heads.n_kv_heads * self.heads.k_head_dim
    }

    /// Returns the values of all V heads of a token.
    pub fn n_v(&self) -> usize {
        self.heads.n_kv_heads * self.heads.v_head_dim
    }

    /// Returns the values of the attention output of a token.
    pub fn n_out(&self) -> usize {
        self.heads.n_heads * self.heads.v_head_dim
    }

    /// Returns whether the experts' input is stored: attention shares its own with them, or no
    /// product takes a LayerNorm.
    pub(crate) fn stores_norm(&self) -> bool {
        self.norms.shared || self.norms.kind == NormKind::Layer
    }

    /// Returns the gates of the attention output of a token.
    pub fn n_gates(&self) -> usize {
        match self.gate {
            Some(gate) if gate.is_per_head => self.heads.n_heads,
            // Those of MLA multiply values of the model's size.
            Some(_) => self.latent.map_or(self.n_out(), |latent| self.heads.n_heads * latent.v_dim),
            None => 0,
        }
    }
}

impl Config {
    /// Reads and checks the hyper-parameters.
    ///
    /// # Errors
    ///
    /// An unknown architecture, a missing or invalid value (the key is named), or a feature that is
    /// not implemented.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let arch = gguf.meta().get::<&str>("general.architecture")?;
        if gguf.meta().find("general.type").is_ok_and(|kind: Option<&str>| kind == Some("adapter")) {
            return Err(ModelError::Adapter);
        }
        if arch == "clip" {
            return Err(ModelError::Encoder);
        }
        if EncoderConfig::is_encoder(gguf) {
            return Err(ModelError::TextEncoder { arch: arch.to_owned() });
        }
        if DraftHeadConfig::is_head(gguf) {
            return Err(ModelError::DraftHead { arch: arch.to_owned() });
        }
        let family = Family::named(arch)?;
        let keys = Keys { gguf, arch };
        refuse_embedding_models(&keys)?;
        refuse_alibi(&keys, family)?;
        Self::of_family(gguf, family)
    }

    /// Reads the hyper-parameters of a file of this family.
    pub(crate) fn of_family(gguf: &Gguf, family: &'static Family) -> Result<Self, ModelError> {
        let keys = Keys { gguf, arch: family.name };
        let n_embd = keys.size("embedding_length")?;
        let n_ctx_train = keys.size("context_length")?;
        let (n_layers, n_mtp) = read_layers(&keys)?;
        let n_kv_heads = heads::read_kv_heads(&keys, family, n_layers)?;
        let experts = experts::read(&keys, family, n_embd, n_layers)?;
        let is_other_half = |index: usize| family.single_sublayer && experts.has(index);
        let without_heads = n_kv_heads.iter().map(|&n| n == 0).collect();
        let recurrences = recurrence::read(&keys, family, n_embd, without_heads)?;
        let windows = heads::read_windows(&keys, family, n_layers)?;
        let (mut heads, latents): (Vec<_>, Vec<_>) = match family.mla {
            true => mla::read(&keys, &windows)?.into_iter().map(|mla| (mla.heads, Some(mla.latent))).unzip(),
            false => (heads::read(&keys, family, n_embd, &n_kv_heads, &windows)?, vec![None; n_layers]),
        };
        let shared_kv = match family.shared_kv {
            true => Some(shared_kv::read(&keys, family, &mut heads, n_ctx_train)?),
            false => None,
        };
        // All layers rotate as many values, and have query projections of one rank.
        let is_recurrent = |i: usize| recurrences.has(i) && !family.is_hybrid_layer();
        let mut indexes = index::read(&keys, family, latents[0], &heads, &windows)?;
        (0..n_layers).filter(|&i| is_recurrent(i)).for_each(|i| indexes[i] = None);
        for (heads, index) in heads.iter_mut().zip(&indexes).filter(|_| shared_kv.is_none()) {
            heads.index = index.filter(|index| index.selects).map(|index| index.dim);
            heads.pool = index.and_then(|index| index.key_pool());
        }
        heads::check(&keys, (0..n_layers).filter(|&i| !is_recurrent(i)).map(|i| heads[i]))?;
        let states = heads::read_states(&keys, family, &heads, &windows)?;
        let latent_kinds = windows.of_kinds(&latents);
        let rope_dims = match latents[0] {
            Some(latent) => [latent.n_rot; 2],
            None => windows.of_kinds(&heads).map(|heads| heads.k_head_dim),
        };
        let mut ropes = match &shared_kv {
            Some(shared) => ropes::Ropes::given(shared.ropes.clone()),
            None => ropes::read(&keys, family, rope_dims, latent_kinds, n_ctx_train)?,
        };
        index::add_ropes(&mut indexes, &mut ropes);
        let streams = streams::read(&keys, family, n_layers)?;
        let ngrams = ngrams::read(&keys, streams, n_layers)?;
        let scales = match family.mla {
            true => {
                latents.iter().flatten().map(|&latent| mla::read_scale(&keys, latent).map(Some)).collect()
            }
            false => keys.positive("attention.scale").map(|scale| vec![scale; n_layers]),
        }?;
        let [soft_cap, logit_soft_cap] = read_soft_caps(&keys, family)?;
        let value_scale = keys.positive("attention.value_scale")?;
        let norms = read_norms(&keys, family);
        let values_of_keys = heads::are_values_of_keys(&keys, family, &windows);
        let uses_rope = keys.flag_or("rope.scaling.finetuned", true)?;
        let rope_pattern = ropes::read_pattern(&keys, family, n_layers)?;
        let xielu = xielu::read(&keys, family, n_layers)?;
        let sparsity = streams::read_sparsity(&keys, family, n_layers)?;
        let layer = |index: usize| {
            let (heads, is_windowed) = (heads[index], windows.layers[index]);
            let has_no_rope = match family.no_rope {
                NoRope::None => false,
                NoRope::Every(period) => (index + 1).is_multiple_of(period),
                NoRope::Unwindowed => !is_windowed,
                NoRope::UnwindowedExperts => !is_windowed && experts.of_layer(index).is_some(),
                NoRope::BesideWindows => !is_windowed && windows.length.is_some(),
                NoRope::FromFile => !uses_rope,
                NoRope::FromPattern => !rope_pattern[index],
            };
            let shared_kv = shared_kv.as_ref().map(|shared| shared.layers[index]);
            let rope = match heads.window {
                _ if shared_kv.is_some() => shared_kv.map_or(0, |of| of.rope),
                _ if has_no_rope => ropes.no_rope,
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
                wkv: recurrences.wkv(),
                n_ff: experts.n_ff(index),
                experts: experts.of_layer(index),
                rope,
                q_rope: rope + ropes.query_offset,
                scale: scales[index].unwrap_or_else(|| scale_of(family.scale, n_layers, n_embd, heads)),
                soft_cap,
                latent: latents[index],
                shared_kv: shared_kv.map(|of| of.sizes),
                index: shared_kv.map_or(indexes[index], |of| of.index),
                ngram_state: match &ngrams {
                    Some(ngrams) if ngrams.layer == index => ngrams.n_state(streams.n() * n_embd),
                    _ => 0,
                },
                values_of_keys: values_of_keys && !is_windowed,
                sinks: match family.sinks {
                    Sinks::None => false,
                    Sinks::All => true,
                    Sinks::Windowed => is_windowed,
                },
                value_scale,
                gate: heads::read_gate(&keys, family, index, heads).filter(|_| !is_recurrent(index)),
                activation: experts.shared_activation(index),
                xielu: xielu.as_ref().map(|layers| layers[index]),
                sparsity: sparsity[index],
                gates_itself: family.ungated,
                norms,
            }
        };
        let norm_eps = keys.float(match norms.kind {
            // Files of Phi-3.5-MoE have that name beside LayerNorms.
            NormKind::Layer if keys.has(LAYER_EPS) || !keys.has(RMS_EPS) => LAYER_EPS,
            _ => RMS_EPS,
        })?;
        let mut layers = (0..n_layers).map(layer).collect();
        let loops = loops::read(&keys, &mut layers)?;
        let mut config = Self {
            family,
            n_embd,
            n_mtp,
            mtp: None,
            layers,
            loops,
            norm_eps,
            after_eps: family.after_eps.unwrap_or(norm_eps),
            output_norm: norms.kind,
            n_ctx_train,
            ropes: ropes.all,
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap,
            per_layer_embedding_size: Some(keys.count(PER_LAYER)?).filter(|&n| n > 0 && ngrams.is_none()),
            streams,
            ngrams,
            statistics: None,
        };
        config.read_factors(&keys)?;
        config.mtp = config.find_mtp(gguf);
        Ok(config)
    }

    /// Returns the hyper-parameters of an encoder as far as a decoder has them: without layers, as
    /// it caches nothing.
    pub fn of_encoder(encoder: &EncoderConfig) -> Self {
        Self {
            family: encoder.decoder_family(),
            n_embd: encoder.n_embd,
            layers: Vec::new(),
            loops: Loops::once(0),
            n_mtp: 0,
            mtp: None,
            norm_eps: encoder.eps,
            after_eps: encoder.eps,
            output_norm: encoder.norm(),
            n_ctx_train: encoder.max_tokens,
            ropes: Vec::new(),
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap: None,
            per_layer_embedding_size: None,
            streams: ResidualStreams::One,
            ngrams: None,
            statistics: None,
        }
    }

    /// Returns the MTP layer after the last decoder layer, if the file has a supported one.
    fn find_mtp(&self, gguf: &Gguf) -> Option<LayerSpec> {
        let entry = format!("blk.{}.{EH_PROJ}", self.layers.len());
        if !self.family.has_mtp || self.n_mtp == 0 || gguf.find_info(&entry).is_none() {
            return None;
        }
        self.layers.iter().rfind(|layer| layer.attends()).copied()
    }

    /// Returns the shape of the [MTP layer](Self::mtp) as a model of its own.
    pub fn of_mtp(&self) -> Option<Self> {
        let layers = vec![self.mtp?];
        Some(Self {
            layers,
            loops: Loops::once(1),
            n_mtp: 0,
            mtp: None,
            per_layer_embedding_size: None,
            ..self.clone()
        })
    }

    fn read_factors(&mut self, keys: &Keys) -> Result<(), ModelError> {
        match self.family.factors {
            Factors::None => {}
            Factors::Root => self.embedding_scale = (self.n_embd as f32).sqrt(),
            Factors::Named => {
                let factor = |key| Ok::<_, ModelError>(keys.positive(key)?.unwrap_or(1.0));
                let (embedding, branch) = (factor("embedding_scale")?, factor("residual_scale")?);
                // A residual stream x with scaled branches, x + r f(norm(x)), equals r times the
                // stream x / r + f(norm(x)): norms cancel the factor, except for their epsilon.
                self.embedding_scale = embedding / branch;
                self.norm_eps /= branch * branch;
                self.after_eps /= branch * branch;
                self.logit_scale = 1.0 / factor("logit_scale")?;
            }
            // A value of 0 means no factor.
            Factors::Logits => {
                self.logit_scale = Some(keys.float("logit_scale")?).filter(|&x| x > 0.0).unwrap_or(1.0);
            }
        }
        Ok(())
    }

    /// Returns the width of attention's input: the residual stream, or a token's embedding and the
    /// residual stream.
    pub(crate) fn n_attention_in(&self) -> usize {
        if self.family.reads_tokens { 2 * self.n_embd } else { self.n_embd }
    }

    /// Returns the longest context with the short RoPE frequencies (LongRoPE); `None` if all
    /// contexts have the same frequencies.
    pub fn n_ctx_short(&self) -> Option<usize> {
        self.ropes.iter().find_map(Rope::n_ctx_short)
    }

    /// Returns whether a context of `n_ctx` tokens uses the long RoPE frequencies, which give other
    /// logits than the short ones.
    pub fn uses_long_rope(&self, n_ctx: usize) -> bool {
        self.n_ctx_short().is_some_and(|short| n_ctx > short)
    }

    /// Returns the KV heads, as the cache stores them.
    pub fn kv_shape(&self) -> KvShape {
        KvShape { statistics: self.statistics.clone(), ..self.kv_shape_of(0..self.layers.len()) }
    }

    /// Returns the index of the K and V that layer `index` reads, among those stored by layers from
    /// `first` on; `None` if an earlier layer stores them or the layer has no attention.
    pub fn kv_ordinal(&self, first: usize, index: usize) -> Option<usize> {
        let owner = match self.layers[index].state {
            LayerState::Own => index,
            LayerState::Shared(owner) => owner,
            LayerState::Nothing => return None,
        };
        let before = self.layers.get(first..owner)?;
        Some(before.iter().filter(|layer| layer.state == LayerState::Own).count())
    }

    /// Returns the index of the first state of recurrent layer `index` among the states of layers
    /// from `first` on; `None` for other layers.
    pub fn state_ordinal(&self, first: usize, index: usize) -> Option<usize> {
        let before = self.layers.get(first..index)?.iter();
        let n_before = before.map(|layer| layer.states().count()).sum();
        self.layers[index].is_recurrent().then_some(n_before)
    }

    /// Returns the cache shape of a range of layers.
    ///
    /// # Panics
    ///
    /// When the model has no such layers.
    pub fn kv_shape_of(&self, layers: Range<usize>) -> KvShape {
        let layers = &self.layers[layers];
        let own = layers.iter().filter(|layer| layer.state == LayerState::Own);
        let states = layers.iter().flat_map(LayerSpec::states);
        KvShape { layers: own.map(|layer| layer.heads).collect(), states: states.collect(), statistics: None }
    }
}

/// Rejects Baichuan of 13B, which has ALiBi instead of RoPE: its files tell it by the number of
/// layers alone.
fn refuse_alibi(keys: &Keys, family: &Family) -> Result<(), ModelError> {
    const LAYERS_OF_13B: usize = 40;
    if family.name != "baichuan" || keys.count("block_count")? != LAYERS_OF_13B {
        return Ok(());
    }
    let what = format!("ALiBi, the positions of Baichuan of 13B ({LAYERS_OF_13B} layers)");
    Err(ModelError::Unsupported { what })
}

/// Rejects a model with bidirectional attention: it is an embedding model and generates no text.
fn refuse_embedding_models(keys: &Keys) -> Result<(), ModelError> {
    const CAUSAL: &str = "attention.causal";
    if keys.flag_or(CAUSAL, true)? {
        return Ok(());
    }
    let what = format!("an embedding model with bidirectional attention ({} is false)", keys.key(CAUSAL));
    Err(ModelError::Unsupported { what })
}

/// Tensor that projects a token's embedding and the previous token's hidden state to one row.
pub(crate) const EH_PROJ: &str = "nextn.eh_proj.weight";

/// Reads the number of decoder layers, and of MTP layers after them.
fn read_layers(keys: &Keys) -> Result<(usize, usize), ModelError> {
    const COUNT: &str = "block_count";
    const PREDICTING: &str = "nextn_predict_layers";
    let (n, n_tensors) = (keys.size(COUNT)?, keys.gguf.tensors().len());
    // Each layer has tensors, so a number beyond them is rejected before any allocation per layer.
    if n > n_tensors {
        return Err(keys.bad(COUNT, &format!("at most one layer for each of {n_tensors} tensors"), n));
    }
    let n_mtp = keys.count(PREDICTING)?;
    if n_mtp >= n {
        return Err(keys.bad(PREDICTING, &format!("fewer than the {n} layers"), n_mtp));
    }
    Ok((n - n_mtp, n_mtp))
}

const RMS_EPS: &str = "attention.layer_norm_rms_epsilon";
const LAYER_EPS: &str = "attention.layer_norm_epsilon";
/// Families whose files have RMSNorms if they have the epsilon of these, else LayerNorms.
const EITHER_NORM: [&str; 1] = ["cohere2moe"];

/// Returns the norms of the family, without those that the file lacks.
fn read_norms(keys: &Keys, family: &Family) -> Norms {
    let is_rms = EITHER_NORM.contains(&family.name) && keys.has(RMS_EPS);
    let kind = if is_rms { NormKind::Rms } else { family.norms.kind };
    let heads = match family.norms.heads {
        QkNorm::EachIfThere if !keys.has_tensor("attn_q_norm.weight") => QkNorm::None,
        heads => heads,
    };
    Norms { kind, heads, ..family.norms }
}

/// Reads the soft caps of attention scores and logits.
fn read_soft_caps(keys: &Keys, family: &Family) -> Result<[Option<f32>; 2], ModelError> {
    let [scores, logits] = family.soft_caps;
    let scores = keys.positive_or("attn_logit_softcapping", scores)?;
    Ok([scores, keys.positive_or("final_logit_softcapping", logits)?])
}

/// Returns the factor on attention scores, unless the file has one.
fn scale_of(scale: Scale, n_layers: usize, n_embd: usize, heads: KvLayerShape) -> f32 {
    let over_root = |dim: usize| 1.0 / (dim as f32).sqrt();
    match scale {
        Scale::WidthAt(n) if n == n_layers => over_root(n_embd / heads.n_heads),
        Scale::HeadSize | Scale::WidthAt(_) => over_root(heads.k_head_dim),
        Scale::None => 1.0,
    }
}

/// Key of the width of the per-layer embeddings.
pub(crate) const PER_LAYER: &str = "embedding_length_per_layer_input";
