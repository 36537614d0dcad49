//! The commands and what each of them runs.

use clap::{CommandFactory, Parser, Subcommand};

use crate::failure::Failure;
use crate::{
    bench, chat, completions, convert, doctor, embed, eval, imatrix, inspect, lab, log, plan, quantize, run,
    serve,
};

/// Run large language models on a compressed KV cache.
#[derive(Parser)]
#[command(name = "kvant", version, arg_required_else_help = true, after_help = EXAMPLE)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub log: log::LogArgs,
}

const EXAMPLE: &str =
    "Examples:\n  kvant run \"What is the capital of France?\" -ctk turbo3 -ctv turbo3\n  kvant chat";

#[derive(Subcommand)]
pub enum Command {
    /// Generate the answer to a prompt
    Run(run::RunArgs),
    /// Chat with a model in the terminal
    Chat(chat::ChatArgs),
    /// Serve OpenAI-compatible requests, with continuous batching
    Serve(Box<serve::ServeArgs>),
    /// Print embeddings of texts, or their scores for a query
    Embed(embed::EmbedArgs),
    /// Show the contents of a GGUF file and the size of its KV cache
    Inspect(inspect::InspectArgs),
    /// Show the machine's capabilities and the kernel of each type
    Doctor(doctor::DoctorArgs),
    /// Measure tok/s of prefill and decode, at any depth, for lists of KV cache types
    Bench(bench::BenchArgs),
    /// Measure the effect of a compressed KV cache on a model's output
    Eval(eval::EvalArgs),
    /// Search the best KV cache types of a model and save them beside it
    Plan(plan::PlanArgs),
    /// Convert a Hugging Face folder to a GGUF file
    Convert(convert::ConvertArgs),
    /// Quantize the weights of a model to another type
    Quantize(quantize::QuantizeArgs),
    /// Measure which columns of a model's matrices matter, for quantize
    Imatrix(imatrix::ImatrixArgs),
    /// Judge a change to a kernel: right, and faster beyond doubt
    Lab(lab::LabArgs),
    /// Print a shell completion script
    Completions(completions::CompletionsArgs),
    /// Print a manual page
    Man(completions::ManArgs),
}

/// Runs a command.
pub fn dispatch(command: Command) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::chat(args),
        Command::Serve(args) => serve::run(*args),
        Command::Embed(args) => embed::embed(args),
        Command::Inspect(args) => inspect::inspect(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Bench(args) => bench::bench(args),
        Command::Eval(args) => eval::eval(args),
        Command::Plan(args) => plan::plan(args),
        Command::Convert(args) => convert::convert(args),
        Command::Quantize(args) => quantize::quantize(args),
        Command::Imatrix(args) => imatrix::imatrix(args),
        Command::Lab(args) => lab::lab(args),
        Command::Completions(args) => completions::completions(&args, Cli::command()),
        Command::Man(args) => completions::man(&args, Cli::command()),
    }
}
