//! Options and commands of llama.cpp, ollama and vLLM, and their meaning here: a synonym, an option
//! without effect, or an unsupported option with its alternative.

/// Meaning of another program's option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// A synonym of this option (with its value, where one is written), in commands that have it.
    Is(&'static str),
    /// No effect; a note gives the reason, unless it is empty.
    Nothing {
        /// Argument of the option.
        takes: Arity,
        /// The reason, for the note.
        why: &'static str,
    },
    /// No effect in this command; rejected in others, with this line.
    Only(&'static str, &'static str),
    /// Rejected with this line.
    No(&'static str),
}

/// Argument of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arity {
    /// None.
    Nothing,
    /// A value.
    Value,
    /// Optionally `on`, `off` or `auto`; on is the default behaviour.
    Switch,
}

const fn ignored(takes: Arity) -> Meaning {
    Meaning::Nothing { takes, why: "" }
}

const fn ignored_with_note(takes: Arity, why: &'static str) -> Meaning {
    Meaning::Nothing { takes, why }
}

use Arity::{Nothing, Switch, Value};
use Meaning::{Is, No, Only};

const CHAT: Meaning = Only("chat", "kvant chat holds a conversation, kvant run answers once");
const LINES: Meaning = Only(
    "chat",
    "kvant chat reads several lines: \\ at a line's end goes on, \"\"\" begins and ends a block",
);
const CHUNKS: Meaning = ignored_with_note(Value, "prefill runs in batches of 512 tokens");
const MAPPED: &str = "weights are repacked in memory on load";
const SPLIT: Meaning = No(
    "whole layers are split over the devices of --device, as in cuda:0,cuda:1, in the shares of --tensor-split; -ngl N leaves all but the last N to the CPU",
);
const SAMPLERS: Meaning = No("sampling takes --temp, --top-k, --top-p, --min-p and --repeat-penalty");
const GRAMMAR: Meaning =
    No("structured output follows the schema or grammar of a request to kvant serve; there is no flag");
const ROPE: Meaning = No("RoPE parameters come from the model's file");
const DRAFT_MODEL: Meaning = No("kvant run, chat and serve take a draft model");
const DRAFT_CACHE: Meaning =
    ignored_with_note(Value, "a draft model's KV cache is q8_0 and as long as its context");
const DRAFT_PLACE: Meaning =
    ignored_with_note(Value, "a draft model runs on the device and threads of the main model");
const DRAFT: Meaning = ignored_with_note(
    Value,
    "the number of draft tokens adapts to the acceptance rate; --draft-max N bounds it",
);
const EMBEDDINGS: Meaning = Only("serve", "kvant serve answers /v1/embeddings");
const RERANK: Meaning = Only("serve", "kvant serve answers /v1/rerank, with reranking models");
const HUB: Meaning = No("this build cannot download models (feature `hub`)");
const SERVER: Meaning = No("kvant serve listens for requests");
const THINKING: Meaning = No(
    "kvant chat shows a model's reasoning or hides it (--hide-thinking); a request to kvant serve sets reasoning_format",
);
const UNBOUND: Meaning = ignored_with_note(Value, "the system places threads; taskset binds them");
const ONE_CACHE: &str = "the KV cache follows its types and policies (-ctk, -ctv, --kv-policy)";
const TEMPLATE: Meaning = No("--chat-template takes a format's name or a file, --raw the text as it is");

