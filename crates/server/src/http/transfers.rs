//! Transfers of KV caches: what a request asks for, and `/kv/transfers/ID` for decode workers.

use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::generation_request::GenerationRequest;
use super::{Caller, ServedModel, Server};
use crate::cache_key::CacheKey;
use crate::transfer::{self, ExpectedCache, FetchedCache, KeptCache, KvTransfer};

/// Transfer of a job.
#[derive(Default)]
pub(super) struct JobTransfer {
    pub keeps: Option<KeptCache>,
    pub fetched: Option<FetchedCache>,
}

impl ServedModel {
    /// Begins the transfer of a request with `n_prompts`, if it asks for one: fetches the cache, or
    /// names the one to keep. A cache that cannot be fetched is recomputed.
    ///
    /// # Errors
    /// A transfer that this server is not set up for, or of several answers.
    pub(super) async fn begin_transfer(
        &self,
        request: &GenerationRequest,
        n_prompts: usize,
        key: &CacheKey,
        caller: &Caller,
    ) -> Result<JobTransfer, ApiError> {
        let Some(transfer) = &request.kv_transfer else { return Ok(JobTransfer::default()) };
        if n_prompts * request.n != 1 {
            let got = format!("{}", n_prompts * request.n);
            return Err(ApiError::field("kv_transfer_params", "a request for one answer", got));
        }
        let none = JobTransfer::default();
        match transfer {
            KvTransfer::Keep(_) if !self.transfers.kept.is_enabled() => {
                let what =
                    "this server keeps no KV caches for decode workers: it has no memory for transfers";
                Err(ApiError::invalid(what))
            }
            KvTransfer::Keep(_) if request.stream => {
                Err(ApiError::field("kv_transfer_params", "a response that is not streamed", "a stream"))
            }
            KvTransfer::Keep(id) => {
                Ok(JobTransfer { keeps: Some(KeptCache { id: *id, owner: caller.owner.clone() }), ..none })
            }
            KvTransfer::Fetch(remote) if !self.transfers.peers.trusts(&remote.peer) => {
                Err(ApiError::field("remote_host", "a host that this server fetches from", &remote.peer.host))
            }
            KvTransfer::Fetch(remote) => {
                let (key, model) = (key.clone(), self.model.clone());
                // May read files.
                let hash = move || key.hash_with_model(&model.compute_fingerprint());
                let key = tokio::task::spawn_blocking(hash).await;
                let key = key.map_err(|_| ApiError::internal("an internal error while a model was read"))?;
                let expected = ExpectedCache { remote, key, owner: &caller.owner };
                Ok(JobTransfer { fetched: self.transfers.fetch(expected, &caller.id).await, ..none })
            }
        }
    }
}

/// Returns the cache of this id to the owner of the request that had it kept.
fn kept(id: &str, caller: &Caller) -> Result<KeptCache, ApiError> {
    let id = id.parse().map_err(|()| unknown())?;
    Ok(KeptCache { id, owner: caller.owner.clone() })
}

fn unknown() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found_error", "no cache is kept under this id")
}

/// Sends a kept cache.
pub(super) async fn get(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let (key, bytes): (u64, Bytes) =
        server.pool.transfers.kept.get(&kept(&id, &caller)?).ok_or_else(unknown)?;
    let head = [
        (header::CONTENT_TYPE.as_str(), "application/octet-stream".to_owned()),
        (transfer::CACHE_KEY, format!("{key:016x}")),
    ];
    Ok((head, bytes).into_response())
}

/// Releases a kept cache.
pub(super) async fn release(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let is_released = server.pool.transfers.kept.release(&kept(&id, &caller)?);
    if is_released { Ok(StatusCode::NO_CONTENT) } else { Err(unknown()) }
}
