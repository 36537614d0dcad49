//! Reads the entry point of a kernel from its PTX.

/// The entry point of a kernel in a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Size of its one parameter.
    pub param_bytes: usize,
    /// Whether the kernel itself waits for its predecessor to end before it accesses shared data
    /// (`half.cuh`): then it may begin earlier.
    pub waits: bool,
}

impl Entry {
    /// Returns the entry of kernel `name`: `.entry name( .param .align 8 .b8 name_param_0[40] ) {
    /// ... }`. `None` for an unknown kernel or other parameters.
    pub fn of(ptx: &str, name: &str) -> Option<Self> {
        let (_, rest) = ptx.split_once(&format!(".entry {name}("))?;
        let (parameters, rest) = rest.split_once(')')?;
        if parameters.contains(',') {
            return None;
        }
        let (_, size) = parameters.split_once('[')?;
        let param_bytes = size.split_once(']')?.0.parse().ok()?;
        let body = rest.split(".entry ").next()?;
        Some(Self { param_bytes, waits: body.contains("griddepcontrol.wait") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_and_waits_are_read_from_the_ptx() {
        let ptx = ".visible .entry one(\n\t.param .align 8 .b8 one_param_0[40]\n)\n{ret;}\n\
                   .visible .entry two(\n\t.param .u64 two_param_0,\n\t.param .u64 two_param_1\n)\n{ret;}\n\
                   .visible .entry three(\n\t.param .align 8 .b8 three_param_0[8]\n)\n{griddepcontrol.wait; ret;}\n";
        assert_eq!(Entry::of(ptx, "one"), Some(Entry { param_bytes: 40, waits: false }));
        assert_eq!(Entry::of(ptx, "two"), None);
        assert_eq!(Entry::of(ptx, "three"), Some(Entry { param_bytes: 8, waits: true }));
        assert_eq!(Entry::of(ptx, "on"), None);
    }
}
