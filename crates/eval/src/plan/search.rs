//! Search of the type of each KV tensor: spends bits where they reduce the divergence most.
//!
//! Each tensor has a few types, each with its bits and its cost in divergence; costs add up. Along
//! the lower convex hull of a tensor's types, each step from one to the next saves a certain cost
//! per bit. All steps of all tensors, the best first, form a path from fewest bits to most on which
//! no other plan made of hull points is better at the same bits. The budget that remains between
//! two points of the path goes to later steps that are small enough.
//!
//! Costs of tensors that were measured alone predict the cost of a plan approximately: to meet a
//! goal, plans are measured whole, and the measurement corrects the next prediction.

use kvant::DType;

/// Maximum number of plans measured for a goal.
const MAX_TRIES: usize = 5;
/// A plan this close to its goal is accepted.
const CLOSE: f64 = 0.85;
/// Target after a missed goal, as a share of it.
const AIM: f64 = 0.95;

/// A type of a KV tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Choice {
    pub dtype: DType,
    /// Bits per token.
    pub bits: f64,
    /// Divergence that it adds.
    pub cost: f64,
}

/// A better type for a KV tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    tensor: usize,
    to: DType,
    bits: f64,
    saved: f64,
}

/// All efficient plans, from fewest bits to most.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Frontier {
    fewest_bits: Vec<DType>,
    steps: Vec<Step>,
    /// Bits and cost after each number of steps.
    points: Vec<(f64, f64)>,
}

impl Frontier {
    /// Computes the frontier of KV tensors, each with at least one choice.
    pub fn new(tensors: &[Vec<Choice>]) -> Self {
        let hulls: Vec<_> = tensors.iter().map(|choices| hull(choices)).collect();
        let (mut bits, mut cost) = (0.0, 0.0);
        hulls.iter().for_each(|hull| (bits, cost) = (bits + hull[0].bits, cost + hull[0].cost));
        let step = |tensor: usize, pair: &[Choice]| Step {
            tensor,
            to: pair[1].dtype,
            bits: pair[1].bits - pair[0].bits,
            saved: pair[0].cost - pair[1].cost,
        };
        let steps = hulls.iter().enumerate();
        let steps = steps.flat_map(|(tensor, hull)| hull.windows(2).map(move |pair| step(tensor, pair)));
        let mut steps: Vec<_> = steps.collect();
        // Stable: steps of one tensor stay in their order.
        steps.sort_by(|a, b| (b.saved / b.bits).total_cmp(&(a.saved / a.bits)));
        let mut points = vec![(bits, cost)];
        for step in &steps {
            (bits, cost) = (bits + step.bits, cost - step.saved);
            points.push((bits, cost));
        }
        Self { fewest_bits: hulls.iter().map(|hull| hull[0].dtype).collect(), steps, points }
    }

