//! `kvant eval kld`.

use std::path::PathBuf;

use clap::Args;
use kvant::gguf::printable_path;
use kvant::{DType, KvOptions, Model};
use kvant_eval::report::{KldReport, KldRow, Part};
use kvant_eval::{Base, BaseReader, Chunks, Kld, KldOptions, KvConfig};

use super::{
    ConfigArgs, OutputArgs, StateArgs, about, add_to_report, bar, check_report, context_length, follow, row,
    row_of, text,
};
use crate::args::model::ModelArgs;
use crate::args::value::positive;
use crate::failure::Failure;
use crate::log;
use crate::output::{self, Row};

/// Arguments of `kvant eval kld`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant eval kld --chunks 2 -ctk q8_0,q8_0 -ctv turbo4,turbo3")]
pub struct KldArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    configs: ConfigArgs,
    #[command(flatten)]
    results: OutputArgs,
    #[command(flatten)]
    state: StateArgs,
    /// Evaluation text; - for stdin [default: built-in, without --base]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Compare with this file of llama-perplexity (or of eval ppl --save-base) instead of Kvant's
    /// f16 cache; it contains the text too
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Compare with this model, with its f16 cache and exact prefill, instead; same vocabulary:
    /// other weights of the same model
    #[arg(long, value_name = "MODEL", conflicts_with = "base")]
    against: Option<String>,
    /// Tokens per chunk, 0 for the model's training context [default: 512, or that of the base
    /// file]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Maximum number of chunks [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    chunks: Option<usize>,
    /// Tokens per batch (-ub); a batch reads its own keys from the cache: 1 is what decode sees
    #[arg(long, value_name = "N", value_parser = positive)]
    ubatch_size: Option<usize>,
    /// Add the results to a page in this folder, with a per-layer measurement of the coarsest types
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

/// Default configurations.
const DEFAULT: [(DType, DType); 7] = [
    (DType::F16, DType::F16),
    (DType::Q8_0, DType::Q8_0),
    (DType::Q4_0, DType::Q4_0),
    (DType::Turbo4, DType::Turbo4),
    (DType::Turbo3, DType::Turbo3),
    (DType::Turbo2, DType::Turbo2),
    (DType::Q8_0, DType::Turbo3),
];

/// Chunks of the per-layer measurement.
const LAYER_CHUNKS: usize = 4;

/// Runs the command.
pub fn kld(args: KldArgs) -> Result<(), Failure> {
    args.state.check()?;
    check_report(args.report.as_deref())?;
    let configs = args.configs.configs(&DEFAULT)?;
    let text = match (&args.file, &args.base) {
        (None, Some(_)) => None,
        (file, _) => Some(text(file.as_deref())?),
    };
    let model = args.model.open(args.results.quiet)?;
    let configs = args.configs.with_plan(configs, &model)?;
    let base = match (&args.base, &args.against) {
        (Some(path), _) => Base::open(path, &model)?,
        (None, Some(other)) => {
            let exact = args.model.with_exact_prefill();
            Base::model(exact.load_other(other, args.results.quiet)?, &model)?
        }
        (None, None) => Base::F16,
    };
    let in_file = base.chunks(&model, args.chunks)?;
    let requested = args.ctx_size.map(|n| context_length(n, &model));
    if let Some(in_file) = in_file.as_ref().filter(|chunks| requested.is_some_and(|n| n != chunks.n_ctx())) {
        return Err(Failure::Usage(format!("-c: the base has chunks of {} tokens", in_file.n_ctx())));
    }
    let chunks = match (in_file, &text) {
        (Some(chunks), None) => chunks,
        (in_file, text) => {
            let n_ctx = in_file.as_ref().map(Chunks::n_ctx).or(requested).unwrap_or(512);
            let max = args.chunks.or(in_file.as_ref().map(Chunks::len));
            Chunks::new(&model, text.as_deref().unwrap_or_default(), n_ctx, max)?
        }
    };
    if let Base::File(file) = &base {
        note_origin(file, &model);
    }

    let bar = bar("kld", &args.results);
    let options = KldOptions { configs: configs.clone(), step: args.ubatch_size };
    let state = args.state.path();
    let results = kvant_eval::kld(&model, &chunks, base, &options, state, &mut follow(&bar))?;
    let short: Vec<Row> = results.iter().map(short_row).collect();
    let full: Vec<Row> = results.iter().map(|result| full_row(result, chunks.len())).collect();
    let mut layers = (String::new(), Vec::new());
    if args.report.is_some()
        && let Some((kv, result)) = coarsest(&configs, &results)
    {
        let few = chunks.first(LAYER_CHUNKS);
        bar.set_prefix("layers");
        let by_layer = kvant_eval::kld_by_layer(&model, &few, kv, args.ubatch_size, &mut follow(&bar))?;
        layers = (result.kv.name(), by_layer);
    }
    bar.finish_and_clear();
    args.results.print(&short, &full)?;
    for note in results.iter().flat_map(|result| &result.kv.notes) {
        log::note(note);
    }
    add_to_report(args.report.as_deref(), || {
        Part::Kld(KldReport {
            about: about(&args.model, Some(&model), args.file.as_deref().or(args.base.as_deref())),
            n_ctx: chunks.n_ctx(),
            chunks: chunks.len(),
            rows: results.iter().map(KldRow::from).collect(),
            layers_of: layers.0,
            layers: layers.1,
        })
    })
}

