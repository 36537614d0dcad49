//! The supported families, one table row each.
//!
//! Most properties of a family are under the same configuration keys for all. This table holds the
//! differences.

mod gemma;
mod hybrids;
mod layer_norms;
mod routed;
mod selecting;
mod shared_kv;
mod windowed_latent;

use gemma::{GEMMA, GEMMA3, GEMMA3N, GEMMA4};
use hybrids::{
    GRANITE_EXPERTS, GRANITE4, KIMI_K3, KIMI_LINEAR, LING3, MAMBA2, NEMOTRON, QWEN3_NEXT_TENSORS, QWEN4_EXP,
    QWEN35, QWEN35_MOE,
};
use layer_norms::{JAIS2, NEMOTRON4, PHI_MOE, PHI2, STABLELM, STARCODER2};
use routed::{AFMOE, COHERE2_MOE, EXAONE_MOE, HY_V3, LAGUNA, MELLUM, MINIMAX_M3, MISTRAL4, STEP35};
use selecting::{DEEPSEEK, DEEPSEEK3, DEEPSEEK32, GLM_DSA, HY_V4};
use shared_kv::DEEPSEEK4;
use windowed_latent::DOTS3;

use crate::error::HfError;
use crate::folder::{Object, shown};
use crate::tensor_transform::Transform;

/// Properties specific to the folders of a family.
#[derive(Debug, PartialEq)]
pub(crate) struct Family {
    /// The name in `architectures`.
    pub class: &'static str,
    /// Which other families share this class.
    pub kinds: ClassMembers,
    /// Whether the model is multimodal: its text model is nested, and only that is converted.
    pub is_multimodal: bool,
    /// Values that a configuration may omit but GGUF requires.
    pub defaults: &'static [(&'static str, Default)],
    /// The architecture name in GGUF, the prefix of its keys.
    pub arch: &'static str,
    /// Whether RoPE rotates the halves of a head together here and adjacent values in GGUF, so that
    /// rows of queries and keys are reordered.
    pub is_reordered: bool,
    /// Whether norms store their weight minus 1.
    pub norms_minus_one: bool,
    /// Whether `post_attention_layernorm` is `post_attention_norm` in GGUF, and not `ffn_norm`.
    pub has_post_attention_norm: bool,
    /// Epsilon of the norms: the name here and in GGUF.
    pub eps: (&'static str, &'static str),
    /// The key of the FFN width.
    pub width: &'static str,
    /// Accepted activations of the FFN gate.
    pub activations: &'static [&'static str],
    /// Which layers have sliding-window attention.
    pub windows: Windows,
    /// Default fraction of a head that RoPE rotates.
    pub rotary_fraction: f64,
    /// The model with this many layers divides its attention scores by the root of hidden size /
    /// query heads.
    pub scaled_by_width: u32,
    /// Every n-th layer has no RoPE; 0 if all have it.
    pub no_rope_period: usize,
    /// Whether configurations list the RoPE base of each layer: one base, or 0 for no RoPE.
    pub has_layer_bases: bool,
    /// Default mRoPE sections: pairs of a head per image position component. Empty if GGUF readers
    /// do not require them.
    pub sections: &'static [i32],
    /// Numbers with other names in GGUF.
    pub factors: &'static [(&'static str, &'static str)],
    /// Keys of the MoE hyper-parameters; `None` for dense families.
    pub experts: Option<Experts>,
    /// The types of its layers.
    pub layers: Layers,
    /// If the family has YaRN's `mscale` and `mscale_all_dim`: the factor on the latter in GGUF.
    pub yarn_mscale_factor: Option<f64>,
    /// Tensors specific to the family: the name within a layer here, the name in GGUF, and the
    /// transform.
    pub tensors: &'static [Tensor],
    /// Numbers that GGUF readers assume; true is 1.
    pub fixed: &'static [(&'static str, f64)],
    /// Required string values; the conversion supports no others.
    pub words: &'static [(&'static str, &'static str)],
    /// Whether its experts may be in 4-bit blocks.
    pub has_mxfp4_experts: bool,
}

/// Which families share a class name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClassMembers {
    /// A single family.
    One,
    /// Attention layers only, or some state-space layers, dense or MoE.
    Granite4,
    /// Dense or MoE.
    Nemotron,
    /// Vision models of either text model.
    Mistral,
}

