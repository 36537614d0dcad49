//! Compilation of the constraints of requests: on low-priority threads, limited in number per owner
//! and in time, and cached. The first mask is computed before a request is accepted.

mod cache;

use std::sync::Arc;

use kvant::generate::constraint::{
    COMPILE_TIME, COMPILER_STACK, Constraint, ConstraintCompiler, ConstraintError, MASK_TIME,
    MaskCancellation, OutputFormat, Owner, lower_priority,
};
use kvant::{Model, Tokenizer};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::owner_limits::{Lane, Lanes};
use cache::{Cache, Key};

/// Maximum concurrent compilations, and those of one owner.
const COMPILERS: (usize, usize) = (3, 2);

/// Compiles constraints for one vocabulary.
pub(crate) struct ConstraintCompilers {
    compiler: ConstraintCompiler,
    lanes: Arc<Lanes>,
    cache: Cache,
}

/// Receivers of a compilation: what cancels its first mask, and the constraint.
struct Compilation {
    compiled: oneshot::Receiver<Result<MaskCancellation, ConstraintError>>,
    first: oneshot::Receiver<Result<Constraint, ConstraintError>>,
}

impl ConstraintCompilers {
    /// Creates the compilers of a model, with the threads that compute masks.
    pub fn new() -> std::io::Result<Self> {
        let lanes = Lanes::new(COMPILERS.0, COMPILERS.1);
        Ok(Self { compiler: ConstraintCompiler::new()?, lanes, cache: Cache::default() })
    }

    /// Returns a constraint for answers of this format, for a request of `owner`.
    ///
    /// # Errors
    /// [`ConstraintError`].
    pub async fn constraint(
        self: &Arc<Self>,
        model: &Model,
        format: OutputFormat,
        owner: Owner,
    ) -> Result<Constraint, ConstraintError> {
        let key = Key::of(&format, &owner);
        if let Some(constraint) = key.and_then(|key| self.cache.find(key)) {
            return Ok(constraint);
        }
        let lane = self.lanes.enter(&owner).await;
        let Compilation { compiled, first } = self.start(model, format, owner, lane)?;
        let compiled = timeout(COMPILE_TIME, compiled).await.map_err(|_| ConstraintError::SlowToCompile)?;
        // Dropped with a client that disconnects.
        let cancellation = compiled.map_err(|_| ConstraintError::crashed())??;
        let first = timeout(MASK_TIME, first).await.map_err(|_| ConstraintError::SlowMask)?;
        let constraint = first.map_err(|_| ConstraintError::crashed())??;
        cancellation.disarm();
        if let Some(key) = key {
            self.cache.keep(key, &constraint);
        }
        Ok(constraint)
    }

    /// Starts a thread that compiles a constraint, which stops if the receiver is dropped.
    fn start(
        self: &Arc<Self>,
        model: &Model,
        format: OutputFormat,
        owner: Owner,
        lane: Lane,
    ) -> Result<Compilation, ConstraintError> {
        let ((to, compiled), (to_first, first)) = (oneshot::channel(), oneshot::channel());
        let (compilers, model) = (Arc::clone(self), model.clone());
        let compile = move || {
            let _lane = lane;
            let tokenizer = match tokenizer(&model) {
                Ok(tokenizer) => tokenizer,
                Err(error) => return drop(to.send(Err(error))),
            };
            // All requests wait for the vocabulary.
            compilers.compiler.prepare(tokenizer);
            lower_priority();
            let compiled = match compilers.compiler.compile(tokenizer, &format, owner) {
                Ok(compiled) => compiled,
                Err(error) => return drop(to.send(Err(error))),
            };
            if to.send(Ok(compiled.cancellation())).is_ok() {
                _ = to_first.send(compiled.start());
            }
        };
        let thread = std::thread::Builder::new().name("compiler".to_owned()).stack_size(COMPILER_STACK);
        thread.spawn(compile).map_err(|error| ConstraintError::Invalid(error.to_string()))?;
        Ok(Compilation { compiled, first })
    }
}

fn tokenizer(model: &Model) -> Result<&Tokenizer, ConstraintError> {
    model.tokenizer().map_err(|error| ConstraintError::Invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use kvant::Special;

    use super::*;

    #[test]
    fn a_cached_constraint_starts_anew_for_each_answer() {
        let model = Model::bundled(kvant::OpenOptions::default()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let compilers = Arc::new(ConstraintCompilers::new().unwrap());
        let form = |n: usize| OutputFormat::Regex(format!("a{{{n}}}"));
        let compile = |n| runtime.block_on(compilers.constraint(&model, form(n), None)).unwrap();
        let a = model.tokenizer().unwrap().encode("a", Special::AsText, false).unwrap();
        let key = Key::of(&form(1), &None).unwrap();
        assert!(compilers.cache.find(key).is_none());
        for _ in 0..2 {
            assert!(compile(1).accepts(&a));
            assert!(compilers.cache.find(key).is_some_and(|constraint| constraint.accepts(&a)));
        }
        // The cache separates owners, omits large constraints, and evicts the oldest.
        assert_ne!(Key::of(&form(1), &Some("key".into())), Some(key));
        assert_eq!(Key::of(&OutputFormat::Regex("a".repeat(100_000)), &None), None);
        (2..18).for_each(|n| drop(compile(n)));
        assert!(compilers.cache.find(key).is_none());
    }
}
