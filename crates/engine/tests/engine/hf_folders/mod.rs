//! Hugging Face folders, as `transformers` saves the models of `golden.rs` (see
//! `tools/reference/folders.py`): opened as GGUF, they have the bits of the fixtures, which equal
//! `transformers`, and the same logits.

mod attended_streams;
mod blocks;
mod connections;
mod damaged;
mod draft_heads;
mod embedders;
mod heads_by_layer;
mod ngrams;
mod saved;
mod shared_kv;
mod windowed_latent;

use std::fs;

use kvant::{DType, Gguf, KvOptions, Model, OpenOptions, SessionOptions, open_file};
use kvant_quantize::{main_type, quantize};
use serde_json::{Map, Value, json};

use saved::{Saved, Scratch, fixture, names, saved, swapped, write_folder, write_safetensors};

/// Returns the logits after the first tokens.
fn logits(model: &Model) -> Vec<f32> {
    let kv = KvOptions::symmetric("f32".parse().unwrap());
    let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
    session.feed(&(0..40).collect::<Vec<_>>(), &mut |_| true).unwrap();
    session.logits().unwrap().to_vec()
}

fn options(weights: Option<DType>) -> OpenOptions<'static> {
    OpenOptions { n_threads: Some(1), weights, ..Default::default() }
}

/// Frequency divisors are computed; the reference does that in f32, which rounds each several
/// times.
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
fn folders_have_the_bits_and_logits_of_converted_files() {
    for name in names() {
        let (scratch, want) = (Scratch::new(&name), fixture(&name));
        let (config, tensors) = saved(&name);
        write_folder(&scratch.0, &config, &tensors);
        let got = open_file(&scratch.0).unwrap_or_else(|error| panic!("{name}: {error}"));
        // The fixture stores heads as older files do; the logits are those of both.
        let is_older = want.find_tensor("blk.0.attn_kv_b.weight").is_some();
        if !is_older {
            assert_same_tensors(&name, &got, &want);
        }
        let [got, want] = [got, want].map(|gguf| {
            Model::from_gguf(gguf, options(None)).unwrap_or_else(|error| panic!("{name}: {error}"))
        });
        // Computed tensors are close; others have the same bits, and NaN equals nothing.
        let is_computed = ["llama3", "delta", "space", "streams"].iter().any(|what| name.contains(what));
        for (got, want) in logits(&got).into_iter().zip(logits(&want)) {
            assert!((got - want).abs() <= if is_computed { 1e-4 } else { 0.0 }, "{name}: {got}, {want}");
        }
    }
}

/// As separate keys or layer by layer, and within a multimodal model.
#[test]
fn gemma_4_accepts_both_forms_of_global_heads() {
    let name = "gemma4-h64-h128-g4-window20-keys";
    let scratch = Scratch::new("own-heads");
    let (config, mut tensors) = saved(name);
    let config_with = |change: &dyn Fn(&mut Map<String, Value>)| {
        let mut config = config.clone();
        change(config.as_object_mut().unwrap());
        config
    };
    write_folder(&scratch.0, &config, &tensors);
    let want = logits(&Model::open_with(&scratch.0, options(None)).unwrap());
    let by_numbers = config_with(&|config| {
        config.remove("per_layer_config").unwrap();
        config.insert("global_head_dim".to_owned(), json!(128));
        config.insert("num_global_key_value_heads".to_owned(), json!(1));
    });
    write_folder(&scratch.0, &by_numbers, &tensors);
    assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want);
    // From ten layers on, indices have leading zeros.
    let padded = config_with(&|config| {
        let all = config["per_layer_config"].as_object().unwrap();
        let padded: Map<_, _> = all.iter().map(|(layer, of)| (format!("{layer:0>2}"), of.clone())).collect();
        config["per_layer_config"] = padded.into();
    });
    write_folder(&scratch.0, &padded, &tensors);
    assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want);
    for (layer, heads, complaint) in [
        ("1", json!({"head_dim": 64, "num_key_value_heads": 1}), "in layer 3"),
        ("0", json!({"head_dim": 128}), "in layer 0"),
    ] {
        let uneven = config_with(&|config| config["per_layer_config"][layer] = heads.clone());
        write_folder(&scratch.0, &uneven, &tensors);
        let error = open_file(&scratch.0).err().unwrap().to_string();
        assert!(error.contains("'per_layer_config'") && error.contains(complaint), "{error}");
    }
    for tensor in &mut tensors {
        tensor.name = tensor.name.replacen("model.", "model.language_model.", 1);
    }
    for encoder in ["model.audio_tower.conv", "model.embed_audio.proj", "model.embed_vision.proj"] {
        tensors.push(Saved { name: encoder.to_owned(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] });
    }
    let text_config = config_with(&|config| _ = config.remove("architectures").unwrap());
    let whole = json!({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text_config, "hidden_size": 7});
    write_folder(&scratch.0, &whole, &tensors);
    assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want);
}

