//! Attention variants. They give the same bits; which is fastest depends on the adapter and on the
//! class of types.

use std::fmt;

use kvant_backend::{BackendError, Result};
use kvant_codec::DType;

use super::OP;
use crate::AdapterReport;

/// Maximum queries of a job.
pub const MAX_SLOTS: usize = 8;

/// How codes of the turbo types are converted to levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodebookLookup {
    /// By a constant table, per thread or in constant memory.
    Constant,
    /// By a table in workgroup memory.
    Table,
    /// In registers: bits of a code select between constants.
    Select,
    /// By registers of the other threads of a subgroup.
    Shuffle,
}

impl CodebookLookup {
    /// All look-ups.
    pub const ALL: [Self; 4] = [Self::Constant, Self::Table, Self::Select, Self::Shuffle];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Table => "table",
            Self::Select => "select",
            Self::Shuffle => "shuffle",
        }
    }

    /// Returns whether the look-ups need subgroup operations.
    pub fn needs_subgroups(self) -> bool {
        self == Self::Shuffle
    }
}

/// A class of KV types that are read alike, and so share a fastest variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TypeClass {
    /// f32, f16 and bf16.
    Floats,
    /// q8_0 and q4_0: codes are integers.
    Integers,
    /// The turbo types: codes are looked up.
    Codebooks,
}

impl TypeClass {
    /// All classes.
    pub const ALL: [Self; 3] = [Self::Floats, Self::Integers, Self::Codebooks];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floats => "floats",
            Self::Integers => "integers",
            Self::Codebooks => "codebooks",
        }
    }

    /// Returns the class of a type.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => Self::Floats,
            DType::Q8_0 | DType::Q4_0 => Self::Integers,
            _ => Self::Codebooks,
        }
    }
}

/// An attention variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttendVariant {
    /// How codes are converted to levels.
    pub look_ups: CodebookLookup,
    /// Maximum queries that share unpacked codes: one of [`AttendVariant::QUERIES`].
    pub queries: usize,
    /// Words of codes that a thread reads at a time: one of [`AttendVariant::WORDS`].
    pub words: usize,
}

impl fmt::Display for AttendVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { look_ups, queries, words } = self;
        write!(f, "look-ups by {}, {queries} queries, {words} words", look_ups.name())
    }
}

impl AttendVariant {
    /// Supported values of `queries`.
    pub const QUERIES: [usize; 2] = [4, MAX_SLOTS];
    /// Supported values of `words`.
    pub const WORDS: [usize; 3] = [1, 2, 4];

    /// Returns the default variant of an adapter. On lavapipe, a Vulkan on the CPU, look-ups in a
    /// subgroup were the fastest, those in registers next, and threads that read four words;
    /// nothing else has been measured, and with more queries most compilers take far longer.
    pub fn of_adapter(adapter: &AdapterReport) -> Self {
        let look_ups = if adapter.has_subgroups { CodebookLookup::Shuffle } else { CodebookLookup::Select };
        Self { look_ups, queries: 4, words: if adapter.is_software { 4 } else { 1 } }
    }

    /// Checks that `adapter` supports this variant.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for look-ups that need a missing feature, and for values
    /// without kernels.
    pub fn check(self, adapter: &AdapterReport) -> Result<()> {
        let Self { look_ups, queries, words } = self;
        let is_there = Self::QUERIES.contains(&queries) && Self::WORDS.contains(&words);
        if is_there && (adapter.has_subgroups || !look_ups.needs_subgroups()) {
            return Ok(());
        }
        let subgroups = if adapter.has_subgroups { "" } else { ", without subgroups" };
        Err(BackendError::Unsupported {
            op: OP,
            requested: format!("{} look-ups for {queries} queries, {words} words at a time", look_ups.name()),
            has: format!("4 or {MAX_SLOTS} queries, 1, 2 or 4 words{subgroups}"),
        })
    }
}
