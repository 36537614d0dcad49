//! Request bodies: limited individually and in total, and parsed without delaying other requests.
//!
//! Parsed JSON takes many times its size: `[0],` is four bytes of text and 360 as a value.
//! Therefore the values of a body are counted before any is created, large bodies are parsed by
//! low-priority threads (one at a time per API key, two in all), and all bodies in progress share a
//! budget for their text and their values. A stalled body occupies a connection, so it must arrive
//! at a minimum rate, and at most a quarter of all connections may be slow at once.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::{Body as Sent, BodyDataStream, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use flate2::read::GzDecoder;
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::error::{ApiError, shortened};
use super::{Caller, Server};
use crate::owner_limits::{Lanes, Owner};
use crate::priority::run_low_priority;

/// A body that takes longer to arrive is slow.
const AT_ONCE: Duration = Duration::from_millis(250);
/// Maximum slow bodies at once: a quarter of all connections.
const MAX_SLOW: usize = 256;
/// Maximum time until a body starts, and the bytes per second required after that.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_PACE: f64 = 16.0 * 1024.0;
/// Maximum size of a body in bytes: a prompt of a million token ids.
pub(crate) const MAX_BYTES: usize = 32 << 20;
/// Maximum number of values of a body; names and values of fields count one each. A body of
/// [`SMALL`] bytes has fewer.
const MAX_VALUES: usize = 1_200_000;
/// Memory of a value and, in addition, of an array or object, in bytes: vectors grow by doubling,
/// from four values.
const VALUE_BYTES: usize = 64;
const CONTAINER_BYTES: usize = 232;
/// Maximum declared size of an oversized body that is received and discarded before the refusal;
/// larger ones are refused at once.
const MAX_DISCARDED: usize = 8 * MAX_BYTES;
/// Bodies up to this size are parsed at once and need no budget.
const SMALL: usize = 16 << 10;
/// Budget of all larger bodies in progress, in bytes.
const BODY_BUDGET: usize = 128 << 20;
/// Maximum time that a body waits for budget.
const BUDGET_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of a refused body per second of delay before the response, and the maximum delay.
const REFUSED_PACE: f64 = 1024.0 * 1024.0;
const REFUSED_TIME: Duration = Duration::from_secs(2);

/// Resources that bodies share.
pub(crate) struct Bodies {
    room: Arc<Semaphore>,
    slow: Arc<Semaphore>,
    parse_lanes: Arc<Lanes>,
    upload_delay: Arc<Lanes>,
}

impl Default for Bodies {
    fn default() -> Self {
        let permits = |n| Arc::new(Semaphore::new(n));
        Self {
            room: permits(BODY_BUDGET),
            slow: permits(MAX_SLOW),
            parse_lanes: Lanes::new(2, 1),
            upload_delay: Lanes::new(usize::MAX, 1),
        }
    }
}

/// Budget of a body, held until its request has been accepted.
pub(crate) type BodyPermit = Option<Arc<OwnedSemaphorePermit>>;

/// Body with any JSON value.
pub(crate) struct Body(pub Value, pub BodyPermit);

impl FromRequest<Arc<Server>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Arc<Server>) -> Result<Self, ApiError> {
        let bodies = &server.bodies;
        let request = bodies.refuse_if_large(request).await?;
        let caller = request.extensions().get::<Caller>().cloned();
        let is_packed = is_gzip(&request)?;
        let (mut bytes, mut held) = bodies.receive(request.into_body()).await?;
        let count = |n| caller.iter().for_each(|caller| caller.n_bytes.store(n, Ordering::Relaxed));
        count(bytes.len());
        let owner = caller.as_ref().and_then(|caller| caller.owner.clone());
        if is_packed {
            // A few kilobytes may hold as much as any body: its memory is reserved before.
            bodies.take_room(MAX_BYTES, &mut held).await?;
            count(MAX_BYTES);
            bytes = bodies.decompress(bytes, &owner).await?;
            count(bytes.len());
            held = held.and_then(|mut held| held.split(bytes.len()));
        }
        let value = bodies.read(bytes, &owner, &mut held).await?;
        Ok(Self(value, held.map(Arc::new)))
    }
}