/// The default of an omitted configuration value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Default {
    Size(u32),
    Number(f64),
    Flag(bool),
}

/// A tensor within a layer: its name in the folder, its name in GGUF, and its transform.
pub(crate) type Tensor = (&'static str, &'static str, Transform);

/// The layer types of a family, besides FFN layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layers {
    /// All layers are attention.
    Attending,
    /// All layers are multi-head latent attention (MLA).
    Latent,
    /// The same over selected tokens: DeepSeek Sparse Attention.
    Selecting,
    /// The same with several residual streams, which every sublayer reads and writes.
    Connected,
    /// The same in layers without a window; the others are MLA of other sizes.
    WindowedLatent,
    /// MLA in some layers; the others are Kimi's delta rules.
    Kimi,
    /// The same, and every sublayer attends to residual streams of earlier layers.
    KimiStreams,
    /// All layers are attention, some of them over selected blocks of tokens.
    SelectingBlocks,
    /// All layers are attention with one KV head, and several residual streams.
    SharedKv,
    /// Some layers are short convolutions.
    Convolving,
    /// Some layers are gated delta rules; attention layers have a gate beside each query.
    Delta,
    /// The same with several residual streams; attention layers have an index of pooled keys, and
    /// one layer may have embeddings of n-grams.
    DeltaStreams,
    /// Some layers are state-space layers.
    Space,
    /// The same with a single sublayer per layer; the other layers are FFNs.
    Halved,
    /// All layers are state-space layers, with no other sublayer.
    StateSpaces,
    /// All layers are attention; full-attention layers have a head dimension and KV head count of
    /// their own, and the last layers may share KV.
    OwnHeads,
    /// All layers are attention, with numbers of query heads of their own, and another rotation in
    /// layers with windows.
    HeadsByLayer {
        /// Whether full-attention layers rotate half of what GGUF states.
        halves_full: bool,
    },
    /// All layers are attention, with several residual streams; the last layers may share KV.
    Streams,
}

/// Layers with sliding-window attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    /// None in GGUF: a model that has windows is limited to their length.
    None,
    /// All but every n-th layer.
    Every(usize),
    /// The layers that the configuration names.
    Named,
    /// All.
    All,
}

/// Configuration keys of the MoE hyper-parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Experts {
    /// The key of the expert width, unless it is that of other layers.
    pub width: Option<&'static str>,
    /// Whether the router uses sigmoids.
    pub by_sigmoid: bool,
}

const THETA: &str = "rope_theta";
const WINDOW: &str = "sliding_window";
const NORM_TOPK_PROB: &str = "norm_topk_prob";
/// RoPE base of several families.
const MILLION: (&str, Default) = (THETA, Default::Number(1e6));

