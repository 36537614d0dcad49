//! Short names of integers, halves and products on tensor cores, for every kernel: NVRTC comes without headers.

use crate::Header;

/// The header.
pub(crate) const HALF_HEADER: Header = Header { name: "half.cuh", text: include_str!("half.cuh") };
