//! Prints the distortion table of `docs/formats.md`:
//! `cargo run --release -p kvant-codec --example distortion`.

use kvant_codec::distortion::{FileBytes, measure};
use kvant_codec::{CodecError, DType};

fn main() -> Result<(), CodecError> {
    println!("| format | dim | vectors | bits per value | MSE | theory | inner product |");
    println!("|---|---|---|---|---|---|---|");
    for dim in [128, 64, 80] {
        for codec in DType::KV {
            for source in [FileBytes::Gaussian, FileBytes::Sphere, FileBytes::Outliers] {
                let d = measure(codec, dim, source, 20_000, 1)?;
                let theory = d.theory_mse.map_or("".to_owned(), |t| format!("{t:.4e}"));
                println!(
                    "| {codec} | {dim} | {} | {:.3} | {:.4e} | {theory} | {:.4e} |",
                    source.name(),
                    d.bpv,
                    d.mse,
                    d.ip_error
                );
            }
        }
    }
    Ok(())
}
