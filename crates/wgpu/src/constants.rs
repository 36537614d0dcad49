//! Numbers that Rust and the kernels share.
//!
//! They stand in Rust alone: each source names the function that lists those it takes, and what comes of it stands before its
//! text, a `const` for each.

use std::fmt::Write;

/// The constants of one source.
#[derive(Debug, Default)]
pub(crate) struct Constants {
    text: String,
}

impl Constants {
    /// A whole number, of type `u32`.
    pub fn whole(mut self, name: &str, value: usize) -> Self {
        self.define(format_args!("const {name}: u32 = {value}u;"));
        self
    }

    /// A whole number, of type `i32`.
    pub fn integer(mut self, name: &str, value: i32) -> Self {
        self.define(format_args!("const {name}: i32 = {value}i;"));
        self
    }

    /// A finite number, to the last of its bits.
    pub fn float(mut self, name: &str, value: f32) -> Self {
        debug_assert!(value.is_finite(), "{name}: {value}");
        self.define(format_args!("const {name}: f32 = {};", literal(value)));
        self
    }

    /// Whether something is so.
    pub fn flag(mut self, name: &str, value: bool) -> Self {
        self.define(format_args!("const {name}: bool = {value};"));
        self
    }

    /// A list of numbers. A variable, as kernels look values up by an index that is not known before.
    pub fn floats(mut self, name: &str, values: &[f32]) -> Self {
        let list: Vec<_> = values.iter().copied().map(literal).collect();
        let (n, list) = (values.len(), list.join(", "));
        self.define(format_args!("var<private> {name}: array<f32, {n}> = array<f32, {n}>({list});"));
        self
    }

    /// A list of whole numbers, of type `u32`.
    pub fn wholes(mut self, name: &str, values: &[u32]) -> Self {
        let list: Vec<_> = values.iter().map(|value| format!("{value}u")).collect();
        let (n, list) = (values.len(), list.join(", "));
        self.define(format_args!("var<private> {name}: array<u32, {n}> = array<u32, {n}>({list});"));
        self
    }

    /// Four whole numbers, of type `vec4<u32>`.
    pub fn vector(mut self, name: &str, [a, b, c, d]: [u32; 4]) -> Self {
        self.define(format_args!("const {name} = vec4<u32>({a}u, {b}u, {c}u, {d}u);"));
        self
    }

    /// What stands before the text of a source.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn define(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a string takes any text");
    }
}

/// `value` as WGSL writes it: the shortest decimal that is read as this number. That of the largest number lies above it, where some
/// compilers see none of an `f32`: it is written out.
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
