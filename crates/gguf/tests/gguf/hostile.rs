//! Malformed files of every kind, and their errors.

use kvant_codec::DType;
use kvant_gguf::{
    Array, Gguf, GgufError, GgufWriter, Item, LoadOnlyType, Problem, Strings, TensorSink, Value, oracle,
};

use crate::raw::{Raw, folder, header};

const F32: u32 = 0;
const Q8_0: u32 = 8;
const TQ3_1S: u32 = 45;
const TQ4_1S: u32 = 46;

const VALUE_U32: u32 = 4;
const VALUE_BOOL: u32 = 7;
const VALUE_STRING: u32 = 8;
const VALUE_ARRAY: u32 = 9;
const VALUE_U64: u32 = 10;

struct Case {
    what: &'static str,
    file: Raw,
    item: Item,
    offset: u64,
    message: &'static str,
}

fn case(what: &'static str, file: Raw, item: Item, offset: u64, message: &'static str) -> Case {
    Case { what, file, item, offset, message }
}

fn key(k: &str) -> Item {
    Item::Key(k.to_owned())
}

fn tensor(name: &str) -> Item {
    Item::Tensor(name.to_owned())
}

#[track_caller]
fn check(cases: Vec<Case>) {
    for Case { what, file, item, offset, message } in cases {
        let Err(error) = Gguf::from_bytes(file.0.clone()) else { panic!("{what}: was accepted") };
        assert_eq!((error.item(), error.offset()), (Some(&item), Some(offset)), "{what}: {error}");
        assert!(error.to_string().contains(message), "{what}: {error}");
        oracle::check(&file.0);
    }
}

#[test]
fn broken_headers_are_refused() {
    let raw = |bytes: &[u8]| Raw(bytes.to_vec());
    let version = |v: u32| raw(b"GGUF").u32(v).u64(0).u64(0);
    let be = raw(b"GGUF").bytes(&3u32.to_be_bytes()).bytes(&[0; 16]);
    check(vec![
        case("nothing", raw(b""), Item::Header, 0, "the file is empty"),
        case("short magic", raw(b"GG"), Item::Header, 0, "not a GGUF file"),
        case("text", raw(b"# Read me\n\nHello."), Item::Header, 0, "starts with [23, 20, 52, 65]"),
        case("magic alone", raw(b"GGUF"), Item::Header, 4, "needs 4 bytes, but the file ends after 0"),
        case(
            "half a version",
            raw(b"GGUF\x03\0"),
            Item::Header,
            4,
            "needs 4 bytes, but the file ends after 2",
        ),
        case("version 0", version(0), Item::Header, 4, "version 0 is not supported"),
        case("version 1", version(1), Item::Header, 4, "version 1 is not supported, only 2 and 3 are"),
        case("version 4", version(4), Item::Header, 4, "version 4 is not supported"),
        case("big-endian", be, Item::Header, 4, "big-endian GGUF file (version 3)"),
        case("no counts", raw(b"GGUF").u32(3), Item::Header, 8, "needs 8 bytes"),
        case("no second count", raw(b"GGUF").u32(3).u64(0), Item::Header, 16, "needs 8 bytes"),
        case("endless tensors", header(u64::MAX, 0), Item::Header, 8, "claims 18446744073709551615 tensors"),
        case("endless metadata", header(0, u64::MAX), Item::Header, 16, "the file holds 0 at most"),
        case("one record too many", header(0, 3).data(1, 28), Item::Header, 16, "holds 2 at most"),
        case("counts that exclude each other", header(1, 1).data(1, 38), Item::Header, 16, "holds 0 at most"),
    ]);
}

