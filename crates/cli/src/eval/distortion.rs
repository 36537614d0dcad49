//! `kvant eval distortion`.

use std::path::PathBuf;

use clap::Args;
use kvant_eval::distortion::{Distortion, SCALE_BITS, captured, lower_bound, synthetic, upper_bound};
use kvant_eval::report::{DistortionReport, Part};

use super::{OutputArgs, about, add_to_report, bar, check_report, follow, row, row_of, text};
use crate::args::model::ModelArgs;
use crate::args::value::positive;
use crate::failure::Failure;
use crate::output::Row;

/// Arguments of `kvant eval distortion`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant eval distortion --vectors 2000")]
pub struct DistortionArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    results: OutputArgs,
    /// Values per synthetic vector
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = positive)]
    dim: usize,
    /// Synthetic vectors per distribution
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = positive)]
    vectors: usize,
    /// Seed of the synthetic vectors and queries
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also measure the K and V of the model for this text; - for stdin, a built-in one when only a
    /// model is given
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Tokens of the text to prefill
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = positive)]
    ctx_size: usize,
    /// Add the results to a page in this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// Runs the command.
pub fn distortion(args: DistortionArgs) -> Result<(), Failure> {
    check_report(args.report.as_deref())?;
    let mut rows = synthetic(args.dim, args.vectors, args.seed)?;
    let mut model = None;
    if args.file.is_some() || args.model.place.is_given() {
        let text = text(args.file.as_deref())?;
        let loaded = args.model.open(args.results.quiet)?;
        let mut tokens = loaded.text_prompt(&text, kvant::Special::AsText)?;
        tokens.truncate(args.ctx_size);
        let bar = bar("layers", &args.results);
        rows.extend(captured(&loaded, &tokens, args.seed, &mut follow(&bar))?);
        bar.finish_and_clear();
        model = Some(loaded);
    }
    args.results.print(
        &rows.iter().map(short_row).collect::<Vec<_>>(),
        &rows.iter().map(row_of).collect::<Vec<_>>(),
    )?;
    add_to_report(args.report.as_deref(), || {
        let about = about(&args.model, model.as_ref(), args.file.as_deref());
        Part::Distortion(DistortionReport { about, rows })
    })
}

fn short_row(d: &Distortion) -> Row {
    // The upper bound holds for whole turbo slices.
    let bounded = d.codec.starts_with("turbo") && d.dim.is_multiple_of(128);
    let upper = bounded.then(|| upper_bound(d.bpv - SCALE_BITS));
    let number = |x: f64| if x == 0.0 { "0".to_owned() } else { format!("{x:.3e}") };
    row([
        ("codec", d.codec.clone().into()),
        ("bits", format!("{:.3}", d.bpv).into()),
        ("dim", d.dim.into()),
        ("vectors", d.law.clone().into()),
        ("MSE", number(d.mse).into()),
        ("theory", d.theory_mse.map_or_else(String::new, number).into()),
        ("lower bound", number(lower_bound(d.bpv)).into()),
        ("upper bound", upper.map_or_else(String::new, number).into()),
        ("inner product", number(d.ip_error).into()),
    ])
}
