//! Folders as `transformers` saves them, built from the fixtures.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::{DType, Gguf};
use serde_json::{Map, Value, json};

/// A folder of one test, removed on drop.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvant-hf-{name}-{}-{next}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tensor of a safetensors file.
pub struct Saved {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Value,
    pub bytes: Vec<u8>,
}

pub fn names() -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/folders");
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> =
        files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    assert!(names.len() >= 35, "only {} folders", names.len());
    names
}

pub fn fixture(name: &str) -> Gguf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(dir.join(format!("{name}.gguf"))).unwrap()
}

/// Returns what `transformers` saves of a model: its configuration, and its tensors with the values
/// of the fixture.
pub fn saved(name: &str) -> (Value, Vec<Saved>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/folders");
    saved_in(&dir.join(format!("{name}.json")), &fixture(name))
}

/// Returns what is described in a file, with the values of `gguf`.
pub fn saved_in(described: &Path, gguf: &Gguf) -> (Value, Vec<Saved>) {
    let described: Value = serde_json::from_slice(&fs::read(described).unwrap()).unwrap();
    let tensors = described["tensors"].as_array().unwrap().iter().map(|tensor| {
        let shape: Vec<usize> = numbers(&tensor["shape"]);
        let saved = |dtype, bytes| Saved {
            name: tensor["name"].as_str().unwrap().to_owned(),
            dtype,
            shape: tensor["shape"].clone(),
            bytes,
        };
        let integers = || tensor["values"].as_array().unwrap().iter().map(|value| value.as_i64().unwrap());
        match tensor["dtype"].as_str() {
            None => {}
            Some("BOOL") => return saved("BOOL", integers().map(|flag| flag as u8).collect()),
            Some("I64") => return saved("I64", integers().flat_map(i64::to_le_bytes).collect()),
            Some(other) => panic!("{other}"),
        }
        let (dtype, bytes) = match (&tensor["values"], &tensor["from"]) {
            (Value::Array(values), _) => {
                let value = |value: &Value| (value.as_f64().unwrap() as f32).to_le_bytes();
                (DType::F32, values.iter().flat_map(value).collect())
            }
            (_, Value::Array(places)) => scattered(gguf, tensor, places, &shape),
            (_, place) => rows_of(gguf, tensor, place.as_str().unwrap(), &shape),
        };
        saved(if dtype == DType::F32 { "F32" } else { "F16" }, bytes)
    });
    (described["config"].clone(), tensors.collect())
}

fn numbers(list: &Value) -> Vec<usize> {
    list.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
}

/// Returns values stored in one tensor of the fixture, row by row.
fn rows_of(gguf: &Gguf, tensor: &Value, from: &str, shape: &[usize]) -> (DType, Vec<u8>) {
    let view = gguf.tensor(from).unwrap();
    // The rows of a vector are single values.
    let row_len = if view.info.shape.len() == 1 { 1 } else { view.info.row_len() };
    let row_bytes = view.info.dtype.row_bytes(row_len).unwrap();
    let rows: Vec<usize> = match &tensor["rows"] {
        Value::Array(_) => numbers(&tensor["rows"]),
        first => {
            let n = shape.iter().product::<usize>() / row_len;
            (0..n).map(|row| first.as_u64().unwrap() as usize + row).collect()
        }
    };
    let rows = rows.iter().flat_map(|row| &view.bytes[row * row_bytes..(row + 1) * row_bytes]);
    let mut bytes: Vec<u8> = rows.copied().collect();
    if let Some(minus) = tensor["minus"].as_f64() {
        for value in bytes.chunks_exact_mut(4) {
            let less = f32::from_le_bytes((&*value).try_into().unwrap()) - minus as f32;
            value.copy_from_slice(&less.to_le_bytes());
        }
    }
    (view.info.dtype, bytes)
}

/// Transposes consecutive matrices of `rows` rows.
pub fn swapped(bytes: &[u8], rows: usize, row_len: usize, size: usize) -> Vec<u8> {
    let turn = |matrix: &[u8]| -> Vec<u8> {
        let value = |row: usize, at: usize| &matrix[(row * row_len + at) * size..][..size];
        (0..row_len).flat_map(|at| (0..rows).flat_map(move |row| value(row, at).to_vec())).collect()
    };
    bytes.chunks_exact(rows * row_len * size).flat_map(turn).collect()
}

/// Returns values spread over several tensors, or over their columns.
fn scattered(gguf: &Gguf, tensor: &Value, places: &[Value], shape: &[usize]) -> (DType, Vec<u8>) {
    let mut dtype = DType::F32;
    let places: Vec<(Vec<u8>, usize)> = places
        .iter()
        .map(|place| {
            let (name, way) =
                place.as_str().unwrap().split_once('^').unwrap_or((place.as_str().unwrap(), ""));
            let view = gguf.tensor(name).unwrap();
            dtype = view.info.dtype;
            let size = dtype.block_bytes();
            let (row_len, rows) = (view.info.row_len(), view.info.shape.get(1).copied().unwrap_or(1));
            match way {
                "T" => (swapped(&view.bytes, rows, row_len, size), rows * size),
                "1" => (view.bytes.to_vec(), size),
                _ => (view.bytes.to_vec(), row_len * size),
            }
        })
        .collect();
    let row = |pair: &Value| {
        let [place, row] = numbers(pair)[..] else { panic!("{pair}") };
        let (bytes, row_bytes) = &places[place];
        bytes[row * row_bytes..(row + 1) * row_bytes].to_vec()
    };
    let bytes: Vec<u8> = tensor["rows"].as_array().unwrap().iter().flat_map(row).collect();
    match tensor["transposed"].as_bool() {
        Some(true) => {
            let [.., rows, row_len] = shape else { panic!("{shape:?}") };
            (dtype, swapped(&bytes, *row_len, *rows, dtype.block_bytes()))
        }
        _ => (dtype, bytes),
    }
}

pub fn write_safetensors(path: &Path, tensors: &[Saved]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for Saved { name, dtype, shape, bytes } in tensors {
        let begin = data.len();
        data.extend(bytes);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    let header = Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

/// Writes a folder with its weights in one file.
pub fn write_folder(dir: &Path, config: &Value, tensors: &[Saved]) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    write_safetensors(&dir.join("model.safetensors"), tensors);
}