#[test]
fn broken_metadata_is_refused() {
    let one = || header(0, 1);
    let deep = (0..100_000).fold(one().key("k", VALUE_ARRAY), |raw, _| raw.array(VALUE_ARRAY, 1));
    let alignment = || one().key("general.alignment", VALUE_U32);
    let twice = header(0, 2).key("k", VALUE_U32).u32(1).key("k", VALUE_U32).u32(1);
    check(vec![
        case(
            "endless key",
            one().u64(u64::MAX).data(1, 6),
            Item::NthKey(0),
            24,
            "the name has 18446744073709551615 bytes",
        ),
        case(
            "key past the end",
            one().u64(7).data(1, 6),
            Item::NthKey(0),
            32,
            "needs 7 bytes, but the file ends after 6",
        ),
        case(
            "empty key",
            one().key("", VALUE_U32).u32(0),
            Item::NthKey(0),
            24,
            "the name has 0 bytes, not 1 to 65535",
        ),
        case("long key", one().key([b'k'; 65_536], VALUE_U32).u32(0), Item::NthKey(0), 24, "has 65536 bytes"),
        case(
            "key not UTF-8",
            one().key(b"ab\xff", VALUE_U32).u32(0),
            Item::NthKey(0),
            24,
            "not UTF-8 from its byte 2",
        ),
        case("no value type", one().string([b'k'; 6]), key("kkkkkk"), 38, "needs 4 bytes"),
        case("value type 13", one().key("k", 13).u32(0), key("k"), 33, "unknown value type 13"),
        case(
            "value type 2^32-1",
            one().key("k", u32::MAX).u32(0),
            key("k"),
            33,
            "unknown value type 4294967295",
        ),
        case(
            "half a value",
            one().key("k", VALUE_U64).u32(0),
            key("k"),
            37,
            "needs 8 bytes, but the file ends after 4",
        ),
        case("bool of 2", one().key("k", VALUE_BOOL).bytes(&[2]), key("k"), 37, "a bool of value 2"),
        case(
            "endless string",
            one().key("k", VALUE_STRING).u64(u64::MAX),
            key("k"),
            45,
            "needs 18446744073709551615 bytes",
        ),
        case(
            "string past the end",
            one().key("k", VALUE_STRING).u64(3).bytes(b"ab"),
            key("k"),
            45,
            "needs 3 bytes",
        ),
        case(
            "array of type 99",
            one().key("k", VALUE_ARRAY).array(99, 0),
            key("k"),
            37,
            "unknown value type 99",
        ),
        case(
            "endless array",
            one().key("k", VALUE_ARRAY).array(VALUE_U64, u64::MAX),
            key("k"),
            41,
            "array elements",
        ),
        case(
            "array that wraps around",
            one().key("k", VALUE_ARRAY).array(VALUE_U64, 1 << 61),
            key("k"),
            41,
            "holds 0 at most",
        ),
        case(
            "array one short",
            one().key("k", VALUE_ARRAY).array(VALUE_U64, 2).data(1, 15),
            key("k"),
            41,
            "holds 1 at most",
        ),
        case(
            "array with a bool of 9",
            one().key("k", VALUE_ARRAY).array(VALUE_BOOL, 3).bytes(&[0, 1, 9]),
            key("k"),
            51,
            "bool of value 9",
        ),
        case(
            "array with an endless string",
            one().key("k", VALUE_ARRAY).array(VALUE_STRING, 2).string("a").u64(u64::MAX),
            key("k"),
            66,
            "needs 18446744073709551615 bytes",
        ),
        case("arrays 100,000 deep", deep, key("k"), 37 + 8 * 12, "nests arrays deeper than 8"),
        case("the same key twice", twice, key("k"), 41, "occurs twice; first at byte 24"),
        case(
            "alignment 0",
            alignment().u32(0),
            key("general.alignment"),
            53,
            "must be a power of two, got 0",
        ),
        case(
            "alignment 24",
            alignment().u32(24),
            key("general.alignment"),
            53,
            "must be a power of two, got 24",
        ),
        case(
            "alignment 2^32",
            one().key("general.alignment", VALUE_U64).u64(1 << 32),
            key("general.alignment"),
            53,
            "expected u32, got u64 4294967296",
        ),
        case(
            "alignment in words",
            one().key("general.alignment", VALUE_STRING).string("32"),
            key("general.alignment"),
            53,
            "expected u32, got a string",
        ),
    ]);
}

