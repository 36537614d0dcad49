//! Biases of LayerNorms (arXiv 1607.06450), which become part of the products behind the norms:
//! `W (n + c) + b = W n + (b + W c)`. So no kernel adds them.

use kvant_backend::{Backend, Input, Matrix, Output};

use super::{Loader, LowRank};
use crate::{Config, ModelError, NormKind};

/// Biases of the final norm and of the output matrix.
pub(super) struct OutputBiases<B: Backend> {
    /// Of the norm, `[n_embd]`; empty if it has none.
    pub(super) of_norm: Vec<f32>,
    pub(super) of_output: Option<B::Buffer>,
}

impl<B: Backend> Loader<'_, B> {
    /// Loads the bias `[len]` of the norm whose weight has this name, if it is a LayerNorm that has
    /// one, and gives the LoRA weights of the products behind it their part.
    pub(super) fn norm_bias(
        &mut self,
        kind: NormKind,
        weight: &str,
        len: usize,
        low_rank: Option<&mut LowRank<B>>,
    ) -> Result<Option<B::Buffer>, ModelError> {
        let name = weight.replace(".weight", ".bias");
        if kind != NormKind::Layer || !self.has(&name) {
            return Ok(None);
        }
        let bias = Some(self.vector(&name, len)?);
        if let Some(low_rank) = low_rank {
            low_rank.bias = self.behind_norm(bias.as_ref(), &low_rank.down, None)?;
        }
        Ok(bias)
    }

    /// Returns the bias of a product with `w` behind a norm: `bias`, and `w` times the norm's.
    pub(super) fn behind_norm(
        &self,
        norm_bias: Option<&B::Buffer>,
        w: &B::Matrix,
        bias: Option<B::Buffer>,
    ) -> Result<Option<B::Buffer>, ModelError> {
        let Some(x) = norm_bias else { return Ok(bias) };
        let accumulate = bias.is_some();
        let mut y = match bias {
            Some(bias) => bias,
            None => self.backend.buffer(w.n_out())?,
        };
        let input = Input { x, norm: None, first_row: 0, rows: 1 };
        self.backend.project(input, &mut [Output { w, bias: None, y: &mut y, accumulate }])?;
        Ok(Some(y))
    }

    /// Loads the biases of gate, up and down, whose tensors have these names.
    pub(super) fn feed_forward_biases(
        &mut self,
        c: &Config,
        index: usize,
        names: [&str; 3],
    ) -> Result<[Option<B::Buffer>; 3], ModelError> {
        let n_ff = c.layers[index].n_ff;
        let [gate, up, down] = names.map(|name| name.replace(".weight", ".bias"));
        let [gate, up] = self.biases(&up, [(&gate, n_ff), (&up, n_ff)], index)?;
        let down = self.optional_vector(&format!("blk.{index}.{down}"), c.n_embd)?;
        Ok([gate, up, down])
    }

    /// Loads the bias of the final norm, and the bias of the output matrix `w` with the norm's part
    /// of it; both with the factor on logits.
    pub(super) fn output_biases(
        &mut self,
        c: &Config,
        w: Option<&B::Matrix>,
        low_rank: Option<&mut LowRank<B>>,
    ) -> Result<OutputBiases<B>, ModelError> {
        const NAME: &str = "output.bias";
        let Some(w) = w else { return Ok(OutputBiases { of_norm: Vec::new(), of_output: None }) };
        let own = match self.has(NAME) {
            true => Some(self.scaled_vector(NAME, w.n_out(), c.logit_scale)?),
            false => None,
        };
        let norm_bias = match c.family.output_norm {
            Some(name) => self.norm_bias(c.output_norm, name, c.n_embd, None)?,
            None => None,
        };
        let Some(mut norm_bias) = norm_bias else {
            return Ok(OutputBiases { of_norm: Vec::new(), of_output: own });
        };
        let mut of_norm = vec![0.0; c.n_embd];
        self.backend.scale(&mut norm_bias, c.n_embd, c.logit_scale)?;
        self.backend.read(&norm_bias, 0, &mut of_norm)?;
        if let Some(low_rank) = low_rank {
            low_rank.bias = self.behind_norm(Some(&norm_bias), &low_rank.down, None)?;
        }
        Ok(OutputBiases { of_norm, of_output: self.behind_norm(Some(&norm_bias), w, own)? })
    }
}
