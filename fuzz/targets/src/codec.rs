//! Target: every codec on arbitrary bytes and numbers.

use kvant_codec::fields::{FieldSpec, Fields};
use kvant_codec::finite::clamp;
use kvant_codec::{DType, decode, encode};

/// Maximum blocks of an input.
const MAX_BLOCKS: usize = 4;

/// Tests the codec that the first byte selects, with the rest as bytes of a foreign file and as
/// numbers: both must decode and encode without a panic, to finite values, and encoding again must
/// preserve them.
///
/// # Panics
///
/// If the property is violated.
pub fn codec(bytes: &[u8]) -> bool {
    let Some((&first, rest)) = bytes.split_first() else { return false };
    let dtype = DType::ALL[usize::from(first) % DType::ALL.len()];
    wrong_sizes_are_refused(dtype, rest);
    let n_blocks = (rest.len() / dtype.block_bytes()).min(MAX_BLOCKS);
    let foreign = decoded(dtype, &rest[..n_blocks * dtype.block_bytes()]);
    fields_decode_alike(dtype, &rest[..n_blocks * dtype.block_bytes()], &foreign);
    coding_again_keeps(dtype, &foreign);

    // Repeats the numbers if they are too few for a block.
    let numbers = rest.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four));
    let len = (rest.len() / 4).next_multiple_of(dtype.block_len()).min(MAX_BLOCKS * dtype.block_len());
    let numbers: Vec<f32> = numbers.cycle().take(len).collect();
    coding_again_keeps(dtype, &numbers);
    n_blocks > 0
}

/// Returns for each codec its selector byte and a block of small numbers.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let numbers: Vec<u8> = (0..256).flat_map(|i| (0.1 * (i as f32).sin()).to_le_bytes()).collect();
    (0..DType::ALL.len() as u8).map(|first| [&[first], &numbers[..]].concat()).collect()
}

fn wrong_sizes_are_refused(dtype: DType, bytes: &[u8]) {
    let n_values = bytes.len() / dtype.block_bytes() * dtype.block_len();
    let is_whole = bytes.len().is_multiple_of(dtype.block_bytes());
    assert_eq!(decode(dtype, bytes, &mut vec![0.0; n_values]).is_ok(), is_whole, "{dtype}");
    assert_eq!(encode(dtype, &vec![0.0; n_values], &mut bytes.to_vec()).is_ok(), is_whole, "{dtype}");
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode(dtype, bytes, &mut values).expect("whole blocks");
    values
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xa5; dtype.row_bytes(values.len()).expect("whole blocks")];
    encode(dtype, values, &mut bytes).expect("whole blocks");
    bytes
}

fn fields_decode_alike(dtype: DType, bytes: &[u8], values: &[f32]) {
    let Some(spec) = FieldSpec::of(dtype) else { return };
    for (block, values) in bytes.chunks_exact(dtype.block_bytes()).zip(values.chunks_exact(spec.len)) {
        let mut got = vec![0.0; spec.len];
        Fields::read(dtype, block).decode(dtype, &mut got);
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        assert!(got.iter().zip(values).all(is_same), "{dtype}: {got:?} from fields, {values:?} from bytes");
    }
}

/// Returns whether encoding reproduces a codec's own bytes: floats, and codecs whose scale follows
/// from the largest code alone, which decodes to a whole multiple of it. The others search for
/// scales, or rotate: their second result differs slightly.
fn is_stable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0 | DType::Q5_0)
}

fn coding_again_keeps(dtype: DType, values: &[f32]) {
    let bytes = encoded(dtype, values);
    assert_eq!(encoded(dtype, values), bytes, "{dtype}: the same numbers, other bytes");
    let once = decoded(dtype, &bytes);
    assert!(once.iter().all(|v| v.is_finite()), "{dtype}: {values:?} became {once:?}");
    let fixed: Vec<f32> = values.iter().map(|&v| clamp(v, dtype.max_abs())).collect();
    assert_eq!(encoded(dtype, &fixed), bytes, "{dtype}: bad numbers are coded as what they count as");
    no_worse_than_zeros(dtype, &fixed, &once);

    let again = encoded(dtype, &once);
    if is_stable(dtype) {
        assert_eq!(again, bytes, "{dtype}: {once:?} is coded otherwise the second time");
    }
    let twice = decoded(dtype, &again);
    assert!(twice.iter().all(|v| v.is_finite()), "{dtype}: {once:?} became {twice:?}");
    let once: Vec<f32> = once.iter().map(|&v| clamp(v, dtype.max_abs())).collect();
    no_worse_than_zeros(dtype, &once, &twice);
}

/// Checks that an encoder with minimal squared error is never worse than a block of zeros, which
/// every codec can represent.
fn no_worse_than_zeros(dtype: DType, values: &[f32], coded: &[f32]) {
    for (values, coded) in values.chunks_exact(dtype.block_len()).zip(coded.chunks_exact(dtype.block_len())) {
        let energy = |f: &dyn Fn(usize) -> f64| (0..values.len()).map(|i| f(i).powi(2)).sum::<f64>();
        let error = energy(&|i| f64::from(values[i]) - f64::from(coded[i]));
        let whole = energy(&|i| f64::from(values[i]));
        assert!(error <= whole, "{dtype}: error {error:e} of {whole:e}, {values:?} became {coded:?}");
    }
}
