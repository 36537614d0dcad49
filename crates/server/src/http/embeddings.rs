//! Embeddings: OpenAI's `/v1/embeddings` and llama.cpp's `/embedding`. Ollama's endpoints are in
//! `ollama`.
//!
//! Each text is a job, and a few jobs of a request are in progress at a time: short texts share a
//! batch, and a long list does not delay other requests.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use kvant::HiddenStatePool;
use kvant::generate::constraint::Constraints;
use serde::Serialize;
use tokio::sync::mpsc::channel;

use super::error::ApiError;
use super::fields::Fields;
use super::loras::ModelOptions;
use super::prompt::{Purpose, texts};
use super::{Caller, ServedModel, Server};
use crate::cache_key::CacheKey;
use crate::trace::Trace;
use crate::worker::{EVENTS_OF_ANSWER, Event, Job};

/// Maximum texts of a request in progress.
const AT_ONCE: usize = 32;

/// Embeddings of the texts of a request.
pub(super) struct Embedded {
    /// Pooled hidden states of each text.
    pooled: Vec<HiddenStatePool>,
    /// Dimensions of the returned vectors, if the request sets them.
    dimensions: Option<usize>,
    /// Tokens of all texts.
    pub n_tokens: usize,
}

impl Embedded {
    /// Returns a vector of length 1 for each text.
    pub fn vectors(&self) -> Result<Vec<Vec<f32>>, ApiError> {
        self.pooled.iter().map(|pooled| Ok(pooled.embedding(self.dimensions)?)).collect()
    }
}

impl Server {
    /// Embeds the texts in the field `name` of a request.
    pub(super) async fn embed_all(
        &self,
        hosted: &ServedModel,
        name: &'static str,
        fields: &Fields,
        caller: &Caller,
    ) -> Result<Embedded, ApiError> {
        let texts = texts(hosted, fields, name, Purpose::Embed).await?;
        self.embed(hosted, texts.into_iter().map(|text| text.tokens).collect(), fields, caller).await
    }

    /// Embeds tokenized texts.
    pub(super) async fn embed(
        &self,
        hosted: &ServedModel,
        texts: Vec<Vec<u32>>,
        fields: &Fields,
        caller: &Caller,
    ) -> Result<Embedded, ApiError> {
        let pooling = self.options.pooling.map_or_else(|| hosted.model.pooling(), Ok)?;
        hosted.model.check_pooling(pooling)?;
        let empty = HiddenStatePool::new(&hosted.model, pooling);
        let dimensions = fields.get("dimensions", "a whole number")?;
        // Rejects too many dimensions before any text is read.
        empty.embedding(dimensions)?;
        let n_tokens = texts.iter().map(Vec::len).sum();
        let pooled = hosted.pooled(texts, &empty, fields, caller).await?;
        Ok(Embedded { pooled, dimensions, n_tokens })
    }
}

impl ServedModel {
    /// Pools the hidden states of each text, starting from a copy of `empty`.
    pub(super) async fn pooled(
        &self,
        texts: Vec<Vec<u32>>,
        empty: &HiddenStatePool,
        fields: &Fields,
        caller: &Caller,
    ) -> Result<Vec<HiddenStatePool>, ApiError> {
        self.check(&texts)?;
        if self.model.is_encoder() {
            return self.encoded(texts, empty.clone()).await;
        }
        let stored = self.stored(&ModelOptions::read(fields)?, &caller.owner)?;
        let kind = CacheKey { spec: stored, owner: caller.owner.clone() };
        let read = |text: Vec<u32>| self.states(text, empty.clone(), kind.clone(), caller);
        stream::iter(texts).map(read).buffered(AT_ONCE).try_collect().await
    }

    /// Pools the texts of a text encoder, which has no steps that requests could share.
    async fn encoded(
        &self,
        texts: Vec<Vec<u32>>,
        empty: HiddenStatePool,
    ) -> Result<Vec<HiddenStatePool>, ApiError> {
        let metrics = Arc::clone(&self.metrics);
        self.blocking(move |model, client| {
            let mut all = Vec::with_capacity(texts.len());
            for texts in texts.chunks(AT_ONCE) {
                client.check()?;
                all.extend(model.pool_encoded(texts, &empty)?);
                metrics.prompt_tokens.inc_by(texts.iter().map(|text| text.len() as u64).sum());
            }
            Ok(all)
        })
        .await
    }

