//! Folders of DeepSeek-V4, with the names of `transformers` and those of published checkpoints.

use kvant::gguf::LoadOnlyType;
use kvant::{DType, Gguf, Model, open_file};
use kvant_quantize::quantize;
use serde_json::{Value, json};

use super::saved::{Saved, Scratch, fixture, saved, write_folder};
use super::{assert_same_tensors, changed, logits, opened, options};

const NAME: &str = "deepseek4-h64";

/// Returns the model as it would be published: the tensors' names, and a configuration that numbers
/// what `transformers` names.
fn published() -> (Value, Vec<Saved>) {
    let (mut config, mut tensors) = saved(NAME);
    for tensor in &mut tensors {
        let short = tensor.name.strip_prefix("model.").unwrap_or(&tensor.name);
        tensor.name = match short {
            "embed_tokens.weight" => "embed.weight".to_owned(),
            head if head.starts_with("hc_head.") => head.replacen("hc_head.hc_", "hc_head_", 1),
            other => other.replacen(".attn.norm.", ".attn.kv_norm.", 1),
        };
    }
    let keys = config.as_object_mut().unwrap();
    for key in
        ["layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"]
    {
        keys.remove(key).unwrap();
    }
    // MTP layers have a number too.
    keys.insert("compress_ratios".to_owned(), json!([0, 4, 8, 4, 8, 0]));
    keys.insert("num_hash_layers".to_owned(), json!(2));
    let scaling = json!({
        "type": "yarn", "factor": 4, "beta_fast": 2, "beta_slow": 0.25, "original_max_position_embeddings": 64
    });
    keys.insert("rope_scaling".to_owned(), scaling);
    (config, tensors)
}

fn written(config: &Value, tensors: &[Saved]) -> (Scratch, Gguf) {
    let scratch = Scratch::new("shared-kv");
    write_folder(&scratch.0, config, tensors);
    let gguf = open_file(&scratch.0).unwrap();
    (scratch, gguf)
}

#[test]
fn published_folders_of_deepseek_4_are_those_of_transformers() {
    let want = fixture(NAME);
    let logits_of = |gguf: Gguf| logits(&Model::from_gguf(gguf, options(None)).unwrap());
    let (config, mut tensors) = published();
    // MTP layers, and what images need in the checkpoint that sees them.
    let others = [
        "mtp.0.enorm.weight",
        "mtp.0.ffn.gate.weight",
        "vision.patch_embed.proj.weight",
        "aligner.w1.weight",
        "image_newline",
        "layers.0.ffn.gate.bias",
        "layers.0.ffn.gate.bias_vl",
        "layers.4.ffn.gate.bias_vl",
    ];
    let other =
        |name: &str| Saved { name: name.to_owned(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] };
    tensors.extend(others.map(other));
    for (config, tensors) in [saved(NAME), (config, tensors)] {
        let (_scratch, got) = written(&config, &tensors);
        assert_same_tensors(NAME, &got, &want);
        let keys = want
            .meta()
            .iter()
            .filter(|(key, _)| key.starts_with("deepseek4.") && !key.ends_with("vocab_size"));
        for (key, value) in keys {
            assert_eq!(got.meta().value(key).as_ref(), Some(&value), "{key}");
        }
        assert_eq!(logits_of(got), logits_of(fixture(NAME)));
    }
}

/// The experts of a token are integers in the file, as other readers expect them.
#[test]
fn a_converted_table_of_experts_has_integers() {
    let (config, tensors) = published();
    let (scratch, gguf) = written(&config, &tensors);
    let path = scratch.0.join("converted.gguf");
    quantize(&gguf, &path, DType::Q8_0, &mut |_| ()).unwrap();
    let (got, want) = (Gguf::open(&path).unwrap(), fixture(NAME));
    for name in ["blk.0.ffn_gate_tid2eid.weight", "blk.1.ffn_gate_tid2eid.weight"] {
        let [found, expected] = [&got, &want].map(|gguf| gguf.find_info(name).unwrap());
        assert_eq!((found.packed, &found.shape), (Some(LoadOnlyType::I32), &expected.shape), "{name}");
        assert_eq!(got.stored_data(found), want.stored_data(expected), "{name}");
    }
    // In 32 bits as well as in 64.
    let narrow = |tensor: Saved| match tensor.dtype {
        "I64" => {
            let number = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().unwrap()) as i32;
            let bytes = tensor.bytes.chunks_exact(8).flat_map(|bytes| number(bytes).to_le_bytes()).collect();
            Saved { dtype: "I32", bytes, ..tensor }
        }
        _ => tensor,
    };
    let narrow: Vec<Saved> = tensors.into_iter().map(narrow).collect();
    assert_same_tensors(NAME, &written(&config, &narrow).1, &want);
}

/// Returns codes that are no NaN.
fn codes(n: usize, seed: usize) -> Vec<u8> {
    (0..n).map(|i| ((i * 37 + i / 16 + seed) % 120 + i % 2 * 128) as u8).collect()
}

