//! What layers of every kind keep, through the cache and the device.

mod shared;
mod states;
mod windows;
