//! Hugging Face folders, as `transformers` saves the models of `golden.rs` (`tools/reference/folders.py` says how): read as GGUF files
//! they have the bits of the fixtures, which are held to `transformers`, and say the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::{DType, Gguf, KvOptions, Model, OpenOptions, SessionOptions, open_file, quantize};
use serde_json::{Map, Value, json};

/// A folder of one test, removed with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvant-hf-{name}-{}-{next}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tensor as a safetensors file has it.
struct Saved {
    name: String,
    dtype: &'static str,
    shape: Value,
    bytes: Vec<u8>,
}

fn names() -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/folders");
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> =
        files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    assert!(names.len() >= 20, "only {} folders", names.len());
    names
}

fn fixture(name: &str) -> Gguf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(dir.join(format!("{name}.gguf"))).unwrap()
}

/// What `transformers` saves of a model: its configuration, and its tensors with the values of the fixture.
fn saved(name: &str) -> (Value, Vec<Saved>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/folders");
    let described: Value =
        serde_json::from_slice(&fs::read(dir.join(format!("{name}.json"))).unwrap()).unwrap();
    let gguf = fixture(name);
    let tensors = described["tensors"].as_array().unwrap().iter().map(|tensor| {
        let view = gguf.tensor(tensor["from"].as_str().unwrap()).unwrap();
        let dtype = if view.info.dtype == DType::F32 { "F32" } else { "F16" };
        // Rows there are values where it is a vector.
        let row_len = if view.info.shape.len() == 1 { 1 } else { view.info.row_len() };
        let row_bytes = view.info.dtype.row_bytes(row_len).unwrap();
        let shape = tensor["shape"].as_array().unwrap();
        let n_values: usize = shape.iter().map(|size| size.as_u64().unwrap() as usize).product();
        let rows: Vec<usize> = match &tensor["rows"] {
            Value::Array(rows) => rows.iter().map(|row| row.as_u64().unwrap() as usize).collect(),
            first => (0..n_values / row_len).map(|row| first.as_u64().unwrap() as usize + row).collect(),
        };
        let mut bytes: Vec<u8> = rows
            .iter()
            .flat_map(|row| &view.bytes[row * row_bytes..(row + 1) * row_bytes])
            .copied()
            .collect();
        if let Some(minus) = tensor["minus"].as_f64() {
            for value in bytes.chunks_exact_mut(4) {
                let less = f32::from_le_bytes((&*value).try_into().unwrap()) - minus as f32;
                value.copy_from_slice(&less.to_le_bytes());
            }
        }
        Saved {
            name: tensor["name"].as_str().unwrap().to_owned(),
            dtype,
            shape: tensor["shape"].clone(),
            bytes,
        }
    });
    (described["config"].clone(), tensors.collect())
}

fn write_safetensors(path: &Path, tensors: &[Saved]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for Saved { name, dtype, shape, bytes } in tensors {
        let begin = data.len();
        data.extend(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    let header = Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

/// Writes a folder with its weights in one file.
fn write_folder(dir: &Path, config: &Value, tensors: &[Saved]) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    write_safetensors(&dir.join("model.safetensors"), tensors);
}

/// Logits of the first tokens.
fn logits(model: &Model) -> Vec<f32> {
    let kv = KvOptions::symmetric("f32".parse().unwrap());
    let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
    session.feed(&(0..40).collect::<Vec<_>>(), &mut |_| true).unwrap();
    session.logits().unwrap().to_vec()
}

fn options(weights: Option<DType>) -> OpenOptions<'static> {
    OpenOptions { n_threads: Some(1), weights, ..Default::default() }
}

/// Divisors of frequencies are computed; the reference does that in f32, which rounds each a few times.
fn assert_close(name: &str, got: &[u8], want: &[u8]) {
    assert_eq!(got.len(), want.len(), "{name}");
    let values = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
    };
    for (got, want) in values(got).into_iter().zip(values(want)) {
        assert!((got - want).abs() <= 1e-6 * want.abs(), "{name}: got {got}, want {want}");
    }
}

