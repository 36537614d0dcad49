//! `kvant serve`: the OpenAI-compatible server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use kvant::{Error, KvOptions, Model, Pooling, Requirements, limits};
use kvant_server::{Address, Listening, ModelSpec, OpenedModel, Options, ServeError, ServerSampling, serve};

use crate::args::cache::CacheArgs;
use crate::args::decode::DraftArgs;
use crate::args::mmproj::MmprojArgs;
use crate::args::model::ModelArgs;
use crate::args::sampling::SamplingArgs;
use crate::args::template::TemplateArgs;
use crate::args::value::positive;
use crate::console;
use crate::failure::Failure;
use crate::kv_cache::ResolvedCache;
use crate::media::MediaOptions;
use crate::model_source::ModelSource;
use crate::open::ModelRequirements;
#[cfg(feature = "otel")]
use crate::otlp::CollectorArgs;
use crate::output;

/// Default divisor of the machine's memory that KV caches may take.
const MEMORY_DIVISOR: usize = 2;

/// Arguments of `kvant serve`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvant serve --kv-budget 1G -ctk turbo3 -ctv turbo3\n\nCtrl-C or SIGTERM stops the server after the running requests."
)]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    template: TemplateArgs,
    #[command(flatten)]
    mmproj: MmprojArgs,
    /// Address to listen on; 0.0.0.0 is every address of this machine
    #[arg(long, value_name = "HOST", env = "KVANT_HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 selects a free one
    #[arg(long, value_name = "N", env = "KVANT_PORT", default_value_t = 8080)]
    port: u16,
    /// Maximum concurrent requests (-np); further ones wait
    #[arg(long, value_name = "N", env = "KVANT_PARALLEL", default_value_t = 64, value_parser = positive)]
    parallel: usize,
    /// Maximum waiting requests; further ones get a 429
    #[arg(long, value_name = "N", env = "KVANT_QUEUE", default_value_t = 1024)]
    queue: usize,
    /// Memory for all KV caches together, such as 8G [default: half of the machine's memory]
    #[arg(long, value_name = "BYTES", env = "KVANT_KV_BUDGET", value_parser = output::parse_bytes)]
    kv_budget: Option<usize>,
    /// Offload conversations that do not fit on the GPU to this much of the machine's memory, such
    /// as 16G (on the CPU raise --kv-budget instead)
    #[arg(long, value_name = "BYTES", env = "KVANT_KV_RAM", value_parser = output::parse_bytes)]
    kv_ram: Option<usize>,
    /// Offload conversations to DIR, up to BYTES; they persist across restarts
    #[arg(long, value_name = "DIR:BYTES", env = "KVANT_KV_DISK", value_parser = folder)]
    kv_disk: Option<(PathBuf, u64)>,
    /// Compare attention over the compressed cache with attention over the rows that it was made
    /// from, one KV head in one step of 32: histograms in /metrics, and a line for each head whose
    /// error is beyond what its type promised. CPU only
    #[arg(long, env = "KVANT_KV_GUARD", conflicts_with = "also")]
    kv_guard: bool,
    /// Enable or disable reasoning, if the chat template supports that and the request does not set
    /// it
    #[arg(long, value_name = "on|off", env = "KVANT_THINK", value_parser = clap::builder::BoolishValueParser::new())]
    think: Option<bool>,
    /// Maximum reasoning tokens, unless the request sets it; -1 is unlimited
    #[arg(
        long,
        value_name = "N",
        env = "KVANT_REASONING_BUDGET",
        default_value_t = -1,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(i64).range(-1..)
    )]
    reasoning_budget: i64,
    /// Pooling of the hidden states into an embedding: their mean, the last token's or, in a text
    /// encoder, the first one's [default: as in the model's file, or last, in a text encoder mean]
    #[arg(long, value_name = "mean|last|cls", env = "KVANT_POOLING")]
    pooling: Option<Pooling>,
    /// Load every CUDA kernel that the model needs before the first request
    #[arg(
        long,
        value_name = "on|off",
        env = "KVANT_WARM",
        default_value = "on",
        action = clap::ArgAction::Set,
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    warm: bool,
    #[command(flatten)]
    draft: DraftArgs,
    /// Name of the model in the API
    #[arg(long, value_name = "NAME", env = "KVANT_ALIAS")]
    alias: Option<String>,
    /// API key that clients must send; may be repeated
    #[arg(
        long,
        value_name = "KEY",
        env = "KVANT_API_KEY",
        value_delimiter = ',',
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    api_key: Vec<String>,
    /// Allowed CORS origin, such as https://chat.example, or * for all; may be repeated
    #[arg(long, value_name = "ORIGIN", env = "KVANT_CORS_ORIGIN", value_delimiter = ',')]
    cors_origin: Vec<String>,
    /// Allowed Host name, such as box.example, where the server needs no key and listens on
    /// 127.0.0.1 behind a proxy; may be repeated
    #[arg(long, value_name = "NAME", env = "KVANT_ALLOWED_HOST", value_delimiter = ',')]
    allowed_host: Vec<String>,
    /// Another model, loaded when a request names it; may be repeated. Unused models are unloaded
    /// to make room
    #[arg(long, value_name = "NAME=FILE", value_parser = named)]
    also: Vec<(String, String)>,
    #[command(flatten)]
    transfer: TransferArgs,
    #[cfg(feature = "tls")]
    #[command(flatten)]
    tls: TlsArgs,
    #[cfg(feature = "grpc")]
    #[command(flatten)]
    grpc: GrpcArgs,
    #[cfg(feature = "kv-events")]
    #[command(flatten)]
    events: EventArgs,
    #[cfg(feature = "otel")]
    #[command(flatten)]
    pub collector: CollectorArgs,
}

