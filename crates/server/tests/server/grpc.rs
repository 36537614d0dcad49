//! vLLM's gRPC services: the same answers as over HTTP, and what routers ask for.
#![cfg(feature = "grpc")]

use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::gguf::Gguf;
use kvant::{LoraFile, Model, OpenOptions};
use kvant_server::{Address, Options, ServeError, serve};
use serde_json::{Value, json};
use tonic::Code;

use crate::client::grpc::control_messages::*;
use crate::client::grpc::messages::*;
use crate::client::grpc::{GrpcClient, joined};
use crate::client::*;

const PROMPT: &str = "Once upon a time";
const CONTROL: &str = "/vllm.Control/";

/// Starts a server of this model with both protocols.
fn start_model(model: Model, options: Options) -> (Client, GrpcClient) {
    let grpc = Some(Address::loopback(0));
    let listening = listen(model, Options { grpc, ..options });
    (Client::at(listening.http), GrpcClient::at(listening.grpc.unwrap()))
}

fn model(loras: Vec<LoraFile>) -> Model {
    Model::bundled(OpenOptions { n_threads: Some(2), loras, ..Default::default() }).unwrap()
}

fn start(options: Options) -> (Client, GrpcClient) {
    start_model(model(Vec::new()), options)
}

/// Returns a request for `max_new_tokens` greedy tokens and their ids.
fn request(max_new_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::Text(PROMPT.to_owned())),
        temperature: Some(0.0),
        stopping: Some(StoppingCriteria { max_new_tokens, ..Default::default() }),
        response: Some(ResponseOptions { output_token_ids: true, ..Default::default() }),
        ..Default::default()
    }
}

fn endless() -> GenerateRequest {
    let stopping = StoppingCriteria { ignore_eos: true, ..Default::default() };
    GenerateRequest { stopping: Some(stopping), ..request(0) }
}

/// Returns the only choice of a text completion over HTTP.
fn complete(client: &Client, more: &Value) -> Value {
    let mut body = json!({ "prompt": PROMPT, "temperature": 0, "return_token_ids": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0].clone()
}

fn constrained(structured_output: StructuredOutput) -> GenerateRequest {
    let structured_output = Some(structured_output);
    let decoding = Some(DecodingParameters { structured_output, ..Default::default() });
    GenerateRequest { decoding, ..request(60) }
}

#[test]
fn an_answer_equals_that_over_http_streamed_or_not() {
    let (http, grpc) = start(options());
    let expected = complete(&http, &json!({ "max_tokens": 24 }));
    let whole = grpc.try_generate(request(24)).unwrap();
    let output = whole.outputs.unwrap();
    assert_eq!(
        (json!(output.text), json!(output.token_ids)),
        (expected["text"].clone(), expected["token_ids"].clone())
    );
    let finish = output.finish_info.unwrap();
    assert_eq!((finish.num_output_tokens, finish.finish_reason()), (24, FinishReason::Length));
    let prompt: Vec<u32> = serde_json::from_value(expected["prompt_token_ids"].clone()).unwrap();
    assert_eq!(whole.prompt_info.unwrap().num_prompt_tokens as usize, prompt.len());
    // The same prompt as token ids.
    let ids = TokenIds { ids: prompt };
    let by_ids = GenerateRequest { prompt: Some(Prompt::TokenIds(ids)), ..request(24) };
    for streamed in [request(24), by_ids] {
        let responses: Vec<_> = grpc.generate_stream(streamed).map(Result::unwrap).collect();
        assert!(responses[0].prompt_info.is_some() && responses[0].outputs.is_none());
        assert!(responses[1..].iter().all(|response| response.prompt_info.is_none()));
        assert!(responses.len() > 10, "{}", responses.len());
        assert_eq!(joined(&responses, 0), (output.text.clone(), output.token_ids.clone(), finish.clone()));
    }
}

#[test]
fn equal_seeds_have_equal_answers_over_both_protocols() {
    let (http, grpc) = start(options());
    let sampling = |seed, num_sequences| {
        Some(RandomSampling { seed: Some(seed), num_sequences, top_k: 40, ..Default::default() })
    };
    let drawn =
        |seed, n| GenerateRequest { temperature: Some(1.0), sampling: sampling(seed, n), ..request(16) };
    let fields = |seed| json!({ "temperature": 1.0, "top_k": 40, "seed": seed, "max_tokens": 16 });
    for seed in [0, 7, 1 << 40] {
        let expected = complete(&http, &fields(seed));
        assert_eq!(json!(grpc.generate(drawn(seed, 1)).token_ids), expected["token_ids"]);
    }
    assert_ne!(grpc.generate(drawn(1, 1)).token_ids, grpc.generate(drawn(2, 1)).token_ids);
    // Several answers are streamed by index, with the seeds of HTTP's choices.
    let responses: Vec<_> = grpc.generate_stream(drawn(7, 3)).map(Result::unwrap).collect();
    for index in 0..3 {
        let expected = complete(&http, &fields(7 + i64::from(index)));
        assert_eq!(json!(joined(&responses, index).1), expected["token_ids"]);
    }
    let error = grpc.try_generate(drawn(7, 3)).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().starts_with("num_sequences: expected at most 1"), "{error}");
}

