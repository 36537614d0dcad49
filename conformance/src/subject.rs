//! A device under test, and what every suite does with it.

use std::fmt::Display;

use kvant_backend::{Backend, BackendError, Page, WeightSource};
use kvant_codec::DType;

use crate::Lacks;
use crate::judge::{Want, assert_close, first_written};

/// In what numbers a device multiplies activations with coded weights. It decides what its products may lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Activations as they are, weights as the codec decodes them.
    Float,
    /// Activations in signed bytes with one step per row and 32 columns, turned for the rotated formats; their levels in bytes
    /// too ([`kvant_codec::ByteBook`]). Float weights meet activations as they are.
    EightBit,
    /// On tensor cores: weights and activations rounded to f16, a row of activations times a power of two that brings its
    /// largest to 2^14 .. 2^15 (of at most 2^100). Sums in f32.
    Halves {
        /// The fewest rows of a product that is done so; fewer are multiplied as in [`Arithmetic::EightBit`].
        from: usize,
    },
}

/// In what numbers a device attends. It decides what its attention may lose; a device with others brings its variant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Attention {
    /// Queries and weights as they are, tiles as the codec decodes them, sums in f64.
    Exact,
    /// Queries and weights that meet codes in integers, codebooks in bytes, the rest in f32.
    Integers {
        /// The largest integer of one byte.
        byte: f64,
        /// The largest integer of two bytes.
        split: f64,
        /// The largest weight that is dithered, and the types of values whose weights are.
        dithered: (f64, &'static [DType]),
    },
    /// Whatever is multiplied rounded to f16, codebooks in bytes, sums in f32.
    Halves,
}

impl Attention {
    /// How many steps the largest value of a query has that meets codes of keys of type `keys`. Infinitely many where it
    /// stays as it is. q8_0 loses so little itself that its queries take two bytes.
    pub(crate) fn query_steps(self, keys: DType) -> f64 {
        match self {
            Self::Exact | Self::Halves => f64::INFINITY,
            Self::Integers { split, .. } if keys == DType::Q8_0 => split,
            Self::Integers { byte, .. } => byte,
        }
    }

    /// By how much rounding moves the weights, at most, that meet codes of values of type `values`: a variance, for a largest one of 1.
    pub(crate) fn weight_variance(self, values: DType) -> f64 {
        match self {
            Self::Exact | Self::Halves => 0.0,
            // Up with a chance of p, and down with one of 1 - p, is off by p (1 - p).
            Self::Integers { dithered: (steps, types), .. } if types.contains(&values) => {
                steps.powi(-2) / 4.0
            }
            Self::Integers { split, .. } => split.powi(-2) / 12.0,
        }
    }
}

/// Which combinations of edge sizes a device is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// All of them.
    Every,
    /// As few as have every edge size in one of them: for a device that takes a thousand times longer than others. What is left
    /// out is counted in [`Lacks`].
    Each,
}

/// A device, its name in messages, and its arithmetic.
pub struct Subject<B> {
    name: &'static str,
    device: B,
    arithmetic: Arithmetic,
    attention: Attention,
    coverage: Coverage,
    rows_stand_alone: bool,
}

/// Poisoned values behind every output, to see that nothing is written there.
const MARGIN: usize = 3;

impl<B: Backend> Subject<B> {
    /// A device to hold to the suites, to all of them.
    pub fn new(name: &'static str, device: B, arithmetic: Arithmetic, attention: Attention) -> Self {
        Self { name, device, arithmetic, attention, coverage: Coverage::Every, rows_stand_alone: true }
    }

    /// Asks for these combinations of edge sizes.
    pub fn with_coverage(self, coverage: Coverage) -> Self {
        Self { coverage, ..self }
    }

    /// Of a device whose attention, by roundings, depends on the rows of its own sequence that are in the step.
    pub fn whose_rows_lean_on_each_other(self) -> Self {
        Self { rows_stand_alone: false, ..self }
    }

    /// Its name in messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The device.
    pub fn device(&self) -> &B {
        &self.device
    }

