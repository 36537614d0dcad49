//! The tokenizers of the bundled model and of the shared vocabularies on arbitrary text.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvant_fuzz_targets::tokenizer(bytes);
});
