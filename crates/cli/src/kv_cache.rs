//! Options of the KV cache: types and policies, with the plan that is given or beside the model.

use std::path::{Path, PathBuf};

use kvant::gguf::printable_path;
use kvant::{
    Certificate, DType, Gguf, KvBalance, KvOptions, KvPlan, Model, Policies, Session, SessionOptions,
};

use crate::args::cache::{BalanceArg, CacheArgs, KvPlanArgs};
use crate::failure::Failure;
use crate::files::{read_text, strip_bom};
use crate::log;

/// Holds a session's options and the reason for automatic types.
#[derive(Debug, Clone)]
pub struct ResolvedCache {
    pub options: SessionOptions,
    pub auto: Option<String>,
}

impl CacheArgs {
    /// Returns the options of a session.
    pub fn session_options(&self) -> Result<SessionOptions, Failure> {
        Ok(SessionOptions { n_ctx: self.ctx_size.filter(|&n| n > 0), kv: self.kv_options()? })
    }

    /// Notes a context longer than the training context.
    pub fn note_length(&self, session: &Session) {
        let (n_ctx, trained) = (session.n_ctx(), session.model().config().n_ctx_train);
        if n_ctx > trained {
            log::note(format!(
                "-c {n_ctx}: this model was trained on {trained} tokens; its output beyond them may make no sense"
            ));
        }
    }

    /// Returns the options of the KV cache; reads the type table.
    pub fn kv_options(&self) -> Result<KvOptions, Failure> {
        let mut policies = self.kv_policy.clone();
        if let Some(path) = &self.kv_types {
            policies = with_type_table(policies, path)?;
        }
        let [k, v] = self.types().map(|named| named.unwrap_or(DType::F16));
        Ok(KvOptions { k, v, policies, ..Default::default() })
    }

    /// Returns `options` with the given plan for `model`, or with the plan beside the model where
    /// no type is named, or with the automatic choice where no plan exists.
    pub fn resolve(&self, mut options: SessionOptions, model: &Model) -> Result<ResolvedCache, Failure> {
        let has_types = self.types().iter().any(Option::is_some) || self.kv_types.is_some();
        let given = self.plan.open(model)?;
        let mut auto = None;
        options.kv = match (given, has_types) {
            (Some(plan), true) => KvOptions { balance: plan.balance, ..options.kv },
            (Some(plan), false) => with_policies(plan, &self.kv_policy),
            (None, true) => options.kv,
            (None, false) => match beside(model) {
                Some((name, plan)) => {
                    auto = Some(format!("auto, {name}"));
                    with_policies(plan, &self.kv_policy)
                }
                None => {
                    auto = Some("auto, no plan".to_owned());
                    let defaults = KvOptions::default_for(&model.config().kv_shape());
                    let has_policies = self.kv_policy != Policies::default();
                    let policies = if has_policies { options.kv.policies } else { defaults.policies };
                    KvOptions { policies, ..defaults }
                }
            },
        };
        options.kv = self.plan.balanced(options.kv)?;
        Ok(ResolvedCache { options, auto })
    }
}

impl KvPlanArgs {
    /// Returns the options of the given plan, if any.
    ///
    /// # Errors
    ///
    /// An invalid plan, or one of another model.
    pub fn open(&self, model: &Model) -> Result<Option<KvOptions>, Failure> {
        let Some(path) = &self.kv_plan else { return Ok(None) };
        let plan = KvPlan::open(path, model.gguf())?;
        note_weights(&plan.certificate, model);
        Ok(Some(plan.kv_options()?))
    }

    /// Returns `kv` with the requested factors.
    ///
    /// # Errors
    ///
    /// `plan` was requested without a plan.
    pub fn balanced(&self, kv: KvOptions) -> Result<KvOptions, Failure> {
        let balance = match self.kv_balance {
            None => return Ok(kv),
            Some(BalanceArg::Plan) if matches!(kv.balance, KvBalance::Plan(_)) => return Ok(kv),
            Some(BalanceArg::Plan) => {
                let problem =
                    "--kv-balance plan: no plan is in use; kvant plan creates one, --kv-plan FILE selects it";
                return Err(Failure::Usage(problem.to_owned()));
            }
            Some(BalanceArg::Off) => KvBalance::Off,
            Some(BalanceArg::Weights) => KvBalance::Weights,
        };
        Ok(KvOptions { balance, ..kv })
    }

