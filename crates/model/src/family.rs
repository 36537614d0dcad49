//! The families this engine runs: a line of a table each.
//!
//! They share one decoder. What differs is data: the numbers are in the file, and what no file says is here. From both comes a
//! [`LayerSpec`](crate::LayerSpec) for each layer, and nothing else looks at the family.

use kvant_backend::{Activation, KeySharing, Pairing, Scores};

use crate::ModelError;

/// What the layers of a family do, beyond the numbers in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Family {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// Which values RoPE turns together.
    pub(crate) pairing: Pairing,
    /// Of the gate of the feed-forward layer.
    pub(crate) activation: Activation,
    /// Whether what a feed-forward layer gates is its own gate.
    pub(crate) gates_itself: bool,
    /// Whether a layer has one half: it mixes the rows of a sequence, or it looks at each by itself.
    pub(crate) halved: bool,
    /// Where it normalises.
    pub(crate) norms: Norms,
    /// What it multiplies the residual stream and the logits with.
    pub(crate) factors: Factors,
    /// Which layers see the youngest tokens only; `None` where all see everything.
    pub(crate) windows: Option<Windows>,
    /// Which layers turn nothing.
    pub(crate) unturned: Unturned,
    /// Bounds on scores and on logits where the file names none.
    pub(crate) soft_caps: [Option<f32>; 2],
    /// Layers that keep a state instead of keys and values; `None` where all attend.
    pub(crate) recurrence: Option<RecurrenceRule>,
    /// Whether what attention gives is multiplied by a gate, made of what enters it by rows of the queries' tensor: behind those of
    /// each head as many for its gate.
    pub(crate) gated: bool,
    /// Whether its heads meet one latent vector of each token.
    pub(crate) latent: bool,
    /// The tensor of the norm before the logits.
    pub(crate) output_norm: &'static str,
    /// Whether each query head has a score without a value, its sink, that joins its softmax.
    pub(crate) sinks: bool,
    /// Whether YaRN rounds the ends of the frequencies that it interpolates to whole pairs.
    pub(crate) whole_pairs: bool,
    /// What its layers of experts do, where the file has experts; `None` where none is known to have any.
    pub(crate) experts: Option<ExpertRule>,
    /// What scores are multiplied with where the file does not say.
    pub(crate) scale: Scale,
    /// Whether layers without a window take for values what their keys are made of, where none of them has a tensor for values.
    pub(crate) values_of_keys: bool,
    /// Whether layers behind the last one that predict further tokens (MTP) are like the last one that attends.
    pub(crate) predicts_further: bool,
}

/// Where a layer normalises, besides its queries and keys the streams that enter and leave its two halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norms {
    /// Which norm streams meet.
    pub kind: NormKind,
    /// The tensor of what enters the feed-forward layer.
    pub before_ffn: &'static str,
    /// What enters attention enters the feed-forward layer too, normalised once, and what leaves them is added together.
    pub shared: bool,
    /// What enters attention and the feed-forward layer.
    pub before: bool,
    /// What leaves them, before it is added to the residual stream.
    pub after: bool,
    /// Queries and keys.
    pub heads: HeadNorms,
    /// Each head of values, to a mean square of one.
    pub values: bool,
}

/// What a norm divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// The root of the mean square.
    Rms,
    /// The standard deviation, once the mean is taken off: LayerNorm, without a bias.
    Layer,
}

/// How queries and keys are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadNorms {
    /// Not at all.
    None,
    /// Each head by itself.
    Each,
    /// The same in the models that have weights for it.
    EachIfThere,
    /// Each head by itself, once it is turned.
    EachTurned,
    /// All heads of a row together.
    Together,
}

impl HeadNorms {
    /// Values of the weight of such a norm, for heads of `dim` that are `row` values together.
    pub(crate) fn width(self, dim: usize, row: usize) -> Option<usize> {
        match self {
            Self::None => None,
            Self::Each | Self::EachIfThere | Self::EachTurned => Some(dim),
            Self::Together => Some(row),
        }
    }
}

/// What is multiplied with what, besides the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factors {
    /// Nothing.
    None,
    /// Embeddings, with the root of the model's width.
    Root,
    /// Embeddings, branches and logits, with numbers in the file.
    Named,
    /// Logits, with the number in the file, which must be there.
    Logits,
}

/// What scores are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// One over the root of the head size.
    HeadSize,
    /// The same, but over that of width / query heads in the model of so many layers. No file says so.
    WidthAt(usize),
    /// Nothing.
    None,
}

