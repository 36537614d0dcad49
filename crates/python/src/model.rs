//! The Python class `kvant.Model`: loads a model, creates sessions, embeds, tokenizes.

use std::path::PathBuf;
use std::sync::Arc;

use kvant::{
    EmbedOptions, Gguf, KvOptions, LoraFile, OpenOptions, Policies, Pooling, SessionOptions, open_file,
    open_lora,
};
use pyo3::prelude::*;

use crate::error::to_py_err;
use crate::prompt::Prompt;
use crate::session::Session;

/// A loaded model; any number of threads may use it concurrently.
#[pyclass(frozen, module = "kvant")]
pub(crate) struct Model(kvant::Model);

/// KV-cache types: one type, or one for keys and one for values.
#[derive(FromPyObject)]
enum KvTypes {
    #[pyo3(transparent, annotation = "str")]
    Both(String),
    #[pyo3(transparent, annotation = "(str, str)")]
    Each((String, String)),
}

impl KvTypes {
    /// Returns KV options with these types and policies.
    fn options(self, policies: Option<&str>) -> PyResult<KvOptions> {
        let types = match self {
            Self::Both(both) => both,
            Self::Each((k, v)) => format!("{k}/{v}"),
        };
        let policies = policies.map_or(Ok(Policies::default()), str::parse).map_err(to_py_err)?;
        Ok(KvOptions { policies, ..types.parse().map_err(to_py_err)? })
    }
}

/// A LoRA adapter: a GGUF file or a PEFT folder, and its scale, 1 by default.
#[derive(FromPyObject)]
enum Lora {
    #[pyo3(transparent, annotation = "path")]
    Plain(PathBuf),
    #[pyo3(transparent, annotation = "(path, float)")]
    Scaled((PathBuf, f32)),
}

impl Lora {
    fn open(self, base: &Gguf) -> Result<LoraFile, kvant::Error> {
        let (path, strength) = match self {
            Self::Plain(path) => (path, 1.0),
            Self::Scaled(scaled) => scaled,
        };
        Ok(LoraFile::new(open_lora(path, base)?, strength))
    }
}

/// Loads a model with the GIL released.
fn load(
    py: Python<'_>,
    device: &str,
    n_threads: Option<usize>,
    load: impl FnOnce(OpenOptions<'_>) -> Result<kvant::Model, kvant::Error> + Send,
) -> PyResult<Model> {
    let device = device.parse().map_err(to_py_err)?;
    let loaded = py.detach(|| load(OpenOptions { device, n_threads, ..Default::default() }));
    loaded.map(Model).map_err(to_py_err)
}

#[pymethods]
impl Model {
    #[staticmethod]
    #[pyo3(signature = (path, *, device = "auto", n_threads = None, loras = Vec::new(), mmproj = None))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        device: &str,
        n_threads: Option<usize>,
        loras: Vec<Lora>,
        mmproj: Option<PathBuf>,
    ) -> PyResult<Self> {
        load(py, device, n_threads, |options| {
            let gguf = open_file(path)?;
            let loras = loras.into_iter().map(|lora| lora.open(&gguf)).collect::<Result<_, _>>()?;
            let mmproj = mmproj.map(|path| open_file(path).map(Arc::new)).transpose()?;
            kvant::Model::from_gguf(gguf, OpenOptions { loras, mmproj, ..options })
        })
    }

    #[staticmethod]
    #[pyo3(signature = (*, device = "auto", n_threads = None))]
    fn bundled(py: Python<'_>, device: &str, n_threads: Option<usize>) -> PyResult<Self> {
        load(py, device, n_threads, kvant::Model::bundled)
    }

    #[pyo3(signature = (kv = KvTypes::Both("f16".to_owned()), *, kv_policy = None, n_ctx = None, lora_strengths = None))]
    fn session(
        &self,
        py: Python<'_>,
        kv: KvTypes,
        kv_policy: Option<&str>,
        n_ctx: Option<usize>,
        lora_strengths: Option<Vec<f32>>,
    ) -> PyResult<Session> {
        let kv = kv.options(kv_policy)?;
        // This may wait for a step of another session.
        let session = py.detach(|| self.0.session(SessionOptions { n_ctx, kv })).map_err(to_py_err)?;
        let session = match lora_strengths {
            Some(strengths) => session.with_lora_scales(&strengths).map_err(to_py_err)?,
            None => session,
        };
        Ok(Session::new(session))
    }

    #[pyo3(signature = (texts, *, pooling = None, dimensions = None, kv = KvTypes::Both("f16".to_owned())))]
    fn embed(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        pooling: Option<&str>,
        dimensions: Option<usize>,
        kv: KvTypes,
    ) -> PyResult<Vec<Vec<f32>>> {
        let pooling = pooling.map(str::parse::<Pooling>).transpose().map_err(to_py_err)?;
        let options = EmbedOptions { pooling, dimensions, kv: kv.options(None)? };
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        py.detach(|| self.0.embed(&texts, &options)).map_err(to_py_err)
    }

    fn tokens(&self, py: Python<'_>, prompt: Prompt) -> PyResult<Vec<u32>> {
        py.detach(|| prompt.tokens(&self.0))
    }

    fn text(&self, tokens: Vec<u32>) -> PyResult<String> {
        Ok(self.0.tokenizer().map_err(to_py_err)?.decode(&tokens))
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