    /// Returns the caches with the factors of the given plan, or the plan's own cache in their
    /// place where no type was named.
    ///
    /// # Errors
    ///
    /// Those of [`KvPlanArgs::open`].
    pub fn applied(
        &self,
        caches: Vec<KvOptions>,
        has_types: bool,
        policies: &Policies,
        model: &Model,
    ) -> Result<Vec<KvOptions>, Failure> {
        let caches = match self.open(model)? {
            None => caches,
            Some(plan) if has_types => {
                caches.into_iter().map(|kv| KvOptions { balance: plan.balance.clone(), ..kv }).collect()
            }
            Some(plan) => vec![with_policies(plan, policies)],
        };
        caches.into_iter().map(|kv| self.balanced(kv)).collect()
    }
}

/// Returns the plan beside a model, with its file's name. An unusable plan is noted and ignored.
pub fn beside(model: &Model) -> Option<(String, KvOptions)> {
    let path = path_for(model.gguf())?;
    let name = printable_path(Path::new(path.file_name()?));
    let unused = |why: &dyn std::fmt::Display| {
        log::note(format_args!("{why}; the plan is not used"));
        None
    };
    let plan = match path.exists().then(|| KvPlan::open(&path, model.gguf()))? {
        Ok(plan) => plan,
        Err(error) => return unused(&error),
    };
    let mut types = plan.types.iter().flatten().flat_map(|heads| [heads.k, heads.v]);
    if let Some(dtype) = types.find(|&dtype| !model.supports_kv_type(dtype)) {
        return unused(&format_args!("{name} has {dtype}, which {} does not support", model.device().name));
    }
    note_weights(&plan.certificate, model);
    plan.kv_options().map_or_else(|error| unused(&error), |options| Some((name, options)))
}

/// Notes that a plan was measured with other weight types: its KV types remain suitable, its
/// figures may differ.
fn note_weights(measured: &Certificate, model: &Model) {
    let of = |weights: Option<&str>| {
        weights.map_or_else(|| "as the file has them".to_owned(), |name| format!("in {name}"))
    };
    let (measured, here) = (measured.weights.as_deref(), model.weights().map(|dtype| dtype.name()));
    if measured != here {
        log::note(format_args!(
            "the plan was measured with weights {}, and these are {}",
            of(measured),
            of(here)
        ));
    }
}

/// Adds the explicit rules of `--kv-policy` to a plan's options; the default rules are skipped,
/// since the plan supersedes them.
pub fn with_policies(mut plan: KvOptions, policies: &Policies) -> KvOptions {
    if *policies != Policies::default() {
        plan.policies.0.extend(policies.0.iter().cloned());
    }
    plan
}

/// Returns the plan's path of a model: `M.kvplan` beside the file `M.gguf` and beside the folder
/// `M`; `None` for a model in memory.
pub fn path_for(gguf: &Gguf) -> Option<PathBuf> {
    let path = gguf.path()?;
    if !path.is_dir() {
        return Some(path.with_extension("kvplan"));
    }
    // `.` and `..` have no file name of their own.
    let whole = if path.file_name().is_some() { path.to_owned() } else { path.canonicalize().ok()? };
    // The text after a dot belongs to a folder's name.
    let mut name = whole.file_name()?.to_owned();
    name.push(".kvplan");
    Some(whole.with_file_name(name))
}

/// Returns `policies` followed by the type table in a file.
pub fn with_type_table(policies: Policies, path: &Path) -> Result<Policies, Failure> {
    let text = strip_bom(read_text(path)?);
    policies.with_table(&text).map_err(|error| Failure::work(printable_path(path), error))
}
