//! The `kvant` program as its users meet it. One test binary, as each links for seconds.

mod balance;
mod chat;
mod drafts;
mod files;
mod folders;
mod help;
#[cfg(unix)]
mod hostile;
mod hub;
mod lora;
mod pictures;
mod prompts;
mod quantize;
mod serve;
mod traces;
mod tuning;
mod untrusted;
mod usage;