impl Bodies {
    /// Receives a body, with budget for it.
    pub async fn receive(&self, body: Sent) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
        let mut upload = self.upload(body);
        let (mut bytes, mut held): (Vec<u8>, Option<OwnedSemaphorePermit>) = (Vec::new(), None);
        while let Some(part) = upload.next().await? {
            let n = bytes.len() + part.len();
            if n > MAX_BYTES {
                return Err(too_large("bytes", MAX_BYTES, n));
            }
            let waited = Instant::now();
            self.take_room(n, &mut held).await?;
            upload.began += waited.elapsed();
            bytes.extend_from_slice(&part);
        }
        Ok((bytes, held))
    }

    /// Waits for budget for `n` bytes in total, unless they are few. A body never needs more than
    /// there is.
    async fn take_room(&self, n: usize, held: &mut Option<OwnedSemaphorePermit>) -> Result<(), ApiError> {
        let more =
            n.min(BODY_BUDGET).saturating_sub(held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if n <= SMALL || more == 0 {
            return Ok(());
        }
        let more = Arc::clone(&self.room).acquire_many_owned(more as u32);
        let more = timeout(BUDGET_TIMEOUT, more).await.map_err(|_| ApiError::busy(BODY_BUDGET))?;
        let more = more.map_err(|_| ApiError::shutting_down())?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }

    /// Decompresses a gzip body, with the same size limit.
    async fn decompress(&self, bytes: Vec<u8>, owner: &Owner) -> Result<Vec<u8>, ApiError> {
        let lane = self.parse_lanes.enter(owner).await;
        let unpack = move || {
            let _lane = lane;
            let mut unpacked = Vec::new();
            let read = GzDecoder::new(&bytes[..]).take(MAX_BYTES as u64 + 1).read_to_end(&mut unpacked);
            read.map_err(|error| ApiError::invalid(format!("the body is no gzip: {error}")))?;
            if unpacked.len() > MAX_BYTES {
                return Err(too_large("bytes", MAX_BYTES, unpacked.len()));
            }
            Ok(unpacked)
        };
        let unpacked = run_low_priority(unpack).await;
        unpacked.ok_or_else(|| ApiError::internal("an internal error while the body was unpacked"))?
    }

    fn upload(&self, body: Sent) -> Upload {
        let (parts, slow) = (body.into_data_stream(), Arc::clone(&self.slow));
        Upload { parts, began: Instant::now(), n_bytes: 0, slow, slow_permit: None }
    }

    /// Rejects a body whose declared size is too large. Most clients read the response only after
    /// they have sent the whole body, so up to a limit it is received and discarded.
    async fn refuse_if_large(&self, request: Request) -> Result<Request, ApiError> {
        let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        let length = length.and_then(|length| length.parse::<usize>().ok());
        let Some(length) = length.filter(|&length| length > MAX_BYTES) else { return Ok(request) };
        if length <= MAX_DISCARDED && !request.headers().contains_key(header::EXPECT) {
            let mut upload = self.upload(request.into_body());
            while upload.next().await?.is_some() {}
        }
        Err(too_large("bytes", MAX_BYTES, length))
    }

    /// Delays the response to a refused large body, one at a time per owner: a client that resends
    /// at once would occupy the threads that others wait for.
    pub async fn hold_refused(&self, n_bytes: usize, owner: &Owner) {
        if n_bytes > SMALL {
            let _lane = self.upload_delay.enter(owner).await;
            sleep(REFUSED_TIME.min(Duration::from_secs_f64(n_bytes as f64 / REFUSED_PACE))).await;
        }
    }

    /// Parses a body, with budget for its values.
    async fn read(
        &self,
        bytes: Vec<u8>,
        owner: &Owner,
        held: &mut Option<OwnedSemaphorePermit>,
    ) -> Result<Value, ApiError> {
        if bytes.len() <= SMALL {
            return parse(&bytes);
        }
        let failed = || ApiError::internal("an internal error while the body was read");
        let _lane = self.parse_lanes.enter(owner).await;
        let counted = run_low_priority(move || (Counts::of(&bytes), bytes)).await;
        let (counts, bytes) = counted.ok_or_else(failed)?;
        if counts.values > MAX_VALUES {
            return Err(too_large("values", MAX_VALUES, counts.values));
        }
        self.take_room(bytes.len() + counts.memory(), held).await?;
        run_low_priority(move || parse(&bytes)).await.ok_or_else(failed)?
    }
}

/// Reports whether a body is compressed with gzip.
fn is_gzip(request: &Request) -> Result<bool, ApiError> {
    let encoding = request.headers().get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?"));
    match encoding.map(str::to_ascii_lowercase).as_deref() {
        None | Some("identity") => Ok(false),
        Some("gzip" | "x-gzip") => Ok(true),
        Some(other) => {
            let message = format!("content-encoding: expected identity or gzip, got {}", shortened(other));
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message))
        }
    }
}

/// Body being received.
struct Upload {
    parts: BodyDataStream,
    began: Instant,
    n_bytes: usize,
    slow: Arc<Semaphore>,
    /// Permit of a slow body.
    slow_permit: Option<OwnedSemaphorePermit>,
}

impl Upload {
    /// Returns the deadline of the next chunk.
    fn deadline(&self) -> Instant {
        self.began + START_TIMEOUT + Duration::from_secs_f64(self.n_bytes as f64 / MIN_PACE)
    }