#[test]
fn broken_tensor_records_are_refused() {
    // With a one-letter name: name at 24, dimensions at 33, shape at 37.
    let one = || header(1, 0);
    let of = |shape: &[u64], type_id| one().tensor("t", shape, type_id, 0).data(32, 64);
    check(vec![
        case(
            "empty name",
            one().tensor("", &[1, 1], F32, 0),
            Item::NthTensor(0),
            24,
            "the name has 0 bytes, not 1 to 64",
        ),
        case(
            "long name",
            one().tensor(&"n".repeat(65), &[1], F32, 0),
            Item::NthTensor(0),
            24,
            "has 65 bytes",
        ),
        case(
            "name not UTF-8",
            one().string(b"\x80").data(1, 24),
            Item::NthTensor(0),
            24,
            "not UTF-8 from its byte 0",
        ),
        case("five dimensions", of(&[1; 5], F32), tensor("t"), 33, "has 5 dimensions"),
        case(
            "endless dimensions",
            one().string("t").u32(u32::MAX).data(1, 40),
            tensor("t"),
            33,
            "has 4294967295 dimensions",
        ),
        case(
            "record past the end",
            one().string("nnnnnnnn").u32(2).u64(1).u64(1),
            tensor("nnnnnnnn"),
            60,
            "needs 4 bytes",
        ),
        case("a dimension of 0", of(&[4, 0], F32), tensor("t"), 37, "impossible shape [4, 0]"),
        case("too many values", of(&[1 << 32, 1 << 32], F32), tensor("t"), 37, "impossible shape"),
        case("too many bytes", of(&[1 << 62], F32), tensor("t"), 37, "impossible shape"),
        case("too many values in few bytes", of(&[1 << 63, 2], Q8_0), tensor("t"), 37, "impossible shape"),
        case(
            "a broken row",
            of(&[33, 32], Q8_0),
            tensor("t"),
            37,
            "rows of 33 values, not a multiple of the q8_0 block of 32",
        ),
        case(
            "type q8_K",
            of(&[256], 15),
            tensor("t"),
            45,
            "unsupported tensor type 15 (q8_K); read are f32 f16 bf16 q8_0",
        ),
        case("a broken row of iq4_xs", of(&[288], 23), tensor("t"), 37, "the iq4_xs block of 256"),
        case("a broken row of iq3_xxs", of(&[288], 18), tensor("t"), 37, "the iq3_xxs block of 256"),
        case("too many values once unpacked", of(&[256, 1 << 55], 24), tensor("t"), 37, "impossible shape"),
        case("a broken row of nvfp4", of(&[96], 40), tensor("t"), 37, "the nvfp4 block of 64"),
        case("a type GGML removed", of(&[32], 4), tensor("t"), 45, "unsupported tensor type 4"),
        case("turbo3 by another program", of(&[128], 43), tensor("t"), 45, "unsupported tensor type 43"),
        case("type 2^32-1", of(&[32], u32::MAX), tensor("t"), 45, "unsupported tensor type 4294967295"),
        case(
            "half a record",
            one().string("t").u32(1).u64(1).u32(F32).bytes(&[0; 7]),
            tensor("t"),
            49,
            "needs 8 bytes, but the file ends after 7",
        ),
    ]);
}

