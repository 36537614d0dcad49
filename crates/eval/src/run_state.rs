//! A run that can be taken up again: a file of one line per finished step.
//!
//! The first line says what is measured; a file of another run is refused. Each further line is the result of a
//! step, as JSON. A line counts when it is whole: what a kill left unfinished is cut off and measured again. Numbers
//! come back as they were, to the last bit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::EvalError;

/// The results of the steps of a run so far, kept in a file when one is given.
pub(crate) struct RunState<T> {
    file: Option<(PathBuf, File)>,
    results: PhantomData<T>,
}

impl<T: Serialize + DeserializeOwned> RunState<T> {
    /// Opens the state of the run that `what` describes, or begins it. Returns the results that are there.
    pub fn open(path: Option<&Path>, what: &impl Serialize) -> Result<(Self, Vec<T>), EvalError> {
        let Some(path) = path else { return Ok((Self { file: None, results: PhantomData }, Vec::new())) };
        let io = EvalError::io;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(io(path))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(io(path))?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let head = serde_json::to_vec(what).expect("a description becomes JSON");
        let results = match lines.next() {
            None if text.is_empty() => {
                append(&mut file, &head).map_err(io(path))?;
                return Ok((Self::of(path, file), Vec::new()));
            }
            Some(line) if line == head => lines.map(serde_json::from_slice).collect::<Result<Vec<T>, _>>(),
            _ => return Err(EvalError::file(path, another_run(&text, &head))),
        };
        let results =
            results.map_err(|error| EvalError::file(path, format!("corrupt run state: {error}")))?;
        file.set_len(whole as u64).map_err(io(path))?;
        file.seek(SeekFrom::End(0)).map_err(io(path))?;
        Ok((Self::of(path, file), results))
    }

    fn of(path: &Path, file: File) -> Self {
        Self { file: Some((path.to_owned(), file)), results: PhantomData }
    }

    /// Adds the result of a step.
    pub fn push(&mut self, result: &T) -> Result<(), EvalError> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let line = serde_json::to_vec(result).expect("a result becomes JSON");
        append(file, &line).map_err(EvalError::io(path))
    }
}

fn append(file: &mut File, line: &[u8]) -> io::Result<()> {
    let mut line = line.to_vec();
    line.push(b'\n');
    file.write_all(&line)?;
    file.sync_data()
}

/// Names the first field in which the run of a state file differs from the one that is wanted.
fn another_run(text: &[u8], wanted: &[u8]) -> String {
    let parse = |line: &[u8]| serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line).ok();
    let first = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let (Some(found), Some(wanted)) = (parse(first), parse(wanted)) else {
        return "not the state of a run".to_owned();
    };
    let field = wanted.iter().find(|(name, value)| found.get(*name) != Some(value));
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
    use serde_json::json;

    use super::*;

    #[test]
    fn results_come_back_bit_for_bit_and_a_torn_line_is_dropped() {
        let path = std::env::temp_dir().join(format!("kvant-state-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let what = json!({"model": "m", "n_ctx": 512});
        let values = [0.1 + 0.2, 1e-300, f64::MAX, -0.0];
        let (mut state, old) = RunState::<f64>::open(Some(&path), &what).unwrap();
        assert!(old.is_empty());
        values.iter().for_each(|value| state.push(value).unwrap());
        drop(state);
        let torn = [&std::fs::read(&path).unwrap()[..], b"0.12"].concat();
        std::fs::write(&path, torn).unwrap();
        let (mut state, old) = RunState::<f64>::open(Some(&path), &what).unwrap();
        assert_eq!(old.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values.map(f64::to_bits));
        state.push(&7.0).unwrap();
        drop(state);
        assert_eq!(RunState::<f64>::open(Some(&path), &what).unwrap().1[4], 7.0);

        let other = json!({"model": "m", "n_ctx": 256});
        let error = RunState::<f64>::open(Some(&path), &other).err().unwrap().to_string();
        assert!(error.contains("n_ctx: expected 256, got 512"), "{error}");
        std::fs::write(&path, "some text\n").unwrap();
        assert!(RunState::<f64>::open(Some(&path), &what).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"some text\n");
        std::fs::remove_file(&path).unwrap();
    }
}
