//! Which layers of a model one device holds, and how.

use std::ops::Range;

use kvant_codec::DType;
use kvant_gguf::{Gguf, TensorInfo};

use super::experts;
use crate::retype::retyped;
use crate::{Config, ExpertSpec, Lora, ModelError};

/// A run of decoder layers, with the embedding when it begins the model and the output when it ends it: what one
/// device holds.
#[derive(Debug, Clone)]
pub struct Part {
    layers: Range<usize>,
    n_layers: usize,
    /// What its matrices become; `None` leaves them in the file's types.
    weights: Option<DType>,
    /// Its experts stay in the file.
    pub(super) maps_experts: bool,
    /// It comes with the layer behind the last one that predicts further.
    has_mtp: bool,
    /// What changes its matrices.
    loras: Vec<Lora>,
}

impl Part {
    /// The whole of a model of `n_layers`.
    pub fn whole(n_layers: usize) -> Self {
        Self {
            layers: 0..n_layers,
            n_layers,
            weights: None,
            maps_experts: false,
            has_mtp: false,
            loras: Vec::new(),
        }
    }

    /// The first `n` layers, and the rest.
    ///
    /// # Panics
    /// When `n` is not between 1 and the number of layers less one: either part has a layer.
    pub fn split(n_layers: usize, n: usize) -> [Self; 2] {
        assert!(0 < n && n < n_layers, "{n} of {n_layers} layers");
        [0..n, n..n_layers].map(|layers| Self { layers, ..Self::whole(n_layers) })
    }

    /// The same with its matrices as this type, see [`retyped`]; in the file's types when `None`.
    #[must_use]
    pub fn with_weights(self, weights: Option<DType>) -> Self {
        Self { weights, ..self }
    }

    /// The same with experts that stay in the file, see [`Backend::mapped_experts`](kvant_backend::Backend::mapped_experts), or do not.
    #[must_use]
    pub fn with_mapped_experts(self, maps_experts: bool) -> Self {
        Self { maps_experts, ..self }
    }

    /// The same with the layer behind the last one that predicts the token after the next, or without: of a whole model, where its file has one.
    #[must_use]
    pub fn with_mtp(self, has_mtp: bool) -> Self {
        Self { has_mtp, ..self }
    }

    /// The same with adapters, all of which change its matrices.
    #[must_use]
    pub fn with_loras(self, loras: Vec<Lora>) -> Self {
        Self { loras, ..self }
    }

    /// The adapters that change its matrices.
    pub fn loras(&self) -> &[Lora] {
        &self.loras
    }

    /// Whether it comes with that layer.
    pub fn has_mtp(&self) -> bool {
        self.has_mtp && self.is_first() && self.is_last()
    }

    /// That layer, as a part by itself.
    pub(super) fn mtp(&self) -> Self {
        Self { layers: 0..1, n_layers: 1, has_mtp: false, ..self.clone() }
    }

    /// What its matrices become.
    pub fn weights(&self) -> Option<DType> {
        self.weights
    }

    /// The layers.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Whether tokens enter here.
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether logits come out here.
    pub fn is_last(&self) -> bool {
        self.layers.end == self.n_layers
    }

    /// Bytes of its tensors and of what adapters add to them; of layers that predict further tokens those of the first alone, where it [comes with that](Self::has_mtp).
    pub fn n_bytes(&self, gguf: &Gguf) -> usize {
        let is_tied = gguf.find_info("output.weight").is_none();
        let end = self.n_layers + usize::from(self.has_mtp());
        let is_known = |info: &&TensorInfo| layer_of(&info.name).is_none_or(|layer| layer < end);
        let own = gguf.tensors().iter().filter(|info| self.owns(&info.name, is_tied)).filter(is_known);
        own.map(|info| self.tensor_bytes(info) + self.adapter_bytes(info)).sum()
    }

    /// Bytes of the experts in its layers, and of those that a decoded token chooses, all that it reads.
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

    /// The type that a tensor is kept in.
    pub(super) fn dtype(&self, info: &TensorInfo) -> DType {
        self.weights.map_or(info.dtype, |dtype| retyped(info, dtype))
    }

    /// Whether a tensor belongs here. Every tensor of a model belongs to one of its parts; an embedding that is the
    /// output matrix too, to the first and the last.
    pub(super) fn owns(&self, name: &str, is_tied: bool) -> bool {
        match (layer_of(name), name) {
            // One beyond the model's belongs to the last part, which will not know it.
            (Some(layer), _) => self.layers.contains(&layer) || layer >= self.n_layers && self.is_last(),
            (None, "token_embd.weight") => self.is_first() || is_tied && self.is_last(),
            (None, _) => self.is_last(),
        }
    }
}

/// Where some layers keep states and others keys and values, each part must have both: what is remembered of a sequence is
/// remembered by all parts alike.
pub(super) fn check_part(config: &Config, part: &Part) -> Result<(), ModelError> {
    let (whole, here) = (config.kv_shape(), config.kv_shape_of(part.layers()));
    let lacks = match (whole.states.is_empty(), here.states.is_empty(), here.layers.is_empty()) {
        (true, ..) | (_, false, false) => return Ok(()),
        (_, true, _) => "keeps a state",
        (_, _, true) => "attends",
    };
    let Range { start, end } = part.layers();
    let what = format!("layers {start} to {} on a device of their own, as none of them {lacks}", end - 1);
    Err(ModelError::Unsupported { what })
}

/// The layer that a tensor belongs to.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok())
}
