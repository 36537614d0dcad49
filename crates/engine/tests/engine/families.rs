//! Faulty files of families with layouts of their own: one-line errors that name the key or the
//! tensor.

use std::path::Path;
use std::sync::Arc;

use kvant::gguf::{GgufError, GgufWriter, TensorInfo, TensorSink, Value};
use kvant::{Gguf, KvOptions, Measure, Model, OpenOptions, Session, SessionOptions};
use kvant_codec::Side;
use kvant_cpu::CpuDevice;
use kvant_model::{Config, LayerRange, LayerState, Weights};

const COHERE: &str = "cohere2-h64-g2-window20";
const GPT_OSS: &str = "gptoss-h64-g4-window24-sinks";
const GRANITE_SWA: &str = "graniteswa-h64-g2-window20-sinks";
const MISTRAL: &str = "mistral3-h64-g2-yarn-growing";
const APERTUS: &str = "apertus-h64-g2-llama3";
const MISTRAL4: &str = "mistral4-latent128-yarn-growing";
const GEMMA3N: &str = "gemma3n-h64-g2-window20-streams";
const MIMO: &str = "mimo2-h96-v64-g4-window20-sinks";
const COHERE_MOE: &str = "cohere2moe-h64-g2-window20-dense1";
const LAGUNA: &str = "laguna-h64-g2-g3-window20-yarn";
const STEP35: &str = "step35-h64-g2-g3-window20-llama3";
const PHI_MOE: &str = "phimoe-h64-g2-longrope-short";
const LFM2MOE: &str = "lfm2moe-h64-g2-conv3-dense1";
/// MLA models with the head sizes of the model, and with those of absorbed projections.
const LATENT: [&str; 2] = ["deepseek2-latent512-lite", "deepseek3-latent192-yarn"];
/// A model whose values derive from its keys, and one with shared keys and values and per-layer
/// embeddings.
const GEMMA4: [&str; 2] = ["gemma4-h64-h128-g4-window20-keys", "gemma4-h64-h96-g2-window24-shared-given"];

fn fixture(name: &str) -> Gguf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(dir.join(format!("{name}.gguf"))).unwrap()
}

