//! Tests that enforce the rules of `docs/ARCHITECTURE.md` in the code. This library has no
//! functions.
#![cfg(test)]

mod language;
mod packages;
mod parameters;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Permitted dependencies between rooms. Others may not be imported.
const EDGES: &[(&str, &[&str])] = &[
    ("kvant-codec", &[]),
    ("kvant-files", &[]),
    ("kvant-gguf", &["kvant-codec", "kvant-files"]),
    ("kvant-hf", &["kvant-gguf", "kvant-codec", "kvant-files"]),
    ("kvant-backend", &["kvant-codec"]),
    ("kvant-cpu", &["kvant-backend", "kvant-codec"]),
    ("kvant-cuda", &["kvant-backend", "kvant-codec", "kvant-files"]),
    ("kvant-wgpu", &["kvant-backend", "kvant-codec"]),
    ("kvant-webgpu", &[]),
    ("kvant-kv", &["kvant-backend", "kvant-codec"]),
    ("kvant-text", &["kvant-gguf", "kvant-codec"]),
    ("kvant-generate", &["kvant-text", "kvant-gguf", "kvant-codec"]),
    ("kvant-model", &["kvant-kv", "kvant-backend", "kvant-gguf", "kvant-codec"]),
    ("kvant-vision", &["kvant-model", "kvant-backend", "kvant-gguf", "kvant-codec"]),
    ("kvant-audio", &["kvant-model", "kvant-backend", "kvant-gguf", "kvant-codec"]),
    ("kvant-quantize", &["kvant-model", "kvant-gguf", "kvant-codec"]),
    ("kvant-linear", &["kvant-cpu", "kvant-gguf", "kvant-backend", "kvant-codec"]),
    (
        "kvant",
        &[
            "kvant-text",
            "kvant-generate",
            "kvant-model",
            "kvant-vision",
            "kvant-audio",
            "kvant-kv",
            "kvant-cpu",
            "kvant-cuda",
            "kvant-wgpu",
            "kvant-gguf",
            "kvant-hf",
            "kvant-backend",
            "kvant-codec",
            "kvant-files",
        ],
    ),
    ("kvant-eval", &["kvant", "kvant-codec"]),
    ("kvant-server", &["kvant"]),
    (
        "kvant-lab",
        &[
            "kvant",
            "kvant-eval",
            "kvant-linear",
            "kvant-quantize",
            "kvant-conformance",
            "kvant-cpu",
            "kvant-cuda",
            "kvant-wgpu",
            "kvant-backend",
            "kvant-codec",
        ],
    ),
    ("kvant-cli", &["kvant", "kvant-eval", "kvant-lab", "kvant-quantize", "kvant-server"]),
    ("kvant-capi", &["kvant", "kvant-linear"]),
    ("kvant-python", &["kvant", "kvant-cli"]),
    ("kvant-web", &["kvant"]),
    ("kvant-conformance", &["kvant-backend", "kvant-codec"]),
    ("kvant-fuzz-targets", &["kvant", "kvant-cli", "kvant-codec", "kvant-eval", "kvant-server"]),
];

/// Floors of rooms, lowest first: folders whose modules import only from their own floor and from
/// those below it, and from the module that defines a name, not through the crate root.
const FLOORS: &[(&str, &[&str])] = &[("cpu", &["simd", "host", "ops", "device"])];

/// Rooms whose files import a name from the module that defines it, not through the crate root:
/// `lib.rs` re-exports for outsiders.
const DEFINING_ROOMS: [&str; 13] = [
    "capi", "cli", "engine", "eval", "generate", "gguf", "hf", "lab", "python", "quantize", "server", "text",
    "web",
];

/// Rooms outside `crates`.
const OUTSIDE: [&str; 2] = ["conformance", "fuzz/targets"];

/// Rooms that may contain the word `unsafe`, with the reason.
const UNSAFE_ROOMS: &[(&str, &str)] = &[
    ("capi", "pointers that C hands over"),
    ("cpu", "vector instructions and the thread pool"),
    ("cuda", "calls into the driver and NVRTC"),
    ("gguf", "the memory map"),
    ("web", "names that a page calls, and a file that its worker reads"),
    ("webgpu", "functions that a page's worker provides"),
];

