//! The families of encoders: their names in folders and in GGUF files.

use super::POSITIONS;
use crate::recipe::Values;

/// A family of encoders.
#[derive(Debug, PartialEq)]
pub(crate) struct EncoderFamily {
    /// Names in `architectures`; those of classifiers have a head that scores.
    pub classes: &'static [&'static str],
    /// The architecture name in GGUF.
    pub arch: &'static str,
    /// Prefix of names in models with a head.
    pub prefix: &'static str,
    /// Prefix of layers.
    pub layers: &'static str,
    /// Global modules here and in GGUF.
    pub modules: &'static [(&'static str, &'static str)],
    /// Modules of a layer here and in GGUF.
    pub of_layer: &'static [(&'static str, &'static str)],
    /// Prefixes of tensors that an embedding does not depend on.
    pub unused: &'static [&'static str],
    /// Positions before the first one that a text uses.
    pub n_reserved: usize,
    /// Other names of settings.
    pub older: &'static [(&'static str, &'static str)],
    /// The activation of the feed-forward layer, and its other name.
    pub activations: &'static [&'static str],
    /// Settings that readers take for granted, where a configuration has them.
    pub fixed: &'static [(&'static str, &'static str)],
    /// Flags that a configuration must set: without them, it is another model.
    pub required_flags: &'static [&'static str],
    /// Epsilon of the norms.
    pub eps: Number,
    /// Bases of RoPE.
    pub bases: &'static [Base],
    /// Which layers are local; none if `None`.
    pub windows: Option<LocalLayers>,
    /// Whether heads have a size of their own, and several may share keys and values.
    pub has_own_heads: bool,
    /// GGUF's key of the activation, where a family has several.
    pub activation_key: Option<&'static str>,
    /// The activation in the head that scores, unless readers assume it.
    pub head_activation: Option<&'static str>,
    /// What the head reads by default, where a configuration may say.
    pub head_pooling: Option<&'static str>,
    /// Conversion of the weights of norms.
    pub norms: Values,
}

/// A number: its names here and in GGUF, and its default.
#[derive(Debug, PartialEq)]
pub(crate) struct Number {
    pub theirs: &'static str,
    pub ours: &'static str,
    pub default: f64,
}

/// A base of RoPE: that of layers of a kind, in `rope_parameters`, or a setting of its own.
#[derive(Debug, PartialEq)]
pub(crate) struct Base {
    /// The kind of layers; `None` where all have the same base.
    pub layers: Option<&'static str>,
    /// In older configurations.
    pub number: Number,
}

/// Local layers: in periods with one global layer.
#[derive(Debug, PartialEq)]
pub(crate) struct LocalLayers {
    /// The setting of the window, tokens on both sides together.
    pub window: &'static str,
    /// The settings of the period, by age.
    pub periods: &'static [&'static str],
    pub default_period: u32,
    /// Whether the first layer of a period is global, or the last one.
    pub is_first_global: bool,
}

const EMBEDDINGS: [(&str, &str); 4] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", POSITIONS),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
];
const BERT_LAYER: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];

/// What most families have in common.
const BERT: EncoderFamily = EncoderFamily {
    classes: &["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"],
    arch: "bert",
    prefix: "bert.",
    layers: "encoder.layer.",
    modules: &[
        EMBEDDINGS[0],
        EMBEDDINGS[1],
        EMBEDDINGS[2],
        EMBEDDINGS[3],
        ("pooler.dense", "cls"),
        ("classifier", "cls.output"),
    ],
    of_layer: &BERT_LAYER,
    unused: &["embeddings.position_ids", "embeddings.token_type_ids", "cls."],
    n_reserved: 0,
    older: &[],
    activations: &["gelu"],
    fixed: &[
        ("position_embedding_type", "\"absolute\""),
        ("is_decoder", "false"),
        ("add_cross_attention", "false"),
    ],
    required_flags: &[],
    eps: Number { theirs: "layer_norm_eps", ours: LAYER_EPS, default: 1e-12 },
    bases: &[],
    windows: None,
    has_own_heads: false,
    activation_key: None,
    head_activation: None,
    head_pooling: None,
    norms: Values::Kept,
};

