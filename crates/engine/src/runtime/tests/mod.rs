//! What layers of every kind keep, through the cache and the device.

mod predictions;
mod shared;
mod states;
mod windows;
