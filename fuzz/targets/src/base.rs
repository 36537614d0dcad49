//! Target: base-logits files of the bundled model, modified.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use kvant::{KvOptions, Model, OpenOptions};
use kvant_eval::{Base, Chunks, EvalError, KldOptions, PplOptions};

use crate::mutate::changed;

/// Tokens per chunk, and chunks.
const N_CTX: usize = 8;
const N_CHUNKS: usize = 2;
/// Bytes of the trailer with checksums, after the part that llama.cpp reads: see `base_trailer.rs`.
const TRAILER: usize = 48 + 8 * (N_CHUNKS + 2);

/// The model, the file of a short text, and the measurement against it.
static BUNDLED: LazyLock<(Model, Vec<u8>, Vec<f64>)> = LazyLock::new(|| {
    let options = OpenOptions { n_threads: Some(1), ..Default::default() };
    let model = Model::bundled(options).expect("the bundled model is sound");
    let chunks = Chunks::new(&model, kvant_eval::SAMPLE, N_CTX, Some(N_CHUNKS)).expect("it is long enough");
    let path = place("whole");
    let options = PplOptions { kv: KvOptions::default(), step: None };
    kvant_eval::ppl_saving_base(&model, &chunks, &options, &path, &mut |_| ())
        .expect("the folder for temporary files can be written");
    let file = fs::read(&path).expect("it was just written");
    let whole = measure(&model, &file).expect("it is sound");
    (model, file, whole)
});

fn place(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvant-fuzz-base-{}-{name}", std::process::id()))
}

/// Returns the divergence of each scored token of the f16 cache from a base file.
fn measure(model: &Model, file: &[u8]) -> Result<Vec<f64>, EvalError> {
    let path = place("changed");
    fs::write(&path, file).expect("the folder for temporary files can be written");
    let base = Base::open(&path, model)?;
    let chunks = base.chunks(model, None)?.expect("a file holds its text");
    let options = KldOptions { configs: vec![KvOptions::default()], step: None };
    let results = kvant_eval::kld(model, &chunks, base, &options, None, &mut |_| ())?;
    let stats = results.iter().map(|result| result.stats());
    Ok(stats.flat_map(|s| [s.mean_kld.value, s.kld.max, s.ppl.value, s.ppl_base.value]).collect())
}

/// Returns whether a modified file is accepted. It must be rejected in one line or give finite
/// numbers, with checksums those of the original file. The input after its first byte encodes the
/// changes (`mutate.rs`). An odd first byte removes the checksums, as in files of llama.cpp.
///
/// # Panics
///
/// If the property is violated.
pub fn base(bytes: &[u8]) -> bool {
    let Some((&first, bytes)) = bytes.split_first() else { return false };
    let (model, whole, numbers) = &*BUNDLED;
    let has_sums = first.is_multiple_of(2);
    let sound = if has_sums { &whole[..] } else { &whole[..whole.len() - TRAILER] };
    let file = changed(sound, bytes);
    match measure(model, &file) {
        Ok(got) if has_sums => assert!(got == *numbers && file == sound, "{got:?} of a changed file"),
        Ok(got) => assert!(got.iter().all(|x| !x.is_nan()), "{got:?}"),
        Err(error) => {
            let line = error.to_string();
            assert!(line.lines().count() == 1 && line.len() < 4096, "{line}");
        }
    }
    file != sound
}

/// Returns a row with an invalid scale; no change, with and without checksums; a changed byte of
/// the head, the tokens, a row; a truncation.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let change = |first: u8, place: u32, by: u8| [&[first][..], &place.to_le_bytes(), &[by]].concat();
    let cut = [&[1][..], &2000u32.to_le_bytes()].concat();
    let huge_scale = include_bytes!("../../seeds/base/scale-of-no-distribution").to_vec();
    vec![
        huge_scale,
        vec![0],
        vec![1],
        change(0, 9, 1),
        change(1, 9, 1),
        change(1, 40, 1),
        change(1, 3000, 0x80),
        cut,
    ]
}