const LAYER_EPS: &str = "attention.layer_norm_epsilon";
const RMS_EPS: &str = "attention.layer_norm_rms_epsilon";
const BASE: &str = "rope.freq_base";
const LOCAL_BASE: &str = "rope.freq_base_swa";
const GLOBAL_LAYERS: Option<&str> = Some("full_attention");
const LOCAL_LAYERS: Option<&str> = Some("sliding_attention");

/// Modules of Llama's layers.
const LLAMA_LAYER: [(&str, &str); 8] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

pub(super) static FAMILIES: [EncoderFamily; 10] = [
    BERT,
    EncoderFamily {
        classes: &[
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
        ],
        arch: "bert",
        prefix: "roberta.",
        layers: "encoder.layer.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[1],
            EMBEDDINGS[2],
            EMBEDDINGS[3],
            ("classifier.dense", "cls"),
            ("classifier.out_proj", "cls.output"),
        ],
        of_layer: &BERT_LAYER,
        unused: &["embeddings.position_ids", "embeddings.token_type_ids", "lm_head.", "pooler."],
        // Positions count from behind the id of padding, which is 1.
        n_reserved: 2,
        fixed: &[
            ("position_embedding_type", "\"absolute\""),
            ("is_decoder", "false"),
            ("add_cross_attention", "false"),
            ("pad_token_id", "1"),
        ],
        ..BERT
    },
    EncoderFamily {
        classes: &["DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"],
        arch: "bert",
        prefix: "distilbert.",
        layers: "transformer.layer.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[1],
            EMBEDDINGS[3],
            ("pre_classifier", "cls"),
            ("classifier", "cls.output"),
        ],
        of_layer: &[
            ("attention.q_lin", "attn_q"),
            ("attention.k_lin", "attn_k"),
            ("attention.v_lin", "attn_v"),
            ("attention.out_lin", "attn_output"),
            ("sa_layer_norm", "attn_output_norm"),
            ("ffn.lin1", "ffn_up"),
            ("ffn.lin2", "ffn_down"),
            ("output_layer_norm", "layer_output_norm"),
        ],
        unused: &["vocab_transform.", "vocab_layer_norm.", "vocab_projector."],
        older: &[
            ("hidden_size", "dim"),
            ("num_hidden_layers", "n_layers"),
            ("num_attention_heads", "n_heads"),
            ("intermediate_size", "hidden_dim"),
            ("hidden_act", "activation"),
        ],
        fixed: &[],
        head_activation: Some("relu"),
        ..BERT
    },
    EncoderFamily {
        classes: &["MPNetModel", "MPNetForMaskedLM"],
        arch: "mpnet",
        prefix: "mpnet.",
        layers: "encoder.layer.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[1],
            EMBEDDINGS[3],
            ("encoder.relative_attention_bias", super::RELATIVE),
            ("pooler.dense", "cls"),
        ],
        of_layer: &[
            ("attention.attn.q", "attn_q"),
            ("attention.attn.k", "attn_k"),
            ("attention.attn.v", "attn_v"),
            ("attention.attn.o", "attn_output"),
            ("attention.LayerNorm", "attn_output_norm"),
            ("intermediate.dense", "ffn_up"),
            ("output.dense", "ffn_down"),
            ("output.LayerNorm", "layer_output_norm"),
        ],
        unused: &["embeddings.position_ids", "lm_head."],
        // Positions count from behind the id of padding, which is 1.
        n_reserved: 2,
        fixed: &[],
        ..BERT
    },
    EncoderFamily {
        classes: &["NomicBertModel", "NomicBertForPreTraining", "NomicBertForMaskedLM"],
        arch: "nomic-bert",
        prefix: "nomic_bert.",
        layers: "encoder.layers.",
        modules: &[EMBEDDINGS[0], EMBEDDINGS[2], ("emb_ln", "token_embd_norm"), ("pooler.dense", "cls")],
        of_layer: &[
            ("attn.Wqkv", "attn_qkv"),
            ("attn.out_proj", "attn_output"),
            ("norm1", "attn_output_norm"),
            ("mlp.fc11", "ffn_up"),
            ("mlp.fc12", "ffn_gate"),
            ("mlp.fc2", "ffn_down"),
            ("norm2", "layer_output_norm"),
        ],
        unused: &["cls."],
        older: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
            ("layer_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "activation_function"),
        ],
        activations: &["silu", "swiglu"],
        fixed: &[
            ("prenorm", "false"),
            ("causal", "false"),
            ("parallel_block", "false"),
            ("use_rms_norm", "false"),
            ("rotary_emb_interleaved", "false"),
            ("rotary_emb_fraction", "1.0"),
            ("scale_attn_by_inverse_layer_idx", "false"),
            ("scale_attn_weights", "true"),
            ("use_xpos", "false"),
            ("num_experts", "0"),
        ],
        bases: &[Base {
            layers: None,
            number: Number { theirs: "rotary_emb_base", ours: BASE, default: 1000.0 },
        }],
        ..BERT
    },
    EncoderFamily {
        classes: &["ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
        arch: "modern-bert",
        prefix: "model.",
        layers: "layers.",
        modules: &[
            ("embeddings.tok_embeddings", "token_embd"),
            ("embeddings.norm", "token_embd_norm"),
            ("final_norm", "output_norm"),
            ("head.dense", "cls"),
            ("head.norm", "cls.norm"),
            ("classifier", "cls.output"),
        ],
        of_layer: &[
            ("attn_norm", "attn_norm"),
            ("attn.Wqkv", "attn_qkv"),
            ("attn.Wo", "attn_output"),
            ("mlp_norm", "ffn_norm"),
            ("mlp.Wi", "ffn_up"),
            ("mlp.Wo", "ffn_down"),
        ],
        unused: &["decoder."],
        older: &[("hidden_act", "hidden_activation")],
        activations: &["gelu", "silu"],
        fixed: &[("classifier_activation", "\"gelu\""), ("rope_scaling", "nothing")],
        eps: Number { theirs: "norm_eps", ours: LAYER_EPS, default: 1e-5 },
        bases: &[
            Base {
                layers: GLOBAL_LAYERS,
                number: Number { theirs: "global_rope_theta", ours: BASE, default: 160_000.0 },
            },
            Base {
                layers: LOCAL_LAYERS,
                number: Number { theirs: "local_rope_theta", ours: LOCAL_BASE, default: 10_000.0 },
            },
        ],
        windows: Some(LocalLayers {
            window: "local_attention",
            periods: &["global_attn_every_n_layers"],
            default_period: 3,
            is_first_global: true,
        }),
        activation_key: Some("hidden_activation"),
        head_pooling: Some("cls"),
        ..BERT
    },
    // EmbeddingGemma. Without its flag, the class is a model that generates.
    EncoderFamily {
        classes: &["Gemma3TextModel"],
        arch: "gemma-embedding",
        prefix: "model.",
        layers: "layers.",
        modules: &[("embed_tokens", "token_embd"), ("norm", "output_norm")],
        of_layer: &[
            LLAMA_LAYER[0],
            LLAMA_LAYER[1],
            LLAMA_LAYER[2],
            LLAMA_LAYER[3],
            LLAMA_LAYER[4],
            LLAMA_LAYER[5],
            LLAMA_LAYER[6],
            LLAMA_LAYER[7],
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        unused: &["lm_head."],
        older: &[("hidden_act", "hidden_activation")],
        activations: &["gelu_pytorch_tanh"],
        fixed: &[
            ("attn_logit_softcapping", "nothing"),
            ("rope_scaling", "nothing"),
            ("attention_bias", "false"),
        ],
        required_flags: &["use_bidirectional_attention"],
        eps: Number { theirs: "rms_norm_eps", ours: RMS_EPS, default: 1e-6 },
        bases: &[
            Base {
                layers: GLOBAL_LAYERS,
                number: Number { theirs: "rope_theta", ours: BASE, default: 1_000_000.0 },
            },
            Base {
                layers: LOCAL_LAYERS,
                number: Number { theirs: "rope_local_base_freq", ours: LOCAL_BASE, default: 10_000.0 },
            },
        ],
        windows: Some(LocalLayers {
            window: "sliding_window",
            periods: &["sliding_window_pattern", "_sliding_window_pattern"],
            default_period: 6,
            is_first_global: false,
        }),
        has_own_heads: true,
        norms: Values::BeyondOne,
        ..BERT
    },
    EncoderFamily {
        classes: &["EuroBertModel", "EuroBertForMaskedLM"],
        arch: "eurobert",
        prefix: "model.",
        layers: "layers.",
        modules: &[("embed_tokens", "token_embd"), ("norm", "output_norm")],
        of_layer: &[
            LLAMA_LAYER[0],
            LLAMA_LAYER[1],
            LLAMA_LAYER[2],
            LLAMA_LAYER[3],
            LLAMA_LAYER[4],
            LLAMA_LAYER[5],
            LLAMA_LAYER[6],
            LLAMA_LAYER[7],
            ("post_attention_layernorm", "ffn_norm"),
        ],
        unused: &["lm_head."],
        activations: &["silu"],
        fixed: &[("rope_scaling", "nothing")],
        eps: Number { theirs: "rms_norm_eps", ours: RMS_EPS, default: 1e-5 },
        bases: &[Base {
            layers: None,
            number: Number { theirs: "rope_theta", ours: BASE, default: 10_000.0 },
        }],
        has_own_heads: true,
        ..BERT
    },
    // In the form of `transformers`; adapters of tasks are merged, or there are none.
    EncoderFamily {
        classes: &["JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForSequenceClassification"],
        arch: "jina-bert-v3",
        prefix: "roberta.",
        layers: "encoder.layers.",
        modules: &[
            EMBEDDINGS[0],
            EMBEDDINGS[2],
            ("emb_ln", "token_embd_norm"),
            ("classifier.dense", "cls"),
            ("classifier.out_proj", "cls.output"),
        ],
        of_layer: &[
            ("mixer.Wqkv", "attn_qkv"),
            ("mixer.out_proj", "attn_output"),
            ("norm1", "attn_output_norm"),
            ("mlp.fc1", "ffn_up"),
            ("mlp.fc2", "ffn_down"),
            ("norm2", "layer_output_norm"),
        ],
        unused: &["pooler."],
        fixed: &[("rope_scaling", "nothing")],
        eps: Number { theirs: "layer_norm_eps", ours: LAYER_EPS, default: 1e-5 },
        bases: &[Base {
            layers: None,
            number: Number { theirs: "rope_theta", ours: BASE, default: 20_000.0 },
        }],
        ..BERT
    },
    // The form of jina-embeddings-v2-base-en; that with norms of queries and keys is another.
    EncoderFamily {
        classes: &["JinaBertModel", "JinaBertForMaskedLM"],
        arch: "jina-bert-v2",
        modules: &[EMBEDDINGS[0], EMBEDDINGS[2], EMBEDDINGS[3], ("pooler.dense", "cls")],
        of_layer: &[
            BERT_LAYER[0],
            BERT_LAYER[1],
            BERT_LAYER[2],
            BERT_LAYER[3],
            BERT_LAYER[4],
            ("mlp.gated_layers", "ffn_up"),
            ("mlp.wo", "ffn_down"),
            ("mlp.layernorm", "layer_output_norm"),
        ],
        fixed: &[
            ("position_embedding_type", "\"alibi\""),
            ("feed_forward_type", "\"geglu\""),
            ("is_decoder", "false"),
            ("add_cross_attention", "false"),
        ],
        ..BERT
    },
];
