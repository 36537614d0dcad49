//! How kernels reach the words of the cache in any slab.

use std::fmt::Write;

use crate::arena::{MAX_SLABS, WORD_BITS};
use crate::constants::Constants;
use crate::gpu::Binding;

/// The binding of each slab, in all kernels that declare them.
const BINDINGS: [u32; MAX_SLABS] = [3, 6, 7, 8];

/// What a kernel does with the words of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

impl Constants {
    /// Declares `n` slabs, and `word_at(address)`; with write access, also `set_word(address,
    /// word)`.
    pub fn slabs(self, n: usize, access: Access) -> Self {
        let mode = if access == Access::Read { "read" } else { "read_write" };
        let mut text = String::new();
        for (slab, binding) in BINDINGS.iter().enumerate().take(n) {
            let name = format!("slab{slab}: array<u32>");
            text += &format!("@group(0) @binding({binding}) var<storage, {mode}> {name};\n");
        }
        let read = by_slab(n, |slab, at| format!("return slab{slab}[{at}];"));
        text += &format!("fn word_at(address: u32) -> u32 {{ {read} }}\n");
        if access == Access::ReadWrite {
            let write = by_slab(n, |slab, at| format!("slab{slab}[{at}] = word;"));
            text += &format!("fn set_word(address: u32, word: u32) {{ {write} }}\n");
        }
        self.declaration(&text)
    }
}

/// Returns the statement for the slab of `address`, of those for each number of a slab and index.
fn by_slab(n: usize, statement: impl Fn(usize, &str) -> String) -> String {
    // The index is the address: the kernel of one slab is that of a device without others.
    if n == 1 {
        return statement(0, "address");
    }
    let at = format!("address & {}u", (1 << WORD_BITS) - 1);
    let cases = (1..n).fold(String::new(), |mut cases, slab| {
        write!(cases, "case {slab}u: {{ {} }} ", statement(slab, &at)).expect("a string takes any text");
        cases
    });
    format!("switch address >> {WORD_BITS}u {{ {cases}default: {{ {} }} }}", statement(0, &at))
}

/// Returns `bindings` and those of the slabs.
pub(crate) fn with_slabs<'a>(bindings: &[Binding<'a>], slabs: &'a [wgpu::Buffer]) -> Vec<Binding<'a>> {
    bindings.iter().copied().chain(BINDINGS.into_iter().zip(slabs)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slab_is_indexed_by_the_address() {
        let constants = Constants::default().slabs(1, Access::Read);
        let want = "@group(0) @binding(3) var<storage, read> slab0: array<u32>;\n\
                    fn word_at(address: u32) -> u32 { return slab0[address]; }\n";
        assert_eq!(constants.text(), want);
    }

    #[test]
    fn the_upper_bits_of_an_address_choose_the_slab() {
        let constants = Constants::default().slabs(2, Access::ReadWrite);
        let want = "@group(0) @binding(3) var<storage, read_write> slab0: array<u32>;\n\
                    @group(0) @binding(6) var<storage, read_write> slab1: array<u32>;\n\
                    fn word_at(address: u32) -> u32 { switch address >> 30u { \
                    case 1u: { return slab1[address & 1073741823u]; } \
                    default: { return slab0[address & 1073741823u]; } } }\n\
                    fn set_word(address: u32, word: u32) { switch address >> 30u { \
                    case 1u: { slab1[address & 1073741823u] = word; } \
                    default: { slab0[address & 1073741823u] = word; } } }\n";
        assert_eq!(constants.text(), want);
    }
}
