//! The header, and C programs that use it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs, str};

fn path_in_crate(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Compiles `source` with the shared library of this build; `None` without a C compiler.
fn compile(source: &Path, name: &str) -> Option<PathBuf> {
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("skipped: {name}.c: there is no C compiler");
        return None;
    }
    // Cargo puts the library beside this program.
    let libraries = env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new(compiler);
    command
        .args(["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(path_in_crate("include"));
    command.arg(source).arg("-L").arg(&libraries).args(["-lkvant_capi", "-lm"]);
    command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-o").arg(&program);
    let Output { status, stderr, .. } = command.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    Some(program)
}

fn run(program: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = Command::new(program).args(args).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// `KVANT_BLESS=1` writes the header instead.
#[test]
fn the_header_matches_the_code() {
    let config = cbindgen::Config::from_file(path_in_crate("cbindgen.toml")).unwrap();
    let sources =
        ["src/ffi.rs", "src/model.rs", "src/session.rs", "src/generate.rs", "src/chat.rs", "src/linear.rs"];
    let builder =
        sources.iter().fold(cbindgen::Builder::new(), |builder, file| builder.with_src(path_in_crate(file)));
    let mut generated = Vec::new();
    builder.with_config(config).generate().unwrap().write(&mut generated);
    let generated = str::from_utf8(&generated).unwrap();
    let header = path_in_crate("include/kvant.h");
    if env::var_os("KVANT_BLESS").is_some() {
        fs::write(&header, generated).unwrap();
    }
    let committed = fs::read_to_string(&header).unwrap_or_default();
    assert!(committed == generated, "include/kvant.h does not match the code: run this with KVANT_BLESS=1");
}

#[test]
fn the_example_answers_and_reports_a_faulty_file() {
    let Some(program) = compile(&path_in_crate("examples/hello.c"), "hello") else { return };
    let (code, stdout, stderr) = run(&program, &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("Paris") && stdout.contains("bytes of KV cache"), "{stdout}");
    let (code, stdout, stderr) = run(&program, &[path_in_crate("Cargo.toml").to_str().unwrap()]);
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (Some(1), "", 1), "{stderr}");
    assert!(stderr.contains("not a GGUF file"), "{stderr}");
}

#[test]
fn the_tools_example_calls_a_tool_and_reads_its_result() {
    let Some(program) = compile(&path_in_crate("examples/tools.c"), "tools") else { return };
    let (code, stdout, stderr) = run(&program, &[]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("\"tool_calls\"") && stdout.contains("\"name\":\"weather\""), "{stdout}");
}

#[test]
fn every_call_works_from_c() {
    let Some(program) = compile(&path_in_crate("tests/calls.c"), "calls") else { return };
    let files = [
        "model/tests/fixtures/llama-h64-g8.gguf",
        "model/tests/fixtures/adapters/llama-h64-g8.gguf",
        "engine/tests/adapters/llama-h64-g8",
        "vision/tests/models/smolvlm/text.gguf",
        "vision/tests/models/smolvlm/mmproj.gguf",
        "vision/tests/images/wide.png",
    ];
    let files = files.map(|path| path_in_crate("..").join(path));
    let paths = files.each_ref().map(|path| path.to_str().unwrap());
    let (code, stdout, stderr) = run(&program, &paths);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (Some(0), "all held\n", ""));
}
