//! Integration tests: real, malformed, mutated, split and written files.

mod described;
mod files;
mod hostile;
mod mutation;
mod raw;
mod scaled;
mod split;
mod stored;
mod writing;
