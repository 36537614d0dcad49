//! Hyper-parameters of a draft head: a small network with a file of its own that reads hidden
//! states of a model and drafts its tokens.
//!
//! A head reads the residual stream before a few layers of its model, one row after the other:
//! these are a token's *features*. Its vocabulary may be a part of its model's. An EAGLE-3 head
//! (arXiv 2503.01840) drafts one token after the other, a DFlash head (arXiv 2602.06036) a block at
//! once.

use std::collections::HashSet;

use kvant_gguf::Gguf;

use crate::config::Keys;
use crate::family::{DFLASH, EAGLE3, Factors};
use crate::weights::decode_values;
use crate::{Config, ModelError};

/// Architectures of draft heads.
const ARCHITECTURES: [&str; 2] = ["eagle3", "dflash"];

/// Tensor with the token of the model for each token of the head, `[draft vocabulary]`.
pub(crate) const TARGET_IDS: &str = "d2t";

/// The integers that f32 holds exactly.
const MAX_EXACT: usize = 1 << 24;

/// Hyper-parameters of a draft head, for a certain model.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftHeadConfig {
    /// Its layers, as a model of its own.
    pub config: Config,
    /// The layers of the model whose input it reads, in the order of its features; the number of
    /// layers denotes the output of the last one, before the final norm.
    pub target_layers: Vec<usize>,
    /// The model's token for each of its own; `None` if they are the same.
    pub target_ids: Option<Vec<u32>>,
    /// Width of a token's features: the model's hidden size for each of these layers.
    pub n_features: usize,
    /// How it drafts.
    pub drafting: Drafting,
}

/// How a draft head drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drafting {
    /// One token after the other, each from features (EAGLE-3).
    Chain {
        /// Whether features are normalized before they are projected.
        norm_before_fc: bool,
        /// Whether the residual stream begins with the normalized input of attention.
        norm_before_residual: bool,
    },
    /// A block of tokens at once (DFlash).
    Block {
        /// The token that stands for one to be drafted.
        mask: u32,
        /// Tokens of a block in training, the last known one included.
        len: usize,
        /// Whether tokens of a block attend to those before them alone.
        is_causal: bool,
    },
}

impl DraftHeadConfig {
    /// Returns whether a file is a draft head, supported or not.
    pub fn is_head(gguf: &Gguf) -> bool {
        let arch = gguf.meta().find::<&str>("general.architecture");
        arch.is_ok_and(|arch| arch.is_some_and(|arch| ARCHITECTURES.contains(&arch)))
    }

    /// Reads the hyper-parameters of a draft head for the model `target` of `n_vocab` tokens, and
    /// checks that it fits that model.
    ///
    /// # Errors
    ///
    /// A head of another kind or for another model, a missing or invalid value (the key is named),
    /// or a feature that is not implemented.
    pub fn of(gguf: &Gguf, target: &Config, n_vocab: usize) -> Result<Self, ModelError> {
        let unsupported = |what| Err(ModelError::Unsupported { what });
        let arch = gguf.meta().get::<&str>("general.architecture")?;
        let is_block = arch == DFLASH.name;
        // Such a model computes a multiple of its residual stream, or several of them.
        if target.family.factors == Factors::Named || target.streams.n() > 1 {
            return unsupported(format!("a draft head for a model of the family {}", target.family.name));
        }
        let mut config = Config::of_family(gguf, if is_block { &DFLASH } else { &EAGLE3 })?;
        let keys = Keys { gguf, arch };
        if !is_block && config.layers.len() != 1 {
            return Err(keys.bad("block_count", "one layer", config.layers.len()));
        }
        let drafting = match is_block {
            true => {
                config.embedding_scale = keys.positive_or("embedding_scale", None)?.unwrap_or(1.0);
                read_block(&keys, n_vocab)?
            }
            false => Drafting::Chain {
                norm_before_fc: keys.flag_or("norm_before_fc", false)?,
                norm_before_residual: keys.flag_or("norm_before_residual", false)?,
            },
        };
        let n_embd = keys.size_or("target_hidden_size", target.n_embd)?;
        if n_embd != target.n_embd {
            let expected = format!("{}, the hidden size of the model", target.n_embd);
            return Err(keys.bad("target_hidden_size", &expected, n_embd));
        }
        let target_layers = read_target_layers(&keys, target.layers.len())?;
        Ok(Self {
            n_features: target_layers.len() * n_embd,
            target_layers,
            target_ids: read_target_ids(gguf, n_vocab)?,
            drafting,
            config,
        })
    }