/// Arguments of KV cache transfers.
#[derive(Args, Debug)]
#[command(next_help_heading = "Routers")]
struct TransferArgs {
    /// Prefill for other servers: keep up to BYTES of KV caches in memory until their decode
    /// workers have fetched them, over plain HTTP
    #[arg(long, value_name = "BYTES", env = "KVANT_KV_TRANSFER", value_parser = output::parse_bytes)]
    kv_transfer: Option<usize>,
    /// Host of a prefill worker whose KV caches may be fetched; may be repeated
    #[arg(long, value_name = "HOST", env = "KVANT_KV_PEER", value_delimiter = ',')]
    kv_peer: Vec<String>,
}

/// Arguments of TLS.
#[cfg(feature = "tls")]
#[derive(Args, Debug)]
struct TlsArgs {
    /// TLS certificate chain in PEM format (serves https)
    #[arg(long, value_name = "FILE", env = "KVANT_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM format, not encrypted
    #[arg(long, value_name = "FILE", env = "KVANT_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

#[cfg(feature = "tls")]
impl TlsArgs {
    fn files(self) -> Option<kvant_server::TlsFiles> {
        let (certificate, key) = self.tls_cert.zip(self.tls_key)?;
        Some(kvant_server::TlsFiles { certificate, key })
    }
}

/// Arguments of gRPC for routers.
#[cfg(feature = "grpc")]
#[derive(Args, Debug)]
#[command(next_help_heading = "Routers")]
struct GrpcArgs {
    /// Serve vLLM's gRPC services at this address too, such as 127.0.0.1:50051, for routers and
    /// NVIDIA Dynamo; port 0 selects a free one
    #[arg(long, value_name = "HOST:PORT", env = "KVANT_GRPC")]
    grpc: Option<Address>,
}

/// Arguments of KV events for routers.
#[cfg(feature = "kv-events")]
#[derive(Args, Debug)]
#[command(next_help_heading = "Routers")]
struct EventArgs {
    /// Publish KV events over ZeroMQ as vLLM does; tcp://*:5557 binds, an address of another host
    /// connects. Subscribers can read the prompts
    #[arg(long, value_name = "ADDRESS", env = "KVANT_KV_EVENTS", conflicts_with = "also")]
    kv_events: Option<String>,
    /// Address where routers can request missed events, such as tcp://*:5558
    #[arg(long, value_name = "ADDRESS", env = "KVANT_KV_EVENTS_REPLAY", requires = "kv_events")]
    kv_events_replay: Option<String>,
    /// Topic of the events, as the router expects it
    #[arg(
        long,
        value_name = "TOPIC",
        env = "KVANT_KV_EVENTS_TOPIC",
        requires = "kv_events",
        default_value = ""
    )]
    kv_events_topic: String,
}

