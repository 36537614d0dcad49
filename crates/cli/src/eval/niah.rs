//! `kvant eval niah`.

use std::path::PathBuf;

use clap::Args;
use kvant::DType;
use kvant_eval::report::{NiahReport, Part};
use kvant_eval::{NeedleForm, NiahCell, NiahOptions};

use super::{
    ConfigArgs, OutputArgs, StateArgs, about, add_to_report, bar, check_report, context_length, follow, row,
    row_of, text,
};
use crate::args::model::ModelArgs;
use crate::failure::Failure;
use crate::output::Row;

/// Arguments of `kvant eval niah`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant eval niah -c 256,512 --depths 3 -ctk f16,turbo3")]
pub struct NiahArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    configs: ConfigArgs,
    #[command(flatten)]
    results: OutputArgs,
    #[command(flatten)]
    state: StateArgs,
    /// Haystack text that hides the needle; - for stdin [default: built-in]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Lengths of prompt and answer in tokens, a comma-separated list; 0 for the model's training
    /// context
    #[arg(short, long, value_name = "N", value_delimiter = ',', default_value = "256,512,1024")]
    ctx_size: Vec<usize>,
    /// Number of depths, evenly from the start of the haystack to its end
    #[arg(long, value_name = "N", default_value_t = 11)]
    depths: usize,
    /// Needles per haystack; each has its own question
    #[arg(long, value_name = "N", default_value_t = 1)]
    needles: usize,
    /// Wording: secret-word, magic-number, sandwich, or a JSON file
    #[arg(long, value_name = "FORM", default_value = "secret-word")]
    form: String,
    /// Apply the model's chat template to haystack and question
    #[arg(long)]
    chat: bool,
    /// Add the results to a page in this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// Default configurations.
const DEFAULT: [(DType, DType); 4] = [
    (DType::F16, DType::F16),
    (DType::Q8_0, DType::Q8_0),
    (DType::Turbo4, DType::Turbo4),
    (DType::Turbo3, DType::Turbo3),
];

/// Runs the command.
pub fn niah(args: NiahArgs) -> Result<(), Failure> {
    args.state.check()?;
    check_report(args.report.as_deref())?;
    let mut options = NiahOptions {
        lengths: args.ctx_size,
        depths: args.depths,
        needles: args.needles,
        form: NeedleForm::find(&args.form)?,
        chat: args.chat,
        configs: args.configs.configs(&DEFAULT)?,
    };
    let haystack = text(args.file.as_deref())?;
    let model = args.model.open(args.results.quiet)?;
    options.configs = args.configs.with_plan(options.configs, &model)?;
    options.lengths.iter_mut().for_each(|n| *n = context_length(*n, &model));
    let bar = bar("niah", &args.results);
    let state = args.state.path();
    let cells = kvant_eval::niah(&model, &haystack, &options, state, &mut follow(&bar))?;
    bar.finish_and_clear();
    args.results.print(&grid(&cells, options.depths), &cells.iter().map(row_of).collect::<Vec<_>>())?;
    add_to_report(args.report.as_deref(), || {
        Part::Niah(NiahReport {
            about: about(&args.model, Some(&model), args.file.as_deref()),
            form: options.form.name,
            needles: options.needles,
            cells,
        })
    })
}

/// Returns the grid: a row per type and length, a column for each of `depths`.
fn grid(cells: &[NiahCell], depths: usize) -> Vec<Row> {
    let of_length = |cells: &[NiahCell]| {
        let NiahCell { type_k, type_v, n_ctx, .. } = &cells[0];
        let mut full = row([("K / V", format!("{type_k}/{type_v}").into()), ("tokens", (*n_ctx).into())]);
        full.extend(cells.iter().map(|cell| (column(cell.depth, depths), score(cell).into())));
        full
    };
    cells.chunks(depths).map(of_length).collect()
}

/// Formats a depth with enough digits to distinguish it from the next.
fn column(depth: f64, depths: usize) -> String {
    let digits = depths.saturating_sub(2).checked_ilog10().unwrap_or(0).saturating_sub(1) as usize;
    format!("{:.digits$} %", 100.0 * depth)
}

fn score(cell: &NiahCell) -> String {
    match cell.exact == cell.token_accuracy {
        true => format!("{:.0} %", 100.0 * cell.exact),
        false => format!("{:.0} % ({:.0} % of tokens)", 100.0 * cell.exact, 100.0 * cell.token_accuracy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_has_a_row_per_length_and_a_column_per_depth() {
        for depths in [1, 2, 3, 101, 102, 103, 1001, 2000, 20_000] {
            let depth = |step: usize| if depths == 1 { 0.5 } else { step as f64 / (depths - 1) as f64 };
            let cell = |n_ctx, step| NiahCell {
                n_ctx,
                depth: depth(step),
                type_k: "f16".to_owned(),
                type_v: "q8_0".to_owned(),
                exact: 1.0,
                token_accuracy: 1.0,
            };
            let of_length = |n_ctx| (0..depths).map(move |step| cell(n_ctx, step));
            let cells: Vec<_> = [256, 512].into_iter().flat_map(of_length).collect();
            let rows = grid(&cells, depths);
            assert_eq!(
                rows.iter().map(|row| row["tokens"].clone()).collect::<Vec<_>>(),
                [256, 512],
                "{depths}"
            );
            assert!(rows.iter().all(|row| row.len() == depths + 2), "{depths}: {}", rows[0].len());
        }
        assert_eq!(
            (column(0.07, 101), column(0.5, 1), column(0.5, 201)),
            ("7 %".into(), "50 %".into(), "50.0 %".into())
        );
    }
}
