//! The engine from outside: families and weight types against `transformers`, schedules of steps,
//! prefix sharing, adapters, hostile files. The test that counts allocations has a binary of its
//! own.

mod adapter;
mod answers;
mod audio;
mod devices;
mod draft_heads;
mod encoders;
mod experts;
mod families;
mod golden;
mod hf_folders;
mod history;
mod hostile;
mod images;
mod isa_process;
mod lora;
mod ngrams;
mod not_finite;
mod prefill_precision;
mod quantized;
mod recurrent;
mod schedules;
mod selecting;
mod sharing;
mod synthetic;
mod weight_types;
