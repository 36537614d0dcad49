//! HTML report of measurements: self-contained with inline SVG, for light and dark screens.
//!
//! A report is a folder. Each measurement stores its numbers there as JSON; the page is rendered
//! from all parts in the folder, so `kvant eval kld --report DIR`, `kvant eval niah --report DIR`
//! and `kvant plan --report DIR` together fill one page.

mod charts;
mod page;
mod plan;
mod plot;

use std::path::{Path, PathBuf};

use kvant::files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::plan::{PlanCell, PlanReport};
use crate::config::KvConfig;
use crate::distortion::Distortion;
use crate::error::EvalError;
use crate::kld::{Kld, LayerKld};
use crate::niah::NiahCell;
use crate::stats::KldStats;

/// Provenance of numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct About {
    /// The model.
    pub model: String,
    /// The text.
    pub text: String,
    /// Device and kernels.
    pub device: String,
    /// The command.
    pub command: String,
}

/// One configuration in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KldRow {
    /// The cache configuration.
    pub kv: KvConfig,
    /// Statistics of its divergence from the base.
    pub stats: KldStats,
    /// Mean divergence by position in the chunk: a bin's first position and its mean.
    pub by_position: Vec<(usize, f64)>,
}

impl From<&Kld> for KldRow {
    fn from(kld: &Kld) -> Self {
        Self { kv: kld.kv.clone(), stats: kld.stats(), by_position: kld.by_position(32) }
    }
}

/// Part of `eval kld` in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KldReport {
    /// Its provenance.
    pub about: About,
    /// Tokens per chunk.
    pub n_ctx: usize,
    /// Chunks measured.
    pub chunks: usize,
    /// The configurations.
    pub rows: Vec<KldRow>,
    /// The configuration that was measured layer by layer.
    pub layers_of: String,
    /// Its layers.
    pub layers: Vec<LayerKld>,
}

/// Part of `eval niah` in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NiahReport {
    /// Its provenance.
    pub about: About,
    /// Name of the form.
    pub form: String,
    /// Needles per haystack.
    pub needles: usize,
    /// The grid.
    pub cells: Vec<NiahCell>,
}

/// Part of `eval distortion` in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DistortionReport {
    /// Its provenance.
    pub about: About,
    /// The formats.
    pub rows: Vec<Distortion>,
}

/// A part of a report.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// KL divergence.
    Kld(KldReport),
    /// Needles.
    Niah(NiahReport),
    /// Distortion.
    Distortion(DistortionReport),
    /// A KV cache plan.
    Plan(PlanReport),
}

/// All parts in a folder.
#[derive(Debug, Clone, PartialEq, Default)]
struct Parts {
    kld: Option<KldReport>,
    niah: Option<NiahReport>,
    distortion: Option<DistortionReport>,
    plan: Option<PlanReport>,
}

impl Part {
    /// Returns the part's file name.
    fn file(&self) -> &'static str {
        match self {
            Self::Kld(_) => KLD,
            Self::Niah(_) => NIAH,
            Self::Distortion(_) => DISTORTION,
            Self::Plan(_) => PLAN,
        }
    }
}

const KLD: &str = "kld.json";
const NIAH: &str = "niah.json";
const DISTORTION: &str = "distortion.json";
const PLAN: &str = "plan.json";
const PAGE: &str = "index.html";

/// Checks, before the measurement, that a report can be written to `folder`. Changes no files.
///
/// # Errors
///
/// When the folder or a file of a report in it cannot be written.
pub fn check(folder: &Path) -> Result<(), EvalError> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    let made = std::fs::create_dir_all(folder).map_err(EvalError::io(folder));
    let result = made.and_then(|()| {
        [KLD, NIAH, DISTORTION, PLAN, PAGE].iter().try_for_each(|name| {
            let path = folder.join(name);
            files::check_target(&path).map_err(EvalError::io(&path))
        })
    });
    // The report creates them; a run that fails before it leaves no folder.
    missing.into_iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    result
}

/// Adds a part to the report in `folder` (created if missing) and renders the page again. Returns
/// the page's path.
///
/// # Errors
///
/// When the folder cannot be written, or another part in it cannot be read.
pub fn update(folder: &Path, part: &Part) -> Result<PathBuf, EvalError> {
    std::fs::create_dir_all(folder).map_err(EvalError::io(folder))?;
    let path = folder.join(part.file());
    match part {
        Part::Kld(part) => write_json(&path, part)?,
        Part::Niah(part) => write_json(&path, part)?,
        Part::Distortion(part) => write_json(&path, part)?,
        Part::Plan(part) => write_json(&path, part)?,
    }
    let page = folder.join(PAGE);
    files::write(&page, page::render(&Parts::read(folder)?).as_bytes()).map_err(EvalError::io(&page))?;
    Ok(page)
}

impl Parts {
    fn read(folder: &Path) -> Result<Self, EvalError> {
        Ok(Self {
            kld: read_json(&folder.join(KLD))?,
            niah: read_json(&folder.join(NIAH))?,
            distortion: read_json(&folder.join(DISTORTION))?,
            plan: read_json(&folder.join(PLAN))?,
        })
    }
}

fn write_json(path: &Path, part: &impl Serialize) -> Result<(), EvalError> {
    let bytes = serde_json::to_vec_pretty(part).expect("a report becomes JSON");
    files::write(path, &bytes).map_err(EvalError::io(path))
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EvalError> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = files::read(path).map_err(EvalError::io(path))?;
    let part = serde_json::from_slice(&bytes);
    part.map(Some).map_err(|error| EvalError::file(path, format!("not a part of a report: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distortion::synthetic;

    fn about() -> About {
        let text = |s: &str| s.to_owned();
        About { model: text("m <b>"), text: text("t"), device: text("cpu"), command: text("kvant eval") }
    }

    #[test]
    fn all_parts_are_on_one_self_contained_page() {
        let folder = std::env::temp_dir().join(format!("kvant-report-{}", std::process::id()));
        let rows = synthetic(128, 50, 1).unwrap();
        let part = Part::Distortion(DistortionReport { about: about(), rows });
        check(&folder.join("missing/too")).unwrap();
        assert!(!folder.exists(), "a question makes no folders");
        let page = update(&folder, &part).unwrap();
        let cell = |depth| NiahCell {
            n_ctx: 256,
            depth,
            type_k: "turbo3".to_owned(),
            type_v: "turbo3".to_owned(),
            exact: 1.0,
            token_accuracy: 1.0,
        };
        let cells = vec![cell(0.0), cell(1.0)];
        let niah = NiahReport { about: about(), form: "secret-word".to_owned(), needles: 1, cells };
        update(&folder, &Part::Niah(niah)).unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        for expected in ["<svg", "turbo4", "100 %", "m &lt;b&gt;", "prefers-color-scheme"] {
            assert!(html.contains(expected), "{expected}");
        }
        for outside in ["http://", "https://", "<script", "src=", "NaN", "inf "] {
            assert!(!html.contains(outside), "{outside}");
        }
        std::fs::write(folder.join("kld.json"), "{").unwrap();
        assert!(update(&folder, &part).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