/// Options and their meanings. Of several entries of a name, the first that applies to the command
/// holds.
const OPTIONS: &[(&str, Meaning)] = &[
    // Synonyms.
    ("-ctk", Is("--cache-type-k")),
    ("-ctv", Is("--cache-type-v")),
    ("-ngl", Is("--n-gpu-layers")),
    ("-ub", Is("--ubatch-size")),
    ("-ub", CHUNKS),
    ("--ubatch-size", CHUNKS),
    ("-sys", Is("--system-prompt")),
    ("--system", Is("--system-prompt")),
    ("--chat-template-file", Is("--chat-template")),
    ("-no-cnv", Is("--raw")),
    ("-no-cnv", No("kvant chat is a conversation; kvant run --raw continues a text as it is")),
    ("--no-conversation", Is("--raw")),
    ("--n-predict", Is("--predict")),
    ("--temperature", Is("--temp")),
    ("--num-predict", Is("--predict")),
    ("--num-ctx", Is("--ctx-size")),
    ("--max-tokens", Is("--predict")),
    ("--max-model-len", Is("--ctx-size")),
    ("--threads-batch", ignored_with_note(Value, "prefill and decode use the same threads (-t)")),
    ("-tb", ignored_with_note(Value, "prefill and decode use the same threads (-t)")),
    ("-dev", Is("--device")),
    ("-hf", Is("--hf-repo")),
    ("-hfr", Is("--hf-repo")),
    ("-hff", Is("--hf-file")),
    ("-hf", HUB),
    ("-hfr", HUB),
    ("-hff", HUB),
    ("--hf-repo", HUB),
    ("--hf-file", HUB),
    ("--offline", HUB),
    ("--lora-init-without-apply", Only("serve", "--lora-scaled FILE:0 loads an adapter with scale 0")),
    ("--no-repack", ignored_with_note(Nothing, MAPPED)),
    ("--verbose", Is("--log-level=debug")),
    ("-v", Is("--log-level=debug")),
    ("--no-perf", Is("--quiet")),
    ("--log-disable", Is("--quiet")),
    ("--format", No("--json prints one object")),
    // Default behaviour, or options without a needed counterpart.
    ("-fa", ignored_with_note(Switch, "attention is always one fused pass over the KV cache as stored")),
    (
        "--flash-attn",
        ignored_with_note(Switch, "attention is always one fused pass over the KV cache as stored"),
    ),
    ("-b", CHUNKS),
    ("--batch-size", CHUNKS),
    ("--mlock", ignored_with_note(Nothing, "the system decides which pages stay in memory")),
    ("--mmap", ignored_with_note(Nothing, MAPPED)),
    ("--no-mmap", ignored_with_note(Nothing, MAPPED)),
    ("-mmp", ignored_with_note(Value, MAPPED)),
    ("--numa", ignored_with_note(Value, "threads are not bound to nodes; numactl binds them")),
    ("-C", UNBOUND),
    ("--cpu-mask", UNBOUND),
    ("-Cr", UNBOUND),
    ("--cpu-range", UNBOUND),
    ("--cpu-strict", UNBOUND),
    ("--prio", UNBOUND),
    ("--poll", UNBOUND),
    ("--swa-full", ignored_with_note(Nothing, ONE_CACHE)),
    ("-kvu", ignored_with_note(Nothing, ONE_CACHE)),
    ("--kv-unified", ignored_with_note(Nothing, ONE_CACHE)),
    ("-dt", ignored_with_note(Value, ONE_CACHE)),
    ("--defrag-thold", ignored_with_note(Value, ONE_CACHE)),
    ("-fit", ignored(Switch)),
    ("--fit", ignored(Switch)),
    ("--log-colors", ignored(Switch)),
    ("--log-prefix", ignored(Nothing)),
    ("--log-timestamps", ignored(Nothing)),
    ("--insecure", ignored(Nothing)),
    ("--keep", ignored_with_note(Value, "the system message is always kept")),
    ("--display-prompt", ignored_with_note(Nothing, "the prompt is not shown")),
    ("--verbose-prompt", ignored_with_note(Nothing, "the prompt is not shown")),
    ("--no-display-prompt", ignored(Nothing)),
    ("--no-context-shift", ignored(Nothing)),
    ("--no-escape", ignored(Nothing)),
    ("--no-warmup", ignored(Nothing)),
    ("--warmup", ignored(Nothing)),
    ("--jinja", ignored(Nothing)),
    ("--simple-io", ignored(Nothing)),
    ("--prompt-cache-all", ignored(Nothing)),
    ("--nowordwrap", ignored(Nothing)),
    ("-co", ignored(Switch)),
    ("--color", ignored(Switch)),
    // Options of another command.
    ("-cnv", CHAT),
    ("--conversation", CHAT),
    ("-i", CHAT),
    ("--interactive", CHAT),
    ("-if", CHAT),
    ("--interactive-first", CHAT),
    ("-mli", LINES),
    ("--multiline-input", LINES),
    ("-st", Only("run", "kvant run answers once and ends")),
    ("--single-turn", Only("run", "kvant run answers once and ends")),
    ("--list-devices", No("kvant doctor lists the devices")),
    ("-pg", No("prompts (-p) and generation (-n) are timed apart")),
    // Unsupported options.
    ("-e", No("text is taken as it is; a shell writes a line break as $'a\\nb', and -f FILE reads a file")),
    (
        "--escape",
        No("text is taken as it is; a shell writes a line break as $'a\\nb', and -f FILE reads a file"),
    ),
    ("-sysf", No("a shell reads a file: --system-prompt \"$(cat FILE)\"")),
    ("--system-prompt-file", No("a shell reads a file: --system-prompt \"$(cat FILE)\"")),
    ("--kv-cache-dtype", No("keys and values have a type each: -ctk TYPE -ctv TYPE")),
    ("-bf", No("-f FILE reads the prompt, as UTF-8 text")),
    ("--binary-file", No("-f FILE reads the prompt, as UTF-8 text")),
    ("-lv", No("--log-level takes off, error, warn, info, debug or trace")),
    ("--verbosity", No("--log-level takes off, error, warn, info, debug or trace")),
    ("-r", No("an answer ends where the model ends it, or after -n tokens")),
    ("--reverse-prompt", No("an answer ends where the model ends it, or after -n tokens")),
    (
        "-nkvo",
        No("each layer's KV cache resides on the layer's device; -ngl N sets the number of GPU layers"),
    ),
    (
        "--no-kv-offload",
        No("each layer's KV cache resides on the layer's device; -ngl N sets the number of GPU layers"),
    ),
    ("-sm", SPLIT),
    ("--split-mode", SPLIT),
    ("-ts", Is("--tensor-split")),
    ("-mg", SPLIT),
    ("--main-gpu", SPLIT),
    ("-ot", SPLIT),
    ("--override-tensor", SPLIT),
    ("-cmoe", SPLIT),
    ("-ncmoe", SPLIT),
    ("--mirostat", SAMPLERS),
    ("--typical", SAMPLERS),
    ("--typical-p", SAMPLERS),
    ("--top-nsigma", SAMPLERS),
    ("--top-n-sigma", SAMPLERS),
    ("--mirostat-lr", SAMPLERS),
    ("--mirostat-ent", SAMPLERS),
    ("--samplers", SAMPLERS),
    ("--sampling-seq", SAMPLERS),
    ("--presence-penalty", SAMPLERS),
    ("--frequency-penalty", SAMPLERS),
    ("--dry-multiplier", SAMPLERS),
    ("--xtc-probability", SAMPLERS),
    ("--xtc-threshold", SAMPLERS),
    ("--dynatemp-range", SAMPLERS),
    ("-l", SAMPLERS),
    ("--logit-bias", SAMPLERS),
    ("--grammar", GRAMMAR),
    ("--grammar-file", GRAMMAR),
    ("-j", GRAMMAR),
    ("--json-schema", GRAMMAR),
    ("-gan", ROPE),
    ("-gaw", ROPE),
    ("--grp-attn-n", ROPE),
    ("--grp-attn-w", ROPE),
    ("--rope-scaling", ROPE),
    ("--rope-scale", ROPE),
    ("--rope-freq-base", ROPE),
    ("--rope-freq-scale", ROPE),
    ("--override-kv", No("a model's metadata is taken as its file has it")),
    ("--in-prefix", TEMPLATE),
    ("--in-suffix", TEMPLATE),
    ("--chat-template-kwargs", TEMPLATE),
    ("--think", THINKING),
    ("--hidethinking", Is("--hide-thinking")),
    ("--hidethinking", THINKING),
    ("-rea", Is("--think")),
    ("-rea", THINKING),
    ("--reasoning", Is("--think")),
    ("--reasoning", THINKING),
    ("--reasoning-budget", No("kvant serve bounds reasoning; kvant chat --think off disables it")),
    (
        "--reasoning-budget-message",
        No("reasoning beyond its budget ends with its closing tag, without a message"),
    ),
    ("--reasoning-format", THINKING),
    ("--host", SERVER),
    ("--port", SERVER),
    ("-np", Is("--parallel")),
    ("-np", SERVER),
    ("--n-parallel", Is("--parallel")),
    ("--parallel", SERVER),
    ("-cb", ignored_with_note(Nothing, "continuous batching is always on")),
    ("--cont-batching", ignored_with_note(Nothing, "continuous batching is always on")),
    ("--metrics", ignored_with_note(Nothing, "/metrics is always there")),
    ("--slots", ignored_with_note(Nothing, "/slots is always there")),
    ("--cors-origins", Is("--cors-origin")),
    ("-a", Is("--alias")),
    ("--served-model-name", Is("--alias")),
    ("--api-key", SERVER),
    ("--log-file", No("logs go to stderr; 2> FILE writes them to a file")),
    ("--embedding", EMBEDDINGS),
    ("--embeddings", EMBEDDINGS),
    ("--pooling", No("kvant serve computes embeddings, with its --pooling")),
    (
        "--embd-normalize",
        No("embeddings have length 1, but for requests to /embedding with embd_normalize -1"),
    ),
    ("--rerank", RERANK),
    ("--reranking", RERANK),
    ("-md", Is("--model-draft")),
    ("-md", DRAFT_MODEL),
    ("--model-draft", DRAFT_MODEL),
    ("--spec-draft-model", Is("--model-draft")),
    ("-hfd", Is("--model-draft")),
    ("-hfrd", Is("--model-draft")),
    ("--hf-repo-draft", Is("--model-draft")),
    ("--spec-draft-hf", Is("--model-draft")),
    ("-ctkd", DRAFT_CACHE),
    ("-ctvd", DRAFT_CACHE),
    ("--cache-type-k-draft", DRAFT_CACHE),
    ("--cache-type-v-draft", DRAFT_CACHE),
    ("--spec-draft-type-k", DRAFT_CACHE),
    ("--spec-draft-type-v", DRAFT_CACHE),
    ("--ctx-size-draft", DRAFT_CACHE),
    ("-ngld", DRAFT_PLACE),
    ("--n-gpu-layers-draft", DRAFT_PLACE),
    ("--spec-draft-ngl", DRAFT_PLACE),
    ("-devd", DRAFT_PLACE),
    ("--device-draft", DRAFT_PLACE),
    ("--spec-draft-device", DRAFT_PLACE),
    ("-td", DRAFT_PLACE),
    ("--threads-draft", DRAFT_PLACE),
    ("--spec-draft-threads", DRAFT_PLACE),
    ("--spec-draft-n-max", Is("--draft-max")),
    ("--spec-draft-n-min", DRAFT),
    ("--spec-draft-p-min", DRAFT),
    ("--spec-draft-p-split", DRAFT),
    ("--draft", Is("--draft-max")),
    ("--draft-n", Is("--draft-max")),
    ("--draft-min", DRAFT),
    ("--draft-p-min", DRAFT),
    ("--spec-type", DRAFT),
    ("--mtp", ignored_with_note(Nothing, "MTP layers are used if the file has them")),
    ("-mm", Is("--mmproj")),
    ("--mmproj-url", No("--mmproj takes a file; one in the model's repository is found by itself")),
    ("-mmu", No("--mmproj takes a file; one in the model's repository is found by itself")),
    ("-mu", No("-m takes a file, -hf USER/REPO one of the Hugging Face hub")),
    ("--model-url", No("-m takes a file, -hf USER/REPO one of the Hugging Face hub")),
    ("-hft", No("the hub's token is read from HF_TOKEN")),
    ("--hf-token", No("the hub's token is read from HF_TOKEN")),
    ("--prompt-cache-ro", No("--prompt-cache is written at the end; copy the file to keep it")),
    ("--keepalive", No("no model stays loaded between runs")),
];

