//! The service `vllm.Control`: what the server is and has, aborts and adapters.

use std::sync::Arc;

use axum::http::StatusCode;
use kvant::TOKENS_PER_BLOCK;
use kvant::gguf::printable_path;

use super::State;
use super::control_messages::{
    AbortRequest, Empty, GetKvEventSourcesResponse, KvEventSource, ListLorasResponse, LoraAdapter,
    LoraRequest, ModelInfo, ParallelismInfo, ServerInfo,
};
use super::request::unimplemented;
use crate::events::EventAddress;
use crate::http::{ApiError, Caller};

/// Calls of the contract that Kvant does not implement.
pub(super) const MISSING: [&str; 14] = [
    "Shutdown",
    "PauseGeneration",
    "ResumeGeneration",
    "IsPaused",
    "Sleep",
    "WakeUp",
    "IsSleeping",
    "InitWeightTransferEngine",
    "StartWeightUpdate",
    "StartDraftWeightUpdate",
    "UpdateWeights",
    "FinishWeightUpdate",
    "UpdateWeightVersion",
    "GetWeightVersion",
];

pub(super) async fn server_info(state: Arc<State>, _: Caller, _: Empty) -> Result<ServerInfo, ApiError> {
    let (hosted, options) = (state.server.pool.first()?, &state.server.options);
    Ok(ServerInfo {
        engine_version: concat!("kvant ", env!("CARGO_PKG_VERSION")).to_owned(),
        api_version: "vllm".to_owned(),
        instance_id: state.instance.clone(),
        parallelism: Some(ParallelismInfo {
            tensor_parallel_size: 1,
            pipeline_parallel_size: 1,
            data_parallel_size: 1,
            data_parallel_rank: 0,
            decode_context_parallel_size: 1,
            world_size: 1,
            data_parallel_size_local: 1,
        }),
        max_model_len: hosted.n_ctx.try_into().unwrap_or(u32::MAX),
        kv_block_size: TOKENS_PER_BLOCK as u32,
        total_kv_blocks: state.server.pool.n_kv_blocks(&hosted)?,
        max_running_requests: options.n_running as u64,
        max_batched_tokens: hosted.model.device().max_step_rows as u64,
        max_loras: hosted.model.loras().len() as u32,
        effective_attention_block_size: Some(TOKENS_PER_BLOCK as u64),
    })
}

pub(super) async fn model_info(state: Arc<State>, _: Caller, _: Empty) -> Result<ModelInfo, ApiError> {
    let hosted = state.server.pool.first()?;
    Ok(ModelInfo {
        model_id: hosted.name.clone(),
        served_model_name: hosted.name.clone(),
        supports_text_input: true,
        supports_token_ids_input: true,
        supports_lora: !hosted.model.loras().is_empty(),
    })
}

pub(super) async fn abort(
    state: Arc<State>,
    caller: Caller,
    request: AbortRequest,
) -> Result<Empty, ApiError> {
    state.running.abort(&caller.owner, &request.request_ids);
    Ok(Empty {})
}

pub(super) async fn kv_event_sources(
    state: Arc<State>,
    _: Caller,
    _: Empty,
) -> Result<GetKvEventSourcesResponse, ApiError> {
    let options = &state.server.options;
    // With several models none publishes events.
    let sink = options.kv_events.as_ref().filter(|_| options.others.is_empty());
    let sources = sink.and_then(|sink| sink.address()).into_iter().map(kv_event_source);
    Ok(GetKvEventSourcesResponse { sources: sources.collect() })
}

fn kv_event_source(address: &EventAddress) -> KvEventSource {
    let EventAddress { endpoint, replay, topic, n_replayed } = address;
    KvEventSource {
        transport: "zmq".to_owned(),
        endpoint: endpoint.clone(),
        topic: topic.clone(),
        replay_endpoint: replay.clone().unwrap_or_default(),
        data_parallel_rank: Some(0),
        encoding: "msgpack".to_owned(),
        schema_version: 1,
        buffer_steps: *n_replayed as u32,
    }
}

/// Returns the adapters of the model that is always loaded, numbered from 1.
fn adapters(state: &State) -> Result<Vec<LoraAdapter>, ApiError> {
    let hosted = state.server.pool.first()?;
    let adapter = |(lora_id, lora): (i64, &kvant::LoraFile)| LoraAdapter {
        lora_id,
        lora_name: lora.name.clone(),
        source_path: lora.file.path().map_or_else(String::new, printable_path),
    };
    Ok((1..).zip(hosted.model.loras()).map(adapter).collect())
}

pub(super) async fn list_loras(
    state: Arc<State>,
    _: Caller,
    _: Empty,
) -> Result<ListLorasResponse, ApiError> {
    Ok(ListLorasResponse { adapters: adapters(&state)? })
}

/// Refuses: the adapters of a model are loaded with it.
pub(super) async fn load_lora(state: Arc<State>, _: Caller, request: LoraRequest) -> Result<Empty, ApiError> {
    let name = request.lora_name;
    if adapters(&state)?.iter().any(|adapter| adapter.lora_name == name) {
        let message = format!("the adapter '{name}' is loaded already");
        return Err(ApiError::new(StatusCode::CONFLICT, "invalid_request_error", message));
    }
    Err(unimplemented("LoadLora", "adapters that are loaded with the model"))
}

/// Refuses: the adapters of a model stay loaded with it.
pub(super) async fn unload_lora(
    state: Arc<State>,
    _: Caller,
    request: LoraRequest,
) -> Result<Empty, ApiError> {
    let name = request.lora_name;
    if !adapters(&state)?.iter().any(|adapter| adapter.lora_name == name) {
        let message = format!("there is no adapter '{name}' here");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message));
    }
    Err(unimplemented("UnloadLora", "adapters that stay loaded with the model"))
}
