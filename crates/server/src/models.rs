//! Served models: one that is always loaded, and others that are loaded on demand.
//!
//! Each loaded model has a worker thread and an equal share of the cache budget. When the weights
//! of another model do not fit, the least recently used idle model is unloaded first.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvant::{Model, SessionOptions, TOKENS_PER_BLOCK};

use crate::cache_key::CacheSpec;
use crate::constraint_compiler::ConstraintCompilers;
use crate::error::ServeError;
use crate::events::Blocks;
use crate::http::{ApiError, ServedModel};
use crate::metrics::Metrics;
use crate::options::{ModelSpec, OpenedModel, Options};
use crate::owner_limits::Lanes;
use crate::scheduler::Limits;
use crate::status::Status;
use crate::store::Store;
use crate::transfer::Transfers;
use crate::worker::{Worker, WorkerOptions};

/// Maximum time for a worker to save conversations.
const SHUTDOWN_TIME: Duration = Duration::from_secs(60);
/// Polling interval for the end of a worker.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Stack size of a worker thread, which walks grammars.
const MODEL_STACK: usize = 16 << 20;

/// Reports a panic of a worker thread, unless it is disarmed first.
pub(crate) struct PanicGuard(Option<tokio::sync::mpsc::Sender<()>>);

impl PanicGuard {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if let Some(broken) = self.0.take() {
            _ = broken.try_send(());
        }
    }
}

/// Model with its worker thread.
struct LoadedModel {
    hosted: Arc<ServedModel>,
    thread: JoinHandle<()>,
    bytes: u64,
    used: Instant,
}

