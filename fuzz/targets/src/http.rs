//! Target: arbitrary request bodies, sent to a server that runs as long as the process.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{LazyLock, mpsc};
use std::time::Duration;

use kvant::{DType, KvOptions, Model, OpenOptions};
use kvant_server::{Options, serve};

/// Paths that accept a body. The first byte of an input selects one.
const PATHS: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/v1/embeddings",
    "/embedding",
    "/rerank",
];
/// Timeout of a request with so few tokens.
const TIMEOUT: Duration = Duration::from_secs(60);

static SERVER: LazyLock<SocketAddr> = LazyLock::new(|| {
    let (ready, address) = mpsc::channel();
    std::thread::spawn(move || {
        let model = Model::bundled(OpenOptions { n_threads: Some(1), ..OpenOptions::default() });
        let kv = KvOptions::symmetric(DType::Turbo3);
        // The context length bounds unlimited answers.
        let options = Options { n_ctx: Some(64), kv_budget: 64 << 20, ..Options::new("pocket", kv) };
        serve(model.expect("the bundled model is sound"), options, |listening| {
            _ = ready.send(listening.http)
        })
        .expect("a server runs until its process ends");
    });
    address.recv_timeout(TIMEOUT).expect("a server starts")
});

thread_local! {
    /// Reused for all inputs.
    static CONNECTION: RefCell<Option<BufReader<TcpStream>>> = const { RefCell::new(None) };
}

/// Returns whether a body is accepted. It must be answered, or rejected in one line of JSON; never
/// with a server error or a timeout.
///
/// # Panics
///
/// If the property is violated.
pub fn http(bytes: &[u8]) -> bool {
    let Some((&which, body)) = bytes.split_first() else { return false };
    let path = PATHS[usize::from(which) % PATHS.len()];
    let (status, answer) = exchange(path, body);
    assert!(status < 500, "{path} {}: {status} {answer}", String::from_utf8_lossy(body));
    if status == 200 {
        return true;
    }
    let message = answer.split("\"message\":\"").nth(1).or_else(|| answer.split("{\"error\":\"").nth(1));
    let line = message.unwrap_or_else(|| panic!("{path}: {status} {answer}"));
    assert!(!line.contains("\\n") && answer.lines().count() == 1, "{answer}");
    false
}

/// Returns status and body of a response.
fn exchange(path: &str, body: &[u8]) -> (u16, String) {
    CONNECTION.with_borrow_mut(|connection| {
        let mut reader = connection.take().unwrap_or_else(|| {
            let stream = TcpStream::connect(*SERVER).expect("the server listens");
            stream.set_read_timeout(Some(TIMEOUT)).expect("a socket has a timeout");
            BufReader::new(stream)
        });
        let head =
            format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        reader.get_mut().write_all(&[head.as_bytes(), body].concat()).expect("the server reads");
        let answer = received(&mut reader);
        *connection = Some(reader);
        answer
    })
}

fn received(reader: &mut BufReader<TcpStream>) -> (u16, String) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).expect("the server answers in time") > 0, "it hung up: {head}");
    }
    let head = head.to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = Vec::new();
    if let Some(length) = length {
        body.resize(length.trim().parse().expect("a length"), 0);
        reader.read_exact(&mut body).expect("the whole body");
        return (status, String::from_utf8_lossy(&body).into_owned());
    }
    loop {
        let mut size = String::new();
        reader.read_line(&mut size).expect("the size of a chunk");
        let size = usize::from_str_radix(size.trim(), 16).expect("the size of a chunk");
        let mut chunk = vec![0; size + 2];
        reader.read_exact(&mut chunk).expect("a whole chunk");
        body.extend_from_slice(&chunk[..size]);
        if size == 0 {
            return (status, String::from_utf8_lossy(&body).into_owned());
        }
    }
}

/// Returns a request per path, with all its fields.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let chat = r#"{"messages":[{"role":"system","content":"x"},{"role":"user","content":[{"type":"text","text":"Hi"}]}],"max_tokens":2,"#;
    let tools = r#""tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"}}}}}],"tool_choice":"required"}"#;
    let bodies = [
        (0, format!(r#"{chat}"temperature":1.5,"seed":3,"stop":["a"],"logprobs":true,"top_logprobs":2,"n":2}}"#)),
        (0, format!("{chat}{tools}")),
        (0, format!(r#"{chat}"response_format":{{"type":"json_schema","json_schema":{{"schema":{{"enum":[1,"b"]}}}}}},"stream":true}}"#)),
        (1, r#"{"prompt":["a",[1,2]],"max_tokens":2,"echo":true,"logprobs":1,"logit_bias":{"5":-100}}"#.to_owned()),
        (1, r#"{"prompt":"a","max_tokens":3,"guided_regex":"[a-c]{2}","kv_type":"q8_0/turbo3"}"#.to_owned()),
        (2, r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2,"system":[{"type":"text","text":"x"}],"stop_sequences":["b"]}"#.to_owned()),
        (3, r#"{"messages":[{"role":"user","content":"Hi"}]}"#.to_owned()),
        (4, r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"Hi"}]}],"instructions":"x","max_output_tokens":2}"#.to_owned()),
        (5, r#"{"prompt":[1,"a"],"n_predict":2,"n_probs":2,"logit_bias":[["a",false]],"response_fields":["content"]}"#.to_owned()),
        (6, r#"{"input_prefix":"a","input_suffix":"b","input_extra":[{"filename":"c","text":"d"}]}"#.to_owned()),
        (7, r#"{"content":"Hi <|im_end|>","add_special":true,"with_pieces":true}"#.to_owned()),
        (8, r#"{"tokens":[1,2,3]}"#.to_owned()),
        (9, r#"{"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{"a":1},"add_generation_prompt":false}"#.to_owned()),
        (10, r#"{"model":"pocket","messages":[{"role":"user","content":"Hi"}],"options":{"num_predict":2},"format":"json"}"#.to_owned()),
        (11, r#"{"model":"pocket","prompt":"Hi","raw":true,"options":{"num_predict":2,"stop":["a"]},"stream":false}"#.to_owned()),
        (12, r#"{"model":"pocket"}"#.to_owned()),
        (13, r#"{"input":["a",[1,2],{"content":[{"type":"text","text":"b"}]}],"dimensions":3,"encoding_format":"base64","kv_type":"f16"}"#.to_owned()),
        (14, r#"{"content":[1,"a"],"embd_normalize":-1}"#.to_owned()),
        (15, r#"{"query":"a","documents":["b",{"text":"c"}],"top_n":1,"return_documents":true}"#.to_owned()),
    ];
    bodies.into_iter().map(|(which, body)| [&[which], body.as_bytes()].concat()).collect()
}