#[test]
fn stop_conditions_end_an_answer_with_their_reason() {
    let (http, grpc) = start(options());
    let free = complete(&http, &json!({ "max_tokens": 40 }));
    let text = free["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(4).unwrap().to_owned();
    let stopping = StoppingCriteria {
        max_new_tokens: 40,
        stop_strings: vec!["never".to_owned(), word.clone()],
        ..Default::default()
    };
    let expected = complete(&http, &json!({ "max_tokens": 40, "stop": ["never", word] }));
    let output = grpc.generate(GenerateRequest { stopping: Some(stopping.clone()), ..request(0) });
    assert_eq!(json!(output.text), expected["text"]);
    let reason = output.finish_info.unwrap().stop_reason;
    assert_eq!(reason, Some(StopReason::StopString(word.clone())));
    let included = StoppingCriteria { include_stop_strings: true, ..stopping };
    let output = grpc.generate(GenerateRequest { stopping: Some(included), ..request(0) });
    assert!(output.text.ends_with(&word), "{}", output.text);
    let token = free["token_ids"][6].as_u64().unwrap() as u32;
    let stopping = StoppingCriteria { max_new_tokens: 40, stop_token_ids: vec![token], ..Default::default() };
    let output = grpc.generate(GenerateRequest { stopping: Some(stopping), ..request(0) });
    let finish = output.finish_info.unwrap();
    assert_eq!(finish.stop_reason, Some(StopReason::StopTokenId(token)));
    assert!(
        !output.token_ids.contains(&token) && finish.num_output_tokens as usize == output.token_ids.len()
    );
}

#[test]
fn constraints_hold_as_over_http() {
    let (http, grpc) = start(options());
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer", "maximum": 9 } }, "required": ["a"], "additionalProperties": false });
    let choices = vec!["left".to_owned(), "right".to_owned()];
    for (of_grpc, of_http) in [
        (StructuredOutput::Json(schema.to_string()), json!({ "json": schema })),
        (StructuredOutput::Regex("[0-9]{3}-[a-c]{2}".to_owned()), json!({ "regex": "[0-9]{3}-[a-c]{2}" })),
        (StructuredOutput::Choice(StringChoices { choices: choices.clone() }), json!({ "choice": choices })),
        (
            StructuredOutput::Grammar("root ::= \"yes\" | \"no\"".to_owned()),
            json!({ "grammar": "root ::= \"yes\" | \"no\"" }),
        ),
    ] {
        let expected = complete(&http, &json!({ "max_tokens": 60, "structured_outputs": of_http }));
        let output = grpc.generate(constrained(of_grpc));
        assert_eq!(json!(output.text), expected["text"]);
        assert_eq!(output.finish_info.unwrap().finish_reason(), FinishReason::Stop);
    }
    let error = grpc.try_generate(constrained(StructuredOutput::Json("{".to_owned()))).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[test]
fn logprobs_equal_those_over_http_and_match_their_tokens() {
    let (http, grpc) = start(options());
    let candidates = || Some(CandidateTokens { select: Some(Select::TopN(3)) });
    let response = ResponseOptions {
        prompt_token_ids: true,
        prompt_logprobs: true,
        prompt_candidates: candidates(),
        output_token_ids: true,
        output_logprobs: true,
        output_candidates: candidates(),
        ..Default::default()
    };
    let asked = GenerateRequest { response: Some(response), ..request(12) };
    let expected = complete(&http, &json!({ "max_tokens": 12, "logprobs": 3, "echo": true }));
    let all: Vec<Option<f32>> =
        serde_json::from_value(expected["logprobs"]["token_logprobs"].clone()).unwrap();
    let logprobs = |of: &[f32]| of.iter().copied().map(Some).collect::<Vec<_>>();
    let whole = grpc.try_generate(asked.clone()).unwrap();
    let (info, output) = (whole.prompt_info.unwrap(), whole.outputs.unwrap());
    let (of_prompt, of_output) = all.split_at(info.token_ids.len());
    assert_eq!(
        (&logprobs(&info.logprobs)[1..], &logprobs(&output.logprobs)[..]),
        (&of_prompt[1..], of_output)
    );
    assert_eq!((info.logprobs[0], info.ranks[0], info.candidate_tokens[0].tokens.len()), (0.0, 0, 0));
    // Greedy tokens are the most probable ones, and the other candidates follow.
    assert!(output.ranks.iter().all(|&rank| rank == 1));
    for of in &output.candidate_tokens {
        assert_eq!(of.tokens.iter().map(|token| token.rank).collect::<Vec<_>>(), [2, 3]);
    }
    for response in grpc.generate_stream(asked).map(Result::unwrap) {
        let Some(output) = response.outputs else { continue };
        let n = output.num_tokens as usize;
        let lengths = [
            output.token_ids.len(),
            output.logprobs.len(),
            output.ranks.len(),
            output.candidate_tokens.len(),
        ];
        assert_eq!(lengths, [n; 4]);
    }
}

#[test]
fn a_cancelled_or_aborted_call_frees_its_row() {
    let (http, grpc) = start(options());
    let is_running = |n: usize| http.wait_for("/kv", |kv| kv["running"] == n);
    let mut responses = grpc.generate_stream(endless());
    assert!(responses.by_ref().take(5).all(|response| response.is_ok()));
    is_running(1);
    drop(responses);
    is_running(0);
    // Another call ends it by its id, with the output so far.
    let named = |id: &str| GenerateRequest { request_id: id.to_owned(), ..endless() };
    let mut responses = grpc.generate_stream(named("one"));
    let mut received: Vec<_> = responses.by_ref().take(5).map(Result::unwrap).collect();
    let abort = |id: &str| {
        let request_ids = vec![id.to_owned(), "unknown".to_owned()];
        grpc.call::<_, Empty>("/vllm.Control/Abort", AbortRequest { request_ids }).unwrap();
    };
    abort("other");
    is_running(1);
    abort("one");
    received.extend(responses.map(Result::unwrap));
    let (_, tokens, finish) = joined(&received, 0);
    assert_eq!(finish.finish_reason(), FinishReason::Aborted);
    assert_eq!(finish.num_output_tokens as usize, tokens.len());
    is_running(0);
    // So does a call with one response.
    let output = std::thread::scope(|scope| {
        let whole = scope.spawn(|| grpc.generate(named("whole")));
        is_running(1);
        abort("whole");
        whole.join().unwrap()
    });
    assert_eq!(output.finish_info.unwrap().finish_reason(), FinishReason::Aborted);
    is_running(0);
}

#[test]
fn routers_discover_the_server() {
    let (http, grpc) = start(Options { n_running: 3, ..options() });
    let info: ServerInfo = grpc.call("/vllm.Control/GetServerInfo", Empty {}).unwrap();
    let (_, card) = http.get("/v1/models/pocket");
    assert_eq!(json!(info.max_model_len), card["max_model_len"]);
    assert_eq!((info.api_version.as_str(), info.kv_block_size, info.max_running_requests), ("vllm", 128, 3));
    assert!(info.total_kv_blocks > 0 && !info.instance_id.is_empty());
    let parallelism = info.parallelism.unwrap();
    assert_eq!(
        (parallelism.data_parallel_size, parallelism.world_size, parallelism.data_parallel_rank),
        (1, 1, 0)
    );
    let model: ModelInfo = grpc.call("/vllm.Control/GetModelInfo", Empty {}).unwrap();
    assert_eq!((model.model_id.as_str(), model.served_model_name.as_str()), ("pocket", "pocket"));
    assert!(model.supports_text_input && model.supports_token_ids_input && !model.supports_lora);
    let sources: GetKvEventSourcesResponse = grpc.call("/vllm.Control/GetKvEventSources", Empty {}).unwrap();
    assert!(sources.sources.is_empty());
    let loras: ListLorasResponse = grpc.call("/vllm.Control/ListLoras", Empty {}).unwrap();
    assert!(loras.adapters.is_empty());
    for service in ["", "vllm.Inference", "vllm.Control"] {
        let asked = || HealthCheckRequest { service: service.to_owned() };
        let health: HealthCheckResponse = grpc.call("/grpc.health.v1.Health/Check", asked()).unwrap();
        assert_eq!(health.status(), ServingStatus::Serving);
        let mut changes = grpc.stream("/grpc.health.v1.Health/Watch", asked()).unwrap();
        let first: HealthCheckResponse = changes.next().unwrap().unwrap();
        assert_eq!(first.status(), ServingStatus::Serving);
    }
    let other = HealthCheckRequest { service: "other".to_owned() };
    let error = grpc.call::<_, HealthCheckResponse>("/grpc.health.v1.Health/Check", other).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

#[cfg(feature = "kv-events")]
#[test]
fn routers_discover_the_kv_events() {
    let publisher = kvant_server::Publisher::open("tcp://*:0", Some("tcp://*:0"), "kv@here").unwrap();
    let port = |address: &str| address.rsplit(':').next().unwrap().to_owned();
    let expected =
        [publisher.address(), publisher.replay().unwrap()].map(|at| format!("tcp://*:{}", port(at)));
    let (_, grpc) = start(Options { kv_events: Some(publisher.sink()), ..options() });
    let response: GetKvEventSourcesResponse = grpc.call("/vllm.Control/GetKvEventSources", Empty {}).unwrap();
    let [source] = &response.sources[..] else { panic!("{response:?}") };
    assert_eq!([&source.endpoint, &source.replay_endpoint], expected.each_ref());
    assert_eq!(
        (source.transport.as_str(), source.encoding.as_str(), source.topic.as_str()),
        ("zmq", "msgpack", "kv@here")
    );
    assert_eq!((source.schema_version, source.data_parallel_rank, source.buffer_steps), (1, Some(0), 10_000));
}

#[test]
fn unimplemented_calls_and_invalid_requests_are_named() {
    let (_, grpc) = start(options());
    for name in ["Shutdown", "Sleep", "IsPaused", "UpdateWeights", "GetWeightVersion"] {
        let path: &'static str = format!("{CONTROL}{name}").leak();
        let error = grpc.call::<_, Empty>(path, Empty {}).unwrap_err();
        assert_eq!(
            (error.code(), error.message()),
            (Code::Unimplemented, &*format!("{name} is not implemented"))
        );
    }
    let error = grpc.call::<_, Empty>("/vllm.Other/Call", Empty {}).unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unimplemented, "there is no call /vllm.Other/Call here")
    );
    let error = grpc.try_generate(constrained(StructuredOutput::StructuralTag("{}".to_owned()))).unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().starts_with("structural_tag is not implemented"), "{error}");
    let lora = || LoraRequest { lora_name: "a".to_owned() };
    let error = grpc.call::<_, Empty>("/vllm.Control/LoadLora", lora()).unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    let error = grpc.call::<_, Empty>("/vllm.Control/UnloadLora", lora()).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    for (request, code, start) in [
        (
            GenerateRequest { model: "other".to_owned(), ..request(1) },
            Code::NotFound,
            "there is no model 'other' here",
        ),
        (
            GenerateRequest { lora_name: "a".to_owned(), ..request(1) },
            Code::NotFound,
            "there is no adapter 'a' here",
        ),
        (
            GenerateRequest { prompt: None, ..request(1) },
            Code::InvalidArgument,
            "prompt: expected text or token_ids",
        ),
        (
            GenerateRequest {
                prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![u32::MAX] })),
                ..request(1)
            },
            Code::InvalidArgument,
            "token_ids: expected numbers of tokens in the vocabulary",
        ),
        (
            GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds::default())), ..request(1) },
            Code::InvalidArgument,
            "the prompt is empty",
        ),
        (
            GenerateRequest { temperature: Some(f32::NAN), ..request(1) },
            Code::InvalidArgument,
            "temperature: expected",
        ),
    ] {
        let error = grpc.try_generate(request.clone()).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().starts_with(start), "{error}");
        // A stream fails before its first response.
        let error =
            grpc.stream::<_, GenerateResponse>("/vllm.Inference/GenerateStream", request).err().unwrap();
        assert_eq!(error.code(), code);
    }
}

