//! State of a resumable run: a file of one line per finished step.
//!
//! The first line describes the measurement; a file of another run is rejected. Each further line
//! is the result of a step, as JSON. Each line starts with its checksum: 16 hexadecimal digits,
//! XXH3-64 of the line and, for all but the first, of the checksum before it, so that a changed,
//! moved or removed line is detected. Only whole lines count: an unfinished last line of a killed
//! run is truncated and measured again. Numbers are restored exactly, to the last bit.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use kvant::files;
use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::EvalError;

/// Hexadecimal digits of a checksum.
const DIGITS: usize = 16;

/// The results of a run's steps so far, stored in a file when one is given.
pub(crate) struct RunState<T> {
    file: Option<StateFile>,
    results: PhantomData<T>,
}

/// The file, and the checksum of its last line.
struct StateFile {
    path: PathBuf,
    file: File,
    last: u64,
}

impl<T: Serialize + DeserializeOwned> RunState<T> {
    /// Opens the state of the run that `what` describes, or creates it. Returns the stored results.
    /// Without a file, `what` is not called.
    pub fn open<W: Serialize>(
        path: Option<&Path>,
        what: impl FnOnce() -> W,
    ) -> Result<(Self, Vec<T>), EvalError> {
        let Some(path) = path else { return Ok((Self { file: None, results: PhantomData }, Vec::new())) };
        let io = EvalError::io;
        let what = serde_json::to_vec(&what()).expect("a description becomes JSON");
        let mut file = files::open_for_update(path).map_err(io(path))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(io(path))?;
        let end_of_lines = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let lines = lines(&text[..end_of_lines]).map_err(|what| EvalError::file(path, what))?;
        let mut results = Vec::new();
        match lines.split_first() {
            // A file of another program, unless it is an unfinished first line of this run.
            None if !text.is_empty() && !line(0, &what).starts_with(&text) => {
                return Err(EvalError::file(path, "not the state of a run"));
            }
            None => {}
            Some((head, _)) if *head != what => {
                return Err(EvalError::file(path, another_run(head, &what)));
            }
            Some((_, rest)) => {
                let parsed = rest.iter().map(|line| serde_json::from_slice(line)).collect::<Result<_, _>>();
                results =
                    parsed.map_err(|error| EvalError::file(path, format!("corrupt run state: {error}")))?;
            }
        }
        let last = lines.iter().fold(0, |last, line| checksum(last, line));
        file.set_len(end_of_lines as u64).map_err(io(path))?;
        file.seek(SeekFrom::End(0)).map_err(io(path))?;
        let mut file = StateFile { path: path.to_owned(), file, last };
        if lines.is_empty() {
            file.append(&what)?;
        }
        Ok((Self { file: Some(file), results: PhantomData }, results))
    }

    /// Adds the result of a step.
    pub fn push(&mut self, result: &T) -> Result<(), EvalError> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.append(&serde_json::to_vec(result).expect("a result becomes JSON"))
    }
}

impl StateFile {
    fn append(&mut self, text: &[u8]) -> Result<(), EvalError> {
        let written = self.file.write_all(&line(self.last, text)).and_then(|()| self.file.sync_data());
        written.map_err(EvalError::io(&self.path))?;
        self.last = checksum(self.last, text);
        Ok(())
    }
}

/// Returns the checksum of a line after one with the checksum `last`.
fn checksum(last: u64, text: &[u8]) -> u64 {
    xxh3_64_with_seed(text, last)
}

/// Returns a line in file format.
fn line(last: u64, text: &[u8]) -> Vec<u8> {
    [format!("{:0DIGITS$x} ", checksum(last, text)).as_bytes(), text, b"\n"].concat()
}

/// Returns the whole lines without their checksums, which must be correct.
fn lines(text: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut lines: Vec<&[u8]> = Vec::new();
    let mut last = 0;
    for (index, whole) in text.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let Some(rest) = whole.get(DIGITS + 1..whole.len() - 1).filter(|rest| line(last, rest) == whole)
        else {
            return Err(match index {
                0 => "not the state of a run, or one of an older version".to_owned(),
                _ => format!("corrupt run state: the checksum of line {}", index + 1),
            });
        };
        last = checksum(last, rest);
        lines.push(rest);
    }
    Ok(lines)
}

