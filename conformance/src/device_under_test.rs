//! A device under test, and the operations common to all suites.

use std::fmt::Display;

use kvant_backend::{Backend, BackendError, Page, WeightSource};
use kvant_codec::DType;

use crate::Skipped;
use crate::judge::{Expected, assert_close, first_written};

/// Arithmetic of GEMMs with quantized weights. It determines the error bounds of GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Unrounded activations, and weights as decoded by the codec.
    Float,
    /// Activations in signed bytes with one step per row and 32 columns, rotated for the rotated
    /// formats, whose levels are bytes too ([`kvant_codec::ByteBook`]). With float weights,
    /// activations are unrounded.
    EightBit,
    /// Tensor cores: weights and activations rounded to f16, a row of activations times a power of
    /// two that scales its largest to 2^14 .. 2^15 (of at most 2^100). Sums in f32.
    Halves {
        /// Minimum rows of such a GEMM; with fewer, [`Arithmetic::EightBit`] applies.
        from: usize,
    },
}

/// Arithmetic of attention. It determines the error bounds of attention; a device with another
/// arithmetic needs a new variant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Attention {
    /// Unrounded queries and weights, tiles as decoded by the codec, sums in f64.
    Exact,
    /// The same with sums in f32: of attention to selected tokens.
    Floats,
    /// Queries and weights of quantized tiles in integers, codebooks in bytes, the rest in f32.
    Integers {
        /// The largest integer of one byte.
        byte: f64,
        /// The largest integer of two bytes.
        split: f64,
        /// The largest dithered weight, and the V types whose weights are dithered.
        dithered: (f64, &'static [DType]),
    },
    /// All factors rounded to f16, codebooks in bytes, sums in f32.
    Halves,
}

impl Attention {
    /// Returns the steps of the largest value of a query on quantized keys of type `keys`; infinite
    /// if unrounded. q8_0 has so small an error that its queries use two bytes.
    pub(crate) fn query_steps(self, keys: DType) -> f64 {
        match self {
            Self::Exact | Self::Floats | Self::Halves => f64::INFINITY,
            Self::Integers { split, .. } if keys == DType::Q8_0 => split,
            Self::Integers { byte, .. } => byte,
        }
    }

    /// Returns the maximum variance of rounding of weights on quantized values of type `values`,
    /// for a largest weight of 1.
    pub(crate) fn weight_variance(self, values: DType) -> f64 {
        match self {
            Self::Exact | Self::Floats | Self::Halves => 0.0,
            // Rounding up with probability p, and down with 1 - p, has a variance of p (1 - p).
            Self::Integers { dithered: (steps, types), .. } if types.contains(&values) => {
                steps.powi(-2) / 4.0
            }
            Self::Integers { split, .. } => split.powi(-2) / 12.0,
        }
    }
}

/// Which combinations of edge sizes are requested of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// All of them.
    Every,
    /// The fewest combinations that contain every edge size: for a device that is a thousand times
    /// slower than others. [`Skipped`] counts the omitted ones.
    Each,
}

/// A device, its name in messages, and its arithmetic.
pub struct DeviceUnderTest<B> {
    name: &'static str,
    device: B,
    arithmetic: Arithmetic,
    attention: Attention,
    coverage: Coverage,
    invariant_rows: usize,
}

/// Poisoned guard values after every output, which must stay unchanged.
const MARGIN: usize = 3;

impl<B: Backend> DeviceUnderTest<B> {
    /// Creates a device under test for all suites.
    pub fn new(name: &'static str, device: B, arithmetic: Arithmetic, attention: Attention) -> Self {
        let (coverage, invariant_rows) = (Coverage::Every, usize::MAX);
        Self { name, device, arithmetic, attention, coverage, invariant_rows }
    }

    /// Sets the coverage of combinations of edge sizes.
    pub fn with_coverage(self, coverage: Coverage) -> Self {
        Self { coverage, ..self }
    }

    /// Declares that rounding of attention depends on other rows of the same sequence in a step of
    /// more than `rows` of them.
    pub fn with_invariant_rows(self, rows: usize) -> Self {
        Self { invariant_rows: rows, ..self }
    }

    /// Returns its name in messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the device.
    pub fn device(&self) -> &B {
        &self.device
    }