/// Commands of other programs, and their counterparts here.
const COMMANDS: &[(&str, &str)] = &[
    ("show", "kvant inspect MODEL shows what is in it"),
    ("pull", "kvant run -hf USER/REPO fetches a model and runs it"),
    ("list", "models are plain files, in any folder"),
    ("ls", "models are plain files, in any folder"),
    ("ps", "no model stays loaded between runs"),
    ("stop", "no model stays loaded between runs"),
    ("rm", "models are plain files, in any folder"),
    ("create", "kvant quantize writes a model in another type"),
    ("perplexity", "kvant eval ppl measures it"),
    ("generate", "kvant run answers a prompt"),
    ("run", "kvant run answers a prompt"),
    ("bench", "kvant bench times prompts and generation"),
    ("quantize", "kvant quantize writes a model in another type"),
    ("server", "kvant serve listens for requests"),
    ("push", "models are plain files, in any folder"),
    ("cp", "models are plain files, in any folder"),
    ("version", "kvant --version prints it"),
    ("tokenize", "kvant run prints the number of prompt tokens"),
    ("embedding", "kvant serve answers /v1/embeddings"),
    ("cli", "kvant run answers a prompt, kvant chat holds a conversation"),
];

/// Returns the possible meanings of an option, with its dashes, in order.
pub fn of(name: &str) -> impl Iterator<Item = Meaning> {
    OPTIONS.iter().filter(move |(other, _)| *other == name).map(|(_, meaning)| *meaning)
}

/// Returns the names of all known foreign options.
pub fn names() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|(name, _)| *name)
}

/// Returns the counterpart of another program's command, or of that program.
pub fn command(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix("llama-").unwrap_or(name);
    COMMANDS.iter().find(|(other, _)| *other == name).map(|(_, instead)| *instead)
}
