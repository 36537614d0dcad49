//! Folders that libraries quantized (`tools/reference/quantized.py`): their weights are those that
//! the libraries dequantize, bit for bit, and their logits those of `transformers`.

use std::fs;
use std::path::{Path, PathBuf};

use kvant::{DType, KvOptions, Model, OpenOptions, SessionOptions, open_file};
use serde_json::Value;

/// A folder, and the types that its weights have here.
const FOLDERS: [(&str, &[DType]); 18] = [
    ("gptq-g128", &[DType::Q4G128]),
    ("gptq-asymmetric-g32", &[DType::Q5_0]),
    ("gptq-g32", &[DType::Q4_0]),
    // Some matrices have their groups in order by chance.
    ("gptq-act-order", &[DType::F16]),
    ("gptq-8-bit", &[DType::Q8_0]),
    ("awq-g128", &[DType::Q4G128]),
    ("compressed-w4a16", &[DType::Q4G128]),
    ("compressed-w4a16-asymmetric", &[DType::Q4G128]),
    ("compressed-w8a16", &[DType::Q8_0]),
    ("compressed-w8a8", &[DType::Q8_0]),
    ("compressed-fp8", &[DType::FP8G128]),
    ("compressed-fp8-blocks", &[DType::FP8G128]),
    ("compressed-mxfp4", &[DType::MXFP4]),
    // Rows of 128 and of 256.
    (CONVERTED, &[DType::Q8_0, DType::NVFP4G256]),
    ("bnb-nf4", &[DType::NF4G64]),
    ("bnb-nf4-double", &[DType::NF4G64]),
    ("bnb-fp4", &[DType::FP4G64]),
    ("bnb-int8", &[DType::F16]),
];

/// The folder with rows of fewer weights than the block of their type: these are converted.
const CONVERTED: &str = "compressed-nvfp4";

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantized").join(name)
}

fn golden(name: &str) -> Value {
    serde_json::from_slice(&fs::read(folder(name).join("golden.json")).unwrap()).unwrap()
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Puts the rows of `heads` heads in the order of the folder.
fn unturned(values: &[f32], row: usize, heads: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = values.chunks_exact(row).collect();
    let dim = rows.len() / heads;
    let order = (0..rows.len()).map(|at| {
        let (head, at) = (at / dim, at % dim);
        head * dim + at % (dim / 2) * 2 + at / (dim / 2)
    });
    order.flat_map(|at| rows[at].to_vec()).collect()
}

#[test]
fn weights_are_those_that_the_libraries_dequantize() {
    const MODULES: [(&str, &str); 7] = [
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    for (name, dtypes) in FOLDERS {
        let gguf = open_file(folder(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let is_llama = gguf.find_tensor("blk.0.attn_q.bias").is_none();
        let known = golden(name);
        for (theirs, ours) in MODULES {
            let tensor = gguf.tensor(&format!("blk.0.{ours}.weight")).unwrap();
            assert!(dtypes.contains(&tensor.info.dtype), "{name} {ours}: {}", tensor.info.dtype);
            let mut values = vec![0.0; tensor.info.elements()];
            kvant_codec::decode(tensor.info.dtype, &tensor.bytes, &mut values).unwrap();
            if is_llama && ["attn_q", "attn_k"].contains(&ours) {
                values = unturned(&values, 128, if ours == "attn_q" { 2 } else { 1 });
            }
            let want = &known["weights"][format!("model.layers.0.{theirs}.weight")];
            // Zeros lose their sign.
            values.iter_mut().for_each(|value| *value += 0.0);
            let dtype = match want["dtype"].as_str().unwrap() {
                "float32" => DType::F32,
                "float16" => DType::F16,
                _ => DType::BF16,
            };
            let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
            kvant_codec::encode(dtype, &values, &mut bytes).unwrap();
            let hash = fnv1a(&bytes);
            let is_same = format!("{hash:016x}") == want["hash"].as_str().unwrap();
            let is_converted = name == CONVERTED && tensor.info.dtype == DType::Q8_0;
            assert_eq!(is_same, !is_converted, "{name} {ours}");
        }
    }
}

/// In f32 as `transformers`; in kernel types activations are coded in 8 bits too. The libraries
/// round 8-bit floats to bf16, which is more than fp8_g128 does.
#[test]
fn logits_are_those_of_transformers() {
    for (name, _) in FOLDERS {
        let known = golden(name);
        let want: Vec<f64> =
            known["logits"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let exact = if name == CONVERTED { 0.1 } else { 1e-3 };
        let of_library = if name.starts_with("compressed-fp8") { DType::BF16 } else { DType::F32 };
        for (weights, bound) in [(Some(of_library), exact), (None, 0.1)] {
            let options = OpenOptions { n_threads: Some(1), weights, ..Default::default() };
            let model = Model::open_with(folder(name), options).unwrap();
            let kv = KvOptions::symmetric(DType::F32);
            let mut session = model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap();
            session.feed(&(0..40).collect::<Vec<_>>(), &mut |_| true).unwrap();
            let got = session.logits().unwrap();
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() <= bound, "{name} {weights:?}: {got}, {want}");
            }
        }
    }
}