impl LoadedModel {
    /// Completes running requests, saves conversations and frees the memory, at the latest by
    /// `until`.
    fn end(self, until: Instant) {
        let Self { hosted, thread, .. } = self;
        let name = hosted.name.clone();
        drop(hosted);
        while !thread.is_finished() {
            if Instant::now() > until {
                tracing::error!(
                    name,
                    "a model's thread does not end: conversations that are not saved yet are lost"
                );
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        _ = thread.join();
    }
}

/// Registry of the served models. See the [module](self).
pub(crate) struct ModelRegistry {
    options: Options,
    pub metrics: Arc<Metrics>,
    pub transfers: Arc<Transfers>,
    /// By index of the name; the first is the model that is always loaded.
    loaded: Mutex<Vec<Option<LoadedModel>>>,
    /// Held during a load: two at once might not fit.
    loading: tokio::sync::Mutex<()>,
    broken: tokio::sync::mpsc::Sender<()>,
}

impl ModelRegistry {
    /// Creates the registry with `model` loaded.
    pub fn new(
        model: Model,
        options: Options,
        broken: tokio::sync::mpsc::Sender<()>,
    ) -> Result<Self, ServeError> {
        let metrics = Arc::new(Metrics::new());
        let transfers = Arc::new(Transfers::new(&options, Arc::clone(&metrics)));
        let (loaded, loading) = (Mutex::default(), Default::default());
        let pool = Self { options, metrics, transfers, loaded, loading, broken };
        let first = OpenedModel { model, kv: pool.options.kv.clone(), sampling: pool.options.sampling };
        let first = pool.start(pool.options.name.clone(), first)?;
        let others = pool.options.others.iter().map(|_| None);
        if let Ok(n_blocks) = pool.n_kv_blocks(&first.hosted) {
            pool.metrics.set_kv_blocks(n_blocks);
        }
        *pool.all() = std::iter::once(Some(first)).chain(others).collect();
        Ok(pool)
    }

    /// Returns how many KV blocks of the default types the share of a model of the budget holds.
    pub fn n_kv_blocks(&self, hosted: &ServedModel) -> Result<u64, kvant::Error> {
        let block = hosted.defaults.cost(&hosted.model)?.block;
        let budget = self.options.kv_budget / (1 + self.options.others.len());
        Ok(budget.checked_div(block).unwrap_or(0) as u64)
    }

    fn all(&self) -> MutexGuard<'_, Vec<Option<LoadedModel>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the names of all models, the always loaded one first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let others = self.options.others.iter().map(|offer| offer.name.as_str());
        std::iter::once(self.options.name.as_str()).chain(others)
    }

    /// Returns all models, with those that are loaded.
    pub fn models(&self) -> Vec<(&str, Option<Arc<ServedModel>>)> {
        let hosted: Vec<_> = self
            .all()
            .iter()
            .map(|loaded| loaded.as_ref().map(|loaded| Arc::clone(&loaded.hosted)))
            .collect();
        self.names().zip(hosted).collect()
    }

    /// Returns the model that is always loaded.
    pub fn first(&self) -> Result<Arc<ServedModel>, ApiError> {
        self.find_loaded(0).ok_or_else(ApiError::shutting_down)
    }

    /// Returns the sum of the states of all loaded models.
    pub fn status(&self) -> Status {
        self.all().iter().flatten().map(|loaded| loaded.hosted.status()).sum()
    }

    /// Returns the model of this name, loading it on demand. A single model answers to any name.
    pub async fn get(self: &Arc<Self>, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let index = match name {
            Some(name) if !self.options.others.is_empty() => self.index(name)?,
            _ => 0,
        };
        if let Some(hosted) = self.find_loaded(index) {
            return Ok(hosted);
        }
        // The load continues without the client: others will need the model.
        let pool = Arc::clone(self);
        let loaded = tokio::spawn(async move {
            let _loading = pool.loading.lock().await;
            match pool.find_loaded(index) {
                Some(hosted) => Ok(hosted),
                None => {
                    let pool = Arc::clone(&pool);
                    tokio::task::spawn_blocking(move || pool.load(index)).await.map_err(|_| broken())?
                }
            }
        });
        loaded.await.map_err(|_| broken())?
    }

    /// Returns the index of the model of this name, or of the model to which an adapter of this
    /// name applies.
    pub fn index(&self, name: &str) -> Result<usize, ApiError> {
        let names: Vec<&str> = self.names().collect();
        let of_adapter = || self.find_loaded(0).filter(|first| first.adapter(name).is_some()).map(|_| 0);
        let index = names.iter().position(|known| *known == name).or_else(of_adapter);
        index.ok_or_else(|| ApiError::unknown_model(name, &names))
    }

    fn find_loaded(&self, index: usize) -> Option<Arc<ServedModel>> {
        let mut all = self.all();
        let loaded = all.get_mut(index)?.as_mut()?;
        loaded.used = Instant::now();
        Some(Arc::clone(&loaded.hosted))
    }

    fn load(&self, index: usize) -> Result<Arc<ServedModel>, ApiError> {
        let offer = &self.options.others[index - 1];
        self.make_room(offer)?;
        let started = Instant::now();
        // Paths appear only in the log.
        let failed = |error: &dyn fmt::Display| {
            tracing::error!(model = offer.name, %error, "cannot be loaded");
            ApiError::internal(format!("{} cannot be loaded: see the server's log", offer.name))
        };
        let opened = (offer.open)().map_err(|error| failed(&error))?;
        let loaded = self.start(offer.name.clone(), opened).map_err(|error| failed(&error))?;
        tracing::info!(model = offer.name, seconds = started.elapsed().as_secs_f64(), "loaded");
        let hosted = Arc::clone(&loaded.hosted);
        self.all()[index] = Some(loaded);
        Ok(hosted)
    }

    /// Unloads idle models until the weights of another one fit.
    fn make_room(&self, offer: &ModelSpec) -> Result<(), ApiError> {
        loop {
            let mut all = self.all();
            let there: u64 = all.iter().flatten().map(|loaded| loaded.bytes).sum();
            if there + offer.bytes <= self.options.weight_budget {
                return Ok(());
            }
            // Every response holds its model until it has been sent.
            let is_idle = |loaded: &LoadedModel| Arc::strong_count(&loaded.hosted) == 1;
            let idle = all.iter_mut().skip(1).filter(|slot| slot.as_ref().is_some_and(is_idle));
            let oldest = idle.min_by_key(|slot| slot.as_ref().map(|loaded| loaded.used));
            let Some(oldest) = oldest.and_then(Option::take) else {
                return Err(ApiError::insufficient_memory(
                    &offer.name,
                    offer.bytes,
                    there,
                    self.options.weight_budget,
                ));
            };
            drop(all);
            tracing::info!(model = oldest.hosted.name, "unloaded");
            oldest.end(Instant::now() + SHUTDOWN_TIME);
        }
    }

    /// Starts the worker thread of a model.
    fn start(&self, name: String, opened: OpenedModel) -> Result<LoadedModel, ServeError> {
        let (OpenedModel { model, kv, sampling: drawing }, options) = (opened, &self.options);
        let session = SessionOptions { n_ctx: options.n_ctx, kv: kv.clone() };
        let n_ctx = match model.is_encoder() {
            true => model.config().n_ctx_train,
            false => model.session(session)?.n_ctx(),
        };
        model.tokenizer()?;
        // Computed from the file while it is unchanged: saved caches are named by it.
        model.fingerprint();
        let (share, bytes) = (1 + options.others.len(), model.weight_bytes() as u64);
        let limits = Limits {
            n_running: options.n_running,
            n_waiting: options.n_waiting,
            n_owners: options.api_keys.len().max(1),
            n_rows: model.device().max_step_rows,
            block: TOKENS_PER_BLOCK,
            min_shared_tokens: TOKENS_PER_BLOCK / 2,
            budget: options.kv_budget / share,
        };
        let (stored, max_waiting) = (CacheSpec::new(kv, None), limits.max_waiting());
        // A router could not distinguish the tokens of several models.
        let sink = options.kv_events.clone().filter(|_| options.others.is_empty());
        let blocks = Blocks::new(sink, Arc::clone(&stored));
        let of_it = |bytes: u64| bytes / share as u64;
        let disk = options.kv_disk.clone().map(|(folder, bytes)| (folder, of_it(bytes)));
        let store = Store::open(of_it(options.kv_ram), disk, &model, blocks.clone())?;
        let status = Arc::new(Mutex::default());
        let of_worker = WorkerOptions { n_ctx: options.n_ctx, draft_max: options.draft_max, limits };
        let (metrics, published) = (Arc::clone(&self.metrics), Arc::clone(&status));
        let transfers = Arc::clone(&self.transfers);
        let worker = Worker::new(model.clone(), of_worker, store, blocks, transfers, metrics, published);
        let (jobs, received) = mpsc::channel();
        let alarm = PanicGuard(Some(self.broken.clone()));
        let work = move || {
            worker.run(&received);
            alarm.disarm();
        };
        let thread =
            std::thread::Builder::new().name("model".to_owned()).stack_size(MODEL_STACK).spawn(work)?;
        let hosted = ServedModel {
            name,
            n_ctx,
            defaults: stored,
            defaults_of: Mutex::default(),
            sampling_defaults: drawing,
            enable_thinking: options.enable_thinking,
            thinking_budget: options.thinking_budget,
            grammars: Arc::new(ConstraintCompilers::new()?),
            long_texts: Lanes::new(1, 1),
            max_queued: max_waiting,
            model,
            jobs,
            status,
            metrics: Arc::clone(&self.metrics),
            transfers: Arc::clone(&self.transfers),
        };
        Ok(LoadedModel { hosted: Arc::new(hosted), thread, bytes, used: Instant::now() })
    }

    /// Ends all workers.
    pub fn end(&self) {
        let all = std::mem::take(&mut *self.all());
        let until = Instant::now() + SHUTDOWN_TIME;
        all.into_iter().flatten().for_each(|loaded| loaded.end(until));
    }
}

fn broken() -> ApiError {
    ApiError::internal("an internal error while the model was loaded")
}
