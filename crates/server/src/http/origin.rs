//! Origin checks of a server without API keys: browser pages must be its own or allowed explicitly.
//!
//! A page of any site can send requests to a server on its reader's machine, some without a
//! preflight, and by DNS rebinding it can read the responses as well. Programs other than browsers
//! send none of the headers checked here, or their true values.

use std::net::IpAddr;

use axum::http::{HeaderMap, Method, StatusCode, header};

use super::ApiError;
use crate::options::Options;

/// Origins of browser-based programs, which no web site can have.
const PROGRAMS: [&str; 4] = ["app://", "tauri://", "vscode-file://", "vscode-webview://"];

/// Returns why a request is refused, or `None`.
pub(super) fn refusal(options: &Options, method: &Method, headers: &HeaderMap) -> Option<ApiError> {
    // No page has a key.
    if !options.api_keys.is_empty() {
        return None;
    }
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("bytes that are no text"));
    let host = text("host");
    if let Some(host) = host.filter(|host| is_local(&options.address.host) && !is_known_host(options, host)) {
        return Some(forbidden("Host", "localhost, an IP address or an allowed host", host));
    }
    let site = text("sec-fetch-site");
    if let Some(origin) = text("origin") {
        // A proxy may have changed the host, but no page can change what a browser reports in
        // `sec-fetch-site`.
        let is_own = matches!(site, Some("same-origin" | "none"))
            || host.is_some_and(|host| authority(origin) == Some(host));
        let is_program = PROGRAMS.iter().any(|scheme| origin.starts_with(scheme));
        let is_listed = options.origins.iter().any(|known| known == "*" || known == origin);
        return (!is_own && !is_program && !is_listed)
            .then(|| forbidden("Origin", "the server's own or an allowed origin", origin));
    }
    // A link to the server may be followed.
    let mode = text("sec-fetch-mode");
    let is_visit = mode == Some("navigate") && matches!(*method, Method::GET | Method::HEAD);
    let is_foreign =
        site == Some("cross-site") && !is_visit && !options.origins.iter().any(|known| known == "*");
    is_foreign.then(|| forbidden("Sec-Fetch-Site", "same-origin, same-site or none", "cross-site"))
}

/// Rejects a change of server state that is not sent as JSON: a page of another site may send other
/// types without a preflight.
pub(super) fn refuse_unless_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).map_or("none", |kind| kind.to_str().unwrap_or("no text"));
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("Content-Type: expected application/json, got {}", short(given));
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message))
}

fn forbidden(name: &str, expected: &str, got: &str) -> ApiError {
    let message = format!("{name}: expected {expected}, got {}", short(got));
    ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
}

fn short(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Reports whether an address is reachable from this machine only.
fn is_local(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Reports whether a host name cannot belong to an attacker: reserved names cannot be registered,
/// and addresses cannot be rebound.
fn is_known_host(options: &Options, host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let is_reserved = name == "localhost" || name.ends_with(".localhost") || name.ends_with(".internal");
    let is_listed = |known: &String| known.eq_ignore_ascii_case(&name);
    is_reserved || name.parse::<IpAddr>().is_ok() || options.allowed_hosts.iter().any(is_listed)
}

/// Returns host and port of an origin.
fn authority(origin: &str) -> Option<&str> {
    origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))
}

#[cfg(test)]
mod tests {
    use kvant::{DType, KvOptions};

    use super::*;
    use crate::address::Address;

    fn status(options: &Options, method: Method, headers: &[(&str, &str)]) -> u16 {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        refusal(options, &method, &headers.collect())
            .map_or(200, |error| error.object()["code"].as_u64().unwrap() as u16)
    }

    fn options() -> Options {
        Options::new("x", KvOptions::symmetric(DType::F16))
    }

    #[test]
    fn a_page_of_another_site_is_refused_and_programs_are_not() {
        let own = "127.0.0.1:8080";
        let post = |headers: &[(&str, &str)]| status(&options(), Method::POST, headers);
        let get = |headers: &[(&str, &str)]| status(&options(), Method::GET, headers);
        for host in [
            own,
            "localhost",
            "LOCALHOST:1",
            "[::1]:8080",
            "192.168.1.2",
            "kvant.localhost:8080",
            "host.docker.internal:8080",
        ] {
            assert_eq!(post(&[("host", host)]), 200, "{host}");
        }
        assert_eq!(post(&[]), 200);
        for host in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "internal.example",
            "evil",
        ] {
            assert_eq!(get(&[("host", host)]), 403, "{host}");
            assert_eq!(
                post(&[
                    ("host", host),
                    ("origin", &format!("http://{host}")),
                    ("sec-fetch-site", "same-origin")
                ]),
                403
            );
        }
        // The server's own page, also behind a proxy.
        assert_eq!(post(&[("host", own), ("origin", "http://127.0.0.1:8080")]), 200);
        assert_eq!(
            post(&[("host", own), ("origin", "https://kvant.example"), ("sec-fetch-site", "same-origin")]),
            200
        );
        assert_eq!(post(&[("host", own), ("origin", "app://notes"), ("sec-fetch-site", "cross-site")]), 200);
        for (origin, site) in [
            ("https://evil.example", "cross-site"),
            ("null", "cross-site"),
            ("http://127.0.0.1:3000", "same-site"),
        ] {
            assert_eq!(post(&[("host", own), ("origin", origin)]), 403, "{origin}");
            assert_eq!(post(&[("host", own), ("origin", origin), ("sec-fetch-site", site)]), 403, "{origin}");
        }
        // Images and scripts on another page are refused; a link on it is followed.
        assert_eq!(
            get(&[("host", own), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")]),
            403
        );
        assert_eq!(
            get(&[("host", own), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]),
            200
        );
        assert_eq!(
            post(&[("host", own), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]),
            403
        );
        assert_eq!(get(&[("host", own), ("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")]), 200);
    }

    #[test]
    fn only_configured_origins_and_hosts_are_admitted() {
        let evil = ("origin", "https://evil.example");
        let chat = ("origin", "https://chat.example");
        let some = Options {
            origins: vec!["https://chat.example".into()],
            allowed_hosts: vec!["box.example".into()],
            ..options()
        };
        assert_eq!(
            status(
                &some,
                Method::POST,
                &[("host", "box.example:8080"), chat, ("sec-fetch-site", "cross-site")]
            ),
            200
        );
        assert_eq!(status(&some, Method::POST, &[("host", "Box.Example"), evil]), 403);
        assert_eq!(status(&some, Method::GET, &[("host", "other.example")]), 403);
        let all = Options { origins: vec!["*".into()], ..options() };
        assert_eq!(
            status(&all, Method::POST, &[("host", "localhost"), evil, ("sec-fetch-site", "cross-site")]),
            200
        );
        // A server reachable by others cannot determine its own names; with a key, foreign pages
        // have no access.
        let open = Options { address: Address { host: "0.0.0.0".into(), port: 8080 }, ..options() };
        assert_eq!(status(&open, Method::POST, &[("host", "kvant")]), 200);
        assert_eq!(status(&open, Method::POST, &[("host", "kvant"), evil]), 403);
        let keyed = Options { api_keys: vec!["k".into()], ..options() };
        assert_eq!(status(&keyed, Method::POST, &[("host", "kvant"), evil]), 200);
    }
}
