//! The judge's own files: what a candidate may not change.
//!
//! They are compared byte by byte between the two trees: the referee, the references and suites,
//! the codec (the reference of every kernel), the bundled model, tests of devices, the interpreter,
//! the build's settings. A file too many counts as much as one that differs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::tree::git;
use crate::verdict::Fault;

/// Files and folders of the judge, as git names them.
pub const JUDGE_FILES: [&str; 20] = [
    ".cargo",
    ".ci",
    ".config",
    "Cargo.lock",
    "Cargo.toml",
    "conformance",
    "crates/backend",
    "crates/cli/build.rs",
    "crates/cli/src/lab",
    "crates/codec",
    "crates/cpu/tests",
    "crates/cuda/src/conformance.rs",
    "crates/engine/assets",
    "crates/engine/tests",
    "crates/eval",
    "crates/lab",
    "crates/quantize",
    "crates/wgpu/src/conformance.rs",
    "tools/ptx",
    "tools/tidy",
];

/// Compares the judge's files of two trees, and returns the digest of all of them.
///
/// # Errors
///
/// [`Fault::Broken`] with the first that differs.
pub fn compare(candidate: &Path, base: &Path) -> Result<String, Fault> {
    let listed = |tree: &Path| {
        let mut args = vec!["ls-files", "--cached", "--others", "--exclude-standard", "-z", "--"];
        args.extend(JUDGE_FILES);
        git(tree, &args)
    };
    let (candidate_list, base_list) = (listed(candidate)?, listed(base)?);
    let names: BTreeSet<&str> =
        [&candidate_list, &base_list].into_iter().flat_map(|list| list.split('\0')).collect();
    let mut digest = Xxh3::new();
    for name in names.into_iter().filter(|name| !name.is_empty()) {
        let [ours, theirs] = [candidate, base].map(|tree| contents(&tree.join(name)));
        if ours != theirs {
            let what = match (ours, theirs) {
                (None, _) => "is missing in the candidate",
                (_, None) => "is not in base",
                _ => "differs from base's",
            };
            return Err(Fault::Broken(format!("{name} is the judge's and {what}")));
        }
        digest.update(name.as_bytes());
        digest.update(&ours.unwrap_or_default());
    }
    Ok(format!("{:032x}", digest.digest128()))
}

/// Returns what a path holds: bytes, or where a link leads. `None` if it does not exist.
fn contents(path: &Path) -> Option<Vec<u8>> {
    match fs::read_link(path) {
        Ok(link) => Some(link.into_os_string().into_encoded_bytes()),
        Err(_) => fs::read(path).ok(),
    }
}