/// Returns a tensor of powers of two around 2^-6.
fn powers(name: &str, shape: [usize; 2], seed: usize) -> Saved {
    let bytes = (0..shape[0] * shape[1]).map(|i| (119 + (i + seed) % 4) as u8).collect();
    Saved { name: name.to_owned(), dtype: "F8_E8M0", shape: json!(shape), bytes }
}

fn power(byte: u8) -> f32 {
    f32::from_bits(u32::from(byte) << 23)
}

/// Returns the values of a matrix in 8-bit floats, its codes, and a power of two for each block of
/// 128 x 128.
fn eight_bits(tensor: &Saved, seed: usize) -> [Saved; 3] {
    let [n_out, n_in] = [0, 1].map(|i| tensor.shape[i].as_u64().unwrap() as usize);
    let module = tensor.name.strip_suffix(".weight").unwrap();
    let shape = [n_out.div_ceil(128), n_in.div_ceil(128)];
    let scales = powers(&format!("{module}.scale"), shape, seed);
    let bytes = codes(n_out * n_in, seed);
    let value = |(i, code): (usize, &u8)| {
        let block = i / n_in / 128 * shape[1] + i % n_in / 128;
        kvant_codec::fp8::to_f32(*code) * power(scales.bytes[block])
    };
    let values = bytes.iter().enumerate().flat_map(|of| value(of).to_le_bytes()).collect();
    let of = |dtype, bytes| Saved { name: tensor.name.clone(), dtype, shape: tensor.shape.clone(), bytes };
    [of("F32", values), of("F8_E4M3", bytes), scales]
}

/// Returns the values of a matrix in 4-bit floats, its codes, and a power of two for 32 inputs.
fn four_bits(tensor: &Saved, seed: usize) -> [Saved; 3] {
    const KNOWN: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let [n_out, n_in] = [0, 1].map(|i| tensor.shape[i].as_u64().unwrap() as usize);
    let module = tensor.name.strip_suffix(".weight").unwrap();
    let scales = powers(&format!("{module}.scale"), [n_out, n_in / 32], seed);
    let bytes: Vec<u8> = (0..n_out * n_in / 2).map(|i| (i * 37 + i / 16 + seed) as u8).collect();
    let value = |i: usize| {
        let code = bytes[i / 2] >> (4 * (i % 2)) & 15;
        power(scales.bytes[i / 32]) * KNOWN[usize::from(code & 7)] * if code > 7 { -1.0 } else { 1.0 }
    };
    let values = (0..n_out * n_in).flat_map(|i| value(i).to_le_bytes()).collect();
    let of = |dtype, shape, bytes| Saved { name: tensor.name.clone(), dtype, shape, bytes };
    [of("F32", tensor.shape.clone(), values), of("I8", json!([n_out, n_in / 2]), bytes), scales]
}

/// Whether a checkpoint has a matrix in 8-bit floats: those of attention that are no router of the
/// index or part of pooling, and shared experts.
fn is_eight_bits(name: &str) -> bool {
    let ends = ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"];
    ends.iter().any(|end| name.ends_with(&format!(".{end}.weight"))) && !name.contains("compressor")
}

#[test]
fn quantized_deepseek_4_has_the_values_of_its_codes() {
    let (mut config, tensors) = published();
    let (mut plain, mut quantized) = (Vec::new(), Vec::new());
    for (seed, tensor) in tensors.into_iter().enumerate() {
        let is_expert = tensor.name.contains(".experts.");
        if !is_eight_bits(&tensor.name) {
            quantized.push(Saved {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes.clone(),
                ..tensor
            });
            plain.push(tensor);
            continue;
        }
        let [values, codes, scales] =
            if is_expert { four_bits(&tensor, seed) } else { eight_bits(&tensor, seed) };
        plain.push(values);
        quantized.extend([codes, scales]);
    }
    let want = opened(&config, &plain);
    config["expert_dtype"] = json!("fp4");
    config["torch_dtype"] = json!("float32");
    config["quantization_config"] = json!({
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128]
    });
    let got = opened(&config, &quantized);
    for (name, dtype) in [
        ("blk.1.ffn_down_exps.weight", DType::MXFP4),
        ("blk.1.attn_q_a.weight", DType::FP8G128),
        // Rows of 64 values are no group.
        ("blk.1.attn_q_b.weight", DType::F32),
        ("blk.1.indexer.attn_q_b.weight", DType::F32),
        ("blk.1.attn_compressor_kv.weight", DType::F16),
    ] {
        assert_eq!(got.gguf().find_info(name).unwrap().dtype, dtype, "{name}");
    }
    let values = |model: &Model, name: &str| {
        let view = model.gguf().tensor(name).unwrap();
        let mut values = vec![0.0; view.info.elements()];
        kvant_codec::decode(view.info.dtype, &view.bytes, &mut values).unwrap();
        values
    };
    for info in want.gguf().tensors() {
        assert_eq!(values(&got, &info.name), values(&want, &info.name), "{}", info.name);
    }
    assert!(logits(&got).iter().all(|logit| logit.is_finite()));
    let part = "layers.2.ffn.experts.3.w2.scale";
    quantized.retain(|tensor| tensor.name != part);
    let scratch = Scratch::new("unscaled");
    write_folder(&scratch.0, &config, &quantized);
    let error = open_file(&scratch.0).err().unwrap().to_string();
    assert!(error.contains("'layers.2.ffn.experts.3.w2.weight': holds I8"), "{error}");
}