#[test]
fn adapters_are_selected_by_name() {
    let folder = std::env::temp_dir().join(format!("kvant-grpc-loras-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let paths = ["formal", "terse"].map(|name| folder.join(format!("{name}.gguf")));
    paths.iter().zip(crate::loras::waves()).for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let loras = paths.iter().map(|path| LoraFile::new(Gguf::open(path).unwrap(), 0.0)).collect();
    let (http, grpc) = start_model(model(loras), options());
    let listed: ListLorasResponse = grpc.call("/vllm.Control/ListLoras", Empty {}).unwrap();
    let names: Vec<_> = listed.adapters.iter().map(|of| (of.lora_id, of.lora_name.as_str())).collect();
    assert_eq!(names, [(1, "formal"), (2, "terse")]);
    let terse = || "terse".to_owned();
    let expected = complete(&http, &json!({ "model": "terse", "max_tokens": 40 }))["text"].clone();
    for request in [
        GenerateRequest { lora_name: terse(), ..request(40) },
        GenerateRequest { lora_name: terse(), model: "pocket".to_owned(), ..request(40) },
        GenerateRequest { model: terse(), ..request(40) },
    ] {
        assert_eq!(json!(grpc.generate(request).text), expected);
    }
    assert_ne!(json!(grpc.generate(request(40)).text), expected);
    let error =
        grpc.call::<_, Empty>("/vllm.Control/LoadLora", LoraRequest { lora_name: terse() }).unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn calls_need_the_servers_key_and_abort_only_their_own() {
    let keys = vec!["alice".to_owned(), "bob".to_owned()];
    let (http, grpc) = start(Options { api_keys: keys, ..options() });
    let (alice, bob) = (grpc.with_key("alice"), grpc.with_key("bob"));
    for client in [&grpc, &grpc.with_key("eve")] {
        assert_eq!(client.try_generate(request(1)).unwrap_err().code(), Code::Unauthenticated);
        let error = client.call::<_, ModelInfo>("/vllm.Control/GetModelInfo", Empty {}).unwrap_err();
        assert_eq!(error.code(), Code::Unauthenticated);
    }
    let health: HealthCheckResponse =
        grpc.call("/grpc.health.v1.Health/Check", HealthCheckRequest::default()).unwrap();
    assert_eq!(health.status(), ServingStatus::Serving);
    let mut responses = alice.generate_stream(GenerateRequest { request_id: "a".to_owned(), ..endless() });
    assert!(responses.next().unwrap().is_ok());
    let abort = || AbortRequest { request_ids: vec!["a".to_owned()] };
    let kv = http.with_key("alice");
    bob.call::<_, Empty>("/vllm.Control/Abort", abort()).unwrap();
    assert!(responses.by_ref().take(20).all(|response| response.is_ok()));
    alice.call::<_, Empty>("/vllm.Control/Abort", abort()).unwrap();
    let last = responses.map(Result::unwrap).last().unwrap().outputs.unwrap().finish_info.unwrap();
    assert_eq!(last.finish_reason(), FinishReason::Aborted);
    kv.wait_for("/kv", |kv| kv["running"] == 0);
}

#[test]
fn salts_separate_the_prefix_cache_and_it_can_be_bypassed() {
    let (http, grpc) = start(options());
    let cached = |kv: KvCacheParameters| {
        let count = || {
            let text = http.get_text("/metrics");
            let line =
                text.lines().find(|line| line.starts_with("llamacpp:prompt_tokens_cached_total ")).unwrap();
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        let before = count();
        let ids: Vec<u32> = (0..600).map(|i| i * 37 % 400 + 50).collect();
        let prompt = Some(Prompt::TokenIds(TokenIds { ids }));
        grpc.generate(GenerateRequest { prompt, kv: Some(kv), ..request(1) });
        // A later request is processed when the first has become idle.
        grpc.generate(GenerateRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![60] })),
            ..request(1)
        });
        count() > before
    };
    let salted = |salt: &str| KvCacheParameters { cache_salt: salt.to_owned(), ..Default::default() };
    let is_cached = ["", "", "one", "two", "one", "two", ""].map(|salt| cached(salted(salt)));
    assert_eq!(is_cached, [false, true, false, false, true, true, true]);
    assert!(!cached(KvCacheParameters { bypass_prefix_cache: true, ..Default::default() }));
    // Parameters that ask for no transfer.
    assert!(cached(KvCacheParameters { kv_transfer_params: Some(Vec::new()), ..Default::default() }));
    let kv = KvCacheParameters { kv_transfer_params: Some(vec![0xff; 9]), ..Default::default() };
    let error = grpc.try_generate(GenerateRequest { kv: Some(kv), ..request(1) }).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[test]
fn mixed_requests_over_both_protocols_have_equal_answers() {
    let (http, grpc) = start(Options { n_waiting: 256, ..options() });
    let sampled = |seed: i64| GenerateRequest {
        temperature: Some(0.9),
        sampling: Some(RandomSampling { seed: Some(seed), ..Default::default() }),
        ..request(6 + seed as u32)
    };
    let fields = |seed: i64| json!({ "temperature": 0.9, "seed": seed, "max_tokens": 6 + seed });
    let expected: Vec<Value> =
        (0..10).map(|seed| complete(&http, &fields(seed))["token_ids"].clone()).collect();
    let (next, n) = (AtomicUsize::new(0), 200);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= n {
                        return;
                    }
                    let seed = (i / 3 % 10) as i64;
                    let tokens = match i % 3 {
                        0 => complete(&http, &fields(seed))["token_ids"].clone(),
                        1 => json!(grpc.generate(sampled(seed)).token_ids),
                        _ => {
                            let responses: Vec<_> =
                                grpc.generate_stream(sampled(seed)).map(Result::unwrap).collect();
                            json!(joined(&responses, 0).1)
                        }
                    };
                    assert_eq!(tokens, expected[seed as usize], "{i}");
                }
            });
        }
    });
    http.wait_for("/kv", |kv| kv["running"] == 0 && kv["waiting"] == 0);
}

