//! Weights of a draft head.

use std::sync::Arc;

use kvant_backend::Backend;
use kvant_gguf::Gguf;

use super::mtp::PairEntry;
use super::{LayerRange, Loader, Weights};
use crate::config::DIVISORS;
use crate::draft_head::TARGET_IDS;
use crate::{DraftHeadConfig, Drafting, ModelError};

/// How hidden states of a model enter what drafts for it.
pub(crate) enum DraftEntry<B: Backend> {
    /// With tokens, an MTP layer.
    Pairs(PairEntry<B>),
    /// As features, an EAGLE-3 head.
    Features(FeatureEntry<B>),
    /// As features whose keys and values every layer caches, a DFlash head.
    Block(BlockEntry<B>),
}

/// Input of a DFlash head.
pub(crate) struct BlockEntry<B: Backend> {
    /// Projection of the features, `[n_embd, features]`.
    pub(crate) fc: B::Matrix,
    /// Norm of the projected features.
    pub(crate) norm: B::Buffer,
    /// Whether tokens of a block attend to those before them alone.
    pub(crate) is_causal: bool,
}

/// Input of an EAGLE-3 head.
pub(crate) struct FeatureEntry<B: Backend> {
    /// Projection of the features, `[n_embd, features]`.
    pub(crate) fc: B::Matrix,
    /// Norm of the features.
    pub(crate) fc_norm: Option<B::Buffer>,
    /// Norm of the token embeddings.
    pub(crate) token_norm: B::Buffer,
    /// Norm of the residual stream before attention.
    pub(crate) stream_norm: B::Buffer,
    /// Whether the residual stream begins with that norm.
    pub(crate) norm_before_residual: bool,
}

const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";
/// Norm of the features, before or after their projection.
const FC_NORM: &str = "enc.output_norm.weight";

impl<B: Backend> Weights<B> {
    /// Loads a draft head of the model whose weights these are; it shares the embedding and the
    /// output matrix that its own file lacks.
    ///
    /// # Errors
    ///
    /// As [`Weights::load`].
    pub fn load_draft_head(
        &self,
        gguf: &Arc<Gguf>,
        head: &DraftHeadConfig,
        backend: &B,
    ) -> Result<Self, ModelError> {
        let part = LayerRange::whole(head.config.layers.len());
        let mut loader = Loader::new(gguf, &part, backend);
        loader.used.extend(DIVISORS.into_iter().chain([TARGET_IDS]).map(str::to_owned));
        let DraftHeadConfig { config, n_features, .. } = head;
        let (n_embd, n_vocab) = (config.n_embd, head.n_draft_vocab(self.n_vocab));
        let embedding = match self.embedding.as_ref().filter(|_| !loader.has(EMBEDDING)) {
            Some(shared) if head.n_target_embd() == n_embd => Arc::clone(shared),
            _ => Arc::new(backend.table(loader.source(EMBEDDING, n_embd, self.n_vocab)?)?),
        };
        let shared = self.output.as_ref().or(self.embedding.as_ref());
        let output = match shared.filter(|_| head.target_ids.is_none() && !loader.has(OUTPUT)) {
            Some(shared) if head.n_target_embd() == n_embd => Arc::clone(shared),
            _ => Arc::new(loader.matrix(OUTPUT, n_embd, n_vocab)?),
        };
        let mut layers =
            part.layers().map(|index| loader.layer(config, index)).collect::<Result<Vec<_>, _>>()?;
        let fc = loader.matrix("fc.weight", *n_features, n_embd)?;
        let entry = match head.drafting {
            Drafting::Chain { norm_before_fc, norm_before_residual } => DraftEntry::Features(FeatureEntry {
                fc,
                fc_norm: loader.vector_if(norm_before_fc.then_some(*n_features), FC_NORM)?,
                // It normalizes the embedding, before both become attention's input.
                token_norm: layers[0].attn_norm.take().expect("the layer has a norm before attention"),
                stream_norm: loader.vector("blk.0.attn_norm_2.weight", n_embd)?,
                norm_before_residual,
            }),
            Drafting::Block { is_causal, .. } => {
                DraftEntry::Block(BlockEntry { fc, norm: loader.vector(FC_NORM, n_embd)?, is_causal })
            }
        };
        let output_norm = loader.output_norm(config)?;
        loader.refuse_unused(|_| true)?;
        let n_bytes = loader.n_bytes;
        Ok(Self {
            part,
            embedding: Some(embedding),
            embedding_norm: None,
            entry: Some(entry),
            per_layer: None,
            streams: None,
            last_connection: None,
            ngrams: None,
            layers: layers.into_iter().map(Arc::new).collect(),
            output_norm,
            output_norm_bias: Vec::new(),
            output_bias: None,
            output: Some(output),
            // Adapters of the model are not of the head, which drafts with the plain matrix.
            output_low_rank: None,
            ranks: Vec::new(),
            n_vocab,
            n_bytes,
            idle_bytes: 0,
            repeated_bytes: 0,
        })
    }
}