#[test]
fn faults_of_deepseek_4_are_reported_by_key_or_name() {
    const ALL: &str = "";
    const TOKENS: &str = "/rope_parameters/main";
    const POOLS: &str = "/rope_parameters/compress";
    let one_kind = json!(["sliding_attention"]);
    let kinds = json!([
        "linear_attention",
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "sliding_attention"
    ]);
    let unordered = json!(["moe", "hash_moe", "moe", "moe", "moe"]);
    for (object, key, value, want) in [
        (ALL, "scoring_func", json!("sigmoid"), "'scoring_func': expected sqrtsoftplus, got sigmoid"),
        (ALL, "norm_topk_prob", json!(false), "'norm_topk_prob': expected true, as GGUF"),
        (ALL, "attention_bias", json!(true), "'attention_bias': expected false, as GGUF"),
        (ALL, "swiglu_limit", json!(0), "'swiglu_limit': expected a number above 0, got 0"),
        (ALL, "layer_types", kinds, "'layer_types': expected sliding, compressed_sparse"),
        (ALL, "layer_types", one_kind, "'layer_types': expected 5 layers, got 1"),
        (
            ALL,
            "compress_rates",
            json!({"heavily_compressed_attention": 4}),
            "'compress_rates': expected 4 tokens",
        ),
        (
            ALL,
            "compress_rate_csa",
            json!(8),
            "'compress_rates': expected 4 tokens in layers with an index alone",
        ),
        (ALL, "mlp_layer_types", unordered, "'mlp_layer_types': expected hash_moe before moe"),
        (ALL, "qk_rope_head_dim", json!(32), "'partial_rotary_factor': expected 32 of 64 values"),
        (ALL, "rope_parameters", json!({"main": {}}), "'rope_parameters': expected main and compress"),
        (ALL, "hc_mult", json!(0), "'hc_mult'"),
        (TOKENS, "rope_type", json!("yarn"), "expected no scaling of 'main'"),
        (POOLS, "rope_type", json!("llama3"), "'rope_type': expected default, linear or yarn"),
        (POOLS, "attention_factor", json!(1.2), "'attention_factor': expected 1, as GGUF"),
        (POOLS, "partial_rotary_factor", json!(0.5), "'partial_rotary_factor': expected 16 of 64"),
    ] {
        let error = changed(NAME, |config, _| config.pointer_mut(object).unwrap()[key] = value);
        assert!(error.contains(want), "{error}");
    }
    for (name, want) in [
        (
            "model.layers.4.attn.compressor.ape",
            "'blk.4.attn_compressor_ape.weight' is missing: layer 2 has it",
        ),
        ("model.layers.4.ffn.experts.7.w1.weight", "expert 7 of 8"),
        ("model.layers.2.hc_ffn_base", "'blk.2.hc_ffn_base.weight' is missing"),
        ("head.weight", "'lm_head.weight' is missing"),
    ] {
        let error = changed(NAME, |_, tensors| tensors.retain(|tensor| tensor.name != name));
        assert!(error.contains(want), "{error}");
    }
    let of_table = |change: fn(&mut Saved)| {
        changed(NAME, |_, tensors| {
            change(tensors.iter_mut().find(|tensor| tensor.name.ends_with("tid2eid")).unwrap());
        })
    };
    let error = of_table(|table| {
        *table = Saved { name: table.name.clone(), dtype: "F32", shape: json!([1]), bytes: vec![0; 4] }
    });
    assert!(error.contains("holds f32; it is read in I32 or I64"), "{error}");
    let error = of_table(|table| table.name += "s");
    assert!(error.contains("tid2eids' is unknown in the family DeepseekV4ForCausalLM"), "{error}");
    let (config, tensors) = published();
    for key in ["compress_ratios", "num_hash_layers", "hc_eps", "compress_rope_theta", "swiglu_limit"] {
        let scratch = Scratch::new("without");
        let mut config = config.clone();
        config.as_object_mut().unwrap().remove(key).unwrap();
        write_folder(&scratch.0, &config, &tensors);
        let error = open_file(&scratch.0).err().unwrap().to_string();
        assert!(error.contains(&format!("'{key}'")), "{error}");
    }
}

/// Experts that do not exist are found when the model is loaded.
#[test]
fn a_table_of_other_experts_is_refused() {
    let (config, mut tensors) = saved(NAME);
    let table = tensors.iter_mut().find(|tensor| tensor.name.ends_with("tid2eid")).unwrap();
    table.bytes[..8].copy_from_slice(&(1_i64 << 40).to_le_bytes());
    let (scratch, _) = written(&config, &tensors);
    let error = Model::open_with(&scratch.0, options(None)).err().unwrap().to_string();
    assert!(
        error.contains("blk.0.ffn_gate_tid2eid.weight") && error.contains("numbers of 8 experts"),
        "{error}"
    );
}
