//! Arbitrary bytes as a file that a model is shown.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::picture(bytes);
});