#[test]
fn a_folder_has_the_bits_of_the_file_that_a_converter_writes_and_says_the_same() {
    for name in names() {
        let (scratch, want) = (Scratch::new(&name), fixture(&name));
        let (config, tensors) = saved(&name);
        write_folder(&scratch.0, &config, &tensors);
        let got = open_file(&scratch.0).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(got.tensors().len(), want.tensors().len(), "{name}");
        for info in want.tensors() {
            let found = got.tensor(&info.name).unwrap_or_else(|error| panic!("{name}: {error}"));
            let what = format!("{name}, {}", info.name);
            assert_eq!((&found.info.shape, found.info.dtype), (&info.shape, info.dtype), "{what}");
            match &*info.name {
                "rope_freqs.weight" => assert_close(&what, &found.bytes, &want.data(info)),
                _ => assert!(found.bytes == want.data(info), "{what}: other bits"),
            }
        }
        let [got, want] = [got, want].map(|gguf| {
            Model::from_gguf(gguf, options(None)).unwrap_or_else(|error| panic!("{name}: {error}"))
        });
        for (got, want) in logits(&got).into_iter().zip(logits(&want)) {
            // As close as divisors are; else the same bits, of which NaN has none.
            assert!(
                (got - want).abs() <= if name.contains("llama3") { 1e-4 } else { 0.0 },
                "{name}: {got}, {want}"
            );
        }
    }
}

#[test]
fn a_folder_in_shards_is_one_model_and_quantised_while_loading_the_file_that_is_written() {
    let name = "qwen3moe-h64-g2-dense1";
    let scratch = Scratch::new("shards");
    let (config, tensors) = saved(name);
    write_folder(&scratch.0, &config, &tensors);
    let whole = logits(&Model::open_with(&scratch.0, options(None)).unwrap());
    fs::remove_file(scratch.0.join("model.safetensors")).unwrap();
    let mut places = Map::new();
    let halves = tensors.len() / 2;
    for (i, part) in [&tensors[..halves], &tensors[halves..]].into_iter().enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", i + 1);
        write_safetensors(&scratch.0.join(&file), part);
        part.iter().for_each(|tensor| _ = places.insert(tensor.name.clone(), file.clone().into()));
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": places});
    fs::write(scratch.0.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let model = Model::open_with(&scratch.0, options(None)).unwrap();
    assert_eq!(logits(&model), whole);
    let file = scratch.0.join("q8_0.gguf");
    quantize::quantize(model.gguf(), &file, DType::Q8_0, &mut |_| ()).unwrap();
    let written = Model::open_with(&file, options(None)).unwrap();
    let retyped = Model::open_with(&scratch.0, options(Some(DType::Q8_0))).unwrap();
    assert_eq!(logits(&written), logits(&retyped));
    assert_ne!(logits(&written), whole);
    // What is in other types than the file's is the same model, by another name.
    let copy = scratch.0.join("f16.gguf");
    assert_eq!(quantize::usual_type(model.gguf()), DType::F16);
    quantize::quantize(model.gguf(), &copy, DType::F16, &mut |_| ()).unwrap();
    assert_eq!(Model::open_with(&copy, options(None)).unwrap().fingerprint(), model.fingerprint());
}

#[test]
fn the_text_model_of_one_that_sees_is_what_it_is_alone() {
    let name = "gemma3-h256-g4-window24";
    let alone = Scratch::new("alone");
    let (mut config, mut tensors) = saved(name);
    write_folder(&alone.0, &config, &tensors);
    let want = logits(&Model::open_with(&alone.0, options(None)).unwrap());
    // Numbers that are the usual ones may be left out.
    for key in ["head_dim", "rms_norm_eps", "architectures"] {
        config.as_object_mut().unwrap().remove(key).unwrap();
    }
    let config =
        json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "hidden_size": 7});
    for prefixes in
        [["language_model.model.", "vision_tower."], ["model.language_model.", "model.vision_tower."]]
    {
        let seeing = Scratch::new("seeing");
        for tensor in &mut tensors {
            let plain = tensor.name.replacen("language_model.", "", 1);
            tensor.name = plain.replacen("model.", prefixes[0], 1);
        }
        let eye = Saved {
            name: prefixes[1].to_owned() + "patch",
            dtype: "F32",
            shape: json!([1]),
            bytes: vec![0; 4],
        };
        tensors.push(eye);
        write_folder(&seeing.0, &config, &tensors);
        tensors.pop();
        assert_eq!(logits(&Model::open_with(&seeing.0, options(None)).unwrap()), want);
    }
}

