//! Reasons why a server cannot run.

use std::path::PathBuf;

use kvant::Error;
use kvant::gguf::printable_path;

use crate::address::Address;

/// Reason why a server cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("{address}: {source}")]
    Listen {
        /// Address.
        address: Address,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Decode workers fetch caches over plain HTTP.
    #[error("KV caches are transferred over plain HTTP: a server with TLS keeps none for decode workers")]
    TransferWithTls,
    /// The folder for conversations cannot be used.
    #[error("{}: {source}", printable_path(folder))]
    Folder {
        /// Folder.
        folder: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error("{}: {why}", printable_path(file))]
    Tls {
        /// File.
        file: PathBuf,
        /// Reason.
        why: String,
    },
    /// Invalid origin of a web page.
    #[error("expected an origin such as https://chat.example, or *, got {0}")]
    Origin(String),
    /// Invalid host name.
    #[error("expected the name of a host such as box.example, got {0}")]
    Host(String),
    /// Invalid API key.
    #[error("expected an API key in one line that is not blank, got {0:?}")]
    Key(String),
    /// The system provides no threads or sockets.
    #[error("the server cannot go on: {0}")]
    Io(#[from] std::io::Error),
    /// The worker thread panicked: an internal error.
    #[error("the model's thread has ended: no more answers can be given")]
    Broken,
    /// The model cannot be served.
    #[error(transparent)]
    Model(#[from] Error),
}
