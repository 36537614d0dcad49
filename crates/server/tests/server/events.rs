//! KV-block events report exactly the prefixes that the server has cached.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};

use crate::client::{Client, options, start};
use kvant_server::{KvEvent, KvEventSink, Medium, Options};
use serde_json::{Value, json};

/// Tokens of a block, and the alignment at which blocks alone suffice to continue.
const BLOCK: usize = 128;
const BORDER: usize = 512;

type Names = BTreeMap<(Medium, u64), (Option<u64>, Vec<u32>, Vec<String>)>;

/// Router model that sees events only.
#[derive(Clone, Default)]
struct Router(Arc<Mutex<Names>>);

impl Router {
    fn sink(&self) -> KvEventSink {
        let names = Arc::clone(&self.0);
        KvEventSink::new(move |events| {
            let mut names = names.lock().unwrap();
            for event in events {
                match event {
                    KvEvent::Stored { blocks, mut parent, tokens, medium, extra } => {
                        let extra = extra.map_or_else(Vec::new, |extra| extra.to_vec());
                        for (block, tokens) in blocks.into_iter().zip(tokens.chunks_exact(BLOCK)) {
                            names.insert((medium, block), (parent, tokens.to_vec(), extra.clone()));
                            parent = Some(block);
                        }
                    }
                    KvEvent::Removed { blocks, medium } => {
                        blocks.iter().for_each(|&block| assert!(names.remove(&(medium, block)).is_some()));
                    }
                    _ => names.clear(),
                }
            }
        })
    }

    /// Returns the number of cached tokens of `prompt`; `extra` is empty for requests without
    /// further keys.
    fn known(&self, medium: Medium, prompt: &[u32], extra: &[String]) -> usize {
        let names = self.0.lock().unwrap();
        let (mut parent, mut n) = (None, 0);
        for tokens in prompt.chunks_exact(BLOCK) {
            let found = names.iter().find(|((of, _), (above, its, with))| {
                *of == medium && *above == parent && its == tokens && with == extra
            });
            let Some(((_, name), _)) = found else { break };
            (parent, n) = (Some(*name), n + BLOCK);
        }
        n
    }
}

fn text(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + seed * 11) % 400 + 50) as u32).collect()
}

