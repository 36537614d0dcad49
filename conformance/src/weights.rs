//! Weight matrices of every type, and the error bounds of GEMMs.
//!
//! A product `sum_j w[j] x[j]` of `n` terms, added in any order, is off by at most `roundings(n +
//! 7) * sum_j m[j] |x[j]|`: the sum takes `n` roundings, scales, minima and the step of the
//! activations seven at most, and `m[j]` is the magnitude that the kernel adds for a weight: the
//! code's part and the minimum's part separately, if the type has minima.
//!
//! In [`Arithmetic::EightBit`] an activation is off by half a step of its block, `step = max|x| /
//! 127`, and by four roundings of the quotient `x / step` of up to 127, so `0.5001 step`. With
//! rotated types, activations are rotated like the levels (the product is invariant under an
//! orthogonal matrix), a level is off by half a step of its [`ByteBook`] and a rotation adds 32
//! terms in five butterflies and scales them, in the codec as on the device.
//!
//! In [`Arithmetic::Halves`] weights are decoded, and then rounded to f16 as activations are:
//! either is off by 2^-11 relative, or near zero by 2^-25 (of an activation: times the power of two
//! of its row, so 2^-39 of its largest or, as that is at most 2^100, 2^-125). Levels have two bytes
//! there, at least `FINER` times as fine as one. Tensor cores may truncate instead of rounding,
//! which costs up to twice as much.

use kvant_backend::WeightSource;
use kvant_codec::fields::{FieldSpec, Fields};
use kvant_codec::random::Random;
use kvant_codec::{ByteBook, DType, decode, encode};

use crate::Arithmetic;
use crate::judge::{Expected, roundings};
use crate::reference::{dot, rotate};

/// Columns with a common step of the activations, which are rotated together.
const BLOCK: usize = 32;
/// Half a step, and the rounding of its quotient.
const HALF_STEP: f64 = 0.5001;
/// Steps of the largest activation of a block.
const STEPS: f64 = 127.0;
/// Resolution of two-byte levels relative to one byte.
const FINER: f64 = 128.0;
/// Maximum relative error of f16.
const HALF: f64 = 1.0 / 2048.0;
/// Maximum absolute error near zero in f16: half the smallest number.
const MIN_HALF: f64 = HALF / (1u64 << 14) as f64;
/// Roundings of a rotation in butterflies: five additions, the factor; in the codec also the level
/// times its scale.
const ROTATION_ROUNDINGS: usize = 14;

/// Returns independent Gaussians of standard deviation `sigma`.
pub fn gaussian(seed: u64, len: usize, sigma: f64) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Random::new(seed).fill_gaussian(&mut values, sigma);
    values
}

/// A matrix in file format, and its decoded rows.
pub struct Weights {
    /// Type of the rows.
    pub dtype: DType,
    /// Columns.
    pub n_in: usize,
    bytes: Vec<u8>,
    rows: Vec<Row>,
}

/// A row of weights; every list is `[n_in]`.
struct Row {
    values: Vec<f64>,
    /// Magnitude that is added for each weight.
    magnitudes: Vec<f64>,
    /// In the rotated types: levels times scales, and half a step of their byte representation.
    levels: Option<(Vec<f64>, Vec<f64>)>,
}

impl Weights {
    /// Encodes `n_out` rows of Gaussians as `dtype`.
    pub fn gaussian(dtype: DType, n_out: usize, n_in: usize, seed: u64) -> Self {
        let row_bytes = dtype.row_bytes(n_in).expect("rows are whole blocks");
        let mut bytes = vec![0; n_out * row_bytes];
        encode(dtype, &gaussian(seed, n_out * n_in, 0.02), &mut bytes).expect("sizes agree");
        Self::from_bytes(dtype, n_in, bytes)
    }

    /// Decodes rows in file format of any origin.
    pub fn from_bytes(dtype: DType, n_in: usize, bytes: Vec<u8>) -> Self {
        let row_bytes = dtype.row_bytes(n_in).expect("rows are whole blocks");
        let rows = bytes.chunks_exact(row_bytes).map(|row| Row::read(dtype, n_in, row)).collect();
        Self { dtype, n_in, bytes, rows }
    }

    /// Returns the first `n_out` rows, for a device.
    pub fn source(&self, n_out: usize) -> WeightSource {
        let row_bytes = self.bytes.len() / self.rows.len();
        let bytes = self.bytes[..n_out * row_bytes].to_vec().into();
        WeightSource { dtype: self.dtype, n_out, n_in: self.n_in, bytes }
    }

    /// Returns row `index`: as decoded by the codec, within a few roundings for another order of
    /// operations.
    pub fn row(&self, index: usize) -> Vec<Expected> {
        let row = &self.rows[index];
        let tolerances: Vec<f64> = match (&row.levels, FieldSpec::of(self.dtype)) {
            (Some((levels, _)), _) => levels.chunks_exact(BLOCK).flat_map(rotated_errors).collect(),
            (None, Some(_)) => row.magnitudes.iter().map(|m| roundings(4) * m).collect(),
            (None, None) => vec![0.0; self.n_in],
        };
        row.values.iter().zip(tolerances).map(|(&value, tolerance)| Expected { value, tolerance }).collect()
    }

