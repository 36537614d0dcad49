//! The crate from outside: real files, hostile files, mutated files, split files, written files.

mod described;
mod files;
mod hostile;
mod mutation;
mod raw;
mod scaled;
mod split;
mod stored;
mod writing;
