//! Assignment of rows to experts.

use std::ops::Range;

use kvant_backend::{Candidate, RouterScores, Routing};

use super::select::{ExpertSelector, max_logit, score};
use crate::ops::exp::exp;

/// See [`Router`](kvant_backend::Router).
#[derive(Clone, Copy)]
pub(crate) struct Choice<'a> {
    pub routing: Routing,
    /// `[rows, n_experts]`
    pub logits: &'a [f32],
    /// `[n_experts]`
    pub selection_bias: Option<&'a [f32]>,
    /// `[n_experts]`
    pub scales: Option<&'a [f32]>,
    /// `[rows, n_used]`
    pub chosen: Option<&'a [f32]>,
}

/// The rows of a step, grouped by their experts.
#[derive(Default)]
pub(super) struct Routes {
    /// The row of each slot. Slots of an expert are contiguous, in the order of the rows.
    pub rows: Vec<u32>,
    /// The router weight of each slot.
    pub weights: Vec<f32>,
    /// The experts with at least one row, in ascending order.
    pub groups: Vec<Group>,
    /// Expert and router weight for each row, `[rows, n_used]`.
    selected: Vec<(u32, f32)>,
    chooser: ExpertSelector,
    /// The next free slot of each expert.
    next: Vec<usize>,
}

/// An expert, and the slots of its rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub expert: usize,
    pub slots: Range<usize>,
}

impl Routes {
    /// Routes the rows among `n_experts` experts.
    pub fn choose(&mut self, choice: Choice<'_>, n_experts: usize) {
        let Choice { routing, logits, selection_bias, scales, chosen } = choice;
        self.selected.clear();
        for (row, logits) in logits.chunks_exact(n_experts).enumerate() {
            let best = match chosen {
                Some(chosen) => self.chooser.take(logits, &chosen[row * routing.n_used..][..routing.n_used]),
                None => self.chooser.choose(logits, selection_bias, routing),
            };
            add_weights(logits, best, routing, &mut self.selected);
        }
        if let Some(scales) = scales {
            self.selected.iter_mut().for_each(|(expert, weight)| *weight *= scales[*expert as usize]);
        }
        self.next.clear();
        self.next.resize(n_experts, 0);
        self.selected.iter().for_each(|&(expert, _)| self.next[expert as usize] += 1);
        self.groups.clear();
        let mut end = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let slots = end..end + *next;
            (*next, end) = (slots.start, slots.end);
            if !slots.is_empty() {
                self.groups.push(Group { expert, slots });
            }
        }
        self.rows.resize(end, 0);
        self.weights.resize(end, 0.0);
        for (i, &(expert, weight)) in self.selected.iter().enumerate() {
            let slot = self.next[expert as usize];
            self.next[expert as usize] += 1;
            (self.rows[slot], self.weights[slot]) = ((i / routing.n_used) as u32, weight);
        }
    }

    /// Routes slice i of every one of `rows` rows of `n` slices to matrix i: a slot's row is the
    /// index of its slice.
    pub fn route_slices(&mut self, rows: usize, n: usize) {
        let slots = |expert| expert * rows..(expert + 1) * rows;
        self.groups.clear();
        self.groups.extend((0..n).filter(|_| rows > 0).map(|expert| Group { expert, slots: slots(expert) }));
        self.rows.clear();
        self.rows.extend((0..n).flat_map(|expert| (0..rows).map(move |row| (row * n + expert) as u32)));
    }
}

