//! A valid file with every value type, corrupted in thousands of ways.

use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_gguf::{Gguf, GgufWriter, oracle};

use crate::raw::header;

/// Builds about 1.3 KB: every value type, arrays of most, two levels of arrays, six tensors.
fn sample() -> Vec<u8> {
    let mut w = GgufWriter::new();
    w.set("general.architecture", "llama").unwrap();
    w.set("general.alignment", 16u32).unwrap();
    w.set("u8", 1u8).unwrap();
    w.set("i8", -1i8).unwrap();
    w.set("u16", 2u16).unwrap();
    w.set("i16", -2i16).unwrap();
    w.set("i32", -3i32).unwrap();
    w.set("f32", f32::NAN).unwrap();
    w.set("bool", true).unwrap();
    w.set("u64", u64::MAX).unwrap();
    w.set("i64", i64::MIN).unwrap();
    w.set("f64", 1e300).unwrap();
    w.set("empty", "").unwrap();
    w.set_array("tokens", [&b"<s>"[..], b"\xff\xfe", b"", "\u{2581}a".as_bytes()]).unwrap();
    w.set_array("scores", [0.0f32, -1.5]).unwrap();
    w.set_array("flags", [true, false, true]).unwrap();
    w.set_array("none", [0u64; 0]).unwrap();
    let nested = header(0, 1).key("n", 9).array(9, 2).array(8, 1).string("x").array(4, 2).u32(1).u32(2).0;
    w.set("nested", Gguf::from_bytes(nested).unwrap().meta().value("n").unwrap()).unwrap();
    let tensors: [(&str, &[usize], DType); 6] = [
        ("token_embd.weight", &[32, 2], DType::Q8_0),
        ("norm", &[3], DType::F32),
        ("cube", &[2, 2, 2, 2], DType::BF16),
        ("tq", &[32, 2], DType::TQ4_1S),
        ("k", &[256], DType::Q2K),
        ("last", &[32], DType::TQ3_1S),
    ];
    tensors.iter().for_each(|(name, shape, dtype)| w.add_tensor(name, shape, *dtype).unwrap());
    let mut out = Vec::new();
    w.write_to(&mut out, |data| {
        tensors
            .iter()
            .enumerate()
            .try_for_each(|(i, (name, ..))| data.reader(name, &mut std::io::repeat(i as u8 + 1)))
    })
    .unwrap();
    out
}

#[test]
fn fuzzing_starts_from_the_sample() {
    let seed = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/gguf/sample.gguf");
    assert!(std::fs::read(seed).unwrap() == sample(), "the committed seed is another file");
}

#[test]
fn every_truncation_and_every_damaged_byte_is_survived() {
    let sample = sample();
    oracle::check(&sample);
    let gguf = Gguf::from_bytes(sample.clone()).unwrap();
    let data_end = gguf.tensors().iter().map(|t| t.offset as usize + t.n_bytes).max().unwrap();
    for n in 0..sample.len() {
        oracle::check(&sample[..n]);
        // The padding of the last tensor is optional.
        assert_eq!(Gguf::from_bytes(sample[..n].to_vec()).is_ok(), n >= data_end, "cut to {n}");
    }
    for i in 0..gguf.tensors()[0].offset as usize {
        for value in [0, 1, 0x7f, 0x80, 0xff, sample[i] ^ 1, sample[i].wrapping_add(1)] {
            let mut bytes = sample.clone();
            bytes[i] = value;
            oracle::check(&bytes);
        }
    }
}

#[test]
fn thousands_of_random_mutations_are_survived() {
    let sample = sample();
    let mut random = Random::new(0x6775_6667);
    let (mut sound, total) = (0, 20_000);
    for _ in 0..total {
        let mut bytes = sample.clone();
        for _ in 0..1 + random.bits() % 4 {
            mutate(&mut bytes, &mut random);
        }
        oracle::check(&bytes);
        sound += usize::from(Gguf::from_bytes(bytes).is_ok());
    }
    // Both branches of the oracle have to be exercised.
    assert!((total / 20..total * 19 / 20).contains(&sound), "{sound} of {total} files were sound");
}

/// Applies one change: a bit, an interesting number, a truncation, or a copied, removed or doubled
/// range.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    const NUMBERS: [u64; 10] =
        [0, 1, 9, 0x7f, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 61, u64::MAX >> 1, u64::MAX];
    if bytes.is_empty() {
        return;
    }
    let mut below = |n: usize| (random.bits() % n as u64) as usize;
    let at = below(bytes.len());
    let other = below(bytes.len());
    let piece = at..(at + below(64)).min(bytes.len());
    match below(8) {
        0 | 1 => bytes[at] ^= 1 << below(8),
        2 => bytes[at] = below(256) as u8,
        3 | 4 => {
            let width = [4, 8][below(2)].min(bytes.len() - at);
            let number = NUMBERS[below(NUMBERS.len())].wrapping_add(below(3) as u64).wrapping_sub(1);
            bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
        }
        5 => {
            let piece = bytes[piece].to_vec();
            bytes.splice(other..other, piece);
        }
        6 => drop(bytes.drain(piece)),
        _ => {
            let n = piece.len().min(bytes.len() - other);
            bytes.copy_within(piece.start..piece.start + n, other);
        }
    }
}