#[test]
fn misplaced_tensor_data_is_refused() {
    // With one-letter names and one dimension, a record takes 33 bytes: at 24 and at 57.
    let one = |shape: u64, data| header(1, 0).tensor("a", &[shape], F32, data);
    let two = |first, second| header(2, 0).tensor("a", &[16], F32, first).tensor("b", &[16], F32, second);
    let same = header(2, 0).tensor("a", &[8], F32, 0).tensor("a", &[8], F32, 32).data(32, 64);
    let huge =
        header(1, 1).key("general.alignment", VALUE_U32).u32(1 << 31).tensor("a", &[1], F32, 0).data(32, 64);
    check(vec![
        case(
            "no data",
            one(1, 0),
            tensor("a"),
            24,
            "has 4 bytes of data at data offset 0, beyond the file's end at byte 57",
        ),
        case(
            "data one byte short",
            one(16, 0).data(32, 63),
            tensor("a"),
            24,
            "beyond the file's end at byte 127",
        ),
        case(
            "data behind the end",
            one(16, 64).data(32, 64),
            tensor("a"),
            24,
            "has 64 bytes of data at data offset 64",
        ),
        case(
            "an offset that wraps around",
            one(16, u64::MAX - 31).data(32, 64),
            tensor("a"),
            24,
            "beyond the file's end",
        ),
        case("data behind a huge alignment", huge, tensor("a"), 57, "beyond the file's end"),
        case(
            "misaligned data",
            one(4, 16).data(32, 64),
            tensor("a"),
            24,
            "data offset 16, not a multiple of the alignment 32",
        ),
        case(
            "two tensors in one place",
            two(0, 0).data(32, 128),
            tensor("b"),
            57,
            "overlaps tensor \"a\", which ends at byte 160",
        ),
        case("a tensor inside another", two(0, 32).data(32, 128), tensor("b"), 57, "overlaps tensor \"a\""),
        case(
            "the same in the other order",
            two(32, 0).data(32, 128),
            tensor("a"),
            24,
            "overlaps tensor \"b\"",
        ),
        case("the same tensor twice", same, tensor("a"), 57, "occurs twice; first at byte 24"),
    ]);
}

#[test]
fn private_types_are_read_only_where_their_block_size_fits() {
    // Eight blocks of 32: 128 or 160 bytes; other block sizes fill another number of alignment
    // units.
    let file = |type_id, next: u64| header(2, 0).tensor("a", &[256], type_id, 0).tensor("b", &[8], F32, next);
    for (type_id, size) in [(TQ3_1S, 128), (TQ4_1S, 160)] {
        let gguf = Gguf::from_bytes(file(type_id, size).data(32, size as usize + 32).0).unwrap();
        assert_eq!(gguf.tensor("a").unwrap().bytes.len() as u64, size);
    }
    let last = |type_id, bytes| header(1, 0).tensor("a", &[32], type_id, 0).data(32, bytes);
    for (type_id, bytes) in [(TQ3_1S, 16), (TQ3_1S, 32), (TQ4_1S, 20), (TQ4_1S, 32)] {
        Gguf::from_bytes(last(type_id, bytes).0).unwrap();
    }
    check(vec![
        case(
            "blocks of 24 bytes",
            file(TQ4_1S, 192).data(32, 256),
            tensor("a"),
            24,
            "claims type 46 (tq4_1s, 160 bytes), but 192 bytes lie",
        ),
        case(
            "a gap of one place",
            file(TQ3_1S, 160).data(32, 192),
            tensor("a"),
            24,
            "claims type 45 (tq3_1s, 128 bytes), but 160 bytes lie",
        ),
        case(
            "blocks of 34 bytes at the end",
            last(TQ3_1S, 34),
            tensor("a"),
            24,
            "but 34 bytes lie before the file's end",
        ),
    ]);
}

