//! Files that are not in memory: parts of them are read on request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, RangeReader, TensorSink};

/// A file's bytes, and the largest offset read.
struct Elsewhere(Vec<u8>, Arc<AtomicU64>);

impl RangeReader for Elsewhere {
    fn n_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        self.1.fetch_max(at + len as u64, Ordering::Relaxed);
        self.0[at as usize..][..len].to_vec()
    }
}

/// Builds a file with `n_text` bytes of metadata and tensors of `4 * n_values` bytes, one of them
/// nvfp4 with a scale.
fn file(n_text: usize, n_values: usize) -> Vec<u8> {
    let (mut writer, mut bytes) = (GgufWriter::new(), Vec::new());
    writer.set("general.name", "x".repeat(n_text).as_str()).unwrap();
    writer.add_tensor("a.scale", &[1], DType::F32).unwrap();
    writer.add_tensor("a.weight", &[64], DType::NVFP4).unwrap();
    writer.add_tensor("b", &[n_values], DType::F32).unwrap();
    let fill = |sink: &mut TensorSink<'_>| {
        sink.bytes("a.scale", &2.0f32.to_le_bytes())?;
        sink.bytes("a.weight", &[0x37; 36])?;
        sink.bytes("b", &(0..4 * n_values).map(|i| (i % 251) as u8).collect::<Vec<_>>())
    };
    writer.write_to::<GgufError>(&mut bytes, fill).unwrap();
    bytes
}

#[test]
fn a_stored_file_equals_the_file_in_memory() {
    // The first has its tensors beyond the first read, the second its metadata too.
    for (n_text, n_values) in [(100, 3 << 20), (9 << 20, 5 << 20)] {
        let (bytes, end) = (file(n_text, n_values), Arc::<AtomicU64>::default());
        let stored = Gguf::from_reader(Box::new(Elsewhere(bytes.clone(), Arc::clone(&end)))).unwrap();
        assert!(end.load(Ordering::Relaxed) < bytes.len() as u64, "all of it was read");
        let whole = Gguf::from_bytes(bytes).unwrap();
        assert_eq!((stored.tensors(), stored.file_bytes()), (whole.tensors(), whole.file_bytes()));
        assert_eq!(stored.meta().get::<&str>("general.name").unwrap().len(), n_text);
        assert_eq!(stored.tensors().len(), 2, "the scale is not a tensor of the model");
        assert!(whole.tensors().iter().all(|info| stored.data(info) == whole.data(info)));
    }
}

#[test]
fn errors_of_a_stored_file_equal_those_in_memory() {
    for bytes in
        [&b""[..], b"GGML", b"GGUF\x03\0\0\0", &[&b"GGUF"[..], &[0; 32]].concat(), &file(10, 10)[..90]]
    {
        let want = Gguf::from_bytes(bytes.to_vec()).err().unwrap().to_string();
        let got = Gguf::from_reader(Box::new(Elsewhere(bytes.to_vec(), Arc::default()))).err().unwrap();
        assert_eq!(got.to_string(), want);
    }
}