#[cfg(feature = "kv-events")]
impl EventArgs {
    /// Returns the event sink, if configured.
    fn sink(&self) -> Result<Option<kvant_server::KvEventSink>, Failure> {
        use kvant_server::{PublishError, Publisher};

        let Some(address) = &self.kv_events else { return Ok(None) };
        let opened = Publisher::open(address, self.kv_events_replay.as_deref(), &self.kv_events_topic);
        match opened {
            Ok(publisher) => Ok(Some(publisher.sink())),
            Err(error @ PublishError::Address(_)) => Err(Failure::Usage(format!("--kv-events: {error}"))),
            Err(error) => Err(Failure::Work(format!("KV events: {error}"))),
        }
    }
}

/// Parses `NAME=VALUE`.
fn named(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok((name.to_owned(), file.to_owned())),
        _ => Err("expected a name and a GGUF file, such as small=small.gguf".to_owned()),
    }
}

/// Returns the specs of the other models, which are loaded like the first one.
fn model_specs(args: &ServeArgs) -> Result<Vec<ModelSpec>, Failure> {
    let offer = |(name, file): &(String, String)| {
        let bytes = match ModelSource::new(file) {
            ModelSource::File(path) => {
                std::fs::metadata(&path).map_err(|error| Failure::work(file, error))?.len()
            }
            // The size of a model that is not yet downloaded is known only afterwards.
            _ => 0,
        };
        let (model, cache, file) = (args.model.clone(), args.cache.clone(), file.clone());
        let (sampling, warm) = (args.sampling.clone(), args.warm);
        let open = move || {
            let model = model.load_other(&file, true)?;
            let options = cache.session_options()?;
            let ResolvedCache { options, .. } = cache.resolve(options, &model)?;
            if warm {
                warm_up(&model, &options.kv)?;
            }
            let (drawing, _) = sampling_defaults(&sampling, &model)?;
            Ok(OpenedModel { model, kv: options.kv, sampling: drawing })
        };
        let error_line = |failure: Failure| failure.line().unwrap_or_default();
        Ok(ModelSpec { name: name.clone(), bytes, open: Arc::new(move || open().map_err(error_line)) })
    };
    args.also.iter().map(offer).collect()
}

/// Loads the kernels of a model with caches of `kv`.
fn warm_up(model: &Model, kv: &KvOptions) -> Result<(), Failure> {
    let started = Instant::now();
    let kernels = model.warm_up(kv)?;
    tracing::info!(kernels, seconds = started.elapsed().as_secs_f64(), "kernels loaded");
    Ok(())
}

/// Returns the sampling defaults of a model and the settings that it recommends.
fn sampling_defaults(
    sampling: &SamplingArgs,
    model: &Model,
) -> Result<(ServerSampling, Option<String>), Failure> {
    let (usual, recommended) = sampling.params_for(model)?;
    Ok((ServerSampling { usual, greedy: sampling.params()? }, recommended))
}

/// Parses a folder and a number of bytes.
fn folder(text: &str) -> Result<(PathBuf, u64), String> {
    let expected = || "expected a folder and its size limit, such as kv:100G".to_owned();
    let (folder, bytes) =
        text.rsplit_once(':').filter(|(folder, _)| !folder.is_empty()).ok_or_else(expected)?;
    Ok((folder.into(), output::parse_bytes(bytes)? as u64))
}

