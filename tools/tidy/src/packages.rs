//! Checks of published packages, which must build on their own, and of the container image, whose
//! recipe must name existing files.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::{crates, files, root};

/// Returns the published rooms, each with its manifest.
fn published() -> Vec<(PathBuf, String)> {
    let manifests = crates().into_iter().map(|krate| {
        let manifest = fs::read_to_string(krate.join("Cargo.toml")).unwrap();
        (krate, manifest)
    });
    manifests.filter(|(_, manifest)| !manifest.contains("publish = false")).collect()
}

/// Returns `path` without `..`.
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

/// Returns the files that code outside tests includes at compile time.
fn included_files(file: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(file).unwrap();
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let calls = code.split("include_").skip(1);
    let names = calls.filter_map(|call| call.strip_prefix("bytes!(\"").or(call.strip_prefix("str!(\"")));
    let names = names.filter_map(|call| call.split('"').next());
    names.map(|name| plain(&file.parent().unwrap().join(name))).collect()
}

#[test]
fn packages_contain_all_compiled_files() {
    let mut n_included = 0;
    for (krate, _) in published() {
        let mut sources = Vec::new();
        files(&krate.join("src"), &["rs"], &mut sources);
        for file in sources.iter().filter(|file| !file.ends_with("tests.rs")) {
            for included in included_files(file) {
                let inside =
                    ["src", "assets"].iter().any(|dir| included.starts_with(plain(&krate).join(dir)));
                assert!(
                    inside && included.is_file(),
                    "{}: {} is not packaged",
                    file.display(),
                    included.display()
                );
                n_included += 1;
            }
        }
    }
    assert!(n_included > 10, "only {n_included} files were found");
}

#[test]
fn packages_have_metadata_and_licences() {
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

/// Returns the files that the image's ignore list admits: its lines that begin with `!`.
fn in_the_image() -> Vec<String> {
    let list = fs::read_to_string(root().join(".dockerignore")).unwrap();
    list.lines().filter_map(|line| line.strip_prefix('!')).map(str::to_owned).collect()
}

#[test]
fn container_images_contain_every_room_and_existing_files() {
    let kept = in_the_image();
    for name in kept.iter().filter(|name| !name.ends_with('*')) {
        assert!(root().join(name).exists(), ".dockerignore keeps {name}, which does not exist");
    }
    // Cargo reads the manifests of all members for every build.
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.split("members = [").nth(2).and_then(|rest| rest.split(']').next()).unwrap();
    for member in members.split('"').skip(1).step_by(2) {
        let is_kept = kept.iter().any(|name| Path::new(member).starts_with(name));
        assert!(is_kept, ".dockerignore leaves out {member}, a member of the workspace");
    }
}

#[test]
fn the_image_has_the_minimum_compiler_version() {
    let version = |text: &str| -> Vec<u32> { text.split('.').map(|part| part.parse().unwrap()).collect() };
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let oldest = manifest.split("rust-version = \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    let recipe = fs::read_to_string(root().join("Dockerfile")).unwrap();
    let used = recipe.split("FROM rust:").nth(1).and_then(|rest| rest.split('-').next()).unwrap();
    assert!(version(used) >= version(oldest), "the Dockerfile has Rust {used}, {oldest} is wanted");
}