    /// Returns the hidden size of its model.
    pub fn n_target_embd(&self) -> usize {
        self.n_features / self.target_layers.len()
    }

    /// Returns the size of its vocabulary, for a model of `n_vocab` tokens.
    pub(crate) fn n_draft_vocab(&self, n_vocab: usize) -> usize {
        self.target_ids.as_ref().map_or(n_vocab, Vec::len)
    }
}

/// Reads how a DFlash head drafts for a model of `n_vocab` tokens.
fn read_block(keys: &Keys<'_>, n_vocab: usize) -> Result<Drafting, ModelError> {
    const MASK: &str = "tokenizer.ggml.mask_token_id";
    const LEN: &str = "block_size";
    for (key, what) in [
        ("hyper_connection.count", "layers of DeepSeek-V4 in a draft head"),
        ("selector_rank", "a draft head that selects tokens (DFlash 2)"),
    ] {
        keys.refuse(key, what)?;
    }
    keys.refuse_positive("attention.value_scale", "a factor on values")?;
    let mask = keys.gguf.meta().get::<u32>(MASK)?;
    if mask as usize >= n_vocab {
        let expected = format!("a token of the model's {n_vocab}");
        return Err(ModelError::Value { key: MASK.to_owned(), expected, got: mask.to_string() });
    }
    let len = keys.size_or(LEN, 16)?;
    if len < 2 {
        return Err(keys.bad(LEN, "at least two tokens", len));
    }
    Ok(Drafting::Block { mask, len, is_causal: keys.flag_or("attention.causal", false)? })
}

/// Reads the layers of a model of `n_layers` whose input a head reads. Without a list, an early,
/// the middle and a late one, as in the paper.
fn read_target_layers(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<usize>, ModelError> {
    const LAYERS: &str = "target_layers";
    let listed = keys.gguf.meta().find::<Vec<u32>>(&keys.key(LAYERS))?.unwrap_or_default();
    let listed: Vec<usize> = listed.into_iter().map(|layer| layer as usize).collect();
    let layers = match (listed.is_empty(), n_layers.checked_sub(3)) {
        (false, _) => listed,
        (true, Some(late)) => vec![2, n_layers / 2, late],
        (true, None) => return Err(keys.bad(LAYERS, "a list, as the model has few layers", "none")),
    };
    match layers.iter().find(|&&layer| layer > n_layers) {
        Some(layer) => Err(keys.bad(LAYERS, &format!("numbers from 0 to {n_layers}"), layer)),
        None => Ok(layers),
    }
}

/// Reads the token of the model for each token of the head.
fn read_target_ids(gguf: &Gguf, n_vocab: usize) -> Result<Option<Vec<u32>>, ModelError> {
    let Some(tensor) = gguf.find_tensor(TARGET_IDS) else { return Ok(None) };
    let ids = decode_values(&tensor, &[tensor.info.elements()])?;
    let (limit, mut seen) = (n_vocab.min(MAX_EXACT) as f32, HashSet::new());
    let is_wrong =
        |id: &&f32| !(0.0 <= **id && **id < limit && id.fract() == 0.0 && seen.insert(**id as u32));
    match ids.iter().find(is_wrong) {
        Some(id) => Err(ModelError::Value {
            key: TARGET_IDS.to_owned(),
            expected: format!("different tokens of the model's {n_vocab}"),
            got: id.to_string(),
        }),
        None => Ok(Some(ids.into_iter().map(|id| id as u32).collect())),
    }
}
