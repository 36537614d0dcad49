//! Numbers that Rust and the kernels share.
//!
//! They stand in Rust alone: each source names the function that lists those it takes, and includes what comes of it as
//! `constants.cuh`, a macro for each.

use std::fmt::Write;

/// The macros of one source.
#[derive(Debug, Default)]
pub(crate) struct Constants {
    text: String,
}

impl Constants {
    /// What sources include them as.
    pub const HEADER: &'static str = "constants.cuh";

    /// A whole number.
    pub fn whole(mut self, name: &str, value: usize) -> Self {
        self.define(name, format_args!("{value}"));
        self
    }

    /// A finite number in 32 bits, to the last of them.
    pub fn float(mut self, name: &str, value: f32) -> Self {
        debug_assert!(value.is_finite(), "{name}: {value}");
        self.define(name, format_args!("({value:?}f)"));
        self
    }

    /// A finite number in 64 bits, to the last of them.
    pub fn double(mut self, name: &str, value: f64) -> Self {
        debug_assert!(value.is_finite(), "{name}: {value}");
        self.define(name, format_args!("({value:?})"));
        self
    }

    /// What an array of whole numbers begins with.
    pub fn list(mut self, name: &str, values: impl IntoIterator<Item = i32>) -> Self {
        let values: Vec<_> = values.into_iter().map(|value| value.to_string()).collect();
        self.define(name, format_args!("{{{}}}", values.join(", ")));
        self
    }

    /// The header.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn define(&mut self, name: &str, value: std::fmt::Arguments<'_>) {
        writeln!(self.text, "#define {name} {value}").expect("a string takes any text");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_to_their_last_bit() {
        let constants = Constants::default().whole("N", 16).float("A", -1e30).float("B", 65504.0);
        let constants = constants.float("C", 0.1).double("D", 128f64.sqrt()).float("E", 1e-40);
        let constants = constants.list("F", [1, -2]);
        let want = "#define N 16\n#define A (-1e30f)\n#define B (65504.0f)\n#define C (0.1f)\n\
                    #define D (11.313708498984761)\n#define E (1e-40f)\n\
                    #define F {1, -2}\n";
        assert_eq!(constants.text(), want);
    }
}
