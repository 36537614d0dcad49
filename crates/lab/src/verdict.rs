//! Verdicts and their exit codes.

use std::fmt;

/// What the referee says of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Right, faster, and nowhere slower.
    Better,
    /// Right, and as fast: the difference is within the margin, or not found within the budget.
    Equal,
    /// Right, and slower here or at a guard.
    Worse,
    /// A wrong result.
    Wrong,
    /// No judgement: the tree does not build, the judge's files differ, base fails, or the machine
    /// is unsteady.
    Broken,
}

impl Verdict {
    /// Every verdict.
    pub const ALL: [Self; 5] = [Self::Better, Self::Equal, Self::Worse, Self::Wrong, Self::Broken];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Equal => "equal",
            Self::Worse => "worse",
            Self::Wrong => "wrong",
            Self::Broken => "broken",
        }
    }

    /// Returns the exit code. 0 and 1 are those of all commands: done, and the work failed; 2 is
    /// wrong usage.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Better => 0,
            Self::Broken => 1,
            Self::Equal => 3,
            Self::Worse => 4,
            Self::Wrong => 5,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a judgement ends before its end, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The candidate's result is wrong.
    #[error("{0}")]
    Wrong(String),
    /// There can be no judgement.
    #[error("{0}")]
    Broken(String),
}

impl Fault {
    /// Returns the verdict.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Wrong(_) => Verdict::Wrong,
            Self::Broken(_) => Verdict::Broken,
        }
    }
}
