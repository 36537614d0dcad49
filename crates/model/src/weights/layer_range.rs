//! The part of a model on one device: its layers and options.

use std::ops::Range;
use std::sync::Arc;

use kvant_codec::DType;
use kvant_gguf::{Gguf, TensorInfo};
use kvant_kv::KvGuard;

use super::experts;
use crate::retype::retyped;
use crate::{Config, ExpertSpec, InputStatistics, Lora, ModelError};

/// A range of decoder layers on one device, with the embedding if it includes the first layer and
/// the output if it includes the last.
#[derive(Debug, Clone)]
pub struct LayerRange {
    layers: Range<usize>,
    n_layers: usize,
    /// Type of its matrices; `None` keeps the file's types.
    weights: Option<DType>,
    /// Whether its experts stay in the file.
    pub(super) maps_experts: bool,
    /// Whether it includes the MTP layer.
    has_mtp: bool,
    /// The file of a draft head.
    draft_head: Option<Arc<Gguf>>,
    /// Adapters of its matrices.
    loras: Vec<Lora>,
    /// Receives the inputs of its matrices.
    inputs: Option<Arc<InputStatistics>>,
    /// Compares its caches with what they were made from.
    guard: Option<Arc<KvGuard>>,
}

impl LayerRange {
    /// Returns these layers of a model of `n_layers`.
    ///
    /// # Panics
    ///
    /// Unless they are layers of the model, at least one.
    pub fn new(layers: Range<usize>, n_layers: usize) -> Self {
        assert!(!layers.is_empty() && layers.end <= n_layers, "layers {layers:?} of {n_layers}");
        Self {
            layers,
            n_layers,
            weights: None,
            maps_experts: false,
            has_mtp: false,
            draft_head: None,
            loras: Vec::new(),
            inputs: None,
            guard: None,
        }
    }

    /// Returns all of a model of `n_layers`.
    pub fn whole(n_layers: usize) -> Self {
        Self::new(0..n_layers, n_layers)
    }

    /// Returns the first `n` layers, and the rest.
    ///
    /// # Panics
    ///
    /// Unless `n` is between 1 and the number of layers less one: each part needs a layer.
    pub fn split(n_layers: usize, n: usize) -> [Self; 2] {
        [0..n, n..n_layers].map(|layers| Self::new(layers, n_layers))
    }

    /// Sets the type of its matrices, see [`retyped`]; `None` keeps the file's types.
    #[must_use]
    pub fn with_weights(self, weights: Option<DType>) -> Self {
        Self { weights, ..self }
    }

    /// Sets whether its experts stay in the file, see
    /// [`Backend::map_experts`](kvant_backend::Backend::map_experts).
    #[must_use]
    pub fn with_mapped_experts(self, maps_experts: bool) -> Self {
        Self { maps_experts, ..self }
    }

    /// Sets whether it includes the MTP layer: for a whole model whose file has one.
    #[must_use]
    pub fn with_mtp(self, has_mtp: bool) -> Self {
        Self { has_mtp, ..self }
    }

    /// Sets the file of a draft head beside it: for a whole model.
    #[must_use]
    pub fn with_draft_head(self, draft_head: Option<Arc<Gguf>>) -> Self {
        Self { draft_head, ..self }
    }

    /// Returns the file of the draft head beside it.
    pub fn draft_head(&self) -> Option<&Arc<Gguf>> {
        self.draft_head.as_ref()
    }

    /// Sets its adapters, all of which change its matrices.
    #[must_use]
    pub fn with_loras(self, loras: Vec<Lora>) -> Self {
        Self { loras, ..self }
    }

    /// Sets the statistics that receive the inputs of its matrices, on a device that supports them.
    #[must_use]
    pub fn with_input_statistics(self, inputs: Option<Arc<InputStatistics>>) -> Self {
        Self { inputs, ..self }
    }

    /// Sets the guard of its caches, for a whole model on a device that is read within a step.
    #[must_use]
    pub fn with_kv_guard(self, guard: Option<Arc<KvGuard>>) -> Self {
        Self { guard, ..self }
    }

    /// Returns the guard of its caches.
    pub fn kv_guard(&self) -> Option<&Arc<KvGuard>> {
        self.guard.as_ref()
    }

    /// Returns the statistics that receive the inputs of its matrices.
    pub(super) fn inputs(&self) -> Option<&InputStatistics> {
        self.inputs.as_deref()
    }

    /// Returns its adapters.
    pub fn loras(&self) -> &[Lora] {
        &self.loras
    }

    /// Returns whether it includes the MTP layer.
    pub fn has_mtp(&self) -> bool {
        self.has_mtp && self.is_first() && self.is_last()
    }

    /// Returns the MTP layer as a part by itself.
    pub(super) fn mtp(&self) -> Self {
        Self { layers: 0..1, n_layers: 1, has_mtp: false, draft_head: None, guard: None, ..self.clone() }
    }

