//! Kinds of hostile inputs. Each derives input number n from a generator's choices.

mod arguments;
mod chat;
mod draft_heads;
mod encoders;
mod fetched;
mod folder_files;
mod io_errors;
mod models;
mod persisted;
mod quantized;
mod requests;
mod templates;
mod texts;

use std::io;
use std::path::Path;

use crate::case::Case;
use crate::chance::Choices;
use crate::fixtures::Fixtures;

/// A kind of inputs.
pub struct Kind {
    /// Its name in the table.
    pub name: &'static str,
    /// Number of inputs of this kind, of `N_WEIGHTS`.
    pub weight: usize,
    /// Creates an input.
    pub make: Make,
}

/// Constructor of an input.
pub enum Make {
    /// A command with its own folder.
    Case(MakeCase),
    /// A request to a server that keeps running.
    Request(MakeRequest),
}

pub type MakeCase = fn(&mut Choices, &Fixtures, &Path) -> io::Result<Case>;
pub type MakeRequest = fn(&mut Choices) -> Vec<u8>;

use Make::{Case as Command, Request};

/// The sum of all weights.
pub const N_WEIGHTS: usize = 38;

/// Every kind.
pub const KINDS: [Kind; 18] = [
    Kind { name: "model", weight: 3, make: Command(models::changed) },
    Kind { name: "weights", weight: 1, make: Command(models::nonfinite) },
    Kind { name: "metadata", weight: 4, make: Command(models::metadata) },
    Kind { name: "quantized", weight: 2, make: Command(quantized::quantized) },
    Kind { name: "encoder", weight: 2, make: Command(encoders::encoder) },
    Kind { name: "head", weight: 1, make: Command(draft_heads::draft_head) },
    Kind { name: "template", weight: 3, make: Command(templates::template) },
    Kind { name: "context", weight: 2, make: Command(persisted::context) },
    Kind { name: "measured", weight: 2, make: Command(persisted::measured) },
    Kind { name: "importance", weight: 1, make: Command(persisted::importance) },
    Kind { name: "text", weight: 2, make: Command(texts::text) },
    Kind { name: "special", weight: 1, make: Command(texts::special) },
    Kind { name: "arguments", weight: 4, make: Command(arguments::arguments) },
    Kind { name: "variables", weight: 1, make: Command(arguments::variables) },
    Kind { name: "ends", weight: 2, make: Command(io_errors::ends) },
    Kind { name: "talk", weight: 1, make: Command(chat::conversation) },
    Kind { name: "fetched", weight: 2, make: Command(fetched::fetched) },
    Kind { name: "requests", weight: 4, make: Request(requests::request) },
];
