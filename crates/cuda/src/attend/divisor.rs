//! Division by numbers that a launch knows: a multiplication and a shift, where the compiler takes
//! some twenty dependent instructions for an unknown divisor.

use bytemuck::{Pod, Zeroable};

/// `Divisor` of `attend.cuh`: for n below 2^31, `n / d` is `(n + n * factor / 2^32) / 2^shift`
/// ([Granlund and Montgomery](https://doi.org/10.1145/178243.178249)).
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Divisor {
    factor: u32,
    shift: u32,
}

impl Divisor {
    /// The divisor `by`, positive and less than 2^31; 1 where it is 0 and has nothing to divide.
    pub fn new(by: usize) -> Self {
        let by = by.max(1) as u64;
        let shift = by.next_power_of_two().ilog2();
        let factor = ((((1u64 << shift) - by) << 32) / by + 1) as u32;
        Self { factor, shift }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_exact_below_two_to_the_31() {
        const END: u64 = 1 << 31;
        for by in (1..100).chain([127, 128, 129, 1000, 65_535, 65_536, 1 << 30, (1 << 30) + 1, END - 1]) {
            let Divisor { factor, shift } = Divisor::new(by as usize);
            let quotient = |n: u64| {
                let sum = ((n * u64::from(factor)) >> 32) + n;
                assert!(sum < 1 << 32, "{n} / {by}");
                sum >> shift
            };
            let ends = (0..200).flat_map(|k| [k * by, (k + 1) * by - 1, END - 1 - k]).filter(|n| *n < END);
            for n in ends.chain([END / by * by - 1]) {
                assert_eq!(quotient(n), n / by, "{n} / {by}");
            }
        }
    }
}
