//! Virtual GGUF files, whose tensors are stored elsewhere.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, LoadOnlyType, SourceFile, TensorSink, TensorSource};

/// Three tensors: one in memory, in two parts, one computed on each call, and integers.
struct Elsewhere {
    bytes: Vec<u8>,
    n_released: Arc<AtomicUsize>,
}

impl TensorSource for Elsewhere {
    fn data(&self, name: &str) -> Cow<'_, [u8]> {
        match name {
            "a" => Cow::Borrowed(&self.bytes),
            "c" => Cow::Owned([7i32, -3].map(i32::to_le_bytes).concat()),
            _ => Cow::Owned(vec![7; 12]),
        }
    }

    fn n_parts(&self, name: &str) -> usize {
        if name == "a" { 2 } else { 1 }
    }

    fn part(&self, name: &str, index: usize) -> Cow<'_, [u8]> {
        assert_eq!(name, "a");
        Cow::Borrowed(if index == 0 { &self.bytes[..12] } else { &self.bytes[12..] })
    }

    fn release(&self) {
        self.n_released.fetch_add(1, Ordering::Relaxed);
    }
}

fn writer() -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.add_tensor("b", &[3], DType::F32).unwrap();
    writer.add_tensor("a", &[2, 5], DType::F16).unwrap();
    writer.add_packed("c", &[2], LoadOnlyType::I32).unwrap();
    writer
}

fn described(writer: &GgufWriter, n_released: &Arc<AtomicUsize>) -> Result<Gguf, GgufError> {
    let file = |name: &str, n_bytes| SourceFile { path: PathBuf::from(name), n_bytes, modified: None };
    let files = vec![file("place/weights", 40), file("place/config", 2)];
    let source = Elsewhere { bytes: (0..20).collect(), n_released: Arc::clone(n_released) };
    Gguf::from_virtual(writer, Path::new("place"), files, Box::new(source))
}

#[test]
fn a_virtual_file_equals_the_file_it_describes() {
    let (writer, n_released) = (writer(), Arc::default());
    let gguf = described(&writer, &n_released).unwrap();
    let mut bytes = Vec::new();
    let fill = |data: &mut TensorSink<'_>| {
        gguf.tensors().iter().try_for_each(|info| data.bytes(&info.name, &gguf.stored_data(info)))
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    let file = Gguf::from_bytes(bytes).unwrap();
    assert_eq!(gguf.tensors(), file.tensors());
    assert!(gguf.tensors().iter().all(|info| gguf.data(info) == file.data(info)));
    assert_eq!(gguf.meta().get::<&str>("general.architecture").unwrap(), "llama");
    // Data in memory is not copied.
    assert!(matches!(gguf.tensor("a").unwrap().bytes, Cow::Borrowed(bytes) if bytes[19] == 19));
    assert_eq!(gguf.find_info("b").unwrap().n_bytes, 12);
    assert_eq!((gguf.path(), gguf.file_bytes()), (Some(Path::new("place")), 42));
    assert_eq!(gguf.shard_paths().count(), 2);
    gguf.release();
    assert_eq!(n_released.load(Ordering::Relaxed), 1);
}

#[test]
fn tensors_are_read_and_written_in_parts() {
    let writer = writer();
    let gguf = described(&writer, &Arc::default()).unwrap();
    let n_parts = gguf.tensors().iter().map(|info| gguf.n_parts(info)).collect::<Vec<_>>();
    assert_eq!(n_parts, [1, 2, 1]);
    let info = gguf.find_info("a").unwrap();
    let parts = |n: usize| (0..n).map(|index| Ok(gguf.part(info, index).into_owned()));
    assert_eq!(parts(2).collect::<Result<Vec<_>, GgufError>>().unwrap().concat(), *gguf.data(info));
    // Integers are numbers to readers.
    let integers = gguf.find_info("c").unwrap();
    assert_eq!(*gguf.part(integers, 0), [7f32, -3.0].map(f32::to_le_bytes).concat());
    let write = |name: &str, n: usize| -> Result<Vec<u8>, GgufError> {
        let mut bytes = Vec::new();
        let fill = |data: &mut TensorSink<'_>| {
            data.bytes("b", &gguf.data(gguf.find_info("b").unwrap()))?;
            data.parts(name, parts(n))?;
            data.bytes("c", &gguf.stored_data(integers))
        };
        writer.write_to::<GgufError>(&mut bytes, fill)?;
        Ok(bytes)
    };
    let file = Gguf::from_bytes(write("a", 2).unwrap()).unwrap();
    assert!(gguf.tensors().iter().all(|info| gguf.data(info) == file.data(info)));
    for (name, n, want) in [("c", 2, "next is \"a\""), ("a", 1, "12"), ("a", 0, "20")] {
        let error = write(name, n).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn errors_of_a_virtual_file_name_its_place() {
    let gguf = described(&writer(), &Arc::default()).unwrap();
    let message = gguf.meta().get::<u32>("llama.block_count").unwrap_err().to_string();
    assert_eq!(message, "place: key \"llama.block_count\": is missing");
    assert!(gguf.tensor("d").unwrap_err().to_string().ends_with("tensor \"d\": is missing"));
}