/// Layers that keep a state instead of keys and values, among others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecurrenceRule {
    /// Short convolutions, where the file says that a layer has no KV heads.
    ShortConv,
    /// Gated delta rule.
    Delta {
        /// Which value heads share the keys of a key head.
        sharing: KeySharing,
    },
    /// State spaces.
    Space {
        /// In every layer, beside attention; else where the file says that a layer has no KV heads.
        is_beside: bool,
    },
}

/// Layers whose queries and keys are not turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unturned {
    /// None.
    None,
    /// One every so many.
    Every(usize),
    /// Those without a window, or where one would be.
    Unwindowed,
    /// Those without a window beside others that have one.
    BesideWindows,
    /// All, where the file says so.
    Said,
}

/// What layers of experts do, where the file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertRule {
    /// Whether the weights of the chosen experts add up to one.
    pub normalises: bool,
    /// What is made of the router's logits.
    pub scores: Scores,
    /// Whether what is added to choose by is added to a softmax; else it says that scores are sigmoids.
    pub adds_to_softmax: bool,
    /// What all rows go through besides.
    pub shared: SharedExpert,
    /// Whether a file without experts is none of the family.
    pub is_required: bool,
}

/// What all rows go through in a layer of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedExpert {
    /// Nothing.
    None,
    /// An expert; a gate weighs what it gives.
    Gated,
    /// Several experts side by side, as many as the file says, or none; what they give is added as it is.
    Several,
    /// A feed-forward layer as layers without experts have it. What it gives, what the experts give and what comes of both are
    /// normalised.
    Beside,
}

/// Layers with a window among others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Windows {
    /// Every so many layers the last one sees everything, where the file does not say; none does when 0.
    pub period: usize,
    /// The youngest tokens that the others see, where the file does not say; everything when `None`.
    pub length: Option<usize>,
    /// How the others turn, where the file names no base of theirs.
    pub turns: Turns,
    /// Whether the others have heads of their own size, and turn as much of them as the file says, while layers that see everything
    /// turn what divisors of their frequencies leave (`rope_freqs.weight`).
    pub own_heads: bool,
}

/// How layers with a window turn queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Turns {
    /// As all others do.
    Alike,
    /// By the base of the others, without their scaling.
    Unscaled,
    /// By this base, without scaling.
    By(f32),
}

/// A window in every layer, where the file does not say another thing.
const WINDOWS: Windows = Windows { period: 0, length: None, turns: Turns::Alike, own_heads: false };

/// What some files call the norm before the feed-forward layer.
const AFTER_ATTENTION: &str = "post_attention_norm.weight";

const LLAMA: Family = Family {
    name: "llama",
    pairing: Pairing::Interleaved,
    activation: Activation::Silu,
    gates_itself: false,
    halved: false,
    norms: Norms {
        kind: NormKind::Rms,
        before_ffn: "ffn_norm.weight",
        shared: false,
        before: true,
        after: false,
        heads: HeadNorms::None,
        values: false,
    },
    factors: Factors::None,
    windows: None,
    unturned: Unturned::None,
    soft_caps: [None; 2],
    recurrence: None,
    gated: false,
    latent: false,
    output_norm: "output_norm.weight",
    sinks: false,
    whole_pairs: true,
    // Mixtral.
    experts: Some(ExpertRule { is_required: false, ..EXPERTS }),
    scale: Scale::HeadSize,
    values_of_keys: false,
    predicts_further: false,
};

/// What layers of experts do most often.
const EXPERTS: ExpertRule = ExpertRule {
    normalises: true,
    scores: Scores::Softmax,
    adds_to_softmax: false,
    shared: SharedExpert::None,
    is_required: true,
};

/// The same with an expert that all rows share, and with several.
const SHARING: ExpertRule = ExpertRule { shared: SharedExpert::Gated, ..EXPERTS };
const SEVERAL: ExpertRule = ExpertRule { shared: SharedExpert::Several, ..EXPERTS };

/// As these, chosen by sigmoids.
const BY_SIGMOID: ExpertRule = ExpertRule { scores: Scores::Sigmoid, ..EXPERTS };
const SEVERAL_BY_SIGMOID: ExpertRule = ExpertRule { scores: Scores::Sigmoid, ..SEVERAL };

const QWEN2: Family = Family { name: "qwen2", pairing: Pairing::Halves, experts: None, ..LLAMA };

