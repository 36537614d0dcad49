//! Models of a hub with faults.

use std::io;
use std::path::Path;

use crate::case::Case;
use crate::chance::Choices;
use crate::fixtures::Fixtures;

/// Creates a case with a hub id.
pub fn fetched(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let name = chance.of(&["someone/m", "someone/m:q8_0", "someone/m:q2_k"]);
    let mut case = Case::new(folder, ["run", "-t", "1", "-n", "1", "-p", "hi", "--quiet", "-hf", name]);
    let endpoint = format!("http://127.0.0.1:{}/{}", fixtures.hub, chance.below(1 << 30));
    case.env.push(("HF_ENDPOINT".into(), endpoint.into()));
    case.env.push(("HF_HOME".into(), folder.join("given-home").into()));
    Ok(case)
}