/// Hunyuan extends its context through the RoPE base alone, which GGUF stores as the resulting
/// base.
#[test]
fn hunyuan_alpha_becomes_the_rope_base() {
    let scratch = Scratch::new("stretched");
    let (mut config, tensors) = saved("hunyuan-h64-g2");
    config["rope_parameters"] =
        json!({"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0});
    write_folder(&scratch.0, &config, &tensors);
    let base: f32 = open_file(&scratch.0).unwrap().meta().get("hunyuan-dense.rope.freq_base").unwrap();
    // 10,000 * 50^(64 / 62)
    assert!((base / 567_251.3 - 1.0).abs() < 1e-5, "{base}");
}

/// By names, of which there are two generations, or by letters; values outside GGUF are rejected.
#[test]
fn mamba_layers_may_be_names_or_letters() {
    for (name, key, older) in [
        ("graniteh-h64-g2-space", "layer_types", json!(["mamba", "attention", "mamba"])),
        ("nemotronh-h64-g2-space", "hybrid_override_pattern", json!("M-*-M")),
        ("nemotronhmoe-h64-g2-space-experts", "hybrid_override_pattern", json!("ME*E")),
    ] {
        let scratch = Scratch::new(&format!("older-{name}"));
        let (mut config, tensors) = saved(name);
        write_folder(&scratch.0, &config, &tensors);
        let want = logits(&Model::open_with(&scratch.0, options(None)).unwrap());
        let keys = config.as_object_mut().unwrap();
        keys.remove("layers_block_type");
        keys.insert(key.to_owned(), older);
        write_folder(&scratch.0, &config, &tensors);
        assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want, "{name}");
        for (key, value, complaint) in [
            ("time_step_limit", json!([0.001, 0.1]), "from 0 to infinity"),
            ("hybrid_override_pattern", json!("MX*EM"), "letters of M, *, - and E"),
        ] {
            let mut wrong = config.clone();
            wrong[key] = value;
            write_folder(&scratch.0, &wrong, &tensors);
            match open_file(&scratch.0) {
                Err(error) => assert!(error.to_string().contains(complaint), "{name}: {error}"),
                // Granite has no letters.
                Ok(_) => assert!(name.starts_with("granite") && key.starts_with("hybrid"), "{name}, {key}"),
            }
        }
    }
}

/// As Python writes it: JSON has no such number.
#[test]
fn a_configuration_may_contain_infinity() {
    let scratch = Scratch::new("infinity");
    let (config, tensors) = saved("mamba2-space");
    write_folder(&scratch.0, &config, &tensors);
    let path = scratch.0.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    let older = text.replace(r#"{"__float__":"Infinity"}"#, "Infinity");
    assert_ne!(older, text);
    fs::write(&path, &older).unwrap();
    open_file(&scratch.0).unwrap();
    fs::write(&path, older.replace("Infinity", "0.1")).unwrap();
    let error = open_file(&scratch.0).err().unwrap().to_string();
    assert!(error.contains("from 0 to infinity"), "{error}");
    fs::write(&path, older.replace("Infinity", "Infinite")).unwrap();
    let error = open_file(&scratch.0).err().unwrap().to_string();
    assert!(error.contains("config.json") && error.contains("expected value"), "{error}");
}

fn assert_same_tensors(name: &str, got: &Gguf, want: &Gguf) {
    assert_eq!(got.tensors().len(), want.tensors().len(), "{name}");
    for info in want.tensors() {
        let found = got.tensor(&info.name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let what = format!("{name}, {}", info.name);
        assert_eq!((&found.info.shape, found.info.dtype), (&info.shape, info.dtype), "{what}");
        match &*info.name {
            // Frequency divisors and exponentials.
            computed if computed == "rope_freqs.weight" || computed.ends_with(".ssm_a") => {
                assert_close(&what, &found.bytes, &want.data(info));
            }
            _ => assert!(found.bytes == want.data(info), "{what}: other bits"),
        }
    }
}

#[test]
fn sharded_folders_load_and_quantize_as_one_model() {
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
    quantize(model.gguf(), &file, DType::Q8_0, &mut |_| ()).unwrap();
    let written = Model::open_with(&file, options(None)).unwrap();
    let retyped = Model::open_with(&scratch.0, options(Some(DType::Q8_0))).unwrap();
    assert_eq!(logits(&written), logits(&retyped));
    assert_ne!(logits(&written), whole);
    // A copy in types other than the file's is the same model under another name.
    let copy = scratch.0.join("f16.gguf");
    assert_eq!(main_type(model.gguf()), DType::F16);
    quantize(model.gguf(), &copy, DType::F16, &mut |_| ()).unwrap();
    assert_eq!(Model::open_with(&copy, options(None)).unwrap().fingerprint(), model.fingerprint());
}

#[test]
fn the_text_model_of_a_multimodal_folder_equals_it_alone() {
    let name = "gemma3-h256-g4-window24";
    let alone = Scratch::new("alone");
    let (mut config, mut tensors) = saved(name);
    write_folder(&alone.0, &config, &tensors);
    let want = logits(&Model::open_with(&alone.0, options(None)).unwrap());
    // Default values may be absent.
    for key in ["head_dim", "rms_norm_eps", "architectures"] {
        config.as_object_mut().unwrap().remove(key).unwrap();
    }
    let config =
        json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "hidden_size": 7});
    for prefixes in
        [["language_model.model.", "vision_tower."], ["model.language_model.", "model.vision_tower."]]
    {
        let scratch = Scratch::new("seeing");
        for tensor in &mut tensors {
            let plain = tensor.name.replacen("language_model.", "", 1);
            tensor.name = plain.replacen("model.", prefixes[0], 1);
        }
        let encoder = Saved {
            name: prefixes[1].to_owned() + "patch",
            dtype: "F32",
            shape: json!([1]),
            bytes: vec![0; 4],
        };
        tensors.push(encoder);
        write_folder(&scratch.0, &config, &tensors);
        tensors.pop();
        assert_eq!(logits(&Model::open_with(&scratch.0, options(None)).unwrap()), want);
    }
}

/// Defaults of `transformers` for missing keys, which differ from GGUF's.
#[test]
fn missing_configuration_keys_have_the_class_defaults() {
    let (theta, window) = ("rope_theta", "sliding_window");
    for (name, key, default, other) in [
        ("mixtral-h64-g2", theta, json!(1e6), json!(3.0)),
        ("lfm2-h64-g2-conv3", theta, json!(1e6), json!(3.0)),
        ("lfm2moe-h64-g2-conv3-dense1", theta, json!(1e6), json!(3.0)),
        ("gptoss-h64-g4-window24-sinks", theta, json!(150_000.0), json!(3.0)),
        ("gptoss-h64-g4-window24-sinks", window, json!(128), json!(20)),
        ("smollm3-h64-g2-unturned", theta, json!(2e6), json!(3.0)),
        ("olmo3-h64-g2-window20-yarn", theta, json!(5e5), json!(3.0)),
        ("olmo3-h64-g2-window20-yarn", window, json!(4096), json!(20)),
        ("gemma3-h256-g4-window24", theta, json!(1e6), json!(3.0)),
        ("gemma3-h256-g4-window24", window, json!(4096), json!(20)),
        ("cohere2-h64-g2-window20", "logit_scale", json!(0.0625), json!(3.0)),
        ("granite-h64-g2-factors", "attention_multiplier", json!(1.0), json!(3.0)),
        ("qwen3moe-h64-g2-dense1", "norm_topk_prob", json!(false), json!(true)),
        ("deepseek3-latent192-yarn", "routed_scaling_factor", json!(2.5), json!(3.0)),
        ("glm4moelite-latent128", "norm_topk_prob", json!(true), json!(false)),
    ] {
        let (mut config, tensors) = saved(name);
        // In the older position, beside the other keys of RoPE.
        let rope = &mut config["rope_parameters"];
        let rope = if rope["full_attention"].is_object() { &mut rope["full_attention"] } else { rope };
        rope.as_object_mut().unwrap().remove(theta);
        let config = config.as_object_mut().unwrap();
        config.insert(key.to_owned(), default);
        let want = logits(&opened(&config.clone().into(), &tensors));
        config.insert(key.to_owned(), other);
        assert_ne!(logits(&opened(&config.clone().into(), &tensors)), want, "{name}: {key} is nothing to it");
        config.remove(key);
        assert_eq!(logits(&opened(&config.clone().into(), &tensors)), want, "{name}: {key}");
    }
}

#[test]
fn scaling_outside_the_context_changes_nothing() {
    let (mut config, tensors) = saved("qwen2-h64-g6");
    let want = opened(&config, &tensors);
    config["rope_parameters"]["rope_type"] = json!("dynamic");
    config["rope_parameters"]["factor"] = json!(2.0);
    config["sliding_window"] = json!(20);
    config.as_object_mut().unwrap().remove("use_sliding_window");
    let got = opened(&config, &tensors);
    assert_eq!(got.config().n_ctx_train, want.config().n_ctx_train);
    assert_eq!(logits(&got), logits(&want));
    config["use_sliding_window"] = json!(true);
    assert_eq!(opened(&config, &tensors).config().n_ctx_train, 20);
}

/// Other GGUF readers reject files without them.
#[test]
fn metadata_required_by_other_readers_is_written() {
    let written = |name: &str, key: &str| -> Option<Vec<u32>> {
        let scratch = Scratch::new("written");
        let (config, tensors) = saved(name);
        write_folder(&scratch.0, &config, &tensors);
        let gguf = open_file(&scratch.0).unwrap();
        let one = gguf.meta().find::<u32>(key).ok().flatten().map(|n| vec![n]);
        one.or_else(|| gguf.meta().find(key).unwrap())
    };
    for (name, key, want) in [
        ("gemma4-h64-h128-g4-window20-keys", "gemma4.embedding_length_per_layer_input", Some(vec![0])),
        ("gemma4-h64-h128-g4-window20-keys", "gemma4.attention.shared_kv_layers", Some(vec![0])),
        ("qwen35-h64-g2-delta", "qwen35.rope.dimension_sections", Some(vec![11, 11, 10, 0])),
        ("qwen35moe-h64-g2-delta-experts", "qwen35moe.rope.dimension_sections", Some(vec![11, 11, 10, 0])),
        ("qwen3next-h64-g2-delta-experts", "qwen3next.rope.dimension_sections", None),
    ] {
        assert_eq!(written(name, key), want, "{name}: {key}");
    }
}

/// Opens a folder with this configuration and these tensors.
fn opened(config: &Value, tensors: &[Saved]) -> Model {
    let scratch = Scratch::new("opened");
    write_folder(&scratch.0, config, tensors);
    Model::open_with(&scratch.0, options(None)).unwrap()
}

#[test]
fn fused_experts_of_multimodal_folders_equal_separate_ones() {
    let (config, tensors) = saved("qwen35moe-h64-g2-delta-experts");
    let want = logits(&opened(&config, &tensors));
    // The hub's form: all experts in one tensor, gates before ups; the text model inside.
    let (_, tensors) = saved("qwen35moe-h64-g2-delta-experts");
    let (experts, mut fused): (Vec<Saved>, Vec<Saved>) =
        tensors.into_iter().partition(|tensor| tensor.name.contains(".experts."));
    fused
        .iter_mut()
        .for_each(|tensor| tensor.name = tensor.name.replacen("model.", "model.language_model.", 1));
    for layer in 0..3 {
        let all = |modules: &[&str]| -> Vec<u8> {
            let names = (0..7).flat_map(|expert| modules.iter().map(move |module| (expert, module)));
            let of = |(expert, module): (usize, &&str)| {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{module}.weight");
                experts.iter().find(|tensor| tensor.name == name).unwrap().bytes.clone()
            };
            names.flat_map(of).collect()
        };
        for (name, shape, modules) in [
            ("gate_up_proj", json!([7, 48, 64]), &["gate_proj", "up_proj"][..]),
            ("down_proj", json!([7, 64, 24]), &["down_proj"]),
        ] {
            let name = format!("model.language_model.layers.{layer}.mlp.experts.{name}");
            fused.push(Saved { name, dtype: "F16", shape, bytes: all(modules) });
        }
    }
    for name in ["model.visual.patch", "mtp.fc.weight"] {
        fused.push(Saved { name: name.to_owned(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] });
    }
    let config = json!({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config});
    assert_eq!(logits(&opened(&config, &fused)), want);
}

/// MXFP4 experts: for 32 values a power-of-two scale, and two codes in each of 16 bytes.
#[test]
fn mxfp4_experts_have_the_values_of_their_blocks() {
    const KNOWN: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (config, tensors) = saved("gptoss-h64-g4-window24-sinks");
    let (mut packed, mut plain) = (Vec::new(), Vec::new());
    for (i, tensor) in tensors.into_iter().enumerate() {
        if !tensor.name.ends_with("gate_up_proj") {
            plain.push(Saved {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes.clone(),
                ..tensor
            });
            packed.push(tensor);
            continue;
        }
        // Five experts of 80 rows of two blocks.
        let codes: Vec<u8> = (0..5 * 80 * 2 * 16).map(|byte| (byte * 37 + byte / 16 + i) as u8).collect();
        let scales: Vec<u8> = (0..5 * 80 * 2).map(|block| (121 + (block + i) % 4) as u8).collect();
        let value = |at: usize| {
            let code = codes[at / 2] >> (4 * (at % 2)) & 15;
            let scale = f32::from_bits(u32::from(scales[at / 32]) << 23);
            scale * KNOWN[usize::from(code & 7)] * if code > 7 { -1.0 } else { 1.0 }
        };
        let values: Vec<u8> = (0..2 * codes.len()).flat_map(|at| value(at).to_le_bytes()).collect();
        let bytes = swapped(&values, 80, 64, 4);
        plain.push(Saved { name: tensor.name.clone(), dtype: "F32", shape: tensor.shape, bytes });
        for (end, shape, bytes) in
            [("blocks", json!([5, 80, 2, 16]), codes.clone()), ("scales", json!([5, 80, 2]), scales.clone())]
        {
            packed.push(Saved { name: format!("{}_{end}", tensor.name), dtype: "U8", shape, bytes });
        }
    }
    let mut mxfp4_config = config.clone();
    mxfp4_config["quantization_config"] = json!({"quant_method": "mxfp4"});
    let (got, want) = (opened(&mxfp4_config, &packed), opened(&config, &plain));
    let name = "blk.1.ffn_up_exps.weight";
    let [found, expected] = [&got, &want].map(|model| model.gguf().tensor(name).unwrap());
    assert_eq!((found.info.dtype, &found.info.shape), (DType::MXFP4, &expected.info.shape));
    let mut values = vec![0.0; 5 * 40 * 64];
    kvant_codec::decode(DType::MXFP4, &found.bytes, &mut values).unwrap();
    let known = expected.bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap()));
    assert_eq!(values, known.collect::<Vec<_>>());
    // The GEMMs quantize their activations differently.
    for (got, want) in logits(&got).into_iter().zip(logits(&want)) {
        assert!((got - want).abs() <= 0.2, "{got}, {want}");
    }
    packed.retain(|tensor| tensor.name != "model.layers.2.mlp.experts.gate_up_proj_scales");
    let scratch = Scratch::new("unscaled");
    write_folder(&scratch.0, &mxfp4_config, &packed);
    let error = open_file(&scratch.0).expect_err("it is refused").to_string();
    assert!(error.contains("'blk.2.ffn_gate_exps.weight' is missing: its scales are absent"), "{error}");
}

