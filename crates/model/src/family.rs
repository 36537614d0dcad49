//! The supported model families, one line of a table each.
//!
//! All families share one decoder and differ in data: the numbers are in the file, conventions
//! without a metadata key are here. Both yield a [`LayerSpec`](crate::LayerSpec) per layer, and no
//! other code depends on the family.

use kvant_backend::{Activation, Gate, KeySharing, Pairing, RouterScores};

use crate::ModelError;

mod table;

use table::FAMILIES;
pub(crate) use table::{DFLASH, EAGLE3, LLAMA};

/// Conventions of a family's layers, beyond the numbers in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Family {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// Pair order of RoPE.
    pub(crate) pairing: Pairing,
    /// Activation of the feed-forward layer.
    pub(crate) activation: Activation,
    /// Whether the feed-forward layer has no gate matrix: `a(W_up n) * (W_up n)`, with ReLU the
    /// squared ReLU, with the normal distribution function GELU.
    pub(crate) ungated: bool,
    /// Whether it has xIELU instead, with numbers in the file.
    pub(crate) xielu: bool,
    /// Whether it has SiTU instead, with limits in the file.
    pub(crate) situ: bool,
    /// Whether a layer has a single sublayer: a token mixer or a feed-forward layer (Nemotron-H).
    pub(crate) single_sublayer: bool,
    /// Whether a limit of SiLU is one of its input instead of its output.
    pub(crate) clamps_gates: bool,
    /// Positions of norms.
    pub(crate) norms: Norms,
    /// Norm of token embeddings.
    pub(crate) embedding_norm: EmbeddingNorm,
    /// Epsilon of post-norms; that of the file when `None`.
    pub(crate) after_eps: Option<f32>,
    /// Factors on the residual stream and the logits.
    pub(crate) factors: Factors,
    /// Which layers have a sliding window; `None` for full attention in all.
    pub(crate) windows: Option<Windows>,
    /// Which layers have no RoPE (NoPE).
    pub(crate) no_rope: NoRope,
    /// Default soft caps of attention scores and logits.
    pub(crate) soft_caps: [Option<f32>; 2],
    /// Recurrent layers; `None` for attention in all layers.
    pub(crate) recurrence: Option<RecurrentFamily>,
    /// Whether some layers attend; otherwise all are recurrent.
    pub(crate) attends: bool,
    /// Where the gates of the attention output are, a projection of the layer's input.
    pub(crate) gates: OutputGates,
    /// Whether attention is multi-head latent attention (MLA).
    pub(crate) mla: bool,
    /// Whether attention has one KV head whose keys are the values, and pooled keys (DeepSeek-V4).
    pub(crate) shared_kv: bool,
    /// Whether every sublayer reads and writes several residual streams (hyper-connections).
    pub(crate) connects_streams: bool,
    /// Whether every sublayer attends to residual streams of earlier layers.
    pub(crate) attends_streams: bool,
    /// Selection of the tokens that a query attends to (DeepSeek Sparse Attention).
    pub(crate) index: Option<IndexRule>,
    /// Tensor of the norm before the logits; `None` if what reads the residual streams normalizes.
    pub(crate) output_norm: Option<&'static str>,
    /// Which layers have an attention sink for each query head: a score without a value that joins
    /// its softmax.
    pub(crate) sinks: Sinks,
    /// Whether YaRN rounds the ends of its interpolation range to whole pairs.
    pub(crate) whole_pairs: bool,
    /// Defaults of MoE layers, if the file has experts; `None` for families without known MoE
    /// models.
    pub(crate) experts: Option<ExpertRule>,
    /// Default factor on attention scores.
    pub(crate) scale: Scale,
    /// Whether full-attention layers have V = K if none of them has a V tensor.
    pub(crate) values_of_keys: bool,
    /// Whether the MTP layers after the last layer have the form of the last attention layer.
    pub(crate) has_mtp: bool,
    /// Whether attention reads the token's embedding beside the residual stream, in draft heads.
    pub(crate) reads_tokens: bool,
}

/// Positions of a layer's norms: on queries and keys, and before and after its two sublayers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norms {
    /// Kind of norm on the residual stream.
    pub kind: NormKind,
    /// Tensor of the norm before the feed-forward layer.
    pub before_ffn: &'static str,
    /// Whether attention and the feed-forward layer are parallel: both read the same normalized
    /// input, and their outputs are added.
    pub shared: bool,
    /// Pre-norm: before attention and the feed-forward layer.
    pub before: bool,
    /// Post-norm: after them, before the addition to the residual stream.
    pub after: bool,
    /// QK-norm.
    pub heads: QkNorm,
    /// Norm of each V head, to a mean square of one.
    pub values: bool,
}

