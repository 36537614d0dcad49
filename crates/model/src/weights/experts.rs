//! Weights of experts and their router.

use std::borrow::Cow;
use std::ops::Range;

use kvant_backend::{Backend, Experts as _, WeightSource};
use kvant_gguf::{LoadOnlyType, TensorInfo};

use super::Loader;
use crate::config::SELECTION_BIAS;
use crate::{Config, ExpertSpec, ModelError, SharedExpert};

/// Tensors with a matrix per expert: the last one is the fused form of the first two.
pub(super) const TENSORS: [&str; 4] =
    ["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_up_exps.weight"];

/// Biases of gate, up and down: the last one is the fused form of the first two.
const BIASES: [&str; 4] =
    ["ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias", "ffn_gate_up_exps.bias"];

/// The experts of a layer.
pub(crate) struct Experts<B: Backend> {
    /// Router projection, `[n_experts, n_embd]`.
    pub(crate) router: B::Matrix,
    /// `[n_experts]`
    pub(crate) router_bias: Option<B::Buffer>,
    /// Selection bias, added to the scores for the selection alone, `[n_experts]`.
    pub(crate) selection_bias: Option<B::Buffer>,
    /// Factor on each expert's weight, `[n_experts]`.
    pub(crate) scales: Option<B::Buffer>,
    /// The experts of each token, `[n_vocab, n_used]`, if they do not depend on the router.
    pub(crate) table: Option<Vec<f32>>,
    /// `None` if the up projection gates itself.
    pub(crate) gate: Option<B::Experts>,
    pub(crate) up: B::Experts,
    pub(crate) down: B::Experts,
    /// Biases of gate, up and down, `[n_experts, n_out]` each.
    pub(crate) biases: Option<[B::Buffer; 3]>,
    /// Gate of the shared expert, `[1, n_embd]`.
    pub(crate) shared_gate: Option<B::Matrix>,
    /// The latent space of the experts, if they have one.
    pub(crate) latent: Option<LatentSpace<B>>,
    /// Norms of experts beside a dense layer.
    pub(crate) beside: Option<Beside<B>>,
}

/// Projections into and out of the experts' latent space.
pub(crate) struct LatentSpace<B: Backend> {
    /// `[latent, n_embd]`
    pub(crate) into: B::Matrix,
    /// Norm of the experts' sum, `[latent]`.
    pub(crate) norm: Option<B::Buffer>,
    /// `[n_embd, latent]`
    pub(crate) out: B::Matrix,
}

/// Norms of experts beside a dense layer, `[n_embd]` each.
pub(crate) struct Beside<B: Backend> {
    /// Before the router.
    pub(crate) router: B::Buffer,
    /// Before the experts.
    pub(crate) before: B::Buffer,
    /// After the experts.
    pub(crate) after: B::Buffer,
    /// After the dense layer.
    pub(crate) after_ffn: B::Buffer,
}

