//! The supported model families, one line of a table each.
//!
//! All families share one decoder and differ in data: the numbers are in the file, conventions
//! without a metadata key are here. Both yield a [`LayerSpec`](crate::LayerSpec) per layer, and no
//! other code depends on the family.

use kvant_backend::{Activation, KeySharing, Pairing, RouterScores};

use crate::ModelError;

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
    /// Whether a layer has a single sublayer: a token mixer or a feed-forward layer (Nemotron-H).
    pub(crate) single_sublayer: bool,
    /// Positions of norms.
    pub(crate) norms: Norms,
    /// Whether token embeddings are normalized, to a mean square of one.
    pub(crate) embedding_norm: bool,
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
    /// Where the gates of the attention output are, a projection of the layer's input.
    pub(crate) gates: OutputGates,
    /// Whether attention is multi-head latent attention (MLA).
    pub(crate) mla: bool,
    /// Selection of the tokens that a query attends to (DeepSeek Sparse Attention).
    pub(crate) index: Option<IndexRule>,
    /// Tensor of the norm before the logits.
    pub(crate) output_norm: &'static str,
    /// Whether each query head has an attention sink: a score without a value that joins its
    /// softmax.
    pub(crate) sinks: bool,
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
}

impl QkNorm {
    /// Returns the width of the norm's weight, for heads of `dim` in rows of `row` values.
    pub(crate) fn width(self, dim: usize, row: usize) -> Option<usize> {
        match self {
            Self::None => None,
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
    },
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
    /// In a tensor of their own.
    Own,
}

/// How layers select the tokens that a query attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexRule {
    /// Pair order of RoPE in the index.
    pub pairing: Pairing,
    /// Whether layers may attend to the selection of the layer before.
    pub may_share: bool,
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
    /// Default window length in tokens; unlimited when `None`.
    pub length: Option<usize>,
    /// Default RoPE of sliding-window layers, if the file has no base for them.
    pub rope: WindowRope,
    /// Whether sliding-window layers have their own head size and rotate as many values as the file
    /// gives, while full-attention layers rotate as many as their frequency divisors
    /// (`rope_freqs.weight`) leave.
    pub own_heads: bool,
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

/// A window in every layer, unless the file differs.
const WINDOWS: Windows = Windows { period: 0, length: None, rope: WindowRope::Alike, own_heads: false };

/// Name of the norm before the feed-forward layer in some files.
const AFTER_ATTENTION: &str = "post_attention_norm.weight";

pub(crate) const LLAMA: Family = Family {
    name: "llama",
    pairing: Pairing::Interleaved,
    activation: Activation::Silu,
    ungated: false,
    single_sublayer: false,
    norms: Norms {
        kind: NormKind::Rms,
        before_ffn: "ffn_norm.weight",
        shared: false,
        before: true,
        after: false,
        heads: QkNorm::None,
        values: false,
    },
    embedding_norm: false,
    after_eps: None,
    factors: Factors::None,
    windows: None,
    no_rope: NoRope::None,
    soft_caps: [None; 2],
    recurrence: None,
    gates: OutputGates::None,
    mla: false,
    index: None,
    output_norm: "output_norm.weight",
    sinks: false,
    whole_pairs: true,
    // Mixtral.
    experts: Some(ExpertRule { is_required: false, ..EXPERTS }),
    scale: Scale::HeadSize,
    values_of_keys: false,
    has_mtp: false,
    reads_tokens: false,
};

/// The layer of an EAGLE-3 draft head (arXiv 2503.01840), which is no model by itself.
pub(crate) static EAGLE3: Family = Family { name: "eagle3", experts: None, reads_tokens: true, ..LLAMA };

/// The layers of a DFlash draft head (arXiv 2602.06036), which is no model by itself.
pub(crate) static DFLASH: Family = Family { name: "dflash", windows: Some(WINDOWS), experts: None, ..QWEN3 };

/// The most common convention of MoE layers.
const EXPERTS: ExpertRule = ExpertRule {
    normalizes: true,
    scores: RouterScores::Softmax,
    adds_to_softmax: false,
    shared: SharedExpert::None,
    is_required: true,
};

/// The same with one shared expert, and with several.
const SHARING: ExpertRule = ExpertRule { shared: SharedExpert::Gated, ..EXPERTS };
const SEVERAL: ExpertRule = ExpertRule { shared: SharedExpert::Several, ..EXPERTS };

/// The same with sigmoid scores.
const BY_SIGMOID: ExpertRule = ExpertRule { scores: RouterScores::Sigmoid, ..EXPERTS };
const SEVERAL_BY_SIGMOID: ExpertRule = ExpertRule { scores: RouterScores::Sigmoid, ..SEVERAL };

const QWEN2: Family = Family { name: "qwen2", pairing: Pairing::Halves, experts: None, ..LLAMA };

const QWEN3: Family = Family { name: "qwen3", norms: Norms { heads: QkNorm::Each, ..QWEN2.norms }, ..QWEN2 };

const QWEN35: Family = Family {
    name: "qwen35",
    norms: Norms { before_ffn: AFTER_ATTENTION, ..QWEN3.norms },
    recurrence: Some(RecurrentFamily::GatedDeltaNet { sharing: KeySharing::Tiled }),
    gates: OutputGates::InQueries,
    has_mtp: true,
    ..QWEN3
};

const HUNYUAN: Family =
    Family { name: "hunyuan-dense", norms: Norms { heads: QkNorm::QkNormAfterRope, ..QWEN2.norms }, ..QWEN2 };

const GEMMA: Family = Family { name: "gemma", activation: Activation::Gelu, factors: Factors::Root, ..QWEN2 };

const LFM2: Family = Family {
    name: "lfm2",
    recurrence: Some(RecurrentFamily::ShortConv),
    output_norm: "token_embd_norm.weight",
    ..QWEN3
};

const NEMOTRON_H: Family = Family {
    name: "nemotron_h",
    activation: Activation::Relu,
    ungated: true,
    single_sublayer: true,
    norms: Norms { before_ffn: "attn_norm.weight", ..LLAMA.norms },
    recurrence: Some(RecurrentFamily::Mamba2 { is_beside: false }),
    no_rope: NoRope::Every(1),
    experts: None,
    ..LLAMA
};

/// LayerNorm instead of RMSNorm.
const ORION: Family =
    Family { name: "orion", norms: Norms { kind: NormKind::Layer, ..QWEN2.norms }, ..QWEN2 };

const STARCODER2: Family = Family {
    name: "starcoder2",
    activation: Activation::NormalCdf,
    ungated: true,
    windows: Some(WINDOWS),
    ..ORION
};

const NEMOTRON: Family = Family { name: "nemotron", activation: Activation::Relu, ungated: true, ..ORION };

const COMMAND_R: Family = Family {
    name: "command-r",
    norms: Norms { kind: NormKind::Layer, shared: true, ..LLAMA.norms },
    factors: Factors::Logits,
    experts: None,
    ..LLAMA
};

/// Every family; see `docs/adding-a-family.md`.
static FAMILIES: &[Family] = &[
    LLAMA,
    QWEN2,
    QWEN3,
    Family { name: "qwen2moe", experts: Some(ExpertRule { normalizes: false, ..SHARING }), ..QWEN2 },
    Family { name: "qwen3moe", experts: Some(EXPERTS), ..QWEN3 },
    QWEN35,
    Family { name: "qwen35moe", experts: Some(SHARING), ..QWEN35 },
    Family {
        name: "qwen3next",
        recurrence: Some(RecurrentFamily::GatedDeltaNet { sharing: KeySharing::Grouped }),
        experts: Some(SHARING),
        ..QWEN35
    },
    GEMMA,
    Family {
        name: "gemma2",
        norms: Norms { after: true, ..GEMMA.norms },
        windows: Some(Windows { period: 2, length: Some(4096), ..WINDOWS }),
        soft_caps: [Some(50.0), Some(30.0)],
        scale: Scale::WidthAt(46),
        ..GEMMA
    },
    Family {
        name: "gemma3",
        norms: Norms { after: true, heads: QkNorm::Each, ..GEMMA.norms },
        windows: Some(Windows { period: 6, rope: WindowRope::By(10_000.0), ..WINDOWS }),
        scale: Scale::WidthAt(62),
        ..GEMMA
    },
    Family {
        name: "gemma4",
        norms: Norms { after: true, heads: QkNorm::Each, values: true, ..GEMMA.norms },
        windows: Some(Windows { rope: WindowRope::By(10_000.0), own_heads: true, ..WINDOWS }),
        scale: Scale::None,
        values_of_keys: true,
        experts: Some(ExpertRule { shared: SharedExpert::Beside, is_required: false, ..EXPERTS }),
        ..GEMMA
    },
    Family { name: "glm4", norms: Norms { after: true, ..LLAMA.norms }, experts: None, ..LLAMA },
    Family { name: "granite", factors: Factors::Named, experts: None, ..LLAMA },
    Family { name: "smollm3", no_rope: NoRope::Every(4), experts: None, ..LLAMA },
    Family {
        name: "olmo2",
        norms: Norms { before: false, after: true, heads: QkNorm::Together, ..QWEN2.norms },
        // OLMo 3.
        windows: Some(Windows { period: 4, rope: WindowRope::Unscaled, ..WINDOWS }),
        ..QWEN2
    },
    Family { name: "mistral3", experts: None, ..LLAMA },
    Family {
        name: "cohere2",
        windows: Some(Windows { period: 4, length: Some(4096), ..WINDOWS }),
        no_rope: NoRope::Unwindowed,
        ..COMMAND_R
    },
    Family {
        name: "gpt-oss",
        activation: Activation::Bounded,
        norms: Norms { before_ffn: AFTER_ATTENTION, ..QWEN2.norms },
        windows: Some(Windows { period: 2, ..WINDOWS }),
        sinks: true,
        whole_pairs: false,
        experts: Some(EXPERTS),
        ..QWEN2
    },
    LFM2,
    Family { name: "lfm2moe", experts: Some(BY_SIGMOID), ..LFM2 },
    Family {
        name: "deepseek2",
        mla: true,
        has_mtp: true,
        experts: Some(ExpertRule { normalizes: false, is_required: false, ..SEVERAL }),
        ..LLAMA
    },
    // V3.2.
    Family {
        name: "deepseek32",
        mla: true,
        index: Some(IndexRule { pairing: Pairing::Halves, may_share: false }),
        experts: Some(ExpertRule { normalizes: false, is_required: false, ..SEVERAL }),
        ..LLAMA
    },
    // GLM-5.
    Family {
        name: "glm-dsa",
        mla: true,
        index: Some(IndexRule { pairing: Pairing::Interleaved, may_share: true }),
        experts: Some(ExpertRule { normalizes: false, is_required: false, ..SEVERAL_BY_SIGMOID }),
        ..LLAMA
    },
    Family { name: "phi3", windows: Some(WINDOWS), ..QWEN2 },
    // Language models of vision models: text tokens have the same M-RoPE position on all axes.
    Family { name: "qwen2vl", ..QWEN2 },
    Family { name: "qwen3vl", ..QWEN3 },
    Family { name: "qwen3vlmoe", experts: Some(EXPERTS), ..QWEN3 },
    Family { name: "seed_oss", norms: Norms { before_ffn: AFTER_ATTENTION, ..QWEN2.norms }, ..QWEN2 },
    // GLM-4.5 and later.
    Family {
        name: "glm4moe",
        norms: Norms { before_ffn: AFTER_ATTENTION, heads: QkNorm::EachIfThere, ..QWEN2.norms },
        experts: Some(SEVERAL_BY_SIGMOID),
        has_mtp: true,
        ..QWEN2
    },
    Family { name: "dots1", experts: Some(SEVERAL_BY_SIGMOID), ..QWEN3 },
    // Ling and Ring 2.0.
    Family { name: "bailingmoe2", experts: Some(SEVERAL_BY_SIGMOID), ..QWEN3 },
    Family { name: "ernie4_5", experts: None, ..LLAMA },
    Family { name: "ernie4_5-moe", experts: Some(ExpertRule { adds_to_softmax: true, ..SEVERAL }), ..LLAMA },
    HUNYUAN,
    Family { name: "hunyuan-moe", experts: Some(SEVERAL), ..HUNYUAN },
    Family { name: "arcee", activation: Activation::Relu, ungated: true, experts: None, ..LLAMA },
    Family {
        name: "exaone4",
        norms: Norms { before: false, after: true, ..QWEN3.norms },
        windows: Some(Windows { period: 4, ..WINDOWS }),
        no_rope: NoRope::BesideWindows,
        ..QWEN3
    },
    Family {
        name: "olmoe",
        norms: Norms { heads: QkNorm::Together, ..QWEN2.norms },
        experts: Some(ExpertRule { normalizes: false, ..EXPERTS }),
        ..QWEN2
    },
    Family {
        name: "minimax-m2",
        norms: Norms { heads: QkNorm::Together, ..QWEN2.norms },
        experts: Some(BY_SIGMOID),
        ..QWEN2
    },
    Family { name: "granitemoe", factors: Factors::Named, experts: Some(SEVERAL), ..LLAMA },
    Family {
        name: "granitehybrid",
        factors: Factors::Named,
        recurrence: Some(RecurrentFamily::Mamba2 { is_beside: false }),
        no_rope: NoRope::FromFile,
        experts: Some(ExpertRule { is_required: false, ..SEVERAL }),
        ..LLAMA
    },
    Family {
        name: "granite_swa",
        factors: Factors::Named,
        windows: Some(WINDOWS),
        no_rope: NoRope::FromPattern,
        sinks: true,
        experts: Some(ExpertRule { is_required: false, ..SEVERAL }),
        ..LLAMA
    },
    COMMAND_R,
    Family {
        name: "falcon-h1",
        norms: Norms { before_ffn: "ffn_norm", ..QWEN2.norms },
        recurrence: Some(RecurrentFamily::Mamba2 { is_beside: true }),
        ..QWEN2
    },
    ORION,
    Family { name: "stablelm", ..ORION },
    STARCODER2,
    Family { name: "phi2", norms: Norms { shared: true, ..ORION.norms }, windows: None, ..STARCODER2 },
    // Minitron.
    NEMOTRON,
    Family { name: "jais2", ..NEMOTRON },
    Family { name: "internlm2", experts: None, ..LLAMA },
    Family { name: "xverse", experts: None, ..LLAMA },
    // GLM-4 and GLM-Edge.
    Family { name: "chatglm", experts: None, ..LLAMA },
    // EXAONE 3 and 3.5.
    Family { name: "exaone", ..QWEN2 },
    Family { name: "pangu-embedded", ..QWEN2 },
    // K-EXAONE.
    Family {
        name: "exaone-moe",
        windows: Some(Windows { period: 4, length: Some(128), ..WINDOWS }),
        no_rope: NoRope::BesideWindows,
        experts: Some(SEVERAL_BY_SIGMOID),
        ..QWEN3
    },
    // Trinity.
    Family {
        name: "afmoe",
        norms: Norms { after: true, ..QWEN3.norms },
        factors: Factors::Root,
        windows: Some(Windows { period: 4, ..WINDOWS }),
        no_rope: NoRope::Unwindowed,
        gates: OutputGates::Own,
        experts: Some(SEVERAL_BY_SIGMOID),
        ..QWEN3
    },
    Family {
        name: "muse-glimmer",
        norms: Norms { after: true, heads: QkNorm::Each, ..LLAMA.norms },
        embedding_norm: true,
        after_eps: Some(1e-8),
        factors: Factors::Logits,
        windows: Some(Windows { period: 4, ..WINDOWS }),
        no_rope: NoRope::Unwindowed,
        gates: OutputGates::Own,
        experts: None,
        ..LLAMA
    },
    Family {
        name: "mellum",
        windows: Some(Windows { period: 4, rope: WindowRope::Unscaled, ..WINDOWS }),
        experts: Some(EXPERTS),
        ..QWEN3
    },
    // Hunyuan 3.
    Family { name: "hy_v3", experts: Some(SEVERAL_BY_SIGMOID), has_mtp: true, ..QWEN3 },
    NEMOTRON_H,
    Family { name: "nemotron_h_moe", experts: Some(SEVERAL_BY_SIGMOID), ..NEMOTRON_H },
];

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
            assert!(!shared || is_layer && before && family.experts.is_none(), "{}", family.name);
            let is_gated = family.gates != OutputGates::None;
            assert!(!family.values_of_keys || !is_gated, "{}", family.name);
            assert!(!family.single_sublayer || !after && !shared, "{}", family.name);
            assert!(!family.is_hybrid_layer() || !is_gated && !shared, "{}", family.name);
            assert!(family.norms.heads != QkNorm::QkNormAfterRope || !family.mla, "{}", family.name);
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
