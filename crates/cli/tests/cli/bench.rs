//! Tests of `kvant bench` with several sequences.

use serde_json::Value;

use crate::usage::{assert_refused, json, kvant};

/// Returns the rows of `kvant bench` for a model of random weights, decode alone.
fn rows(args: &[&str]) -> Vec<Value> {
    let bench = ["bench", "--synthetic", "tiny:q4_0", "--device", "cpu", "-p", "0", "-n", "2", "-r", "1"];
    json(&kvant(&[&bench, args, &["-o", "json"]].concat())).as_array().unwrap().clone()
}

#[test]
fn sequences_decode_together_at_every_depth() {
    let rows = rows(&["--parallel", "1,3", "-d", "0,256"]);
    let tests: Vec<_> =
        rows.iter().map(|row| (row["n_depth"].as_u64(), row["n_parallel"].as_u64())).collect();
    let want = [(0, 1), (0, 3), (256, 1), (256, 3)].map(|(depth, n)| (Some(depth), Some(n)));
    assert_eq!(tests, want);
    for row in &rows {
        let [n, all, each] =
            ["n_parallel", "avg_ts", "avg_ts_per_sequence"].map(|key| row[key].as_f64().unwrap());
        assert!(all > 0.0 && (all / n - each).abs() < 1e-9 * all, "{row}");
        assert_eq!(row["n_fit"], Value::Null);
    }
    // Each has a cache of its own, and several have checkpoints.
    let [one, three] = [&rows[2], &rows[3]].map(|row| row["kv_bytes"].as_u64().unwrap());
    assert!((3 * one..4 * one).contains(&three), "{one} and {three}");
}

#[test]
fn sequences_beyond_the_memory_are_told_with_how_many_fit() {
    let rows = rows(&["--parallel", "512", "-d", "1000000", "-ctk", "f32", "-ctv", "f32"]);
    assert!(rows[0]["n_fit"].as_u64().unwrap() < 512 && rows[0]["avg_ts"].is_null(), "{}", rows[0]);
}

#[test]
fn invalid_numbers_of_sequences_are_rejected_in_one_line() {
    for n in ["0", "513"] {
        assert_refused(&kvant(&["bench", "--parallel", n]), 1, &["--parallel", n, "512"]);
    }
    assert_refused(&kvant(&["bench", "--parallel", "2", "--profile"]), 2, &["--parallel", "--profile"]);
}
