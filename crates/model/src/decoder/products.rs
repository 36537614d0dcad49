//! GEMMs with LoRA, norms and gates of heads, and additions to the residual stream.

use std::iter;

use kvant_backend::{Backend, BackendError, Gate, Heads, Input, Norm, Output, RopeParams};

use super::{BatchSequence, Decoder};
use crate::weights::{LowRank, RankAssignment, Weights};
use crate::{Lora, ModelError, OutputGate};

/// Inputs of GEMMs besides their matrices.
pub(super) struct Product<'a, B: Backend> {
    pub(super) input: Input<'a, B>,
    /// LoRA weights, if adapters change any of the outputs.
    pub(super) low_rank: Option<&'a LowRank<B>>,
}

/// An addition to the residual stream: `w of + bias`, normalized if the layer has a norm.
pub(super) struct Branch<'a, B: Backend> {
    pub(super) of: &'a B::Buffer,
    pub(super) w: &'a B::Matrix,
    /// LoRA weights of `w of`.
    pub(super) low_rank: Option<&'a LowRank<B>>,
    pub(super) bias: Option<&'a B::Buffer>,
    pub(super) norm: &'a Option<B::Buffer>,
}

/// The residual stream of a step, and scratch memory for additions to it.
pub(super) struct Residual<'a, B: Backend> {
    /// `[rows, n_embd]`
    pub(super) x: &'a mut B::Buffer,
    /// Holds a branch before its norm, `[rows, n_embd]`.
    pub(super) spare: &'a mut B::Buffer,
    pub(super) low: &'a mut LoraScratch<B>,
    pub(super) rows: usize,
}

/// Low-rank intermediates of adapters.
pub(super) struct LoraScratch<B: Backend> {
    /// `D x`, `[rows, rank]`
    made: B::Buffer,
    /// Scale factors per row and rank, on the device and on the host, for each of
    /// [`Weights::ranks`].
    factors: Vec<(B::Buffer, Vec<f32>)>,
    /// Whether any factor differs from 1.
    has_factors: bool,
}

impl<B: Backend> LoraScratch<B> {
    pub(super) fn new(backend: &B, ranks: &[RankAssignment], max_rows: usize) -> Result<Self, BackendError> {
        let widths = ranks.iter().map(RankAssignment::len);
        let buffer = |width| backend.buffer(max_rows * width);
        Ok(Self {
            made: buffer(widths.clone().max().unwrap_or(0))?,
            factors: widths
                .map(|width| Ok((buffer(width)?, Vec::new())))
                .collect::<Result<_, BackendError>>()?,
            has_factors: false,
        })
    }

    /// Writes the adapter scales of the step's rows.
    pub(super) fn prepare(
        &mut self,
        backend: &B,
        weights: &Weights<B>,
        parts: &[BatchSequence<'_, B::Page>],
    ) -> Result<(), BackendError> {
        let loras = weights.part.loras();
        let factor = |part: &BatchSequence<'_, B::Page>, adapter: usize| {
            let lora: &Lora = &loras[adapter];
            lora.factor(part.lora_scales.map_or(lora.scale(), |strengths| strengths[adapter]))
        };
        self.has_factors = parts.iter().any(|part| (0..loras.len()).any(|of| factor(part, of) != 1.0));
        if !self.has_factors {
            return Ok(());
        }
        for ((on_device, factors), ranks) in self.factors.iter_mut().zip(&weights.ranks) {
            factors.clear();
            for part in parts {
                let rows = if ranks.is_for_logit_rows { part.logits_for.count(part.n) } else { part.n };
                for _ in 0..rows {
                    factors.extend(ranks.of.iter().flat_map(|&(of, n)| iter::repeat_n(factor(part, of), n)));
                }
            }
            backend.write(on_device, factors)?;
        }
        Ok(())
    }
}

impl<B: Backend> Decoder<B> {
    /// Computes `y_i = W_i x`, or `y_i = W_i x + U_i (f * D x)` with adapters.
    pub(super) fn project(
        &self,
        backend: &B,
        Product { input, low_rank }: Product<'_, B>,
        outputs: &mut [Output<'_, B>],
        low: &mut LoraScratch<B>,
    ) -> Result<(), BackendError> {
        let Some(LowRank { down, bias, ups, ranks }) = low_rank else {
            return backend.project(input, outputs);
        };
        let rows = input.rows;
        let mut all = Vec::with_capacity(outputs.len() + 1);
        for Output { w, bias, y, accumulate } in &mut *outputs {
            all.push(Output { w: *w, bias: *bias, y: &mut **y, accumulate: *accumulate });
        }
        all.push(Output { w: down, bias: bias.as_ref(), y: &mut low.made, accumulate: false });
        backend.project(input, &mut all)?;
        if low.has_factors {
            let (factors, on_host) = &low.factors[*ranks];
            backend.gate(&mut low.made, on_host.len(), factors, Gate::Plain)?;
        }
        let added = outputs.iter_mut().zip(ups).filter_map(|(Output { y, .. }, up)| {
            up.as_ref().map(|w| Output { w, bias: None, y: &mut **y, accumulate: true })
        });
        let input = Input { x: &low.made, norm: None, first_row: 0, rows };
        backend.project(input, &mut added.collect::<Vec<_>>())
    }

    /// Computes `x += W y + b`, or `x += norm(W y + b)`.
    pub(super) fn add(
        &self,
        backend: &B,
        Branch { of, w, low_rank, bias, norm }: Branch<'_, B>,
        Residual { x, spare, low, rows }: Residual<'_, B>,
    ) -> Result<(), ModelError> {
        let product = Product { input: Input { x: of, norm: None, first_row: 0, rows }, low_rank };
        match self.after_norm(norm) {
            None => self.project(backend, product, &mut [Output { w, bias, y: x, accumulate: true }], low)?,
            Some(norm) => {
                let output = Output { w, bias, y: &mut *spare, accumulate: false };
                self.project(backend, product, &mut [output], low)?;
                backend.add_normed(x, spare, rows, norm)?;
            }
        }
        Ok(())
    }
}

/// Normalizes the heads of rows in place, by RoPE without rotation.
pub(super) fn normalize<B: Backend>(
    backend: &B,
    x: &mut B::Buffer,
    rows: usize,
    heads: Heads,
    norm: Option<Norm<'_, B::Buffer>>,
    rope: RopeParams,
    angles: &B::Buffer,
) -> Result<(), BackendError> {
    match norm {
        Some(norm) => backend.rope(x, rows, heads, Some(norm), RopeParams { n_rot: 0, ..rope }, angles),
        None => Ok(()),
    }
}

/// Multiplies the heads of all rows by the gates of attention's output, if it has any.
pub(super) fn gate_heads<B: Backend>(
    backend: &B,
    gate: Option<OutputGate>,
    x: &mut B::Buffer,
    heads: Heads,
    gates: &B::Buffer,
) -> Result<(), BackendError> {
    match gate {
        Some(gate) if gate.is_per_head => backend.gate_rows(x, heads.n, heads.dim, gates, gate.function),
        Some(gate) => backend.gate(x, heads.n * heads.dim, gates, gate.function),
        None => Ok(()),
    }
}