    /// Returns the type of its matrices.
    pub fn weights(&self) -> Option<DType> {
        self.weights
    }

    /// Returns its layers.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Returns whether it includes the embedding.
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Returns whether it includes the output.
    pub fn is_last(&self) -> bool {
        self.layers.end == self.n_layers
    }

    /// Returns the bytes of its tensors and LoRA weights, and of a draft head; of MTP layers the
    /// first alone, if it [is included](Self::has_mtp).
    pub fn n_bytes(&self, gguf: &Gguf) -> usize {
        let is_tied = gguf.find_info("output.weight").is_none();
        let end = self.n_layers + usize::from(self.has_mtp());
        let is_known = |info: &&TensorInfo| layer_of(&info.name).is_none_or(|layer| layer < end);
        let own = gguf.tensors().iter().filter(|info| self.owns(&info.name, is_tied)).filter(is_known);
        let own: usize = own.map(|info| self.tensor_bytes(info) + self.adapter_bytes(info)).sum();
        let of_head = self.draft_head.iter().flat_map(|head| head.tensors()).map(|info| info.n_bytes);
        own + of_head.sum::<usize>()
    }

    /// Returns the bytes of the experts in its layers, and of those that decoding a token reads.
    pub fn expert_bytes(&self, gguf: &Gguf, config: &Config) -> [usize; 2] {
        let of_layer = |index: usize| {
            let ExpertSpec { n, routing, .. } = config.layers[index].experts?;
            let name = |suffix: &&str| format!("blk.{index}.{suffix}");
            let tensors = experts::TENSORS.iter().filter_map(|suffix| gguf.find_info(&name(suffix)));
            let all: usize = tensors.map(|info| self.tensor_bytes(info)).sum();
            Some([all, all / n * routing.n_used])
        };
        let layers = self.layers().filter_map(of_layer);
        layers.fold([0; 2], |[all, read], layer| [all + layer[0], read + layer[1]])
    }

    pub(super) fn tensor_bytes(&self, info: &TensorInfo) -> usize {
        let dtype = self.dtype(info);
        info.elements() / dtype.block_len() * dtype.block_bytes()
    }

    fn adapter_bytes(&self, info: &TensorInfo) -> usize {
        self.loras.iter().map(|lora| lora.n_bytes(&info.name)).sum()
    }

    /// Returns the storage type of a tensor.
    pub(super) fn dtype(&self, info: &TensorInfo) -> DType {
        self.weights.map_or(info.dtype, |dtype| retyped(info, dtype))
    }

    /// Returns whether a tensor belongs to this part. Every tensor of a model belongs to one part;
    /// an embedding that is the output matrix too, to the first and the last.
    pub(super) fn owns(&self, name: &str, is_tied: bool) -> bool {
        match (layer_of(name), name) {
            // A layer beyond the model's belongs to the last part, which rejects it as unused.
            (Some(layer), _) => self.layers.contains(&layer) || layer >= self.n_layers && self.is_last(),
            (None, "token_embd.weight") => self.is_first() || is_tied && self.is_last(),
            (None, _) => self.is_last(),
        }
    }
}

/// If some layers hold states and others K and V, each part must have both: checkpoints of a
/// sequence cover all parts alike. The first layer of a part must select its own tokens.
pub(super) fn check_part(config: &Config, part: &LayerRange) -> Result<(), ModelError> {
    let Range { start, end } = part.layers();
    if config.loops.n > 1 && !(part.is_first() && part.is_last()) {
        let what = format!("layers {start} to {} on their own device, as all run several times", end - 1);
        return Err(ModelError::Unsupported { what });
    }
    if config.layers[start].wkv.is_some() && !(part.is_first() && part.is_last()) {
        let what = format!(
            "layers {start} to {} on their own device, as all read the values of the first layer",
            end - 1
        );
        return Err(ModelError::Unsupported { what });
    }
    if config.streams.are_read_by_sublayers() && !(part.is_first() && part.is_last()) {
        let what = format!(
            "layers {start} to {} on their own device, as several residual streams pass them",
            end - 1
        );
        return Err(ModelError::Unsupported { what });
    }
    if config.layers[start].index.is_some_and(|index| !index.selects) {
        let what = format!(
            "layers {start} to {} on their own device, as layer {start} attends to the tokens that an earlier one selects",
            end - 1
        );
        return Err(ModelError::Unsupported { what });
    }
    let (whole, here) = (config.kv_shape(), config.kv_shape_of(part.layers()));
    let is_hybrid = !whole.states.is_empty() && !whole.layers.is_empty();
    let lacks = match (here.states.is_empty(), here.layers.is_empty()) {
        (true, _) if is_hybrid => "has a recurrent state",
        (_, true) if is_hybrid => "attends",
        _ => return Ok(()),
    };
    let what = format!("layers {start} to {} on their own device, as none of them {lacks}", end - 1);
    Err(ModelError::Unsupported { what })
}

/// Returns the layer of a tensor.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok())
}
