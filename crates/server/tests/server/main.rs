//! The server over HTTP, as clients see it.

mod agents;
mod api;
mod client;
mod embeddings;
mod events;
mod faults;
mod hosting;
mod http;
mod loras;
mod native;
mod pictures;
mod prompts;
mod samplers;
mod tiers;
mod tls;
mod walls;