    /// Pools the hidden states of a text.
    async fn states(
        &self,
        text: Vec<u32>,
        pooled: HiddenStatePool,
        kind: CacheKey,
        caller: &Caller,
    ) -> Result<HiddenStatePool, ApiError> {
        let (events, mut received) = channel(2 * EVENTS_OF_ANSWER);
        let job = Job {
            prompt: text.into(),
            kind,
            owner: caller.owner.clone(),
            n: 1,
            first: 0,
            n_answers: 1,
            answer: Arc::default(),
            media: Vec::new(),
            guides: Constraints::default(),
            reports_progress: false,
            prompt_logprobs: None,
            bypasses_prefix_cache: false,
            keeps: None,
            fetched: None.into(),
            pooled: Some(pooled),
            id: Arc::clone(&caller.id),
            trace: Trace::here(&self.name, "embeddings"),
            events,
        };
        self.jobs.send(job).map_err(|_| ApiError::shutting_down())?;
        loop {
            match received.recv().await {
                Some(Event::Pooled(pooled)) => return Ok(pooled),
                Some(Event::Refused(refusal)) => return Err(refusal.into()),
                Some(Event::Failed { why, is_of_request }) => {
                    return Err(ApiError::failed(why, is_of_request));
                }
                Some(Event::Ended(..)) => {
                    return Err(ApiError::internal("the text outgrew the memory for caches"));
                }
                Some(_) => {}
                None => return Err(ApiError::shutting_down()),
            }
        }
    }
}

#[derive(Serialize)]
struct List {
    object: &'static str,
    data: Vec<Item>,
    model: String,
    usage: Usage,
}

#[derive(Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Numbers,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Numbers {
    Floats(Vec<f32>),
    /// Bytes of the values, little endian: the default of OpenAI's clients.
    Base64(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// `/v1/embeddings` of OpenAI's API.
pub(super) async fn embeddings(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let format: Option<String> = fields.get("encoding_format", "float or base64")?;
    let written = match format.as_deref() {
        None | Some("float") => Numbers::Floats,
        Some("base64") => |vector: Vec<f32>| {
            let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            Numbers::Base64(STANDARD.encode(bytes))
        },
        Some(other) => return Err(ApiError::field("encoding_format", "float or base64", other)),
    };
    let embedded = server.embed_all(&hosted, "input", &fields, &caller).await?;
    let item = |(index, vector)| Item { object: "embedding", index, embedding: written(vector) };
    let n = embedded.n_tokens;
    Ok(Json(List {
        object: "list",
        data: embedded.vectors()?.into_iter().enumerate().map(item).collect(),
        model: hosted.name.clone(),
        usage: Usage { prompt_tokens: n, total_tokens: n },
    })
    .into_response())
}

/// Embedding in llama.cpp's format: a list of vectors per text, here of one vector.
#[derive(Serialize)]
struct Native {
    index: usize,
    embedding: [Vec<f32>; 1],
}

/// `/embedding` of llama.cpp's API.
pub(super) async fn embedding(
    State(server): State<Arc<Server>>,
    Extension(caller): Extension<Caller>,
    fields: Fields,
) -> Result<Response, ApiError> {
    let hosted = server.hosted(&fields).await?;
    let name = if fields.value("content").is_some() { "content" } else { "input" };
    let is_raw = match fields.get::<i64>("embd_normalize", "a whole number")? {
        None | Some(2) => false,
        Some(-1) => true,
        Some(other) => {
            let expected = "2 (vectors of length 1) or -1 (not normalized)";
            return Err(ApiError::field("embd_normalize", expected, other));
        }
    };
    let embedded = server.embed_all(&hosted, name, &fields, &caller).await?;
    let vectors = match is_raw {
        true => embedded.pooled.iter().map(HiddenStatePool::vector).collect::<Result<_, _>>()?,
        false => embedded.vectors()?,
    };
    let item = |(index, vector)| Native { index, embedding: [vector] };
    Ok(Json(vectors.into_iter().enumerate().map(item).collect::<Vec<_>>()).into_response())
}