/// Opens a folder with a changed configuration or tensors; returns the error.
fn changed(name: &str, change: impl FnOnce(&mut Value, &mut Vec<Saved>)) -> String {
    let scratch = Scratch::new("changed");
    let (mut config, mut tensors) = saved(name);
    change(&mut config, &mut tensors);
    write_folder(&scratch.0, &config, &tensors);
    let error = open_file(&scratch.0).expect_err("it is refused").to_string();
    assert!(!error.contains('\n') && error.len() < 1000, "{error}");
    error
}

#[test]
fn faulty_configurations_are_reported_by_key() {
    let cases: [(&str, &str, Value, &str); 30] = [
        (
            "llama-h64-g8",
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "most similar: LlamaForCausalLM",
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
            "tensor 'qweight' is missing: config.json says that weights are quantized",
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
            json!({"rope_type": "xpos"}),
            "expected default, linear, yarn, longrope or llama3, got xpos",
        ),
        (
            "phi3-h64-g2-longrope",
            "rope_parameters",
            json!({"rope_type": "longrope", "original_max_position_embeddings": 32, "long_factor": [2.0, -1.0]}),
            "'long_factor': expected 32 positive numbers, got 1 of 2",
        ),
        (
            "llama-h64-g8",
            "rope_parameters",
            json!({"rope_type": "longrope"}),
            "'original_max_position_embeddings': expected a number, got nothing",
        ),
        ("mixtral-h64-g2", "num_local_experts", json!(6), "expert 5 of 6"),
        (
            "smollm3-h64-g2-unturned",
            "no_rope_layers",
            json!([1, 0, 1, 0]),
            "'no_rope_layers': expected a 0 every 4 of 4 layers",
        ),
        (
            "gptoss-h64-g4-window24-sinks",
            "swiglu_limit",
            json!(5),
            "'swiglu_limit': expected 7, as GGUF readers assume, got 5",
        ),
        (
            "gptoss-h64-g4-window24-sinks",
            "quantization_config",
            json!({"quant_method": "fp8"}),
            "tensor 'weight_scale' is missing",
        ),
        (
            "gptoss-h64-g4-window24-sinks",
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 8.0, "truncate": true}),
            "'truncate': expected false, as GGUF readers assume, got true",
        ),
        (
            "qwen35-h64-g2-delta",
            "linear_num_value_heads",
            json!(5),
            "'linear_num_value_heads': expected a multiple of the 2 key heads, got 5",
        ),
        (
            "qwen35-h64-g2-delta",
            "linear_value_head_dim",
            json!(32),
            "has the shape [192, 64], expected 128 rows",
        ),
        (
            "deepseek3-latent192-yarn",
            "kv_lora_rank",
            json!(64),
            "has the shape [192, 192], expected 3 heads of 64 rows of 64",
        ),
        (
            "deepseek3-latent192-yarn",
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
            "'mscale': expected 0.7, as GGUF readers assume, got 1",
        ),
        ("lfm2-h64-g2-conv3", "layer_types", json!(["conv"]), "'layer_types': expected 4 layers, got 1"),
        (
            "graniteswa-h64-g2-window20-sinks",
            "layer_rope_theta",
            json!([0, 10_000, 500, 10_000]),
            "'layer_rope_theta': expected 10000 or 0 for 4 layers, got 0, 10000, 500, 10000",
        ),
        (
            "afmoe-h64-g2-window20-dense1",
            "mup_enabled",
            json!(false),
            "'mup_enabled': expected true, as GGUF",
        ),
        ("stablelm-h64-g2", "use_parallel_residual", json!(true), "'use_parallel_residual': expected false"),
        (
            "phi2-h64-g1",
            "qk_layernorm",
            json!(true),
            "'qk_layernorm': expected false, as GGUF readers assume",
        ),
    ];
    for (name, key, value, want) in cases {
        let error = changed(name, |config, _| config[key] = value);
        assert!(error.contains(want), "{key}: {error}");
    }
}

