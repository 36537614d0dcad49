//! End-to-end tests of the `kvant` program. One test binary, as linking each takes seconds.

mod audio;
mod bench;
mod chat;
mod devices;
mod drafts;
mod encoders;
mod files;
mod folders;
mod help;
#[cfg(unix)]
mod hostile;
mod hub;
mod images;
mod lab;
mod lora;
mod plans;
mod prompts;
mod quantize;
mod serve;
mod traces;
mod tuning;
mod untrusted;
mod usage;
