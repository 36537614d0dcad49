//! A CUDA driver for machines without a GPU: the functions of `libcuda` that `kvant-cuda` calls.
//!
//! It keeps account of device memory, rounded as the driver rounds it, counts calls, and checks
//! what a driver would reject: copies outside of allocations, calls without a current context,
//! waits within a capture. It computes nothing: launches do nothing and copies to the host are
//! zeros. So it measures what the host does for a step, from one wait to the next, and nothing
//! else.
//!
//! ```sh
//! cargo build --release -p kvant-cuda-stub
//! mkdir stub && ln -s ../target/release/libkvant_cuda_stub.so stub/libcuda.so
//! LD_LIBRARY_PATH=stub:$NVRTC KVANT_STUB_REPORT=counts.json kvant bench --device cuda:0 ..
//! ```
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `KVANT_STUB_ARCH` | compute capability times ten | 90 |
//! | `KVANT_STUB_SMS` | streaming multiprocessors | 132 |
//! | `KVANT_STUB_SHARED` | shared memory of a block, bytes | 232448 |
//! | `KVANT_STUB_MEMORY_MIB` | memory of the device | 81920 |
//! | `KVANT_STUB_CUDA` | CUDA version times 1,000 | 13000 |
//! | `KVANT_STUB_REPORT` | file for the counts, written as JSON at exit | none |

#![cfg(unix)]
#![allow(non_snake_case, reason = "the names of the driver's functions")]

mod counts;
mod exports;
mod memory;
mod settings;