/// Appends the experts of a row, `best` of its `logits`, with their weights.
fn add_weights(logits: &[f32], best: &[Candidate], routing: Routing, chosen: &mut Vec<(u32, f32)>) {
    match routing.scores {
        RouterScores::Softmax => add_softmax_weights(logits, best, routing, chosen),
        RouterScores::Sigmoid | RouterScores::SqrtSoftplus => {
            let score = |best: &Candidate| score(routing.scores, best.logit);
            let total = match routing.normalizes {
                true => best.iter().map(score).sum::<f32>() + RouterScores::SUM_EPSILON,
                false => 1.0,
            };
            chosen.extend(best.iter().map(|best| (best.id, routing.scale * (score(best) / total))));
        }
        RouterScores::SparseMixer => {
            for (j, Candidate { id, logit: top }) in best.iter().enumerate() {
                let is_left = |e: usize| best[..j].iter().all(|before| before.id as usize != e);
                let left = logits.iter().enumerate().filter(|(e, _)| is_left(*e)).map(|(_, logit)| *logit);
                let near = left.filter(|logit| RouterScores::is_near(*logit, *top));
                let total: f32 = near.map(|logit| exp(logit - top)).sum();
                chosen.push((*id, routing.scale / total));
            }
        }
    }
}

/// Does the work of [`weigh`] for a softmax, which is NaN for all experts if a logit is NaN or
/// infinite.
fn add_softmax_weights(logits: &[f32], best: &[Candidate], routing: Routing, chosen: &mut Vec<(u32, f32)>) {
    let max = max_logit(logits);
    let share = |logit: f32| exp(logit - max);
    let total: f32 = match routing.normalizes {
        true => best.iter().map(|best| share(best.logit)).sum(),
        false => logits.iter().map(|&logit| share(logit)).sum(),
    };
    chosen.extend(best.iter().map(|best| (best.id, routing.scale * (share(best.logit) / total))));
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Routing = Routing {
        n_used: 2,
        scores: RouterScores::Softmax,
        normalizes: true,
        scale: 2.0,
        expert_groups: None,
    };

    fn choice(logits: &[f32], routing: Routing) -> Choice<'_> {
        Choice { routing, logits, selection_bias: None, scales: None, chosen: None }
    }

    fn routes(logits: &[f32], n_experts: usize, n_used: usize, normalizes: bool) -> Routes {
        let mut routes = Routes::default();
        routes.choose(choice(logits, Routing { n_used, normalizes, ..USUAL }), n_experts);
        routes
    }

    fn groups(routes: &Routes) -> Vec<(usize, &[u32])> {
        routes.groups.iter().map(|group| (group.expert, &routes.rows[group.slots.clone()])).collect()
    }

    #[test]
    fn rows_are_grouped_in_order_and_ties_go_to_lower_experts() {
        #[rustfmt::skip]
        let logits = [
            0.0, 1.0, 0.0, 0.0,
            3.0, 1.0, 2.0, 0.0,
            5.0, 5.0, 5.0, 5.0,
        ];
        assert_eq!(groups(&routes(&logits, 4, 2, true)), [(0, &[0, 1, 2][..]), (1, &[0, 2]), (2, &[1])]);
        assert_eq!(groups(&routes(&logits[..4], 4, 4, true)).len(), 4);
        assert_eq!(groups(&routes(&[], 4, 2, true)), []);
        let mut again = routes(&logits, 4, 3, true);
        again.choose(choice(&logits[4..8], Routing { n_used: 1, scale: 1.0, ..USUAL }), 4);
        assert_eq!((groups(&again), &again.weights[..]), (vec![(0, &[0][..])], &[1.0][..]));
    }

    #[test]
    fn weights_are_normalized_over_all_or_selected_experts() {
        let logits = [1.0, 0.0, 2.0].map(|x: f32| x.ln_1p());
        // Probabilities 2/6, 1/6 and 3/6.
        for (normalizes, want) in [(false, [2.0 / 6.0, 3.0 / 6.0]), (true, [2.0 / 5.0, 3.0 / 5.0])] {
            let routes = routes(&logits, 3, 2, normalizes);
            for (got, want) in routes.weights.iter().zip(want) {
                assert!((got - 2.0 * want).abs() <= 1e-6, "{got} for {}", 2.0 * want);
            }
        }
    }

    #[test]
    fn a_selection_bias_affects_selection_but_not_weights() {
        let logits = [0.25, 0.5, 0.75, 0.125].map(|p: f32| (p / (1.0 - p)).ln());
        let mut routes = Routes::default();
        for (normalizes, total) in [(false, 1.0), (true, 0.375)] {
            let routing = Routing { normalizes, scores: RouterScores::Sigmoid, ..USUAL };
            let selection_bias = Some(&[0.5, -0.5, -0.5, 0.5][..]);
            routes.choose(Choice { selection_bias, ..choice(&logits, routing) }, 4);
            assert_eq!(groups(&routes), [(0, &[0][..]), (3, &[0])]);
            for (got, want) in routes.weights.iter().zip([0.25, 0.125]) {
                assert!((got - 2.0 * want / total).abs() <= 1e-6, "{got} for {}", 2.0 * want / total);
            }
        }
        // A selection bias of zeros changes nothing.
        let routing = Routing { scores: RouterScores::Sigmoid, ..USUAL };
        routes.choose(Choice { selection_bias: Some(&[0.0; 4]), ..choice(&logits, routing) }, 4);
        let weights = routes.weights.clone();
        routes.choose(choice(&logits, routing), 4);
        assert_eq!((groups(&routes), routes.weights.clone()), (vec![(1, &[0][..]), (2, &[0])], weights));
    }

    #[test]
    fn chosen_experts_have_the_weights_of_their_scores() {
        let routing = Routing { scores: RouterScores::SqrtSoftplus, ..USUAL };
        let mut routes = Routes::default();
        // Scores whose squares are 4, 1, 9 and 0.25.
        let logits = [4.0, 1.0, 9.0, 0.25].map(|x: f32| x.exp_m1().ln());
        routes.choose(Choice { chosen: Some(&[3.0, 0.0]), ..choice(&logits, routing) }, 4);
        assert_eq!(groups(&routes), [(0, &[0][..]), (3, &[0])]);
        for (got, want) in routes.weights.iter().zip([2.0 * 2.0 / 2.5, 2.0 * 0.5 / 2.5]) {
            assert!((got - want).abs() <= 1e-6, "{got} for {want}");
        }
        routes.choose(Choice { chosen: Some(&[4.0, 0.0]), ..choice(&logits, routing) }, 4);
        assert!(routes.weights.iter().all(|weight| weight.is_nan()), "{:?}", routes.weights);
    }

    #[test]
    fn sparse_mixer_shares_weights_among_near_experts_that_are_left() {
        let routing = Routing { scores: RouterScores::SparseMixer, normalizes: false, scale: 1.0, ..USUAL };
        let mut routes = Routes::default();
        routes.choose(choice(&[1.0, 2.0, 1.97, 1.9, -3.0], routing), 5);
        assert_eq!(groups(&routes), [(1, &[0][..]), (2, &[0])]);
        // 1.97 is within 2 % of 2, and 1.9 is not within 2 % of 1.97.
        for (got, want) in routes.weights.iter().zip([1.0 / (1.0 + (-0.03_f32).exp()), 1.0]) {
            assert!((got - want).abs() <= 1e-6, "{got} for {want}");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            routes.choose(choice(&[0.0, 1.0, bad, 2.0], routing), 4);
            assert!(routes.weights.iter().any(|weight| weight.is_nan()), "{:?}", routes.weights);
        }
    }

    #[test]
    fn a_non_finite_logit_makes_every_weight_nan() {
        for bad in [f32::NAN, f32::INFINITY] {
            for normalizes in [true, false] {
                let routes = routes(&[0.0, 1.0, bad, 2.0], 4, 2, normalizes);
                assert!(routes.weights.iter().all(|weight| weight.is_nan()), "{:?}", routes.weights);
                assert_eq!(routes.groups.len(), 2);
            }
        }
    }
}
