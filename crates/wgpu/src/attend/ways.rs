//! The ways to attend, of which an adapter goes the fastest for each class of types. All give the same bits.

use std::fmt;

use kvant_backend::{BackendError, Result};
use kvant_codec::DType;

use super::OP;
use crate::AdapterReport;

/// Queries of a job, at most.
pub const MOST_SLOTS: usize = 8;

/// How codes of the turbo types become levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookUps {
    /// In a table of constants, which each thread has or the adapter keeps.
    Constant,
    /// In a table in the memory of a workgroup.
    Table,
    /// In registers: bits of a code choose between constants.
    Select,
    /// In registers of the other threads of a subgroup.
    Shuffle,
}

impl LookUps {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::Constant, Self::Table, Self::Select, Self::Shuffle];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Table => "table",
            Self::Select => "select",
            Self::Shuffle => "shuffle",
        }
    }

    /// Whether they need threads of a subgroup to talk to each other.
    pub fn needs_subgroups(self) -> bool {
        self == Self::Shuffle
    }
}

/// Types of the cache that are read alike, and so have a fastest way in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TypeClass {
    /// f32, f16 and bf16.
    Floats,
    /// q8_0 and q4_0: codes that are numbers.
    Integers,
    /// The turbo types, whose codes are looked up.
    Codebooks,
}

impl TypeClass {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Floats, Self::Integers, Self::Codebooks];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floats => "floats",
            Self::Integers => "integers",
            Self::Codebooks => "codebooks",
        }
    }

    /// The class of a type.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Self::Floats,
            DType::Q8_0 | DType::Q4_0 => Self::Integers,
            _ => Self::Codebooks,
        }
    }
}

/// A way to attend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttendWays {
    /// How codes become levels.
    pub look_ups: LookUps,
    /// Queries that share what is unpacked, at most: one of [`AttendWays::QUERIES`].
    pub queries: usize,
    /// Words of codes that a thread takes at a time: one of [`AttendWays::WORDS`].
    pub words: usize,
}

impl fmt::Display for AttendWays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { look_ups, queries, words } = self;
        write!(f, "look-ups by {}, {queries} queries, {words} words", look_ups.name())
    }
}

impl AttendWays {
    /// Queries that may share.
    pub const QUERIES: [usize; 2] = [4, MOST_SLOTS];
    /// Words that a thread may take.
    pub const WORDS: [usize; 3] = [1, 2, 4];

    /// Where nothing else is asked for. On lavapipe, a Vulkan on the CPU, look-ups in a subgroup were the fastest, those in registers next,
    /// and threads that take four words; nothing else has been measured, and more queries take most compilers far longer.
    pub fn of_adapter(adapter: &AdapterReport) -> Self {
        let look_ups = if adapter.has_subgroups { LookUps::Shuffle } else { LookUps::Select };
        Self { look_ups, queries: 4, words: if adapter.is_software { 4 } else { 1 } }
    }

    /// An error unless `adapter` goes this way.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for look-ups that it lacks a feature for, and numbers that there are no kernels for.
    pub fn check(self, adapter: &AdapterReport) -> Result<()> {
        let Self { look_ups, queries, words } = self;
        let is_there = Self::QUERIES.contains(&queries) && Self::WORDS.contains(&words);
        if is_there && (adapter.has_subgroups || !look_ups.needs_subgroups()) {
            return Ok(());
        }
        let subgroups = if adapter.has_subgroups { "" } else { ", without subgroups" };
        Err(BackendError::Unsupported {
            op: OP,
            wanted: format!("{} look-ups for {queries} queries, {words} words at a time", look_ups.name()),
            has: format!("4 or {MOST_SLOTS} queries, 1, 2 or 4 words{subgroups}"),
        })
    }
}
