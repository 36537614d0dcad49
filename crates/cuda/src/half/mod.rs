//! Short names of integers, f16 and MMA instructions, for every kernel: NVRTC comes without
//! headers.

use crate::Header;

/// The header.
pub(crate) const HALF_HEADER: Header = Header { name: "half.cuh", text: include_str!("half.cuh") };

/// Asynchronous copies to shared memory (`cp.async`).
pub(crate) const COPIES_HEADER: Header = Header { name: "copies.cuh", text: include_str!("copies.cuh") };

/// Warpgroup MMAs (`wgmma`), for sources with [`WARPGROUP_OPTIONS`].
pub(crate) const WARPGROUP_HEADER: Header =
    Header { name: "warpgroup.cuh", text: include_str!("warpgroup.cuh") };

/// The one compute capability, times ten, with warpgroup MMAs: later ones lack them.
pub(crate) const WARPGROUP_ARCH: u32 = 90;

/// Compiler options of sources for that compute capability.
pub(crate) const WARPGROUP_OPTIONS: [&str; 1] = ["--gpu-architecture=compute_90a"];