/// Notes deviations of a base file.
fn note_origin(base: &BaseReader, model: &Model) {
    let path = printable_path(base.path());
    if base.fingerprint().is_some_and(|of| of != model.compute_fingerprint()) {
        log::note(format_args!("{path} is the base of another model, or of other weights"));
    }
    if base.is_f16() == Some(false) {
        log::note(format_args!(
            "{path} was computed with another cache than f16: differences are relative to it"
        ));
    }
}

/// Returns the configuration with the fewest bits, whose layers differ most.
fn coarsest<'a>(configs: &'a [KvOptions], results: &'a [Kld]) -> Option<(&'a KvOptions, &'a Kld)> {
    configs.iter().zip(results).min_by(|a, b| a.1.kv.bpv().total_cmp(&b.1.kv.bpv()))
}

/// Formats with six decimals; a negative rounding error becomes zero.
fn nats(kld: f64) -> String {
    format!("{:.6}", if kld.abs() < 5e-7 { 0.0 } else { kld })
}

/// Returns the short row.
fn short_row(result: &Kld) -> Row {
    let (s, kv) = (result.stats(), &result.kv);
    let share = 100.0 * kv.bytes as f64 / kv.bytes_f16 as f64;
    row([
        ("K / V", kv.name().into()),
        ("bits", bits(kv).into()),
        ("bytes", format!("{} ({share:.1} %)", output::bytes(kv.bytes)).into()),
        ("mean KLD", format!("{} ± {:.6}", nats(s.mean_kld.value), s.mean_kld.stderr).into()),
        ("median", nats(s.kld.median).into()),
        ("90 %", format!("{:.5}", s.kld.p90).into()),
        ("95 %", format!("{:.5}", s.kld.p95).into()),
        ("99 %", format!("{:.5}", s.kld.p99).into()),
        ("99.9 %", format!("{:.5}", s.kld.p99_9).into()),
        ("max", format!("{:.4}", s.kld.max).into()),
        ("same top", format!("{:.2} %", 100.0 * s.same_top.value).into()),
        ("Δp RMS", format!("{:.3} %", 100.0 * s.delta_p_rms.value).into()),
        ("PPL", format!("{:.4}", s.ppl.value).into()),
        ("PPL ratio", format!("{:.5} ± {:.5}", s.ppl_ratio.value, s.ppl_ratio.stderr).into()),
    ])
}

fn bits(kv: &KvConfig) -> String {
    if kv.bpv_k == kv.bpv_v {
        format!("{:.3}", kv.bpv_k)
    } else {
        format!("{:.3} / {:.3}", kv.bpv_k, kv.bpv_v)
    }
}

/// Returns the row with all fields.
fn full_row(result: &Kld, chunks: usize) -> Row {
    let s = result.stats();
    let mut full = row_of(&result.kv);
    full.extend(row([
        ("n_ctx", result.n_ctx.into()),
        ("chunks", chunks.into()),
        ("tokens", s.tokens.into()),
        ("mean_kld", s.mean_kld.value.into()),
        ("mean_kld_stderr", s.mean_kld.stderr.into()),
        ("median_kld", s.kld.median.into()),
        ("p1_kld", s.kld.p1.into()),
        ("p5_kld", s.kld.p5.into()),
        ("p10_kld", s.kld.p10.into()),
        ("p90_kld", s.kld.p90.into()),
        ("p95_kld", s.kld.p95.into()),
        ("p99_kld", s.kld.p99.into()),
        ("p99_9_kld", s.kld.p99_9.into()),
        ("max_kld", s.kld.max.into()),
        ("same_top", s.same_top.value.into()),
        ("delta_p", s.delta_p.value.into()),
        ("delta_p_rms", s.delta_p_rms.value.into()),
        ("ppl", s.ppl.value.into()),
        ("ppl_base", s.ppl_base.value.into()),
        ("ppl_ratio", s.ppl_ratio.value.into()),
        ("ppl_ratio_stderr", s.ppl_ratio.stderr.into()),
    ]));
    full
}
