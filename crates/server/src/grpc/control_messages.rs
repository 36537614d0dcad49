//! Messages of vLLM's service `vllm.Control` and of the standard health service, by field number.
//!
//! The contracts are `rust/proto/control.proto` of vllm-project/vllm at commit
//! 098bc948b7086db6748c149b90557715ae7b65bc and `grpc/health/v1/health.proto` of grpc/grpc-proto.
//! Only fields that Kvant reads or sends are declared.

use prost::{Enumeration, Message};

/// Request or response without fields that Kvant reads or sends.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Empty {}

/// `vllm.ServerInfo`
#[derive(Clone, PartialEq, Message)]
pub struct ServerInfo {
    #[prost(string, tag = "1")]
    pub engine_version: String,
    #[prost(string, tag = "2")]
    pub api_version: String,
    #[prost(string, tag = "3")]
    pub instance_id: String,
    #[prost(message, optional, tag = "4")]
    pub parallelism: Option<ParallelismInfo>,
    #[prost(uint32, tag = "5")]
    pub max_model_len: u32,
    #[prost(uint32, tag = "6")]
    pub kv_block_size: u32,
    #[prost(uint64, tag = "7")]
    pub total_kv_blocks: u64,
    #[prost(uint64, tag = "8")]
    pub max_running_requests: u64,
    #[prost(uint64, tag = "9")]
    pub max_batched_tokens: u64,
    #[prost(uint32, tag = "10")]
    pub max_loras: u32,
    #[prost(uint64, optional, tag = "14")]
    pub effective_attention_block_size: Option<u64>,
}

/// `vllm.ParallelismInfo`
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ParallelismInfo {
    #[prost(uint32, tag = "1")]
    pub tensor_parallel_size: u32,
    #[prost(uint32, tag = "2")]
    pub pipeline_parallel_size: u32,
    #[prost(uint32, tag = "3")]
    pub data_parallel_size: u32,
    #[prost(uint32, tag = "4")]
    pub data_parallel_rank: u32,
    #[prost(uint32, tag = "5")]
    pub decode_context_parallel_size: u32,
    #[prost(uint64, tag = "6")]
    pub world_size: u64,
    #[prost(uint32, tag = "7")]
    pub data_parallel_size_local: u32,
}

/// `vllm.ModelInfo`
#[derive(Clone, PartialEq, Message)]
pub struct ModelInfo {
    #[prost(string, tag = "1")]
    pub model_id: String,
    #[prost(string, tag = "2")]
    pub served_model_name: String,
    #[prost(bool, tag = "20")]
    pub supports_text_input: bool,
    #[prost(bool, tag = "21")]
    pub supports_token_ids_input: bool,
    #[prost(bool, tag = "22")]
    pub supports_lora: bool,
}

/// `vllm.AbortRequest`
#[derive(Clone, PartialEq, Message)]
pub struct AbortRequest {
    #[prost(string, repeated, tag = "1")]
    pub request_ids: Vec<String>,
}

/// `vllm.LoraAdapter`
#[derive(Clone, PartialEq, Message)]
pub struct LoraAdapter {
    #[prost(int64, tag = "1")]
    pub lora_id: i64,
    #[prost(string, tag = "2")]
    pub lora_name: String,
    #[prost(string, tag = "3")]
    pub source_path: String,
}

/// `vllm.LoadLoraRequest`, and `vllm.UnloadLoraRequest`, which has the name only.
#[derive(Clone, PartialEq, Message)]
pub struct LoraRequest {
    #[prost(string, tag = "1")]
    pub lora_name: String,
}

/// `vllm.ListLorasResponse`
#[derive(Clone, PartialEq, Message)]
pub struct ListLorasResponse {
    #[prost(message, repeated, tag = "1")]
    pub adapters: Vec<LoraAdapter>,
}

/// `vllm.GetKvEventSourcesResponse`
#[derive(Clone, PartialEq, Message)]
pub struct GetKvEventSourcesResponse {
    #[prost(message, repeated, tag = "1")]
    pub sources: Vec<KvEventSource>,
}

/// `vllm.KvEventSource`
#[derive(Clone, PartialEq, Message)]
pub struct KvEventSource {
    #[prost(string, tag = "1")]
    pub transport: String,
    #[prost(string, tag = "2")]
    pub endpoint: String,
    #[prost(string, tag = "3")]
    pub topic: String,
    #[prost(string, tag = "4")]
    pub replay_endpoint: String,
    #[prost(uint32, optional, tag = "5")]
    pub data_parallel_rank: Option<u32>,
    #[prost(string, tag = "6")]
    pub encoding: String,
    #[prost(uint32, tag = "7")]
    pub schema_version: u32,
    #[prost(uint32, tag = "8")]
    pub buffer_steps: u32,
}

/// `grpc.health.v1.HealthCheckRequest`
#[derive(Clone, PartialEq, Message)]
pub struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    pub service: String,
}

/// `grpc.health.v1.HealthCheckResponse`
#[derive(Clone, Copy, PartialEq, Message)]
pub struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

/// `grpc.health.v1.HealthCheckResponse.ServingStatus`
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
pub enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
    ServiceUnknown = 3,
}
