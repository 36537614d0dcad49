//! Costs of the types of a KV tensor, from the measured cost of one type in its layer.

use super::PROBE;
use super::search::Choice;
use super::type_costs::Price;
use crate::kld::Kld;
use crate::stats::Estimate;

/// Minimum cost of a KV tensor in the coarse type, in nats: unread heads get a finer type too, once
/// all others have theirs.
const MIN_COST: f64 = 1e-9;

/// Returns the divergence that `cache` adds to that of a lossless cache, in nats. Negative where
/// rounding hides it.
pub(super) fn difference(cache: &Kld, exact: &Kld) -> Estimate {
    let pairs = cache.chunks.iter().flatten().zip(exact.chunks.iter().flatten());
    Estimate::mean(pairs.map(|(cache, exact)| cache.kld - exact.kld))
}

/// Returns the cost of each type for a head whose share of its layer's noise is `share`, where the
/// layer was measured to cost `alone` in the coarse type. A cost below its standard error may be as
/// large as that: it is taken as the standard error, or no budget would ever buy the tensor another
/// type.
pub(super) fn choices(prices: &[Price], alone: Estimate, share: f64) -> Vec<Choice> {
    let coarse = prices.iter().find(|price| price.dtype == PROBE).map_or(1.0, |price| price.noise);
    let cost = (alone.value.max(alone.stderr) * share).max(MIN_COST) / coarse;
    prices
        .iter()
        .map(|price| Choice { dtype: price.dtype, bits: price.bits, cost: cost * price.noise })
        .collect()
}

#[cfg(test)]
mod tests {
    use kvant::DType;

    use super::super::search::Frontier;
    use super::*;

    fn prices() -> Vec<Price> {
        let price = |(dtype, bits, noise)| Price { dtype, bits, noise };
        let all = [
            (DType::Turbo2, 2.25, 0.1175),
            (DType::Turbo2T, 2.25, 0.08),
            (DType::Turbo3, 3.25, 0.0345),
            (DType::Turbo4, 4.25, 0.0093),
            (DType::Q8_0, 8.5, 0.00003),
        ];
        all.map(price).to_vec()
    }

    #[test]
    fn hidden_costs_are_bounded_by_the_standard_error() {
        let of = |value, stderr, share| choices(&prices(), Estimate { value, stderr }, share);
        let costs = |choices: &[Choice]| choices.iter().map(|choice| choice.cost).collect::<Vec<_>>();
        for hidden in [0.0, -0.001, 0.0001] {
            assert_eq!(costs(&of(hidden, 0.0002, 0.5)), costs(&of(0.0002, 0.0, 0.5)), "{hidden}");
        }
        assert_eq!(of(0.01, 0.0002, 0.5)[0].cost, 0.005);
        // A hidden cost, a cost of exactly zero, and an unread head.
        let tensors =
            [of(0.01, 0.0002, 1.0), of(-0.001, 0.0002, 1.0), of(0.0, 0.0, 1.0), of(0.01, 0.0002, 0.0)];
        let frontier = Frontier::new(&tensors);
        assert_eq!(frontier.types(0), [DType::Turbo2T; 4], "of as many bits the one that loses less");
        assert_eq!(frontier.types(frontier.len() - 1), [DType::Q8_0; 4]);
    }
}
