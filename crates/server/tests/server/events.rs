//! What routers are told is what the server need not read again.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};

use crate::client::{Client, options, start};
use kvant_server::{KvEvent, KvEventSink, Medium, Options};
use serde_json::{Value, json};

/// Tokens of a block, and those after which blocks alone are enough to go on from.
const BLOCK: usize = 128;
const BORDER: usize = 512;

type Names = BTreeMap<(Medium, u64), (Option<u64>, Vec<u32>, Vec<String>)>;

/// A router: it knows nothing but events.
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

    /// Tokens of `prompt` that are there, for requests with nothing else in common when `extra` is empty.
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

/// Asks for one token, and returns how many tokens were there. Then the conversation lies on the shelf, and that has been told.
fn cached(client: &Client, prompt: &[u32], more: Value) -> usize {
    let mut body = json!({ "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    // Whoever is answered next comes behind that, and has no whole block.
    let (status, next) = client.post("/v1/completions", &json!({ "prompt": [60], "max_tokens": 0 }));
    assert_eq!(status, 200, "{next}");
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize
}

#[test]
fn a_router_knows_what_a_prompt_need_not_read() {
    let router = Router::default();
    let client = start(Options { kv_events: Some(router.sink()), ..options() });
    let known = |prompt: &[u32]| router.known(Medium::Device, prompt, &[]);
    let first = text(700, 1);
    assert_eq!((known(&first), cached(&client, &first, json!({}))), (0, 0));
    assert_eq!(known(&first), 700 / BLOCK * BLOCK);
    // It goes on: the whole of it is there.
    let longer = [&first[..], &text(400, 2)].concat();
    assert_eq!((known(&longer), cached(&client, &longer, json!({}))), (640, 700));
    assert_eq!(known(&longer), 1100 / BLOCK * BLOCK);
    // Others part from it: what is there up to the last border is taken over, at least.
    for at in [300, 520, 1050] {
        let parting = [&longer[..at], &text(200, 3)].concat();
        let (told, found) = (known(&parting), cached(&client, &parting, json!({})));
        assert_eq!(told, at / BLOCK * BLOCK);
        assert!(found >= told / BORDER * BORDER && found <= at, "{found} of {told} at {at}");
    }
    let other = text(300, 9);
    assert_eq!((known(&other), cached(&client, &other, json!({}))), (0, 0));
}

#[test]
fn blocks_of_those_who_still_read_are_told_up_to_the_last_border() {
    let router = Router::default();
    let client = start(Options { kv_events: Some(router.sink()), ..options() });
    let prompt = text(BORDER + 200, 4);
    let body = json!({ "prompt": prompt, "max_tokens": 100_000, "ignore_eos": true, "stream": true });
    let speaking = client.send("/v1/completions", &body);
    client.wait_for("/kv", |kv| kv["tokens"].as_u64().unwrap() as usize > prompt.len());
    let known = || router.known(Medium::Device, &prompt, &[]);
    assert_eq!(known(), BORDER);
    drop(speaking);
    client.wait_for("/kv", |kv| kv["running"] == 0 && kv["idle"] == 1);
    assert_eq!(known(), prompt.len() / BLOCK * BLOCK);
}

#[test]
fn what_is_let_go_of_is_told_and_what_goes_to_disk_is_found_after_a_restart() {
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
    // What was found is told before the first answer.
    cached(&client, &text(300, 9), json!({}));
    assert_eq!((known(&again, Medium::Device, 0), known(&again, Medium::Disk, 0)), (0, 512));
    assert!(cached(&client, &text(650, 0), json!({})) >= 512);
    assert_eq!(known(&again, Medium::Device, 0), 512);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_waits_in_memory_is_told_until_it_is_on_the_device_again() {
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
fn blocks_of_keys_and_of_other_types_are_not_those_of_everybody() {
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
    let told = names.keys().count();
    assert_eq!(told, 4, "two blocks for each key, under names of its own");
    assert!(extras.iter().all(|extra| extra.len() == 1 && !extra[0].contains("one")), "{extras:?}");
}
