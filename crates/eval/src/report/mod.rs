//! One page that shows what was measured: self-contained HTML with inline SVG, for light and dark screens.
//!
//! A report is a folder. Each measurement leaves its numbers there as JSON; the page is made of all that the folder holds, so
//! `kvant eval kld --report DIR`, `kvant eval niah --report DIR` and `kvant plan --report DIR` together fill one page.

mod charts;
mod page;
mod plan;
mod plot;

use std::path::{Path, PathBuf};

use kvant::files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::plan::{PlanCell, PlanReport};
use crate::distortion::Distortion;
use crate::{EvalError, Kld, KldStats, KvConfig, LayerKld, NiahCell};

/// Where numbers come from.
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
    /// What the cache stored.
    pub kv: KvConfig,
    /// How far it is from the base.
    pub stats: KldStats,
    /// Mean divergence by position in the chunk: a bin's first position and its mean.
    pub by_position: Vec<(usize, f64)>,
}

impl From<&Kld> for KldRow {
    fn from(kld: &Kld) -> Self {
        Self { kv: kld.kv.clone(), stats: kld.stats(), by_position: kld.by_position(32) }
    }
}

/// What `eval kld` leaves in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KldReport {
    /// Where it comes from.
    pub about: About,
    /// Tokens of a chunk.
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

/// What `eval niah` leaves in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NiahReport {
    /// Where it comes from.
    pub about: About,
    /// The form's name.
    pub form: String,
    /// Needles in one haystack.
    pub needles: usize,
    /// The grid.
    pub cells: Vec<NiahCell>,
}

/// What `eval distortion` leaves in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DistortionReport {
    /// Where it comes from.
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
    /// A cache plan.
    Plan(PlanReport),
}

/// All that a folder holds.
#[derive(Debug, Clone, PartialEq, Default)]
struct Parts {
    kld: Option<KldReport>,
    niah: Option<NiahReport>,
    distortion: Option<DistortionReport>,
    plan: Option<PlanReport>,
}

impl Part {
    /// The file that keeps it.
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

/// Whether a report can be written to `folder`, to be asked before its part is measured. Changes nothing.
///
/// # Errors
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
    // The report makes them; a run that fails before it leaves nothing.
    missing.into_iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    result
}

/// Puts a part into the report in `folder` (made when it is missing) and makes the page anew. Returns the page's path.
///
/// # Errors
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
    fn parts_gather_on_one_self_contained_page() {
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
        for wanted in ["<svg", "turbo4", "100 %", "m &lt;b&gt;", "prefers-color-scheme"] {
            assert!(html.contains(wanted), "{wanted}");
        }
        for outside in ["http://", "https://", "<script", "src=", "NaN", "inf "] {
            assert!(!html.contains(outside), "{outside}");
        }
        std::fs::write(folder.join("kld.json"), "{").unwrap();
        assert!(update(&folder, &part).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
