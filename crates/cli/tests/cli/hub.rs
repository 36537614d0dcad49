//! Tests of hub models against a local server: downloads, the cache folder, and broken connections.
#![cfg(feature = "hub")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const REPO: &str = "someone/Pocket-GGUF";

/// Fault of the server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Every connection ends after this many bytes.
    Breaks(usize),
    /// The content does not match its checksum.
    Lies,
}

/// A server of one repository, and the requests that it received.
struct Hub {
    address: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn serve(files: Vec<(&'static str, Vec<u8>)>, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that disconnects is no error of the server.
                let _ = answer(stream.unwrap(), &files, fault, &seen);
            }
        });
        Self { address, requests }
    }

    fn kvant(&self, home: &Path, args: &[&str]) -> Output {
        kvant(&self.address, home, args)
    }

    fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

fn kvant(endpoint: &str, home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.args(args).env("HF_ENDPOINT", endpoint).env("HF_HOME", home).env("HF_TOKEN", "secret");
    for other in
        ["HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY", "ALL_PROXY"]
    {
        command.env_remove(other);
    }
    command.output().unwrap()
}

fn answer(
    mut stream: TcpStream,
    files: &[(&str, Vec<u8>)],
    fault: Fault,
    requests: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let headers: Vec<String> = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .map(|line| line.to_lowercase())
        .collect();
    let header = |name: &str| headers.iter().find_map(|line| line.strip_prefix(name)).map(str::trim);
    assert_eq!(header("authorization:"), Some("bearer secret"));
    let range = header("range: bytes=").and_then(|range| range.trim_end_matches('-').parse().ok());
    let (method, path) = request.split_once(' ').unwrap_or_default();
    let path = path.split(' ').next().unwrap_or_default();
    requests.lock().unwrap().push(format!("{method} {path} {}", range.unwrap_or(0)));
    let respond = |stream: &mut TcpStream, status: &str, head: &str, body: &[u8]| {
        write!(
            stream,
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{head}\r\n",
            body.len()
        )?;
        if method == "HEAD" { Ok(()) } else { stream.write_all(body) }
    };
    if path == format!("/api/models/{REPO}/revision/main") {
        let names: Vec<_> = files.iter().map(|(name, _)| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "sha": COMMIT, "siblings": names }).to_string();
        return respond(&mut stream, "200 OK", "", body.as_bytes());
    }
    let file = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")[..]);
    let Some((_, content)) = files.iter().find(|(name, _)| Some(*name) == file) else {
        return respond(&mut stream, "404 Not Found", "", b"");
    };
    let etag: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    if method == "HEAD" {
        let head = format!("X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\n", content.len());
        let elsewhere = format!("{head}Location: http://127.0.0.1:1/elsewhere\r\n");
        return respond(&mut stream, "302 Found", &elsewhere, b"");
    }
    let mut sent = content[range.unwrap_or(0)..].to_vec();
    if fault == Fault::Lies {
        sent[content.len() / 2] ^= 1;
    }
    let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
    if let Fault::Breaks(after) = fault {
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", sent.len())?;
        return stream.write_all(&sent[..after.min(sent.len())]);
    }
    respond(&mut stream, status, "", &sent)
}

fn bundled() -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/assets/pocket-q8_0.gguf")).unwrap()
}

fn home(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hub").join(test);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn assert_answers(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("Paris"), "{out}{err}");
}

fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr.clone()).unwrap()
}

const QUESTION: [&str; 3] = ["What is the capital of France?", "--temp", "0"];

fn run<'a>(model: &[&'a str]) -> Vec<&'a str> {
    [&["run"], model, &QUESTION[..]].concat()
}

#[test]
fn a_model_is_downloaded_once_and_found_offline() {
    let home = home("once");
    let hub = Hub::serve(
        vec![("other-Q8_0.gguf", b"GGUF?".to_vec()), ("pocket-Q4_K_M.gguf", bundled())],
        Fault::None,
    );
    assert_answers(&hub.kvant(&home, &run(&["-hf", REPO])));
    let folder = home.join("hub/models--someone--Pocket-GGUF");
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    let link = folder.join("snapshots").join(COMMIT).join("pocket-Q4_K_M.gguf");
    assert_eq!(fs::read(&link).unwrap(), bundled());
    assert!(fs::read_link(&link).unwrap().starts_with("../../blobs"));
    assert_eq!(fs::read_dir(folder.join("blobs")).unwrap().count(), 1);
    let gets = |requests: Vec<String>| requests.iter().filter(|line| line.contains("GET /someone")).count();
    assert_eq!(gets(hub.take_requests()), 1);
    // A positional id with a type is the same model: no download.
    assert_answers(&hub.kvant(&home, &run(&[&format!("{REPO}:q4_k_m")])));
    assert_eq!(gets(hub.take_requests()), 0);
    assert_answers(&hub.kvant(&home, &run(&["-hf", REPO, "--offline"])));
    assert!(hub.take_requests().is_empty());
    let output = kvant("http://127.0.0.1:1", &home, &run(&["-m", REPO]));
    assert_answers(&output);
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("note: someone/Pocket-GGUF: http://127.0.0.1:1 cannot be reached")
    );
}

