//! The compressed KV cache: pages, tiles, f16 tail, per-head types and policies.
