//! SiTU, the activation of Kimi K3, in every op with one.

use kvant_backend::{Activation, Backend};

use super::{gated_ffn, moe_ffn};
use crate::{DeviceUnderTest, Skipped};

/// With limits of both sides, within the values and far beyond them, and of the gate alone.
const ALL: [Activation; 3] = [
    Activation::Situ { limit: 3.0, up_limit: Some(2.0) },
    Activation::Situ { limit: 40.0, up_limit: Some(50.0) },
    Activation::Situ { limit: 7.0, up_limit: None },
];

/// Compares SiTU with its equation on a device that has it; others refuse it.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    let [first, ..] = ALL;
    if !subject.device().info().selects_tokens {
        gated_ffn::refuses(subject, first);
        moe_ffn::refuses(subject, first);
        return skipped;
    }
    for activation in ALL {
        gated_ffn::of_activation(subject, activation, &mut skipped);
        moe_ffn::of_activation(subject, activation, &mut skipped);
    }
    skipped
}
