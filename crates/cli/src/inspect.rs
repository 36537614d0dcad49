//! `kvant inspect`: shows a model (GGUF file or Hugging Face folder), its KV cache and its plan.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use kvant::gguf::{LoadOnlyType, TensorInfo, Value as MetaValue, printable};
use kvant::limits::{MAX_TOKENS, check_size};
use kvant::{Config, DType, ExpertSpec, Gguf, KvPlan, KvShape, LayerRange, ModelError, Plan, Policies};
use serde_json::{Map, Value, json};

use crate::args::model::ModelSourceArgs;
use crate::failure::Failure;
use crate::kv_cache::{path_for, with_type_table};
use crate::output::{self, Format, Row};
use crate::plan::certificate;
use crate::{console, hints};

/// Arguments of `kvant inspect`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant inspect bundled -c 8192")]
pub struct InspectArgs {
    #[command(flatten)]
    place: ModelSourceArgs,
    /// Context size of the memory table; 0 is the model's training context [default: 0]
    #[arg(short = 'c', long, value_name = "N")]
    ctx_size: Option<usize>,
    /// KV cache policies of the memory table, as in `run`
    #[arg(long, value_name = "RULES", default_value_t, value_parser = |text: &str| text.parse::<Policies>().map_err(|e| e.to_string()))]
    kv_policy: Policies,
    /// Table of KV types per layer, head and side, as in `run`
    #[arg(long, value_name = "FILE")]
    kv_types: Option<PathBuf>,
    /// List every tensor
    #[arg(short, long)]
    verbose: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn inspect(args: InspectArgs) -> Result<(), Failure> {
    let policies = match &args.kv_types {
        Some(path) => with_type_table(args.kv_policy.clone(), path)?,
        None => args.kv_policy.clone(),
    };
    // A length of 0 is the model's training context.
    let n_ctx = args.ctx_size.filter(|&n_ctx| n_ctx > 0);
    if let Some(n_ctx) = n_ctx {
        check_size("n_ctx", n_ctx, 1..=MAX_TOKENS).map_err(kvant::Error::from)?;
    }
    let place = args.place.source()?;
    let gguf = place.open(&args.place, args.json)?;
    // An unsupported GGUF file is still shown, without a memory table.
    let config = Config::from_gguf(&gguf);
    let has_none = matches!(config, Err(ModelError::TextEncoder { .. } | ModelError::DraftHead { .. }));
    let config = config.map_err(|error| error.to_string());
    let experts = config.as_ref().ok().and_then(|config| Experts::of(&gguf, config));
    let states = config.as_ref().ok().and_then(RecurrentStates::of);
    let mtp = config.as_ref().ok().and_then(Mtp::of);
    let memory = config
        .and_then(|config| memory_table(&config.kv_shape(), n_ctx.unwrap_or(config.n_ctx_train), &policies));
    let plan = saved_plan(&gguf);
    if args.json {
        return Ok(console::print_json(&as_json(
            &gguf,
            experts.as_ref(),
            states.as_ref(),
            mtp.as_ref(),
            &memory,
            plan.as_ref(),
        ))?);
    }
    let size = output::bytes(gguf.file_bytes() as usize);
    console::print(format_args!("{place} (GGUF v{}, {size})\n\nMetadata", gguf.version()))?;
    for (key, value) in gguf.meta() {
        console::print(format_args!(
            "  {} = {}",
            printable(key, MAX_TEXT),
            printable(&text_of(&value), MAX_TEXT)
        ))?;
    }
    console::print(format_args!("\nTensors ({})", gguf.tensors().len()))?;
    output::print_rows(&tensor_summary(gguf.tensors()), Format::Md)?;
    if let Some(packed) = output::packed(&gguf) {
        let bytes: usize = gguf.tensors().iter().map(|info| info.n_bytes).sum();
        console::print(format_args!(
            "\nUnpacked on load: {packed}; weights take {} in all",
            output::bytes(bytes)
        ))?;
    }
    if args.verbose {
        console::print("")?;
        output::print_rows(&gguf.tensors().iter().map(tensor_row).collect::<Vec<_>>(), Format::Md)?;
    }
    if let Some(experts) = experts {
        console::print(format_args!("\nExperts: {experts}"))?;
    }
    if let Some(states) = states {
        console::print(format_args!("\nStates: {states}"))?;
    }
    match memory {
        Ok((n_ctx, rows)) => {
            console::print(format_args!("\nKV cache at {n_ctx} tokens (policy: {policies})"))?;
            output::print_rows(&rows, Format::Md)?;
            if let Some(mtp) = mtp {
                console::print(format_args!("{mtp}"))?;
            }
        }
        Err(why) if has_none => console::print(format_args!("\nKV cache: none ({why})"))?,
        Err(why) => console::print(format_args!("\nKV cache: unknown ({why})"))?,
    }
    match plan {
        Some(Ok(plan)) => console::print(format_args!("\nPlan\n{}", certificate(&plan.certificate)))?,
        Some(Err(why)) => console::print(format_args!("\nPlan: not usable ({why})"))?,
        None => {}
    }
    Ok(())
}

/// The experts of a MoE model.
struct Experts {
    spec: ExpertSpec,
    n_layers: usize,
    /// Bytes of all experts, and of those that decoding one token reads.
    bytes: usize,
    bytes_per_token: usize,
}

impl Experts {
    fn of(gguf: &Gguf, config: &Config) -> Option<Self> {
        let spec = config.layers.iter().find_map(|layer| layer.experts)?;
        let n_layers = config.layers.iter().filter(|layer| layer.experts.is_some()).count();
        let [bytes, bytes_per_token] = LayerRange::whole(config.layers.len()).expert_bytes(gguf, config);
        Some(Self { spec, n_layers, bytes, bytes_per_token })
    }
}

impl fmt::Display for Experts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spec, n_layers, bytes, bytes_per_token } = self;
        let (read, all) = (output::bytes(*bytes_per_token), output::bytes(*bytes));
        write!(f, "each token selects {} of {} in {n_layers} layers, ", spec.routing.n_used, spec.n)?;
        write!(f, "and reads {read} of their {all}, which can stay in the file (--experts mmap)")
    }
}

