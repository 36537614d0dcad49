//! Caches of layers of every kind, through cache and device.

mod guard;
mod overlap;
mod predictions;
mod shared;
mod split;
mod states;
mod windows;
