//! Files that this crate writes.

use std::io::{self, Write};
use std::path::Path;

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufError, GgufWriter, Problem, Strings, TensorSink, Value};

use crate::raw::folder;

type Fill = fn(&mut TensorSink<'_>) -> Result<(), GgufError>;

fn two_tensors() -> GgufWriter {
    let mut w = GgufWriter::new();
    w.set("general.name", "two").unwrap();
    w.add_tensor("a", &[5], DType::F32).unwrap();
    w.add_tensor("b", &[32, 3], DType::Q4_0).unwrap();
    w
}

fn files_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn saved_file_reads_back_equal() {
    let folder = folder("write");
    let path = folder.join("m.gguf");
    let mut w = two_tensors();
    w.set("general.alignment", 64u32).unwrap();
    w.set("general.name", "replaced").unwrap();
    w.set_array("tokens", ["x", "yy"]).unwrap();
    w.set_array("heads", [1u32, 2, 3]).unwrap();
    let mut b = &[7u8; 100][..];
    w.save(&path, |data| {
        data.bytes("a", &[1; 20])?;
        data.reader("b", &mut b)
    })
    .unwrap();
    assert_eq!(b.len(), 100 - 54, "a reader is read no further than the tensor takes");

    let gguf = Gguf::open(&path).unwrap();
    assert_eq!((gguf.version(), gguf.alignment()), (3, 64));
    let keys: Vec<_> = gguf.meta().iter().map(|(k, _)| k).collect();
    assert_eq!(keys, ["general.name", "general.alignment", "tokens", "heads"]);
    assert_eq!(gguf.meta().get::<&str>("general.name").unwrap(), "replaced");
    assert_eq!(gguf.meta().get::<Vec<usize>>("heads").unwrap(), [1, 2, 3]);
    assert_eq!(gguf.meta().get::<Strings>("tokens").unwrap().collect::<Vec<_>>(), [&b"x"[..], b"yy"]);
    let (a, b) = (gguf.tensor("a").unwrap(), gguf.tensor("b").unwrap());
    assert_eq!((&*a.bytes, &*b.bytes), (&[1; 20][..], &[7; 54][..]));
    assert_eq!(a.info.offset % 64, 0);
    assert_eq!(b.info.offset, a.info.offset + 64);
    assert_eq!(gguf.file_bytes(), b.info.offset + 64);
    assert_eq!(files_in(&folder), ["m.gguf"]);
}

#[test]
fn failed_save_leaves_the_old_file_whole() {
    let folder = folder("write-fail");
    let path = folder.join("m.gguf");
    std::fs::write(&path, "old").unwrap();
    let fails: [Fill; 5] = [
        |_| Ok(()),
        |data| data.bytes("a", &[0; 20]),
        |data| data.bytes("b", &[0; 54]),
        |data| data.bytes("a", &[0; 19]),
        |data| data.reader("a", &mut &[0; 19][..]),
    ];
    let messages = [
        "tensor \"a\": takes 20 bytes of data, got 0",
        "tensor \"b\": takes 54 bytes of data, got 0",
        "tensor \"b\": was given out of order; next is \"a\"",
        "tensor \"a\": takes 20 bytes of data, got 19",
        "tensor \"a\": takes 20 bytes of data, got 19",
    ];
    for (fill, message) in fails.into_iter().zip(messages) {
        let error = two_tensors().save(&path, fill).unwrap_err();
        assert!(error.to_string().ends_with(message), "{error}");
        assert_eq!(error.file(), Some(&*path));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(files_in(&folder), ["m.gguf"]);
    }
    let panicked =
        std::panic::catch_unwind(|| two_tensors().save::<GgufError>(&path, |_| panic!("the caller's own")));
    assert!(panicked.is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(files_in(&folder), ["m.gguf"]);
}

#[test]
fn unwritable_targets_are_named() {
    let folder = folder("write-nowhere");
    let save = |path: &Path| GgufWriter::new().save::<GgufError>(path, |_| Ok(())).unwrap_err().to_string();
    let absent = folder.join("absent/m.gguf");
    assert!(save(&absent).starts_with(&format!("{}: ", absent.display())), "{}", save(&absent));
    std::fs::create_dir(folder.join("d")).unwrap();
    assert!(save(&folder.join("d")).contains("is a folder"), "{}", save(&folder.join("d")));
    assert_eq!(files_in(&folder), ["d"]);
}

/// Accepts a number of bytes, then reports a full disk.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let n = bytes.len().min(self.0);
        self.0 -= n;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn full_disk_is_an_error_wherever_it_strikes() {
    let fill = |data: &mut TensorSink<'_>| {
        data.bytes("a", &[0; 20])?;
        data.bytes("b", &[0; 54])
    };
    let mut whole = Vec::new();
    two_tensors().write_to::<GgufError>(&mut whole, fill).unwrap();
    for n in 0..whole.len() {
        let error = two_tensors().write_to::<GgufError>(&mut Full(n), fill).unwrap_err();
        assert!(
            matches!(error.problem(), Problem::Io(e) if e.kind() == io::ErrorKind::StorageFull),
            "{error}"
        );
    }
}

#[test]
fn invalid_declarations_are_rejected() {
    let mut w = two_tensors();
    let fails = [
        (w.set("", 1u32), "the name has 0 bytes"),
        (w.set(&"k".repeat(65_536), 1u32), "has 65536 bytes"),
        (w.set("general.alignment", 48u32), "must be a power of two, got 48"),
        (w.set("general.alignment", "32"), "expected u32, got a string"),
        (w.set_array("general.alignment", [32u32]), "expected u32, got an array"),
        (w.add_tensor("a", &[1], DType::F32), "was added already, as tensor 0"),
        (w.add_tensor("", &[1], DType::F32), "the name has 0 bytes"),
        (w.add_tensor(&"n".repeat(65), &[1], DType::F32), "has 65 bytes"),
        (w.add_tensor("c", &[], DType::F32), "has 0 dimensions"),
        (w.add_tensor("c", &[1; 5], DType::F32), "has 5 dimensions"),
        (w.add_tensor("c", &[4, 0], DType::F32), "impossible shape"),
        (w.add_tensor("c", &[usize::MAX, 2], DType::F32), "impossible shape"),
        (w.add_tensor("c", &[33], DType::Q8_0), "rows of 33 values"),
        (w.add_tensor("c", &[128], DType::Turbo3), "turbo3 has no GGUF tensor type"),
    ];
    for (result, message) in fails {
        let error = result.expect_err(message);
        assert!(error.item().is_some() && error.to_string().contains(message), "{error}");
    }
}

#[test]
fn the_alignment_is_written_as_u32() {
    let mut w = GgufWriter::new();
    w.set("general.alignment", 64u64).unwrap();
    let mut out = Vec::new();
    w.write_to::<GgufError>(&mut out, |_| Ok(())).unwrap();
    let gguf = Gguf::from_bytes(out).unwrap();
    assert_eq!((gguf.alignment(), gguf.meta().value("general.alignment")), (64, Some(Value::U32(64))));
}

/// A linear search of names would take minutes.
#[test]
fn very_many_keys_and_tensors_are_distinguished() {
    const N: usize = 200_000;
    let mut w = GgufWriter::new();
    for i in 0..N {
        w.set(&format!("some.longer.key.{i}"), i as u32).unwrap();
        w.add_tensor(&format!("blk.{i}.weight"), &[1], DType::F32).unwrap();
    }
    w.set("some.longer.key.7", 8u32).unwrap();
    let error = w.add_tensor("blk.9.weight", &[1], DType::F32).unwrap_err().to_string();
    assert!(error.contains("was added already, as tensor 9"), "{error}");
    let mut out = Vec::new();
    let fill = |data: &mut TensorSink<'_>| {
        (0..N).try_for_each(|i| data.bytes(&format!("blk.{i}.weight"), &(i as f32).to_le_bytes()))
    };
    w.write_to::<GgufError>(&mut out, fill).unwrap();
    let gguf = Gguf::from_bytes(out).unwrap();
    assert_eq!((gguf.meta().len(), gguf.tensors().len()), (N, N));
    assert_eq!(gguf.meta().get::<u32>("some.longer.key.7").unwrap(), 8);
    assert_eq!(*gguf.tensor("blk.9.weight").unwrap().bytes, 9f32.to_le_bytes());
}

#[test]
fn embedded_bytes_are_not_copied() {
    let mut out = Vec::new();
    two_tensors()
        .write_to::<GgufError>(&mut out, |data| {
            data.bytes("a", &[0; 20])?;
            data.bytes("b", &[0; 54])
        })
        .unwrap();
    let bytes: &'static [u8] = out.leak();
    let gguf = Gguf::from_bytes(bytes).unwrap();
    assert!(bytes.as_ptr_range().contains(&gguf.tensor("b").unwrap().bytes.as_ptr()));
}

#[test]
fn display_strings_may_be_invalid_utf8() {
    let mut w = GgufWriter::new();
    w.set("general.name", Value::String(b"caf\xc3\xa9 \xff")).unwrap();
    w.set("general.license", 7u32).unwrap();
    let mut bytes = Vec::new();
    w.write_to::<GgufError>(&mut bytes, |_| Ok(())).unwrap();
    let gguf = Gguf::from_bytes(bytes).unwrap();
    let meta = gguf.meta();
    assert_eq!(meta.text_lossy("general.name").as_deref(), Some("caf\u{e9} \u{fffd}"));
    assert_eq!((meta.text_lossy("general.license"), meta.text_lossy("general.author")), (None, None));
}
