//! Properties of the device, from the environment.

use std::sync::LazyLock;

/// Properties of the device.
#[derive(Debug)]
pub(crate) struct Settings {
    pub name: String,
    /// Compute capability times ten.
    pub arch: u64,
    pub n_sms: u64,
    /// Maximum shared memory of a block, in bytes.
    pub shared_bytes: u64,
    pub memory_bytes: u64,
    /// The CUDA version times 1,000.
    pub version: u64,
    /// The file for the counts.
    pub report: Option<String>,
}

/// The properties of this process's device.
pub(crate) static SETTINGS: LazyLock<Settings> = LazyLock::new(Settings::from_env);

impl Settings {
    /// # Panics
    /// On a variable that is not a number.
    fn from_env() -> Self {
        Self {
            name: "stub, no GPU".to_owned(),
            arch: number("KVANT_STUB_ARCH", 90),
            n_sms: number("KVANT_STUB_SMS", 132),
            shared_bytes: number("KVANT_STUB_SHARED", 227 * 1024),
            memory_bytes: number("KVANT_STUB_MEMORY_MIB", 80 * 1024) << 20,
            version: number("KVANT_STUB_CUDA", 13_000),
            report: std::env::var("KVANT_STUB_REPORT").ok(),
        }
    }
}

/// Returns the number in a variable.
fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}: expected a number, got '{text}'")),
        Err(_) => default,
    }
}
