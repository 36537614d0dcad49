//! The vector floor: instruction sets as capability tokens, and the vector layers that kernels are
//! written over. It imports from no other floor.

pub(crate) mod amx;
pub(crate) mod isa;
#[cfg(target_arch = "x86_64")]
mod look_up;
pub(crate) mod matmul;
pub(crate) mod matrix_unit;
pub(crate) mod tokens;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) mod vec128;
pub(crate) mod vec16;
