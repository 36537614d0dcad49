//! Responses: one JSON body, server-sent events or JSON lines.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::header;
use axum::response::sse::{Event as Sse, KeepAlive};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{Stream, StreamExt as _, unfold};
use serde_json::Value;
use tokio::sync::mpsc::Receiver;

use kvant::generate::decoding::{FinalOutput, Finish, TokenLogprobs, TokenOutput};

use super::error::ApiError;
use crate::status::{AnswerStats, Progress};
use crate::worker::Event;

/// Interval of keep-alive comments in an idle stream, so that clients and proxies do not close the
/// connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Answer accumulated so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Accumulated {
    pub text: String,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    /// Logprobs of all prompt tokens but the first, if requested.
    pub prompt: Arc<[TokenLogprobs]>,
    pub finish: Option<Finish>,
    pub times: AnswerStats,
}

/// New output of the answer at this index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delta<'a> {
    pub index: usize,
    pub text: &'a str,
    pub token: Option<u32>,
    /// Logprobs of the tokens whose text is final with this output.
    pub logprobs: &'a [TokenLogprobs],
    pub finish: Option<Finish>,
    pub answer: &'a Accumulated,
}

/// Data of a server-sent event.
#[derive(Debug)]
pub(crate) struct Chunk(pub Value);

/// Last event of a stream in OpenAI's API.
const DONE: &str = "[DONE]";

/// Framing of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Server-sent events without names, terminated by OpenAI's `[DONE]`.
    Done,
    /// Server-sent events, each named after the `type` of its data.
    Named,
    /// Server-sent events without names.
    Bare,
    /// One JSON value per line, as in ollama.
    Lines,
}

/// Encodes a value as an event; `None` is the end mark.
fn event<F: ApiFormat>(sent: Option<Chunk>) -> Sse {
    let Some(Chunk(value)) = sent else { return Sse::default().data(DONE) };
    let name = value["type"].as_str().filter(|_| F::FRAMING == Framing::Named);
    // The name precedes the data: some clients act on the data as soon as they read it.
    let event = name.map_or_else(Sse::default, |name| Sse::default().event(name));
    event.data(value.to_string())
}

/// Response format of an API.
pub(crate) trait ApiFormat: Send + 'static {
    const FRAMING: Framing = Framing::Done;
    /// Whether a stream reports prefill progress without a request for it.
    const REPORTS_PROGRESS: bool = false;
    /// Receives notes on the parts of the request that were ignored.
    fn warn(&mut self, _warnings: Vec<String>) {}
    /// Receives the `kv_transfer_params` of the response.
    fn set_kv_transfer(&mut self, _params: Option<Value>) {}
    /// Writes the first events of a stream.
    fn begin(&mut self, _out: &mut VecDeque<Chunk>) {}
    /// Writes the logprobs of the prompt that this answer continues.
    fn scored(&mut self, _index: usize, _answer: &Accumulated, _out: &mut VecDeque<Chunk>) {}
    /// Writes prefill progress.
    fn progress(&mut self, _progress: Progress, _out: &mut VecDeque<Chunk>) {}
    /// Writes new output to a stream.
    fn delta(&mut self, piece: &Delta<'_>, out: &mut VecDeque<Chunk>);
    /// Writes the last events, once all answers have ended.
    fn end(&mut self, answers: &[Accumulated], out: &mut VecDeque<Chunk>);
    /// Writes an error that occurs during a stream.
    fn broken(&mut self, error: &ApiError, out: &mut VecDeque<Chunk>) {
        out.push_back(Chunk(serde_json::json!({ "error": error.object() })));
    }
    /// Returns the body with all answers.
    fn whole(&mut self, answers: &[Accumulated]) -> Value;
}

/// Events of accepted jobs that share a channel.
pub(crate) struct EventStream {
    events: Receiver<Event>,
    /// Events received before all jobs were accepted.
    early: VecDeque<Event>,
}

impl EventStream {
    /// Waits until all `n_jobs` are accepted.
    ///
    /// # Errors
    /// The first refusal; the other answers are then cancelled.
    pub async fn accepted(mut events: Receiver<Event>, n_jobs: usize) -> Result<Self, ApiError> {
        let (mut early, mut n_taken) = (VecDeque::new(), 0);
        while n_taken < n_jobs {
            match events.recv().await {
                Some(Event::Accepted) => n_taken += 1,
                Some(Event::Refused(refusal)) => return Err(refusal.into()),
                Some(Event::Failed { why, is_of_request }) => {
                    return Err(ApiError::failed(why, is_of_request));
                }
                // The first jobs may produce output before the last one is accepted.
                Some(event) => early.push_back(event),
                None => return Err(ApiError::shutting_down()),
            }
        }
        Ok(Self { events, early })
    }

    /// Returns the next event; `None` if the worker has ended.
    pub async fn next(&mut self) -> Option<Event> {
        match self.early.pop_front() {
            Some(event) => Some(event),
            None => self.events.recv().await,
        }
    }
}

/// Assembles the response from the events of its jobs.
pub(crate) struct ResponseStream<F> {
    events: EventStream,
    answers: Vec<Accumulated>,
    n_ended: usize,
    format: F,
    /// Resources in use until the response has been sent.
    _held: Box<dyn Send>,
}

impl<F: ApiFormat> ResponseStream<F> {
    /// Assembles `n_answers`, of which each job contributes its part.
    pub fn new(events: EventStream, n_answers: usize, format: F, held: impl Send + 'static) -> Self {
        let answers = vec![Accumulated::default(); n_answers];
        Self { events, answers, n_ended: 0, format, _held: Box::new(held) }
    }