/// Files of those rooms that may; all files of unlisted rooms.
const UNSAFE_FILES: &[(&str, &[&str])] = &[
    ("cuda", &["driver.rs", "driver/stream.rs", "nvrtc.rs", "recorder.rs", "staging.rs"]),
    ("web", &["file.rs"]),
    ("webgpu", &["imports.rs"]),
];

/// Maximum lines of a source file, tests included.
const MAX_LINES: usize = 650;

/// Files that may be longer, with the reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Folders with manually written files, and the extensions of those whose length is limited.
const WRITTEN_IN: [&str; 5] = ["conformance", "crates", "docs", "fuzz", "tools"];
const WRITTEN_AS: [&str; 10] = ["rs", "c", "cu", "cuh", "wgsl", "py", "pyi", "css", "md", "toml"];
/// Further extensions, and manually written files outside the folders: the rules of prose apply.
const PROSE_AS: [&str; 1] = ["h"];
const PROSE_FILES: [&str; 2] = ["README.md", "CONTRIBUTING.md"];

/// A manually written file.
struct WrittenFile {
    /// Its path below the root.
    name: String,
    text: String,
}

/// All manually written files, read once for all tests.
static WRITTEN: LazyLock<Vec<WrittenFile>> = LazyLock::new(|| {
    let mut paths: Vec<PathBuf> = PROSE_FILES.map(|name| root().join(name)).into();
    let endings = [&WRITTEN_AS[..], &PROSE_AS].concat();
    WRITTEN_IN.iter().for_each(|dir| files(&root().join(dir), &endings, &mut paths));
    let read = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        WrittenFile { name, text: fs::read_to_string(&path).unwrap() }
    };
    paths.into_iter().filter(|path| path.is_file()).map(read).collect()
});

/// Returns the manually written files whose names end in one of `endings`.
fn written(endings: &[&str]) -> impl Iterator<Item = &'static WrittenFile> {
    WRITTEN.iter().filter(move |file| has_ending(Path::new(&file.name), endings))
}

/// Returns code without comments to the ends of lines.
fn without_comments(code: &str) -> String {
    code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn crates() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("crates")).unwrap();
    let mut dirs: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    dirs.extend(OUTSIDE.map(|room| root().join(room)));
    dirs.sort();
    dirs
}

fn has_ending(path: &Path, endings: &[&str]) -> bool {
    endings.iter().any(|ending| path.extension().is_some_and(|ext| ext == *ending))
}

/// Collects files below `dir` whose names end in one of `endings`, without outputs of builds and
/// fuzzers.
fn files(dir: &Path, endings: &[&str], out: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let is_made = ["target", "corpus", "artifacts", "coverage"].iter().any(|name| path.ends_with(name));
        if path.is_dir() && !is_made {
            files(&path, endings, out);
        } else if has_ending(&path, endings) {
            out.push(path);
        }
    }
}

fn sources(krate: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["src", "tests", "examples", "benches"] {
        files(&krate.join(folder), &["rs"], &mut found);
    }
    found
}

/// Returns the `kvant*` names in the `[dependencies]` section of a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let section = manifest.split("[dependencies]").nth(1).unwrap_or_default();
    let section = section.split("\n[").next().unwrap_or_default();
    let names = section.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| name.starts_with("kvant")).map(str::to_owned).collect()
}

#[test]
fn imports_run_one_way() {
    let mut seen = 0;
    for krate in crates() {
        let manifest = fs::read_to_string(krate.join("Cargo.toml")).unwrap();
        let name = manifest.split('"').nth(1).expect("a manifest starts with its name");
        let (_, allowed) = EDGES.iter().find(|(room, _)| *room == name).unwrap_or_else(|| {
            panic!("{name} is not in the diagram: add it to docs/ARCHITECTURE.md and to EDGES");
        });
        for dependency in dependencies(&manifest) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not import {dependency}");
        }
        seen += 1;
    }
    assert_eq!(seen, EDGES.len(), "EDGES lists a room that does not exist");
}

#[test]
fn floors_import_only_from_those_below() {
    for (room, floors) in FLOORS {
        for (floor, name) in floors.iter().enumerate() {
            let mut written = Vec::new();
            files(&root().join("crates").join(room).join("src").join(name), &["rs"], &mut written);
            assert!(!written.is_empty(), "{room} has no floor {name}");
            for file in written {
                let text = fs::read_to_string(&file).unwrap();
                let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
                for imported in code.flat_map(|line| line.split("crate::").skip(1)) {
                    let imported = imported.split("::").next().unwrap_or_default();
                    assert!(
                        floors[..=floor].contains(&imported),
                        "{}: `crate::{imported}` is no floor below {name}",
                        file.display()
                    );
                }
            }
        }
    }
}