/// Kind of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm: divides by the root mean square.
    Rms,
    /// LayerNorm: subtracts the mean and divides by the standard deviation. A bias becomes part of
    /// the products behind it.
    Layer,
}

/// Norm of token embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EmbeddingNorm {
    /// None.
    None,
    /// To a mean square of one.
    Rms,
    /// LayerNorm, with weight and bias.
    Layer,
}

/// Kind of QK-norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Per head, before RoPE.
    Each,
    /// Per head, in models that have its weights.
    EachIfThere,
    /// Per head, after RoPE.
    QkNormAfterRope,
    /// Over all heads of a token.
    Together,
    /// Of the part with RoPE of MLA's shared key, before RoPE.
    SharedKey,
}

impl QkNorm {
    /// Returns the width of the norm's weight, for heads of `dim` in rows of `row` values.
    pub(crate) fn width(self, dim: usize, row: usize) -> Option<usize> {
        match self {
            Self::None | Self::SharedKey => None,
            Self::Each | Self::EachIfThere | Self::QkNormAfterRope => Some(dim),
            Self::Together => Some(row),
        }
    }
}

/// Factors besides the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factors {
    /// None.
    None,
    /// On embeddings: the root of the hidden size.
    Root,
    /// On embeddings, branches and logits: numbers in the file.
    Named,
    /// On logits: a number in the file, which is required.
    Logits,
}

/// Factor on attention scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// `1 / sqrt(head size)`.
    HeadSize,
    /// The same, except for the model with this many layers: `1 / sqrt(hidden size / query heads)`.
    /// No metadata key distinguishes them.
    WidthAt(usize),
    /// None.
    None,
}

/// Kind and choice of recurrent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecurrentFamily {
    /// Short convolutions, in layers without KV heads in the file.
    ShortConv,
    /// Gated delta rule.
    GatedDeltaNet {
        /// Which value heads share the keys of a key head.
        sharing: KeySharing,
        /// The gates of the output.
        gate: Gate,
    },
    /// Kimi's delta rule, in layers without KV heads in the file.
    KimiDelta {
        /// Whether files have the negatives of the rates of bounded decays.
        negates_bounded: bool,
    },
    /// WKV states of RWKV-7.
    Wkv7,
    /// Mamba-2 state spaces.
    Mamba2 {
        /// Whether every layer has a state space beside attention; otherwise layers without KV
        /// heads have one instead.
        is_beside: bool,
    },
}

/// Where the gates of the attention output are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputGates {
    /// There are none.
    None,
    /// In the query tensor: after each head's query rows as many gate rows.
    InQueries,
    /// In a tensor of their own, with a row for each value or for each head: functions of its
    /// products.
    Own(Gate),
}

/// How layers select the tokens that a query attends to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct IndexRule {
    /// Pair order of RoPE in the index.
    pub pairing: Pairing,
    /// Whether RoPE rotates the last values of a head instead of the first.
    pub rotates_last: bool,
    /// Epsilon of the LayerNorm of keys; that of the file when `None`.
    pub key_eps: Option<f32>,
    /// Whether layers may attend to the selection of the layer before.
    pub may_share: bool,
    /// Whether it selects blocks of tokens, for each KV head by itself (MiniMax Sparse Attention).
    pub of_blocks: bool,
    /// Whether it selects blocks by a pooled key of each, for all KV heads (Qwen4-Exp).
    pub pools_keys: bool,
}

/// Layers with attention sinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sinks {
    /// None.
    None,
    /// All.
    All,
    /// Those with a sliding window.
    Windowed,
}

/// Layers without RoPE (NoPE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRope {
    /// None.
    None,
    /// The last layer of each period.
    Every(usize),
    /// Full-attention layers, also if the file disables windows.
    Unwindowed,
    /// Those of them that have experts.
    UnwindowedExperts,
    /// Full-attention layers, in models with sliding-window layers.
    BesideWindows,
    /// All, if the file has the flag.
    FromFile,
    /// Those that the file's pattern names, if it has one.
    FromPattern,
}