    /// Returns bits and cost of all plans, from fewest bits to most.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.points
    }

    /// Returns the number of plans.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Returns the bits of plan `n`, and its cost.
    pub fn point(&self, n: usize) -> (f64, f64) {
        self.points[n]
    }

    /// Returns the types of plan `n`, tensor by tensor.
    pub fn types(&self, n: usize) -> Vec<DType> {
        let mut types = self.fewest_bits.clone();
        self.steps[..n].iter().for_each(|step| types[step.tensor] = step.to);
        types
    }

    /// Returns the types, tensor by tensor, after the best steps within this many bits: a step that
    /// is too large stops its tensor, and others continue. Below the minimum of all plans, returns
    /// the plan without steps.
    pub fn within_bits(&self, bits: f64) -> Vec<DType> {
        let mut types = self.fewest_bits.clone();
        let mut stopped = vec![false; types.len()];
        // The sum of many bit counts is inexact.
        let mut left = bits * (1.0 + 1e-9) - self.points[0].0;
        for step in &self.steps {
            stopped[step.tensor] |= step.bits > left;
            if !stopped[step.tensor] {
                left -= step.bits;
                types[step.tensor] = step.to;
            }
        }
        types
    }

    /// Returns the smallest plan with at most this cost, or the one with the lowest cost.
    pub fn within_cost(&self, cost: f64) -> usize {
        // No cost is below NaN.
        let is_above = |point: &(f64, f64)| point.1 > cost || cost.is_nan();
        self.points.partition_point(is_above).min(self.len() - 1)
    }

    /// Searches the plan with the fewest bits whose measured cost is at most `goal`, or else the
    /// plan nearest to it, and returns its measurement. `measure` takes a plan's index, and returns
    /// its cost and measurement.
    pub fn search<T, E>(
        &self,
        goal: f64,
        mut measure: impl FnMut(usize) -> Result<(f64, T), E>,
    ) -> Result<T, E> {
        // The first plan that may meet the goal and the first that did: the result lies between
        // them.
        let (mut low, mut high) = (0, self.len());
        let (mut n, mut last) = (self.within_cost(goal), None::<(f64, f64)>);
        let mut best = None::<(f64, T)>;
        for n_left in (0..MAX_TRIES).rev() {
            let (cost, measured) = measure(n)?;
            let meets_goal = cost <= goal;
            // A plan that meets the goal is smaller than the earlier ones that did.
            if meets_goal || best.as_ref().is_none_or(|(nearest, _)| cost < *nearest) {
                best = Some((if meets_goal { 0.0 } else { cost }, measured));
            }
            (low, high) = if meets_goal { (low, n) } else { (n + 1, high) };
            // Models the cost as a power of the prediction: 1 at first, then fitted to two plans.
            let [x, y] = [self.point(n).1, cost].map(f64::ln);
            let power = last.map_or(1.0, |(x0, y0)| ((y - y0) / (x - x0)).clamp(1.0 / 3.0, 3.0));
            last = Some((x, y));
            let aim = if meets_goal { goal } else { AIM * goal };
            let predicted = (x + (aim.ln() - y) / power).exp();
            // A cost of zero allows no prediction.
            let next = if predicted.is_finite() { self.within_cost(predicted) } else { (low + high) / 2 };
            if low >= high || (CLOSE * goal..=goal).contains(&cost) || (meets_goal && next >= high) {
                break;
            }
            // The last try is the plan with the lowest cost, if no plan has met the goal.
            let is_last_try = n_left == 1 && high == self.len();
            n = if is_last_try { high - 1 } else { next.clamp(low, high - 1) };
        }
        Ok(best.expect("one plan was measured").1)
    }
}

