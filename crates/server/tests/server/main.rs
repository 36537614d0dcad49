//! The server over HTTP and gRPC, as clients see it.

mod agents;
mod api;
mod audio;
mod client;
mod embeddings;
mod events;
mod faults;
mod gateways;
mod grpc;
mod hardening;
mod http;
mod images;
mod loras;
mod media;
mod models;
mod native;
mod prompts;
mod samplers;
mod tiers;
mod tls;
mod transfer;
