//! Arbitrary bytes as an image file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::image(bytes);
});