const SILU: &[&str] = &["silu"];
const GELU: &[&str] = &["gelu_pytorch_tanh", "gelu", "gelu_new"];
pub(crate) const XIELU: &[&str] = &["xielu"];
const FACTORS: &[(&str, &str)] = &[
    ("attention_multiplier", "attention.scale"),
    ("embedding_multiplier", "embedding_scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
];
const CAPS: &[(&str, &str)] = &[
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];

const LAYER_EPS: (&str, &str) = ("layer_norm_eps", "attention.layer_norm_epsilon");
pub(crate) const RMS_EPS: (&str, &str) = ("rms_norm_eps", "attention.layer_norm_rms_epsilon");

pub(crate) const LLAMA: Family = Family {
    class: "LlamaForCausalLM",
    kinds: ClassMembers::One,
    is_multimodal: false,
    defaults: &[],
    arch: "llama",
    is_reordered: true,
    norms_minus_one: false,
    has_post_attention_norm: false,
    eps: RMS_EPS,
    width: "intermediate_size",
    activations: SILU,
    windows: Windows::None,
    rotary_fraction: 1.0,
    scaled_by_width: 0,
    no_rope_period: 0,
    has_layer_bases: false,
    sections: &[],
    factors: &[],
    experts: None,
    layers: Layers::Attending,
    yarn_mscale_factor: None,
    tensors: &[],
    fixed: &[],
    words: &[],
    has_mxfp4_experts: false,
};

/// Whether a configured window is active.
const USES_WINDOW: (&str, Default) = ("use_sliding_window", Default::Flag(false));

pub(crate) const QWEN2: Family = Family {
    class: "Qwen2ForCausalLM",
    defaults: &[USES_WINDOW],
    arch: "qwen2",
    is_reordered: false,
    ..LLAMA
};

const OLMO2: Family =
    Family { class: "Olmo2ForCausalLM", arch: "olmo2", has_post_attention_norm: true, ..QWEN2 };

const EXPERTS: Experts = Experts { width: Some("moe_intermediate_size"), by_sigmoid: false };
const BY_SIGMOID: Experts = Experts { by_sigmoid: true, ..EXPERTS };
/// The bias that is added to router scores for expert selection.
const CORRECTION: Tensor = ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", Transform::Whole);

const MINISTRAL3: Family =
    Family { class: "Ministral3ForCausalLM", arch: "mistral3", yarn_mscale_factor: Some(1.0), ..LLAMA };

const GRANITE: Family = Family {
    class: "GraniteForCausalLM",
    arch: "granite",
    defaults: &[("attention_multiplier", Default::Number(1.0))],
    factors: FACTORS,
    ..LLAMA
};

const GATES: Transform = Transform::Columns { first: 0, step: 2 };
const UPS: Transform = Transform::Columns { first: 1, step: 2 };
const GPT_OSS_TENSORS: &[Tensor] = &[
    ("self_attn.sinks", "attn_sinks.weight", Transform::Whole),
    ("mlp.router.weight", "ffn_gate_inp.weight", Transform::Whole),
    ("mlp.router.bias", "ffn_gate_inp.bias", Transform::Whole),
    ("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", GATES),
    ("mlp.experts.gate_up_proj", "ffn_up_exps.weight", UPS),
    ("mlp.experts.down_proj", "ffn_down_exps.weight", Transform::Columns { first: 0, step: 1 }),
    ("mlp.experts.gate_up_proj_bias", "ffn_gate_exps.bias", Transform::Biases { first: 0, step: 2 }),
    ("mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias", Transform::Biases { first: 1, step: 2 }),
    ("mlp.experts.down_proj_bias", "ffn_down_exps.bias", Transform::Biases { first: 0, step: 1 }),
    ("mlp.experts.gate_up_proj_blocks", "ffn_gate_exps.weight", Transform::Blocks { first: 0, step: 2 }),
    ("mlp.experts.gate_up_proj_scales", "ffn_gate_exps.weight", Transform::Scales { first: 0, step: 2 }),
    ("mlp.experts.gate_up_proj_blocks", "ffn_up_exps.weight", Transform::Blocks { first: 1, step: 2 }),
    ("mlp.experts.gate_up_proj_scales", "ffn_up_exps.weight", Transform::Scales { first: 1, step: 2 }),
    ("mlp.experts.down_proj_blocks", "ffn_down_exps.weight", Transform::Blocks { first: 0, step: 1 }),
    ("mlp.experts.down_proj_scales", "ffn_down_exps.weight", Transform::Scales { first: 0, step: 1 }),
];

const LFM2: Family = Family {
    class: "Lfm2ForCausalLM",
    arch: "lfm2",
    defaults: &[MILLION],
    eps: ("norm_eps", RMS_EPS.1),
    layers: Layers::Convolving,
    tensors: &[
        ("operator_norm.weight", "attn_norm.weight", Transform::Whole),
        ("ffn_norm.weight", "ffn_norm.weight", Transform::Whole),
        ("conv.conv.weight", "shortconv.conv.weight", Transform::Taps),
        ("conv.in_proj.weight", "shortconv.in_proj.weight", Transform::Whole),
        ("conv.out_proj.weight", "shortconv.out_proj.weight", Transform::Whole),
        ("feed_forward.expert_bias", "exp_probs_b.bias", Transform::Whole),
    ],
    fixed: &[("conv_bias", 0.0), ("use_expert_bias", 1.0)],
    ..QWEN2
};

/// Every family.
static FAMILIES: &[Family] = &[
    LLAMA,
    Family { class: "MistralForCausalLM", defaults: &[(WINDOW, Default::Size(4096))], ..LLAMA },
    Family {
        class: "MixtralForCausalLM",
        defaults: &[MILLION],
        experts: Some(Experts { width: None, ..EXPERTS }),
        ..LLAMA
    },
    Family { class: "NanbeigeForCausalLM", arch: "nanbeige", ..LLAMA },
    Family { class: "ArceeForCausalLM", arch: "arcee", activations: &["relu2"], ..LLAMA },
    QWEN2,
    Family { class: "Qwen2MoeForCausalLM", arch: "qwen2moe", experts: Some(EXPERTS), ..QWEN2 },
    Family { class: "Qwen3ForCausalLM", arch: "qwen3", ..QWEN2 },
    Family {
        class: "Qwen3MoeForCausalLM",
        arch: "qwen3moe",
        defaults: &[USES_WINDOW, (NORM_TOPK_PROB, Default::Flag(false))],
        experts: Some(EXPERTS),
        ..QWEN2
    },
    GEMMA,
    Family {
        class: "Gemma2ForCausalLM",
        arch: "gemma2",
        defaults: &[("query_pre_attn_scalar", Default::Size(256)), (WINDOW, Default::Size(4096))],
        has_post_attention_norm: true,
        windows: Windows::Every(2),
        scaled_by_width: 46,
        factors: CAPS,
        ..GEMMA
    },
    GEMMA3,
    Family { class: "Gemma3ForConditionalGeneration", is_multimodal: true, ..GEMMA3 },
    GEMMA3N,
    Family { class: "Gemma3nForConditionalGeneration", is_multimodal: true, ..GEMMA3N },
    GEMMA4,
    Family { class: "Gemma4ForConditionalGeneration", is_multimodal: true, ..GEMMA4 },
    Family {
        class: "SmolLM3ForCausalLM",
        arch: "smollm3",
        defaults: &[USES_WINDOW, (THETA, Default::Number(2e6))],
        no_rope_period: 4,
        ..LLAMA
    },
    GRANITE,
    GRANITE4,
    Family {
        class: "GraniteSWAForCausalLM",
        arch: "granite_swa",
        defaults: &[("attention_multiplier", Default::Number(1.0)), (WINDOW, Default::Size(128))],
        windows: Windows::Named,
        has_layer_bases: true,
        tensors: &[("self_attn.sinks", "attn_sinks.weight", Transform::Whole)],
        ..GRANITE
    },
    NEMOTRON,
    MAMBA2,
    OLMO2,
    Family {
        class: "Olmo3ForCausalLM",
        defaults: &[(THETA, Default::Number(5e5)), (WINDOW, Default::Size(4096))],
        windows: Windows::Every(4),
        ..OLMO2
    },
    Family { class: "GlmForCausalLM", arch: "chatglm", rotary_fraction: 0.5, ..QWEN2 },
    Family { class: "Glm4ForCausalLM", arch: "glm4", rotary_fraction: 0.5, ..QWEN2 },
    Family {
        class: "Glm4MoeForCausalLM",
        arch: "glm4moe",
        defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), ("first_k_dense_replace", Default::Size(1))],
        has_post_attention_norm: true,
        rotary_fraction: 0.5,
        experts: Some(BY_SIGMOID),
        tensors: &[CORRECTION],
        ..QWEN2
    },
    Family {
        class: "Dots1ForCausalLM",
        arch: "dots1",
        experts: Some(BY_SIGMOID),
        tensors: &[CORRECTION],
        ..QWEN2
    },
    Family {
        class: "SeedOssForCausalLM",
        arch: "seed_oss",
        defaults: &[],
        has_post_attention_norm: true,
        ..QWEN2
    },
    Family {
        class: "Ernie4_5ForCausalLM",
        arch: "ernie4_5",
        defaults: &[(THETA, Default::Number(5e5))],
        fixed: &[("use_bias", 0.0)],
        ..QWEN2
    },
    Family {
        class: "Ernie4_5_MoeForCausalLM",
        arch: "ernie4_5-moe",
        defaults: &[(THETA, Default::Number(5e5))],
        experts: Some(EXPERTS),
        tensors: &[("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias", Transform::Row)],
        fixed: &[("use_bias", 0.0), ("moe_layer_interval", 1.0)],
        ..QWEN2
    },
    Family {
        class: "Exaone4ForCausalLM",
        arch: "exaone4",
        defaults: &[],
        has_post_attention_norm: true,
        windows: Windows::Every(4),
        ..QWEN2
    },
    Family {
        class: "OlmoeForCausalLM",
        arch: "olmoe",
        defaults: &[],
        experts: Some(Experts { width: None, ..EXPERTS }),
        fixed: &[(NORM_TOPK_PROB, 0.0)],
        ..QWEN2
    },
    Family {
        class: "GraniteMoeForCausalLM",
        arch: "granitemoe",
        experts: Some(Experts { width: None, ..EXPERTS }),
        tensors: GRANITE_EXPERTS,
        ..GRANITE
    },
    Family { class: "HunYuanDenseV1ForCausalLM", arch: "hunyuan-dense", ..QWEN2 },
    Family { class: "Phi3ForCausalLM", arch: "phi3", windows: Windows::All, ..QWEN2 },
    MINISTRAL3,
    // Text models of either kind: the configuration keys specify the differences.
    Family {
        class: "Mistral3ForConditionalGeneration",
        kinds: ClassMembers::Mistral,
        is_multimodal: true,
        ..MINISTRAL3
    },
    MISTRAL4,
    Family {
        class: "CohereForCausalLM",
        arch: "command-r",
        defaults: &[(THETA, Default::Number(5e5)), ("logit_scale", Default::Number(0.0625))],
        eps: LAYER_EPS,
        factors: &[("logit_scale", "logit_scale")],
        fixed: &[("use_qk_norm", 0.0)],
        ..QWEN2
    },
    Family {
        class: "Cohere2ForCausalLM",
        arch: "cohere2",
        defaults: &[(WINDOW, Default::Size(4096)), ("logit_scale", Default::Number(0.0625))],
        eps: LAYER_EPS,
        windows: Windows::Every(4),
        factors: &[("logit_scale", "logit_scale")],
        ..QWEN2
    },
    COHERE2_MOE,
    Family {
        class: "GptOssForCausalLM",
        arch: "gpt-oss",
        defaults: &[(THETA, Default::Number(150_000.0)), (WINDOW, Default::Size(128))],
        has_post_attention_norm: true,
        windows: Windows::Every(2),
        experts: Some(Experts { width: Some("intermediate_size"), ..EXPERTS }),
        tensors: GPT_OSS_TENSORS,
        fixed: &[("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)],
        has_mxfp4_experts: true,
        ..QWEN2
    },
    Family {
        class: "ApertusForCausalLM",
        arch: "apertus",
        defaults: &[(THETA, Default::Number(12e6))],
        activations: XIELU,
        tensors: &[
            ("attention_layernorm.weight", "attn_norm.weight", Transform::Whole),
            ("feedforward_layernorm.weight", "ffn_norm.weight", Transform::Whole),
        ],
        ..QWEN2
    },
    STARCODER2,
    PHI2,
    PHI_MOE,
    // The name before transformers had it.
    Family { class: "PhiMoEForCausalLM", ..PHI_MOE },
    STABLELM,
    NEMOTRON4,
    JAIS2,
    EXAONE_MOE,
    // The name that transformers had before 5.1.
    Family { class: "ExaoneMoEForCausalLM", ..EXAONE_MOE },
    AFMOE,
    MELLUM,
    HY_V3,
    MINIMAX_M3,
    // The names in some configurations.
    Family { class: "MiniMaxM3VLForConditionalGeneration", ..MINIMAX_M3 },
    Family { class: "MiniMaxM3SparseForCausalLM", is_multimodal: false, ..MINIMAX_M3 },
    LAGUNA,
    STEP35,
    Family { class: "Step3p7ForConditionalGeneration", is_multimodal: true, ..STEP35 },
    LFM2,
    Family { class: "Lfm2MoeForCausalLM", arch: "lfm2moe", experts: Some(BY_SIGMOID), ..LFM2 },
    Family {
        class: "Qwen3NextForCausalLM",
        arch: "qwen3next",
        sections: &[],
        experts: Some(EXPERTS),
        tensors: QWEN3_NEXT_TENSORS,
        ..QWEN35
    },
    QWEN35,
    Family { class: "Qwen3_5MoeForCausalLM", ..QWEN35_MOE },
    Family { class: "Qwen3_5ForConditionalGeneration", is_multimodal: true, ..QWEN35 },
    Family { class: "Qwen3_5MoeForConditionalGeneration", is_multimodal: true, ..QWEN35_MOE },
    Family { class: "DeepseekV2ForCausalLM", experts: Some(EXPERTS), ..DEEPSEEK },
    DEEPSEEK3,
    QWEN4_EXP,
    Family { class: "Qwen4ExpForConditionalGeneration", is_multimodal: true, ..QWEN4_EXP },
    DEEPSEEK32,
    DEEPSEEK4,
    GLM_DSA,
    HY_V4,
    DOTS3,
    Family { class: "Dots3NoteForConditionalGeneration", ..DOTS3 },
    Family { class: "Dots3NoteTextForCausalLM", ..DOTS3 },
    KIMI_LINEAR,
    KIMI_K3,
    LING3,
    Family { class: "BailingMoeV3ForCausalLM", ..LING3 },
    Family {
        class: "Glm4MoeLiteForCausalLM",
        defaults: &[(NORM_TOPK_PROB, Default::Flag(true)), ("routed_scaling_factor", Default::Number(1.8))],
        ..DEEPSEEK
    },
];

impl Layers {
    /// Returns whether some layers are gated delta rules.
    pub fn are_delta(self) -> bool {
        matches!(self, Self::Delta | Self::DeltaStreams)
    }

    /// Returns whether some layers are Kimi's delta rules.
    pub fn are_kimi(self) -> bool {
        matches!(self, Self::Kimi | Self::KimiStreams)
    }

    /// Returns whether layers are multi-head latent attention.
    pub fn are_latent(self) -> bool {
        self.are_kimi()
            || matches!(self, Self::Latent | Self::Selecting | Self::Connected | Self::WindowedLatent)
    }
}

impl Family {
    /// Returns the family of a configuration.
    ///
    /// # Errors
    /// [`HfError::Family`] with the most similar supported name.
    pub fn of(config: Object<'_>) -> Result<&'static Self, HfError> {
        let names = config.find_array("architectures")?.unwrap_or_default();
        let Some(first) = names.first() else {
            return Err(config.bad("architectures", "the name of an architecture", "nothing"));
        };
        let name = first.as_str().ok_or_else(|| config.bad("architectures", "a name", shown(first)))?;
        let family = Self::named(name)?;
        family.kinds.choose(family, config)
    }

    /// Returns the first family with this GGUF architecture. Families that share it use the same
    /// names for most modules.
    pub fn in_gguf(arch: &str) -> Result<&'static Self, HfError> {
        FAMILIES.iter().find(|family| family.arch == arch).ok_or_else(|| HfError::Family {
            got: arch.to_owned(),
            nearest: Self::nearest(arch, |family| family.arch).map_or("none", |family| family.arch),
            known: known(),
        })
    }

    fn nearest(name: &str, of: fn(&Self) -> &'static str) -> Option<&'static Self> {
        let similarity = |family: &&Self| strsim::jaro_winkler(of(family), name);
        FAMILIES.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)))
    }

    fn named(name: &str) -> Result<&'static Self, HfError> {
        match Self::nearest(name, |family| family.class) {
            Some(family) if family.class == name => Ok(family),
            nearest => Err(HfError::Family {
                got: name.to_owned(),
                nearest: nearest.map_or("none", |family| family.class),
                known: known(),
            }),
        }
    }
}

/// Returns the names of all families, without their common suffixes.
fn known() -> String {
    const SUFFIXES: [&str; 6] = [
        "ForCausalLM",
        "ForConditionalGeneration",
        "ForMaskedLM",
        "ForPreTraining",
        "ForSequenceClassification",
        "Model",
    ];
    let shortened =
        |class: &'static str| SUFFIXES.iter().find_map(|suffix| class.strip_suffix(suffix)).unwrap_or(class);
    let classes = FAMILIES.iter().map(|family| family.class).chain(crate::encoder::classes());
    let mut names: Vec<_> = classes.map(shortened).collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_found_and_unknown_ones_get_the_most_similar() {
        for family in FAMILIES {
            assert_eq!(Family::named(family.class).unwrap(), family);
        }
        for (name, nearest) in
            [("Gemma3xForConditionalGeneration", "Gemma3"), ("Qwen4ForCausalLM", "Qwen"), ("BertModel", "")]
        {
            let error = Family::named(name).unwrap_err().to_string();
            assert!(error.starts_with(&format!("architecture '{name}' is not supported")), "{error}");
            assert!(error.contains(&format!("most similar: {nearest}")), "{error}");
        }
    }
}
