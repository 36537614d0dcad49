//! TLS: rustls with ring, certificate and key from files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::files;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::ServeError;

/// PEM files of a certificate and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate of the server, followed by its chain.
    pub certificate: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

/// Creates the TLS acceptor for connections of this application protocol (ALPN).
///
/// # Errors
/// [`ServeError::Tls`]
pub(crate) fn acceptor(tls: &TlsFiles, protocol: &[u8]) -> Result<TlsAcceptor, ServeError> {
    let TlsFiles { certificate, key } = tls;
    let failed = |file: &Path, why: String| ServeError::Tls { file: file.to_owned(), why };
    let read = |file: &Path| files::read(file).map_err(|error| failed(file, error.to_string()));
    let chain: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(&read(certificate)?)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(failed(certificate, "no certificate in PEM format".to_owned()));
    }
    let private = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|_| failed(key, "no private key in PEM format that is not encrypted".to_owned()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())
        .and_then(|config| {
            config.with_no_client_auth().with_single_cert(chain, private).map_err(|error| error.to_string())
        });
    let mut config =
        config.map_err(|why| failed(key, format!("not the key of {}: {why}", files_name(certificate))))?;
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn files_name(path: &Path) -> String {
    kvant::gguf::printable_path(path).to_string()
}