/// Recurrent states of a model.
struct RecurrentStates {
    n_layers: usize,
    /// Number of all layers of the model.
    of: usize,
    /// Whether recurrent layers have attention as well.
    attend: bool,
    /// Bytes of all states of a sequence, and tokens between checkpoints of them.
    bytes: usize,
    every: usize,
}

impl RecurrentStates {
    fn of(config: &Config) -> Option<Self> {
        let (bytes, every) = config.kv_shape().state_snapshots()?;
        let mut recurrent = config.layers.iter().filter(|layer| layer.is_recurrent());
        let (n_layers, attend) = (recurrent.clone().count(), recurrent.any(kvant::LayerSpec::attends));
        Some(Self { n_layers, of: config.layers.len(), attend, bytes, every })
    }
}

impl fmt::Display for RecurrentStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_layers, of, attend, bytes, every } = self;
        let place = if *attend { "beside" } else { "instead of" };
        let bytes = output::bytes(*bytes);
        write!(f, "{n_layers} of {of} layers have one {place} keys and values, {bytes} in total, ")?;
        write!(f, "and a copy every {every} tokens")
    }
}

/// The multi-token prediction (MTP) layer.
struct Mtp {
    /// KV bytes of the layer per token in f16, as a share of those of all other layers.
    kv_share: f64,
}

impl Mtp {
    fn of(config: &Config) -> Option<Self> {
        let per_token = |config: &Config| {
            let layers = config.kv_shape().layers;
            layers.iter().map(kvant::KvLayerShape::values_per_token).sum::<usize>()
        };
        let own = config.of_mtp()?;
        Some(Self { kv_share: per_token(&own) as f64 / per_token(config) as f64 })
    }
}

impl fmt::Display for Mtp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.kv_share;
        write!(f, "and {percent:.1} % more for the MTP layer, unless --draft-max 0")
    }
}

/// Opens the plan beside a model; `Err` is the reason why it is unused, `None` means no plan.
fn saved_plan(gguf: &Gguf) -> Option<Result<KvPlan, String>> {
    let path = path_for(gguf)?;
    path.exists().then(|| KvPlan::open(&path, gguf).map_err(|error| hints::of_engine(&error)))
}