#[test]
fn a_type_that_does_not_fill_its_space_is_refused() {
    const F16: u32 = 1;
    const BF16: u32 = 30;
    // 8 rows of 64 values: 1,024 bytes as f16, 544 as q8_0.
    let file = |type_id| {
        let records = header(2, 0).tensor("a", &[64, 8], type_id, 0).tensor("b", &[64, 8], F16, 1024);
        records.data(32, 2048)
    };
    for type_id in [F16, BF16] {
        Gguf::from_bytes(file(type_id).0).unwrap();
    }
    let last = |type_id, bytes| header(1, 0).tensor("a", &[64, 8], type_id, 0).data(32, bytes);
    // Unpadded, or followed by data that matches no type's size.
    for (type_id, bytes) in [(F16, 1024), (Q8_0, 544), (F16, 1500), (Q8_0, 700)] {
        Gguf::from_bytes(last(type_id, bytes).0).unwrap();
    }
    check(vec![
        case(
            "f16 changed to q8_0",
            file(Q8_0),
            tensor("a"),
            24,
            "claims type 8 (q8_0, 544 bytes), but 1024 bytes lie before the next tensor",
        ),
        case(
            "the last one changed",
            last(Q8_0, 1024),
            tensor("a"),
            24,
            "claims type 8 (q8_0, 544 bytes), but 1024 bytes lie before the file's end",
        ),
        case(
            "a shape cut short",
            header(2, 0).tensor("a", &[8], F32, 0).tensor("b", &[8], F32, 64).data(32, 96),
            tensor("a"),
            24,
            "claims type 0 (f32, 32 bytes), but 64 bytes lie before the next tensor",
        ),
    ]);
}

/// Flips every bit of every type byte of a file: none gives another model.
#[test]
fn no_single_flip_in_a_type_is_read_as_another_type() {
    let types = DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some());
    let mut writer = GgufWriter::new();
    for dtype in types.clone() {
        writer.add_tensor(dtype.name(), &[512, 4], dtype).unwrap();
    }
    let mut file = Vec::new();
    let fill = |data: &mut TensorSink<'_>| {
        types.clone().try_for_each(|dtype| data.reader(dtype.name(), &mut std::io::repeat(0)))
    };
    writer.write_to::<GgufError>(&mut file, fill).unwrap();
    for dtype in types {
        let name = dtype.name().as_bytes();
        // Name, two dimensions, then the type.
        let at = file.windows(name.len() + 4).position(|w| w == [name, &[2, 0, 0, 0]].concat()).unwrap();
        let at = at + name.len() + 4 + 16;
        assert_eq!(file[at], dtype.ggml_id().unwrap() as u8);
        for bit in 0..32 {
            let mut bytes = file.clone();
            bytes[at + bit / 8] ^= 1 << (bit % 8);
            assert!(Gguf::from_bytes(bytes).is_err(), "{dtype}, bit {bit}");
        }
    }
}

#[test]
fn unusual_but_sound_files_are_read() {
    let v2 = Raw(b"GGUF".to_vec()).u32(2).u64(0).u64(0).0;
    assert_eq!(Gguf::from_bytes(v2).unwrap().version(), 2);

    let file = header(2, 1)
        .key("general.alignment", VALUE_U64)
        .u64(8)
        .tensor("b", &[1], F32, 16)
        .tensor("a", &[3], F32, 0)
        .data(8, 12)
        .bytes(&[0, 0, 0, 0, 1, 2, 3, 4]);
    let gguf = Gguf::from_bytes(file.0).unwrap();
    assert_eq!(gguf.alignment(), 8);
    assert_eq!(*gguf.tensor("b").unwrap().bytes, [1, 2, 3, 4]);
    assert_eq!(gguf.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["b", "a"]);

    let nested = (0..7).fold(header(0, 1).key("k", VALUE_ARRAY), |raw, _| raw.array(VALUE_ARRAY, 1));
    let gguf = Gguf::from_bytes(nested.array(VALUE_U32, 1).u32(5).0).unwrap();
    let mut value = gguf.meta().value("k").unwrap();
    while let Value::Array(array) = value {
        value = array.iter().next().unwrap();
    }
    assert_eq!(value, Value::U32(5));
}

