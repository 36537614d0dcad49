//! Requests: from `vllm.GenerateRequest` to the fields of the HTTP API, which define what a request
//! may hold.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::messages::{
    CandidateTokens, DecodingParameters, GenerateRequest, RandomSampling, ResponseOptions, Select,
    StoppingCriteria, StructuredOutput,
};
use crate::http::{ApiError, MAX_LOGPROBS};

/// Returns an error for a part of the contract that Kvant does not support.
pub(super) fn unimplemented(name: &str, expected: &str) -> ApiError {
    let message = format!("{name} is not implemented: expected {expected}");
    ApiError::new(StatusCode::NOT_IMPLEMENTED, "invalid_request_error", message)
}

/// Rejects what Kvant does not support.
pub(super) fn check_supported(request: &GenerateRequest) -> Result<(), ApiError> {
    let decoding = request.decoding.as_ref();
    let structural_tag = matches!(
        decoding.and_then(|of| of.structured_output.as_ref()),
        Some(StructuredOutput::StructuralTag(_))
    );
    let skips = request.response.as_ref().and_then(|of| of.skip_special_tokens).unwrap_or(true);
    let missing = [
        (structural_tag, "structural_tag", "json, regex, choice, grammar or json_object"),
        (
            decoding.is_some_and(|of| !of.allowed_token_ids.is_empty()),
            "allowed_token_ids",
            "logit_bias or a grammar",
        ),
        (!request.media.is_empty(), "media", "text or token_ids"),
        (
            request.kv.as_ref().is_some_and(|kv| kv.ec_transfer_params.is_some()),
            "ec_transfer_params",
            "none, since no encoder cache is transferred",
        ),
        (request.truncate_prompt_tokens > 0, "truncate_prompt_tokens", "0, since no prompt is cut"),
        (!skips, "skip_special_tokens", "true, since control tokens are no text"),
    ];
    match missing.into_iter().find(|(is_set, ..)| *is_set) {
        Some((_, name, expected)) => Err(unimplemented(name, expected)),
        None => Ok(()),
    }
}

/// Returns the number of most probable tokens that a selection of candidates asks for.
fn top_n(candidates: Option<&CandidateTokens>, name: &'static str) -> Result<usize, ApiError> {
    match candidates.and_then(|of| of.select.as_ref()) {
        None | Some(Select::All(false)) => Ok(0),
        Some(Select::TopN(n)) if *n as usize > MAX_LOGPROBS => {
            Err(ApiError::field(name, "at most 100 most probable tokens", n))
        }
        Some(Select::TopN(n)) => Ok(*n as usize),
        Some(Select::TokenIds(tokens)) if tokens.ids.is_empty() => Ok(0),
        Some(Select::TokenIds(_)) => Err(unimplemented(&format!("{name}.token_ids"), "top_n")),
        Some(Select::All(true)) => Err(unimplemented(&format!("{name}.all"), "top_n")),
    }
}

/// Returns the number of top logprobs per prompt token, if prompt logprobs are requested.
pub(super) fn prompt_logprobs(response: &ResponseOptions) -> Result<Option<usize>, ApiError> {
    let n = response.prompt_logprobs.then(|| top_n(response.prompt_candidates.as_ref(), "prompt_candidates"));
    n.transpose()
}

/// Returns the fields of the HTTP request that asks for the same answer. Zero is the default of
/// most numbers, which stay unset then.
pub(super) fn fields(request: &GenerateRequest) -> Result<Map<String, Value>, ApiError> {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| _ = fields.insert(name.to_owned(), value);
    if let Some(temperature) = request.temperature {
        set("temperature", finite("temperature", temperature)?);
    }
    if let Some(RandomSampling { num_sequences, top_k, top_p, min_p, seed }) = request.sampling {
        set("n", num_sequences.max(1).into());
        for (name, value) in [("top_p", top_p), ("min_p", min_p)] {
            if value != 0.0 {
                set(name, finite(name, value)?);
            }
        }
        if top_k != 0 {
            set("top_k", top_k.into());
        }
        if let Some(seed) = seed {
            set("seed", seed.into());
        }
    }
    if let Some(decoding) = &request.decoding {
        set_decoding(decoding, &mut set)?;
    }
    if let Some(stopping) = &request.stopping {
        set_stopping(stopping, &mut set);
    }
    if let Some(response) = request.response.as_ref().filter(|response| response.output_logprobs) {
        set("logprobs", top_n(response.output_candidates.as_ref(), "output_candidates")?.into());
    }
    let model = [&request.lora_name, &request.model].into_iter().find(|name| !name.is_empty());
    if let Some(model) = model {
        set("model", model.as_str().into());
    }
    Ok(fields)
}