/// Requests one token, and returns the number of cached tokens. Then the session is idle, and its
/// events have been published.
fn cached(client: &Client, prompt: &[u32], more: Value) -> usize {
    let mut body = json!({ "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    // The next request is processed afterwards, and has no whole block.
    let (status, next) = client.post("/v1/completions", &json!({ "prompt": [60], "max_tokens": 0 }));
    assert_eq!(status, 200, "{next}");
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize
}

#[test]
fn events_report_the_cached_prefix_of_a_prompt() {
    let router = Router::default();
    let client = start(Options { kv_events: Some(router.sink()), ..options() });
    let known = |prompt: &[u32]| router.known(Medium::Device, prompt, &[]);
    let first = text(700, 1);
    assert_eq!((known(&first), cached(&client, &first, json!({}))), (0, 0));
    assert_eq!(known(&first), 700 / BLOCK * BLOCK);
    // A continuation is cached whole.
    let longer = [&first[..], &text(400, 2)].concat();
    assert_eq!((known(&longer), cached(&client, &longer, json!({}))), (640, 700));
    assert_eq!(known(&longer), 1100 / BLOCK * BLOCK);
    // Other prompts diverge from it: at least the prefix up to the last alignment boundary is
    // reused.
    for at in [300, 520, 1050] {
        let diverging = [&longer[..at], &text(200, 3)].concat();
        let (reported, found) = (known(&diverging), cached(&client, &diverging, json!({})));
        assert_eq!(reported, at / BLOCK * BLOCK);
        assert!(found >= reported / BORDER * BORDER && found <= at, "{found} of {reported} at {at}");
    }
    let other = text(300, 9);
    assert_eq!((known(&other), cached(&client, &other, json!({}))), (0, 0));
}

#[test]
fn prefill_publishes_blocks_up_to_the_last_alignment() {
    let router = Router::default();
    let client = start(Options { kv_events: Some(router.sink()), ..options() });
    let prompt = text(BORDER + 200, 4);
    let body = json!({ "prompt": prompt, "max_tokens": 100_000, "ignore_eos": true, "stream": true });
    let stream = client.send("/v1/completions", &body);
    client.wait_for("/kv", |kv| kv["tokens"].as_u64().unwrap() as usize > prompt.len());
    let known = || router.known(Medium::Device, &prompt, &[]);
    assert_eq!(known(), BORDER);
    drop(stream);
    client.wait_for("/kv", |kv| kv["running"] == 0 && kv["idle"] == 1);
    assert_eq!(known(), prompt.len() / BLOCK * BLOCK);
}

#[test]
fn evictions_are_published_and_disk_blocks_after_a_restart() {
    let folder = std::env::temp_dir().join(format!("kvant-events-{}", std::process::id()));
    _ = fs::remove_dir_all(&folder);
    let disk = Some((folder.clone(), 1 << 30));
    let router = Router::default();
    // Room for two of these conversations.
    let few = Options { kv_budget: 1 << 20, kv_disk: disk.clone(), ..options() };
    let client = start(Options { kv_events: Some(router.sink()), ..few });
    for seed in 0..4 {
        cached(&client, &text(600, seed), json!({}));
    }
    let known = |router: &Router, medium, seed| router.known(medium, &text(600, seed), &[]);
    assert_eq!((known(&router, Medium::Device, 0), known(&router, Medium::Disk, 0)), (0, 512));
    assert_eq!((known(&router, Medium::Device, 3), known(&router, Medium::Disk, 3)), (512, 0));
    let again = Router::default();
    let client = start(Options { kv_events: Some(again.sink()), kv_disk: disk, ..options() });
    // Restored blocks are published before the first answer.
    cached(&client, &text(300, 9), json!({}));
    assert_eq!((known(&again, Medium::Device, 0), known(&again, Medium::Disk, 0)), (0, 512));
    assert!(cached(&client, &text(650, 0), json!({})) >= 512);
    assert_eq!(known(&again, Medium::Device, 0), 512);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn blocks_in_memory_are_published_until_restored() {
    let router = Router::default();
    let few = Options { kv_budget: 1 << 20, kv_ram: 64 << 20, ..options() };
    let client = start(Options { kv_events: Some(router.sink()), ..few });
    for seed in 0..4 {
        cached(&client, &text(600, seed), json!({}));
    }
    let known = |seed| [Medium::Device, Medium::Ram].map(|of| router.known(of, &text(600, seed), &[]));
    assert_eq!((known(0), known(3)), ([0, 512], [512, 0]));
    assert!(cached(&client, &text(650, 0), json!({})) >= 512);
    assert_eq!(known(0)[0], 512);
    assert_eq!(known(1), [0, 512]);
}

#[test]
fn blocks_of_api_keys_and_other_types_have_extra_keys() {
    let (open, closed) = (Router::default(), Router::default());
    let client = start(Options { kv_events: Some(open.sink()), ..options() });
    let prompt = text(300, 5);
    cached(&client, &prompt, json!({ "kv_type": "q8_0" }));
    assert_eq!(open.known(Medium::Device, &prompt, &[]), 0);
    assert_eq!(open.known(Medium::Device, &prompt, &["q8_0/q8_0".to_owned()]), 256);
    let keys = ["one", "two"].map(str::to_owned).to_vec();
    let client = start(Options { kv_events: Some(closed.sink()), api_keys: keys, ..options() });
    for key in ["one", "two"] {
        assert_eq!(cached(&client.with_key(key), &prompt, json!({})), 0);
    }
    let names = closed.0.lock().unwrap();
    let extras: Vec<&Vec<String>> = names.values().map(|(_, _, extra)| extra).collect();
    let n_blocks = names.keys().count();
    assert_eq!(n_blocks, 4, "two blocks for each key, under names of its own");
    assert!(extras.iter().all(|extra| extra.len() == 1 && !extra[0].contains("one")), "{extras:?}");
}