const QWEN3: Family =
    Family { name: "qwen3", norms: Norms { heads: HeadNorms::Each, ..QWEN2.norms }, ..QWEN2 };

const QWEN35: Family = Family {
    name: "qwen35",
    norms: Norms { before_ffn: AFTER_ATTENTION, ..QWEN3.norms },
    recurrence: Some(RecurrenceRule::Delta { sharing: KeySharing::Tiled }),
    gated: true,
    predicts_further: true,
    ..QWEN3
};

const HUNYUAN: Family =
    Family { name: "hunyuan-dense", norms: Norms { heads: HeadNorms::EachTurned, ..QWEN2.norms }, ..QWEN2 };

const GEMMA: Family = Family { name: "gemma", activation: Activation::Gelu, factors: Factors::Root, ..QWEN2 };

const LFM2: Family = Family {
    name: "lfm2",
    recurrence: Some(RecurrenceRule::ShortConv),
    output_norm: "token_embd_norm.weight",
    ..QWEN3
};

const NEMOTRON_H: Family = Family {
    name: "nemotron_h",
    activation: Activation::Relu,
    gates_itself: true,
    halved: true,
    norms: Norms { before_ffn: "attn_norm.weight", ..LLAMA.norms },
    recurrence: Some(RecurrenceRule::Space { is_beside: false }),
    unturned: Unturned::Every(1),
    experts: None,
    ..LLAMA
};

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
    Family { name: "qwen2moe", experts: Some(ExpertRule { normalises: false, ..SHARING }), ..QWEN2 },
    Family { name: "qwen3moe", experts: Some(EXPERTS), ..QWEN3 },
    QWEN35,
    Family { name: "qwen35moe", experts: Some(SHARING), ..QWEN35 },
    Family {
        name: "qwen3next",
        recurrence: Some(RecurrenceRule::Delta { sharing: KeySharing::Grouped }),
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
        norms: Norms { after: true, heads: HeadNorms::Each, ..GEMMA.norms },
        windows: Some(Windows { period: 6, turns: Turns::By(10_000.0), ..WINDOWS }),
        scale: Scale::WidthAt(62),
        ..GEMMA
    },
    Family {
        name: "gemma4",
        norms: Norms { after: true, heads: HeadNorms::Each, values: true, ..GEMMA.norms },
        windows: Some(Windows { turns: Turns::By(10_000.0), own_heads: true, ..WINDOWS }),
        scale: Scale::None,
        values_of_keys: true,
        experts: Some(ExpertRule { shared: SharedExpert::Beside, is_required: false, ..EXPERTS }),
        ..GEMMA
    },
    Family { name: "glm4", norms: Norms { after: true, ..LLAMA.norms }, experts: None, ..LLAMA },
    Family { name: "granite", factors: Factors::Named, experts: None, ..LLAMA },
    Family { name: "smollm3", unturned: Unturned::Every(4), experts: None, ..LLAMA },
    Family {
        name: "olmo2",
        norms: Norms { before: false, after: true, heads: HeadNorms::Together, ..QWEN2.norms },
        // OLMo 3.
        windows: Some(Windows { period: 4, turns: Turns::Unscaled, ..WINDOWS }),
        ..QWEN2
    },
    Family { name: "mistral3", experts: None, ..LLAMA },
    Family {
        name: "cohere2",
        windows: Some(Windows { period: 4, length: Some(4096), ..WINDOWS }),
        unturned: Unturned::Unwindowed,
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
        latent: true,
        predicts_further: true,
        experts: Some(ExpertRule { normalises: false, is_required: false, ..SEVERAL }),
        ..LLAMA
    },
    Family { name: "phi3", windows: Some(WINDOWS), ..QWEN2 },
    // Models that see, as far as they read and write: tokens of a text turn by their positions alone.
    Family { name: "qwen2vl", ..QWEN2 },
    Family { name: "qwen3vl", ..QWEN3 },
    Family { name: "qwen3vlmoe", experts: Some(EXPERTS), ..QWEN3 },
    Family { name: "seed_oss", norms: Norms { before_ffn: AFTER_ATTENTION, ..QWEN2.norms }, ..QWEN2 },
    // GLM-4.5 and later.
    Family {
        name: "glm4moe",
        norms: Norms { before_ffn: AFTER_ATTENTION, heads: HeadNorms::EachIfThere, ..QWEN2.norms },
        experts: Some(SEVERAL_BY_SIGMOID),
        predicts_further: true,
        ..QWEN2
    },
    Family { name: "dots1", experts: Some(SEVERAL_BY_SIGMOID), ..QWEN3 },
    // Ling and Ring 2.0.
    Family { name: "bailingmoe2", experts: Some(SEVERAL_BY_SIGMOID), ..QWEN3 },
    Family { name: "ernie4_5", experts: None, ..LLAMA },
    Family { name: "ernie4_5-moe", experts: Some(ExpertRule { adds_to_softmax: true, ..SEVERAL }), ..LLAMA },
    HUNYUAN,
    Family { name: "hunyuan-moe", experts: Some(SEVERAL), ..HUNYUAN },
    Family { name: "arcee", activation: Activation::Relu, gates_itself: true, experts: None, ..LLAMA },
    Family {
        name: "exaone4",
        norms: Norms { before: false, after: true, ..QWEN3.norms },
        windows: Some(Windows { period: 4, ..WINDOWS }),
        unturned: Unturned::BesideWindows,
        ..QWEN3
    },
    Family {
        name: "olmoe",
        norms: Norms { heads: HeadNorms::Together, ..QWEN2.norms },
        experts: Some(ExpertRule { normalises: false, ..EXPERTS }),
        ..QWEN2
    },
    Family {
        name: "minimax-m2",
        norms: Norms { heads: HeadNorms::Together, ..QWEN2.norms },
        experts: Some(BY_SIGMOID),
        ..QWEN2
    },
    Family { name: "granitemoe", factors: Factors::Named, experts: Some(SEVERAL), ..LLAMA },
    Family {
        name: "granitehybrid",
        factors: Factors::Named,
        recurrence: Some(RecurrenceRule::Space { is_beside: false }),
        unturned: Unturned::Said,
        experts: Some(ExpertRule { is_required: false, ..SEVERAL }),
        ..LLAMA
    },
    COMMAND_R,
    Family {
        name: "falcon-h1",
        norms: Norms { before_ffn: "ffn_norm", ..QWEN2.norms },
        recurrence: Some(RecurrenceRule::Space { is_beside: true }),
        ..QWEN2
    },
    NEMOTRON_H,
    Family { name: "nemotron_h_moe", experts: Some(SEVERAL_BY_SIGMOID), ..NEMOTRON_H },
];

