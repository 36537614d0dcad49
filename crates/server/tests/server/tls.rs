//! The server with TLS.
#![cfg(feature = "tls")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;

use crate::client::{options, start, start_at};
use kvant::{Model, OpenOptions};
use kvant_server::{Options, TlsFiles};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Self-signed certificate of localhost, valid from 2020 to 2199. For tests only: its key is
/// public.
const CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----
MIIBRDCB66ADAgECAgEBMAoGCCqGSM49BAMCMBQxEjAQBgNVBAMMCWxvY2FsaG9z
dDAgFw0yMDAxMDEwMDAwMDBaGA8yMTk5MTIzMTAwMDAwMFowFDESMBAGA1UEAwwJ
bG9jYWxob3N0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEpDfmW8Sn+ZIjaSZW
sSKvwLR66Ayf/+SeLgGPaQsh4RxSRuuUPNm97H4zFbhG3tmstBp4BqpJq1SQBNRI
5sIL6qMsMCowGgYDVR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMAwGA1UdEwEB/wQC
MAAwCgYIKoZIzj0EAwIDSAAwRQIhAP246+Pm/IOtc7m4CSWokcETPXKgKQ7UUlo1
IK5E8F/gAiBTtGahjs5IdRJJpSMfDR9JPq3dGTRqImh2NiMHZoOoKg==
-----END CERTIFICATE-----
";
const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgFGj3gFTqX3Q8D24w
ZZNA5PyHreHgWbdbTSpXAXKPuiqhRANCAASkN+ZbxKf5kiNpJlaxIq/AtHroDJ//
5J4uAY9pCyHhHFJG65Q82b3sfjMVuEbe2ay0GngGqkmrVJAE1Ejmwgvq
-----END PRIVATE KEY-----
";
const OTHER_KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgX6BWpHvcRSsLcoeS
+To5+ijwHl4V1K2W4TLX3cw+pnuhRANCAAQjaUsfE3ptcNDMr6sLMKt3Q5/AYRhT
+OHoB3OiAhnujzS8PN0/gVDr/f/BRB5Xs3Fe4b8oXOqtgdjtohpjrZKs
-----END PRIVATE KEY-----
";

/// Creates a folder with files of these texts.
fn files(name: &str, certificate: &str, key: &str) -> (PathBuf, TlsFiles) {
    let folder = std::env::temp_dir().join(format!("kvant-tls-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let tls = TlsFiles { certificate: folder.join("certificate.pem"), key: folder.join("key.pem") };
    fs::write(&tls.certificate, certificate).unwrap();
    fs::write(&tls.key, key).unwrap();
    (folder, tls)
}

/// Sends a request over TLS and returns the response.
fn exchange(stream: TcpStream, request: &str) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream);
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn a_tls_server_answers_over_tls_only() {
    let (folder, tls) = files("answers", CERTIFICATE, KEY);
    let address = start_at(Options { tls: Some(tls), ..options() });
    let connect = || TcpStream::connect(address).unwrap();
    // A silent connection delays no other.
    let silent = connect();
    let body = r#"{"prompt":"Once upon a time","max_tokens":4,"temperature":0,"stream":true}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = exchange(connect(), &request).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("data: [DONE]"), "{answer}");
    let mut plain = connect();
    plain.write_all(request.as_bytes()).unwrap();
    let mut received = Vec::new();
    // The connection is closed, with or without an error.
    _ = plain.read_to_end(&mut received);
    assert!(!String::from_utf8_lossy(&received).contains("HTTP/1.1 200"), "{received:?}");
    // A TLS client fails against a plain server.
    let open = start(options());
    assert!(exchange(open.connect(), &request).is_err());
    drop(silent);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn invalid_tls_files_are_rejected_with_one_line() {
    let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    let cases = [
        ("no-certificate", "nothing", KEY, "certificate.pem"),
        ("broken", &CERTIFICATE.replace("MII", "AII"), KEY, ".pem"),
        ("no-key", CERTIFICATE, CERTIFICATE, "key.pem"),
        ("other-key", CERTIFICATE, OTHER_KEY, "key.pem"),
    ];
    let refused = |tls: TlsFiles| {
        let error = kvant_server::serve(model.clone(), Options { tls: Some(tls), ..options() }, |_| ());
        error.unwrap_err().to_string()
    };
    for (name, certificate, key, named) in cases {
        let (folder, tls) = files(name, certificate, key);
        let error = refused(tls);
        assert!(error.contains(named) && error.lines().count() == 1, "{name}: {error}");
        fs::remove_dir_all(folder).unwrap();
    }
    let (folder, tls) = files("missing", CERTIFICATE, KEY);
    fs::remove_file(&tls.key).unwrap();
    let error = refused(tls);
    assert!(error.contains("key.pem") && error.lines().count() == 1, "{error}");
    fs::remove_dir_all(folder).unwrap();
}
