//! What types cost a stream, from what one of them was found to cost its layer.

use super::PROBE;
use super::prices::Price;
use super::search::Choice;
use crate::kld::Kld;
use crate::stats::Estimate;

/// The least that a stream in the coarse type is taken to cost, in nats: a head that nothing reads has a finer type too, once all
/// others have theirs.
const LEAST: f64 = 1e-9;

/// What `cache` adds to the divergence of a cache that loses nothing, in nats. Below zero where rounding hides it.
pub(super) fn difference(cache: &Kld, exact: &Kld) -> Estimate {
    let pairs = cache.chunks.iter().flatten().zip(exact.chunks.iter().flatten());
    Estimate::mean(pairs.map(|(cache, exact)| cache.kld - exact.kld))
}

/// What each type costs a head whose share of its layer's noise is `share`, where all of them were found to cost `alone` in the
/// coarse type. What is below its own standard error is no evidence of costing less than that: it is taken for as much, or no budget
/// would ever buy the stream another type.
pub(super) fn choices(prices: &[Price], alone: Estimate, share: f64) -> Vec<Choice> {
    let coarse = prices.iter().find(|price| price.dtype == PROBE).map_or(1.0, |price| price.noise);
    let cost = (alone.value.max(alone.stderr) * share).max(LEAST) / coarse;
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
    fn what_noise_hides_costs_as_much_as_could_be_hidden_and_the_finest_type_is_within_reach() {
        let of = |value, stderr, share| choices(&prices(), Estimate { value, stderr }, share);
        let costs = |choices: &[Choice]| choices.iter().map(|choice| choice.cost).collect::<Vec<_>>();
        for hidden in [0.0, -0.001, 0.0001] {
            assert_eq!(costs(&of(hidden, 0.0002, 0.5)), costs(&of(0.0002, 0.0, 0.5)), "{hidden}");
        }
        assert_eq!(of(0.01, 0.0002, 0.5)[0].cost, 0.005);
        // Hidden, exactly nothing, and a head that nothing reads.
        let streams =
            [of(0.01, 0.0002, 1.0), of(-0.001, 0.0002, 1.0), of(0.0, 0.0, 1.0), of(0.01, 0.0002, 0.0)];
        let frontier = Frontier::new(&streams);
        assert_eq!(frontier.types(0), [DType::Turbo2T; 4], "of as many bits the one that loses less");
        assert_eq!(frontier.types(frontier.len() - 1), [DType::Q8_0; 4]);
    }
}
