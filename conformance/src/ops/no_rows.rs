//! GEMMs of zero rows: no effect and no error.

use kvant_backend::{Activation, Backend, Input, Norm, Output};
use kvant_codec::DType;

use crate::DeviceUnderTest;
use crate::weights::{Weights, gaussian};

const N_IN: usize = 256;
const N_OUT: usize = 17;

/// Checks that `project` and `gated_ffn` without rows change no memory.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    let weight = subject.upload(&gaussian(1, N_IN, 1.0));
    let x = subject.upload(&gaussian(2, 2 * N_IN, 1.0));
    for dtype in [DType::F32, DType::F16, DType::Q4_0, DType::Q6K, DType::TQ4_1S] {
        let w = subject.matrix(Weights::gaussian(dtype, N_OUT, N_IN, 3).source(N_OUT));
        for norm in [None, Some(Norm { weight: &weight, eps: 1e-5 })] {
            for first_row in [0, 2] {
                let input = || Input { x: &x, norm, first_row, rows: 0 };
                let what = |op| subject.case(op, format_args!("{dtype}, no rows from row {first_row}"));
                let mut y = subject.poisoned(0);
                let output = Output { w: &w, bias: None, y: &mut y, accumulate: false };
                let result = subject.device().project(input(), &mut [output]);
                result.unwrap_or_else(|error| panic!("{}: {error}", what("project")));
                subject.expect(&y, &[], &|| what("project"));
                let result = subject.device().gated_ffn(input(), Activation::Silu, &w, &w, &mut y);
                result.unwrap_or_else(|error| panic!("{}: {error}", what("gated_ffn")));
                subject.expect(&y, &[], &|| what("gated_ffn"));
            }
        }
    }
}
