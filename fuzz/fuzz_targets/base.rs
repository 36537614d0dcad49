//! Base-logits files with arbitrary changes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::base(bytes);
});
