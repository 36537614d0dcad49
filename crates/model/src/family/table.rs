//! The table of families: one line each, from those that it resembles.

use kvant_backend::{Activation, Gate, KeySharing, Pairing, RouterScores};

use super::{
    EmbeddingNorm, ExpertRule, Factors, Family, IndexRule, NoRope, NormKind, Norms, OutputGates, QkNorm,
    RecurrentFamily, Scale, SharedExpert, Sinks, WindowRope, Windows,
};

/// A window in every layer, unless the file differs.
const WINDOWS: Windows = Windows {
    period: 0,
    starts_full: false,
    halves_full: false,
    length: None,
    rope: WindowRope::Alike,
    own_heads: false,
    are_numbers: false,
};

/// Name of the norm before the feed-forward layer in some files.
const AFTER_ATTENTION: &str = "post_attention_norm.weight";

pub(crate) const LLAMA: Family = Family {
    name: "llama",
    pairing: Pairing::Interleaved,
    activation: Activation::Silu,
    ungated: false,
    xielu: false,
    situ: false,
    single_sublayer: false,
    clamps_gates: false,
    norms: Norms {
        kind: NormKind::Rms,
        before_ffn: "ffn_norm.weight",
        shared: false,
        before: true,
        after: false,
        heads: QkNorm::None,
        values: false,
    },
    embedding_norm: EmbeddingNorm::None,
    after_eps: None,
    factors: Factors::None,
    windows: None,
    no_rope: NoRope::None,
    soft_caps: [None; 2],
    recurrence: None,
    attends: true,
    gates: OutputGates::None,
    mla: false,
    shared_kv: false,
    connects_streams: false,
    attends_streams: false,
    index: None,
    output_norm: Some("output_norm.weight"),
    sinks: Sinks::None,
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

/// The index of DeepSeek V3.2.
const INDEX: IndexRule = IndexRule {
    pairing: Pairing::Halves,
    rotates_last: false,
    key_eps: Some(1e-6),
    may_share: false,
    of_blocks: false,
    pools_keys: false,
};

/// The most common convention of MoE layers.
const EXPERTS: ExpertRule = ExpertRule {
    normalizes: true,
    scores: RouterScores::Softmax,
    adds_to_softmax: false,
    shared: SharedExpert::None,
    averages: false,
    finds_leading: false,
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
    recurrence: Some(RecurrentFamily::GatedDeltaNet { sharing: KeySharing::Tiled, gate: Gate::Silu }),
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
    output_norm: Some("token_embd_norm.weight"),
    ..QWEN3
};

const DEEPSEEK2: Family = Family {
    name: "deepseek2",
    mla: true,
    has_mtp: true,
    experts: Some(ExpertRule { normalizes: false, is_required: false, ..SEVERAL }),
    ..LLAMA
};

const KIMI_DELTA: RecurrentFamily = RecurrentFamily::KimiDelta { negates_bounded: false };

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
pub(super) static FAMILIES: &[Family] = &[
    LLAMA,
    QWEN2,
    QWEN3,
    Family { name: "qwen2moe", experts: Some(ExpertRule { normalizes: false, ..SHARING }), ..QWEN2 },
    Family { name: "qwen3moe", experts: Some(EXPERTS), ..QWEN3 },
    QWEN35,
    Family { name: "qwen35moe", experts: Some(SHARING), ..QWEN35 },
    // Several residual streams, an index in layers with attention, and n-grams before one layer.
    Family {
        name: "qwen4exp",
        norms: Norms { before: false, ..QWEN35.norms },
        recurrence: Some(RecurrentFamily::GatedDeltaNet { sharing: KeySharing::Tiled, gate: Gate::Sigmoid }),
        connects_streams: true,
        index: Some(IndexRule { pools_keys: true, ..INDEX }),
        output_norm: None,
        has_mtp: false,
        experts: Some(SHARING),
        ..QWEN35
    },
    Family {
        name: "qwen3next",
        recurrence: Some(RecurrentFamily::GatedDeltaNet { sharing: KeySharing::Grouped, gate: Gate::Silu }),
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
        name: "gemma3n",
        norms: Norms { after: true, heads: QkNorm::Each, values: true, ..GEMMA.norms },
        windows: Some(Windows { period: 5, rope: WindowRope::By(10_000.0), ..WINDOWS }),
        soft_caps: [None, Some(30.0)],
        scale: Scale::None,
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
    // North Mini Code.
    Family {
        name: "cohere2moe",
        windows: Some(Windows { period: 4, ..WINDOWS }),
        no_rope: NoRope::UnwindowedExperts,
        experts: Some(ExpertRule { averages: true, ..SEVERAL_BY_SIGMOID }),
        ..COMMAND_R
    },
    Family {
        name: "gpt-oss",
        activation: Activation::Bounded,
        norms: Norms { before_ffn: AFTER_ATTENTION, ..QWEN2.norms },
        windows: Some(Windows { period: 2, ..WINDOWS }),
        sinks: Sinks::All,
        whole_pairs: false,
        experts: Some(EXPERTS),
        ..QWEN2
    },
    LFM2,
    Family { name: "lfm2moe", experts: Some(BY_SIGMOID), ..LFM2 },
    DEEPSEEK2,
    // V3.2.
    Family { name: "deepseek32", index: Some(INDEX), has_mtp: false, ..DEEPSEEK2 },
    // GLM-5.
    Family {
        name: "glm-dsa",
        index: Some(IndexRule { pairing: Pairing::Interleaved, may_share: true, ..INDEX }),
        has_mtp: false,
        experts: Some(ExpertRule { normalizes: false, is_required: false, ..SEVERAL_BY_SIGMOID }),
        ..DEEPSEEK2
    },
    // dots.3 note: MLA of other sizes in layers with a window, an index in the others, and gates of
    // attention heads. RoPE of the index rotates neighbours, though llama.cpp has halves.
    Family {
        name: "dots3note",
        norms: Norms { heads: QkNorm::SharedKey, ..LLAMA.norms },
        windows: Some(Windows { rope: WindowRope::Unscaled, ..WINDOWS }),
        gates: OutputGates::Own(Gate::Sigmoid),
        index: Some(IndexRule { pairing: Pairing::Interleaved, ..INDEX }),
        has_mtp: false,
        experts: Some(ExpertRule { normalizes: false, ..SEVERAL_BY_SIGMOID }),
        ..DEEPSEEK2
    },
    // Hunyuan 4: GLM-5 with several residual streams, sinks, and gates of attention values.
    Family {
        name: "hy_v4",
        clamps_gates: true,
        connects_streams: true,
        index: Some(IndexRule {
            pairing: Pairing::Interleaved,
            rotates_last: true,
            key_eps: None,
            may_share: true,
            of_blocks: false,
            pools_keys: false,
        }),
        gates: OutputGates::Own(Gate::Sigmoid),
        sinks: Sinks::All,
        has_mtp: false,
        experts: Some(ExpertRule { is_required: false, ..SEVERAL_BY_SIGMOID }),
        ..DEEPSEEK2
    },
    // DeepSeek-V4: one KV head, whose keys are pooled outside a window; no other layer than with
    // experts.
    Family {
        name: "deepseek4",
        shared_kv: true,
        clamps_gates: true,
        connects_streams: true,
        windows: Some(WINDOWS),
        sinks: Sinks::All,
        experts: Some(ExpertRule { scores: RouterScores::SqrtSoftplus, ..SEVERAL }),
        ..LLAMA
    },
    // Three of four layers have a state instead.
    Family {
        name: "kimi-linear",
        recurrence: Some(KIMI_DELTA),
        no_rope: NoRope::Every(1),
        has_mtp: false,
        experts: Some(SEVERAL_BY_SIGMOID),
        ..DEEPSEEK2
    },
    // The same with bounded decays, gates of attention's values and several residual streams.
    Family {
        name: "kimi-k3",
        situ: true,
        recurrence: Some(RecurrentFamily::KimiDelta { negates_bounded: true }),
        attends_streams: true,
        gates: OutputGates::Own(Gate::Sigmoid),
        no_rope: NoRope::Every(1),
        has_mtp: false,
        experts: Some(ExpertRule { is_required: false, ..SEVERAL_BY_SIGMOID }),
        ..DEEPSEEK2
    },
    // Ling 3: the same with bounded decays, RoPE, and gates of attention heads.
    Family {
        name: "bailingmoe3",
        recurrence: Some(KIMI_DELTA),
        gates: OutputGates::Own(Gate::Sigmoid),
        has_mtp: false,
        experts: Some(SEVERAL_BY_SIGMOID),
        ..DEEPSEEK2
    },
    // Mistral Small 4.
    Family { name: "mistral4", ..DEEPSEEK2 },
    Family { name: "phi3", windows: Some(WINDOWS), ..QWEN2 },
    // Language models of vision models: text tokens have the same M-RoPE position on all axes.
    Family { name: "qwen2vl", ..QWEN2 },
    Family { name: "paddleocr", ..QWEN2 },
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
    Family {
        name: "minimax-m3",
        activation: Activation::Bounded,
        index: Some(IndexRule { of_blocks: true, ..INDEX }),
        experts: Some(SEVERAL_BY_SIGMOID),
        ..QWEN3
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
        sinks: Sinks::All,
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
    // Phi-3.5-MoE.
    Family {
        name: "phimoe",
        windows: Some(WINDOWS),
        experts: Some(ExpertRule { normalizes: false, scores: RouterScores::SparseMixer, ..EXPERTS }),
        ..ORION
    },
    // Minitron.
    NEMOTRON,
    Family { name: "jais2", ..NEMOTRON },
    Family { name: "internlm2", experts: None, ..LLAMA },
    Family { name: "xverse", experts: None, ..LLAMA },
    Family { name: "baichuan", experts: None, ..LLAMA },
    Family { name: "nanbeige", experts: None, ..LLAMA },
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
        gates: OutputGates::Own(Gate::Sigmoid),
        experts: Some(SEVERAL_BY_SIGMOID),
        ..QWEN3
    },
    Family {
        name: "muse-glimmer",
        norms: Norms { after: true, heads: QkNorm::Each, ..LLAMA.norms },
        embedding_norm: EmbeddingNorm::Rms,
        after_eps: Some(1e-8),
        factors: Factors::Logits,
        windows: Some(Windows { period: 4, ..WINDOWS }),
        no_rope: NoRope::Unwindowed,
        gates: OutputGates::Own(Gate::Sigmoid),
        experts: None,
        ..LLAMA
    },
    Family {
        name: "mellum",
        windows: Some(Windows { period: 4, rope: WindowRope::Unscaled, ..WINDOWS }),
        experts: Some(EXPERTS),
        ..QWEN3
    },
    // MiMo V2.
    Family {
        name: "mimo2",
        windows: Some(Windows { are_numbers: true, ..WINDOWS }),
        sinks: Sinks::Windowed,
        experts: Some(ExpertRule { finds_leading: true, ..BY_SIGMOID }),
        ..QWEN2
    },
    Family {
        name: "laguna",
        windows: Some(Windows { period: 4, starts_full: true, rope: WindowRope::Unscaled, ..WINDOWS }),
        gates: OutputGates::Own(Gate::Softplus),
        experts: Some(SEVERAL_BY_SIGMOID),
        ..QWEN3
    },
    // Step 3.5 and 3.7.
    Family {
        name: "step35",
        windows: Some(Windows { halves_full: true, rope: WindowRope::Unscaled, ..WINDOWS }),
        gates: OutputGates::Own(Gate::Sigmoid),
        experts: Some(SEVERAL_BY_SIGMOID),
        ..QWEN3
    },
    Family { name: "apertus", ungated: true, xielu: true, ..QWEN3 },
    // Hunyuan 3.
    Family { name: "hy_v3", experts: Some(SEVERAL_BY_SIGMOID), has_mtp: true, ..QWEN3 },
    NEMOTRON_H,
    Family { name: "mamba2", attends: false, ..NEMOTRON_H },
    Family {
        name: "rwkv7",
        activation: Activation::Relu,
        ungated: true,
        norms: Norms { kind: NormKind::Layer, before_ffn: "attn_norm_2.weight", ..LLAMA.norms },
        embedding_norm: EmbeddingNorm::Layer,
        recurrence: Some(RecurrentFamily::Wkv7),
        attends: false,
        no_rope: NoRope::Every(1),
        experts: None,
        ..LLAMA
    },
    Family { name: "nemotron_h_moe", experts: Some(SEVERAL_BY_SIGMOID), ..NEMOTRON_H },
];