    /// Returns its arithmetic of GEMMs with quantized weights.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Returns its arithmetic of attention.
    pub fn attention(&self) -> Attention {
        self.attention
    }

    /// Returns the maximum number of rows of a sequence in a step whose attention is bit-identical
    /// to that of each alone. Rows of other sequences never affect it.
    pub fn invariant_rows(&self) -> usize {
        self.invariant_rows
    }

    /// Returns an empty list of skipped cases.
    pub fn skipped(&self) -> Skipped {
        Skipped::new(self.coverage)
    }

    /// Returns the start of every message: device and op, then the case.
    pub fn case(&self, op: &str, case: impl Display) -> String {
        format!("{}::{op}, {case}", self.name)
    }

    /// Creates a buffer with `values`.
    pub fn upload(&self, values: &[f32]) -> B::Buffer {
        let mut buffer = self.device.buffer(values.len()).expect("memory for a test");
        self.device.write(&mut buffer, values).expect("the buffer accepts its size");
        buffer
    }

    /// Creates a buffer for `len` results and guard values, all NaN.
    pub fn poisoned(&self, len: usize) -> B::Buffer {
        self.upload(&vec![f32::NAN; len + MARGIN])
    }

    /// Creates a buffer with `values` and poisoned guard values.
    pub fn guarded(&self, values: &[f32]) -> B::Buffer {
        self.upload(&[values, &[f32::NAN; MARGIN]].concat())
    }

    /// Reads the first `len` values of `buffer`.
    pub fn download(&self, buffer: &B::Buffer, len: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; len];
        self.device.read(buffer, 0, &mut values).expect("the requested range exists");
        values
    }

    /// Checks a buffer from [`DeviceUnderTest::poisoned`] or [`DeviceUnderTest::guarded`] against
    /// `want`, and its guard values.
    ///
    /// # Panics
    ///
    /// As [`assert_close`].
    #[track_caller]
    pub fn expect(&self, got: &B::Buffer, want: &[Expected], what: &dyn Fn() -> String) {
        assert_close(&self.results(got, want.len(), what), want, what);
    }

    /// Returns the `len` results in a buffer from [`DeviceUnderTest::poisoned`] or
    /// [`DeviceUnderTest::guarded`].
    ///
    /// # Panics
    ///
    /// When the guard values have changed.
    #[track_caller]
    pub fn results(&self, got: &B::Buffer, len: usize, what: &dyn Fn() -> String) -> Vec<f32> {
        let mut got = self.download(got, len + MARGIN);
        let guard = got.split_off(len);
        if let Some(index) = first_written(&guard) {
            panic!("{}: value {index} beyond the output was written: {}", what(), guard[index]);
        }
        got
    }

    /// Returns the bytes of a page.
    pub fn page_bytes(&self, page: &B::Page) -> Vec<u8> {
        let mut bytes = vec![0; page.n_bytes()];
        self.device.read_page(page, &mut bytes).expect("a page has its stated length");
        bytes
    }

    /// Checks that a call is rejected with one line.
    ///
    /// # Panics
    ///
    /// When the call succeeds.
    #[track_caller]
    pub fn expect_refusal<T>(&self, op: &str, case: &str, result: Result<T, BackendError>) {
        let Err(error) = result else { panic!("{} is not refused", self.case(op, case)) };
        let message = error.to_string();
        assert_eq!(message.lines().count(), 1, "{}: {message:?}", self.case(op, case));
    }

    /// Creates a matrix.
    ///
    /// # Panics
    ///
    /// When the device rejects it.
    #[track_caller]
    pub fn matrix(&self, source: WeightSource) -> B::Matrix {
        let case = format!("{} {}x{}", source.dtype, source.n_out, source.n_in);
        self.device
            .upload_matrix(source)
            .unwrap_or_else(|error| panic!("{}: {error}", self.case("matrix", case)))
    }

    /// Creates a matrix that is also an embedding table.
    ///
    /// # Panics
    ///
    /// When the device rejects it.
    #[track_caller]
    pub fn tied(&self, source: WeightSource) -> B::Matrix {
        let case = format!("{} {}x{}", source.dtype, source.n_out, source.n_in);
        self.device.upload_tied(source).unwrap_or_else(|error| panic!("{}: {error}", self.case("tied", case)))
    }
}
