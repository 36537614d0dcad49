//! LoRA scales of requests.

use std::sync::Arc;

use crate::client::{Client, options, serve_model};
use kvant::gguf::{GgufError, GgufWriter, TensorSink};
use kvant::{DType, Gguf, LoraFile, Model, OpenOptions};
use kvant_server::{ModelSpec, Options};
use serde_json::{Value, json};

const PROMPT: &str = "The capital of France is";

/// Creates an adapter of rank 1 that changes the output of every feed-forward layer by the values
/// of `number`.
fn adapter(model: &Gguf, number: impl Fn(usize) -> f32) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer.set("general.type", "adapter").unwrap();
    writer.set("general.architecture", model.meta().get::<&str>("general.architecture").unwrap()).unwrap();
    writer.set("adapter.type", "lora").unwrap();
    writer.set("adapter.lora.alpha", 1.0f32).unwrap();
    let changed: Vec<_> =
        model.tensors().iter().filter(|info| info.name.ends_with("ffn_down.weight")).collect();
    for info in &changed {
        writer.add_tensor(&format!("{}.lora_a", info.name), &[info.row_len(), 1], DType::F32).unwrap();
        writer.add_tensor(&format!("{}.lora_b", info.name), &[1, info.rows()], DType::F32).unwrap();
    }
    let values = |n: usize| (0..n).flat_map(|i| number(i).to_le_bytes()).collect::<Vec<u8>>();
    let fill = |data: &mut TensorSink<'_>| -> Result<(), GgufError> {
        changed.iter().try_for_each(|info| {
            data.bytes(&format!("{}.lora_a", info.name), &values(info.row_len()))?;
            data.bytes(&format!("{}.lora_b", info.name), &values(info.rows()))
        })
    };
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes, fill).unwrap();
    bytes
}

/// Creates two adapters.
pub fn waves() -> [Vec<u8>; 2] {
    let gguf = Model::bundled_file().unwrap();
    [0.7, 1.3].map(|step| adapter(&gguf, |i| 0.2 * (i as f32 * step).sin()))
}

/// Starts a server of the bundled model with two adapters of these scales.
fn start_with(files: [Gguf; 2], strengths: [f32; 2], options: Options) -> Client {
    let loras = files.into_iter().zip(strengths);
    let loras = loras.map(|(file, strength)| LoraFile::new(file, strength)).collect();
    let open = OpenOptions { n_threads: Some(2), loras, ..Default::default() };
    Client::at(serve_model(Model::bundled(open).unwrap(), options))
}

fn start(strengths: [f32; 2]) -> Client {
    start_with(waves().map(|bytes| Gguf::from_bytes(bytes).unwrap()), strengths, options())
}

/// Returns the greedy answer with its logprobs.
fn answer(client: &Client, lora: &Value) -> Value {
    let body = json!({ "prompt": PROMPT, "lora": lora, "max_tokens": 12, "temperature": 0, "logprobs": 3 });
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0].clone()
}

fn scales(scales: [f32; 2]) -> Value {
    json!([{ "id": 1, "scale": scales[1] }, { "id": 0, "scale": scales[0] }])
}

#[test]
fn requests_in_a_batch_have_their_own_lora_scales() {
    let all = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0], [1.0, 0.0]];
    let alone = all.map(|strengths| answer(&start(strengths), &Value::Null));
    let mut differ: Vec<String> = alone.iter().map(Value::to_string).collect();
    differ.sort();
    differ.dedup();
    assert_eq!(differ.len(), 4, "{alone:?}");
    let plain = Client::at(serve_model(Model::bundled(OpenOptions::default()).unwrap(), options()));
    assert_eq!(alone[3], answer(&plain, &Value::Null));
    let client = &start([1.0, 0.0]);
    let together = std::thread::scope(|scope| {
        all.map(|strengths| scope.spawn(move || answer(client, &scales(strengths))))
            .map(|answer| answer.join().unwrap())
    });
    // Values are rounded at the scale that adapters were loaded with: scales that differ by a power
    // of two round alike.
    assert_eq!(together, alone);
    // Adapters that are not listed have scale 0.
    assert_eq!(answer(client, &json!([{ "id": 0, "scale": 1.0 }])), alone[0]);
    assert_eq!(answer(client, &json!([])), alone[3]);
    assert_eq!(answer(client, &Value::Null), alone[0]);
}

