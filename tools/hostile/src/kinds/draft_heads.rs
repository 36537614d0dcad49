//! Draft heads: files with changed bytes, keys, weights and tokens.

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
    let head = Gguf::from_bytes(HEAD.to_vec()).map_err(io::Error::other)?;
    let data = head.tensors().iter().map(|info| info.offset).min().unwrap_or(0) as usize;
    let mut bytes = HEAD.to_vec();
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
                writer.set_array("eagle3.target_layers", layers)
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
