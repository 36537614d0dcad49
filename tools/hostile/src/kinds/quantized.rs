//! Folders of quantized weights: changed headers, parts and methods.

use std::io;
use std::path::Path;

use crate::case::{Case, Expect};
use crate::chance::Choices;
use crate::fixtures::Fixtures;
use crate::kinds::folder_files::{header_end, with_header, with_setting};
use crate::kinds::models::mutated;

macro_rules! folder {
    ($name:literal) => {
        (
            include_str!(concat!("../../../../crates/engine/tests/quantized/", $name, "/config.json")),
            include_bytes!(concat!(
                "../../../../crates/engine/tests/quantized/",
                $name,
                "/model.safetensors"
            )),
        )
    };
}

/// One folder for each way of storing weights.
const FOLDERS: [(&str, &[u8]); 9] = [
    folder!("gptq-act-order"),
    folder!("gptq-8-bit"),
    folder!("awq-g128"),
    folder!("compressed-w4a16-asymmetric"),
    folder!("compressed-w8a8"),
    folder!("compressed-fp8-blocks"),
    folder!("compressed-nvfp4"),
    folder!("bnb-nf4-double"),
    folder!("bnb-int8"),
];

/// Creates a quantized model with a changed configuration or changed weights.
pub fn quantized(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let (config, weights) = chance.of(&FOLDERS);
    let (mut config, mut weights) = (config.to_owned(), weights.to_vec());
    let head = header_end(&weights);
    let expect = match chance.below(7) {
        0 => {
            weights.truncate(chance.below(weights.len()));
            Expect::Refused
        }
        1 => {
            let methods = ["hqq", "aqlm", "gptq_v3", ""];
            let known = ["\"gptq\"", "\"awq\"", "\"compressed-tensors\"", "\"bitsandbytes\""];
            let other = format!("\"{}\"", chance.of(&methods));
            known.iter().for_each(|known| config = config.replace(known, &other));
            Expect::Refused
        }
        // Numbers of the configuration, such as bits and groups.
        2 => {
            let numbers = ["0", "1", "2", "3", "5", "64", "4294967295", "-1", "1e9", "null", "\"4\""];
            let key = chance.of(&["bits", "group_size", "hidden_size", "num_hidden_layers", "vocab_size"]);
            config = with_setting(&config, key, || chance.of(&numbers));
            Expect::Either
        }
        // Names, types and shapes.
        3 => {
            let pairs = [
                ("I32", "F32"),
                ("F8_E4M3", "U8"),
                ("qweight", "qzeros"),
                ("scales", "scale"),
                ("g_idx", "g_id"),
                ("weight_scale", "weight_zero_point"),
                ("weight_packed", "weight"),
                ("nested_absmax", "nested_quant_map"),
                ("bitsandbytes__nf4", "bitsandbytes__fp4"),
                ("weight.absmax", "weight.abs"),
                ("U8", "F32"),
                ("[16]", "[8]"),
                ("[256]", "[128]"),
                ("[128,", "[64,"),
                (",128]", ",64]"),
            ];
            weights = with_header(chance, &weights, &pairs);
            Expect::Either
        }
        4 => mutated(chance, &mut weights, 8, head),
        // Descriptions of bitsandbytes; others have none.
        5 => {
            let pairs: [(&[u8], &[u8]); 8] = [
                (b"\"blocksize\": 64", b"\"blocksize\": 65"),
                (b"\"blocksize\": 64", b"\"blocksize\": -4"),
                (b"\"nested_blocksize\": 256", b"\"nested_blocksize\": 000"),
                (b"\"nested_dtype\": \"float32\"", b"\"nested_dtype\": \"float99\""),
                (b"\"shape\": [128, 128]", b"\"shape\": [129, 128]"),
                (b"\"shape\": [128, 128]", b"\"shape\": [128, 1.5]"),
                (b"\"nested_offset\": 0.", b"\"nested_offset\": \"\""),
                (b"{\"quant_type\"", b"[\"quant_type\""),
            ];
            let (from, to) = chance.of(&pairs);
            replace_bytes(&mut weights[head..], from, to);
            Expect::Either
        }
        // Codes, scales, zeros and groups.
        _ => {
            let end = weights.len();
            mutated(chance, &mut weights, head, end)
        }
    };
    let case = match chance.below(3) {
        0 => Case::new(folder, ["inspect", ".", "-v"]),
        1 => Case::new(folder, ["quantize", ".", "out.gguf", "q8_0"]).output("out.gguf"),
        _ => Case::new(folder, ["bench", ".", "-p", "1", "-n", "1", "-r", "1", "-t", "1"]),
    };
    case.expect(expect).file("config.json", config.into_bytes())?.file("model.safetensors", weights)
}

/// Replaces a text everywhere by another of its length.
fn replace_bytes(data: &mut [u8], from: &[u8], to: &[u8]) {
    let places: Vec<usize> = (0..data.len()).filter(|at| data[*at..].starts_with(from)).collect();
    places.iter().for_each(|at| data[*at..][..to.len()].copy_from_slice(to));
}
