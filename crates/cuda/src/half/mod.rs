//! Short names of integers, halves and products on tensor cores, for every kernel: NVRTC comes without headers.

use crate::Header;

/// The header.
pub(crate) const HALF_HEADER: Header = Header { name: "half.cuh", text: include_str!("half.cuh") };

/// Copies to shared memory that threads do not wait for.
pub(crate) const COPIES_HEADER: Header = Header { name: "copies.cuh", text: include_str!("copies.cuh") };

/// Products of warpgroups, for sources with [`WARPGROUP_OPTIONS`].
pub(crate) const WARPGROUP_HEADER: Header =
    Header { name: "warpgroup.cuh", text: include_str!("warpgroup.cuh") };

/// The one compute capability, times ten, that has these products: not even a later one does.
pub(crate) const WARPGROUP_ARCH: u32 = 90;

/// What has a source compiled for it.
pub(crate) const WARPGROUP_OPTIONS: [&str; 1] = ["--gpu-architecture=compute_90a"];