    /// Returns the next chunk, as long as the body maintains the minimum rate.
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        let mut next = timeout_at(self.began + AT_ONCE, self.parts.next()).await;
        if next.is_err() {
            if self.slow_permit.is_none() {
                self.slow_permit = Some(
                    Arc::clone(&self.slow).try_acquire_owned().map_err(|_| ApiError::too_many_uploads())?,
                );
            }
            next = timeout_at(self.deadline(), self.parts.next()).await;
        }
        let late = |_| {
            let message = "the body did not come: expected 16 KiB of it each second, got less";
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
        };
        let part = next.map_err(late)?.transpose();
        let part = part.map_err(|error| ApiError::invalid(format!("the body did not come: {error}")))?;
        self.n_bytes += part.as_ref().map_or(0, Bytes::len);
        Ok(part)
    }
}

fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| ApiError::invalid(format!("the body is no JSON: {error}")))
}

/// Upper bounds of what a JSON text holds.
struct Counts {
    values: usize,
    containers: usize,
}

impl Counts {
    fn of(bytes: &[u8]) -> Self {
        let mut counts = Self { values: 1, containers: 0 };
        let (mut is_text, mut is_escaped) = (false, false);
        for byte in bytes {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if is_text => is_escaped = true,
                b'"' => is_text = !is_text,
                b',' | b':' | b'[' | b'{' if !is_text => {
                    counts.values += 1;
                    counts.containers += usize::from(matches!(byte, b'[' | b'{'));
                }
                _ => {}
            }
        }
        counts
    }

    /// Returns the memory of the parsed values in bytes, apart from their text.
    fn memory(&self) -> usize {
        self.values * VALUE_BYTES + self.containers * CONTAINER_BYTES
    }
}

pub(super) fn too_large(what: &str, max: usize, n: usize) -> ApiError {
    let message = format!("the body has {n} {what}, at most {max} are read");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_of_a_body_grows_with_its_received_bytes() {
        let bodies = Bodies::default();
        let after = |n_bytes: usize| {
            let upload = Upload { n_bytes, ..bodies.upload(Sent::empty()) };
            upload.deadline() - upload.began
        };
        assert_eq!(after(0), START_TIMEOUT);
        assert_eq!(after(16 << 10), START_TIMEOUT + Duration::from_secs(1));
        // An image of 4 MB at 30 KiB/s takes 137 s.
        assert!(after(4_000_000) > Duration::from_secs(137));
    }

    #[test]
    fn fast_bodies_are_received_at_the_limit_of_slow_ones() {
        let bodies = Bodies::default();
        let slow: Vec<_> = (0..MAX_SLOW).map(|_| Arc::clone(&bodies.slow).try_acquire_owned()).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (bytes, _) = bodies.receive(Sent::from("{}")).await.unwrap();
            assert_eq!(bytes, b"{}");
            let stalled = || Sent::from_stream(futures_util::stream::pending::<std::io::Result<Bytes>>());
            let error = bodies.receive(stalled()).await.unwrap_err();
            assert_eq!(error.object()["code"], 503);
            drop(slow);
            // With a permit it waits longer than that.
            assert!(timeout(4 * AT_ONCE, bodies.receive(stalled())).await.is_err());
        });
    }

    #[test]
    fn the_value_count_is_an_upper_bound() {
        fn count(value: &Value) -> usize {
            1 + match value {
                Value::Array(items) => items.iter().map(count).sum(),
                Value::Object(fields) => fields.values().map(count).sum(),
                _ => 0,
            }
        }
        for text in
            ["1", "[]", "[[0],[0]]", r#"{"a":{"b":[1,2,"x,[{:\",\\"]},"c":null}"#, r#"{"":0}"#, "[[[[]]]]"]
        {
            let n = count(&serde_json::from_str(text).unwrap());
            assert!((n..=2 * n).contains(&Counts::of(text.as_bytes()).values), "{text}: {n}");
        }
        let texts = r#"["a,b,c,d,e,f,g,[[[[", "\",,,,,,\\"]"#;
        assert_eq!(Counts::of(texts.as_bytes()).values, 3);
    }

    #[test]
    fn values_have_budget_beside_their_text() {
        let bodies = Bodies::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let text = format!("[{}[0]]", "[0],".repeat(10_000));
            let mut held = None;
            bodies.read(text.into_bytes(), &None, &mut held).await.unwrap();
            let n = held.unwrap().num_permits();
            assert!((3_600_000..4_000_000).contains(&n), "{n}");
            // More than the whole budget is the whole budget.
            let mut held = None;
            bodies.take_room(2 * BODY_BUDGET, &mut held).await.unwrap();
            assert_eq!(held.unwrap().num_permits(), BODY_BUDGET);
        });
    }
}