/// Returns the first segments of the paths after `crate::`: `a` of `a::B;`, `a` and `c` of
/// `{a::B, c::{D, E}};`.
fn first_segments(paths: &str) -> Vec<&str> {
    fn first(path: &str) -> &str {
        path.trim_start().split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap_or_default()
    }
    if !paths.starts_with('{') {
        return vec![first(paths)];
    }
    let mut depth = 0;
    let group = paths.split(';').next().unwrap_or_default();
    let items = group.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth <= 1 && "{,}".contains(c)
    });
    items.map(first).filter(|name| !name.is_empty()).collect()
}

#[test]
fn imports_name_the_defining_module() {
    assert_eq!(first_segments("a::B;\n"), ["a"]);
    assert_eq!(first_segments("{a, b::{C, D}, E,\n};"), ["a", "b", "E"]);
    for room in DEFINING_ROOMS {
        let lib = fs::read_to_string(root().join("crates").join(room).join("src/lib.rs")).unwrap();
        let modules = lib.lines().filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod "));
        let modules: Vec<_> = modules.filter_map(|name| name.split([';', ' ']).next()).collect();
        for WrittenFile { name: file, text } in written(&["rs"]) {
            if !file.starts_with(&format!("crates/{room}/src/")) || file.ends_with("/src/lib.rs") {
                continue;
            }
            let code = without_comments(text);
            for name in code.split("crate::").skip(1).flat_map(first_segments) {
                let is_module = modules.contains(&name);
                assert!(is_module, "{file}: import {name} from the module that defines it");
            }
        }
    }
}

#[test]
fn the_text_the_model_and_the_cache_name_no_device() {
    for room in ["text", "model", "vision", "audio", "kv", "backend", "quantize"] {
        for file in sources(&root().join("crates").join(room).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            assert!(
                ["cpu", "cuda", "wgpu"].iter().all(|device| !text.contains(&format!("kvant_{device}"))),
                "{}",
                file.display()
            );
        }
    }
}

/// Returns whether a line of code, without comments, contains something like `-c` or `--kv-policy`
/// in quotes.
fn names_a_flag(line: &str) -> bool {
    let is_flag = |word: &str| {
        let letters = word.strip_prefix("--").or(word.strip_prefix('-')).unwrap_or_default();
        let is_number = word == "-inf";
        letters.starts_with(|c: char| c.is_ascii_lowercase()) && !letters.ends_with('-') && !is_number
    };
    let code = line.split("//").next().unwrap_or_default();
    let mut quoted = code.split('"').skip(1).step_by(2);
    quoted.any(|text| text.split([' ', '(', '`', '\'']).any(is_flag))
}

#[test]
fn libraries_name_no_flags() {
    let (with, without) =
        (r#"error("raise it with -c")"#, r#"("a - b", "-of-", "auto-asymmetric", -c) // "-c""#);
    assert!(names_a_flag(with) && names_a_flag("\"--chunks\"") && !names_a_flag(without));
    for room in [
        "codec", "files", "gguf", "hf", "backend", "kv", "model", "vision", "audio", "text", "quantize",
        "engine", "eval",
    ] {
        let mut written = Vec::new();
        files(&root().join("crates").join(room).join("src"), &["rs"], &mut written);
        for file in written.iter().filter(|file| !file.ends_with("tests.rs")) {
            let text = fs::read_to_string(file).unwrap();
            let line = text.lines().position(names_a_flag).map(|at| at + 1);
            assert_eq!(line, None, "{}: the command line knows flags, a library settings", file.display());
        }
    }
}

/// Macros that print directly, and panic if the terminal is closed or full.
const PRINTING: [&str; 3] = ["print!", "println!", "dbg!"];
/// Output streams, and the one file that may use them.
const ENDS: [&str; 2] = ["io::stdout(", "io::stderr("];
const CONSOLE: &str = "crates/cli/src/console.rs";
/// Files that are compiled for tests only; these print what they skip.
const TESTS_ALONE: [&str; 2] = ["tests.rs", "emulator.rs"];

/// Returns the first line, from 1, that prints or, outside the console, uses an output stream;
/// ignores tests and comments.
fn first_print(text: &str, is_console: bool) -> Option<usize> {
    let ends = if is_console { &[][..] } else { &ENDS };
    let prints = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        PRINTING.iter().chain(ends).any(|name| code.contains(name))
    };
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    code.lines().position(prints).map(|at| at + 1)
}

