//! Importance matrices: how large the inputs of each column of a model's matrices are.
//!
//! An error of a weight counts as much as the input that it is multiplied with; so the mean square
//! of each input, over a calibration text, tells an encoder where to be exact
//! ([`kvant_codec::encode_weighted`]). The file is that of `llama-imatrix`: GGUF with two f32
//! tensors for each matrix, `NAME.in_sum2` `[n_in, n_matrices]`, the sums of the squares, and
//! `NAME.counts`
//! `[1, n_matrices]`, the number of inputs.

use std::collections::BTreeMap;
use std::path::Path;

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, TensorInfo, TensorView, printable_path};

use crate::error::QuantizeError;

const TYPE_KEY: &str = "general.type";
const TYPE: &str = "imatrix";
const DATASETS: &str = "imatrix.datasets";
const CHUNK_COUNT: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// The importance of the columns of a model's matrices.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ImportanceMatrix {
    tensors: BTreeMap<String, InputSums>,
    /// Names of the calibration texts.
    pub datasets: Vec<String>,
    /// Tokens per chunk of the texts.
    pub chunk_size: u32,
    /// Chunks in all texts.
    pub chunk_count: u32,
}

/// The inputs of the matrices of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct InputSums {
    /// The squares of all inputs, summed by column, `[n_matrices, n_in]`.
    pub sums: Vec<f32>,
    /// Number of inputs of each matrix, `[n_matrices]`.
    pub counts: Vec<f32>,
}

impl ImportanceMatrix {
    /// Creates one that covers no tensor yet, for texts in chunks of `chunk_size` tokens.
    pub fn new(chunk_size: u32) -> Self {
        Self { chunk_size, ..Self::default() }
    }