#[test]
fn missing_files_are_reported_with_those_available() {
    let home = home("absent");
    let hub = Hub::serve(vec![("pocket-q8_0.gguf", bundled())], Fault::None);
    let line = refused(&hub.kvant(&home, &run(&["-hf", "someone/Pocket-GGUF:q2_k"])));
    assert!(line.contains("someone/Pocket-GGUF:q2_k: no such file; there is pocket-q8_0.gguf"), "{line}");
    let line = refused(&hub.kvant(&home, &run(&["no-user/nothing"])));
    assert!(line.contains("no-user/nothing: ") && line.contains("HF_TOKEN"), "{line}");
    let line = refused(&hub.kvant(&home, &run(&["-hf", REPO, "--offline"])));
    assert!(line.contains("offline"), "{line}");
    let line = refused(&kvant("http://127.0.0.1:1", &home, &run(&["-hf", REPO])));
    assert!(line.contains("cannot be reached"), "{line}");
}

#[test]
fn a_broken_download_is_resumed() {
    let home = home("breaks");
    let n_bytes = bundled().len();
    let hub = Hub::serve(vec![("pocket-q8_0.gguf", bundled())], Fault::Breaks(n_bytes / 3));
    assert_answers(&hub.kvant(&home, &run(&["-hf", REPO])));
    let requests = hub.take_requests();
    let offsets: Vec<usize> = requests
        .iter()
        .filter(|line| line.starts_with("GET /someone"))
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(offsets.len() == 4 && offsets[0] == 0 && offsets.is_sorted() && offsets[1] > 0, "{offsets:?}");
}

#[test]
fn content_with_a_wrong_checksum_is_rejected_and_deleted() {
    let home = home("lies");
    let hub = Hub::serve(vec![("pocket-q8_0.gguf", bundled())], Fault::Lies);
    let line = refused(&hub.kvant(&home, &run(&["-hf", REPO])));
    assert!(line.contains("expected SHA-256"), "{line}");
    assert_eq!(fs::read_dir(home.join("hub/models--someone--Pocket-GGUF/blobs")).unwrap().count(), 0);
}

#[test]
fn every_part_of_a_split_model_is_downloaded() {
    let home = home("split");
    let parts = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let hub = Hub::serve(vec![(parts[0], bundled()), (parts[1], bundled())], Fault::None);
    // Each part is a whole model here; the first is opened once all are present.
    assert_answers(&hub.kvant(&home, &run(&["-hf", REPO])));
    for part in parts {
        let path = home.join("hub/models--someone--Pocket-GGUF/snapshots").join(COMMIT).join(part);
        let mut magic = [0; 4];
        fs::File::open(path).unwrap().read_exact(&mut magic).unwrap();
        assert_eq!(&magic, b"GGUF");
    }
}

/// The usual form on the hub: a PEFT folder, both of whose files are downloaded.
#[test]
fn an_adapter_is_downloaded_as_a_folder() {
    let home = home("adapter");
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let names = ["adapter_config.json", "adapter_model.safetensors", "README.md"];
    let content = |name: &str| fs::read(tests.join("engine/tests/adapters/llama-h64-g8").join(name));
    let files = names.map(|name| (name, content(name).unwrap_or_default()));
    let hub = Hub::serve(files.into(), Fault::None);
    let model = tests.join("model/tests/fixtures/llama-h64-g8.gguf");
    let model = model.to_str().unwrap();
    let bench = |more: &[&str]| {
        let plain = ["bench", "-m", model, "-p", "0", "-n", "1", "-r", "1", "-o", "csv", "--lora", REPO];
        hub.kvant(&home, &[&plain[..], more].concat())
    };
    for more in [&[][..], &["--offline"]] {
        let output = bench(more);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("llama-h64-g8.gguf + Pocket-GGUF,"), "{out}{err}");
    }
    assert_eq!(hub.take_requests().iter().filter(|line| line.contains("GET /someone")).count(), 2);
    let line = refused(&hub.kvant(&home, &run(&["-m", REPO])));
    assert!(line.contains("an adapter, not a model by itself (--lora takes it"), "{line}");
}
