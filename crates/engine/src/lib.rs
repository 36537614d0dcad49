//! Run large language models on a compressed KV cache.
