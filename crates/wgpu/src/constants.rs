//! Constants shared by Rust and the kernels.
//!
//! Rust alone defines them: each source names the function that lists its constants, and the result
//! precedes its text, one `const` per constant.

use std::fmt::Write;

/// The constants of one source.
#[derive(Debug, Default)]
pub(crate) struct Constants {
    text: String,
    unrolls: bool,
}

impl Constants {
    /// Adds an integer of type `u32`.
    pub fn whole(mut self, name: &str, value: usize) -> Self {
        self.define(format_args!("const {name}: u32 = {value}u;"));
        self
    }

    /// Adds an integer of type `i32`.
    pub fn integer(mut self, name: &str, value: i32) -> Self {
        self.define(format_args!("const {name}: i32 = {value}i;"));
        self
    }

    /// Adds a finite f32, exactly.
    pub fn float(mut self, name: &str, value: f32) -> Self {
        debug_assert!(value.is_finite(), "{name}: {value}");
        self.define(format_args!("const {name}: f32 = {};", literal(value)));
        self
    }

    /// Adds a boolean.
    pub fn flag(mut self, name: &str, value: bool) -> Self {
        self.define(format_args!("const {name}: bool = {value};"));
        self
    }

    /// Adds a list of f32. A variable, as WGSL indexes constants with constant indices only.
    pub fn floats(mut self, name: &str, values: &[f32]) -> Self {
        let list: Vec<_> = values.iter().copied().map(literal).collect();
        let (n, list) = (values.len(), list.join(", "));
        self.define(format_args!("var<private> {name}: array<f32, {n}> = array<f32, {n}>({list});"));
        self
    }

    /// Adds a list of `u32`.
    pub fn wholes(mut self, name: &str, values: &[u32]) -> Self {
        let list: Vec<_> = values.iter().map(|value| format!("{value}u")).collect();
        let (n, list) = (values.len(), list.join(", "));
        self.define(format_args!("var<private> {name}: array<u32, {n}> = array<u32, {n}>({list});"));
        self
    }

    /// Adds a `vec4<u32>`.
    pub fn vector(mut self, name: &str, [a, b, c, d]: [u32; 4]) -> Self {
        self.define(format_args!("const {name} = vec4<u32>({a}u, {b}u, {c}u, {d}u);"));
        self
    }

    /// Adds declarations of any kind.
    pub fn declaration(mut self, text: &str) -> Self {
        self.text += text;
        self
    }

    /// Unrolls the loops that constants count (`unroll.rs`).
    pub fn unrolling(mut self) -> Self {
        self.unrolls = true;
        self
    }

    /// Returns whether such loops are unrolled.
    pub fn unrolls(&self) -> bool {
        self.unrolls
    }

    /// Returns the text that precedes a source.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn define(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a string takes any text");
    }
}

/// Returns the WGSL literal of `value`: the shortest decimal that parses to it. The shortest
/// decimal of the largest f32 exceeds it, and some compilers reject it: that number is written in
/// full.
fn literal(value: f32) -> String {
    if value.abs() == f32::MAX { format!("{:?}f", f64::from(value)) } else { format!("{value:?}f") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_to_their_last_bit() {
        let constants = Constants::default().whole("N", 16).float("A", -1e30).float("B", 65504.0);
        let constants = constants.float("C", 0.1).floats("D", &[1e-40]).wholes("E", &[1, 2]);
        let constants = constants.float("F", f32::MIN);
        let want = "const N: u32 = 16u;\nconst A: f32 = -1e30f;\nconst B: f32 = 65504.0f;\n\
                    const C: f32 = 0.1f;\nvar<private> D: array<f32, 1> = array<f32, 1>(1e-40f);\n\
                    var<private> E: array<u32, 2> = array<u32, 2>(1u, 2u);\n\
                    const F: f32 = -3.4028234663852886e38f;\n";
        assert_eq!(constants.text(), want);
    }
}
