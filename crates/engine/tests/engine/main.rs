//! The engine from outside: families and weight types beside `transformers`, schedules of a step, sharing, adapters, hostile files. What
//! counts the allocator's calls has a binary of its own.

mod adapter;
mod experts;
mod families;
mod golden;
mod hf_folders;
mod hostile;
mod isa_process;
mod lora;
mod not_finite;
mod pictures;
mod prompt_math;
mod recurrent;
mod schedules;
mod sharing;
mod weight_types;
