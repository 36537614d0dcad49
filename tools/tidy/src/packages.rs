//! What is handed out: packages that build on their own.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::{crates, files, root};

/// Rooms that are published, each with its manifest.
fn published() -> Vec<(PathBuf, String)> {
    let manifests = crates().into_iter().map(|krate| {
        let manifest = fs::read_to_string(krate.join("Cargo.toml")).unwrap();
        (krate, manifest)
    });
    manifests.filter(|(_, manifest)| !manifest.contains("publish = false")).collect()
}

/// `path` with its `..` taken away.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
}

/// Files that code outside of tests takes in when it is compiled.
fn taken_in(file: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(file).unwrap();
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let calls = code.split("include_").skip(1);
    let names = calls.filter_map(|call| call.strip_prefix("bytes!(\"").or(call.strip_prefix("str!(\"")));
    let names = names.filter_map(|call| call.split('"').next());
    names.map(|name| plain(&file.parent().unwrap().join(name))).collect()
}

#[test]
fn a_package_holds_what_it_is_built_from() {
    let mut n_taken = 0;
    for (krate, _) in published() {
        let mut sources = Vec::new();
        files(&krate.join("src"), &["rs"], &mut sources);
        for file in sources.iter().filter(|file| !file.ends_with("tests.rs")) {
            for taken in taken_in(file) {
                let inside = ["src", "assets"].iter().any(|dir| taken.starts_with(plain(&krate).join(dir)));
                assert!(inside && taken.is_file(), "{}: {} is not packaged", file.display(), taken.display());
                n_taken += 1;
            }
        }
    }
    assert!(n_taken > 10, "only {n_taken} files were found");
}

#[test]
fn a_package_says_what_it_is_and_carries_its_licences() {
    let shared = ["version", "edition", "rust-version", "license", "documentation", "readme", "include"];
    for (krate, manifest) in published() {
        for key in shared {
            let line = format!("\n{key}.workspace = true\n");
            assert!(manifest.contains(&line), "{}: {key} is not the workspace's", krate.display());
        }
        assert!(manifest.contains("\ndescription = \""), "{}: no description", krate.display());
        for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
            let carried = fs::read_to_string(krate.join(name)).unwrap_or_default();
            let is_ours = carried == fs::read_to_string(root().join(name)).unwrap();
            assert!(is_ours, "{}: link {name} to ../../{name}", krate.display());
        }
    }
}