fn set_decoding(decoding: &DecodingParameters, set: &mut impl FnMut(&str, Value)) -> Result<(), ApiError> {
    for (name, value) in [
        ("presence_penalty", decoding.presence_penalty),
        ("frequency_penalty", decoding.frequency_penalty),
        ("repetition_penalty", decoding.repetition_penalty),
    ] {
        if value != 0.0 {
            set(name, finite(name, value)?);
        }
    }
    if !decoding.logit_bias.is_empty() {
        let pair = |(token, bias): (&u32, &f32)| {
            // As in llama.cpp's API, `false` excludes a token.
            let bias = if *bias == f32::NEG_INFINITY { false.into() } else { finite("logit_bias", *bias)? };
            Ok(json!([token, bias]))
        };
        let pairs = decoding.logit_bias.iter().map(pair).collect::<Result<Value, ApiError>>()?;
        set("logit_bias", pairs);
    }
    let constraint = match &decoding.structured_output {
        None | Some(StructuredOutput::JsonObject(false) | StructuredOutput::StructuralTag(_)) => {
            return Ok(());
        }
        Some(StructuredOutput::Json(schema)) => json!({ "json": schema }),
        Some(StructuredOutput::Regex(regex)) => json!({ "regex": regex }),
        Some(StructuredOutput::Choice(choice)) => json!({ "choice": choice.choices }),
        Some(StructuredOutput::Grammar(grammar)) => json!({ "grammar": grammar }),
        Some(StructuredOutput::JsonObject(true)) => json!({ "json_object": true }),
    };
    set("structured_outputs", constraint);
    Ok(())
}

fn set_stopping(stopping: &StoppingCriteria, set: &mut impl FnMut(&str, Value)) {
    if stopping.max_new_tokens != 0 {
        set("max_tokens", stopping.max_new_tokens.into());
    }
    set("min_tokens", stopping.min_new_tokens.into());
    set("stop_token_ids", json!(stopping.stop_token_ids));
    set("stop", json!(stopping.stop_strings));
    set("include_stop_str_in_output", stopping.include_stop_strings.into());
    set("ignore_eos", stopping.ignore_eos.into());
}