#[test]
fn a_prompt_read_with_another_scale_is_read_again() {
    let client = start([1.0, 0.0]);
    let prompt = "Once upon a time there was a lighthouse. ".repeat(20);
    let cached = |lora: &Value| {
        let body = json!({ "prompt": prompt, "lora": lora, "n_predict": 1 });
        let (status, answer) = client.post("/completion", &body);
        assert_eq!(status, 200, "{answer}");
        answer["timings"]["cache_n"].as_u64().unwrap()
    };
    assert_eq!(cached(&Value::Null), 0);
    assert_eq!(cached(&scales([0.5, 0.0])), 0);
    assert!(cached(&Value::Null) > 100);
    assert!(cached(&scales([1.0, 0.0])) > 100, "the same by another name");
    assert!(cached(&scales([0.5, 0.0])) > 100);
}

#[test]
fn the_default_lora_scales_can_be_set() {
    let client = start([1.0, 0.0]);
    let listed = |scales: [f32; 2]| {
        json!([
            { "id": 0, "name": "", "path": "", "scale": scales[0] },
            { "id": 1, "name": "", "path": "", "scale": scales[1] }
        ])
    };
    let reported = || serde_json::from_str::<Value>(&client.get_text("/lora-adapters")).unwrap();
    assert_eq!(reported(), listed([1.0, 0.0]));
    let first = answer(&client, &Value::Null);
    let half = answer(&client, &json!([{ "id": 0, "scale": 0.5 }]));
    assert_eq!(
        client.post("/lora-adapters", &json!([{ "id": 0, "scale": 0.5 }])),
        (200, json!({ "success": true }))
    );
    assert_eq!(reported(), listed([0.5, 0.0]));
    assert_eq!(answer(&client, &Value::Null), half);
    assert_eq!(answer(&client, &scales([1.0, 0.0])), first);
    for (body, expected) in [
        (
            json!([{ "id": 2, "scale": 1.0 }]),
            "lora: expected numbers from -100 to 100 for some of the 2 adapters, got id 2, scale 1",
        ),
        (
            json!([{ "id": 0, "scale": -1e38 }]),
            "lora: expected numbers from -100 to 100 for some of the 2 adapters, got id 0, scale -100000000000000000000000000000000000000",
        ),
        (
            json!([{ "id": 0 }]),
            "lora: expected a list of {\"id\": number, \"scale\": number}, got [{\"id\":0}]",
        ),
        (json!({}), "lora: expected a list of {\"id\": number, \"scale\": number}, got {}"),
    ] {
        let (status, error) = client.post("/lora-adapters", &body);
        assert_eq!((status, error["error"]["message"].as_str().unwrap()), (400, expected));
    }
    assert_eq!(reported(), listed([0.5, 0.0]), "as it was");
    let (status, error) =
        client.post("/v1/completions", &json!({ "prompt": "x", "lora": [{ "id": 7, "scale": 1 }] }));
    assert_eq!((status, error["error"]["param"].as_str()), (400, Some("lora")));
}

