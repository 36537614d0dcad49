//! `kvant bench --profile`: decode attention with the stages of the KV cache read omitted one by
//! one, and the kernels of a decoded token on devices that time them.

use kvant::{DType, Measure, Model, Session, SessionOptions};
use serde_json::Value;

use super::BenchArgs;
use crate::failure::Failure;
use crate::output::{self, Format, Row};

/// Decoded tokens whose kernels are timed.
const TOKENS: usize = 8;

/// Measures and prints every pair of types at every depth.
pub fn profile(
    args: &BenchArgs,
    pairs: Vec<(DType, DType)>,
    name: &str,
    model: &Model,
) -> Result<(), Failure> {
    let depths: Vec<usize> = args.n_depth.0.iter().copied().filter(|&depth| depth > 0).collect();
    let Some(&max_depth) = depths.iter().max() else {
        return Err(Failure::Usage("--profile needs a depth: try -d 4096".to_owned()));
    };
    let mut rows = Vec::new();
    for kv in args.caches(pairs, model)? {
        let n_ctx = Some(max_depth + TOKENS + 1);
        let mut session = model.session(SessionOptions { n_ctx, kv })?;
        for &depth in &depths {
            if depth < session.tokens().len() {
                session.rewind(depth)?;
            }
            session.fill_random(depth - session.tokens().len(), depth as u64)?;
            for time in session.profile_attention(args.repetitions.max(1))? {
                let per_pair = number(1e9 * time.seconds / time.pairs as f64, args.output);
                let part = [
                    ("stage", time.stage.into()),
                    ("launches", Value::Null),
                    ("ms_per_token", number(1e3 * time.seconds, args.output)),
                    ("ns_per_pair", per_pair),
                ];
                rows.push(row(name, model, &session, part));
            }
            for time in session.profile_kernels(TOKENS)? {
                let per_token = time.seconds / TOKENS as f64;
                let part = [
                    ("stage", format!("kernel {}", time.kernel).into()),
                    ("launches", (time.launches / TOKENS as u64).into()),
                    ("ms_per_token", number(1e3 * per_token, args.output)),
                    ("ns_per_pair", Value::Null),
                ];
                rows.push(row(name, model, &session, part));
            }
        }
    }
    output::print_rows(&rows, args.output)?;
    Ok(())
}

/// Returns a row of what was measured on a session.
fn row(name: &str, model: &Model, session: &Session, part: [(&str, Value); 4]) -> Row {
    let (device, kv) = (model.device(), session.kv());
    let cells: [(&str, Value); 7] = [
        ("model", name.into()),
        ("backend", device.name.clone().into()),
        ("kernels", device.kernels.clone().into()),
        ("n_threads", device.n_threads.into()),
        ("type_k", kv.type_k.into()),
        ("type_v", kv.type_v.into()),
        ("n_depth", session.tokens().len().into()),
    ];
    cells.into_iter().chain(part).map(|(name, cell)| (name.to_owned(), cell)).collect()
}

/// Rounds to three decimals for Markdown; other formats get all digits.
fn number(value: f64, format: Format) -> Value {
    match format {
        Format::Md => format!("{value:.3}").into(),
        _ => value.into(),
    }
}
