//! Read and write GGUF v2 and v3 files; every byte is untrusted.