/// Returns a number as JSON, which has no infinity and no NaN.
fn finite(name: &'static str, value: f32) -> Result<Value, ApiError> {
    if value.is_finite() { Ok(value.into()) } else { Err(ApiError::field(name, "a finite number", value)) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::messages::{KvCacheParameters, StringChoices, TokenIds};
    use super::*;

    fn of(request: &GenerateRequest) -> Value {
        fields(request).unwrap().into()
    }

    fn decoding(structured_output: StructuredOutput) -> GenerateRequest {
        let structured_output = Some(structured_output);
        let decoding = Some(DecodingParameters { structured_output, ..Default::default() });
        GenerateRequest { decoding, ..Default::default() }
    }

    fn response(response: ResponseOptions) -> GenerateRequest {
        GenerateRequest { response: Some(response), ..Default::default() }
    }

    fn candidates(select: Select) -> Option<CandidateTokens> {
        Some(CandidateTokens { select: Some(select) })
    }

    #[test]
    fn fields_of_an_empty_request_are_unset() {
        assert_eq!(of(&GenerateRequest::default()), json!({}));
        let empty = GenerateRequest {
            sampling: Some(RandomSampling::default()),
            decoding: Some(DecodingParameters::default()),
            response: Some(ResponseOptions::default()),
            ..Default::default()
        };
        assert_eq!(of(&empty), json!({ "n": 1 }));
    }

    #[test]
    fn each_field_has_its_name_in_the_http_api() {
        let request = GenerateRequest {
            temperature: Some(0.0),
            model: "base".to_owned(),
            lora_name: "terse".to_owned(),
            sampling: Some(RandomSampling {
                num_sequences: 3,
                top_k: 40,
                top_p: 0.5,
                min_p: 0.25,
                seed: Some(0),
            }),
            decoding: Some(DecodingParameters {
                presence_penalty: 0.5,
                frequency_penalty: -0.5,
                repetition_penalty: 1.5,
                logit_bias: BTreeMap::from([(7, f32::NEG_INFINITY), (9, 1.5)]),
                ..Default::default()
            }),
            stopping: Some(StoppingCriteria {
                max_new_tokens: 8,
                min_new_tokens: 2,
                stop_token_ids: vec![5],
                stop_strings: vec!["x".to_owned()],
                include_stop_strings: true,
                ignore_eos: true,
            }),
            response: Some(ResponseOptions {
                output_logprobs: true,
                output_candidates: candidates(Select::TopN(4)),
                ..Default::default()
            }),
            ..Default::default()
        };
        let expected = json!({
            "temperature": 0.0, "model": "terse", "n": 3, "top_k": 40, "top_p": 0.5, "min_p": 0.25, "seed": 0,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
            "logit_bias": [[7, false], [9, 1.5]], "max_tokens": 8, "min_tokens": 2, "stop_token_ids": [5],
            "stop": ["x"], "include_stop_str_in_output": true, "ignore_eos": true, "logprobs": 4,
        });
        assert_eq!(of(&request), expected);
    }

    #[test]
    fn constraints_have_vllms_names() {
        let choices = StringChoices { choices: vec!["a".to_owned()] };
        for (given, expected) in [
            (StructuredOutput::Json("{}".to_owned()), json!({ "json": "{}" })),
            (StructuredOutput::Regex("a+".to_owned()), json!({ "regex": "a+" })),
            (StructuredOutput::Choice(choices), json!({ "choice": ["a"] })),
            (StructuredOutput::Grammar("root ::= \"a\"".to_owned()), json!({ "grammar": "root ::= \"a\"" })),
            (StructuredOutput::JsonObject(true), json!({ "json_object": true })),
            (StructuredOutput::JsonObject(false), Value::Null),
        ] {
            let request = decoding(given);
            assert_eq!(of(&request)["structured_outputs"], expected);
            assert!(check_supported(&request).is_ok());
        }
    }

    #[test]
    fn numbers_must_be_finite() {
        let request = GenerateRequest { temperature: Some(f32::NAN), ..Default::default() };
        let error = fields(&request).unwrap_err();
        assert_eq!(error.message(), "temperature: expected a finite number, got NaN");
        let logit_bias = BTreeMap::from([(7, f32::INFINITY)]);
        let decoding = Some(DecodingParameters { logit_bias, ..Default::default() });
        let error = fields(&GenerateRequest { decoding, ..Default::default() }).unwrap_err();
        assert_eq!(error.message(), "logit_bias: expected a finite number, got inf");
    }

    #[test]
    fn unimplemented_fields_are_named() {
        let kv = Some(KvCacheParameters { ec_transfer_params: Some(Vec::new()), ..Default::default() });
        let allowed = DecodingParameters { allowed_token_ids: vec![1], ..Default::default() };
        for (name, request) in [
            ("structural_tag", decoding(StructuredOutput::StructuralTag("{}".to_owned()))),
            ("allowed_token_ids", GenerateRequest { decoding: Some(allowed), ..Default::default() }),
            ("media", GenerateRequest { media: vec![Vec::new()], ..Default::default() }),
            ("ec_transfer_params", GenerateRequest { kv, ..Default::default() }),
            ("truncate_prompt_tokens", GenerateRequest { truncate_prompt_tokens: 1, ..Default::default() }),
            (
                "skip_special_tokens",
                response(ResponseOptions { skip_special_tokens: Some(false), ..Default::default() }),
            ),
        ] {
            let error = check_supported(&request).unwrap_err();
            assert!(error.message().starts_with(&format!("{name} is not implemented: expected ")), "{name}");
        }
        assert!(check_supported(&GenerateRequest::default()).is_ok());
    }

    #[test]
    fn candidates_are_the_most_probable_tokens() {
        let ask = |select| ResponseOptions {
            prompt_logprobs: true,
            prompt_candidates: candidates(select),
            ..Default::default()
        };
        let error = |select| prompt_logprobs(&ask(select)).unwrap_err().message().to_owned();
        assert_eq!(prompt_logprobs(&ResponseOptions::default()).unwrap(), None);
        assert_eq!(prompt_logprobs(&ask(Select::TopN(5))).unwrap(), Some(5));
        assert_eq!(prompt_logprobs(&ask(Select::TokenIds(TokenIds::default()))).unwrap(), Some(0));
        let ids = TokenIds { ids: vec![3] };
        assert_eq!(
            error(Select::TokenIds(ids)),
            "prompt_candidates.token_ids is not implemented: expected top_n"
        );
        assert_eq!(error(Select::All(true)), "prompt_candidates.all is not implemented: expected top_n");
        assert_eq!(
            error(Select::TopN(101)),
            "prompt_candidates: expected at most 100 most probable tokens, got 101"
        );
    }
}
