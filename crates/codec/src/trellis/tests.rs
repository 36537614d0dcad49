//! Tests of the trellis' memory and its error.

use half::f16;

use super::train::{round, samples, to_steps, train};
use super::*;
use crate::random::Random;
use crate::turbo::{decode_rotated, encode_rotated};

const BOTH: [Trellis; 2] = [Trellis::TURBO2T, Trellis::TURBO3T];

fn gaussian<const N: usize>(random: &mut Random) -> [f32; N] {
    let mut x = [0.0; N];
    random.fill_gaussian(&mut x, 1.0);
    x
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

/// Returns the mean squared error on slices from N(0, 1), scales included.
fn loss<const N: usize>(trellis: &Trellis, values: usize) -> f64 {
    let (mut random, mut error) = (Random::new(11), 0.0);
    for _ in 0..values / N {
        let x = gaussian::<N>(&mut random);
        let back = decode_rotated(trellis, &encode_rotated(trellis, &x));
        error += x.iter().zip(back).map(|(&x, back)| f64::from(x - back).powi(2)).sum::<f64>();
    }
    error / values as f64
}

#[test]
fn sequence_is_a_ring_through_all_dims() {
    for n in [32, 64, 128] {
        for p in 0..n {
            assert_eq!(previous_dim(n, dim_at(n, (p + 1) % n)), dim_at(n, p), "{p} of {n}");
        }
        let mut dims: Vec<usize> = (0..n).map(|p| dim_at(n, p)).collect();
        assert_eq!(dims[..3], [0, 16, if n == 32 { 1 } else { 32 }]);
        dims.sort_unstable();
        assert!(dims.into_iter().eq(0..n));
    }
}

/// The level of a dim, spelled out by the documented order, changes with its own index and its
/// predecessors only.
#[test]
fn levels_depend_on_the_last_six_bits_and_nothing_else() {
    for trellis in BOTH {
        let (bits, mut random) = (trellis.bits() as usize, Random::new(1));
        let indices: [u8; 64] = std::array::from_fn(|_| (random.bits() % (1 << bits)) as u8);
        let values = trellis.values(&indices);
        let order: Vec<usize> = (0..16).flat_map(|first| (0..4).map(move |i| first + 16 * i)).collect();
        for p in 0..64 {
            let dims: Vec<usize> = (0..6 / bits).map(|back| order[(p + 64 - back) % 64]).collect();
            let window = dims.iter().rev().fold(0, |window, &dim| window << bits | usize::from(indices[dim]));
            let want = f32::from(trellis.levels()[window]) / 40.0 / 128f32.sqrt();
            assert!((values[dims[0]] - want).abs() <= 1e-7, "{bits} bits, place {p}");
            for changed in 0..64 {
                let mut other = indices;
                other[changed] ^= 1;
                let is_same = trellis.values(&other)[dims[0]] == values[dims[0]];
                assert_eq!(is_same, !dims.contains(&changed), "{bits} bits, place {p}, {changed} changed");
            }
        }
    }
}

#[test]
fn error_is_a_third_below_a_codebooks_at_every_slice_width() {
    // Means over 200,000 values: relative standard error 0.4 %.
    for (trellis, want) in BOTH.iter().zip([[0.0801, 0.0798, 0.0788], [0.0216, 0.0212, 0.0206]]) {
        let got = [loss::<128>(trellis, 200_000), loss::<64>(trellis, 200_000), loss::<32>(trellis, 200_000)];
        for (got, want) in got.into_iter().zip(want) {
            assert!((got / want - 1.0).abs() <= 0.015, "{} bits: {got}, want {want}", trellis.bits());
        }
    }
}

#[test]
fn rings_are_nearly_optimal() {
    for (trellis, max_ratio) in BOTH.iter().zip([1.015, 1.005]) {
        let (mut random, mut best, mut got) = (Random::new(5), 0.0, 0.0);
        for _ in 0..200 {
            let z = gaussian::<128>(&mut random);
            let x: [i32; 128] = std::array::from_fn(|p| Trellis::quantize(z[dim_at(128, p)]));
            let error = |indices: [u8; 128]| {
                let values = trellis.values(&indices).map(|v| v * 128f32.sqrt());
                values.iter().zip(z).map(|(v, z)| f64::from(v - z).powi(2)).sum::<f64>()
            };
            let all = (0..trellis.states()).map(|seam| error(trellis.encode_ring(&x, seam)));
            best += all.fold(f64::INFINITY, f64::min);
            got += error(trellis.indices(&z));
        }
        assert!(got <= max_ratio * best, "{} bits: {got}, best {best}", trellis.bits());
    }
}

/// Training again, on fewer and on other samples, reaches the same error; and the trained tables
/// are a fixed point.
#[test]
fn tables_are_reproduced_by_training() {
    for (trellis, want) in BOTH.iter().zip([0.0790, 0.0219]) {
        let (bits, few, others) = (trellis.bits(), samples(60_000, 3), samples(400_000, 4));
        let again = round(bits, &train(bits, 20, &few), &others).mse;
        assert!((again / want - 1.0).abs() <= 0.03, "{bits} bits: {again}, want {want}");
        let levels = trellis.levels().map(|level| f64::from(level) * f64::from(Trellis::STEP));
        let stays = round(bits, &levels, &others);
        assert!((stays.mse / want - 1.0).abs() <= 0.015, "{bits} bits: {}, want {want}", stays.mse);
        for (w, (was, is)) in trellis.levels().iter().zip(to_steps(&stays.levels)).enumerate() {
            // Allows for rounding and incomplete convergence: the outermost levels have few
            // samples.
            let within = if was.abs() > 60 { 4 } else { 2 };
            assert!((was - is).abs() <= within, "{bits} bits, window {w}: {was} becomes {is}");
        }
    }
}

#[test]
fn decoded_slice_has_the_norm_of_the_input() {
    for trellis in BOTH {
        for sigma in [1e-2, 1.0, 300.0] {
            let x = gaussian::<128>(&mut Random::new(2)).map(|v| v * sigma);
            let back = decode_rotated(&trellis, &encode_rotated(&trellis, &x));
            // Half a step of the f16 scale, 2^-11, and a little f32 rounding.
            assert!((norm(&back) / norm(&x) - 1.0).abs() <= 4.9e-4, "{} bits, {sigma}", trellis.bits());
        }
    }
}

#[test]
fn zero_and_vanishing_slices_have_scale_zero() {
    for trellis in BOTH {
        let want = encode_rotated(&trellis, &[0.0; 64]);
        assert_eq!(want.scale, f16::ZERO);
        for v in [-0.0, f32::from_bits(1), 1e-12, f32::NAN] {
            assert_eq!(encode_rotated(&trellis, &[v; 64]), want, "{v}");
        }
    }
}

/// One coordinate carries the whole norm: the worst slice, and the largest values that the encoder
/// receives.
#[test]
fn a_spike_stays_the_largest_coordinate_and_keeps_its_sign() {
    for trellis in BOTH {
        for (at, spike) in [(0, 2.0), (17, -2.0), (127, -65504.0)] {
            let mut y = [0.0; 128];
            y[at] = spike;
            let back = decode_rotated(&trellis, &encode_rotated(&trellis, &y));
            let is_largest = back.iter().enumerate().all(|(i, v)| i == at || v.abs() < back[at].abs());
            assert!(is_largest && back[at] * spike > 0.0, "{} bits: {back:?}", trellis.bits());
        }
    }
}

#[test]
fn encoding_is_idempotent() {
    let mut random = Random::new(8);
    for trellis in BOTH {
        for _ in 0..200 {
            let coded = encode_rotated(&trellis, &gaussian::<64>(&mut random));
            let again = encode_rotated(&trellis, &decode_rotated(&trellis, &coded));
            assert_eq!(again, coded, "{} bits", trellis.bits());
        }
    }
}