/// Names the first field in which the run of a state file differs from the requested one.
fn another_run(found: &[u8], expected: &[u8]) -> String {
    let parse = |line: &[u8]| serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line).ok();
    let (Some(found), Some(expected)) = (parse(found), parse(expected)) else {
        return "not the state of a run".to_owned();
    };
    let field = expected.iter().find(|(name, value)| found.get(*name) != Some(value));
    match field {
        Some((name, value)) => {
            let got = found.get(name).map_or("nothing".to_owned(), |got| got.to_string());
            format!("the state of another run: {name}: expected {value}, got {got}")
        }
        None => "the state of another run".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::random::Random;
    use serde_json::{Value, json};

    use super::*;

    fn file(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kvant-state-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    fn open(path: &Path, what: &Value) -> Result<(RunState<f64>, Vec<f64>), EvalError> {
        RunState::open(Some(path), || what)
    }

    #[test]
    fn results_are_restored_exactly_and_torn_lines_dropped() {
        let path = file("torn");
        let what = json!({"model": "m", "n_ctx": 512});
        let values = [0.1 + 0.2, 1e-300, f64::MAX, -0.0];
        let (mut state, old) = open(&path, &what).unwrap();
        assert!(old.is_empty());
        values.iter().for_each(|value| state.push(value).unwrap());
        drop(state);
        let torn = [&std::fs::read(&path).unwrap()[..], b"0.12"].concat();
        std::fs::write(&path, torn).unwrap();
        let (mut state, old) = open(&path, &what).unwrap();
        assert_eq!(old.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values.map(f64::to_bits));
        state.push(&7.0).unwrap();
        drop(state);
        assert_eq!(open(&path, &what).unwrap().1[4], 7.0);

        let error = open(&path, &json!({"model": "m", "n_ctx": 256})).err().unwrap().to_string();
        assert!(error.contains("n_ctx: expected 256, got 512"), "{error}");
        for foreign in ["some text\n", "some text", "{\"measure\":\"ppl\",\"version\":1}\n[1.0]\n"] {
            std::fs::write(&path, foreign).unwrap();
            let error = open(&path, &what).err().unwrap().to_string();
            assert!(error.contains("not the state of a run"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), foreign.as_bytes(), "a foreign file stays as it is");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn without_a_file_the_description_is_not_evaluated() {
        let (mut state, old) =
            RunState::<f64>::open(None, || -> Value { panic!("it reads a whole model") }).unwrap();
        state.push(&1.0).unwrap();
        assert!(old.is_empty());
    }

    /// Flips every bit of a small file, and makes a thousand heavier changes: each is rejected, or
    /// a prefix of the written results remains.
    #[test]
    fn changed_states_are_rejected_or_a_prefix_of_the_original() {
        let path = file("flips");
        let what = json!({"measure": "ppl", "model": "0123456789abcdef", "n_ctx": 512});
        let values: Vec<f64> = (0..6).map(|i| f64::from(i).sqrt()).collect();
        let (mut state, _) = open(&path, &what).unwrap();
        values.iter().for_each(|value| state.push(value).unwrap());
        let whole = std::fs::read(&path).unwrap();
        let mut refused = 0;
        let mut check = |bytes: &[u8], how: &str| {
            std::fs::write(&path, bytes).unwrap();
            match open(&path, &what) {
                Err(error) => {
                    assert!(!error.to_string().contains('\n'), "{how}: {error}");
                    assert_eq!(std::fs::read(&path).unwrap(), bytes, "{how}: a refused file stays as it is");
                    refused += 1;
                }
                Ok((_, found)) => assert!(values.starts_with(&found), "{how}: {found:?}"),
            }
        };
        for bit in 0..8 * whole.len() {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            check(&bytes, &format!("bit {bit}"));
        }
        for len in 0..whole.len() {
            check(&whole[..len], &format!("cut to {len}"));
        }
        let mut random = Random::new(22);
        let mut below = |n: usize| (random.bits() % n as u64) as usize;
        for round in 0..1000 {
            let mut bytes = whole.clone();
            let (at, to) = (below(whole.len()), below(whole.len()));
            let len = below(whole.len() - at.max(to));
            match below(3) {
                0 => bytes.copy_within(at..at + len, to),
                1 => drop(bytes.drain(at..at + len)),
                _ => drop(bytes.splice(to..to, whole[at..at + len].to_vec())),
            }
            check(&bytes, &format!("round {round}"));
        }
        // A flip in the last line end leaves an unfinished line; nearly all others are detected.
        assert!(refused > 8 * whole.len() - 9, "{refused}");
        std::fs::remove_file(&path).unwrap();
    }
}