    /// Returns the product of row `index` with `x`, one of `rows` rows, on a device of this
    /// arithmetic.
    pub fn product(&self, index: usize, x: &Activations, rows: usize, arithmetic: Arithmetic) -> Expected {
        let row = &self.rows[index];
        let in_halves = matches!(arithmetic, Arithmetic::Halves { from } if rows >= from);
        let in_bytes = arithmetic != Arithmetic::Float && FieldSpec::of(self.dtype).is_some();
        let summed = roundings(self.n_in + 7);
        let lost = match &row.levels {
            _ if in_halves => self.lost_to_halves(row, x),
            Some((levels, half_steps)) if in_bytes => {
                let cols = levels.iter().zip(half_steps).zip(x.rotated_max.iter().zip(&x.rotated_half_steps));
                let bytes = cols.map(|((w, dw), (x, dx))| {
                    let w = w.abs();
                    w * dx + dw * (x + dx) + summed * (w + dw) * (x + dx)
                });
                let rotation_errors = levels.chunks_exact(BLOCK).zip(x.max_magnitudes.chunks_exact(BLOCK));
                let rotation_errors = rotation_errors.map(|(w, x)| {
                    roundings(ROTATION_ROUNDINGS) * norm_1(w) * norm_1(x) / (BLOCK as f64).sqrt()
                });
                bytes.sum::<f64>() + rotation_errors.sum::<f64>()
            }
            None if in_bytes => {
                let cols =
                    row.values.iter().zip(&row.magnitudes).zip(x.max_magnitudes.iter().zip(&x.half_steps));
                cols.map(|((w, m), (x, dx))| w.abs() * dx + summed * m * (x + dx)).sum()
            }
            _ => row.magnitudes.iter().zip(&x.max_magnitudes).map(|(m, x)| summed * m * x).sum(),
        };
        let of_input: f64 = row.values.iter().zip(&x.errors).map(|(w, dx)| w.abs() * dx).sum();
        Expected { value: dot(&row.values, &x.values), tolerance: lost + of_input }
    }

    fn lost_to_halves(&self, row: &Row, x: &Activations) -> f64 {
        let summed = 2.0 * roundings(self.n_in + 7);
        let decoded: Vec<f64> = match &row.levels {
            Some((levels, half_steps)) => {
                let finer = half_steps.chunks_exact(BLOCK).flat_map(|steps| spread(norm_1(steps) / FINER));
                levels.chunks_exact(BLOCK).flat_map(rotated_errors).zip(finer).map(|(a, b)| a + b).collect()
            }
            None => row.magnitudes.iter().map(|m| roundings(4) * m).collect(),
        };
        let largest = x.max_magnitudes.iter().fold(0.0f64, |max, x| max.max(*x));
        let min_half_step = (MIN_HALF / (1u64 << 14) as f64 * largest).max(MIN_HALF / 2f64.powi(100));
        let cols = row.values.iter().zip(decoded).zip(&x.max_magnitudes).map(|((w, decoded), x)| {
            let w = w.abs();
            let dw = decoded + HALF * (w + decoded) + MIN_HALF;
            let dx = HALF * x + min_half_step;
            w * dx + dw * (x + dx) + summed * (w + dw) * (x + dx)
        });
        cols.sum()
    }
}

impl Row {
    fn read(dtype: DType, n_in: usize, bytes: &[u8]) -> Self {
        let mut values = vec![0.0; n_in];
        decode(dtype, bytes, &mut values).expect("sizes agree");
        let values: Vec<f64> = values.into_iter().map(f64::from).collect();
        let mut row = Self { magnitudes: values.iter().map(|w| w.abs()).collect(), values, levels: None };
        if let Some(spec) = FieldSpec::of(dtype) {
            let blocks: Vec<_> =
                bytes.chunks_exact(dtype.block_bytes()).map(|block| Fields::read(dtype, block)).collect();
            row.split_minima(spec, &blocks);
            row.find_levels(spec, &blocks);
        }
        row
    }

    /// Adds code and minimum separately.
    fn split_minima(&mut self, spec: FieldSpec, blocks: &[Fields]) {
        if !spec.has_min {
            return;
        }
        for (i, (magnitude, value)) in self.magnitudes.iter_mut().zip(&self.values).enumerate() {
            let (fields, sub) = (&blocks[i / spec.len], i % spec.len / spec.sub_len);
            let unit = f64::from(fields.min.to_f32());
            let min = if spec.len == BLOCK { unit } else { -unit * f64::from(fields.sub_mins[sub]) };
            *magnitude = (value - min).abs() + min.abs();
        }
    }

