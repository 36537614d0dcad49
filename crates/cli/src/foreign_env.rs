//! Environment variables of llama.cpp and ollama that this program ignores: a note names the
//! equivalent ones.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

use crate::model_source::ModelSource;

/// The model has a variable that clap does not know.
const MODEL: &str = "KVANT_MODEL";

/// Variables of other programs, and the equivalent ones here.
const VARIABLES: &[(&str, &[&str])] = &[
    ("LLAMA_ARG_MODEL", &[MODEL]),
    ("LLAMA_ARG_HF_REPO", &[MODEL]),
    ("LLAMA_ARG_CTX_SIZE", &["KVANT_CTX_SIZE"]),
    ("LLAMA_ARG_CACHE_TYPE_K", &["KVANT_CACHE_TYPE_K"]),
    ("LLAMA_ARG_CACHE_TYPE_V", &["KVANT_CACHE_TYPE_V"]),
    ("LLAMA_ARG_N_GPU_LAYERS", &["KVANT_N_GPU_LAYERS"]),
    ("LLAMA_ARG_DEVICE", &["KVANT_DEVICE"]),
    ("LLAMA_ARG_THREADS", &["KVANT_THREADS"]),
    ("LLAMA_ARG_N_PREDICT", &["KVANT_PREDICT"]),
    ("LLAMA_ARG_N_PARALLEL", &["KVANT_PARALLEL"]),
    ("LLAMA_ARG_HOST", &["KVANT_HOST"]),
    ("LLAMA_ARG_PORT", &["KVANT_PORT"]),
    ("LLAMA_ARG_ALIAS", &["KVANT_ALIAS"]),
    ("LLAMA_ARG_CHAT_TEMPLATE", &["KVANT_CHAT_TEMPLATE"]),
    ("LLAMA_ARG_CHAT_TEMPLATE_FILE", &["KVANT_CHAT_TEMPLATE"]),
    ("LLAMA_ARG_THINK_BUDGET", &["KVANT_REASONING_BUDGET"]),
    ("LLAMA_ARG_CONTEXT_SHIFT", &["KVANT_CONTEXT_SHIFT"]),
    ("LLAMA_ARG_SSL_CERT_FILE", &["KVANT_TLS_CERT"]),
    ("LLAMA_ARG_SSL_KEY_FILE", &["KVANT_TLS_KEY"]),
    ("LLAMA_API_KEY", &["KVANT_API_KEY"]),
    ("OLLAMA_HOST", &["KVANT_HOST", "KVANT_PORT"]),
    ("OLLAMA_CONTEXT_LENGTH", &["KVANT_CTX_SIZE"]),
    ("OLLAMA_KV_CACHE_TYPE", &["KVANT_CACHE_TYPE_K", "KVANT_CACHE_TYPE_V"]),
    ("OLLAMA_NUM_PARALLEL", &["KVANT_PARALLEL"]),
    ("OLLAMA_MAX_QUEUE", &["KVANT_QUEUE"]),
    ("OLLAMA_ORIGINS", &["KVANT_CORS_ORIGIN"]),
];

/// Returns a note on variables of other programs that would apply to the parsed command and have no
/// equivalent set here. `is_set` returns whether a variable is set.
pub fn note(root: &Command, matches: &ArgMatches, is_set: impl Fn(&str) -> bool) -> Option<String> {
    let (name, matches) = matches.subcommand()?;
    let command = root.find_subcommand(name)?;
    let is_set_here = |ours: &str| {
        if ours == MODEL {
            return Some(is_set(MODEL) || names_model(command, matches)?);
        }
        let arg = command.get_arguments().find(|arg| arg.get_env().is_some_and(|env| env == ours))?;
        Some(is_given(matches, arg.get_id().as_str()))
    };
    let ignored = VARIABLES.iter().filter(|(theirs, ours)| {
        let mut settings = ours.iter().filter_map(|ours| is_set_here(ours)).peekable();
        is_set(theirs) && settings.peek().is_some() && !settings.any(|is_set| is_set)
    });
    let notes: Vec<String> =
        ignored.map(|(theirs, ours)| format!("{theirs} (here {})", ours.join(", "))).collect();
    (!notes.is_empty())
        .then(|| format!("ignored environment variables of other programs: {}", notes.join("; ")))
}

/// Returns whether a flag or a variable sets the argument.
fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

/// Returns whether arguments name a model; `None` for a command without one.
fn names_model(command: &Command, matches: &ArgMatches) -> Option<bool> {
    let has = |id: &str| command.get_arguments().any(|arg| arg.get_id() == id);
    has("model").then(|| {
        let word = has("word").then(|| matches.get_one::<String>("word")).flatten();
        let is_by_word = word.is_some_and(|word| ModelSource::infer(word).is_some());
        is_by_word || ["model", "hf_repo"].iter().any(|id| has(id) && is_given(matches, id))
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::commands::Cli;

    /// Returns the note for a command line where these variables are set.
    fn render(line: &str, set: &[&str]) -> Option<String> {
        let mut root = Cli::command();
        root.build();
        let matches = root.try_get_matches_from_mut(line.split(' ')).unwrap();
        note(&root, &matches, |name| set.contains(&name))
    }

    #[test]
    fn variables_of_other_programs_are_noted_where_they_apply() {
        let all = ["OLLAMA_HOST", "OLLAMA_KV_CACHE_TYPE", "LLAMA_ARG_MODEL", "LLAMA_ARG_CTX_SIZE"];
        let begin = "ignored environment variables of other programs: LLAMA_ARG_MODEL (here KVANT_MODEL)";
        let cache = "OLLAMA_KV_CACHE_TYPE (here KVANT_CACHE_TYPE_K, KVANT_CACHE_TYPE_V)";
        let host = "OLLAMA_HOST (here KVANT_HOST, KVANT_PORT)";
        let context = "LLAMA_ARG_CTX_SIZE (here KVANT_CTX_SIZE)";
        assert_eq!(render("kvant serve", &all), Some(format!("{begin}; {context}; {host}; {cache}")));
        // `kvant run` has no host.
        assert_eq!(render("kvant run --prompt x", &all), Some(format!("{begin}; {context}; {cache}")));
        assert_eq!(render("kvant run Hello", &all), Some(format!("{begin}; {context}; {cache}")));
        // Settings of this program take precedence.
        let here = "kvant serve bundled --port 0 --cache-type-v q8_0 --ctx-size 512";
        assert_eq!(render(here, &all), None);
        assert_eq!(render("kvant serve", &["LLAMA_ARG_MODEL", "KVANT_MODEL"]), None);
        assert_eq!(render("kvant completions bash", &all), None);
        assert_eq!(render("kvant serve", &["OLLAMA_MODELS", "KVANT_HOST"]), None);
    }

    #[test]
    fn every_listed_kvant_variable_exists() {
        let mut root = Cli::command();
        root.build();
        let is_ours = |name: &str| {
            let mut args = root.get_subcommands().flat_map(Command::get_arguments);
            name == MODEL || args.any(|arg| arg.get_env().is_some_and(|env| env == name))
        };
        for (theirs, ours) in VARIABLES {
            let is_tls = ours.iter().all(|name| name.starts_with("KVANT_TLS"));
            let are_ours = ours.iter().all(|name| is_ours(name));
            assert!(are_ours || is_tls && cfg!(not(feature = "tls")), "{theirs}");
        }
    }
}
