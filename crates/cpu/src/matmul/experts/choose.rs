//! Which experts a row chooses.

use kvant_backend::{Candidate, Routing, Scores, Teams, top_k};

use crate::exp::exp;

/// Chooses for one row after the other. Memory is kept from row to row.
#[derive(Default)]
pub(super) struct Chooser {
    best: Vec<Candidate>,
    /// What decides who is chosen, where that is not the logit: of all experts, of each team, of those in chosen teams.
    wishes: [Vec<f32>; 3],
    /// The chosen teams, in the order of their numbers.
    teams: Vec<usize>,
}

impl Chooser {
    /// The experts that a row chooses by its `logits` and handicaps `[n_experts]`, the most wanted first, each with its logit.
    pub fn choose(&mut self, logits: &[f32], handicaps: Option<&[f32]>, routing: Routing) -> &[Candidate] {
        let Self { best, wishes: [of_experts, of_teams, left], teams: chosen } = self;
        if (handicaps, routing.teams) == (None, None) {
            // A sigmoid leaves their order.
            top_k(logits, routing.n_used, best);
            return best;
        }
        of_experts.clear();
        match (routing.scores, handicaps) {
            (Scores::Softmax, _) => of_experts.extend_from_slice(logits),
            (Scores::Sigmoid, None) => of_experts.extend(logits.iter().map(|&logit| sigmoid(logit))),
            (Scores::Sigmoid, Some(handicaps)) => {
                of_experts.extend(logits.iter().zip(handicaps).map(|(&logit, by)| sigmoid(logit) + by));
            }
        }
        let Some(Teams { n, n_used }) = routing.teams else {
            top_k(of_experts, routing.n_used, best);
            best.iter_mut().for_each(|best| best.logit = logits[best.id as usize]);
            return best;
        };
        let size = of_experts.len() / n;
        let n_best = if routing.scores == Scores::Softmax { 1 } else { 2 };
        of_teams.clear();
        for team in of_experts.chunks_exact(size) {
            top_k(team, n_best, best);
            of_teams.push(best.iter().map(|best| best.logit).sum());
        }
        top_k(of_teams, n_used, best);
        chosen.clear();
        chosen.extend(best.iter().map(|team| team.id as usize));
        chosen.sort_unstable();
        left.clear();
        chosen.iter().for_each(|team| left.extend_from_slice(&of_experts[team * size..][..size]));
        top_k(left, routing.n_used, best);
        for Candidate { id, logit } in best.iter_mut() {
            let expert = chosen[*id as usize / size] * size + *id as usize % size;
            (*id, *logit) = (expert as u32, logits[expert]);
        }
        best
    }
}

/// `1 / (1 + exp(-x))`; NaN for infinity, which no router says in earnest.
pub(super) fn sigmoid(x: f32) -> f32 {
    if x == f32::INFINITY { f32::NAN } else { 1.0 / (1.0 + exp(-x)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_chooses_teams_by_their_best_and_then_experts_of_those() {
        // Teams of three: the first has the best expert, the second the best two, the last the best of all but for its handicap.
        let logits = [3.0, -2.0, -2.0, 2.0, 1.9, 0.0, -1.0, 1.0, 4.0].map(|x: f32| x / 2.0);
        let handicaps = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0];
        let chosen = |scores, handicaps, n_used, teams| {
            let teams = Some(Teams { n: 3, n_used: teams });
            let routing = Routing { n_used, scores, normalises: true, scale: 1.0, teams };
            let mut chooser = Chooser::default();
            let best = chooser.choose(&logits, handicaps, routing);
            assert!(best.iter().all(|best| best.logit == logits[best.id as usize]));
            best.iter().map(|best| best.id).collect::<Vec<_>>()
        };
        assert_eq!(chosen(Scores::Softmax, None, 3, 1), [8, 7, 6]);
        assert_eq!(chosen(Scores::Softmax, None, 3, 2), [8, 0, 7]);
        assert_eq!(chosen(Scores::Sigmoid, None, 3, 1), [8, 7, 6]);
        assert_eq!(chosen(Scores::Sigmoid, Some(&handicaps[..]), 3, 1), [3, 4, 5]);
        assert_eq!(chosen(Scores::Sigmoid, Some(&handicaps[..]), 4, 2), [0, 3, 4, 5]);
        // All teams are none.
        assert_eq!(chosen(Scores::Sigmoid, Some(&handicaps[..]), 4, 3), [0, 3, 4, 7]);
    }

    #[test]
    fn what_is_no_number_is_chosen_in_whichever_team() {
        for (scores, bad) in [(Scores::Softmax, f32::NAN), (Scores::Softmax, f32::INFINITY)]
            .into_iter()
            .chain([(Scores::Sigmoid, f32::NAN), (Scores::Sigmoid, f32::INFINITY)])
        {
            let mut logits = [9.0; 8];
            logits[5] = bad;
            let teams = Some(Teams { n: 4, n_used: 1 });
            let routing = Routing { n_used: 2, scores, normalises: true, scale: 1.0, teams };
            let mut chooser = Chooser::default();
            assert_eq!(chooser.choose(&logits, None, routing)[0].id, 5, "{scores:?}, {bad}");
        }
    }
}
