//! Invariants of the parser for arbitrary bytes, shared by tests and the fuzz target.

use crate::error::GgufError;
use crate::file::Gguf;
use crate::parse::ALIGNMENT_KEY;
use crate::value::Value;
use crate::writer::GgufWriter;

/// Parses `bytes` and checks that they are rejected with one readable line, or that every invariant
/// of [`Gguf`] holds: all slices are within `bytes`, tensors are aligned and do not overlap, sizes
/// agree with shapes, look-ups agree with iteration, and a rewritten file reads back equal and is
/// stable when written again.
///
/// # Panics
/// If an invariant does not hold.
pub fn check(bytes: &[u8]) {
    match Gguf::from_bytes(bytes.to_vec()) {
        Err(error) => check_message(&error, bytes.len()),
        Ok(gguf) => {
            check_tensors(&gguf, bytes);
            check_meta(&gguf);
            check_round_trip(&gguf);
        }
    }
}

fn check_message(error: &GgufError, len: usize) {
    let message = error.to_string();
    assert!(!message.is_empty() && message.len() < 2048 && !message.contains('\n'), "{message:?}");
    assert!(error.item().is_some(), "names no item: {message}");
    if let Some(offset) = error.offset() {
        assert!(offset <= len as u64, "offset outside {len} bytes: {message}");
    }
}

fn check_tensors(gguf: &Gguf, bytes: &[u8]) {
    let mut extents = Vec::new();
    for info in gguf.tensors() {
        let view = gguf.tensor(&info.name).expect("a listed tensor is found");
        assert_eq!(view.info, info);
        assert_eq!(view.bytes.len(), info.n_bytes);
        let row_bytes = info.dtype.row_bytes(info.row_len()).expect("rows are whole blocks");
        assert_eq!(info.n_bytes, row_bytes * info.rows());
        assert_eq!(info.elements(), info.row_len() * info.rows());
        assert!(info.elements() > 0 && info.dtype.ggml_id().is_some());
        assert!(info.offset.is_multiple_of(gguf.alignment()));
        let start = info.offset as usize;
        match info.packed {
            None => assert_eq!(*view.bytes, bytes[start..start + info.stored_bytes]),
            Some(packed) => {
                assert_eq!(info.stored_bytes, info.elements() / packed.block_len() * packed.block_bytes());
            }
        }
        extents.push((start, start + info.stored_bytes));
    }
    extents.sort_unstable();
    assert!(extents.windows(2).all(|w| w[0].1 <= w[1].0), "tensors overlap: {extents:?}");
}

fn check_meta(gguf: &Gguf) {
    assert_eq!(gguf.meta().iter().count(), gguf.meta().len());
    for (key, value) in gguf.meta() {
        let found = gguf.meta().value(key).expect("a listed key is found");
        assert_eq!(encoded(&found), encoded(&value), "{key}");
        check_value(&value);
    }
}

/// Checks that arrays contain exactly the stated number of elements of the stated type.
fn check_value(value: &Value<'_>) {
    if let Value::Array(array) = value {
        let mut elements = Vec::new();
        let mut count = 0;
        for element in array.iter() {
            assert_eq!(element.value_type(), array.element_type());
            element.encode(&mut elements);
            check_value(&element);
            count += 1;
        }
        assert_eq!(count, array.len());
        assert!(encoded(value).ends_with(&elements) && encoded(value).len() == 4 + 8 + elements.len());
    }
}

fn check_round_trip(gguf: &Gguf) {
    let first = rewrite(gguf);
    let again = Gguf::from_bytes(first.clone()).expect("a written file can be read");
    let entries = |of: &Gguf| -> Vec<_> {
        // The writer stores the alignment in its one valid type.
        let alignment = |key: &str| (key == ALIGNMENT_KEY).then(|| Value::U32(of.alignment() as u32));
        let entry = |(key, value): (&str, Value<'_>)| {
            let value = alignment(key).unwrap_or(value);
            (key.to_owned(), value.value_type(), encoded(&value))
        };
        of.meta().iter().map(entry).collect()
    };
    assert_eq!(entries(gguf), entries(&again));
    assert_eq!(gguf.tensors().len(), again.tensors().len());
    for (a, b) in gguf.tensors().iter().zip(again.tensors()) {
        assert_eq!((&a.name, &a.shape, a.dtype), (&b.name, &b.shape, b.dtype));
        let data = |g: &Gguf| g.tensor(&a.name).expect("a listed tensor is found").bytes.to_vec();
        assert_eq!(data(gguf), data(&again), "{}", a.name);
    }
    assert_eq!(rewrite(&again), first, "written again, it differs");
}

/// Writes the same model to a new file.
fn rewrite(gguf: &Gguf) -> Vec<u8> {
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.meta() {
        writer.set(key, value).expect("a key that was read can be written");
    }
    for t in gguf.tensors() {
        writer.add_tensor(&t.name, &t.shape, t.dtype).expect("a tensor that was read can be written");
    }
    let mut out = Vec::new();
    writer
        .write_to(&mut out, |data| {
            gguf.tensors().iter().try_for_each(|t| data.bytes(&t.name, &gguf.tensor(&t.name)?.bytes))
        })
        .expect("memory takes everything");
    out
}

fn encoded(value: &Value<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    value.encode(&mut out);
    out
}
