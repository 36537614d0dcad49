//! The hub's folder on this machine.
//!
//! ```text
//! models--USER--NAME/
//!    refs/main                    the newest known commit
//!    blobs/ETAG                   content, named by its checksum; ETAG.incomplete during download
//!    snapshots/COMMIT/FILE        a link to the content
//! ```

use std::env::var_os;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use kvant::gguf::{printable, printable_path};

use super::remote::{About, Problem};
use crate::failure::Failure;

/// What the name of a repository's folder begins with.
const PREFIX: &str = "models--";

/// Returns the folder of the hub's own tools, and that of all repositories in it.
fn folders() -> Result<[PathBuf; 2], Failure> {
    let dir = |name: &str| var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let user = || dir("HOME").or_else(|| dir("USERPROFILE")).map(|home| home.join(".cache"));
    let home =
        dir("HF_HOME").or_else(|| dir("XDG_CACHE_HOME").or_else(user).map(|cache| cache.join("huggingface")));
    let home = home.ok_or_else(|| Failure::Work("no folder for models: set HF_HOME".to_owned()))?;
    let hub = dir("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub"));
    Ok([home, hub])
}

/// Returns the names of all repositories with a folder.
pub fn repos() -> Vec<String> {
    let entries = folders().into_iter().filter_map(|[_, hub]| fs::read_dir(hub).ok()).flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| Some(name.strip_prefix(PREFIX)?.replacen("--", "/", 1))).collect()
}

/// The folder of a repository.
pub struct Cache {
    home: PathBuf,
    folder: PathBuf,
}

impl Cache {
    /// Returns the folder where the hub's own tools store this repository.
    pub fn from_env(repo: &str) -> Result<Self, Failure> {
        let [home, hub] = folders()?;
        Ok(Self { folder: hub.join(format!("{PREFIX}{}", repo.replace('/', "--"))), home })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the access token that the hub's own tools have stored.
    pub fn token(&self) -> Option<String> {
        let token =
            std::env::var("HF_TOKEN").ok().or_else(|| fs::read_to_string(self.home.join("token")).ok());
        token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty())
    }

    /// Returns the newest known commit.
    pub fn commit(&self) -> Option<String> {
        let commit = fs::read_to_string(self.folder.join("refs/main")).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_plain_file_name(commit))
    }

    /// Stores the commit.
    pub fn set_commit(&self, commit: &str) -> Result<(), Problem> {
        let path = self.folder.join("refs/main");
        create_parent(&path).and_then(|()| fs::write(&path, commit)).map_err(|error| failed(&path, error))
    }

    /// Returns the path of a file of a commit, downloaded or not.
    pub fn snapshot(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit).join(file)
    }

    /// Returns whether a file of a commit is present and not empty.
    pub fn has(&self, commit: &str, file: &str) -> bool {
        fs::metadata(self.snapshot(commit, file))
            .is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0)
    }

    /// Returns the present files of a commit, with `/` between folders.
    pub fn files(&self, commit: &str) -> Vec<String> {
        let mut found = Vec::new();
        walk(&self.folder.join("snapshots").join(commit), "", &mut found);
        found
    }

    /// Downloads a file: `fetch` receives the partial file, open to append, and its size in bytes.
    pub fn download(
        &self,
        commit: &str,
        file: &str,
        about: &About,
        fetch: impl FnOnce(&mut File, u64) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        check_names(commit, file)?;
        if !is_plain_file_name(&about.etag) {
            return Err(Problem::Failed(format!("invalid file name: {}", printable(&about.etag, 100))));
        }
        let blob = self.folder.join("blobs").join(&about.etag);
        // A file of an earlier download under this name may be truncated.
        let is_complete = || {
            let metadata = fs::metadata(&blob).ok().filter(fs::Metadata::is_file);
            metadata.is_some_and(|metadata| {
                metadata.len() > 0 && about.size.is_none_or(|size| size == metadata.len())
            })
        };
        if !is_complete() {
            let part = blob.with_file_name(format!("{}.incomplete", about.etag));
            let open = || {
                create_parent(&part)?;
                let file = OpenOptions::new().create(true).read(true).append(true).open(&part)?;
                // Waits for another program that downloads the same file.
                file.lock()?;
                let n_bytes = file.metadata()?.len();
                Ok((file, n_bytes))
            };
            let (mut open_part, n_bytes) = open().map_err(|error| failed(&part, error))?;
            if !is_complete() {
                match fetch(&mut open_part, n_bytes) {
                    Ok(()) => fs::rename(&part, &blob).map_err(|error| failed(&blob, error))?,
                    Err(problem) => {
                        // Invalid content cannot be resumed.
                        if let Problem::Failed(_) = problem {
                            let _ = fs::remove_file(&part);
                        }
                        return Err(problem);
                    }
                }
            }
        }
        let link = self.snapshot(commit, file);
        create_parent(&link)
            .and_then(|()| place(&blob, &link, 2 + file.matches('/').count()))
            .map_err(|error| failed(&link, error))
    }
}

/// Links a blob into a snapshot, relative through `n_up` parent folders.
#[cfg(unix)]
fn place(blob: &Path, link: &Path, n_up: usize) -> io::Result<()> {
    let name = blob.file_name().unwrap_or_default();
    let target: PathBuf = std::iter::repeat_n("..", n_up).collect();
    match std::os::unix::fs::symlink(target.join("blobs").join(name), link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Moves a blob into a snapshot, on systems without links.
#[cfg(not(unix))]
fn place(blob: &Path, link: &Path, _: usize) -> io::Result<()> {
    fs::rename(blob, link)
}

/// Rejects commit and file names of a hub that would leave the cache folder.
pub fn check_names(commit: &str, file: &str) -> Result<(), Problem> {
    let wrong = if is_plain_file_name(commit) { file } else { commit };
    match is_plain_file_name(commit) && file.split('/').all(is_plain_file_name) {
        true => Ok(()),
        false => Err(Problem::Failed(format!("invalid file name: {}", printable(wrong, 100)))),
    }
}

/// Returns whether a name is a single file name without path components.
fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

fn create_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

fn failed(path: &Path, error: io::Error) -> Problem {
    Problem::Failed(format!("{}: {error}", printable_path(path)))
}

fn walk(folder: &Path, above: &str, found: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = format!("{above}{}", entry.file_name().to_string_lossy());
        let path = entry.path();
        if path.is_dir() {
            walk(&path, &format!("{name}/"), found);
        } else {
            found.push(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_cannot_leave_the_cache_folder() {
        assert!(check_names("0123abcd", "model.gguf").is_ok());
        assert!(check_names("0123abcd", "a/b/model.gguf").is_ok());
        for file in [
            "/etc/x.gguf",
            "../x.gguf",
            "a/../x.gguf",
            "a//x.gguf",
            "",
            "C:\\x.gguf",
            "a\\x.gguf",
            "./x.gguf",
        ] {
            assert!(check_names("0123abcd", file).is_err(), "{file}");
        }
        for commit in ["/tmp", "..", "", "a/b"] {
            assert!(check_names(commit, "model.gguf").is_err(), "{commit}");
        }
    }
}