/// A folder changed in its configuration or its tensors, opened.
fn changed(name: &str, change: impl FnOnce(&mut Value, &mut Vec<Saved>)) -> String {
    let scratch = Scratch::new("changed");
    let (mut config, mut tensors) = saved(name);
    change(&mut config, &mut tensors);
    write_folder(&scratch.0, &config, &tensors);
    let told = open_file(&scratch.0).err().expect("it is refused").to_string();
    assert!(!told.contains('\n') && told.len() < 1000, "{told}");
    told
}

#[test]
fn what_a_configuration_gets_wrong_is_told_by_its_key() {
    let cases: [(&str, &str, Value, &str); 16] = [
        (
            "llama-h64-g8",
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "the nearest that is: LlamaForCausalLM",
        ),
        (
            "llama-h64-g8",
            "architectures",
            json!([]),
            "'architectures': expected the name of an architecture, got nothing",
        ),
        (
            "llama-h64-g8",
            "quantization_config",
            json!({"quant_method": "gptq", "bits": 4}),
            "its weights are quantised as gptq",
        ),
        (
            "llama-h64-g8",
            "num_hidden_layers",
            json!(0),
            "'num_hidden_layers': expected a number from 1 on, got 0",
        ),
        (
            "llama-h64-g8",
            "num_hidden_layers",
            json!(2_000_000_000),
            "'num_hidden_layers': expected 1 to 4096",
        ),
        ("llama-h64-g8", "num_hidden_layers", json!(3), "tensor 'model.layers.2' is missing"),
        ("llama-h64-g8", "num_hidden_layers", json!(1), "is unknown in the family LlamaForCausalLM"),
        ("llama-h64-g8", "num_attention_heads", json!(-8), "expected a number from 0 to 2^31, got -8"),
        (
            "llama-h64-g8",
            "num_attention_heads",
            json!(4),
            "has the shape [512, 32], expected 4 heads of 64 rows",
        ),
        (
            "llama-h64-g8",
            "num_key_value_heads",
            json!(3),
            "'num_key_value_heads': expected a divisor of the 8 heads, got 3",
        ),
        ("llama-h64-g8", "hidden_size", json!(64), "expected rows of 64 values"),
        ("llama-h64-g8", "hidden_act", json!("gelu"), "'hidden_act': expected silu, got gelu"),
        ("llama-h64-g8", "rms_norm_eps", Value::Null, "'rms_norm_eps': expected a number, got nothing"),
        (
            "llama-h64-g8",
            "rope_parameters",
            json!({"rope_type": "longrope"}),
            "expected default, linear, yarn or llama3, got longrope",
        ),
        ("mixtral-h64-g2", "num_local_experts", json!(6), "there is none for expert 5 of 6"),
        (
            "smollm3-h64-g2-unturned",
            "no_rope_layers",
            json!([1, 0, 1, 0]),
            "'no_rope_layers': expected a 0 every 4 of 4 layers",
        ),
    ];
    for (name, key, value, want) in cases {
        let told = changed(name, |config, _| config[key] = value);
        assert!(told.contains(want), "{key}: {told}");
    }
}