#[test]
fn tokens_that_are_not_utf8_are_read_as_bytes() {
    let file = header(0, 1).key("tokens", VALUE_ARRAY).array(VALUE_STRING, 3);
    let gguf = Gguf::from_bytes(file.string("a").string(b"\xff\xfe").string("").0).unwrap();
    let tokens: Vec<&[u8]> = gguf.meta().get::<Strings>("tokens").unwrap().collect();
    assert_eq!(tokens, [&b"a"[..], b"\xff\xfe", b""]);
    let error = gguf.meta().get::<Vec<&str>>("tokens").unwrap_err();
    assert_eq!(
        error.to_string(),
        "key \"tokens\" at byte 42: expected an array of a string of UTF-8, got an array of 3 string"
    );
}

#[test]
fn missing_and_mistyped_keys_are_named() {
    let gguf = Gguf::from_bytes(header(0, 1).key("n", VALUE_STRING).string("7").0).unwrap();
    let meta = gguf.meta();
    assert_eq!(meta.get::<u32>("m").unwrap_err().to_string(), "key \"m\": is missing");
    assert_eq!(meta.find::<u32>("m").unwrap(), None);
    let error = meta.find::<u32>("n").unwrap_err();
    assert_eq!(error.to_string(), "key \"n\" at byte 37: expected u32, got a string");
    assert!(matches!(meta.get::<Array>("n").unwrap_err().problem(), Problem::WrongType { .. }));
    assert_eq!(gguf.tensor("t").unwrap_err().to_string(), "tensor \"t\": is missing");
}

#[test]
fn invalid_model_paths_are_rejected_with_one_line() {
    let folder = folder("paths");
    let fail = |name: &str| -> GgufError { Gguf::open(folder.join(name)).expect_err("refused") };
    std::fs::write(folder.join("empty.gguf"), "").unwrap();
    std::fs::write(folder.join("text.gguf"), "once upon a time").unwrap();
    for (name, message) in [
        ("", "is a folder, not a regular file"),
        ("empty.gguf", "the file is empty"),
        ("text.gguf", "not a GGUF file"),
        ("absent.gguf", "No such file"),
    ] {
        let text = fail(name).to_string();
        assert!(text.starts_with(&folder.join(name).display().to_string()), "{text}");
        assert!(text.contains(message) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn plain_numbers_without_kernels_are_loaded_as_f32() {
    for (id, name, bytes) in [
        (24, "i8", vec![0xfe, 3]),
        (25, "i16", [-2i16, 3].map(i16::to_le_bytes).concat()),
        (26, "i32", [-2i32, 3].map(i32::to_le_bytes).concat()),
        (27, "i64", [-2i64, 3].map(i64::to_le_bytes).concat()),
        (28, "f64", [-2f64, 3.0].map(f64::to_le_bytes).concat()),
    ] {
        let stored_bytes = bytes.len();
        let file = header(1, 0).tensor("t", &[2], id, 0).data(32, 0).bytes(&bytes);
        let gguf = Gguf::from_bytes(file.0.clone()).unwrap();
        let tensor = gguf.tensor("t").unwrap();
        assert_eq!(*tensor.bytes, [-2f32, 3.0].map(f32::to_le_bytes).concat(), "{name}");
        assert_eq!((tensor.info.dtype, tensor.info.stored_bytes), (DType::F32, stored_bytes), "{name}");
        assert_eq!(tensor.info.packed.map(LoadOnlyType::name), Some(name));
        oracle::check(&file.0);
    }
}

#[test]
fn a_tensor_without_sizes_is_one_number() {
    let file = header(2, 0).tensor("a", &[], F32, 0).tensor("b", &[], Q8_0, 32);
    let error = Gguf::from_bytes(file.data(32, 66).0).map(drop).unwrap_err().to_string();
    assert!(error.contains("rows of 1 values, not a multiple of the q8_0 block of 32"), "{error}");
    let file = header(2, 0).tensor("a", &[], F32, 0).tensor("b", &[], F32, 32).data(32, 36);
    let gguf = Gguf::from_bytes(file.0.clone()).unwrap();
    assert!(gguf.tensors().iter().all(|info| info.shape == [1] && info.n_bytes == 4));
    oracle::check(&file.0);
}