    /// How it multiplies coded weights.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// How it attends.
    pub fn attention(&self) -> Attention {
        self.attention
    }

    /// Whether a row of attention has the bits that it has alone whatever other rows of its sequence are in the step. Rows of
    /// other sequences never change any.
    pub fn rows_stand_alone(&self) -> bool {
        self.rows_stand_alone
    }

    /// What a suite leaves out, so far nothing.
    pub fn lacks(&self) -> Lacks {
        Lacks::new(self.coverage)
    }

    /// The start of every message: device and op, then the case.
    pub fn case(&self, op: &str, case: impl Display) -> String {
        format!("{}::{op}, {case}", self.name)
    }

    /// A buffer that holds `values`.
    pub fn upload(&self, values: &[f32]) -> B::Buffer {
        let mut buffer = self.device.buffer(values.len()).expect("memory for a test");
        self.device.write(&mut buffer, values).expect("a buffer takes as many values as it has");
        buffer
    }

    /// A buffer for `len` results, and a few more, all NaN.
    pub fn poisoned(&self, len: usize) -> B::Buffer {
        self.upload(&vec![f32::NAN; len + MARGIN])
    }

    /// A buffer that holds `values`, with poison behind them.
    pub fn guarded(&self, values: &[f32]) -> B::Buffer {
        self.upload(&[values, &[f32::NAN; MARGIN]].concat())
    }

    /// The first `len` values of `buffer`.
    pub fn download(&self, buffer: &B::Buffer, len: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; len];
        self.device.read(buffer, 0, &mut values).expect("what was asked for is there");
        values
    }

    /// Holds a buffer from [`Subject::poisoned`] or [`Subject::guarded`] to `want`, and the poison behind to be there still.
    ///
    /// # Panics
    /// As [`assert_close`].
    #[track_caller]
    pub fn expect(&self, got: &B::Buffer, want: &[Want], what: &dyn Fn() -> String) {
        assert_close(&self.results(got, want.len(), what), want, what);
    }

    /// The `len` results in a buffer from [`Subject::poisoned`] or [`Subject::guarded`].
    ///
    /// # Panics
    /// When the poison behind them is there no more.
    #[track_caller]
    pub fn results(&self, got: &B::Buffer, len: usize, what: &dyn Fn() -> String) -> Vec<f32> {
        let mut got = self.download(got, len + MARGIN);
        let behind = got.split_off(len);
        if let Some(index) = first_written(&behind) {
            panic!("{}: value {index} beyond the output was written: {}", what(), behind[index]);
        }
        got
    }

    /// The bytes of a page.
    pub fn page_bytes(&self, page: &B::Page) -> Vec<u8> {
        let mut bytes = vec![0; page.n_bytes()];
        self.device.read_page(page, &mut bytes).expect("a page is as long as it says");
        bytes
    }

    /// Holds a call to be refused in one line.
    ///
    /// # Panics
    /// When it was not.
    #[track_caller]
    pub fn expect_refusal<T>(&self, op: &str, case: &str, result: Result<T, BackendError>) {
        let Err(error) = result else { panic!("{} is not refused", self.case(op, case)) };
        let message = error.to_string();
        assert_eq!(message.lines().count(), 1, "{}: {message:?}", self.case(op, case));
    }

    /// Takes a matrix.
    ///
    /// # Panics
    /// When the device refuses it.
    #[track_caller]
    pub fn matrix(&self, source: WeightSource) -> B::Matrix {
        let case = format!("{} {}x{}", source.dtype, source.n_out, source.n_in);
        self.device.matrix(source).unwrap_or_else(|error| panic!("{}: {error}", self.case("matrix", case)))
    }

    /// Takes a matrix whose rows are looked up too.
    ///
    /// # Panics
    /// When the device refuses it.
    #[track_caller]
    pub fn tied(&self, source: WeightSource) -> B::Matrix {
        let case = format!("{} {}x{}", source.dtype, source.n_out, source.n_in);
        self.device.tied(source).unwrap_or_else(|error| panic!("{}: {error}", self.case("tied", case)))
    }
}