/// Returns `n_ctx` and a row per KV type (and the two recommended pairs): the bytes that a full
/// context allocates.
fn memory_table(shape: &KvShape, n_ctx: usize, policies: &Policies) -> Result<(usize, Vec<Row>), String> {
    let pairs = DType::KV.map(|dtype| (dtype, dtype)).into_iter();
    let pairs = pairs.chain([(DType::Q8_0, DType::Turbo4), (DType::Q8_0, DType::Turbo3)]);
    // With shared K and V (MLA), both have the same type.
    let pairs = pairs.filter(|(k, v)| k == v || !shape.layers.iter().all(|layer| layer.shared_kv));
    // Without keys and values all are the same.
    let n_pairs = if shape.layers.is_empty() { 1 } else { usize::MAX };
    let rows = pairs
        .take(n_pairs)
        .map(|(k, v)| {
            let plan = Plan::new(shape, k, v, policies).map_err(|error| hints::of_engine(&error.into()))?;
            let bytes = plan.n_bytes(shape, n_ctx);
            let (bits_k, bits_v) = plan.bits_per_value(shape);
            let names = if shape.layers.is_empty() { plan.type_names() } else { (k.name(), v.name()) };
            Ok(row([
                ("type K/V", format!("{}/{}", names.0, names.1).into()),
                ("bits per value", ((bits_k + bits_v) / 2.0).into()),
                ("bytes", bytes.into()),
                ("size", output::bytes(bytes).into()),
                ("of f16", format!("{:.1} %", 100.0 * bytes as f64 / shape.f16_bytes(n_ctx) as f64).into()),
                ("policy", plan.notes.join("; ").into()),
            ]))
        })
        .collect::<Result<_, String>>()?;
    Ok((n_ctx, rows))
}

fn tensor_summary(tensors: &[TensorInfo]) -> Vec<Row> {
    let mut names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
    names.extend(LoadOnlyType::ALL.into_iter().chain(LoadOnlyType::NUMBERS).map(LoadOnlyType::name));
    let types = names.into_iter().filter_map(|name| {
        let of_type = || tensors.iter().filter(move |info| type_name(info) == name);
        let bytes: usize = of_type().map(|info| info.stored_bytes).sum();
        let values: usize = of_type().map(TensorInfo::elements).sum();
        (values > 0).then(|| {
            row([
                ("type", name.into()),
                ("tensors", of_type().count().into()),
                ("values", values.into()),
                ("bytes", bytes.into()),
                ("size", output::bytes(bytes).into()),
            ])
        })
    });
    types.collect()
}

/// Returns the name of a tensor's type in the file.
fn type_name(info: &TensorInfo) -> &'static str {
    info.packed.map_or(info.dtype.name(), LoadOnlyType::name)
}

fn tensor_row(info: &TensorInfo) -> Row {
    let shape: Vec<String> = info.shape.iter().map(usize::to_string).collect();
    row([
        ("name", info.name.as_str().into()),
        ("shape", shape.join(" x ").into()),
        ("type", type_name(info).into()),
        ("bytes", info.stored_bytes.into()),
    ])
}

fn as_json(
    gguf: &Gguf,
    experts: Option<&Experts>,
    states: Option<&RecurrentStates>,
    mtp: Option<&Mtp>,
    memory: &Result<(usize, Vec<Row>), String>,
    plan: Option<&Result<KvPlan, String>>,
) -> Value {
    let metadata: Map<String, Value> = gguf
        .meta()
        .iter()
        .map(|(key, value)| (key.to_owned(), printable(&text_of(&value), MAX_TEXT).into()))
        .collect();
    json!({
        "version": gguf.version(),
        "bytes": gguf.file_bytes(),
        "metadata": metadata,
        "tensors": gguf.tensors().iter().map(tensor_row).collect::<Vec<_>>(),
        "experts": experts.map(|experts| json!({
            "count": experts.spec.n,
            "used": experts.spec.routing.n_used,
            "layers": experts.n_layers,
            "bytes": experts.bytes,
            "bytes_per_token": experts.bytes_per_token,
        })),
        "states": states.map(|states| json!({
            "layers": states.n_layers,
            "bytes": states.bytes,
            "tokens_per_copy": states.every,
        })),
        "mtp": mtp.map(|mtp| json!({ "kv_share": mtp.kv_share })),
        "kv": match memory {
            Ok((n_ctx, rows)) => json!({ "n_ctx": n_ctx, "types": rows }),
            Err(why) => json!({ "unknown": why }),
        },
        "plan": plan.map(|plan| match plan {
            Ok(plan) => json!({ "sink": plan.sink, "certificate": plan.certificate }),
            Err(why) => json!({ "unusable": why }),
        }),
    })
}

/// Maximum characters of a metadata key or value.
const MAX_TEXT: usize = 80;

/// Formats a metadata value as text; an array by its element type.
fn text_of(value: &MetaValue<'_>) -> String {
    match value {
        MetaValue::Array(array) => format!("[{} of {}]", array.len(), array.element_type().name()),
        MetaValue::String(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        MetaValue::F32(x) => x.to_string(),
        MetaValue::F64(x) => x.to_string(),
        MetaValue::Bool(x) => x.to_string(),
        integer => integer.as_integer().map_or_else(String::new, |n| n.to_string()),
    }
}

fn row<const N: usize>(cells: [(&str, Value); N]) -> Row {
    cells.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
