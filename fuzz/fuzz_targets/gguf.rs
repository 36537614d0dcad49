//! The GGUF parser on arbitrary bytes; what must hold is `kvant_gguf::oracle`'s to say.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvant_gguf::oracle::check(bytes));
