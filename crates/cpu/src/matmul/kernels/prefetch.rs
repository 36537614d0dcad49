//! Asking for memory ahead of use.
//!
//! The hardware follows a stream of lines by itself, but not far enough ahead for kernels that spend time on each line:
//! measured with weights that no cache holds, hints raise q4_K from half of the memory's speed to all of it and cost
//! the others nothing.

use crate::matmul::panel::Line;

/// Asks for what lies `ahead` bytes beyond `lines`, unless that is 0. Panels lie one after the other, so that is what is
/// read a while later.
#[inline(always)]
pub(super) fn prefetch(lines: &[Line], ahead: usize) {
    if ahead == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    for line in lines {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = std::ptr::from_ref(line).cast::<i8>().wrapping_add(ahead);
        // SAFETY: a prefetch of any address is a hint: it neither faults nor changes memory.
        #[allow(unused_unsafe, reason = "newer compilers know that it is safe")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(ahead);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = lines;
}
