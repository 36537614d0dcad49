//! What layers of every kind keep, through the cache and the device.

mod states;
mod windows;