#[test]
fn default_lora_scales_are_set_per_api_key() {
    let files = waves().map(|bytes| Gguf::from_bytes(bytes).unwrap());
    let keys = vec!["alice".to_owned(), "bob".to_owned()];
    let client = start_with(files, [1.0, 0.0], Options { api_keys: keys, ..options() });
    let (alice, bob) = (client.with_key("alice"), client.with_key("bob"));
    let scale = |client: &Client| {
        let adapters: Value = serde_json::from_str(&client.get_text("/lora-adapters")).unwrap();
        adapters[0]["scale"].as_f64().unwrap()
    };
    let before = answer(&alice, &Value::Null);
    assert_eq!(bob.post("/lora-adapters", &json!([{ "id": 0, "scale": 0.5 }])).0, 200);
    assert_eq!((scale(&alice), scale(&bob)), (1.0, 0.5));
    assert_eq!(answer(&alice, &Value::Null), before);
    assert_eq!(answer(&bob, &Value::Null), answer(&alice, &scales([0.5, 0.0])));
    assert_eq!(bob.post("/lora-adapters", &scales([1.0, 0.0])).0, 200);
    assert_eq!(answer(&bob, &Value::Null), before);
}

/// Neither its own answer nor that of another sequence in the batch: what would overflow is
/// rejected.
#[test]
fn the_largest_lora_scale_breaks_no_answer() {
    let gguf = Model::bundled_file().unwrap();
    // Largest values that an adapter may have.
    let files = [waves()[0].clone(), adapter(&gguf, |i| 5e4 * (i as f32).sin())];
    let files = files.map(|bytes| Gguf::from_bytes(bytes).unwrap());
    let client = &start_with(files, [1.0, 0.0], options());
    let long = json!({ "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": true });
    let complete = |body: &Value| client.post("/v1/completions", body);
    let (_, alone) = complete(&long);
    let (status, beside, changed) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| complete(&long));
        let largest =
            json!({ "prompt": "Hello there", "lora": [{ "id": 1, "scale": 100 }], "max_tokens": 4 });
        let changed: Vec<_> = (0..8).map(|_| complete(&largest)).collect();
        let (status, beside) = beside.join().unwrap();
        (status, beside, changed)
    });
    assert_eq!((status, &beside["choices"][0]["text"]), (200, &alone["choices"][0]["text"]));
    for (status, answer) in changed {
        assert_eq!(status, 200, "{answer}");
    }
}

/// vLLM's clients select an adapter by its name, as a model.
#[test]
fn an_adapter_is_selected_by_name_like_a_model() {
    let folder = std::env::temp_dir().join(format!("kvant-server-loras-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let paths = ["formal", "terse"].map(|name| folder.join(format!("{name}.gguf")));
    paths.iter().zip(waves()).for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let open = || paths.each_ref().map(|path| Gguf::open(path).unwrap());
    let others = vec![ModelSpec {
        name: "other".to_owned(),
        bytes: 0,
        open: Arc::new(|| unreachable!("it is never loaded")),
    }];
    for options in [options(), Options { others, ..options() }] {
        let client = start_with(open(), [0.0, 0.0], options);
        let generate = |path: &str, more: Value| {
            let mut body = json!({ "prompt": "Once upon a time", "raw": true, "stream": false, "temperature": 0,
                "options": { "num_predict": 40, "temperature": 0 }, "max_tokens": 40 });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let (status, answer) = client.post(path, &body);
            assert_eq!(status, 200, "{answer}");
            let text = answer["choices"][0]["text"].as_str().or_else(|| answer["response"].as_str());
            text.unwrap_or_else(|| panic!("{answer}")).to_owned()
        };
        let texts =
            ["pocket", "formal", "terse"].map(|name| generate("/v1/completions", json!({ "model": name })));
        let shares = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]];
        assert_eq!(
            texts,
            shares.map(|share| generate(
                "/v1/completions",
                json!({ "model": "pocket", "lora": scales(share) })
            ))
        );
        assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
        assert_eq!(generate("/api/generate", json!({ "model": "terse:latest" })), texts[2]);
        let models: Value = serde_json::from_str(&client.get_text("/v1/models")).unwrap();
        let listed: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
        assert!(listed.ends_with(&[&json!("formal"), &json!("terse")]), "{models}");
        let (status, card) = client.get("/v1/models/formal");
        assert_eq!((status, &card["parent"]), (200, &json!("pocket")), "{card}");
        assert_eq!(card["root"], "formal.gguf", "no folder, since no key is needed");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
