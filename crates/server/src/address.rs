//! Host and port of a listener or a peer.

use std::fmt;
use std::str::FromStr;

/// A host and a port; a listener takes port 0 for any free one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// Name or IP address, IPv6 without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl Address {
    /// Returns an address of this machine that no other one can reach.
    pub fn loopback(port: u16) -> Self {
        Self { host: "127.0.0.1".to_owned(), port }
    }
}

/// Text that is no [`Address`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected a host and a port, such as 127.0.0.1:50051 or [::1]:50051")]
pub struct AddressError;

impl FromStr for Address {
    type Err = AddressError;

    /// Parses `HOST:PORT`; an IPv6 address is in brackets.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (host, port) = text.rsplit_once(':').ok_or(AddressError)?;
        let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        match (in_brackets.unwrap_or(host), port.parse()) {
            (host, Ok(port)) if !host.is_empty() && (in_brackets.is_some() || !host.contains(':')) => {
                Ok(Self { host: host.to_owned(), port })
            }
            _ => Err(AddressError),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for text in ["127.0.0.1:50051", "[::1]:0", "worker-7.local:443"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "127.0.0.1", ":50051", "::1:50051", "[]:1", "host:65536", "host:-1"] {
            assert_eq!(text.parse::<Address>(), Err(AddressError), "{text}");
        }
    }
}
