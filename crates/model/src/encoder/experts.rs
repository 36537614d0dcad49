//! Experts in place of a feed-forward layer (Nomic Embed v2, arXiv 2502.07972).
//!
//! Each expert multiplies the tokens that selected it, which are gathered for it on the host.

use kvant_backend::{Backend, BackendError, host_ops};

use super::config::EncoderExperts;
use super::family::SublayerNorms;
use super::weights::{Expert, Norm};
use super::{Encoder, Stream};
use crate::linear::Linear;

/// A token that selected an expert, and the weight of its output.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Selected {
    row: usize,
    weight: f32,
}

impl<B: Backend> Encoder<B> {
    /// Adds the weighted outputs of the experts that each token selects to the residual stream.
    pub(super) fn pass_experts(
        &self,
        norms: &SublayerNorms<Norm<B>>,
        router: &Linear<B>,
        experts: &[Expert<B>],
        stream: &mut Stream<B>,
    ) -> Result<(), BackendError> {
        let (c, device) = (&self.config, &*self.device);
        let of = c.experts.expect("a model with experts");
        let mut input = vec![0.0; stream.n * c.n_embd];
        device.read(self.input(norms, stream)?.x, 0, &mut input)?;
        let chosen = choose(&router.forward(device, &input)?, of);
        let mut sum = vec![0.0; input.len()];
        for (expert, chosen) in experts.iter().zip(chosen).filter(|(_, chosen)| !chosen.is_empty()) {
            let row_of = |of: &Selected| of.row * c.n_embd..(of.row + 1) * c.n_embd;
            let gathered: Vec<f32> = chosen.iter().flat_map(|of| &input[row_of(of)]).copied().collect();
            let mut hidden = expert.up.forward(device, &gathered)?;
            host_ops::apply(&mut hidden, c.activation);
            let outputs = expert.down.forward(device, &hidden)?;
            for (of, output) in chosen.iter().zip(outputs.chunks_exact(c.n_embd)) {
                sum[row_of(of)].iter_mut().zip(output).for_each(|(sum, y)| *sum += of.weight * y);
            }
        }
        device.write(&mut stream.branch, &sum)?;
        match &norms.branch {
            None => device.add(&mut stream.x, &stream.branch, sum.len())?,
            Some(norm) => device.add_normed(&mut stream.x, &stream.branch, stream.n, norm.scaling())?,
        }
        self.normalize_stream(norms.sum.as_ref(), stream)
    }
}

/// Returns the tokens that select each expert, given the logits of the router `[rows, n]`: those of
/// the largest logits of a row, the first of equal ones, weighted by the softmax of all.
fn choose(
    logits: &[f32],
    EncoderExperts { n, n_used, normalizes, .. }: EncoderExperts,
) -> Vec<Vec<Selected>> {
    let mut chosen = vec![Vec::new(); n];
    for (row, logits) in logits.chunks_exact(n).enumerate() {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shares: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(n_used);
        let total: f32 = match normalizes {
            true => order.iter().map(|&expert| shares[expert]).sum(),
            false => shares.iter().sum(),
        };
        for expert in order {
            chosen[expert].push(Selected { row, weight: shares[expert] / total });
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_select_the_largest_logits_by_their_softmax() {
        let experts = EncoderExperts { n: 3, n_used: 2, normalizes: false, period: 2 };
        let logits = [2f32.ln(), 0.0, 5f32.ln(), 1.0, 1.0, 1.0];
        let chosen = |normalizes| -> Vec<Vec<(usize, u32)>> {
            let of = choose(&logits, EncoderExperts { normalizes, ..experts });
            let rounded = |of: &Selected| (of.row, (of.weight * 1000.0).round() as u32);
            of.iter().map(|of| of.iter().map(rounded).collect()).collect()
        };
        assert_eq!(chosen(false), [vec![(0, 250), (1, 333)], vec![(1, 333)], vec![(0, 625)]]);
        assert_eq!(chosen(true), [vec![(0, 286), (1, 500)], vec![(1, 500)], vec![(0, 714)]]);
    }
}