    /// Reads a file of `llama-imatrix` or [`ImportanceMatrix::write`].
    ///
    /// # Errors
    /// A file that is not GGUF, or not an importance matrix: a tensor that is missing, has another
    /// size than its twin, or holds a number that is not finite or below 0.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, QuantizeError> {
        let path = path.as_ref();
        let gguf = Gguf::open(path)?;
        Self::from_gguf(&gguf).map_err(|got| QuantizeError::Importance { path: printable_path(path), got })
    }

    fn from_gguf(gguf: &Gguf) -> Result<Self, String> {
        let text = |error: GgufError| error.to_string();
        let meta = gguf.meta();
        let kind = meta.find::<&str>(TYPE_KEY).map_err(text)?;
        if kind != Some(TYPE) {
            return Err(format!("{TYPE_KEY} is {}", kind.unwrap_or("missing")));
        }
        let mut tensors = BTreeMap::new();
        for info in gguf.tensors() {
            let Some(name) = info.name.strip_suffix(SUMS) else {
                match info.name.strip_suffix(COUNTS).and_then(|name| gguf.find_info(&format!("{name}{SUMS}")))
                {
                    Some(_) => continue,
                    None => return Err(format!("tensor '{}', which is no part of one", info.name)),
                }
            };
            let counts = format!("{name}{COUNTS}");
            let counts = gguf.tensor(&counts).map_err(text)?;
            let of = InputSums {
                sums: numbers(&gguf.tensor(&info.name).map_err(text)?)?,
                counts: numbers(&counts)?,
            };
            // One count for all experts, as older programs wrote.
            let n = info.elements() / info.row_len();
            let counts = if of.counts.len() == 1 { vec![of.counts[0]; n] } else { of.counts };
            if counts.len() != n {
                return Err(format!("'{name}' with sums of {n} matrices and counts of {}", counts.len()));
            }
            tensors.insert(name.to_owned(), InputSums { sums: of.sums, counts });
        }
        let datasets = meta.find::<Vec<&str>>(DATASETS).map_err(text)?;
        Ok(Self {
            tensors,
            datasets: datasets.unwrap_or_default().into_iter().map(str::to_owned).collect(),
            chunk_size: meta.find(CHUNK_SIZE).map_err(text)?.unwrap_or_default(),
            chunk_count: meta.find(CHUNK_COUNT).map_err(text)?.unwrap_or_default(),
        })
    }

    /// Writes the file; replaces one at `path` atomically.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), QuantizeError> {
        let mut writer = GgufWriter::new();
        writer.set(TYPE_KEY, TYPE)?;
        writer.set_array(DATASETS, self.datasets.iter().map(String::as_str))?;
        writer.set(CHUNK_COUNT, self.chunk_count)?;
        writer.set(CHUNK_SIZE, self.chunk_size)?;
        for (name, InputSums { sums, counts }) in &self.tensors {
            let n = counts.len();
            writer.add_tensor(&format!("{name}{SUMS}"), &[sums.len() / n, n], DType::F32)?;
            writer.add_tensor(&format!("{name}{COUNTS}"), &[1, n], DType::F32)?;
        }
        writer.save(path, |sink| {
            let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
            for (name, InputSums { sums, counts }) in &self.tensors {
                sink.bytes(&format!("{name}{SUMS}"), &bytes(sums))?;
                sink.bytes(&format!("{name}{COUNTS}"), &bytes(counts))?;
            }
            Ok(())
        })
    }

    /// Adds the inputs of a tensor's matrices.
    ///
    /// # Errors
    /// Sums of another size than those that it has, or not a row for each count.
    pub fn add(&mut self, tensor: &str, inputs: InputSums) -> Result<(), QuantizeError> {
        let InputSums { sums, counts } = inputs;
        let fail = |expected: String| QuantizeError::Setting {
            name: "importance",
            expected: format!("{expected} for '{tensor}'"),
            got: format!("{} sums of {} matrices", sums.len(), counts.len()),
        };
        if counts.is_empty() || sums.is_empty() || sums.len() % counts.len() != 0 {
            return Err(fail("as many sums for each matrix".to_owned()));
        }
        let Some(own) = self.tensors.get_mut(tensor) else {
            self.tensors.insert(tensor.to_owned(), InputSums { sums, counts });
            return Ok(());
        };
        if [own.sums.len(), own.counts.len()] != [sums.len(), counts.len()] {
            return Err(fail(format!("{} sums of {} matrices", own.sums.len(), own.counts.len())));
        }
        own.sums.iter_mut().zip(sums).for_each(|(own, sum)| *own += sum);
        own.counts.iter_mut().zip(counts).for_each(|(own, count)| *own += count);
        Ok(())
    }

    /// Adds the inputs of another text.
    ///
    /// # Errors
    /// A matrix of another model: see [`ImportanceMatrix::add`].
    pub fn merge(&mut self, other: Self) -> Result<(), QuantizeError> {
        for (name, inputs) in other.tensors {
            self.add(&name, inputs)?;
        }
        self.datasets.extend(other.datasets);
        self.chunk_count += other.chunk_count;
        Ok(())
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Returns whether it has no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns the mean squares of the inputs of a tensor, `[n_matrices, n_in]`: 1 for a matrix
    /// without inputs (an expert that no token was routed to). `None` for an unknown tensor.
    ///
    /// # Errors
    /// A tensor of another size.
    pub(crate) fn mean_squares(&self, info: &TensorInfo) -> Result<Option<Vec<f32>>, QuantizeError> {
        let Some(InputSums { sums, counts }) = self.tensors.get(&info.name) else { return Ok(None) };
        let (n_in, n) = (info.row_len(), info.shape.get(2).copied().unwrap_or(1));
        if [sums.len(), counts.len()] != [n_in * n, n] {
            return Err(QuantizeError::Setting {
                name: "importance",
                expected: format!("{n_in} columns of {n} matrices for '{}'", info.name),
                got: format!("{} columns of {}", sums.len() / counts.len(), counts.len()),
            });
        }
        let of_matrix = |(sums, count): (&[f32], &f32)| -> Vec<f32> {
            sums.iter().map(|sum| if *count > 0.0 { sum / count } else { 1.0 }).collect()
        };
        Ok(Some(sums.chunks_exact(n_in).zip(counts).flat_map(of_matrix).collect()))
    }
}

