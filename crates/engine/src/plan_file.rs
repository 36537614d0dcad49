//! KV plan file of a model, beside the model file: KV types, channel scales, and measured quality.
//!
//! # Format, version 4
//!
//! ```text
//! kvplan 4 0123456789abcdef
//! {"model":"..","layers":2,"sink":16,"certificate":{..}}
//! {"k":["turbo4","turbo3"],"v":[..],"k_scale":[..],"v_scale":[..],"v_centre":[..]}
//! {"k":["turbo3","turbo3"],..
//! ```
//!
//! The first line has the version and the XXH3-64 of all bytes after it; the second is JSON,
//! followed by a line of JSON for each KV layer. The model is identified by its
//! [fingerprint](crate::Model::fingerprint). A file is replaced atomically, and a file with any
//! fault is rejected as a whole.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant_codec::DType;
use kvant_gguf::{Gguf, printable_path};
use kvant_kv::{ChannelScales, HeadTypes, KvShape, LayerScales, Policies, Policy};
use kvant_model::Config;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::Error;
use crate::fingerprint;
use crate::session::{KvBalance, KvOptions};

/// The first bytes of the file.
const MAGIC: &str = "kvplan";
const VERSION: u32 = 4;
/// Maximum bytes of a file: a hundred times the need of the largest models.
const MAX_BYTES: u64 = 1 << 28;

/// Why a plan cannot be saved or used. A faulty plan is rejected as a whole.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFileError {
    /// An I/O error.
    #[error("{}: {source}", printable_path(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file does not begin with the magic bytes.
    #[error("{}: not a cache plan", printable_path(path))]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
    /// The file is of another version of the format.
    #[error("{}: cache plan version {got}, expected {expected}", printable_path(path))]
    Version {
        /// The file.
        path: PathBuf,
        /// The version this engine reads.
        expected: u32,
        /// The version of the file.
        got: u32,
    },
    /// The file is truncated or was changed.
    #[error("{}: corrupt cache plan: {what}", printable_path(path))]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The fault, with expected and actual values where that helps.
        what: String,
    },
    /// The plan was made for another model.
    #[error("{}: the plan of another model: {got}, expected {expected}", printable_path(path))]
    Model {
        /// The file.
        path: PathBuf,
        /// The fingerprint of this model.
        expected: String,
        /// That of the plan's model.
        got: String,
    },
}

/// A measured plan of a model's KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct KvPlan {
    /// The fingerprint of the model.
    pub model: String,
    /// First tokens in f16.
    pub sink: usize,
    /// Types, `[KV layers][n_kv_heads]`.
    pub types: Vec<Vec<HeadTypes>>,
    /// Channel scales of keys and values.
    pub channel_scales: Arc<ChannelScales>,
    /// Measured quality.
    pub certificate: Certificate,
}

/// Measured quality of a plan, with the sink in f16. KL divergences are from the f16 cache, in
/// nats.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// Mean bits per value in blocks, scales included.
    pub bits: f64,
    /// Bytes of a cache of 1024 tokens, f16 parts included.
    pub bytes_per_1k: usize,
    /// Bytes of an f16 cache of 1024 tokens.
    pub bytes_per_1k_f16: usize,
    /// Mean KL divergence per token.
    pub mean_kld: f64,
    /// Its standard error, treating tokens as independent.
    pub mean_kld_stderr: f64,
    /// Mean KL divergence of an f32 cache: the effect of activation rounding on the smallest
    /// difference, which is not the plan's error.
    pub noise_kld: f64,
    /// The 99th percentile.
    pub p99_kld: f64,
    /// The maximum.
    pub max_kld: f64,
    /// Fraction of tokens with the same most probable token.
    pub same_top: f64,
    /// Perplexity relative to f16.
    pub ppl_ratio: f64,
    /// Its standard error.
    pub ppl_ratio_stderr: f64,
    /// Fraction of correct tokens in the NIAH answers, and that of the f16 cache.
    pub needle: Option<[f64; 2]>,
    /// Number of needles.
    pub needles: usize,
    /// The type to which weights were converted on load, if any.
    pub weights: Option<String>,
    /// Whether the tail was in f16, as in normal use.
    pub tail: bool,
    /// Tokens scored.
    pub tokens: usize,
    /// Tokens of each chunk.
    pub n_ctx: usize,
    /// Hash of the text.
    pub text: String,
    /// The version of the program.
    pub version: String,
    /// The commit, where it ran in a checkout.
    pub commit: Option<String>,
}