#[test]
fn more_requests_than_may_wait_are_refused() {
    let (http, grpc) = start(Options { n_running: 1, n_waiting: 1, ..options() });
    let first = grpc.generate_stream(endless());
    http.wait_for("/kv", |kv| kv["running"] == 1);
    let second = grpc.generate_stream(endless());
    let error = grpc.try_generate(request(1)).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    drop((first, second));
    http.wait_for("/kv", |kv| kv["running"] == 0 && kv["waiting"] == 0);
    assert_eq!(grpc.generate(request(1)).num_tokens, 1);
}

#[test]
fn malformed_messages_break_nothing() {
    let (_, grpc) = start(options());
    let message = prost::Message::encode_to_vec(&constrained(StructuredOutput::Regex("a".to_owned())));
    let mut state = 17u32;
    let mut next = |n: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % n
    };
    for i in 0..300 {
        let mut body = [&[0, 0, 0, 0, message.len() as u8], &message[..]].concat();
        for _ in 0..=next(3) {
            let at = next(body.len());
            body[at] = body[at].wrapping_add(1 + next(255) as u8);
        }
        if i % 5 == 0 {
            body.truncate(next(body.len()));
        }
        let path =
            ["/vllm.Inference/Generate", "/vllm.Inference/GenerateStream", "/vllm.Control/Abort"][i % 3];
        assert_eq!(grpc.raw(path, body), 200);
    }
    assert_eq!(grpc.generate(request(1)).num_tokens, 1);
}

