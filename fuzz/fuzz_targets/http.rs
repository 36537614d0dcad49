//! Arbitrary bodies of requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::http(bytes);
});
