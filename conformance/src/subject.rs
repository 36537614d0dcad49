//! A device under test, and what every suite does with it.

use std::fmt::Display;

use kvant_backend::{Backend, BackendError, Page, WeightSource};
use kvant_codec::DType;

use crate::judge::{Want, assert_close, first_written};

/// In what numbers a device multiplies activations with coded weights. It decides what its products may lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Activations as they are, weights as the codec decodes them.
    Float,
    /// Activations in signed bytes with one step per row and 32 columns, turned for the rotated formats; their levels in bytes
    /// too ([`kvant_codec::ByteBook`]). Float weights meet activations as they are.
    EightBit,
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
    },
}

impl Attention {
    /// How many steps the largest value of a query has that meets codes of keys of type `keys`. Infinitely many where it
    /// stays as it is. q8_0 loses so little itself that its queries take two bytes.
    pub(crate) fn query_steps(self, keys: DType) -> f64 {
        match self {
            Self::Exact => f64::INFINITY,
            Self::Integers { split, .. } if keys == DType::Q8_0 => split,
            Self::Integers { byte, .. } => byte,
        }
    }

    /// How many steps the largest weight has that meets codes of values.
    pub(crate) fn weight_steps(self) -> f64 {
        match self {
            Self::Exact => f64::INFINITY,
            Self::Integers { split, .. } => split,
        }
    }
}

/// A device, its name in messages, and its arithmetic.
pub struct Subject<B> {
    name: &'static str,
    device: B,
    arithmetic: Arithmetic,
    attention: Attention,
}

/// Poisoned values behind every output, to see that nothing is written there.
const MARGIN: usize = 3;

impl<B: Backend> Subject<B> {
    /// A device to hold to the suites.
    pub fn new(name: &'static str, device: B, arithmetic: Arithmetic, attention: Attention) -> Self {
        Self { name, device, arithmetic, attention }
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
}
