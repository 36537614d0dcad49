//! Software prefetch of weights.
//!
//! The hardware prefetcher follows a sequence of lines, but not far enough ahead for kernels that
//! spend time on each line: measured with weights that no cache holds, hints raise q4_K from half
//! of the memory bandwidth to all of it and cost the others nothing.

use crate::ops::matmul::panel::Line;
use crate::simd::vec16::prefetch_line;

/// Prefetches the lines `prefetch_distance` bytes beyond `lines`, unless that is 0. Panels are
/// contiguous, so these are read a while later.
#[inline(always)]
pub(super) fn prefetch(lines: &[Line], prefetch_distance: usize) {
    if prefetch_distance == 0 {
        return;
    }
    for line in lines {
        prefetch_line(std::ptr::from_ref(line).cast::<u8>().wrapping_add(prefetch_distance));
    }
}
