//! Draft heads of both kinds: files with changed bytes, keys, weights and tokens.

use std::io;
use std::path::Path;

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, TensorSink};

use crate::case::{Case, Expect};
use crate::chance::{Choices, NUMBERS};
use crate::fixtures::Fixtures;
use crate::kinds::models::{mutated, set};

/// A head of the bundled model.
const HEAD: &[u8] = include_bytes!("../../../../crates/engine/tests/heads/pocket-q8_0.gguf");

/// Tokens of the bundled model.
const N_VOCAB: usize = 4096;

/// Creates a changed head; its model must answer or refuse it.
pub fn draft_head(chance: &mut Choices, _: &Fixtures, folder: &Path) -> io::Result<Case> {
    let mut head = Gguf::from_bytes(HEAD.to_vec()).map_err(io::Error::other)?;
    let mut bytes = HEAD.to_vec();
    if chance.one_in(2) {
        bytes = block_head(&head)?;
        head = Gguf::from_bytes(bytes.clone()).map_err(io::Error::other)?;
    }
    let data = head.tensors().iter().map(|info| info.offset).min().unwrap_or(0) as usize;
    let expect = match chance.below(8) {
        0 => {
            bytes.truncate(chance.below(bytes.len()));
            Expect::Refused
        }
        1 => mutated(chance, &mut bytes, 0, data),
        // Weights change draft tokens alone.
        2 => {
            let end = bytes.len();
            mutated(chance, &mut bytes, data, end)
        }
        3 | 4 => {
            bytes = with_tokens(chance, &head)?;
            Expect::Either
        }
        _ => {
            bytes = with_keys(chance, &head)?;
            Expect::Either
        }
    };
    let run = ["-p", "one two one two", "-n", "6", "-c", "64", "-t", "1", "--seed", "1", "--device", "cpu"];
    let case = match chance.below(8) {
        0 => Case::new(folder, ["inspect", "head.gguf", "-v"]),
        1 => Case::new(folder, ["run", "-m", "head.gguf"]).and(run).expect(Expect::Refused),
        _ => Case::new(folder, ["run", "-m", "bundled", "-md", "head.gguf"]).and(run),
    };
    let expect = if case.expect == Expect::Refused { Expect::Refused } else { expect };
    case.expect(expect).file("head.gguf", bytes)
}

/// Returns a DFlash head of one layer for the model of `head`, with small weights.
fn block_head(head: &Gguf) -> io::Result<Vec<u8>> {
    let size = |key: &str| head.meta().get::<u32>(&format!("eagle3.{key}")).map_err(io::Error::other);
    let [n_embd, n_ff, n_heads, n_kv_heads, dim] = [
        size("embedding_length")?,
        size("feed_forward_length")?,
        size("attention.head_count")?,
        size("attention.head_count_kv")?,
        size("attention.key_length")?,
    ];
    let mut writer = GgufWriter::new();
    let set = |writer: &mut GgufWriter| {
        writer.set("general.architecture", "dflash")?;
        for (key, value) in [
            ("block_count", 1),
            ("context_length", size("context_length").unwrap_or(256)),
            ("embedding_length", n_embd),
            ("feed_forward_length", n_ff),
            ("attention.head_count", n_heads),
            ("attention.head_count_kv", n_kv_heads),
            ("attention.key_length", dim),
            ("attention.value_length", dim),
            ("block_size", 8),
        ] {
            writer.set(&format!("dflash.{key}"), value)?;
        }
        writer.set("dflash.attention.layer_norm_rms_epsilon", 1e-6f32)?;
        writer.set("tokenizer.ggml.mask_token_id", 5u32)?;
        writer.set_array("dflash.target_layers", [1u32, 2])
    };
    set(&mut writer).map_err(io::Error::other)?;
    let [n_embd, n_ff, n_heads, n_kv_heads, dim] =
        [n_embd, n_ff, n_heads, n_kv_heads, dim].map(|size| size as usize);
    let tensors = [
        ("fc.weight", vec![2 * n_embd, n_embd]),
        ("enc.output_norm.weight", vec![n_embd]),
        ("output_norm.weight", vec![n_embd]),
        ("blk.0.attn_norm.weight", vec![n_embd]),
        ("blk.0.ffn_norm.weight", vec![n_embd]),
        ("blk.0.attn_q_norm.weight", vec![dim]),
        ("blk.0.attn_k_norm.weight", vec![dim]),
        ("blk.0.attn_q.weight", vec![n_embd, n_heads * dim]),
        ("blk.0.attn_k.weight", vec![n_embd, n_kv_heads * dim]),
        ("blk.0.attn_v.weight", vec![n_embd, n_kv_heads * dim]),
        ("blk.0.attn_output.weight", vec![n_heads * dim, n_embd]),
        ("blk.0.ffn_gate.weight", vec![n_embd, n_ff]),
        ("blk.0.ffn_up.weight", vec![n_embd, n_ff]),
        ("blk.0.ffn_down.weight", vec![n_ff, n_embd]),
    ];
    for (name, shape) in &tensors {
        writer.add_tensor(name, shape, DType::F32).map_err(io::Error::other)?;
    }
    let mut bytes = Vec::new();
    let fill = |sink: &mut TensorSink<'_>| {
        tensors.iter().try_for_each(|(name, shape)| {
            let value = |i: usize| ((i * 37 % 13) as f32 - 6.0) / 64.0;
            let values: Vec<u8> = (0..shape.iter().product()).flat_map(|i| value(i).to_le_bytes()).collect();
            sink.bytes(name, &values)
        })
    };
    writer.write_to::<GgufError>(&mut bytes, fill).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Returns the head with some changed keys.
