//! Models of the Hugging Face hub, in the cache folder of its own tools.
//!
//! The folder is that of `huggingface_hub` (`HF_HUB_CACHE`, `HF_HOME/hub`,
//! `~/.cache/huggingface/hub`), so that programs share downloads. Kvant has its own client of three
//! requests: `hf-hub` 1.0 requires an async runtime and the hub's chunk store, its older versions
//! neither resume nor verify downloads.

mod cache;
mod choose;
pub mod id;
mod remote;

use std::path::PathBuf;

use kvant::gguf::printable_path;
use kvant::hf::ADAPTER_FILES;

use crate::failure::Failure;
use crate::log;
use cache::{Cache, check_names};
use id::Id;
use remote::{Problem, Remote};

/// Returns the repositories with a downloaded model, in alphabetical order.
pub fn downloaded() -> Vec<String> {
    let mut repos = cache::repos();
    repos.retain(|repo| {
        let cache = Cache::from_env(repo);
        cache.is_ok_and(|cache| cache.commit().is_some_and(|commit| !cache.files(&commit).is_empty()))
    });
    repos.sort();
    repos
}

/// Returns the model's local file (of a split one the first) or the folder of an adapter,
/// downloaded if needed.
///
/// # Errors
///
/// An unreachable hub without a local copy, no such repository or file, a checksum mismatch, a full
/// disk.
pub fn fetch(id: &Id, offline: bool, quiet: bool) -> Result<PathBuf, Failure> {
    let path = fetch_chosen(id, offline, quiet, &|names| choose::files(names, id))?;
    Ok(path.expect("files that were chosen, or an error"))
}

/// Returns the vision encoder of the model, if the repository has one.
///
/// # Errors
///
/// As [`fetch`].
pub fn fetch_mmproj(id: &Id, offline: bool, quiet: bool) -> Result<Option<PathBuf>, Failure> {
    fetch_chosen(id, offline, quiet, &|names| Ok(choose::mmproj(names)))
}

/// Selects files among the names of a repository.
type Choose<'a> = &'a dyn Fn(&[String]) -> Result<Vec<String>, Problem>;

/// Downloads the selected files, if any are selected.
fn fetch_chosen(id: &Id, offline: bool, quiet: bool, choose: Choose<'_>) -> Result<Option<PathBuf>, Failure> {
    let cache = Cache::from_env(&id.repo)?;
    let set = |name| {
        std::env::var(name).is_ok_and(|value| !matches!(&value[..], "" | "0" | "false" | "off" | "no"))
    };
    if offline || set("HF_HUB_OFFLINE") || set("TRANSFORMERS_OFFLINE") {
        return cached(&cache, choose).ok_or_else(|| {
            Failure::Work(format!("{id}: not in {}, and offline", printable_path(cache.folder())))
        });
    }
    let remote = Remote::from_env(&id.repo, cache.token());
    match update(&remote, &cache, quiet, choose) {
        Ok(path) => Ok(path),
        Err(Problem::Unreachable(why)) => {
            let folder = printable_path(cache.folder());
            let path = cached(&cache, choose)
                .ok_or_else(|| Failure::work(id, format!("{why}; no copy is in {folder}")))?;
            log::note(format!("{id}: {why}; the copy in {folder} is used"));
            Ok(path)
        }
        Err(Problem::Failed(why)) => Err(Failure::work(id, why)),
    }
}

/// Returns the local copy.
fn cached(cache: &Cache, choose: Choose<'_>) -> Option<Option<PathBuf>> {
    let commit = cache.commit()?;
    let files = choose(&cache.files(&commit)).ok()?;
    let are_cached = files.iter().all(|file| cache.has(&commit, file));
    are_cached.then(|| found(cache, &commit, &files))
}

/// Returns the path that opens these files: the first, or the folder of an adapter.
fn found(cache: &Cache, commit: &str, files: &[String]) -> Option<PathBuf> {
    let first = cache.snapshot(commit, files.first()?);
    match first.parent() {
        Some(folder) if files == ADAPTER_FILES => Some(folder.to_owned()),
        _ => Some(first),
    }
}

/// Downloads the missing files of the newest version.
fn update(
    remote: &Remote,
    cache: &Cache,
    quiet: bool,
    choose: Choose<'_>,
) -> Result<Option<PathBuf>, Problem> {
    let (commit, names) = remote.files()?;
    let files = choose(&names)?;
    // Checks the names before they are used as local paths.
    files.iter().try_for_each(|file| check_names(&commit, file))?;
    for file in &files {
        if !cache.has(&commit, file) {
            let about = remote.about(&commit, file)?;
            cache.download(&commit, file, &about, |part, from| {
                remote.fetch(&commit, file, &about, part, from, quiet)
            })?;
        }
    }
    cache.set_commit(&commit)?;
    Ok(found(cache, &commit, &files))
}
