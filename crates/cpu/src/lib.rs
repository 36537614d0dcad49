//! The CPU device: scalar, AVX2 and AVX-512 kernels behind capability tokens, and a thread pool.
