//! Quality measurements for KV configurations: perplexity, KL divergence, needle, distortion.
#![forbid(unsafe_code)]
