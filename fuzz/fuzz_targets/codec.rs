//! Every codec on arbitrary bytes and numbers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::codec(bytes);
});