    fn find_levels(&mut self, spec: FieldSpec, blocks: &[Fields]) {
        let Some(book) = spec.book else { return };
        // Centroids are levels over the square root of 128.
        let half_step = HALF_STEP * f64::from(ByteBook::of(&book).step) * 128f64.sqrt();
        let scale =
            |fields: &Fields, j: usize| f64::from([fields.scale, fields.min][j / spec.sub_len].to_f32());
        let level = |fields: &Fields, j: usize| f64::from(book.levels()[usize::from(fields.codes[j])]);
        let all = || blocks.iter().flat_map(|fields| (0..spec.len).map(move |j| (fields, j)));
        let levels = all().map(|(fields, j)| level(fields, j) * scale(fields, j)).collect();
        self.levels = Some((levels, all().map(|(fields, j)| half_step * scale(fields, j).abs()).collect()));
    }
}

fn norm_1(values: &[f64]) -> f64 {
    values.iter().map(|v| v.abs()).sum()
}

/// Returns the error bounds of a rotated block, from the magnitudes of its inputs.
fn rotated_errors(block: &[f64]) -> impl Iterator<Item = f64> {
    spread(roundings(ROTATION_ROUNDINGS) * norm_1(block))
}

/// Returns the error bounds of a block after rotation, for errors with the sum `total`.
fn spread(total: f64) -> impl Iterator<Item = f64> {
    std::iter::repeat_n(total / (BLOCK as f64).sqrt(), BLOCK)
}

/// A row of activations, and its error bounds.
pub struct Activations {
    /// `[n_in]`, normalized if the op normalizes.
    values: Vec<f64>,
    /// Error bounds before rounding for the GEMM: those of the norm, or of the op that computes the
    /// row.
    errors: Vec<f64>,
    /// Maximum magnitudes, before and after rotation.
    max_magnitudes: Vec<f64>,
    rotated_max: Vec<f64>,
    half_steps: Vec<f64>,
    rotated_half_steps: Vec<f64>,
}

impl Activations {
    /// Creates an exact row.
    pub fn new(x: &[f32]) -> Self {
        Self::known_within(x.iter().copied().map(f64::from).collect(), vec![0.0; x.len()])
    }

    /// Creates a row of integers up to 127, with 127 among any 32, after rotation for the rotated
    /// types: exact in bytes, except for the roundings of the rotation and its inverse.
    pub fn integers(x: &[f32]) -> Self {
        let row = Self::new(x);
        let rotation_errors = row
            .values
            .chunks_exact(BLOCK)
            .flat_map(|block| spread(roundings(ROTATION_ROUNDINGS + 1) * norm_1(block)));
        let rotated_half_steps = rotation_errors.collect();
        Self { half_steps: vec![0.0; x.len()], rotated_half_steps, ..row }
    }

    /// Creates a row after its norm: `n` squares added in any order, whose error the root halves,
    /// then a mean, eps, a root, its inverse (two units of the last place if a device approximates
    /// it) and two factors: eight roundings.
    pub fn normalized(x: &[f32], weight: &[f32], eps: f32) -> Self {
        let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
        let (values, relative) = (crate::reference::rms_norm(&x, weight, eps), norm_error(x.len()));
        let errors = values.iter().map(|v| relative * v.abs()).collect();
        Self::known_within(values, errors)
    }

    /// Creates a row from another op's results.
    pub fn from_expected(row: &[Expected]) -> Self {
        let [values, errors] = [|want: &Expected| want.value, |want: &Expected| want.tolerance]
            .map(|of| row.iter().map(of).collect());
        Self::known_within(values, errors)
    }

    fn known_within(values: Vec<f64>, errors: Vec<f64>) -> Self {
        let max_magnitudes: Vec<f64> = values.iter().zip(&errors).map(|(x, dx)| x.abs() + dx).collect();
        // A row that ends within a block never has a rotated type.
        let errors_after_rotation = errors.chunks_exact(BLOCK).flat_map(|errors| spread(norm_1(errors)));
        let rotated = rotate(&values);
        let rotated_max: Vec<f64> =
            rotated.iter().zip(errors_after_rotation).map(|(x, dx)| x.abs() + dx).collect();
        let (half_steps, rotated_half_steps) = (half_steps(&max_magnitudes), half_steps(&rotated_max));
        Self { values, errors, max_magnitudes, rotated_max, half_steps, rotated_half_steps }
    }
}

/// Returns the maximum relative error of a row of `n` after its RMS norm; see
/// [`Activations::normalized`].
pub fn norm_error(n: usize) -> f64 {
    roundings(n.div_ceil(2) + 8)
}

/// Returns the rounding error of each of `values` in bytes.
fn half_steps(values: &[f64]) -> Vec<f64> {
    let step = |block: &[f64]| block.iter().fold(0.0f64, |max, v| max.max(v.abs())) / STEPS;
    values.chunks(BLOCK).flat_map(|block| std::iter::repeat_n(HALF_STEP * step(block), block.len())).collect()
}
