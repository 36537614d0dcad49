//! Targets, as data: what can be made faster, the sizes at which it is timed, those at which it
//! must not get slower, and those at which it must be right.

use kvant_codec::DType;

use crate::case::{Append, Attend, Case, Model, Product, Read};

/// Something to make faster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// Its device: `cpu`, `wgpu:0` or `cuda:0`.
    pub device: &'static str,
    /// What is timed.
    pub case: Case,
    /// What must not get slower.
    pub guards: Vec<Case>,
    /// What must be right, on every kernel set.
    pub edges: Vec<Case>,
    /// What must be right beyond 2^16 tokens, on the fastest kernel set.
    pub far: Option<Case>,
    /// Conformance suites: parts of their names.
    pub suites: &'static [&'static str],
    /// Files that are made faster.
    pub files: &'static str,
}

/// A device, the prefix of its targets, and what it stores.
struct Device {
    name: &'static str,
    prefix: &'static str,
    kv: &'static [DType],
    attend_files: &'static str,
    product_files: &'static str,
    append_files: &'static str,
}

use DType::{BF16, FP8G128, NF4G64, Q4G128, TQ3_1S, TQ3T, TQ4_1S, Turbo2, Turbo2T, Turbo3, Turbo3T, Turbo4};
use DType::{F16, IQ4NL, IQ4XS, MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

const DEVICES: [Device; 3] = [
    Device {
        name: "cpu",
        prefix: "",
        kv: &[F16, BF16, Q8_0, Q4_0, Turbo4, Turbo3, Turbo2, Turbo3T, Turbo2T],
        attend_files: "crates/cpu/src/ops/attend",
        product_files: "crates/cpu/src/ops/matmul",
        append_files: "crates/cpu/src/ops/append",
    },
    Device {
        name: "wgpu:0",
        prefix: "wgpu-",
        kv: &[F16, Q8_0, Q4_0, Turbo4, Turbo3, Turbo2],
        attend_files: "crates/wgpu/src/attend",
        product_files: "crates/wgpu/src/matmul",
        append_files: "crates/wgpu/src/append",
    },
    Device {
        name: "cuda:0",
        prefix: "cuda-",
        kv: &[F16, BF16, Q8_0, Q4_0, Turbo4, Turbo3, Turbo2, Turbo3T, Turbo2T],
        attend_files: "crates/cuda/src/attend",
        product_files: "crates/cuda/src/matmul",
        append_files: "crates/cuda/src/append",
    },
];

/// Head sizes of attention targets: those of small models, of most, and of Gemma and Qwen3.5.
const HEAD_DIMS: [usize; 3] = [64, 128, 256];
/// Weight types of product targets.
const WEIGHTS: [DType; 21] = [
    F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4NL, IQ4XS, MXFP4, Q4G128, FP8G128,
    NF4G64, TQ3_1S, TQ4_1S, TQ3T,
];
/// Rows of product targets: decode, a small batch, prefill.
const ROWS: [usize; 3] = [1, 8, 64];
/// Models of whole-model targets: the bundled one, and random weights in shapes of real ones.
const MODELS: [(&str, &str); 3] =
    [("bundled", "bundled"), ("tiny", "tiny:q4_0"), ("qwen2.5-1.5b", "qwen2.5-1.5b:q4_K")];

/// Depth at which decode attention is timed.
const DEPTH: usize = 4096;
/// First depth at which a token's number takes more than 16 bits, and more than one block on.
const FAR: usize = (1 << 16) + 170;

/// Returns every target.
pub fn targets() -> Vec<Target> {
    DEVICES.iter().flat_map(Device::targets).collect()
}

/// Returns the target of this name.
///
/// # Errors
///
/// The name with the nearest others.
pub fn target(name: &str) -> Result<Target, String> {
    let all = targets();
    let found = all.iter().find(|target| target.name == name);
    found.cloned().ok_or_else(|| {
        // Targets that have the most words of the name.
        let shared = |target: &Target| target.name.split('-').filter(|word| name.contains(word)).count();
        let most = all.iter().map(shared).max().unwrap_or(0);
        let near: Vec<_> = all.iter().filter(|target| shared(target) == most).take(6).collect();
        let near: Vec<_> = near.iter().map(|target| target.name.as_str()).collect();
        format!("target: expected one such as {}, got '{name}'", near.join(", "))
    })
}

impl Device {
    fn targets(&self) -> Vec<Target> {
        let kv = || self.kv.iter().copied();
        let attend = kv().flat_map(|dtype| HEAD_DIMS.map(|dim| self.attend(dtype, dim)));
        let products = WEIGHTS.into_iter().flat_map(|dtype| ROWS.map(|rows| self.product(dtype, rows)));
        let append = kv().map(|dtype| self.append(dtype));
        let models = MODELS.iter().flat_map(|(name, model)| {
            [("decode", 1), ("prefill", 128)]
                .map(|(op, rows)| self.model(&format!("{op}-{name}"), model, rows))
        });
        attend.chain(products).chain(append).chain(models).collect()
    }

    /// Decode attention: six query heads on each of two KV heads, as in Qwen2.5-1.5B.
    fn attend(&self, dtype: DType, dim: usize) -> Target {
        let at = |depth| Attend { k: dtype, v: dtype, kv_heads: 2, group: 6, dim, depth, rows: 1 };
        let guards = [
            at(256),
            at(4 * DEPTH),
            Attend { group: 1, ..at(1024) },
            Attend { rows: 32, ..at(1024) },
            Attend { v: if dtype == Q8_0 { Turbo3 } else { Q8_0 }, ..at(1024) },
        ];
        let edge =
            |(depth, rows, kv_heads, group)| Case::Attend(Attend { depth, rows, kv_heads, group, ..at(0) });
        let edges = [
            (1, 1, 1, 1),
            (15, 1, 2, 6),
            (16, 1, 1, 8),
            (17, 2, 1, 7),
            (129, 1, 2, 6),
            (150, 5, 1, 12),
            (513, 1, 2, 6),
            (600, 33, 1, 3),
            (1100, 1, 2, 4),
        ];
        Target {
            name: format!("{}attend-{dtype}-{dim}", self.prefix),
            device: self.name,
            case: Case::Attend(at(DEPTH)),
            guards: guards.map(Case::Attend).to_vec(),
            edges: edges.map(edge).to_vec(),
            far: Some(Case::Attend(Attend { kv_heads: 1, group: 2, ..at(FAR) })),
            suites: &["attend"],
            files: self.attend_files,
        }
    }

    /// Products of some rows with a matrix of `2048 x 2048`, read from memory where there are few.
    fn product(&self, dtype: DType, rows: usize) -> Target {
        let copies = if rows <= 8 { 24 } else { 1 };
        let main = Product { dtype, n_out: 2048, n_in: 2048, rows, copies };
        let guards = [
            Product { n_out: 1024, n_in: 4096, ..main },
            Product { n_out: 4096, n_in: 512, copies: 1, ..main },
            Product { rows: if rows == 1 { 3 } else { rows / 2 }, ..main },
            Product { rows: 2 * rows, ..main },
        ];
        // Columns that end within, at and beyond units of every kernel.
        let unit = dtype.block_len();
        let edge = |(n_out, units, rows)| {
            Case::Product(Product { dtype, n_out, n_in: unit * units, rows, copies: 1 })
        };
        let edges = [
            (1, 1, 1),
            (17, 1, rows),
            (33, 2, rows + 1),
            (48, 3, rows),
            (65, 5, 2 * rows + 1),
            (64, 4, 17),
            (7, 2, 65),
        ];
        Target {
            name: format!("{}product-{dtype}-{rows}", self.prefix),
            device: self.name,
            case: Case::Product(main),
            guards: guards.map(Case::Product).to_vec(),
            edges: edges.map(edge).to_vec(),
            far: None,
            suites: &["project", "matrix", "gated_ffn", "dense_ffn"],
            files: self.product_files,
        }
    }

    /// Appending a prefill step to the cache of a layer; of the trellis-coded types, the search for
    /// the best path is nearly all of it.
    fn append(&self, dtype: DType) -> Target {
        let main = Append { dtype, kv_heads: 2, dim: 128, start: 0, rows: 128, read: Read::Bytes };
        let guards = [
            Append { rows: 1, ..main },
            Append { rows: 512, ..main },
            Append { dim: 64, ..main },
            Append { dim: 256, ..main },
        ];
        let rows = Append { read: Read::Rows, ..main };
        let edge = |(start, rows_of_step, kv_heads, dim)| {
            Case::Append(Append { start, rows: rows_of_step, kv_heads, dim, ..rows })
        };
        let edges = [
            (0, 1, 1, 64),
            (0, 17, 2, 80),
            (100, 50, 2, 128),
            (128, 160, 1, 96),
            (0, 150, 1, 192),
            (300, 33, 2, 256),
            (500, 130, 1, 128),
        ];
        Target {
            name: format!("{}append-{dtype}-128", self.prefix),
            device: self.name,
            case: Case::Append(main),
            guards: guards.map(Case::Append).to_vec(),
            edges: edges.map(edge).to_vec(),
            far: Some(Case::Append(Append { start: FAR, rows: 100, kv_heads: 1, ..rows })),
            suites: &["kv_append", "rope_append"],
            files: self.append_files,
        }
    }

    /// Decode, or prefill of 128 tokens, of a whole model after others.
    fn model(&self, name: &str, model: &str, rows: usize) -> Target {
        let main = Model { name: model.to_owned(), kv: Turbo3, depth: 256, rows };
        let at = |depth, kv| Case::Model(Model { depth, kv, ..main.clone() });
        Target {
            name: format!("{}{name}", self.prefix),
            device: self.name,
            case: Case::Model(main.clone()),
            guards: vec![at(0, Turbo3), at(1024, Turbo3), at(256, Q8_0)],
            edges: vec![at(0, F16), at(130, Turbo3)],
            far: None,
            suites: &["::"],
            files: "crates/model, crates/engine, and the device",
        }
    }
}
