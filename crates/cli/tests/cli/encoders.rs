//! Text encoders on the command line: `kvant embed` takes them, commands that generate refuse them.

use std::path::{Path, PathBuf};

use crate::usage::kvant;

fn folder(name: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/encoders").join(name);
    path.to_str().unwrap().to_owned()
}

fn lines<T: serde::de::DeserializeOwned>(args: &[&str]) -> Vec<T> {
    let output = kvant(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn embeddings_and_scores_are_lines_of_json() {
    // The lines of the bundled model have some thousand characters.
    let encoders = ["bert", "gemma-embedding", "modern-bert"].map(folder);
    let encoders = encoders.iter().map(|folder| (&**folder, Some(32)));
    for (model, n_embd) in encoders.chain([("bundled", None)]) {
        let vectors: Vec<Vec<f32>> = lines(&["embed", model, "A cat sleeps.", "x"]);
        assert!(vectors.len() == 2 && vectors[0].len() == vectors[1].len());
        assert!(n_embd.is_none_or(|n| n == vectors[0].len()));
        let length: f32 = vectors[0].iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
        let few: Vec<Vec<f32>> = lines(&["embed", "-m", model, "A cat sleeps.", "--dimensions", "5"]);
        assert!(few.len() == 1 && few[0].len() == 5);
    }
    let scores: Vec<f32> =
        lines(&["embed", &folder("bert-ranker"), "A cat sleeps.", "x", "--query", "What sleeps?"]);
    assert!(scores.len() == 2 && scores.iter().all(|score| (0.0..=1.0).contains(score)), "{scores:?}");
}

#[test]
fn commands_that_generate_refuse_text_encoders() {
    const LINE: &str = "error: a text encoder ('bert'), which embeds or ranks texts and generates none\n";
    let folder = folder("bert");
    for args in [
        &["run", &folder, "-p", "x"][..],
        &["run", &folder, "x", "--quiet"],
        &["chat", &folder],
        &["bench", &folder],
        &["plan", &folder],
        &["doctor", &folder],
        &["eval", "kld", "-m", &folder, "--quiet"],
    ] {
        let output = kvant(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && error.ends_with(LINE), "{args:?}: {error}");
    }
    let shown = kvant(&["inspect", &folder]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("KV cache: none (a text encoder"), "{shown}");
    for (args, line) in [
        (&["embed", &folder][..], "error: expected a model and at least one text\n"),
        (&["embed", &folder, "x", "--query", "y"], "error: model: expected one that scores documents"),
        (&["embed", "bundled", "x", "--pooling", "cls"], "error: pooling: expected mean, last, or cls"),
        (&["embed", &folder, "x", "-ngl", "2"], "error: -ngl: expected 0 for a text encoder"),
    ] {
        let output = kvant(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.starts_with(line), "{args:?}: {error}");
    }
}