/// Returns the values of an f32 tensor, all of them finite and at least 0.
fn numbers(tensor: &TensorView<'_>) -> Result<Vec<f32>, String> {
    let name = &tensor.info.name;
    if tensor.info.dtype != DType::F32 {
        return Err(format!("'{name}' in {}", tensor.info.dtype));
    }
    let values: Vec<f32> =
        tensor.bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    match values.iter().find(|value| !(value.is_finite() && **value >= 0.0)) {
        Some(value) => Err(format!("'{name}' with {value}")),
        None => Ok(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("kvant-importance-{name}-{}.gguf", std::process::id()))
    }

    fn sums(sums: &[f32], counts: &[f32]) -> InputSums {
        InputSums { sums: sums.to_vec(), counts: counts.to_vec() }
    }

    fn matrix() -> ImportanceMatrix {
        let mut matrix = ImportanceMatrix {
            datasets: vec!["a.txt".to_owned()],
            chunk_size: 512,
            chunk_count: 3,
            ..ImportanceMatrix::default()
        };
        matrix.add("blk.0.ffn_up.weight", sums(&[2.0, 4.0], &[2.0])).unwrap();
        matrix.add("blk.0.ffn_up_exps.weight", sums(&[3.0, 6.0, 0.0, 0.0], &[3.0, 0.0])).unwrap();
        matrix
    }

    /// The record of a tensor of this shape.
    fn info(name: &str, shape: &[usize]) -> TensorInfo {
        let mut writer = GgufWriter::new();
        writer.add_tensor(name, shape, DType::F32).unwrap();
        let mut bytes = Vec::new();
        let zeros = vec![0; 4 * shape.iter().product::<usize>()];
        writer.write_to::<GgufError>(&mut bytes, |sink| sink.bytes(name, &zeros)).unwrap();
        Gguf::from_bytes(bytes).unwrap().tensors()[0].clone()
    }

    #[test]
    fn files_round_trip_and_texts_add_up() {
        let path = path("round");
        let mut all = matrix();
        all.write(&path).unwrap();
        let read = ImportanceMatrix::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(read, all);
        all.merge(read).unwrap();
        assert_eq!(
            (all.len(), all.chunk_count, &all.datasets[..]),
            (2, 6, &["a.txt"; 2].map(str::to_owned)[..])
        );
        assert_eq!(all.tensors["blk.0.ffn_up.weight"], sums(&[4.0, 8.0], &[4.0]));
    }

    #[test]
    fn importance_is_the_mean_square_of_each_column() {
        let of = |name: &str, shape: &[usize]| matrix().mean_squares(&info(name, shape));
        assert_eq!(of("blk.0.ffn_up.weight", &[2, 5]).unwrap(), Some(vec![1.0, 2.0]));
        assert_eq!(of("blk.0.ffn_up_exps.weight", &[2, 5, 2]).unwrap(), Some(vec![1.0, 2.0, 1.0, 1.0]));
        assert_eq!(of("output.weight", &[2, 5]).unwrap(), None);
        let refused = of("blk.0.ffn_up.weight", &[3, 5]).unwrap_err().to_string();
        assert_eq!(
            refused,
            "importance: expected 3 columns of 1 matrices for 'blk.0.ffn_up.weight', got 2 columns of 1"
        );
        let other = matrix().add("blk.0.ffn_up.weight", sums(&[1.0; 3], &[1.0])).unwrap_err().to_string();
        assert!(other.ends_with("got 3 sums of 1 matrices"), "{other}");
    }

    #[test]
    fn files_that_are_no_importance_matrix_say_why() {
        let refused = |is_one: bool, tensors: &[(&str, &[f32])]| {
            let (mut writer, path) = (GgufWriter::new(), path("bad"));
            if is_one {
                writer.set(TYPE_KEY, TYPE).unwrap();
            }
            for (name, values) in tensors {
                writer.add_tensor(name, &[values.len()], DType::F32).unwrap();
            }
            let of = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
            let fill = |sink: &mut kvant_gguf::TensorSink<'_>| {
                tensors.iter().try_for_each(|(name, values)| sink.bytes(name, &of(values)))
            };
            writer.save::<GgufError>(&path, fill).unwrap();
            let error = ImportanceMatrix::read(&path).unwrap_err().to_string();
            std::fs::remove_file(path).unwrap();
            error
        };
        let one = ("x.counts", &[1.0][..]);
        assert!(refused(false, &[]).ends_with("got general.type is missing"));
        for (tensors, got) in [
            (&[("x.in_sum2", &[1.0, f32::NAN][..]), one][..], "got 'x.in_sum2' with NaN"),
            (&[("x.in_sum2", &[-1.0]), one], "got 'x.in_sum2' with -1"),
            (
                &[("x.in_sum2", &[1.0]), ("x.counts", &[1.0, 2.0])],
                "got 'x' with sums of 1 matrices and counts of 2",
            ),
            (&[one], "got tensor 'x.counts', which is no part of one"),
            (&[("x.weight", &[1.0])], "got tensor 'x.weight', which is no part of one"),
        ] {
            let error = refused(true, tensors);
            assert!(error.ends_with(got), "{error}");
        }
        let error = refused(true, &[("x.in_sum2", &[1.0])]);
        assert!(error.contains("x.counts"), "{error}");
    }
}
