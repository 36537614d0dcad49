//! `kvant.Model`.

use std::path::PathBuf;

use kvant::{EmbedOptions, KvOptions, OpenOptions, Policies, Pooling, SessionOptions};
use pyo3::prelude::*;

use crate::prompt::Prompt;
use crate::refused;
use crate::session::Session;

/// A loaded model; any threads may use it at once.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Model(kvant::Model);

/// What the cache stores: one type, or one for keys and one for values.
#[derive(FromPyObject)]
enum Types {
    #[pyo3(transparent, annotation = "str")]
    Both(String),
    #[pyo3(transparent, annotation = "(str, str)")]
    Each((String, String)),
}

impl Types {
    /// With rules on top.
    fn options(self, policies: Option<&str>) -> PyResult<KvOptions> {
        let types = match self {
            Self::Both(both) => both,
            Self::Each((k, v)) => format!("{k}/{v}"),
        };
        let policies = policies.map_or(Ok(Policies::default()), str::parse).map_err(refused)?;
        Ok(KvOptions { policies, ..types.parse().map_err(refused)? })
    }
}

/// Loads a model while other threads of Python run.
fn load(
    py: Python<'_>,
    device: &str,
    n_threads: Option<usize>,
    load: impl FnOnce(OpenOptions<'_>) -> Result<kvant::Model, kvant::Error> + Send,
) -> PyResult<Model> {
    let device = device.parse().map_err(refused)?;
    let loaded = py.detach(|| load(OpenOptions { device, n_threads, ..Default::default() }));
    loaded.map(Model).map_err(refused)
}

#[pymethods]
impl Model {
    #[staticmethod]
    #[pyo3(signature = (path, *, device = "auto", n_threads = None))]
    fn open(py: Python<'_>, path: PathBuf, device: &str, n_threads: Option<usize>) -> PyResult<Self> {
        load(py, device, n_threads, |options| kvant::Model::open_with(path, options))
    }

    #[staticmethod]
    #[pyo3(signature = (*, device = "auto", n_threads = None))]
    fn bundled(py: Python<'_>, device: &str, n_threads: Option<usize>) -> PyResult<Self> {
        load(py, device, n_threads, kvant::Model::bundled)
    }

    #[pyo3(signature = (kv = Types::Both("f16".to_owned()), *, kv_policy = None, n_ctx = None))]
    fn session(
        &self,
        py: Python<'_>,
        kv: Types,
        kv_policy: Option<&str>,
        n_ctx: Option<usize>,
    ) -> PyResult<Session> {
        let kv = kv.options(kv_policy)?;
        // A step of another session may have to be waited for.
        py.detach(|| self.0.session(SessionOptions { n_ctx, kv })).map(Session::new).map_err(refused)
    }

    #[pyo3(signature = (texts, *, pooling = None, dimensions = None, kv = Types::Both("f16".to_owned())))]
    fn embed(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        pooling: Option<&str>,
        dimensions: Option<usize>,
        kv: Types,
    ) -> PyResult<Vec<Vec<f32>>> {
        let pooling = pooling.map(str::parse::<Pooling>).transpose().map_err(refused)?;
        let options = EmbedOptions { pooling, dimensions, kv: kv.options(None)? };
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        py.detach(|| self.0.embed(&texts, &options)).map_err(refused)
    }

    fn tokens(&self, prompt: Prompt) -> PyResult<Vec<u32>> {
        prompt.tokens(&self.0)
    }

    fn text(&self, tokens: Vec<u32>) -> PyResult<String> {
        Ok(self.0.tokenizer().map_err(refused)?.decode(&tokens))
    }

    #[getter]
    fn n_vocab(&self) -> usize {
        self.0.n_vocab()
    }

    #[getter]
    fn device(&self) -> String {
        self.0.device().name
    }
}
