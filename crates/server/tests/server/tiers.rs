//! Conversations that exceed the device memory: their tiers, and equal answers.

use std::fs;
use std::sync::LazyLock;

use crate::client::{Client, options, start};
use kvant_server::Options;
use serde_json::{Value, json};

/// Room for two of these conversations.
const FEW: usize = 1 << 20;
const N: usize = 5;

/// Answers of a server with room for all.
static EXPECTED: LazyLock<Vec<String>> = LazyLock::new(|| {
    let alone = start(options());
    (0..N).map(|seed| complete(&alone, seed).0).collect()
});

/// Returns the answer to the prompt of a conversation, and the number of cached tokens.
fn complete(client: &Client, seed: usize) -> (String, u64) {
    let prompt: String = (0..130).map(|i| format!("{} is a number. ", (i * 31 + seed * 7) % 97)).collect();
    let body = json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0 });
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached)
}

/// Returns a value of `/kv` at rest; no tier ever exceeds its budget.
fn kv_value(client: &Client, name: &str) -> u64 {
    client.wait_for("/kv", |kv| kv["running"] == 0);
    let (_, kv) = client.get("/kv");
    let number = |name: &str| kv[name].as_u64().unwrap_or_else(|| panic!("{name}: {kv}"));
    for (bytes, budget) in [("bytes", "budget"), ("ram_bytes", "ram_budget"), ("disk_bytes", "disk_budget")] {
        assert!(number(bytes) <= number(budget), "{kv}");
    }
    number(name)
}

fn metric(client: &Client, name: &str) -> u64 {
    let metrics = client.get_text("/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("{name}: {metrics}")).parse().unwrap()
}

#[test]
fn evicted_sessions_move_to_memory_and_are_reported() {
    let client = start(Options { kv_budget: FEW, kv_ram: 64 << 20, ..options() });
    for (seed, expected) in EXPECTED.iter().enumerate() {
        assert_eq!(complete(&client, seed), (expected.clone(), 0));
        kv_value(&client, "bytes");
    }
    let waiting = kv_value(&client, "ram_bytes");
    assert!(waiting > 0);
    assert_eq!(metric(&client, "kvant:kv_ram_bytes"), waiting);
    assert_eq!((kv_value(&client, "disk_bytes"), metric(&client, "kvant:kv_disk_bytes")), (0, 0));
    for (seed, expected) in EXPECTED.iter().enumerate() {
        let (text, cached) = complete(&client, seed);
        assert!(text == *expected && cached > 512, "{seed}: {cached}, {text}");
    }
}

#[test]
fn sessions_that_exceed_memory_move_to_disk_or_are_recomputed() {
    let folder = std::env::temp_dir().join(format!("kvant-tiers-{}", std::process::id()));
    _ = fs::remove_dir_all(&folder);
    for disk in [None, Some((folder.clone(), 1 << 30))] {
        let has_disk = disk.is_some();
        let client = start(Options { kv_budget: FEW, kv_ram: FEW as u64, kv_disk: disk, ..options() });
        let mut n_found = 0;
        for round in 0..2 {
            for (seed, expected) in EXPECTED.iter().enumerate() {
                let (text, cached) = complete(&client, seed);
                assert_eq!(text, *expected, "{seed}");
                n_found += usize::from(round > 0 && cached > 512);
                kv_value(&client, "ram_bytes");
            }
        }
        let on_disk = kv_value(&client, "disk_bytes");
        assert_eq!(metric(&client, "kvant:kv_disk_bytes"), on_disk);
        assert_eq!(on_disk > 0, has_disk);
        if has_disk {
            assert_eq!(n_found, N);
        } else {
            assert!(n_found < N, "there was no room for all");
        }
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_preempted_sequence_resumes_from_memory_unchanged() {
    let body = |i: usize| json!({ "prompt": format!("Story {i}:"), "max_tokens": 300, "ignore_eos": true, "temperature": 0 });
    let complete = |client: &Client, i: usize| -> Value {
        let (status, answer) = client.post("/v1/completions", &body(i));
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].clone()
    };
    let alone = start(options());
    let few = start(Options { kv_budget: 3 << 19, kv_ram: 64 << 20, ..options() });
    let expected: Vec<Value> = (0..6).map(|i| complete(&alone, i)).collect();
    std::thread::scope(|scope| {
        let few = &few;
        let threads: Vec<_> = (0..6).map(|i| scope.spawn(move || complete(few, i))).collect();
        for (thread, expected) in threads.into_iter().zip(&expected) {
            assert_eq!(thread.join().unwrap(), *expected);
        }
    });
    assert!(metric(&few, "vllm:num_preemptions_total") > 0, "no sequence was preempted");
}

#[cfg(unix)]
#[test]
fn saved_files_become_readable_by_their_owner_only() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let folder = std::env::temp_dir().join(format!("kvant-tiers-open-{}", std::process::id()));
    _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let files = || -> Vec<std::path::PathBuf> {
        let paths = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "kvctx")).collect()
    };
    let modes = || files().iter().map(|path| fs::metadata(path).unwrap().mode() & 0o777).collect::<Vec<_>>();
    let on_disk = || Options { kv_budget: FEW, kv_disk: Some((folder.clone(), 64 << 20)), ..options() };
    let client = start(on_disk());
    (0..N).for_each(|seed| drop(complete(&client, seed)));
    kv_value(&client, "disk_bytes");
    assert!(!modes().is_empty() && modes().iter().all(|&mode| mode == 0o600), "{:?}", modes());
    // Permissions as set by earlier versions.
    files().iter().for_each(|path| fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap());
    start(on_disk());
    assert!(!modes().is_empty() && modes().iter().all(|&mode| mode == 0o600), "{:?}", modes());
    fs::remove_dir_all(&folder).unwrap();
}
