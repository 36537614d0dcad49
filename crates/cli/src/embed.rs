//! `kvant embed`: prints embeddings of texts, or their scores for a query.

use std::io::Write;

use clap::Args;
use kvant::{EmbedOptions, KvOptions, Pooling, Requirements};

use crate::args::model::ModelArgs;
use crate::console;
use crate::failure::Failure;
use crate::open::ModelRequirements;

/// Arguments of `kvant embed`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant embed bundled \"A cat sleeps.\" \"Cats sleep.\"\n\n\
    Prints a line of JSON for each text: a vector of length 1, or with --query a score from 0 to 1.")]
pub struct EmbedArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts to embed
    #[arg(value_name = "TEXT", num_args = 1..)]
    texts: Vec<String>,
    /// Score the texts by their relevance to this one instead, with a model that ranks
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["pooling", "dimensions"])]
    query: Option<String>,
    /// Pooling of the hidden states [default: as in the model's file]
    #[arg(long, value_name = "mean|last|cls")]
    pooling: Option<Pooling>,
    /// First values of each vector to print, for models trained for that
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,
}

/// Runs the command.
pub fn embed(mut args: EmbedArgs) -> Result<(), Failure> {
    args.model.place.move_first_word(&mut args.texts);
    if args.texts.is_empty() {
        return Err(Failure::Usage("expected a model and at least one text".to_owned()));
    }
    let needs = Requirements::Tokenizer;
    let requirements = ModelRequirements { needs, takes_encoders: true, ..Default::default() };
    let model = args.model.open_with(false, requirements)?;
    let texts: Vec<&str> = args.texts.iter().map(String::as_str).collect();
    // Lists of `f32` have its digits, values of JSON those of `f64`.
    let line = |result: serde_json::Result<String>| {
        writeln!(console::results(), "{}", result.expect("numbers are plain JSON"))
    };
    match &args.query {
        Some(query) => {
            let scores = model.rerank(query, &texts, &KvOptions::default())?;
            scores.iter().try_for_each(|score| line(serde_json::to_string(score)))?;
        }
        None => {
            let (pooling, dimensions) = (args.pooling, args.dimensions);
            let vectors = model.embed(&texts, &EmbedOptions { pooling, dimensions, ..Default::default() })?;
            vectors.iter().try_for_each(|vector| line(serde_json::to_string(vector)))?;
        }
    }
    Ok(())
}