impl Certificate {
    /// Returns the mean KL divergence that the plan itself adds.
    pub fn added_kld(&self) -> f64 {
        added_kld(self.mean_kld, self.noise_kld)
    }
}

/// Returns the mean KL divergence that a cache adds to `noise`, that of a lossless cache. Rounding
/// can make the difference negative, which counts as 0; NaN stays NaN.
pub fn added_kld(mean: f64, noise: f64) -> f64 {
    let added = mean - noise;
    if added < 0.0 { 0.0 } else { added }
}

/// The second line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    model: String,
    layers: usize,
    sink: usize,
    certificate: Certificate,
}

/// The line of a layer.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layer {
    k: Vec<String>,
    v: Vec<String>,
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
    v_centre: Vec<f32>,
}

impl KvPlan {
    /// Reads the plan of the model in `gguf`.
    ///
    /// # Errors
    /// [`PlanFileError`] when the file cannot be read, is of another version, was changed, or
    /// belongs to another model; an error of the model file.
    pub fn open(path: &Path, gguf: &Gguf) -> Result<Self, Error> {
        let plan = Self::read(path)?;
        let expected = fingerprint::find(gguf, kvant_files::cache_folder().as_deref());
        plan.check(path, &expected, &Config::from_gguf(gguf)?.kv_shape())?;
        Ok(plan)
    }

    /// Reads a plan of any model.
    ///
    /// # Errors
    /// As [`KvPlan::open`].
    pub fn read(path: &Path) -> Result<Self, PlanFileError> {
        let io = |source| PlanFileError::Io { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        kvant_files::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(io)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(corrupt(path, format!("more than {MAX_BYTES} bytes")));
        }
        let not_ours = || PlanFileError::NotOurs { path: path.to_owned() };
        let end = bytes.iter().take(64).position(|&byte| byte == b'\n').ok_or_else(not_ours)?;
        let (first, body) = (std::str::from_utf8(&bytes[..end]).map_err(|_| not_ours())?, &bytes[end + 1..]);
        let [MAGIC, version, checksum] = first.split(' ').collect::<Vec<_>>()[..] else {
            return Err(not_ours());
        };
        let got = version.parse().map_err(|_| not_ours())?;
        if got != VERSION {
            return Err(PlanFileError::Version { path: path.to_owned(), expected: VERSION, got });
        }
        let expected = format!("{:016x}", xxh3_64(body));
        if checksum != expected {
            return Err(corrupt(path, format!("checksum {expected}, the file has {checksum}")));
        }
        Self::parse(body).map_err(|what| corrupt(path, what))
    }

    /// Parses the lines after the first.
    fn parse(body: &[u8]) -> Result<Self, String> {
        let mut lines = body.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let head = lines.next().unwrap_or_default();
        let Head { model, layers: n, sink, certificate } =
            serde_json::from_slice(head).map_err(|error| error.to_string())?;
        let (mut types, mut layers) = (Vec::new(), Vec::new());
        for line in lines {
            let of_layer = |error: String| format!("layer {}: {error}", layers.len());
            let Layer { k, v, k_scale, v_scale, v_centre } =
                serde_json::from_slice(line).map_err(|error| of_layer(error.to_string()))?;
            if k.len() != v.len() {
                return Err(of_layer(format!("types of {} heads' keys, {} heads' values", k.len(), v.len())));
            }
            let of_head = |(k, v): (&String, &String)| Ok(HeadTypes { k: kv_type(k)?, v: kv_type(v)? });
            types.push(k.iter().zip(&v).map(of_head).collect::<Result<_, _>>().map_err(of_layer)?);
            layers.push(LayerScales { k_scale, v_scale, v_centre });
        }
        if layers.len() != n {
            return Err(format!("expected {n} layers, got {}", layers.len()));
        }
        Ok(Self { model, sink, types, channel_scales: Arc::new(ChannelScales { layers }), certificate })
    }