#[test]
fn a_busy_port_is_an_error_that_names_it() {
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port();
    let options = Options { grpc: Some(Address::loopback(port)), ..options() };
    let error = serve(model(Vec::new()), options, |_| unreachable!("nothing is served")).unwrap_err();
    assert!(matches!(error, ServeError::Listen { .. }));
    assert!(error.to_string().starts_with(&format!("127.0.0.1:{port}: ")), "{error}");
}

#[test]
fn a_cache_is_transferred_between_grpc_and_http() {
    let prompt: String = (0..200).map(|i| format!("{} is a number. ", (i * 37) % 101)).collect();
    let (_, prefill_worker) = start(Options { kv_transfer: 64 << 20, ..options() });
    let (http, decode_worker) = start(Options { kv_peers: vec!["127.0.0.1".to_owned()], ..options() });
    let ask = |worker: &GrpcClient, n: u32, params: Vec<u8>| {
        let kv = KvCacheParameters { kv_transfer_params: Some(params), ..Default::default() };
        let output = worker.generate(GenerateRequest {
            prompt: Some(Prompt::Text(prompt.clone())),
            kv: Some(kv),
            ..request(n)
        });
        (output.token_ids, output.finish_info.unwrap().kv_transfer_params)
    };
    // { "do_remote_decode": true } as google.protobuf.Struct.
    let name = b"do_remote_decode";
    let keep = [&[0x0a, 22, 0x0a, 16], &name[..], &[0x12, 2, 0x20, 1]].concat();
    let (_, params) = ask(&prefill_worker, 1, keep);
    let (fetched, none) = ask(&decode_worker, 8, params.unwrap());
    assert_eq!(none, None);
    let expected = complete(&http, &json!({ "prompt": prompt, "max_tokens": 8 }));
    assert_eq!(json!(fetched), expected["token_ids"]);
    let metrics = http.get_text("/metrics");
    assert!(metrics.lines().any(|line| line == "kvant:kv_fetch_failures_total 0"), "{metrics}");
    assert!(!metrics.lines().any(|line| line == "kvant:kv_fetched_bytes_total 0"), "{metrics}");
}
