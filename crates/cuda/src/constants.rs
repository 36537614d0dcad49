//! Constants shared by Rust and the kernels.
//!
//! Rust alone defines them: each source names the function that lists its constants, and includes
//! the result as `constants.cuh`, one macro per constant.

use std::fmt::Write;

/// The macros of one source.
#[derive(Debug, Default)]
pub(crate) struct Constants {
    text: String,
}

impl Constants {
    /// File name of the generated header.
    pub const HEADER: &'static str = "constants.cuh";

    /// Adds an integer.
    pub fn whole(mut self, name: &str, value: usize) -> Self {
        self.define(name, format_args!("{value}"));
        self
    }

    /// Adds a finite f32, exactly.
    pub fn float(mut self, name: &str, value: f32) -> Self {
        debug_assert!(value.is_finite(), "{name}: {value}");
        self.define(name, format_args!("({value:?}f)"));
        self
    }

    /// Adds a finite f64, exactly.
    pub fn double(mut self, name: &str, value: f64) -> Self {
        debug_assert!(value.is_finite(), "{name}: {value}");
        self.define(name, format_args!("({value:?})"));
        self
    }

    /// Adds an initializer list of integers.
    pub fn list(mut self, name: &str, values: impl IntoIterator<Item = i32>) -> Self {
        let values: Vec<_> = values.into_iter().map(|value| value.to_string()).collect();
        self.define(name, format_args!("{{{}}}", values.join(", ")));
        self
    }

    /// Returns the text of the header.
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