#[test]
fn one_file_writes_to_the_terminal() {
    assert_eq!(first_print("a\n    eprintln!(\"b\");", true), Some(2));
    assert_eq!(first_print("std::io::stdout().lock()", false), Some(1));
    assert_eq!(first_print("std::io::stdout().lock()", true), None);
    let sound = "/// println!()\nwriteln!(out)?;\n#[cfg(test)]\nmod tests { fn f() { println!() } }";
    assert_eq!(first_print(sound, false), None);
    let mut written = Vec::new();
    for krate in fs::read_dir(root().join("crates")).unwrap() {
        files(&krate.unwrap().path().join("src"), &["rs"], &mut written);
    }
    assert!(written.contains(&root().join(CONSOLE)));
    for file in written.iter().filter(|file| !TESTS_ALONE.iter().any(|name| file.ends_with(name))) {
        let at = first_print(&fs::read_to_string(file).unwrap(), **file == root().join(CONSOLE));
        assert_eq!(at, None, "{}: {CONSOLE} alone writes to the terminal", file.display());
    }
}

/// The file that makes paths printable.
const PATHS: &str = "crates/gguf/src/printable.rs";

/// A path may contain a line break or terminal control characters, which `display` leaves
/// unchanged.
#[test]
fn paths_are_made_printable() {
    let mut written = Vec::new();
    for krate in fs::read_dir(root().join("crates")).unwrap() {
        files(&krate.unwrap().path().join("src"), &["rs"], &mut written);
    }
    for file in written.iter().filter(|file| !TESTS_ALONE.iter().any(|name| file.ends_with(name))) {
        let text = fs::read_to_string(file).unwrap();
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let at = code.lines().position(|line| line.contains(".display()")).map(|at| at + 1);
        assert_eq!(at, None, "{}: show a path with `printable_path` of {PATHS}", file.display());
    }
}

#[test]
fn unsafe_occurs_only_in_its_rooms() {
    for krate in crates() {
        let room = krate.file_name().unwrap().to_str().unwrap();
        if UNSAFE_ROOMS.iter().any(|(allowed, _)| *allowed == room) {
            continue;
        }
        for entry in ["lib.rs", "main.rs"].map(|file| krate.join("src").join(file)) {
            let Ok(text) = fs::read_to_string(&entry) else { continue };
            assert!(text.contains("#![forbid(unsafe_code)]"), "{} must forbid unsafe code", entry.display());
        }
    }
}

#[test]
fn unsafe_occurs_only_in_its_files() {
    for (room, allowed) in UNSAFE_FILES {
        for file in sources(&root().join("crates").join(room).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let is_allowed = allowed.iter().any(|name| file.ends_with(name));
            assert!(is_allowed || !text.contains("unsafe "), "{} must not use unsafe", file.display());
        }
    }
}

#[test]
fn files_have_at_most_max_lines() {
    let limited = written(&WRITTEN_AS).filter(|file| !PROSE_FILES.contains(&file.name.as_str()));
    let limited: Vec<_> = limited.collect();
    assert!(limited.len() > 200, "only {} files were found", limited.len());
    let mut long = Vec::new();
    for WrittenFile { name, text } in limited {
        let lines = text.lines().count();
        if lines > MAX_LINES {
            long.push(name);
        }
        let is_excused = LONG_FILES.iter().any(|(excused, _)| excused == name);
        assert!(is_excused || lines <= MAX_LINES, "{name}: {lines} lines, at most {MAX_LINES}");
    }
    for (excused, reason) in LONG_FILES {
        assert!(long.iter().any(|name| *name == excused), "{excused} is not long any more ({reason})");
    }
}

#[test]
fn files_begin_with_a_head_comment() {
    for file in crates().iter().flat_map(|krate| sources(krate)) {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("//!"), "{}: begin it with //!", file.display());
    }
}
