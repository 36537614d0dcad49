//! Fingerprint of a model: a hash of all data that decides its output.
//!
//! It is 128 bits of XXH3 over the metadata (hyper-parameters, vocabulary, chat template; without
//! purely descriptive keys: `general.*` except for the architecture, and `split.*`) and over the
//! name, type, shape and every byte of every tensor. Keys and tensors are ordered by name, so that
//! rewriting, splitting or joining a file keeps the fingerprint.
//!
//! It reads the whole model, so it is computed on first use, on all cores, and cached:
//! `fingerprints/` in the cache folder has a small file for each model, valid for its paths, sizes
//! and modification times.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvant_gguf::{Gguf, TensorInfo};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

/// Changes when the fingerprint of a model changes.
const VERSION: u32 = 1;
/// Bytes of a tensor per work item. Part of the definition of the fingerprint.
const PIECE: usize = 8 << 20;
/// Bytes of tensors hashed at a time: some files generate tensors on demand.
const BATCH_BYTES: usize = 256 << 20;
/// Minimum age of a file before caching: a recently changed file may change again without a later
/// modification time.
const MIN_AGE: Duration = Duration::from_secs(2);

/// Returns the fingerprint of a model, 32 hexadecimal digits, from the cache in `folder` where
/// possible.
pub(crate) fn find(gguf: &Gguf, folder: Option<&Path>) -> String {
    let kept = folder.zip(files(gguf)).map(|(folder, files)| (cache_path(folder, &files), files));
    if let Some(known) = kept.as_ref().and_then(|(path, files)| read(path, files)) {
        return known;
    }
    let fingerprint = format!("{:032x}", compute(gguf));
    if let Some((path, files)) = kept
        && files.iter().all(|file| file.is_settled)
    {
        // Without the cache file, it is computed again the next time.
        let _ = store(&path, SavedFingerprint { version: VERSION, files, fingerprint: fingerprint.clone() });
    }
    fingerprint
}

/// Identity of a file whose fingerprint is cached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FileStamp {
    path: PathBuf,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified: u64,
    #[serde(skip)]
    is_settled: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedFingerprint {
    version: u32,
    files: Vec<FileStamp>,
    fingerprint: String,
}

/// Returns the files of a model as they were opened; `None` for a model in memory.
fn files(gguf: &Gguf) -> Option<Vec<FileStamp>> {
    let stamp = |(path, (bytes, modified)): (Option<&Path>, (u64, Option<SystemTime>))| {
        let (path, modified) = (path?.canonicalize().ok()?, modified?);
        let is_settled = modified.elapsed().is_ok_and(|age| age > MIN_AGE);
        let modified = u64::try_from(modified.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()?;
        Some(FileStamp { path, bytes, modified, is_settled })
    };
    gguf.shard_paths().zip(gguf.shard_stamps()).map(stamp).collect()
}

/// Returns the path of the cache file for a model with these files.
fn cache_path(folder: &Path, files: &[FileStamp]) -> PathBuf {
    let name = files.first().map_or(0, |file| xxh3_64(file.path.as_os_str().as_encoded_bytes()));
    folder.join("fingerprints").join(format!("{name:016x}.json"))
}

/// Returns the cached fingerprint of exactly these files. Invalid cache files are ignored.
fn read(path: &Path, files: &[FileStamp]) -> Option<String> {
    let kept: SavedFingerprint = serde_json::from_slice(&kvant_files::read(path).ok()?).ok()?;
    let is_same =
        |(a, b): (&FileStamp, &FileStamp)| (&a.path, a.bytes, a.modified) == (&b.path, b.bytes, b.modified);
    let is_of_these = kept.files.len() == files.len() && kept.files.iter().zip(files).all(is_same);
    let is_sound = kept.fingerprint.len() == 32 && kept.fingerprint.bytes().all(|b| b.is_ascii_hexdigit());
    (kept.version == VERSION && is_of_these && is_sound).then_some(kept.fingerprint)
}

fn store(path: &Path, kept: SavedFingerprint) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    kvant_files::write(path, &serde_json::to_vec_pretty(&kept)?)
}

