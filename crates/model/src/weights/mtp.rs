//! Weights of the multi-token prediction (MTP) layer.

use std::sync::Arc;

use kvant_backend::{Backend, BackendError, WeightSource};
use kvant_gguf::Gguf;

use super::{DraftEntry, Loader, Weights, layer_of};
use crate::config::EH_PROJ;
use crate::{Config, ModelError};

/// Input projection of a token's embedding and the previous token's hidden state: `W_e norm(e) +
/// W_h norm(h)`.
pub(crate) struct PairEntry<B: Backend> {
    /// W_e and W_h, `[n_embd, n_embd]` each.
    pub(crate) of_token: B::Matrix,
    pub(crate) of_stream: B::Matrix,
    /// Their norms.
    pub(crate) token_norm: B::Buffer,
    pub(crate) stream_norm: B::Buffer,
}

/// Embedding and output matrix in the MTP layer of some files, usually copies of the model's.
const OWN: [(&str, &str); 2] =
    [("nextn.embed_tokens.weight", "token_embd.weight"), ("nextn.shared_head_head.weight", "output.weight")];
/// Norm before the layer's logits, if it differs from the model's.
const HEAD_NORM: &str = "nextn.shared_head_norm.weight";

impl<B: Backend> Weights<B> {
    /// Loads the MTP layer after the last layer; embedding and output matrix are the model's, whose
    /// weights these are, unless the layer has others. `None` if the file has no such layer, or
    /// [the part excludes it](super::LayerRange::has_mtp).
    ///
    /// # Errors
    ///
    /// As [`Weights::load`].
    pub fn load_mtp(
        &self,
        gguf: &Arc<Gguf>,
        config: &Config,
        backend: &B,
    ) -> Result<Option<Self>, ModelError> {
        let Some(spec) = config.mtp.filter(|_| self.part.has_mtp()) else { return Ok(None) };
        let index = config.layers.len();
        // Its tensors have the names of a layer after the last one.
        let mut all = config.clone();
        all.layers.push(spec);
        let part = self.part.mtp();
        let mut loader = Loader::new(gguf, &part, backend);
        loader.ranks.clone_from(&self.ranks);
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let n_embd = config.n_embd;
        let halves = loader.beside_each_other(&name(EH_PROJ), 2, n_embd, n_embd)?;
        let [of_token, of_stream] = halves.try_into().unwrap_or_else(|_| unreachable!("two halves"));
        let entry = PairEntry {
            of_token,
            of_stream,
            token_norm: loader.vector(&name("nextn.enorm.weight"), n_embd)?,
            stream_norm: loader.vector(&name("nextn.hnorm.weight"), n_embd)?,
        };
        let layer = loader.layer(&all, index)?;
        let norm = Some(name(HEAD_NORM)).filter(|name| loader.has(name));
        let output_norm = match norm {
            Some(name) => Some(loader.scaled_vector(&name, n_embd, config.logit_scale)?),
            None => loader.output_norm(config)?,
        };
        let [(own_embedding, embedding_of), (own_output, output_of)] = OWN.map(|(own, of)| (name(own), of));
        let embedding = loader.own(own_embedding, embedding_of, n_embd, self.n_vocab, B::table)?;
        let output = loader.own(own_output, output_of, n_embd, self.n_vocab, B::upload_matrix)?;
        loader.refuse_unused(|name| layer_of(name) == Some(index))?;
        let (n_bytes, ranks) = (loader.n_bytes, loader.ranks);
        let output_low_rank = match &output {
            Some(_) => None,
            None => self.output_low_rank.clone(),
        };
        Ok(Some(Self {
            part,
            embedding: embedding.or_else(|| self.embedding.clone()),
            embedding_norm: None,
            entry: Some(DraftEntry::Pairs(entry)),
            per_layer: None,
            streams: None,
            last_connection: None,
            ngrams: None,
            layers: vec![Arc::new(layer)],
            output_norm,
            output_norm_bias: Vec::new(),
            output_bias: None,
            output: output.or_else(|| self.output.clone().or_else(|| self.embedding.clone())),
            output_low_rank,
            ranks,
            n_vocab: self.n_vocab,
            n_bytes,
            idle_bytes: 0,
            repeated_bytes: 0,
        }))
    }
}

impl<B: Backend> Loader<'_, B> {
    /// Loads the vocabulary table `name` of the MTP layer, unless it is a copy of the model's,
    /// `of`.
    fn own(
        &mut self,
        name: String,
        of: &str,
        n_embd: usize,
        n_vocab: usize,
        take: fn(&B, WeightSource) -> Result<B::Matrix, BackendError>,
    ) -> Result<Option<Arc<B::Matrix>>, ModelError> {
        let Some(own) = self.gguf.find_tensor(&name) else { return Ok(None) };
        let of = if self.has(of) { of } else { "token_embd.weight" };
        let models = self.gguf.tensor(of)?;
        if own.info.dtype == models.info.dtype && own.bytes == models.bytes {
            self.used.insert(name);
            return Ok(None);
        }
        let source = self.source(&name, n_embd, n_vocab)?;
        Ok(Some(Arc::new(take(self.backend, source)?)))
    }
}