/// Defaults of MoE layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertRule {
    /// Whether the weights of the selected experts are normalized to a sum of one.
    pub normalizes: bool,
    /// Score function of the router.
    pub scores: RouterScores,
    /// Whether a selection bias is added to softmax scores; otherwise a bias implies sigmoid
    /// scores.
    pub adds_to_softmax: bool,
    /// Kind of shared expert.
    pub shared: SharedExpert,
    /// Whether the sum of selected and shared experts is halved, where there are shared ones.
    pub averages: bool,
    /// Whether files leave the number of leading dense layers to their tensors.
    pub finds_leading: bool,
    /// Whether files without experts are rejected.
    pub is_required: bool,
}

/// Shared expert of a MoE layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedExpert {
    /// None.
    None,
    /// One expert with a gate on its output.
    Gated,
    /// Several experts side by side, as many as in the file, or none; ungated.
    Several,
    /// A dense feed-forward layer as in layers without experts. Its output, the experts' output and
    /// their sum are normalized.
    Beside,
}

/// Choice of sliding-window layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Windows {
    /// Default period, whose last layer has full attention; 0 for no full-attention layers.
    pub period: usize,
    /// Whether the first layer of each period has full attention instead.
    pub starts_full: bool,
    /// Whether full-attention layers rotate half as many values of a head as the file gives.
    pub halves_full: bool,
    /// Default window length in tokens; unlimited when `None`.
    pub length: Option<usize>,
    /// Default RoPE of sliding-window layers, if the file has no base for them.
    pub rope: WindowRope,
    /// Whether sliding-window layers have their own head size and rotate as many values as the file
    /// gives, while full-attention layers rotate as many as their frequency divisors
    /// (`rope_freqs.weight`) leave.
    pub own_heads: bool,
    /// Whether files list them as numbers instead of flags.
    pub are_numbers: bool,
}

/// RoPE of sliding-window layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum WindowRope {
    /// The same as other layers.
    Alike,
    /// The base of other layers, without their context extension.
    Unscaled,
    /// This base, without context extension.
    By(f32),
}

impl Family {
    /// Returns the family of this name.
    ///
    /// # Errors
    ///
    /// [`ModelError::Architecture`] with the most similar known name.
    pub(crate) fn named(name: &str) -> Result<&'static Self, ModelError> {
        let similarity = |family: &&Self| strsim::jaro_winkler(family.name, name);
        let nearest = FAMILIES.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
        match nearest {
            Some(family) if family.name == name => Ok(family),
            nearest => Err(ModelError::Architecture {
                got: name.to_owned(),
                nearest: nearest.map_or("none", |family| family.name),
                known: FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Returns whether recurrent states exist beside attention instead of replacing it.
    pub(crate) fn is_hybrid_layer(&self) -> bool {
        self.recurrence == Some(RecurrentFamily::Mamba2 { is_beside: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks conditions of the decoder: one normalized input that both sublayers share,
    /// `add_normed` for RMSNorm branches only, gates only beside a V matrix, and one buffer for
    /// gates.
    #[test]
    fn every_family_has_norms_that_the_decoder_supports() {
        for family in FAMILIES {
            let Norms { kind, shared, before, after, .. } = family.norms;
            let is_layer = kind == NormKind::Layer;
            assert!(!after || !is_layer && !shared, "{}", family.name);
            assert!(!shared || is_layer && before, "{}", family.name);
            let is_gated = family.gates != OutputGates::None;
            assert!(!family.values_of_keys || !is_gated, "{}", family.name);
            assert!(!family.single_sublayer || !after && !shared, "{}", family.name);
            assert!(!family.is_hybrid_layer() || !is_gated && !shared, "{}", family.name);
            assert!(!family.mla || matches!(family.norms.heads, QkNorm::None | QkNorm::SharedKey));
            assert!(family.mla || family.norms.heads != QkNorm::SharedKey, "{}", family.name);
        }
    }

    #[test]
    fn families_are_found_and_unknown_names_get_the_nearest() {
        for family in FAMILIES {
            assert_eq!(Family::named(family.name).unwrap(), family);
        }
        for (name, nearest) in [("gemma5", "gemma"), ("qwen35vl", "qwen35"), ("llama4", "llama"), ("", "")] {
            let error = Family::named(name).unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}'")) && error.contains(nearest), "{error}");
        }
    }
}
