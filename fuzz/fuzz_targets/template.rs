//! Arbitrary text as a chat template, and as what is said in one.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::template(bytes);
});