impl Family {
    /// The family of this name.
    ///
    /// # Errors
    /// [`ModelError::Architecture`] with the known name that is most like it.
    pub(crate) fn named(name: &str) -> Result<&'static Self, ModelError> {
        let likeness = |family: &&Self| strsim::jaro_winkler(family.name, name);
        let nearest = FAMILIES.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        match nearest {
            Some(family) if family.name == name => Ok(family),
            nearest => Err(ModelError::Architecture {
                got: name.to_owned(),
                nearest: nearest.map_or("none", |family| family.name),
                known: FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// Whether layers keep a state beside keys and values, and not instead of them.
    pub(crate) fn recurs_beside(&self) -> bool {
        self.recurrence == Some(RecurrenceRule::Space { is_beside: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the decoder has no way to do: it keeps what is normalised once until both halves have read it, adds branches
    /// that are normalised by their mean square, makes gates beside values, and has one place for gates.
    #[test]
    fn no_family_normalises_in_a_way_that_there_is_not() {
        for family in FAMILIES {
            let Norms { kind, shared, before, after, .. } = family.norms;
            let is_layer = kind == NormKind::Layer;
            assert!(!after || !is_layer && !shared, "{}", family.name);
            assert!(!shared || is_layer && before, "{}", family.name);
            assert!(!family.values_of_keys || !family.gated, "{}", family.name);
            assert!(!family.halved || !after && !shared, "{}", family.name);
            assert!(!family.recurs_beside() || !family.gated && !shared, "{}", family.name);
            assert!(family.norms.heads != HeadNorms::EachTurned || !family.latent, "{}", family.name);
        }
    }

    #[test]
    fn every_family_is_found_and_an_unknown_one_is_told_the_nearest() {
        for family in FAMILIES {
            assert_eq!(Family::named(family.name).unwrap(), family);
        }
        for (name, nearest) in [("gemma5", "gemma"), ("qwen35vl", "qwen35"), ("llama4", "llama"), ("", "")] {
            let error = Family::named(name).unwrap_err().to_string();
            assert!(error.contains(&format!("'{name}'")) && error.contains(nearest), "{error}");
        }
    }
}
