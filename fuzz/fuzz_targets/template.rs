//! Arbitrary text as a chat template, and as a message.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::template(bytes);
});