/// Returns the choices on the lower convex hull, from fewest bits to most.
fn hull(choices: &[Choice]) -> Vec<Choice> {
    let mut sorted = choices.to_vec();
    sorted.sort_by(|a, b| a.bits.total_cmp(&b.bits).then(a.cost.total_cmp(&b.cost)));
    let mut hull: Vec<Choice> = Vec::new();
    for choice in sorted {
        let beats = |last: &Choice| choice.cost < last.cost && choice.bits > last.bits;
        if choice.cost.is_nan() || hull.last().is_some_and(|last| !beats(last)) {
            continue;
        }
        let slope = |a: &Choice, b: &Choice| (a.cost - b.cost) / (b.bits - a.bits);
        while let [.., a, b] = &hull[..]
            && slope(a, b) <= slope(b, &choice)
        {
            hull.pop();
        }
        hull.push(choice);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(weight: f64) -> Vec<Choice> {
        let choice = |(dtype, bits, cost)| Choice { dtype, bits, cost: weight * cost };
        let all = [
            (DType::Turbo2, 2.0, 0.12),
            (DType::Turbo3, 3.0, 0.035),
            (DType::Q4_0, 4.5, 0.02),
            (DType::Turbo4, 4.0, 0.01),
            (DType::Q8_0, 8.0, 0.0001),
        ];
        all.map(choice).to_vec()
    }

    #[test]
    fn dominated_types_are_never_chosen() {
        let names = |choices: &[Choice]| hull(choices).iter().map(|c| c.dtype).collect::<Vec<_>>();
        assert_eq!(names(&choices(1.0)), [DType::Turbo2, DType::Turbo3, DType::Turbo4, DType::Q8_0]);
        // A tensor without a cost stays at the fewest bits.
        assert_eq!(names(&choices(0.0)), [DType::Turbo2]);
        let nan = [Choice { cost: f64::NAN, ..choices(1.0)[1] }, choices(1.0)[0]];
        assert_eq!(names(&nan), [DType::Turbo2]);
    }

    #[test]
    fn no_plan_of_as_many_bits_costs_less() {
        let tensors = [choices(1.0), choices(5.0), choices(0.2)];
        let frontier = Frontier::new(&tensors);
        let mut cheapest = vec![f64::INFINITY; frontier.len()];
        for a in 0..5 {
            for b in 0..5 {
                for c in 0..5 {
                    let picked = [tensors[0][a], tensors[1][b], tensors[2][c]];
                    let (bits, cost): (f64, f64) =
                        (picked.iter().map(|p| p.bits).sum(), picked.iter().map(|p| p.cost).sum());
                    for (n, lowest) in cheapest.iter_mut().enumerate() {
                        if bits <= frontier.point(n).0 + 1e-9 {
                            *lowest = lowest.min(cost);
                        }
                    }
                }
            }
        }
        for (n, lowest) in cheapest.iter().enumerate() {
            assert!(
                (frontier.point(n).1 - lowest).abs() < 1e-9,
                "plan {n}: {} {lowest}",
                frontier.point(n).1
            );
        }
    }

    #[test]
    fn a_goal_is_met_with_the_fewest_bits_or_the_least_cost() {
        let frontier = Frontier::new(&[choices(1.0), choices(5.0)]);
        assert_eq!(frontier.within_bits(4.0), [DType::Turbo2; 2]);
        assert_eq!(frontier.within_bits(5.5), [DType::Turbo2, DType::Turbo3]);
        let n = frontier.within_cost(0.25);
        assert!(frontier.point(n).1 <= 0.25 && frontier.point(n - 1).1 > 0.25);
        assert_eq!(frontier.within_cost(0.0), frontier.len() - 1);
        assert_eq!(frontier.within_cost(f64::NAN), frontier.len() - 1);
    }

    /// Returns the plan that meets the goal, and the measured plans.
    fn search(frontier: &Frontier, goal: f64, cost: impl Fn(usize) -> f64) -> (usize, Vec<usize>) {
        let mut measured = Vec::new();
        let found = frontier.search(goal, |n| {
            measured.push(n);
            Ok::<_, ()>((cost(n), n))
        });
        (found.unwrap(), measured)
    }

    #[test]
    fn goals_are_met_by_measured_costs_despite_wrong_predictions() {
        let frontier =
            Frontier::new(&(1..=40).map(|n| choices(0.1 + (n * 29 % 40) as f64)).collect::<Vec<_>>());
        let widest = frontier.len() - 1;
        let predicted = |n: usize| frontier.point(n).1;
        let as_predicted = |cost: f64| cost;
        let more = |cost: f64| 3.0 * cost;
        let less = |cost: f64| 0.3 * cost;
        let less_than_the_sum = |cost: f64| 2.0 * cost.powf(0.6);
        let more_than_the_sum = |cost: f64| 0.1 * cost.powf(1.4);
        let with_offset = |cost: f64| cost + 0.2;
        let laws: [&dyn Fn(f64) -> f64; 6] =
            [&as_predicted, &more, &less, &less_than_the_sum, &more_than_the_sum, &with_offset];
        for (index, law) in laws.iter().enumerate() {
            let cost = |n: usize| law(predicted(n));
            for share in 1..50 {
                let goal = cost(widest) * (cost(0) / cost(widest)).powf(share as f64 / 50.0);
                let fewest = (0..=widest).find(|&n| cost(n) <= goal).unwrap();
                let (found, measured) = search(&frontier, goal, cost);
                let context = format!("law {index}, goal {goal}: {found} of {measured:?}, fewest {fewest}");
                assert!(cost(found) <= goal && measured.len() <= MAX_TRIES, "{context}");
                // At most half of the allowed cost is unused, unless a step is that large.
                assert!(cost(found) >= 0.5 * goal || found == fewest, "{context}");
                if index == 0 {
                    assert_eq!((found, &measured[..]), (fewest, &[fewest][..]), "{context}");
                }
                assert!((1..measured.len()).all(|n| !measured[..n].contains(&measured[n])), "{context}");
            }
            // If no plan meets the goal, the widest was measured, which is nearest.
            let (found, measured) = search(&frontier, 0.9 * cost(widest), cost);
            assert_eq!((found, measured.last()), (widest, Some(&widest)), "law {index}: {measured:?}");
        }
    }

    #[test]
    fn converging_misses_do_not_end_at_the_widest_plan() {
        // As observed with a model: far above the prediction, the more so the lower the prediction.
        let tensor = (0..31).map(|n| {
            let cost = 1e-3 * (-0.1 * f64::from(n)).exp();
            Choice { dtype: DType::Q8_0, bits: f64::from(n + 1), cost }
        });
        let frontier = Frontier::new(&[tensor.collect()]);
        assert_eq!(frontier.len(), 31);
        let cost = |n: usize| if n == 30 { 0.0 } else { frontier.point(n).1.sqrt() };
        let (found, measured) = search(&frontier, 0.0185, cost);
        assert!((CLOSE * 0.0185..=0.0185).contains(&cost(found)), "{found} of {measured:?}");
    }

    #[test]
    fn costs_of_zero_or_nan_end_the_search() {
        let frontier = Frontier::new(&[choices(1.0), choices(5.0)]);
        // The cost is zero from the fewest bits on.
        let (found, measured) = search(&frontier, 0.25, |_| 0.0);
        assert!(found < measured[0] && measured.len() > 1, "{found} of {measured:?}");
        let (_, measured) = search(&frontier, 0.25, |_| f64::NAN);
        assert!(measured.contains(&(frontier.len() - 1)), "{measured:?}");
        let error = frontier.search(0.25, |_| Err::<(f64, ()), _>("broken"));
        assert_eq!(error, Err("broken"));
    }

    #[test]
    fn bits_left_by_a_large_step_go_to_other_tensors_in_order() {
        // The last steps, of four bits each, come after all others: the second tensor's first.
        let frontier = Frontier::new(&[choices(1.0), choices(5.0)]);
        assert_eq!(frontier.within_bits(12.0), [DType::Turbo4, DType::Q8_0]);
        // A wide tensor whose next step is too large, and a narrow one that would come later.
        let wide = choices(5.0).into_iter().map(|choice| Choice { bits: 10.0 * choice.bits, ..choice });
        let frontier = Frontier::new(&[wide.collect(), choices(0.2)]);
        let order: Vec<_> = frontier.steps.iter().map(|step| step.tensor).collect();
        assert_eq!(order, [0, 1, 0, 1, 0, 1]);
        assert_eq!(frontier.within_bits(30.0 + 9.0), [DType::Turbo3, DType::Q8_0]);
        assert_eq!(frontier.within_bits(30.0 + 3.5), [DType::Turbo3, DType::Turbo3]);
        // A small step counts from the large one before it.
        let steps = [(DType::Turbo2, 2.0, 1.0), (DType::Turbo4, 10.0, 0.1), (DType::Q8_0, 10.5, 0.09)];
        let tensor = steps.map(|(dtype, bits, cost)| Choice { dtype, bits, cost }).to_vec();
        assert_eq!(Frontier::new(&[tensor]).within_bits(5.0), [DType::Turbo2]);
    }
}