/// Runs the command.
pub fn run(args: ServeArgs) -> Result<(), Failure> {
    let options = args.cache.session_options()?;
    args.sampling.params()?;
    let media = Some(MediaOptions { args: &args.mmproj, files: &[] });
    let (chat_template, draft) = (args.template.source()?, Some(&args.draft));
    let takes_encoders = true;
    let needs = Requirements::Tokenizer;
    let kv_guard = args.kv_guard;
    let requirements = ModelRequirements {
        needs,
        chat_template,
        draft,
        media,
        takes_encoders,
        kv_guard,
        input_statistics: None,
    };
    let model = args.model.open_with(false, requirements)?;
    let (drawing, recommended) = sampling_defaults(&args.sampling, &model)?;
    let ResolvedCache { options, auto } = args.cache.resolve(options, &model)?;
    if args.warm {
        warm_up(&model, &options.kv)?;
    }
    let name = args.alias.clone().unwrap_or_else(|| args.model.name());
    let share = limits::machine_bytes().unwrap_or(usize::MAX) / MEMORY_DIVISOR;
    let budget = args.kv_budget.unwrap_or(share);
    let others = model_specs(&args)?;
    if let Some(twice) = others
        .iter()
        .enumerate()
        .find(|(at, offer)| offer.name == name || others[..*at].iter().any(|other| other.name == offer.name))
    {
        return Err(Failure::Usage(format!("--also: two models have the name '{}'", twice.1.name)));
    }
    let plan = options.kv.plan(&model.config().kv_shape()).map_err(Error::from)?;
    let (k, v) = plan.type_names();
    let kv = format!("{k}/{v}");
    let mut types = plan.types.iter().flatten().flat_map(|of| [of.k, of.v]);
    if args.kv_guard && types.all(|dtype| dtype.code().is_none()) {
        return Err(Failure::Usage(format!("--kv-guard: expected a compressed KV type, got {kv}")));
    }
    let served = Options {
        address: Address { host: args.host, port: args.port },
        #[cfg(feature = "grpc")]
        grpc: args.grpc.grpc,
        name: name.clone(),
        others,
        weight_budget: share as u64,
        n_ctx: options.n_ctx,
        kv: options.kv,
        sampling: drawing,
        enable_thinking: args.think,
        thinking_budget: usize::try_from(args.reasoning_budget).ok(),
        repeats_seed: args.sampling.seed.is_explicit,
        draft_max: args.draft.draft_max,
        pooling: args.pooling,
        n_running: args.parallel,
        n_waiting: args.queue,
        kv_budget: budget,
        kv_ram: args.kv_ram.unwrap_or(0) as u64,
        kv_disk: args.kv_disk,
        kv_transfer: args.transfer.kv_transfer.unwrap_or(0) as u64,
        kv_peers: args.transfer.kv_peer,
        #[cfg(feature = "kv-events")]
        kv_events: args.events.sink()?,
        #[cfg(not(feature = "kv-events"))]
        kv_events: None,
        #[cfg(feature = "tls")]
        tls: args.tls.files(),
        #[cfg(not(feature = "tls"))]
        tls: None,
        api_keys: args.api_key,
        origins: args.cors_origin,
        allowed_hosts: args.allowed_host,
    };
    let device = model.device().name;
    let encoder_example = model.is_encoder().then(|| match model.scorer() {
        Ok(_) => ("/v1/rerank", r#"{"query":"What sleeps?","documents":["A cat sleeps.","x"]}"#),
        Err(_) => ("/v1/embeddings", r#"{"input":"A cat sleeps."}"#),
    });
    let scheme = if served.tls.is_some() { "https" } else { "http" };
    let requires_key = !served.api_keys.is_empty();
    let ready = |listening: Listening| {
        let Listening { http: address, grpc, .. } = listening;
        if !requires_key && [Some(address), grpc].iter().flatten().any(|address| !address.ip().is_loopback())
        {
            let warning = "anyone who reaches this address can use the server: --api-key requires a key";
            console::eprint_line(format_args!("warning: {warning}"));
        }
        let auto = auto.map_or_else(String::new, |why| format!(" ({why})"));
        let recommended = recommended.map_or_else(String::new, |settings| format!("{settings} | "));
        let budget = output::bytes(budget);
        let grpc = grpc.map_or_else(String::new, |address| format!("gRPC {address} | "));
        if let Some((path, body)) = encoder_example {
            console::eprint_line(format_args!(
                "{name} on {device} | text encoder | {grpc}{scheme}://{address}\n\
                 curl {scheme}://{address}{path} -H 'Content-Type: application/json' -d '{body}'"
            ));
            return;
        }
        console::eprint_line(format_args!(
            "{name} on {device} | KV {kv}{auto}, up to {budget} | {recommended}{grpc}{scheme}://{address}\n\
             curl {scheme}://{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is the capital of France?\"}}]}}'"
        ));
    };
    Ok(serve(model, served, ready)?)
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Model(error) => error.into(),
            ServeError::Origin(_) => Self::Usage(format!("--cors-origin: {error}")),
            ServeError::Host(_) => Self::Usage(format!("--allowed-host: {error}")),
            ServeError::Key(_) => Self::Usage(format!("--api-key: {error}")),
            error => Self::Work(error.to_string()),
        }
    }
}
