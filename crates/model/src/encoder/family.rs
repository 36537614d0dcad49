//! The families of encoders: the differences between them that no key of a file gives, as data.

use kvant_backend::Pairing;
use kvant_backend::host_ops::Pointwise;

use crate::family::{Family, LLAMA, NormKind};

/// Conventions of a family's layers, beyond the numbers in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EncoderFamily {
    /// Its name, in `general.architecture`.
    pub family: Family,
    /// What tells positions apart.
    pub positions: PositionKind,
    /// Kind of all norms.
    pub norm: NormKind,
    /// Whether norms have a bias, which RMS norms never have.
    pub has_norm_bias: bool,
    /// Whether the sum of embeddings is normalized.
    pub has_embedding_norm: bool,
    /// Norms of attention.
    pub attn_norms: SublayerNorms<&'static str>,
    /// Whether the first layer may lack the norm of attention's input: it reads a norm already.
    pub first_input_is_normed: bool,
    /// Norms of the feed-forward layer.
    pub ffn_norms: SublayerNorms<&'static str>,
    /// Whether a tensor with queries, keys and values has those of each head together.
    pub joins_heads: bool,
    /// Whether each head of queries and keys is normalized, before RoPE (QK-norm): RMS norms.
    pub has_qk_norm: bool,
    /// The norm after the last layer.
    pub output_norm: Option<&'static str>,
    /// Whether embeddings are multiplied by the root of the hidden size.
    pub scales_embeddings: bool,
    /// The activation of the feed-forward layer, or of its gate, unless the file names one.
    pub activation: Pointwise,
    /// Whether the feed-forward layer has a gate.
    pub is_gated: bool,
    /// Whether some layers have experts instead of the feed-forward layer.
    pub has_experts: bool,
    /// Which layers are local, if the file has a window; `None` for global attention in all.
    pub windows: Option<LocalLayers>,
    /// The activation in the head that scores, unless the file names one.
    pub head_activation: Pointwise,
    /// Whether the head reads the mean of all tokens, unless the file says so.
    pub head_reads_mean: bool,
}

/// What tells the positions of a family apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PositionKind {
    /// Embeddings of positions.
    Learned,
    /// The same, and biases by distance.
    LearnedAndRelative,
    /// RoPE.
    Rotary(Pairing),
    /// Biases that grow with the distance.
    Alibi,
}

/// Norms of a sublayer f: `x = sum(x + branch(f(input(x))))`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SublayerNorms<T> {
    /// Before it (pre-norm).
    pub input: Option<T>,
    /// Of its output, before the addition to the residual stream: RMS norms.
    pub branch: Option<T>,
    /// Of the residual stream after it (post-norm).
    pub sum: Option<T>,
}

impl<T> SublayerNorms<T> {
    /// Applies a function that may fail to each norm.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<SublayerNorms<U>, E> {
        Ok(SublayerNorms {
            input: self.input.map(&mut f).transpose()?,
            branch: self.branch.map(&mut f).transpose()?,
            sum: self.sum.map(&mut f).transpose()?,
        })
    }
}

/// Local layers: a token sees those within half of the window on either side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LocalLayers {
    /// Default period, one layer of which is global.
    pub period: usize,
    /// Whether that is the first one of it, or the last one.
    pub is_first_global: bool,
    /// Default base of RoPE in local layers.
    pub base: f32,
}

const NO_NORMS: SublayerNorms<&str> = SublayerNorms { input: None, branch: None, sum: None };
const PRE_ATTENTION: SublayerNorms<&str> = SublayerNorms { input: Some("attn_norm"), ..NO_NORMS };
const PRE_FFN: SublayerNorms<&str> = SublayerNorms { input: Some("ffn_norm"), ..NO_NORMS };

