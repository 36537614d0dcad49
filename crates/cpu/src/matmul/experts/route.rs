//! Which rows go through which expert.

use std::ops::Range;

use kvant_backend::{Candidate, Routing, top_k};

use crate::exp::exp;

/// The rows of a step, grouped by the experts that they chose.
#[derive(Default)]
pub(super) struct Routes {
    /// The row of each slot. Slots of an expert lie together, in the order of the rows.
    pub rows: Vec<u32>,
    /// What the expert weighs in the row of each slot.
    pub weights: Vec<f32>,
    /// Those that some row chose, in the order of their numbers.
    pub groups: Vec<Group>,
    /// Expert and weight, as each row chose them, `[rows, n_used]`.
    chosen: Vec<(u32, f32)>,
    best: Vec<Candidate>,
    /// The next free slot of each expert.
    next: Vec<usize>,
}

/// An expert, and the rows that chose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub expert: usize,
    pub slots: Range<usize>,
}

impl Routes {
    /// Lets the rows of `logits` `[rows, n_experts]` choose.
    pub fn choose(&mut self, logits: &[f32], n_experts: usize, routing: Routing) {
        self.chosen.clear();
        for row in logits.chunks_exact(n_experts) {
            top_k(row, routing.n_used, &mut self.best);
            weigh(row, &self.best, routing, &mut self.chosen);
        }
        self.next.clear();
        self.next.resize(n_experts, 0);
        self.chosen.iter().for_each(|&(expert, _)| self.next[expert as usize] += 1);
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
        for (i, &(expert, weight)) in self.chosen.iter().enumerate() {
            let slot = self.next[expert as usize];
            self.next[expert as usize] += 1;
            (self.rows[slot], self.weights[slot]) = ((i / routing.n_used) as u32, weight);
        }
    }
}

/// Adds the experts that a row chose, `best` of its `logits`, with their weights. The softmax of a logit that is NaN or infinite
/// is NaN for all.
fn weigh(logits: &[f32], best: &[Candidate], routing: Routing, chosen: &mut Vec<(u32, f32)>) {
    // What is no number comes first.
    let most = best.first().map_or(0.0, |best| best.logit);
    let share = |logit: f32| exp(logit - most);
    let total: f32 = match routing.normalises {
        true => best.iter().map(|best| share(best.logit)).sum(),
        false => logits.iter().map(|&logit| share(logit)).sum(),
    };
    chosen.extend(best.iter().map(|best| (best.id, routing.scale * (share(best.logit) / total))));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(logits: &[f32], n_experts: usize, n_used: usize, normalises: bool) -> Routes {
        let mut routes = Routes::default();
        routes.choose(logits, n_experts, Routing { n_used, normalises, scale: 2.0 });
        routes
    }

    fn groups(routes: &Routes) -> Vec<(usize, &[u32])> {
        routes.groups.iter().map(|group| (group.expert, &routes.rows[group.slots.clone()])).collect()
    }

    #[test]
    fn rows_are_grouped_in_order_and_equal_logits_go_to_lower_numbers() {
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
        again.choose(&logits[4..8], 4, Routing { n_used: 1, normalises: true, scale: 1.0 });
        assert_eq!((groups(&again), &again.weights[..]), (vec![(0, &[0][..])], &[1.0][..]));
    }

    #[test]
    fn weights_are_shares_of_all_or_of_the_chosen() {
        let logits = [1.0, 0.0, 2.0].map(|x: f32| x.ln_1p());
        // Shares 2, 1 and 3 of 6.
        for (normalises, want) in [(false, [2.0 / 6.0, 3.0 / 6.0]), (true, [2.0 / 5.0, 3.0 / 5.0])] {
            let routes = routes(&logits, 3, 2, normalises);
            for (got, want) in routes.weights.iter().zip(want) {
                assert!((got - 2.0 * want).abs() <= 1e-6, "{got} for {}", 2.0 * want);
            }
        }
    }

    #[test]
    fn a_logit_that_is_no_number_makes_every_weight_nan() {
        for bad in [f32::NAN, f32::INFINITY] {
            for normalises in [true, false] {
                let routes = routes(&[0.0, 1.0, bad, 2.0], 4, 2, normalises);
                assert!(routes.weights.iter().all(|weight| weight.is_nan()), "{:?}", routes.weights);
                assert_eq!(routes.groups.len(), 2);
            }
        }
    }
}