/// Returns a fixture with changed keys, removed where there is no value, and one tensor renamed.
fn changed(name: &str, keys: &[(&str, Option<Value<'_>>)], tensor: Option<[&str; 2]>) -> Gguf {
    let gguf = fixture(name);
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.meta().iter() {
        if keys.iter().all(|(changed, _)| *changed != key) {
            writer.set(key, value).unwrap();
        }
    }
    for (key, value) in keys {
        if let Some(value) = value {
            writer.set(key, *value).unwrap();
        }
    }
    let called = |name: &str| match tensor {
        Some([from, to]) if from == name => to.to_owned(),
        _ => name.to_owned(),
    };
    for info in gguf.tensors() {
        writer.add_tensor(&called(&info.name), &info.shape, info.dtype).unwrap();
    }
    let mut bytes = Vec::new();
    let fill = |data: &mut TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| data.bytes(&called(&info.name), &gguf.data(info)))
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

/// Returns a fixture with changed keys, and its tensors as `change` returns them.
fn rewritten(
    gguf: &Gguf,
    set: impl FnOnce(&mut GgufWriter),
    change: impl Fn(&TensorInfo, &[u8]) -> Vec<u8>,
) -> Gguf {
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    set(&mut writer);
    for info in gguf.tensors() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap();
    }
    let mut bytes = Vec::new();
    let fill = |data: &mut TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| data.bytes(&info.name, &change(info, &gguf.data(info))))
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

fn open(gguf: Gguf) -> Result<Model, String> {
    let options = OpenOptions { n_threads: Some(1), ..Default::default() };
    Model::from_gguf(gguf, options).map_err(|error| error.to_string())
}

/// Returns the logits after the first tokens.
fn logits(model: &Model, n: u32) -> Vec<f32> {
    let kv = KvOptions::symmetric("f32".parse().unwrap());
    let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
    session.feed(&(0..n).collect::<Vec<_>>(), &mut |_| true).unwrap();
    session.logits().unwrap().to_vec()
}

#[test]
fn faulty_numbers_of_layers_of_their_own_are_refused() {
    let f32 = |value: f32| Some(Value::F32(value));
    let u32 = |value: u32| Some(Value::U32(value));
    let keys: [(&str, &str, Option<Value<'_>>, &str); 20] = [
        (APERTUS, "xielu.alpha_p", None, "\"xielu.alpha_p\""),
        (APERTUS, "xielu.alpha_n", f32(f32::NAN), "xielu.alpha_n: expected finite numbers, got NaN"),
        (APERTUS, "xielu.eps", f32(f32::INFINITY), "xielu.eps: expected finite numbers, got inf"),
        (MISTRAL4, "mistral4.attention.temperature_scale", f32(f32::NAN), "expected a finite number"),
        (MISTRAL4, "mistral4.attention.temperature_length", u32(0), "expected a positive number, got 0"),
        (MISTRAL4, "mistral4.attention.value_scale", f32(0.5), "a factor on values (mistral4."),
        (GEMMA3N, "gemma3n.altup.active_idx", u32(1), "alternating updates of another stream"),
        (GEMMA3N, "gemma3n.altup.num_inputs", u32(1), "altup.num_inputs: expected 2 to 16 streams, got 1"),
        (GEMMA3N, "gemma3n.altup.num_inputs", u32(3), "altup_proj.weight"),
        (GEMMA3N, "gemma3n.altup.num_inputs", None, "tensor 'blk.0.altup_"),
        (GEMMA3N, "gemma3n.embedding_length_per_layer_input", None, "embedding_length_per_layer_input"),
        (GEMMA3N, "gemma3n.activation_sparsity_scale", f32(1.0), "activation_sparsity_scale"),
        (MIMO, "mimo2.attention.value_scale", f32(f32::NAN), "value_scale: expected a finite number"),
        (MIMO, "mimo2.leading_dense_block_count", u32(0), "blk.0.ffn_gate_inp.weight"),
        (LAGUNA, "laguna.attention.key_length", None, "without laguna.attention.key_length, got 4 and 6"),
        (LAGUNA, "laguna.rope.dimension_count_swa", u32(66), "expected an even number up to 64, got 66"),
        (STEP35, "step35.swiglu_clamp_exp", f32(f32::NAN), "swiglu_clamp_exp: expected a finite number"),
        (GPT_OSS, "gpt-oss.swiglu_clamp_shexp", f32(1.0), "limits of other activations than SiLU"),
        (PHI_MOE, "phimoe.attention.layer_norm_rms_epsilon", None, "attention.layer_norm_epsilon"),
        (COHERE_MOE, "cohere2moe.attention.layer_norm_epsilon", None, "attention.layer_norm_epsilon"),
    ];
    for (name, key, value, want) in keys {
        let error = open(changed(name, &[(key, value)], None)).err();
        let error = error.unwrap_or_else(|| panic!("{key}: taken"));
        assert!(error.contains(want) && !error.contains('\n'), "{key}: {error}");
    }
}

#[test]
fn faulty_family_metadata_is_refused_with_one_line() {
    let f32 = |value: f32| Some(Value::F32(value));
    let u32 = |value: u32| Some(Value::U32(value));
    let scale = "mistral3.attention.temperature_scale";
    let keys: [(&str, &str, Option<Value<'_>>, &str); 22] = [
        (COHERE, "cohere2.logit_scale", None, "\"cohere2.logit_scale\""),
        (COHERE, "cohere2.logit_scale", f32(f32::NAN), "cohere2.logit_scale: expected a finite number"),
        (COHERE, "cohere2.logit_scale", f32(-1.0), "cohere2.logit_scale: expected a finite number"),
        (COHERE, "cohere2.attention.layer_norm_epsilon", None, "\"cohere2.attention.layer_norm_epsilon\""),
        (COHERE, "cohere2.attention.layer_norm_epsilon", f32(f32::INFINITY), "expected a finite number"),
        (COHERE, "cohere2.attention.sliding_window_pattern", u32(0), "sliding_window_pattern: expected"),
        (COHERE, "cohere2.attention.key_length", u32(63), "key_length: expected an even head size"),
        (COHERE, "cohere2.attention.head_count_kv", u32(3), "expected a multiple of the 3 KV heads"),
        (COHERE, "cohere2.embedding_length", u32(127), "head size"),
        (COHERE, "cohere2.attention.temperature_scale", f32(0.1), "not supported yet: cohere2.attention."),
        (MISTRAL, scale, f32(f32::NAN), "temperature_scale: expected a finite number"),
        (MISTRAL, scale, f32(-0.1), "temperature_scale: expected a finite number"),
        (MISTRAL, "mistral3.attention.temperature_length", u32(0), "expected a positive number, got 0"),
        (MISTRAL, "mistral3.rope.dimension_count", u32(32), "with partial RoPE"),
        (MISTRAL, "mistral3.expert_count", u32(8), "mistral3.expert_count"),
        (GPT_OSS, "gpt-oss.expert_count", u32(0), "gpt-oss.expert_count: expected the number of experts"),
        (GPT_OSS, "gpt-oss.expert_count", u32(6), "blk.0.ffn_gate_inp.weight"),
        (GPT_OSS, "gpt-oss.expert_used_count", u32(6), "expected 1 to 5, as there are 5 experts, got 6"),
        (GPT_OSS, "gpt-oss.expert_feed_forward_length", u32(41), "ffn_gate_exps.bias"),
        (GRANITE_SWA, "granite_swa.attention.rope_pattern", u32(4), "granite_swa.attention.rope_pattern"),
        (GPT_OSS, "gpt-oss.attention.key_length", u32(63), "key_length: expected an even head size"),
        (
            GPT_OSS,
            "gpt-oss.rope.scaling.factor",
            f32(f32::NAN),
            "rope.scaling.factor: expected a finite number",
        ),
    ];
    for (name, key, value, want) in keys {
        let error = open(changed(name, &[(key, value)], None)).err();
        let error = error.unwrap_or_else(|| panic!("{key}: taken"));
        assert!(error.contains(want) && !error.contains('\n'), "{key}: {error}");
    }
    for tensor in ["blk.3.attn_norm.weight", "output_norm.weight", "blk.0.ffn_down.weight"] {
        let error = open(changed(COHERE, &[], Some([tensor, "blk.0.other.weight"]))).unwrap_err();
        assert!(error.contains(&format!("\"{tensor}\"")) && !error.contains('\n'), "{tensor}: {error}");
    }
    // Sinks and expert biases exist for every layer, and for all three products.
    let (sinks, up) = ("blk.2.attn_sinks.weight", "blk.1.ffn_up_exps.bias");
    for tensor in [sinks, up, "blk.0.post_attention_norm.weight", "blk.1.ffn_down_exps.weight"] {
        let error = open(changed(GPT_OSS, &[], Some([tensor, "blk.0.other.weight"]))).unwrap_err();
        assert!(error.contains(&format!("\"{tensor}\"")) && !error.contains('\n'), "{tensor}: {error}");
    }
    // RMSNorms have no bias.
    for (name, tensor, bias) in [
        ("llama-h96-g2-bias", "blk.0.attn_output.bias", "blk.0.attn_norm.bias"),
        ("exaonemoe-h64-g2-window20-dense1", "blk.1.exp_probs_b.bias", "blk.1.ffn_norm.bias"),
    ] {
        let error = open(changed(name, &[], Some([tensor, bias]))).unwrap_err();
        assert_eq!(error, format!("not supported yet: tensor '{bias}'"));
    }
    // Attention and feed-forward share one norm: a second one belongs to another model.
    let error = open(changed(COHERE, &[], Some(["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"])));
    assert!(error.unwrap_err().contains("\"blk.0.attn_norm.weight\""));
}

#[test]
fn a_sliding_window_of_0_is_off() {
    let window = |n| changed(COHERE, &[("cohere2.attention.sliding_window", Some(Value::U32(n)))], None);
    let [none, wide, narrow] = [0, 10_000, 20].map(|n| open(window(n)).unwrap());
    assert_eq!(logits(&none, 40), logits(&wide, 40));
    assert_ne!(logits(&none, 40), logits(&narrow, 40));
    // The global layer has no RoPE, the others do.
    for model in [none, wide, narrow] {
        let config = model.config();
        let n_rot: Vec<_> = config.layers.iter().map(|layer| config.ropes[layer.rope].params.n_rot).collect();
        assert_eq!(n_rot, [64, 64, 64, 0]);
    }
}

/// In steps of any size, in any batch.
#[test]
fn sinks_and_expert_biases_are_batch_invariant() {
    let model = open(fixture(GPT_OSS)).unwrap();
    let tokens: Vec<u32> = (0..60).map(|i| i * 37 % 64).collect();
    let fed = |chunk: usize| {
        let kv = KvOptions::symmetric("turbo3".parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
        tokens.chunks(chunk).for_each(|tokens| session.feed(tokens, &mut |_| true).unwrap());
        session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
    };
    let want = fed(60);
    assert_eq!(fed(1), want);
    assert_eq!(fed(17), want);
}

#[test]
fn neutral_metadata_values_change_nothing() {
    let one = changed(COHERE, &[("cohere2.logit_scale", Some(Value::F32(1.0)))], None);
    let none = changed(COHERE, &[("cohere2.logit_scale", Some(Value::F32(0.0)))], None);
    assert_eq!(logits(&open(one).unwrap(), 8), logits(&open(none).unwrap(), 8));

    let scale = "mistral3.attention.temperature_scale";
    let off = open(changed(MISTRAL, &[(scale, Some(Value::F32(0.0)))], None)).unwrap();
    let on = open(fixture(MISTRAL)).unwrap();
    // Scores grow beyond the original context of 32 tokens.
    assert_eq!(logits(&off, 32), logits(&on, 32));
    assert_ne!(logits(&off, 33), logits(&on, 33));
    // An explicit length takes precedence.
    let length = ("mistral3.attention.temperature_length", Some(Value::U32(16)));
    let explicit = open(changed(MISTRAL, &[length], None)).unwrap();
    assert_eq!(logits(&off, 16), logits(&explicit, 16));
    assert_ne!(logits(&off, 17), logits(&explicit, 17));
}

#[test]
fn bidirectional_embedding_models_are_refused() {
    let causal = |is| changed(GLM4, &[("glm4.attention.causal", Some(Value::Bool(is)))], None);
    let error = open(causal(false)).unwrap_err();
    let want = "an embedding model with bidirectional attention (glm4.attention.causal is false)";
    assert!(error.contains(want) && !error.contains('\n'), "{error}");
    open(causal(true)).unwrap();
}

#[test]
fn a_factor_on_the_magnitude_counts_whatever_the_scaling() {
    const PHI3: &str = "phi3-h64-g2-window24";
    let factor = ("phi3.rope.scaling.attn_factor", Some(Value::F32(1.25)));
    let [plain, scaled] = [&[][..], &[factor]].map(|keys| open(changed(PHI3, keys, None)).unwrap());
    assert_eq!([&plain, &scaled].map(|model| model.config().ropes[0].magnitude()), [1.0, 1.25]);
    assert_ne!(logits(&plain, 8), logits(&scaled, 8));
}

/// Joins the tensors `parts` of each layer into one, made of `n` matrices or vectors that are
/// consecutive in each of them.
fn joined(gguf: &Gguf, parts: &[&str], into: &str, n: usize) -> Gguf {
    let ends = |info: &TensorInfo, part: &str| info.name.ends_with(&format!(".{part}"));
    let named = |info: &TensorInfo, part: &str| info.name.replace(parts[0], part);
    // A vector for each expert, or a matrix.
    let axis = usize::from(into.ends_with("weight"));
    let mut tensors = Vec::new();
    for info in gguf.tensors() {
        if parts[1..].iter().any(|part| ends(info, part)) {
            continue;
        }
        if !ends(info, parts[0]) {
            tensors.push((info.clone(), gguf.data(info).to_vec()));
            continue;
        }
        let all: Vec<_> = parts.iter().map(|part| gguf.tensor(&named(info, part)).unwrap()).collect();
        let mut whole = info.clone();
        whole.name = named(info, into);
        whole.shape[axis] = all.iter().map(|part| part.info.shape[axis]).sum();
        let piece = |at: usize| {
            all.iter().flat_map(move |part| part.bytes.chunks_exact(part.bytes.len() / n).nth(at).unwrap())
        };
        tensors.push((whole, (0..n).flat_map(piece).copied().collect()));
    }
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    tensors.iter().for_each(|(info, _)| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let fill = |data: &mut TensorSink<'_>| {
        tensors.iter().try_for_each(|(info, bytes)| data.bytes(&info.name, bytes))
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

#[test]
fn biases_in_one_tensor_are_those_of_several() {
    let of = |kind: &'static str| ["attn_q", "attn_k", "attn_v"].map(|name| format!("{name}.{kind}"));
    for name in ["qwen2-h64-g6", GLM4] {
        let apart = fixture(name);
        let [weights, biases] = ["weight", "bias"].map(of);
        let [weights, biases] = [&weights, &biases].map(|names| names.each_ref().map(String::as_str));
        let both = joined(&joined(&apart, &weights, "attn_qkv.weight", 1), &biases, "attn_qkv.bias", 1);
        // Weights and biases may be joined independently.
        let one = joined(&apart, &biases, "attn_qkv.bias", 1);
        let want = logits(&open(apart).unwrap(), 40);
        assert_eq!(logits(&open(both).unwrap(), 40), want, "{name}");
        assert_eq!(logits(&open(one).unwrap(), 40), want, "{name}");
    }
    let apart = fixture(GPT_OSS);
    let weights =
        joined(&apart, &["ffn_gate_exps.weight", "ffn_up_exps.weight"], "ffn_gate_up_exps.weight", 5);
    let both = joined(&weights, &["ffn_gate_exps.bias", "ffn_up_exps.bias"], "ffn_gate_up_exps.bias", 5);
    assert_eq!(logits(&open(both).unwrap(), 40), logits(&open(apart).unwrap(), 40));
}

const GLM4: &str = "glm4-h64-g2-bias";

/// The text models of GLM-4V: their files pair halves of a head where those of GLM-4 pair
/// neighbours.
#[test]
fn glm4v_text_models_pair_halves_of_a_head() {
    // As converters write it; M-RoPE needs sections for height and width.
    for (sections, halves) in [(vec![8, 12, 12, 0], true), (vec![32, 0, 0, 0], false), (vec![], false)] {
        let gguf = fixture(GLM4);
        let heads = [("attn_q.", 4), ("attn_k.", 2)];
        let reorder = |info: &TensorInfo, bytes: &[u8]| -> Vec<u8> {
            let n_heads = heads.iter().find(|(name, _)| info.name.contains(name)).map(|(_, n)| *n);
            n_heads.filter(|_| halves).map_or_else(|| bytes.to_vec(), |n| halved(bytes, n, 64, 32))
        };
        let set = |writer: &mut GgufWriter| {
            writer.set_array("glm4.rope.dimension_sections", sections.iter().copied()).unwrap();
        };
        let changed = rewritten(&gguf, set, reorder);
        let [got, want] = [changed, gguf].map(|gguf| logits(&open(gguf).unwrap(), 40));
        // The dimensions of a head are summed in another order.
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-4), "{sections:?}");
    }
}

/// Reorders rows of heads, or single values: neighbours among the first `n_rot` of `dim` become
/// halves.
fn halved(bytes: &[u8], n_heads: usize, dim: usize, n_rot: usize) -> Vec<u8> {
    let row = bytes.len() / (n_heads * dim);
    let order = (0..n_rot).step_by(2).chain((1..n_rot).step_by(2)).chain(n_rot..dim);
    let order: Vec<usize> = order.collect();
    let of_head = |head: &[u8]| -> Vec<u8> {
        order.iter().flat_map(|&at| head[at * row..(at + 1) * row].to_vec()).collect()
    };
    bytes.chunks_exact(dim * row).flat_map(of_head).collect()
}

const LONGROPE: &str = "phi3-h64-g2-longrope";

/// Keys of both RoPE variants are otherwise indistinguishable.
#[test]
fn the_context_length_selects_the_longrope_factors() {
    const ORIGINAL: usize = 600;
    let original = ("phi3.rope.scaling.original_context_length", Some(Value::U32(ORIGINAL as u32)));
    let model = open(changed(LONGROPE, &[original], None)).unwrap();
    assert_eq!(model.config().n_ctx_short(), Some(ORIGINAL));
    let tokens: Vec<u32> = (0..560).map(|i| i * 37 % 64).collect();
    let new = |n_ctx| {
        let kv = KvOptions::symmetric("f32".parse().unwrap());
        model.session(SessionOptions { n_ctx: Some(n_ctx), kv }).unwrap()
    };
    let fed = |n_ctx| {
        let mut session = new(n_ctx);
        session.feed(&tokens, &mut |_| true).unwrap();
        session
    };
    let [mut short, mut long] = [ORIGINAL, ORIGINAL + 1].map(fed);
    assert_ne!(short.logits().unwrap(), long.logits().unwrap());
    // The context length decides, not the number of tokens in it.
    assert_eq!(fed(2 * ORIGINAL).logits().unwrap(), long.logits().unwrap());
    assert_eq!(new(ORIGINAL - 1).attach_prefix(&tokens), 512);
    drop(short);
    assert_eq!(new(ORIGINAL - 1).attach_prefix(&tokens), 0, "only a long one is left");
    assert_eq!(new(ORIGINAL + 2).attach_prefix(&tokens), 512);

    let file = std::env::temp_dir().join(format!("kvant-longrope-{}", std::process::id()));
    fed(ORIGINAL).save(&file).unwrap();
    let errors = [
        model.load_session(&file, Some(ORIGINAL + 1)).map(|_| ()),
        new(ORIGINAL + 1).load_prefix(&file, &tokens).map(|_| ()),
    ];
    for error in errors.map(Result::unwrap_err) {
        let want = "rope.frequencies: expected those of a context of more than 600 tokens, the file has those of a context of up to 600 tokens";
        assert!(error.to_string().ends_with(want), "{error}");
    }
    assert_eq!(model.load_session(&file, None).unwrap().n_ctx(), tokens.len());
    assert_eq!(new(ORIGINAL - 1).load_prefix(&file, &tokens).unwrap(), 559);
    fed(ORIGINAL + 1).save(&file).unwrap();
    assert_eq!(model.load_session(&file, Some(ORIGINAL + 1)).unwrap().n_ctx(), ORIGINAL + 1);
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn longrope_factors_come_in_pairs() {
    let error = |tensor| open(changed(LONGROPE, &[], Some(tensor))).unwrap_err();
    let [long, short] = ["rope_factors_long.weight", "rope_factors_short.weight"];
    for (tensor, to, want) in [
        (long, "other.weight", "\"rope_factors_long.weight\": is missing"),
        (short, "other.weight", "\"rope_factors_short.weight\": is missing"),
        (short, "rope_freqs.weight", "'rope_freqs.weight' beside divisors by the length of the context"),
    ] {
        assert!(error([tensor, to]).contains(want), "{}", error([tensor, to]));
    }
}

#[test]
fn latent_sizes_that_make_no_sense_are_refused_in_a_line() {
    let u32 = |value: u32| Some(Value::U32(value));
    let [older, newer] = LATENT;
    let keys: [(&str, &str, Option<Value<'_>>, &str); 17] = [
        (older, "attention.kv_lora_rank", None, "\"deepseek2.attention.kv_lora_rank\""),
        (older, "attention.kv_lora_rank", u32(0), "expected a positive number, got 0"),
        (
            older,
            "attention.kv_lora_rank",
            u32(511),
            "kv_lora_rank: expected an even number up to 1088, got 511",
        ),
        (
            older,
            "attention.kv_lora_rank",
            u32(1090),
            "kv_lora_rank: expected an even number up to 1088, got 1090",
        ),
        (older, "attention.kv_lora_rank", u32(0x7fff_ffff), "expected an even number up to 1088"),
        (older, "attention.kv_lora_rank", u32(510), "blk.0.attn_kv_a_mqa.weight"),
        (older, "rope.dimension_count", None, "\"deepseek2.rope.dimension_count\""),
        (older, "rope.dimension_count", u32(63), "rope.dimension_count: expected an even number below 104"),
        (older, "rope.dimension_count", u32(104), "rope.dimension_count: expected an even number below 104"),
        (older, "attention.key_length", u32(1026), "key_length: expected a head size up to 1024, got 1026"),
        (older, "attention.value_length", u32(2000), "value_length: expected a head size up to 1024"),
        (older, "attention.head_count", u32(3), "blk.0.attn_q.weight"),
        (older, "attention.q_lora_rank", u32(8), "blk.0.attn_q_a_norm.weight"),
        (newer, "attention.q_lora_rank", u32(42), "blk.0.attn_q_a_norm.weight"),
        (newer, "attention.key_length_mla", u32(70), "blk.0.attn_q_b.weight"),
        (newer, "attention.value_length_mla", u32(26), "blk.0.attn_v_b.weight"),
        (newer, "expert_shared_count", u32(3), "blk.1.ffn_gate_shexp.weight"),
    ];
    for (name, key, value, want) in keys {
        let key = format!("deepseek2.{key}");
        let error = open(changed(name, &[(&key, value)], None)).err();
        let error = error.unwrap_or_else(|| panic!("{key}: taken"));
        assert!(error.contains(want) && !error.contains('\n'), "{key}: {error}");
    }
    let missing = ["attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_q_a", "ffn_gate_inp"];
    for tensor in missing.map(|name| format!("blk.1.{name}.weight")) {
        let error = open(changed(newer, &[], Some([&tensor, "blk.0.other.weight"]))).unwrap_err();
        assert!(error.contains(&format!("\"{tensor}\"")) && !error.contains('\n'), "{tensor}: {error}");
    }
}

/// MLA, layers of several shapes, and shared keys and values: in steps of any size, with every KV
/// type.
#[test]
fn mla_and_shared_kv_are_chunk_invariant() {
    let tokens: Vec<u32> = (0..60).map(|i| i * 37 % 64).collect();
    let names = LATENT.into_iter().chain(GEMMA4);
    for (name, dtype) in names.flat_map(|name| [(name, "turbo3"), (name, "q8_0"), (name, "f16")]) {
        let model = open(fixture(name)).unwrap();
        let fed = |chunk: usize| {
            let kv = KvOptions::symmetric(dtype.parse().unwrap());
            let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
            tokens.chunks(chunk).for_each(|tokens| session.feed(tokens, &mut |_| true).unwrap());
            session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
        };
        let want = fed(60);
        assert!(want.iter().all(|&bits| f32::from_bits(bits).is_finite()), "{name}, {dtype}");
        assert_eq!(fed(1), want, "{name}, {dtype}");
        assert_eq!(fed(17), want, "{name}, {dtype}");
    }
}

/// 576 and 224 values per token, of which the first 512 and 192 are its value.
#[test]
fn mla_stores_the_latent_vector_once() {
    let tokens: Vec<u32> = (0..150).map(|i| i * 37 % 64).collect();
    for (name, [whole, value]) in LATENT.into_iter().zip([[576, 512], [224, 192]]) {
        let model = open(fixture(name)).unwrap();
        let session = |k: &str, v: &str| {
            let kv = KvOptions { k: k.parse().unwrap(), v: v.parse().unwrap(), ..Default::default() };
            let mut session = model.session(SessionOptions { n_ctx: Some(160), kv }).unwrap();
            session.feed(&tokens, &mut |_| true).unwrap();
            session
        };
        let [f32, other] = [session("f32", "f32"), session("f32", "turbo3")];
        let rows = |session: &Session, side| session.kv_rows(0, 0, side).unwrap();
        let (keys, values) = (rows(&f32, Side::K), rows(&f32, Side::V));
        assert_eq!((keys.len(), values.len()), (150 * whole, 150 * value), "{name}");
        for (key, of_key) in keys.chunks_exact(whole).zip(values.chunks_exact(value)) {
            assert_eq!(&key[..value], of_key, "{name}");
        }
        let n_layers = model.config().layers.len();
        assert_eq!(f32.kv().bytes, n_layers * 256 * whole * 4, "{name}: two blocks of 128 tokens");
        assert_eq!((other.kv().bytes, rows(&other, Side::V)), (f32.kv().bytes, values), "{name}");
        assert_eq!((other.kv().type_v, f32.kv().notes.len()), ("f32", 0), "{name}");
        assert!(other.kv().notes.iter().any(|note| note.contains("turbo3 for values is ignored")), "{name}");
    }
}

#[test]
fn gemma_4_has_two_layer_shapes_and_shared_kv() {
    let [keys, shared] = GEMMA4.map(|name| open(fixture(name)).unwrap());
    let shape = |model: &Model| -> Vec<_> {
        let layers = model.config().layers.iter();
        layers.map(|layer| (layer.heads.n_kv_heads, layer.heads.k_head_dim, layer.heads.window)).collect()
    };
    let (windowed, full) = ((2, 64, Some(20)), (1, 128, None));
    assert_eq!(shape(&keys), [windowed, full, windowed, full]);
    let (windowed, full) = ((1, 64, Some(24)), (1, 96, None));
    assert_eq!(shape(&shared), [windowed, windowed, full, windowed, full]);
    let states: Vec<_> = shared.config().layers.iter().map(|layer| layer.state).collect();
    let (own, of) = (LayerState::Own, LayerState::Shared);
    assert_eq!(states, [own, own, own, of(1), of(2)]);
    assert_eq!(shared.config().kv_shape().layers.len(), 3);
    let widths: Vec<_> = shared.config().layers.iter().map(|layer| layer.n_ff).collect();
    assert_eq!(widths, [24, 24, 24, 48, 48]);
}

#[test]
fn models_with_per_layer_embeddings_are_not_split() {
    let gguf = Arc::new(fixture(GEMMA4[1]));
    let config = Config::from_gguf(&gguf).unwrap();
    for part in LayerRange::split(config.layers.len(), 2) {
        let device = CpuDevice::from_env(Some(1)).unwrap();
        let error = Weights::load(&gguf, &config, &part, &device, &mut |_| ()).err().unwrap().to_string();
        assert_eq!(
            error,
            "not supported yet: a model with embedding_length_per_layer_input on more than one device"
        );
    }
}

#[test]
fn router_biases_imply_sigmoid_gating() {
    let gating = |func| [("lfm2moe.expert_gating_func", func)];
    // Without a gating function in the file, they imply one.
    let [explicit, implied] = [Some(Value::U32(2)), None].map(|func| changed(LFM2MOE, &gating(func), None));
    assert_eq!(logits(&open(explicit).unwrap(), 8), logits(&open(implied).unwrap(), 8));
    // With one, they apply to a softmax too.
    let [sigmoid, softmax] = [2, 1].map(|func| changed(LFM2MOE, &gating(Some(Value::U32(func))), None));
    assert_ne!(logits(&open(sigmoid).unwrap(), 8), logits(&open(softmax).unwrap(), 8));
}

/// Its files tell by the number of layers alone that it has no RoPE.
#[test]
fn baichuan_of_13b_is_refused() {
    let gguf = changed("baichuan-h64-g1", &[("baichuan.block_count", Some(Value::U32(40)))], None);
    let error = open(gguf).unwrap_err();
    assert_eq!(error, "not supported yet: ALiBi, the positions of Baichuan of 13B (40 layers)");
}

/// Each run of the layers has a cache of its own, and weights are stored and read as often as they
/// are.
#[test]
fn layers_may_run_several_times() {
    let name = "nanbeige-h64-g2-loops3";
    let runs = |n| [("nanbeige.num_loops", Some(Value::U32(n)))];
    let models = [1, 2, 3].map(|n| open(changed(name, &runs(n), None)).unwrap());
    let layers = models.each_ref().map(|model| model.config().kv_shape().layers.len());
    assert_eq!(layers, [2, 4, 6]);
    let stored = models.each_ref().map(|model| model.weight_bytes());
    assert!(stored[0] == stored[1] && stored[1] == stored[2], "{stored:?}");
    let logits = models.map(|model| logits(&model, 8));
    assert!(logits[0] != logits[1] && logits[1] != logits[2]);
    for (n, want) in
        [(0, "num_loops: expected a positive number"), (65, "num_loops: expected at most 64, got 65")]
    {
        let error = open(changed(name, &runs(n), None)).unwrap_err();
        assert!(error.contains(want) && !error.contains('\n'), "{error}");
    }
    let shared = ("nanbeige.attention.shared_kv_layers", Some(Value::U32(1)));
    let error = open(changed(name, &[shared], None)).unwrap_err();
    assert!(error.contains("shared_kv_layers") || error.contains("several runs"), "{error}");
}