    /// Checks that the plan belongs to that model.
    fn check(&self, path: &Path, fingerprint: &str, shape: &KvShape) -> Result<(), PlanFileError> {
        if self.model != fingerprint {
            let (expected, got) = (fingerprint.to_owned(), kvant_gguf::printable(&self.model, 64));
            return Err(PlanFileError::Model { path: path.to_owned(), expected, got });
        }
        self.channel_scales.check(shape).map_err(|error| corrupt(path, error.to_string()))?;
        let apart = |types: &Vec<HeadTypes>| types.iter().find(|types| types.k != types.v).copied();
        let mut shared_kv =
            self.types.iter().zip(&shape.layers).enumerate().filter(|(_, (_, layer))| layer.shared_kv);
        if let Some((index, HeadTypes { k, v })) =
            shared_kv.find_map(|(index, (types, _))| apart(types).map(|types| (index, types)))
        {
            let what = format!("layer {index}: expected one type for keys and values, got {k} and {v}");
            return Err(corrupt(path, what));
        }
        let wrong =
            |(types, layer): &(&Vec<HeadTypes>, &kvant_kv::KvLayerShape)| types.len() != layer.n_kv_heads;
        match self.types.iter().zip(&shape.layers).position(|layer| wrong(&layer)) {
            Some(index) => {
                let (expected, got) = (shape.layers[index].n_kv_heads, self.types[index].len());
                Err(corrupt(path, format!("layer {index}: expected types of {expected} heads, got {got}")))
            }
            None => Ok(()),
        }
    }

    /// Writes the plan, replacing the file atomically.
    ///
    /// # Errors
    /// [`PlanFileError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), PlanFileError> {
        let io = |source| PlanFileError::Io { path: path.to_owned(), source };
        kvant_files::write(path, &self.encode()).map_err(io)
    }

    fn encode(&self) -> Vec<u8> {
        let Self { model, sink, types, channel_scales: balance, certificate } = self;
        let (model, layers, certificate) = (model.clone(), types.len(), certificate.clone());
        let mut body = line(&Head { model, layers, sink: *sink, certificate });
        for (types, balance) in types.iter().zip(&balance.layers) {
            let LayerScales { k_scale, v_scale, v_centre } = balance.clone();
            let names = |of: fn(&HeadTypes) -> DType| types.iter().map(|t| of(t).name().to_owned()).collect();
            let (k, v) = (names(|types| types.k), names(|types| types.v));
            body.extend(line(&Layer { k, v, k_scale, v_scale, v_centre }));
        }
        let mut bytes = format!("{MAGIC} {VERSION} {:016x}\n", xxh3_64(&body)).into_bytes();
        bytes.extend(body);
        bytes
    }

    /// Returns session options with this plan.
    ///
    /// # Errors
    /// Never for a plan that was read: its types are KV types.
    pub fn kv_options(&self) -> Result<KvOptions, Error> {
        let mut table = String::new();
        for (layer, heads) in self.types.iter().enumerate() {
            for (head, HeadTypes { k, v }) in heads.iter().enumerate() {
                table += &format!("{layer} {head} K {}\n{layer} {head} V {}\n", k.name(), v.name());
            }
        }
        let policies = Policies(vec![Policy::Sink(self.sink)]).with_table(&table)?;
        Ok(KvOptions {
            policies,
            balance: KvBalance::Plan(Arc::clone(&self.channel_scales)),
            ..Default::default()
        })
    }
}

fn corrupt(path: &Path, what: String) -> PlanFileError {
    PlanFileError::Corrupt { path: path.to_owned(), what: kvant_gguf::printable(&what, 160) }
}

fn kv_type(name: &str) -> Result<DType, String> {
    name.parse().ok().filter(|dtype: &DType| dtype.is_kv()).ok_or_else(|| format!("'{name}' is no KV type"))
}

