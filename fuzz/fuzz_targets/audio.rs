//! Arbitrary bytes as an audio file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::audio(bytes);
});