#[test]
fn faulty_tensors_are_reported_by_name() {
    let error_of = |name: &str, change: &dyn Fn(&mut Vec<Saved>)| changed(name, |_, tensors| change(tensors));
    let without = |end: &'static str| {
        move |tensors: &mut Vec<Saved>| {
            let n = tensors.len();
            tensors.retain(|tensor| !tensor.name.ends_with(end));
            assert!(tensors.len() < n, "{end}");
        }
    };
    let renamed = |tensors: &mut Vec<Saved>| tensors[1].name += "_scale";
    let cut = |tensors: &mut Vec<Saved>| _ = tensors[0].bytes.pop();
    let e5m2 = |tensors: &mut Vec<Saved>| tensors[0].dtype = "F8_E5M2";
    for (got, want) in [
        (
            error_of("llama-h64-g8", &without("layers.1.self_attn.v_proj.weight")),
            "'blk.1.attn_v.weight' is missing: layer 0 has it",
        ),
        (error_of("llama-h64-g8", &without("model.norm.weight")), "'output_norm.weight' is missing"),
        (
            error_of("llama-h64-g8", &without("lm_head.weight")),
            "'lm_head.weight' is missing: config.json unties",
        ),
        (
            error_of("mixtral-h64-g2", &without("layers.1.block_sparse_moe.experts.2.w1.weight")),
            "expert 2 of 5",
        ),
        (error_of("llama-h64-g8", &renamed), "is unknown in the family LlamaForCausalLM"),
        (error_of("llama-h64-g8", &cut), "takes 4096 bytes, but has 4095"),
        (error_of("llama-h64-g8", &e5m2), "holds F8_E5M2; weights are read in F32, F16 and BF16"),
    ] {
        assert!(got.contains(want), "{got}");
    }
}
