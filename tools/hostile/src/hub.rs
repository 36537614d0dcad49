//! A hub with false names, sizes, checksums and paths; a number in the path selects the faults.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use crate::chance::Choices;
use crate::fixtures::MODEL;

/// File names that lead to other paths, or are invalid.
const NAMES: [&str; 12] = [
    "m-q8_0.gguf",
    "/etc/passwd.gguf",
    "../../m.gguf",
    "a/../../../m.gguf",
    "m-00001-of-00000.gguf",
    "m-00001-of-99999.gguf",
    "m-00002-of-00001.gguf",
    "\u{1b}]0;x\u{7}m.gguf",
    "",
    ".gguf",
    "mmproj-m.gguf",
    "model.safetensors",
];
const COMMITS: [&str; 6] =
    ["0123456789abcdef0123456789abcdef01234567", "/tmp", "../..", "", "\u{1b}[2J", "main"];

/// Starts a hub and returns its port. It ends with the process.
pub fn start() -> io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that disconnects is no error of the hub.
            std::thread::spawn(move || answer(stream));
        }
    });
    Ok(port)
}

/// Answers with the faults of the number at the start of the path.
fn answer(mut stream: TcpStream) -> io::Result<()> {
    let mut lines = BufReader::new((&stream).take(1 << 20)).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    lines.map_while(Result::ok).find(String::is_empty);
    let (method, path) = request.split_once(' ').unwrap_or_default();
    let mut parts = path.trim_start_matches('/').splitn(2, '/');
    let number = parts.next().and_then(|number| number.parse().ok()).unwrap_or(0);
    let chance = &mut Choices::new("lie", number);
    let rest = parts.next().unwrap_or_default();
    let respond = |stream: &mut TcpStream, status: &str, heads: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n{heads}\r\n");
        stream.write_all(head.as_bytes())?;
        if method == "HEAD" { Ok(()) } else { stream.write_all(body) }
    };
    if rest.starts_with("api/") {
        let body = list(chance);
        return respond(&mut stream, "200 OK", &format!("Content-Length: {}\r\n", body.len()), &body);
    }
    let size = chance.of(&["0", "1", "-1", "99999999999999999999", "18446744073709551615"]);
    let size = if chance.one_in(2) { MODEL.len().to_string() } else { size.to_owned() };
    let etag = chance.of(&["\"0000\"", "\"../../x\"", "\"\"", "W/\"a/b\"", "\"\u{7f}\""]);
    let etag = if chance.one_in(2) { format!("\"{}\"", "a".repeat(64)) } else { etag.to_owned() };
    let moved = chance.of(&[
        "",
        "Location: /\r\n",
        "Location: http://127.0.0.1:1/\r\n",
        "Location: file:///etc/passwd\r\n",
    ]);
    let heads = format!("X-Linked-Etag: {etag}\r\nX-Linked-Size: {size}\r\n");
    if method == "HEAD" {
        let status = if moved.is_empty() { "200 OK" } else { "302 Found" };
        return respond(&mut stream, status, &format!("{heads}{moved}Content-Length: 0\r\n"), &[]);
    }
    let length = chance.of(&["", "Content-Length: 0\r\n", "Content-Length: 99999999999\r\n"]);
    let body = match chance.below(4) {
        0 => MODEL.to_vec(),
        1 => MODEL[..MODEL.len() / 2].to_vec(),
        2 => MODEL.repeat(3),
        _ => chance.bytes(1000),
    };
    respond(&mut stream, "200 OK", length, &body)
}

/// Returns the file list of a repository.
fn list(chance: &mut Choices) -> Vec<u8> {
    let quoted =
        |text: &str| format!("\"{}\"", text.replace('\u{1b}', "\\u001b").replace('\u{7}', "\\u0007"));
    let n = chance.of(&[0, 1, 1, 2, 5, 20_000]);
    let names: Vec<_> = (0..n).map(|_| format!("{{\"rfilename\":{}}}", quoted(chance.of(&NAMES)))).collect();
    let commit = if chance.one_in(2) { COMMITS[0] } else { chance.of(&COMMITS) };
    let mut body = format!("{{\"sha\":{},\"siblings\":[{}]}}", quoted(commit), names.join(",")).into_bytes();
    if chance.one_in(4) {
        let until = body.len();
        chance.mutate(&mut body, until);
    }
    body
}