fn compute(gguf: &Gguf) -> u128 {
    let mut hash = Xxh3::new();
    let mut part = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let mut keys: Vec<_> = gguf.meta().iter().filter(|(key, _)| is_hashed(key)).collect();
    keys.sort_by_key(|(key, _)| *key);
    for (key, value) in keys {
        let mut encoded = value.value_type().id().to_le_bytes().to_vec();
        value.encode(&mut encoded);
        part(key.as_bytes());
        part(&encoded);
    }
    let mut tensors: Vec<_> = gguf.tensors().iter().collect();
    tensors.sort_by_key(|info| &info.name);
    for info in &tensors {
        part(format!("{}:{}:{:?}", info.name, info.dtype.name(), info.shape).as_bytes());
    }
    let mut left = &tensors[..];
    while !left.is_empty() {
        let (some, others) = left.split_at(n_in_batch(left));
        left = others;
        if let [info] = some
            && info.n_bytes > BATCH_BYTES
            && gguf.n_parts(info) > 1
        {
            let parts = (0..gguf.n_parts(info)).map(|index| gguf.part(info, index));
            digests_of_parts(parts, |digest| hash.update(&digest.to_le_bytes()));
            continue;
        }
        let data: Vec<_> = some.iter().map(|info| gguf.data(info)).collect();
        let pieces: Vec<&[u8]> = data.iter().flat_map(|data| data.chunks(PIECE)).collect();
        for digest in digests(&pieces) {
            hash.update(&digest.to_le_bytes());
        }
    }
    // The weights have been copied by now, or are paged in again on access.
    gguf.release();
    hash.digest128()
}

/// Returns how many of `tensors` are hashed at a time, at least one.
fn n_in_batch(tensors: &[&TensorInfo]) -> usize {
    let mut n_bytes = 0;
    let fits = |info: &&&TensorInfo| {
        n_bytes += info.n_bytes;
        n_bytes <= BATCH_BYTES
    };
    tensors.iter().take_while(fits).count().max(1)
}

/// Hashes the pieces of a tensor in parts, a part at a time.
fn digests_of_parts<'a>(parts: impl Iterator<Item = Cow<'a, [u8]>>, mut put: impl FnMut(u128)) {
    let mut piece = Vec::with_capacity(PIECE);
    for part in parts {
        let mut left = &part[..];
        while !left.is_empty() {
            let (some, others) = left.split_at(left.len().min(PIECE - piece.len()));
            piece.extend_from_slice(some);
            left = others;
            if piece.len() == PIECE {
                put(xxh3_128(&piece));
                piece.clear();
            }
        }
    }
    if !piece.is_empty() {
        put(xxh3_128(&piece));
    }
}

/// Returns whether a metadata key affects the model's output.
fn is_hashed(key: &str) -> bool {
    key == "general.architecture" || !(key.starts_with("general.") || key.starts_with("split."))
}

