//! The random number generator of the sampler.

/// xoshiro256++ (Blackman and Vigna, <https://prng.di.unimi.it>), seeded through SplitMix64.
#[derive(Debug, Clone)]
pub(super) struct Xoshiro256([u64; 4]);

impl Xoshiro256 {
    pub(super) fn new(seed: u64) -> Self {
        let mut x = seed;
        Xoshiro256(std::array::from_fn(|_| {
            x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Returns a uniform number in [0, 1) in steps of 2^-53.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_pinned() {
        // First outputs of xoshiro256++ after SplitMix64 of 0.
        let mut rng = Xoshiro256::new(0);
        assert_eq!(rng.0[0], 0xE220_A839_7B1D_CDAF);
        assert_eq!(rng.next(), 0x5317_5D61_490B_23DF);
    }
}
