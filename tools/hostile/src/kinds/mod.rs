//! Kinds of hostile inputs. Each makes input number so-and-so out of a generator's choices.

mod arguments;
mod ends;
mod kept;
mod models;
mod talk;
mod templates;
mod texts;

use std::io;
use std::path::Path;

use crate::case::Case;
use crate::chance::Chance;
use crate::shop::Shop;

/// A kind of inputs.
pub struct Kind {
    /// Its name in the table.
    pub name: &'static str,
    /// How many of `N_WEIGHTS` inputs are of this kind.
    pub weight: usize,
    /// Makes one, in a folder of its own.
    pub make: fn(&mut Chance, &Shop, &Path) -> io::Result<Case>,
}

/// The sum of all weights.
pub const N_WEIGHTS: usize = 26;

/// Every kind.
pub const KINDS: [Kind; 12] = [
    Kind { name: "model", weight: 3, make: models::changed },
    Kind { name: "weights", weight: 1, make: models::no_numbers },
    Kind { name: "metadata", weight: 4, make: models::metadata },
    Kind { name: "template", weight: 3, make: templates::template },
    Kind { name: "context", weight: 2, make: kept::context },
    Kind { name: "measured", weight: 2, make: kept::measured },
    Kind { name: "text", weight: 2, make: texts::text },
    Kind { name: "special", weight: 1, make: texts::special },
    Kind { name: "arguments", weight: 4, make: arguments::arguments },
    Kind { name: "variables", weight: 1, make: arguments::variables },
    Kind { name: "ends", weight: 2, make: ends::ends },
    Kind { name: "talk", weight: 1, make: talk::talk },
];