/// Hashes every piece, on all cores.
fn digests(pieces: &[&[u8]]) -> Vec<u128> {
    let digests: Vec<Mutex<u128>> = pieces.iter().map(|_| Mutex::new(0)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|i| *i < pieces.len()) {
            *digests[index].lock().expect("no panic while locked") = xxh3_128(pieces[index]);
        }
    };
    std::thread::scope(|scope| {
        let helpers = std::thread::available_parallelism().map_or(0, |n| n.get() - 1);
        for _ in 0..helpers {
            // Without another thread, the existing ones do its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    digests.into_iter().map(|digest| digest.into_inner().expect("no panic while locked")).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use kvant_gguf::GgufWriter;

    use super::*;
    use crate::bundled::POCKET;

    fn pocket() -> Gguf {
        Gguf::from_bytes(POCKET).unwrap()
    }

    /// The bundled model with a changed key or a changed byte of a tensor.
    pub(crate) fn changed(change: impl FnOnce(&mut GgufWriter), byte: Option<(usize, usize)>) -> Vec<u8> {
        let gguf = pocket();
        let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
        change(&mut writer);
        gguf.tensors().iter().for_each(|t| writer.add_tensor(&t.name, &t.shape, t.dtype).unwrap());
        let mut out = Vec::new();
        let fill = |data: &mut kvant_gguf::TensorSink<'_>| -> Result<(), kvant_gguf::GgufError> {
            for (index, info) in gguf.tensors().iter().enumerate() {
                let mut bytes = gguf.data(info).to_vec();
                if let Some((_, at)) = byte.filter(|(tensor, _)| *tensor == index) {
                    bytes[at] ^= 1;
                }
                data.bytes(&info.name, &bytes)?;
            }
            Ok(())
        };
        writer.write_to(&mut out, fill).unwrap();
        out
    }

    fn of(bytes: Vec<u8>) -> String {
        find(&Gguf::from_bytes(bytes).unwrap(), None)
    }

    #[test]
    fn the_fingerprint_covers_the_model_but_not_its_description() {
        let fingerprint = find(&pocket(), None);
        assert_eq!(fingerprint.len(), 32);
        assert_eq!(of(changed(|_| (), None)), fingerprint, "written anew");
        assert_eq!(of(changed(|w| w.set("general.name", "another").unwrap(), None)), fingerprint);
        // The middle of the largest tensor, far from both its ends.
        let gguf = pocket();
        let sizes = gguf.tensors().iter().map(|info| info.n_bytes).enumerate();
        let (index, n_bytes) = sizes.max_by_key(|(_, n)| *n).unwrap();
        assert!(n_bytes > 4 * 8192);
        let architecture = gguf.meta().get::<&str>("general.architecture").unwrap();
        let eps = format!("{architecture}.attention.layer_norm_rms_epsilon");
        assert!(gguf.meta().get::<f32>(&eps).unwrap() != 2e-6);
        let others = [
            changed(|_| (), Some((index, n_bytes / 2))),
            changed(|_| (), Some((0, 0))),
            changed(|w| w.set(&eps, 2e-6f32).unwrap(), None),
            changed(|w| w.set("tokenizer.chat_template", "{{ messages }}").unwrap(), None),
            changed(|w| w.set("tokenizer.ggml.eos_token_id", 1u32).unwrap(), None),
        ];
        let mut all: Vec<String> = others.into_iter().map(of).collect();
        all.push(fingerprint);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn cached_fingerprints_are_valid_for_unchanged_files_only() {
        let folder = std::env::temp_dir().join(format!("kvant-fingerprint-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let (path, cache) = (folder.join("model.gguf"), Some(folder.as_path()));
        let write = |bytes: &[u8], seconds: u64| {
            std::fs::write(&path, bytes).unwrap();
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
            Gguf::open(&path).unwrap()
        };
        let gguf = write(POCKET, 1000);
        let (right, place) = (find(&gguf, cache), cache_path(&folder, &files(&gguf).unwrap()));
        assert_eq!(find(&pocket(), None), right);
        // The cached value is trusted.
        let kept = std::fs::read_to_string(&place).unwrap();
        let forged = "0123456789abcdef0123456789abcdef";
        std::fs::write(&place, kept.replace(&right, forged)).unwrap();
        assert_eq!(find(&gguf, cache), forged);
        // But not for a file that has changed since.
        assert_eq!(find(&write(POCKET, 2000), cache), right);
        let other = changed(|w| w.set("x", 1u8).unwrap(), None);
        assert_ne!(find(&write(&other, 2000), cache), right);
        let gguf = write(POCKET, 1000);
        let (short, newer) = (kept.replace(&right, "short"), kept.replace("version\": ", "version\": 9"));
        for foreign in ["", "{", "[]", short.as_str(), newer.as_str()] {
            std::fs::write(&place, foreign).unwrap();
            assert_eq!(find(&gguf, cache), right, "{foreign}");
            assert_eq!(std::fs::read_to_string(&place).unwrap(), kept, "it is made anew");
        }
        // Without a writable cache, it is computed all the same.
        std::fs::remove_file(&place).unwrap();
        std::fs::create_dir(&place).unwrap();
        assert_eq!(find(&gguf, cache), right);
        assert_eq!(find(&gguf, Some(&path)), right);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn parts_have_the_digests_of_the_whole() {
        let whole: Vec<u8> = (0..2 * PIECE + 7).map(|i| (i / 3) as u8).collect();
        let pieces: Vec<&[u8]> = whole.chunks(PIECE).collect();
        for n in [5, PIECE - 1, PIECE, PIECE + 1, whole.len()] {
            let mut got = Vec::new();
            let (first, second) = whole.split_at(n);
            let parts = [first, second].map(Cow::Borrowed);
            digests_of_parts(parts.into_iter(), |digest| got.push(digest));
            assert_eq!(got, digests(&pieces), "{n}");
        }
    }

    #[test]
    fn fingerprints_of_recently_changed_files_are_not_cached() {
        let folder = std::env::temp_dir().join(format!("kvant-fingerprint-new-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("model.gguf");
        std::fs::write(&path, POCKET).unwrap();
        find(&Gguf::open(&path).unwrap(), Some(&folder));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
