//! The families that are converted: a line of a table each.
//!
//! Most of what a family is stands in its configuration under the same keys. What does not is here.

use crate::HfError;
use crate::folder::{Object, shown};

/// What is peculiar to the folders of a family.
#[derive(Debug, PartialEq)]
pub(crate) struct Family {
    /// The name in `architectures`.
    pub class: &'static str,
    /// Whether it sees as well: its text model lies within, and is what is converted.
    pub sees: bool,
    /// Numbers that a configuration leaves out where they are these.
    pub defaults: &'static [(&'static str, f64)],
    /// The name in GGUF, which keys begin with.
    pub arch: &'static str,
    /// Whether halves of a head are turned together here and neighbours in GGUF, so that rows of queries and keys change places.
    pub is_reordered: bool,
    /// Whether norms hold what they multiply by beyond 1.
    pub norms_beyond_one: bool,
    /// Whether what attention adds is normalised, by the norm that others have before the feed-forward layer.
    pub norms_after: bool,
    /// What the gate of the feed-forward layer may be called.
    pub activations: &'static [&'static str],
    /// Which layers have windows.
    pub windows: Windows,
    /// Share of a head that is turned where the configuration does not say.
    pub turned: f64,
    /// The model of so many layers divides its scores by the root of width / query heads.
    pub scaled_by_width: u32,
    /// Every so many layers the last one turns nothing; 0 where all turn.
    pub unturned_every: usize,
    /// Numbers with other names in GGUF.
    pub factors: &'static [(&'static str, &'static str)],
    /// How the numbers of its experts are called; `None` where it has none.
    pub experts: Option<Experts>,
}

/// Layers with windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    /// None in GGUF: a model that has them is right as far as they reach.
    None,
    /// Every so many layers the last one has none.
    Every(usize),
    /// All.
    All,
}

/// Where a configuration keeps what GGUF says of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Experts {
    /// Whether the configuration has widths of their own.
    pub has_widths: bool,
}

const SILU: &[&str] = &["silu"];
const GELU: &[&str] = &["gelu_pytorch_tanh", "gelu", "gelu_new"];
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

const LLAMA: Family = Family {
    class: "LlamaForCausalLM",
    sees: false,
    defaults: &[],
    arch: "llama",
    is_reordered: true,
    norms_beyond_one: false,
    norms_after: false,
    activations: SILU,
    windows: Windows::None,
    turned: 1.0,
    scaled_by_width: 0,
    unturned_every: 0,
    factors: &[],
    experts: None,
};

const QWEN2: Family = Family { class: "Qwen2ForCausalLM", arch: "qwen2", is_reordered: false, ..LLAMA };

const QWEN_EXPERTS: Option<Experts> = Some(Experts { has_widths: true });

const GEMMA: Family =
    Family { class: "GemmaForCausalLM", arch: "gemma", norms_beyond_one: true, activations: GELU, ..QWEN2 };

const GEMMA3: Family = Family {
    class: "Gemma3ForCausalLM",
    arch: "gemma3",
    norms_after: true,
    windows: Windows::Every(6),
    scaled_by_width: 62,
    factors: CAPS,
    ..GEMMA
};

/// Every family.
static FAMILIES: &[Family] = &[
    LLAMA,
    Family { class: "MistralForCausalLM", ..LLAMA },
    Family { class: "MixtralForCausalLM", experts: Some(Experts { has_widths: false }), ..LLAMA },
    QWEN2,
    Family { class: "Qwen2MoeForCausalLM", arch: "qwen2moe", experts: QWEN_EXPERTS, ..QWEN2 },
    Family { class: "Qwen3ForCausalLM", arch: "qwen3", ..QWEN2 },
    Family { class: "Qwen3MoeForCausalLM", arch: "qwen3moe", experts: QWEN_EXPERTS, ..QWEN2 },
    GEMMA,
    Family {
        class: "Gemma2ForCausalLM",
        arch: "gemma2",
        norms_after: true,
        windows: Windows::Every(2),
        scaled_by_width: 46,
        factors: CAPS,
        ..GEMMA
    },
    GEMMA3,
    Family {
        class: "Gemma3ForConditionalGeneration",
        sees: true,
        defaults: &[
            ("num_attention_heads", 8.0),
            ("num_key_value_heads", 4.0),
            ("head_dim", 256.0),
            ("max_position_embeddings", 131_072.0),
            ("rms_norm_eps", 1e-6),
            ("rope_theta", 1e6),
        ],
        ..GEMMA3
    },
    Family { class: "SmolLM3ForCausalLM", arch: "smollm3", unturned_every: 4, ..LLAMA },
    Family { class: "GraniteForCausalLM", arch: "granite", factors: FACTORS, ..LLAMA },
    Family { class: "Olmo2ForCausalLM", arch: "olmo2", norms_after: true, ..QWEN2 },
    Family { class: "Glm4ForCausalLM", arch: "glm4", turned: 0.5, ..QWEN2 },
    Family { class: "Phi3ForCausalLM", arch: "phi3", windows: Windows::All, ..QWEN2 },
];

impl Family {
    /// The family of a configuration.
    ///
    /// # Errors
    /// [`HfError::Family`] with the known one that is most like it.
    pub fn of(config: Object<'_>) -> Result<&'static Self, HfError> {
        let names = config.find_array("architectures")?.unwrap_or_default();
        let Some(first) = names.first() else {
            return Err(config.bad("architectures", "the name of an architecture", "nothing"));
        };
        let name = first.as_str().ok_or_else(|| config.bad("architectures", "a name", shown(first)))?;
        Self::named(name)
    }

    fn named(name: &str) -> Result<&'static Self, HfError> {
        let likeness = |family: &&Self| strsim::jaro_winkler(family.class, name);
        let nearest = FAMILIES.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        match nearest {
            Some(family) if family.class == name => Ok(family),
            nearest => Err(HfError::Family {
                got: name.to_owned(),
                nearest: nearest.map_or("none", |family| family.class),
                known: FAMILIES.iter().map(|family| family.class).collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_found_and_an_unknown_one_is_told_the_nearest() {
        for family in FAMILIES {
            assert_eq!(Family::named(family.class).unwrap(), family);
        }
        for (name, nearest) in [
            ("Gemma3nForConditionalGeneration", "Gemma3ForConditionalGeneration"),
            ("Qwen3NextForCausalLM", "Qwen3"),
            ("BertModel", ""),
        ] {
            let told = Family::named(name).unwrap_err().to_string();
            assert!(told.starts_with(&format!("architecture '{name}' is not converted")), "{told}");
            assert!(told.contains(&format!("nearest that is: {nearest}")), "{told}");
        }
    }
}