fn with_keys(chance: &mut Choices, head: &Gguf) -> io::Result<Vec<u8>> {
    let mut writer = GgufWriter::with_meta(head.meta()).map_err(io::Error::other)?;
    let keys: Vec<&str> = head.meta().iter().map(|(key, _)| key).collect();
    for _ in 0..=chance.below(2) {
        let key = chance.of(&keys).to_owned();
        // Values that the writer rejects are skipped.
        let _ = match chance.one_in(2) {
            true => set(chance, &mut writer, &key),
            false => {
                let layers: Vec<u32> = (0..chance.below(6)).map(|_| chance.below(7) as u32).collect();
                let arch = head.meta().find::<&str>("general.architecture").ok().flatten();
                writer.set_array(&format!("{}.target_layers", arch.unwrap_or_default()), layers)
            }
        };
    }
    written(writer, head, None)
}

/// Returns the head with tokens of its own, some of which its model may not have.
fn with_tokens(chance: &mut Choices, head: &Gguf) -> io::Result<Vec<u8>> {
    let writer = GgufWriter::with_meta(head.meta()).map_err(io::Error::other)?;
    let mut ids: Vec<f32> = (0..1 + chance.below(N_VOCAB)).map(|id| id as f32).collect();
    let strange = [f32::NAN, -1.0, 0.5, f32::INFINITY, chance.of(&NUMBERS) as f32];
    let at = chance.below(ids.len());
    ids[at] = chance.of(&strange);
    written(writer, head, Some(&ids))
}

/// Writes the tensors of the head, and its tokens.
fn written(mut writer: GgufWriter, head: &Gguf, ids: Option<&[f32]>) -> io::Result<Vec<u8>> {
    for info in head.tensors() {
        writer.add_tensor(&info.name, &info.shape, info.dtype).map_err(io::Error::other)?;
    }
    if let Some(ids) = ids {
        writer.add_tensor("d2t", &[ids.len()], DType::F32).map_err(io::Error::other)?;
    }
    let mut bytes = Vec::new();
    let fill = |sink: &mut TensorSink<'_>| {
        head.tensors().iter().try_for_each(|info| sink.bytes(&info.name, &head.data(info)))?;
        let ids: Vec<u8> = ids.unwrap_or_default().iter().flat_map(|id| id.to_le_bytes()).collect();
        if ids.is_empty() { Ok(()) } else { sink.bytes("d2t", &ids) }
    };
    writer.write_to::<GgufError>(&mut bytes, fill).map_err(io::Error::other)?;
    Ok(bytes)
}
