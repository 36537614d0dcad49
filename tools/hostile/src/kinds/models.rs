//! Models: files with changed bytes, NaN weights, invalid metadata.

use std::io;
use std::path::Path;

use kvant_codec::DType;
use kvant_gguf::{GgufError, GgufWriter, TensorInfo, Value};

use crate::case::{Case, Expect};
use crate::chance::{Choices, NUMBERS};
use crate::fixtures::{Fixtures, MODEL};

/// Returns a command that reads a model.
fn command(chance: &mut Choices, folder: &Path, name: &str) -> Case {
    let run = ["run", name, "-p", "hi", "-n", "2", "-c", "64", "-t", "1", "--seed", "1"];
    match chance.below(8) {
        0 => Case::new(folder, ["inspect", name, "-v"]),
        1 => Case::new(folder, ["inspect", name, "--json", "-c", "4096"]),
        2 => Case::new(folder, ["quantize", name, "out.gguf", "q4_0"]).output("out.gguf"),
        3 => Case::new(folder, ["bench", name, "-p", "1", "-n", "1", "-r", "1", "-t", "1"]),
        4 => Case::new(folder, ["eval", "ppl", "-m", name, "-c", "16", "--chunks", "1", "-t", "1"]),
        5 => {
            let chat = Case::new(folder, ["chat", name, "-n", "2", "-t", "1"])
                .reads("hi\n/kv\n/system x\n/regenerate\n");
            chat.conversation()
        }
        _ => Case::new(folder, run),
    }
}

/// Creates the bundled model with changed bytes, or truncated, or another file under its name.
pub fn changed(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let head = fixtures.gguf.tensors().iter().map(|info| info.offset).min().unwrap_or(0) as usize;
    let mut bytes = MODEL.to_vec();
    let mut name = "model.gguf";
    let expect = match chance.below(8) {
        0 => {
            let until = [head, bytes.len()][chance.below(2)];
            bytes.truncate(chance.below(until));
            Expect::Refused
        }
        1 => {
            bytes = [&b"GGUF"[..], &chance.bytes(300)].concat();
            Expect::Refused
        }
        2 => {
            name = "model-00001-of-00003.gguf";
            chance.mutate(&mut bytes, 64);
            Expect::Either
        }
        3 => {
            bytes.extend(chance.bytes(5000));
            Expect::Either
        }
        // Counts and the first keys; the records of the tensors; any byte before the data.
        4 => mutated(chance, &mut bytes, 0, 400),
        5 => mutated(chance, &mut bytes, head.saturating_sub(4000), head),
        _ => mutated(chance, &mut bytes, 0, head),
    };
    command(chance, folder, name).expect(expect).file(name, bytes)
}

pub(super) fn mutated(chance: &mut Choices, bytes: &mut Vec<u8>, from: usize, until: usize) -> Expect {
    let mut part = bytes[from..until].to_vec();
    chance.mutate(&mut part, until - from);
    bytes.splice(from..until, part);
    Expect::Either
}

/// Creates the bundled model with NaN or an infinity in a tensor.
pub fn nonfinite(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let mut bytes = MODEL.to_vec();
    let breakable = |info: &&TensorInfo| matches!(info.dtype, DType::F32 | DType::F16 | DType::Q8_0);
    let tensors: Vec<_> = fixtures.gguf.tensors().iter().filter(breakable).collect();
    let info = chance.of(&tensors);
    let block = chance.below(info.n_bytes / info.dtype.block_bytes()) * info.dtype.block_bytes();
    let broken = match info.dtype {
        DType::F32 => chance.of(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]).to_le_bytes().to_vec(),
        _ => chance.of(&[0x7e00u16, 0x7c00, 0xfc01]).to_le_bytes().to_vec(),
    };
    let at = info.offset as usize + block;
    bytes[at..at + broken.len()].copy_from_slice(&broken);
    let name = "model.gguf";
    let case = match chance.below(3) {
        0 => Case::new(
            folder,
            ["quantize", name, "out.gguf", chance.of(&["q4_0", "q8_0", "q6_K", "iq4_xs", "mxfp4", "nvfp4"])],
        ),
        1 => Case::new(folder, ["run", name, "-p", "hi", "-n", "2"]),
        _ => Case::new(folder, ["eval", "ppl", "-m", name, "--chunks", "1"]),
    };
    case.expect(Expect::Refused).file(name, bytes)
}

/// Creates the bundled model with one or more changed keys.
pub fn metadata(chance: &mut Choices, fixtures: &Fixtures, folder: &Path) -> io::Result<Case> {
    let mut writer = GgufWriter::with_meta(fixtures.gguf.meta()).map_err(io::Error::other)?;
    let keys: Vec<&str> = fixtures.gguf.meta().iter().map(|(key, _)| key).collect();
    for _ in 0..=chance.below(3) {
        let mut key = (chance.of(&keys)).to_owned();
        if chance.one_in(4) {
            key = chance.of(&EXTRA).replace("ARCH", "llama");
        }
        // Values that the writer rejects are skipped.
        let _ = set(chance, &mut writer, &key);
    }
    for info in fixtures.gguf.tensors() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).map_err(io::Error::other)?;
    }
    let mut bytes = Vec::new();
    let fill = |sink: &mut kvant_gguf::TensorSink<'_>| {
        fixtures.gguf.tensors().iter().try_for_each(|info| sink.bytes(&info.name, &fixtures.gguf.data(info)))
    };
    writer.write_to::<GgufError>(&mut bytes, fill).map_err(io::Error::other)?;
    command(chance, folder, "model.gguf").file("model.gguf", bytes)
}

/// Keys that the bundled model lacks.
const EXTRA: [&str; 14] = [
    "ARCH.attention.sliding_window",
    "ARCH.attention.key_length",
    "ARCH.attention.value_length",
    "ARCH.rope.dimension_count",
    "ARCH.rope.scaling.type",
    "ARCH.rope.scaling.factor",
    "ARCH.rope.freq_base",
    "ARCH.expert_count",
    "ARCH.vocab_size",
    "split.count",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.scores",
    "general.file_type",
];

/// Untrusted text.
pub const STRANGE: [&str; 8] = [
    "",
    "\u{1b}[2J\u{1b}]0;x\u{7}",
    "a\nerror: b\r",
    "llama\0",
    "\u{202e}\u{2028}\u{feff}",
    "../../x",
    "%s%n{}{{}}",
    "qwen2",
];

pub(super) fn set(chance: &mut Choices, writer: &mut GgufWriter, key: &str) -> Result<(), GgufError> {
    let number = chance.of(&NUMBERS);
    match chance.below(10) {
        0 => writer.set(key, number as u32),
        1 => writer.set(key, number as i32),
        2 => writer.set(key, number),
        3 => writer.set(key, chance.of(&[f32::NAN, f32::INFINITY, -0.0, -1.0, 1e-45, f32::MAX])),
        4 => writer.set(key, chance.one_in(2)),
        5 => writer.set(key, "x".repeat(1 + chance.below(100_000)).as_str()),
        6 => writer.set_array(key, vec![number as u32; chance.below(40)]),
        7 => writer.set_array(key, vec![chance.of(&STRANGE); chance.below(2000)]),
        8 => writer.set(key, Value::F64(f64::from_bits(number))),
        _ => writer.set(key, chance.of(&STRANGE)),
    }
}
