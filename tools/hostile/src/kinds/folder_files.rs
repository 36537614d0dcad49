//! Changes of a folder's files, for every kind that writes folders.

use crate::chance::Choices;

/// Returns where the header of a safetensors file ends; it begins at byte 8.
pub(super) fn header_end(weights: &[u8]) -> usize {
    8 + weights.first_chunk().map_or(0, |length| u64::from_le_bytes(*length) as usize)
}

/// Returns a safetensors file with one of these names in its header replaced.
pub(super) fn with_header(chance: &mut Choices, weights: &[u8], pairs: &[(&str, &str)]) -> Vec<u8> {
    let end = header_end(weights);
    let changed = replaced(chance, &String::from_utf8_lossy(&weights[8..end]), pairs);
    let length = (changed.len() as u64).to_le_bytes();
    [&length, changed.as_bytes(), &weights[end..]].concat()
}

/// Replaces the first text of one pair by the second: everywhere, or at its first place.
pub(super) fn replaced(chance: &mut Choices, text: &str, pairs: &[(&str, &str)]) -> String {
    let (from, to) = chance.of(pairs);
    if chance.one_in(2) { text.replace(from, to) } else { text.replacen(from, to, 1) }
}

/// Replaces the value of a setting in each line of a configuration that begins with it.
pub(super) fn with_setting<'v>(config: &str, key: &str, mut value: impl FnMut() -> &'v str) -> String {
    let start = format!("\"{key}\"");
    let line = |line: &str| match line.trim_start().starts_with(&start) {
        true => format!("{start}: {}{}", value(), if line.ends_with(',') { "," } else { "" }),
        false => line.to_owned(),
    };
    config.lines().map(line).collect::<Vec<_>>().join("\n")
}