#[test]
fn tensors_that_are_missing_too_many_or_of_another_kind_are_told_by_name() {
    let told = |name: &str, change: &dyn Fn(&mut Vec<Saved>)| changed(name, |_, tensors| change(tensors));
    let without = |end: &'static str| {
        move |tensors: &mut Vec<Saved>| {
            let n = tensors.len();
            tensors.retain(|tensor| !tensor.name.ends_with(end));
            assert!(tensors.len() < n, "{end}");
        }
    };
    let renamed = |tensors: &mut Vec<Saved>| tensors[1].name += "_scale";
    let cut = |tensors: &mut Vec<Saved>| _ = tensors[0].bytes.pop();
    let fp8 = |tensors: &mut Vec<Saved>| tensors[0].dtype = "F8_E4M3";
    for (got, want) in [
        (
            told("llama-h64-g8", &without("layers.1.self_attn.v_proj.weight")),
            "'blk.1.attn_v.weight' is missing: layer 0 has its like",
        ),
        (told("llama-h64-g8", &without("model.norm.weight")), "'output_norm.weight' is missing"),
        (told("llama-h64-g8", &without("lm_head.weight")), "'lm_head.weight' is missing: config.json says"),
        (
            told("mixtral-h64-g2", &without("layers.1.block_sparse_moe.experts.2.w1.weight")),
            "there is none for expert 2 of 5",
        ),
        (told("llama-h64-g8", &renamed), "is unknown in the family LlamaForCausalLM"),
        (told("llama-h64-g8", &cut), "takes 4096 bytes, but 4095 are its own"),
        (told("llama-h64-g8", &fp8), "holds F8_E4M3; weights are read in F32, F16 and BF16"),
    ] {
        assert!(got.contains(want), "{got}");
    }
}

/// A file with one to four bytes changed, for the better part into others that JSON has.
fn mutated(bytes: &[u8], state: &mut u64) -> Vec<u8> {
    let mut below = |n: usize| {
        // Knuth's MMIX generator: its high bits are good enough here.
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as usize % n
    };
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + below(4) {
        let at = below(bytes.len());
        match below(4) {
            0 => bytes[at] = below(256) as u8,
            1 => _ = bytes.remove(at),
            2 => bytes.insert(at, b"0123456789-.\"[]{},"[below(18)]),
            _ => bytes[at] = b"0123456789-.\"[]{},"[below(18)],
        }
    }
    bytes
}

#[test]
fn a_damaged_folder_is_refused_in_a_line_or_read_whole() {
    let scratch = Scratch::new("damaged");
    let (config, tensors) = saved("mixtral-h64-g2");
    write_folder(&scratch.0, &config, &tensors);
    let [config, weights] = ["config.json", "model.safetensors"].map(|name| scratch.0.join(name));
    let (config_bytes, weight_bytes) = (fs::read(&config).unwrap(), fs::read(&weights).unwrap());
    let header = 8 + u64::from_le_bytes(weight_bytes[..8].try_into().unwrap()) as usize;
    let (mut state, mut n_read) = (1, 0);
    for round in 0..400 {
        let damaged = if round % 2 == 0 { (&config, &config_bytes) } else { (&weights, &weight_bytes) };
        let front = damaged.1.len().min(header);
        let bytes = [&mutated(&damaged.1[..front], &mut state)[..], &damaged.1[front..]].concat();
        fs::write(damaged.0, bytes).unwrap();
        match open_file(&scratch.0) {
            Ok(gguf) => {
                gguf.tensors().iter().for_each(|info| assert_eq!(gguf.data(info).len(), info.n_bytes));
                n_read += 1;
            }
            Err(error) => {
                let told = error.to_string();
                assert!(!told.contains('\n') && told.len() < 1000, "{told}");
            }
        }
        fs::write(&config, &config_bytes).unwrap();
        fs::write(&weights, &weight_bytes).unwrap();
    }
    assert!((20..380).contains(&n_read), "{n_read} of 400 were read");
}