impl<B: Backend> Loader<'_, B> {
    pub(super) fn experts(
        &mut self,
        c: &Config,
        index: usize,
        ExpertSpec { n, n_ff, shared, latent, routing, has_table, .. }: ExpertSpec,
    ) -> Result<Experts<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}");
        let router = self.matrix(&name("ffn_gate_inp.weight"), c.n_embd, n)?;
        let norms = c.layers[index].norms;
        // That of a norm before other products as well is refused as unused.
        let norm_bias = match (norms.shared, shared, latent) {
            (false, SharedExpert::None, None) => {
                self.norm_bias(norms.kind, &name(norms.before_ffn), c.n_embd, None)?
            }
            _ => None,
        };
        let router_bias = self.optional_vector(&name("ffn_gate_inp.bias"), n)?;
        let router_bias = self.behind_norm(norm_bias.as_ref(), &router, router_bias)?;
        let [given, unsuffixed] = SELECTION_BIAS.map(name);
        let selection_bias = if self.has(&given) { given } else { unsuffixed };
        let selection_bias = self.optional_vector(&selection_bias, n)?;
        let scales = self.expert_scales(index, n, shared)?;
        let table = has_table.then(|| self.expert_table(index, n, routing.n_used)).transpose()?;
        let width = latent.unwrap_or(c.n_embd);
        let biases = self.expert_biases(index, n, [n_ff, width])?;
        let [gate, up, down, both] = TENSORS.map(name);
        let (gate, up) = match (c.layers[index].gates_itself, self.has(&gate) || !self.has(&both)) {
            (true, _) => (None, self.expert_stack(&up, [width, n_ff, n])?),
            (false, true) => {
                let [gate, up] = [gate, up].map(|name| self.expert_stack(&name, [width, n_ff, n]));
                (Some(gate?), up?)
            }
            (false, false) => {
                let part = |rows| self.expert_part(&both, [width, 2 * n_ff, n], rows);
                let [gate, up] = [0..n_ff, n_ff..2 * n_ff].map(part);
                (Some(gate?), up?)
            }
        };
        let down = self.expert_stack(&down, [n_ff, width, n])?;
        let biases = match (norm_bias, biases) {
            (None, biases) => biases,
            (Some(norm_bias), None) => {
                Some(self.experts_behind_norm(&norm_bias, [gate.as_ref().unwrap_or(&up), &up], c.n_embd)?)
            }
            (Some(_), Some(_)) => {
                let what = format!("biases of experts behind a norm with one ('{}')", c.family.name);
                return Err(ModelError::Unsupported { what });
            }
        };
        let latent = latent.map(|width| self.latent_space(c.n_embd, index, width)).transpose()?;
        let shared_gate = match shared {
            SharedExpert::Gated => Some(self.matrix(&name("ffn_gate_inp_shexp.weight"), c.n_embd, 1)?),
            _ => None,
        };
        let beside = match shared {
            SharedExpert::Beside => Some(self.beside(c.n_embd, index)?),
            _ => None,
        };
        Ok(Experts {
            router,
            router_bias,
            selection_bias,
            scales,
            table,
            gate,
            up,
            down,
            biases,
            shared_gate,
            latent,
            beside,
        })
    }

    /// Loads the experts of each token, which are some of `n`.
    fn expert_table(&mut self, index: usize, n: usize, n_used: usize) -> Result<Vec<f32>, ModelError> {
        let name = format!("blk.{index}.ffn_gate_tid2eid.weight");
        let n_vocab = self.gguf.tensor("token_embd.weight")?.info.rows();
        let table = self.values(&name, &[n_used, n_vocab])?;
        let is_expert = |number: &&f32| number.fract() == 0.0 && (0.0..n as f32).contains(*number);
        match table.iter().find(|number| !is_expert(number)) {
            Some(number) => {
                let expected = format!("numbers of {n} experts");
                Err(ModelError::Value { key: name, expected, got: number.to_string() })
            }
            None => Ok(table),
        }
    }

    /// Loads the projections into and out of the latent space of layer `index`, under the names of
    /// Nemotron 3 or of Kimi K3, which has a norm too.
    fn latent_space(
        &mut self,
        n_embd: usize,
        index: usize,
        width: usize,
    ) -> Result<LatentSpace<B>, ModelError> {
        let is_routed = self.has_in_some_layer("ffn_routed_down.weight");
        let prefix = if is_routed { "ffn_routed" } else { "ffn_latent" };
        let name = |part: &str| format!("blk.{index}.{prefix}_{part}.weight");
        Ok(LatentSpace {
            into: self.matrix(&name("down"), n_embd, width)?,
            norm: self.optional_vector(&name("norm"), width)?,
            out: self.matrix(&name("up"), width, n_embd)?,
        })
    }

    /// Returns the biases of gate, up and down of experts behind a norm: the first two matrices of
    /// each times the norm's, and zeros.
    fn experts_behind_norm(
        &self,
        norm_bias: &B::Buffer,
        gate_and_up: [&B::Experts; 2],
        n_embd: usize,
    ) -> Result<[B::Buffer; 3], ModelError> {
        let n = gate_and_up[0].n_experts();
        let mut x = self.backend.buffer(n * n_embd)?;
        for e in 0..n {
            self.backend.copy(norm_bias, 0, &mut x, e * n_embd, n_embd)?;
        }
        let [gate, up] = gate_and_up.map(|w| {
            let mut y = self.backend.buffer(n * w.n_out())?;
            self.backend.project_per_expert(&x, 1, w, &mut y)?;
            Ok::<_, ModelError>(y)
        });
        Ok([gate?, up?, self.upload(&vec![0.0; n * n_embd])?])
    }

    /// Loads the factors on the weights of `n` experts.
    fn expert_scales(
        &mut self,
        index: usize,
        n: usize,
        shared: SharedExpert,
    ) -> Result<Option<B::Buffer>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.ffn_down_exps.{suffix}");
        // In nvfp4 they are part of the matrix scales.
        let is_scaled = |info: &TensorInfo| info.packed == Some(LoadOnlyType::ScaledNvfp4);
        let scales = name("scale");
        match shared == SharedExpert::Beside && !self.gguf.find_info(&name("weight")).is_some_and(is_scaled) {
            true => self.vector(&scales, n).map(Some),
            false => self.optional_vector(&scales, n),
        }
    }

    /// Loads the norms of experts beside the dense layer of layer `index`.
    fn beside(&mut self, n_embd: usize, index: usize) -> Result<Beside<B>, ModelError> {
        let mut norm =
            |suffix: &str, scale| self.scaled_vector(&format!("blk.{index}.{suffix}"), n_embd, scale);
        Ok(Beside {
            router: norm("ffn_gate_inp.scale", (n_embd as f32).sqrt().recip())?,
            before: norm("pre_ffw_norm_2.weight", 1.0)?,
            after: norm("post_ffw_norm_2.weight", 1.0)?,
            after_ffn: norm("post_ffw_norm_1.weight", 1.0)?,
        })
    }

    /// Loads the biases of gate, up and down of `n` experts, the first two `n_ff` wide: all or
    /// none.
    fn expert_biases(
        &mut self,
        index: usize,
        n: usize,
        [n_ff, n_embd]: [usize; 2],
    ) -> Result<Option<[B::Buffer; 3]>, ModelError> {
        let names = BIASES.map(|suffix| format!("blk.{index}.{suffix}"));
        if !names.iter().any(|name| self.has(name)) {
            return Ok(None);
        }
        let [gate, up, down, both] = &names;
        let [gate, up] = match self.has(gate) || !self.has(both) {
            true => [self.flat(gate, &[n_ff, n])?, self.flat(up, &[n_ff, n])?],
            false => {
                let all = self.values(both, &[2 * n_ff, n])?;
                let half = |first| -> Vec<f32> {
                    all.chunks_exact(2 * n_ff).flat_map(|of| &of[first..first + n_ff]).copied().collect()
                };
                [self.upload(&half(0))?, self.upload(&half(n_ff))?]
            }
        };
        Ok(Some([gate, up, self.flat(down, &[n_embd, n])?]))
    }

    /// As [`Loader::stack`], but left in the file if this part maps its experts.
    fn expert_stack(&mut self, name: &str, shape: [usize; 3]) -> Result<B::Experts, ModelError> {
        if !self.part.maps_experts {
            return self.stack(name, shape);
        }
        if !matches!(self.gguf.tensor(name)?.bytes, Cow::Borrowed(_)) {
            return Err(ModelError::NotInFile { tensor: name.to_owned() });
        }
        let [_, n_out, n] = shape;
        let source = self.rows(name, &shape, 0..n_out * n)?;
        let mut experts = self.backend.map_experts(source, n)?;
        self.watch_experts(name, &mut experts)?;
        Ok(experts)
    }

    /// Loads `n` matrices, each a range of rows of an expert's matrix in the file, `[n_out, n_in]`.
    fn expert_part(
        &mut self,
        name: &str,
        shape: [usize; 3],
        rows: Range<usize>,
    ) -> Result<B::Experts, ModelError> {
        let [n_in, n_out, n] = shape;
        if self.part.maps_experts {
            return Err(ModelError::NotInFile { tensor: name.to_owned() });
        }
        let mut dtype = None;
        let mut all = Vec::new();
        for e in 0..n {
            let source = self.rows(name, &shape, e * n_out + rows.start..e * n_out + rows.end)?;
            dtype = Some(source.dtype);
            all.extend_from_slice(&source.bytes);
        }
        let dtype = dtype.expect("a MoE layer has experts");
        let source = WeightSource { dtype, n_out: n * rows.len(), n_in, bytes: all.into() };
        let mut experts = self.backend.upload_experts(source, n)?;
        self.watch_experts(name, &mut experts)?;
        Ok(experts)
    }
}
