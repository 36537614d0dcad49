//! Adapters: how much of each an answer is made with.

use std::sync::Arc;

use crate::client::{Client, options, serve_model};
use kvant::gguf::{GgufError, GgufWriter, TensorSink};
use kvant::{DType, Gguf, LoraFile, Model, OpenOptions};
use kvant_server::{Offer, Options};
use serde_json::{Value, json};

const PROMPT: &str = "The capital of France is";

/// An adapter of rank 1 that changes what leaves every feed-forward layer, by numbers that `number` gives.
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

/// Two of them.
fn waves() -> [Vec<u8>; 2] {
    let gguf = Model::bundled_file().unwrap();
    [0.7, 1.3].map(|step| adapter(&gguf, |i| 0.2 * (i as f32 * step).sin()))
}

/// A server of the bundled model with two adapters of these strengths.
fn start_with(files: [Gguf; 2], strengths: [f32; 2], options: Options) -> Client {
    let loras = files.into_iter().zip(strengths);
    let loras = loras.map(|(file, strength)| LoraFile::new(file, strength)).collect();
    let open = OpenOptions { n_threads: Some(2), loras, ..Default::default() };
    Client::at(serve_model(Model::bundled(open).unwrap(), options))
}

fn start(strengths: [f32; 2]) -> Client {
    start_with(waves().map(|bytes| Gguf::from_bytes(bytes).unwrap()), strengths, options())
}

/// The likeliest answer, and how likely its tokens are.
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
fn each_request_has_its_own_share_of_adapters_beside_others() {
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
    // Numbers are rounded at the share that adapters were loaded with: powers of two apart, alike.
    assert_eq!(together, alone);
    // Those that are not named have no share.
    assert_eq!(answer(client, &json!([{ "id": 0, "scale": 1.0 }])), alone[0]);
    assert_eq!(answer(client, &json!([])), alone[3]);
    assert_eq!(answer(client, &Value::Null), alone[0]);
}

#[test]
fn a_prompt_that_was_read_with_another_share_is_read_again() {
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
fn what_requests_get_that_do_not_say_can_be_set() {
    let client = start([1.0, 0.0]);
    let listed = |scales: [f32; 2]| {
        json!([
            { "id": 0, "name": "", "path": "", "scale": scales[0] },
            { "id": 1, "name": "", "path": "", "scale": scales[1] }
        ])
    };
    let told = || serde_json::from_str::<Value>(&client.get_text("/lora-adapters")).unwrap();
    assert_eq!(told(), listed([1.0, 0.0]));
    let first = answer(&client, &Value::Null);
    let half = answer(&client, &json!([{ "id": 0, "scale": 0.5 }]));
    assert_eq!(
        client.post("/lora-adapters", &json!([{ "id": 0, "scale": 0.5 }])),
        (200, json!({ "success": true }))
    );
    assert_eq!(told(), listed([0.5, 0.0]));
    assert_eq!(answer(&client, &Value::Null), half);
    assert_eq!(answer(&client, &scales([1.0, 0.0])), first);
    for (body, expected) in [
        (
            json!([{ "id": 2, "scale": 1.0 }]),
            "lora: expected numbers for some of the 2 adapters, got id 2, scale 1",
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
    assert_eq!(told(), listed([0.5, 0.0]), "as it was");
    let (status, error) =
        client.post("/v1/completions", &json!({ "prompt": "x", "lora": [{ "id": 7, "scale": 1 }] }));
    assert_eq!((status, error["error"]["param"].as_str()), (400, Some("lora")));
}

/// Numbers beyond all bounds end the answer that asked for them, and no other that is in the same steps.
#[test]
fn a_share_that_makes_no_numbers_harms_nobody_else() {
    let client = &start([1.0, 0.0]);
    let long = json!({ "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": true });
    let ask = |body: &Value| client.post("/v1/completions", body);
    let (_, alone) = ask(&long);
    let (status, beside, refused) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| ask(&long));
        let poison =
            json!({ "prompt": "Hello there", "lora": [{ "id": 0, "scale": 3e38 }], "max_tokens": 4 });
        let refused: Vec<_> = (0..8).map(|_| ask(&poison)).collect();
        let (status, beside) = beside.join().unwrap();
        (status, beside, refused)
    });
    assert_eq!((status, &beside["choices"][0]["text"]), (200, &alone["choices"][0]["text"]));
    for (status, error) in refused {
        let message = error["error"]["message"].as_str().unwrap();
        assert!(status == 500 && message.contains("NaN or an infinity"), "{error}");
    }
}

/// As vLLM's clients choose an adapter: by its name, as if it were a model.
#[test]
fn an_adapter_answers_by_its_name_whether_there_are_other_models_or_not() {
    let folder = std::env::temp_dir().join(format!("kvant-server-loras-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let paths = ["formal", "terse"].map(|name| folder.join(format!("{name}.gguf")));
    paths.iter().zip(waves()).for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let open = || paths.each_ref().map(|path| Gguf::open(path).unwrap());
    let others =
        vec![Offer { name: "other".to_owned(), bytes: 0, open: Arc::new(|| unreachable!("nobody asks")) }];
    for options in [options(), Options { others, ..options() }] {
        let client = start_with(open(), [0.0, 0.0], options);
        let said = |path: &str, more: Value| {
            let mut body = json!({ "prompt": "Once upon a time", "raw": true, "stream": false, "temperature": 0,
                "options": { "num_predict": 40, "temperature": 0 }, "max_tokens": 40 });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let (status, answer) = client.post(path, &body);
            assert_eq!(status, 200, "{answer}");
            let text = answer["choices"][0]["text"].as_str().or_else(|| answer["response"].as_str());
            text.unwrap_or_else(|| panic!("{answer}")).to_owned()
        };
        let texts =
            ["pocket", "formal", "terse"].map(|name| said("/v1/completions", json!({ "model": name })));
        let shares = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]];
        assert_eq!(
            texts,
            shares.map(|share| said("/v1/completions", json!({ "model": "pocket", "lora": scales(share) })))
        );
        assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
        assert_eq!(said("/api/generate", json!({ "model": "terse:latest" })), texts[2]);
        let models: Value = serde_json::from_str(&client.get_text("/v1/models")).unwrap();
        let listed: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
        assert!(listed.ends_with(&[&json!("formal"), &json!("terse")]), "{models}");
        let (status, card) = client.get("/v1/models/formal");
        assert_eq!((status, &card["parent"]), (200, &json!("pocket")), "{card}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