fn line(value: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).expect("plain JSON");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundled::POCKET;

    fn gguf() -> Gguf {
        Gguf::from_bytes(POCKET).unwrap()
    }

    fn plan() -> KvPlan {
        let shape = Config::from_gguf(&gguf()).unwrap().kv_shape();
        let balance = |layer: &kvant_kv::KvLayerShape| LayerScales {
            k_scale: vec![1.2345; layer.n_kv_heads * layer.k_head_dim],
            v_scale: vec![0.015625; layer.n_kv_heads * layer.v_head_dim],
            v_centre: vec![-3.25e-5; layer.n_kv_heads * layer.v_head_dim],
        };
        let heads = |layer: &kvant_kv::KvLayerShape| {
            (0..layer.n_kv_heads)
                .map(|head| HeadTypes { k: [DType::Turbo4, DType::Q8_0][head % 2], v: DType::Turbo3 })
                .collect()
        };
        KvPlan {
            model: fingerprint::find(&gguf(), None),
            sink: 16,
            types: shape.layers.iter().map(heads).collect(),
            channel_scales: Arc::new(ChannelScales { layers: shape.layers.iter().map(balance).collect() }),
            certificate: Certificate {
                bits: 3.25,
                bytes_per_1k: 1000,
                bytes_per_1k_f16: 5000,
                mean_kld: 0.0123,
                mean_kld_stderr: 0.0004,
                noise_kld: 0.0031,
                p99_kld: 0.1,
                max_kld: 1.0,
                same_top: 0.95,
                ppl_ratio: 1.01,
                ppl_ratio_stderr: 0.002,
                needle: Some([1.0, 1.0]),
                needles: 3,
                weights: Some("q4_0".to_owned()),
                tail: true,
                tokens: 1000,
                n_ctx: 512,
                text: "0123".to_owned(),
                version: "0.1.0".to_owned(),
                commit: None,
            },
        }
    }

    fn balance(plan: &mut KvPlan) -> &mut ChannelScales {
        Arc::make_mut(&mut plan.channel_scales)
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvant-plan-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_plan_comes_back_as_it_was_written() {
        let folder = Folder::new("back");
        let path = folder.0.join("m.kvplan");
        plan().write(&path).unwrap();
        assert_eq!(KvPlan::open(&path, &gguf()).unwrap(), plan());
        let options = plan().kv_options().unwrap();
        let shape = Config::from_gguf(&gguf()).unwrap().kv_shape();
        let of_options = kvant_kv::Plan::new(&shape, options.k, options.v, &options.policies).unwrap();
        assert_eq!((of_options.types, of_options.sink_tokens), (plan().types, 16));
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_refused() {
        let folder = Folder::new("mutants");
        let path = folder.0.join("m.kvplan");
        let whole = plan().encode();
        let refused = |bytes: &[u8], what: &str| {
            std::fs::write(&path, bytes).unwrap();
            let error = KvPlan::open(&path, &gguf()).expect_err(what).to_string();
            assert!(error.starts_with(&printable_path(&path)) && !error.contains('\n'), "{what}: {error}");
        };
        for len in (0..whole.len()).step_by(1 + whole.len() / 200).chain([whole.len() - 1]) {
            refused(&whole[..len], &format!("{len} bytes"));
        }
        for at in (0..whole.len()).step_by(1 + whole.len() / 200).chain(0..40) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            refused(&bytes, &format!("byte {at}"));
        }
        refused(&[&whole[..], b"\n{}"].concat(), "a line more");
        refused(&vec![b'x'; 1000], "another file");
    }

    /// Files with a correct checksum and invalid contents.
    #[test]
    fn invalid_plans_with_a_valid_checksum_are_refused() {
        let folder = Folder::new("sealed");
        let path = folder.0.join("m.kvplan");
        let refused = |change: &dyn Fn(&mut KvPlan), why: &str| {
            let mut plan = plan();
            change(&mut plan);
            plan.write(&path).unwrap();
            let error = KvPlan::open(&path, &gguf()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(&|plan| plan.model = "f".repeat(32), "the plan of another model: ffff");
        refused(&|plan| drop(balance(plan).layers.pop()), "layers, got");
        refused(
            &|plan| balance(plan).layers[1].k_scale[3] = 0.0,
            "layer 1: expected factors of 1/1024 to 1024, got 0",
        );
        refused(&|plan| balance(plan).layers[0].v_centre.truncate(5), "centres of values, got 5");
        refused(&|plan| plan.types[1].truncate(0), "layer 1: expected types of");
        refused(&|plan| plan.types[0][0].k = DType::Q6K, "layer 0: 'q6_K' is no KV type");
        // NaN becomes null.
        refused(&|plan| balance(plan).layers[0].v_scale[0] = f32::NAN, "layer 0: invalid type: null");
        let text = String::from_utf8(plan().encode()).unwrap();
        let opened = |text: String| {
            std::fs::write(&path, text).unwrap();
            KvPlan::open(&path, &gguf()).unwrap_err().to_string()
        };
        assert!(
            opened(text.replacen("kvplan 4", "kvplan 5", 1)).ends_with("cache plan version 5, expected 4")
        );
        assert!(opened(text.replacen("kvplan 4", "kvplan four", 1)).ends_with("not a cache plan"));
        assert!(KvPlan::open(&folder.0, &gguf()).unwrap_err().to_string().contains("not a regular file"));
    }
}
