//! Trains the tables of `src/trellis.rs`: `cargo run --release -p kvant-codec --example trellis`.
//! Takes a minute.

use kvant_codec::trellis::train::{round, samples, to_steps, train};

/// Training rounds on few samples, then on more.
const ROUNDS: usize = 30;

fn main() {
    for bits in [2, 3] {
        let levels = train(bits, ROUNDS, &samples(200_000, 1));
        let more = samples(1_000_000, 2);
        let levels = (0..ROUNDS).fold(levels, |levels, _| round(bits, &levels, &more).levels);
        println!(
            "{bits} bits, mean squared error {:.5}\n{:?}",
            round(bits, &levels, &more).mse,
            to_steps(&levels)
        );
    }
}
