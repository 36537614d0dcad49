//! Plain numbers of types without kernels: integers, and 64-bit floats. They are converted to f32,
//! whose 24 digits represent integers up to 16,777,216 exactly.

use super::LoadOnlyType;

/// Converts numbers to f32 bytes.
pub(super) fn as_f32(of: LoadOnlyType, bytes: &[u8]) -> Vec<u8> {
    match of {
        LoadOnlyType::I8 => each(bytes, |[byte]| f32::from(byte as i8)),
        LoadOnlyType::I16 => each(bytes, |bytes| f32::from(i16::from_le_bytes(bytes))),
        LoadOnlyType::I32 => each(bytes, |bytes| i32::from_le_bytes(bytes) as f32),
        LoadOnlyType::I64 => each(bytes, |bytes| i64::from_le_bytes(bytes) as f32),
        _ => each(bytes, |bytes| f64::from_le_bytes(bytes) as f32),
    }
}

fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<u8> {
    bytes.as_chunks::<N>().0.iter().flat_map(|bytes| number(*bytes).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_convert_to_equal_f32_values() {
        let values = |packed: LoadOnlyType, bytes: &[u8]| -> Vec<f32> {
            let out = packed.unpack(bytes);
            out.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let numbers = [-3i8, 0, 127, -128];
        let want: Vec<f32> = numbers.map(f32::from).to_vec();
        assert_eq!(values(LoadOnlyType::I8, &numbers.map(|n| n as u8)), want);
        assert_eq!(values(LoadOnlyType::I16, &numbers.map(|n| i16::from(n).to_le_bytes()).concat()), want);
        assert_eq!(values(LoadOnlyType::I32, &numbers.map(|n| i32::from(n).to_le_bytes()).concat()), want);
        assert_eq!(values(LoadOnlyType::I64, &numbers.map(|n| i64::from(n).to_le_bytes()).concat()), want);
        assert_eq!(values(LoadOnlyType::F64, &numbers.map(|n| f64::from(n).to_le_bytes()).concat()), want);
        assert_eq!(values(LoadOnlyType::F64, &1e300f64.to_le_bytes()), [f32::INFINITY]);
    }
}
