//! The router of a MoE layer: top-k selection of experts.

use kvant_backend::{Candidate, ExpertGroups, RouterScores, Routing, top_k};

use crate::ops::exp::exp;

/// Selects experts for one row after the other. Buffers are reused between rows.
#[derive(Default)]
pub(super) struct ExpertSelector {
    best: Vec<Candidate>,
    /// Selection scores, where these are not the logits: of all experts, of each group, of the
    /// experts in selected groups.
    selection_scores: [Vec<f32>; 3],
    /// The selected groups, in ascending order.
    expert_groups: Vec<usize>,
}

impl ExpertSelector {
    /// Returns the experts of a row from its `logits` and selection bias `[n_experts]`, best first,
    /// each with its logit.
    pub fn choose(
        &mut self,
        logits: &[f32],
        selection_bias: Option<&[f32]>,
        routing: Routing,
    ) -> &[Candidate] {
        let Self { best, selection_scores: [of_experts, of_groups, left], expert_groups: chosen } = self;
        if (selection_bias, routing.expert_groups) == (None, None) {
            // Their scores have the same order.
            top_k(logits, routing.n_used, best);
            return best;
        }
        of_experts.clear();
        match (routing.scores, selection_bias) {
            (RouterScores::Softmax | RouterScores::SparseMixer, None) => of_experts.extend_from_slice(logits),
            (RouterScores::Softmax | RouterScores::SparseMixer, Some(selection_bias)) => {
                let max = max_logit(logits);
                of_experts.extend(logits.iter().map(|&logit| exp(logit - max)));
                let total: f32 = of_experts.iter().sum();
                of_experts
                    .iter_mut()
                    .zip(selection_bias)
                    .for_each(|(share, by)| *share = *share / total + by);
            }
            (RouterScores::Sigmoid | RouterScores::SqrtSoftplus, _) => {
                of_experts.extend(logits.iter().map(|&logit| score(routing.scores, logit)));
                let biases = selection_bias.unwrap_or_default();
                of_experts.iter_mut().zip(biases).for_each(|(score, by)| *score += by);
            }
        }
        let Some(ExpertGroups { n, n_used }) = routing.expert_groups else {
            top_k(of_experts, routing.n_used, best);
            best.iter_mut().for_each(|best| best.logit = logits[best.id as usize]);
            return best;
        };
        let size = of_experts.len() / n;
        let n_best = if routing.scores == RouterScores::Softmax { 1 } else { 2 };
        of_groups.clear();
        for group in of_experts.chunks_exact(size) {
            top_k(group, n_best, best);
            of_groups.push(best.iter().map(|best| best.logit).sum());
        }
        top_k(of_groups, n_used, best);
        chosen.clear();
        chosen.extend(best.iter().map(|group| group.id as usize));
        chosen.sort_unstable();
        left.clear();
        chosen.iter().for_each(|group| left.extend_from_slice(&of_experts[group * size..][..size]));
        top_k(left, routing.n_used, best);
        for Candidate { id, logit } in best.iter_mut() {
            let expert = chosen[*id as usize / size] * size + *id as usize % size;
            (*id, *logit) = (expert as u32, logits[expert]);
        }
        best
    }

    /// Returns these experts of a row, each with its logit. What is no number of an expert becomes
    /// the first one with NaN as logit, which the weights show.
    pub fn take(&mut self, logits: &[f32], chosen: &[f32]) -> &[Candidate] {
        self.best.clear();
        self.best.extend(chosen.iter().map(|&number| match logits.get(number as usize) {
            Some(&logit) if number >= 0.0 => Candidate { id: number as u32, logit },
            _ => Candidate { id: 0, logit: f32::NAN },
        }));
        &self.best
    }
}

/// Returns the largest logit; NaN if one is NaN or infinite.
pub(super) fn max_logit(logits: &[f32]) -> f32 {
    let bad = |max: f32| if max == f32::INFINITY { f32::NAN } else { max };
    let max = |max: f32, &logit: &f32| if logit > max || logit.is_nan() { logit } else { max };
    bad(logits.iter().fold(f32::NEG_INFINITY, max))
}

/// Returns the score of a logit, of functions that need no other logit; NaN for infinity, which is
/// not a valid logit.
pub(super) fn score(scores: RouterScores, logit: f32) -> f32 {
    match scores {
        _ if logit == f32::INFINITY => f32::NAN,
        // `ln(1 + exp(x)) = max(x, 0) + ln(1 + exp(-|x|))`, which does not overflow.
        RouterScores::SqrtSoftplus => (logit.max(0.0) + exp(-logit.abs()).ln_1p()).sqrt(),
        _ => 1.0 / (1.0 + exp(-logit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_selected_within_the_best_groups() {
        // Groups of three: the first has the best expert, the second the best two, the last the
        // best of all but for its bias.
        let logits = [3.0, -2.0, -2.0, 2.0, 1.9, 0.0, -1.0, 1.0, 4.0].map(|x: f32| x / 2.0);
        let selection_bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0];
        let chosen = |scores, selection_bias, n_used, expert_groups| {
            let expert_groups = Some(ExpertGroups { n: 3, n_used: expert_groups });
            let routing = Routing { n_used, scores, normalizes: true, scale: 1.0, expert_groups };
            let mut chooser = ExpertSelector::default();
            let best = chooser.choose(&logits, selection_bias, routing);
            assert!(best.iter().all(|best| best.logit == logits[best.id as usize]));
            best.iter().map(|best| best.id).collect::<Vec<_>>()
        };
        assert_eq!(chosen(RouterScores::Softmax, None, 3, 1), [8, 7, 6]);
        assert_eq!(chosen(RouterScores::Softmax, None, 3, 2), [8, 0, 7]);
        assert_eq!(chosen(RouterScores::Softmax, Some(&selection_bias[..]), 3, 1), [0, 1, 2]);
        assert_eq!(chosen(RouterScores::Sigmoid, None, 3, 1), [8, 7, 6]);
        assert_eq!(chosen(RouterScores::Sigmoid, Some(&selection_bias[..]), 3, 1), [3, 4, 5]);
        assert_eq!(chosen(RouterScores::Sigmoid, Some(&selection_bias[..]), 4, 2), [0, 3, 4, 5]);
        // Selecting all groups equals no groups.
        assert_eq!(chosen(RouterScores::Sigmoid, Some(&selection_bias[..]), 4, 3), [0, 3, 4, 7]);
    }

    #[test]
    fn a_non_finite_logit_is_selected_from_any_group() {
        for (scores, bad) in [(RouterScores::Softmax, f32::NAN), (RouterScores::Softmax, f32::INFINITY)]
            .into_iter()
            .chain([(RouterScores::Sigmoid, f32::NAN), (RouterScores::Sigmoid, f32::INFINITY)])
        {
            let mut logits = [9.0; 8];
            logits[5] = bad;
            let expert_groups = Some(ExpertGroups { n: 4, n_used: 1 });
            let routing = Routing { n_used: 2, scores, normalizes: true, scale: 1.0, expert_groups };
            let mut chooser = ExpertSelector::default();
            assert_eq!(chooser.choose(&logits, None, routing)[0].id, 5, "{scores:?}, {bad}");
        }
    }
}