    /// Accumulates an event and writes its stream output to `out`. Returns `false` after the last
    /// event.
    fn receive(&mut self, event: Option<Event>, out: &mut VecDeque<Chunk>) -> Result<bool, ApiError> {
        match event {
            Some(Event::Accepted | Event::Pooled(_)) => {}
            Some(Event::Prefilled(progress)) => self.format.progress(progress, out),
            Some(Event::Scored(indices, logprobs)) => {
                for index in indices {
                    self.answers[index].prompt = Arc::clone(&logprobs);
                    self.format.scored(index, &self.answers[index], out);
                }
            }
            Some(Event::Token(index, output)) => self.push(index, &output, out),
            Some(Event::Ended(index, finish, FinalOutput { text, logprobs }, times)) => {
                let answer = &mut self.answers[index];
                answer.text += &text;
                answer.logprobs.extend(logprobs.clone());
                (answer.finish, answer.times) = (Some(finish), times);
                let (token, logprobs, finish) = (None, &logprobs[..], Some(finish));
                let piece = Delta { index, text: &text, token, logprobs, finish, answer };
                self.format.delta(&piece, out);
                self.n_ended += 1;
                if self.n_ended == self.answers.len() {
                    self.format.end(&self.answers, out);
                    return Ok(false);
                }
            }
            Some(Event::Refused(refusal)) => return Err(refusal.into()),
            Some(Event::Failed { why, is_of_request }) => return Err(ApiError::failed(why, is_of_request)),
            None => return Err(ApiError::shutting_down()),
        }
        Ok(true)
    }

    fn push(&mut self, index: usize, output: &TokenOutput, out: &mut VecDeque<Chunk>) {
        let answer = &mut self.answers[index];
        answer.text += &output.text;
        answer.tokens.push(output.token);
        answer.logprobs.extend(output.logprobs.iter().cloned());
        let (text, token, logprobs) = (output.text.as_str(), Some(output.token), &output.logprobs[..]);
        self.format.delta(&Delta { index, text, token, logprobs, finish: None, answer }, out);
    }

    /// Returns one response with all answers, once the last one has ended.
    pub async fn whole(mut self) -> Result<Response, ApiError> {
        let mut unsent = VecDeque::new();
        loop {
            let event = self.events.next().await;
            if !self.receive(event, &mut unsent)? {
                return Ok(Json(self.format.whole(&self.answers)).into_response());
            }
            unsent.clear();
        }
    }

    /// Returns a streaming response.
    pub fn stream(mut self) -> Response {
        let mut out = VecDeque::new();
        self.format.begin(&mut out);
        // Makes a buffering proxy (nginx) forward each event at once.
        let head = [("x-accel-buffering", "no")];
        if F::FRAMING == Framing::Lines {
            let line = |Chunk(value)| format!("{value}\n");
            let lines =
                sent(self, out).map(move |sent| Ok::<_, Infallible>(sent.map(line).unwrap_or_default()));
            let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
            return (head, kind, Body::from_stream(lines)).into_response();
        }
        let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
        let events = sent(self, out).map(|sent| Ok::<_, Infallible>(event::<F>(sent)));
        (head, axum::response::Sse::new(events).keep_alive(keep_alive)).into_response()
    }
}

/// Progress of a stream.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Open,
    /// All events have been received.
    Received,
    /// The end mark has been sent.
    Ended,
}

/// Returns the stream of values to send; `None` is the end mark.
fn sent<F: ApiFormat>(
    listener: ResponseStream<F>,
    out: VecDeque<Chunk>,
) -> impl Stream<Item = Option<Chunk>> {
    unfold((listener, out, Stage::Open), |(mut listener, mut out, mut stage)| async move {
        loop {
            if let Some(sent) = out.pop_front() {
                return Some((Some(sent), (listener, out, stage)));
            }
            match stage {
                Stage::Open => {}
                Stage::Received if F::FRAMING == Framing::Done => {
                    return Some((None, (listener, out, Stage::Ended)));
                }
                Stage::Received | Stage::Ended => return None,
            }
            let event = listener.events.next().await;
            match listener.receive(event, &mut out) {
                Ok(true) => {}
                Ok(false) => stage = Stage::Received,
                Err(error) => {
                    listener.format.broken(&error, &mut out);
                    stage = Stage::Ended;
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::sync::mpsc::channel;

    use super::*;

    struct Texts;

    impl ApiFormat for Texts {
        fn delta(&mut self, _: &Delta<'_>, _: &mut VecDeque<Chunk>) {}

        fn end(&mut self, _: &[Accumulated], _: &mut VecDeque<Chunk>) {}

        fn whole(&mut self, answers: &[Accumulated]) -> Value {
            answers.iter().map(|answer| json!(answer.text)).collect()
        }
    }

    #[test]
    fn a_job_may_produce_output_before_the_last_is_accepted() {
        let (events, received) = channel(16);
        let token = |text: &str| TokenOutput { token: 1, text: text.to_owned(), logprobs: Vec::new() };
        let ended = |index| Event::Ended(index, Finish::Stop, FinalOutput::default(), AnswerStats::default());
        for event in [
            Event::Accepted,
            Event::Token(0, token("a")),
            ended(0),
            Event::Accepted,
            Event::Token(1, token("b")),
        ] {
            events.try_send(event).unwrap();
        }
        events.try_send(ended(1)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let answer = runtime.block_on(async {
            let events = EventStream::accepted(received, 2).await.unwrap();
            ResponseStream::new(events, 2, Texts, ()).whole().await.unwrap()
        });
        assert_eq!(answer.status(), 200);
    }
}