const BERT: EncoderFamily = EncoderFamily {
    family: Family { name: "bert", ..LLAMA },
    positions: PositionKind::Learned,
    norm: NormKind::Layer,
    has_norm_bias: true,
    has_embedding_norm: true,
    attn_norms: SublayerNorms { sum: Some("attn_output_norm"), ..NO_NORMS },
    first_input_is_normed: false,
    ffn_norms: SublayerNorms { sum: Some("layer_output_norm"), ..NO_NORMS },
    joins_heads: false,
    has_qk_norm: false,
    output_norm: None,
    scales_embeddings: false,
    activation: Pointwise::Gelu,
    is_gated: false,
    has_experts: false,
    windows: None,
    head_activation: Pointwise::Tanh,
    head_reads_mean: false,
};

/// All families. Another architecture is refused.
pub(crate) static ENCODERS: [EncoderFamily; 10] = [
    BERT,
    EncoderFamily {
        family: Family { name: "nomic-bert", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Halves),
        activation: Pointwise::Silu,
        is_gated: true,
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "nomic-bert-moe", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Halves),
        has_experts: true,
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "mpnet", ..LLAMA },
        positions: PositionKind::LearnedAndRelative,
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "modern-bert", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Halves),
        has_norm_bias: false,
        attn_norms: PRE_ATTENTION,
        first_input_is_normed: true,
        ffn_norms: PRE_FFN,
        output_norm: Some("output_norm"),
        is_gated: true,
        windows: Some(LocalLayers { period: 3, is_first_global: true, base: 10_000.0 }),
        head_activation: Pointwise::Gelu,
        head_reads_mean: true,
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "gemma-embedding", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Halves),
        norm: NormKind::Rms,
        has_norm_bias: false,
        has_embedding_norm: false,
        attn_norms: SublayerNorms { branch: Some("post_attention_norm"), ..PRE_ATTENTION },
        ffn_norms: SublayerNorms { branch: Some("post_ffw_norm"), ..PRE_FFN },
        has_qk_norm: true,
        output_norm: Some("output_norm"),
        scales_embeddings: true,
        activation: Pointwise::GeluTanh,
        is_gated: true,
        windows: Some(LocalLayers { period: 6, is_first_global: false, base: 10_000.0 }),
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "eurobert", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Halves),
        norm: NormKind::Rms,
        has_norm_bias: false,
        has_embedding_norm: false,
        attn_norms: PRE_ATTENTION,
        ffn_norms: PRE_FFN,
        output_norm: Some("output_norm"),
        activation: Pointwise::Silu,
        is_gated: true,
        ..BERT
    },
    // llama.cpp's converter keeps the rows of heads as the model has them, and its reader takes all
    // queries to come first.
    EncoderFamily {
        family: Family { name: "neo-bert", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Interleaved),
        norm: NormKind::Rms,
        has_norm_bias: false,
        has_embedding_norm: false,
        attn_norms: PRE_ATTENTION,
        ffn_norms: PRE_FFN,
        joins_heads: true,
        output_norm: Some("enc.output_norm"),
        activation: Pointwise::Silu,
        is_gated: true,
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "jina-bert-v3", ..LLAMA },
        positions: PositionKind::Rotary(Pairing::Halves),
        ..BERT
    },
    EncoderFamily {
        family: Family { name: "jina-bert-v2", ..LLAMA },
        positions: PositionKind::Alibi,
        is_gated: true,
        ..BERT
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_are_of_kinds_that_a_device_computes() {
        for family in &ENCODERS {
            let is_rms = family.norm == NormKind::Rms;
            assert!(!(is_rms && family.has_norm_bias), "{}", family.family.name);
            let [attn, ffn] = [family.attn_norms, family.ffn_norms].map(|norms| norms.branch.is_some());
            assert!(is_rms || !(attn || ffn || family.has_qk_norm), "{}", family.family.name);
            let has_rope = matches!(family.positions, PositionKind::Rotary(_));
            assert!(has_rope || !family.has_qk_norm, "{}", family.family.name);
        }
    }
}
