//! Asking for memory ahead of use.
//!
//! The hardware follows a stream of lines by itself, but not far enough ahead for kernels that spend time on each line:
//! measured with weights that no cache holds, hints raise q4_K from half of the memory's speed to all of it and cost
//! the others nothing.

use crate::lanes::prefetch_line;
use crate::matmul::panel::Line;

/// Asks for what lies `ahead` bytes beyond `lines`, unless that is 0. Panels lie one after the other, so that is what is
/// read a while later.
#[inline(always)]
pub(super) fn prefetch(lines: &[Line], ahead: usize) {
    if ahead == 0 {
        return;
    }
    for line in lines {
        prefetch_line(std::ptr::from_ref(line).cast::<u8>().wrapping_add(ahead));
    }
}
