//! Reranking: documents by relevance to a query. `/v1/rerank` of Jina and llama.cpp, with `texts`
//! that of TEI.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use kvant::HiddenStatePool;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::prompt::MAX_PROMPTS;
use super::{Caller, Server};

const EXPECTED: &str = "a list of texts, at least one and at most 2048";

pub(super) async fn rerank(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Json<Value>, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let scorer = hosted.model.scorer()?;
    let query: String = fields.need("query", "a text")?;
    let is_tei = fields.value("texts").is_some();
    let documents = documents(&fields, if is_tei { "texts" } else { "documents" })?;
    let top_n = fields.get("top_n", "a whole number")?.unwrap_or(usize::MAX);
    let returns_text = fields.flag(if is_tei { "return_text" } else { "return_documents" })?;
    let longest = query.len() + documents.iter().map(String::len).max().unwrap_or(0);
    let (own_scorer, own_documents) = (scorer.clone(), documents.clone());
    let prompts = hosted
        .tokenize(longest, move |model, client| {
            let read = |document: &String| {
                client.check()?;
                Ok(own_scorer.prompt(model, &query, document)?)
            };
            own_documents.iter().map(read).collect::<Result<Vec<_>, ApiError>>()
        })
        .await?;
    let n_tokens: usize = prompts.iter().map(Vec::len).sum();
    let pooled = hosted.pooled(prompts, &scorer.pool(&hosted.model), &fields, &caller).await?;
    // Scores of a text encoder wait for its device.
    let scores = hosted
        .blocking(move |model, _| {
            let score = |pooled: &HiddenStatePool| Ok(scorer.score(model, &pooled.vector()?)?);
            pooled.iter().map(score).collect::<Result<Vec<f32>, ApiError>>()
        })
        .await?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let entry = |&index: &usize| {
        let mut entry = json!({ "index": index });
        entry[if is_tei { "score" } else { "relevance_score" }] = scores[index].into();
        match (returns_text, is_tei) {
            (true, true) => entry["text"] = documents[index].as_str().into(),
            (true, false) => entry["document"] = json!({ "text": documents[index] }),
            (false, _) => {}
        }
        entry
    };
    let results: Value = order.iter().take(top_n).map(entry).collect();
    if is_tei {
        return Ok(Json(results));
    }
    let usage = json!({ "prompt_tokens": n_tokens, "total_tokens": n_tokens });
    Ok(Json(json!({ "object": "list", "model": hosted.name, "usage": usage, "results": results })))
}

/// Reads texts, or objects with a `text`.
fn documents(fields: &Fields, name: &'static str) -> Result<Vec<String>, ApiError> {
    let given: Vec<Value> = fields.need(name, EXPECTED)?;
    if given.is_empty() || given.len() > MAX_PROMPTS {
        return Err(ApiError::field(name, EXPECTED, given.len()));
    }
    let text = |document: &Value| {
        let text = document.as_str().or_else(|| document["text"].as_str());
        text.map(str::to_owned).ok_or_else(|| ApiError::field(name, EXPECTED, document))
    };
    given.iter().map(text).collect()
}
