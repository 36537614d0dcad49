//! Event publisher over ZeroMQ, as in vLLM: a PUB socket sends topic, sequence number and batch; a
//! ROUTER socket replays batches for subscribers that detect a gap in the sequence numbers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqError, ZmqMessage};

use super::{EventAddress, KvEvent, KvEventSink, wire};

/// Maximum batches retained for replay.
const BATCHES: usize = 10_000;
/// Maximum bytes of these batches.
const BYTES: usize = 64 << 20;
/// Sequence number that marks the end of a replay.
const END: [u8; 8] = [0xff; 8];
/// Maximum time for a subscriber to receive a replay: others wait.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reason why events cannot be published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// Invalid ZeroMQ address; only TCP is supported.
    #[error("expected an address such as tcp://*:5557, got {0}")]
    Address(String),
    /// The address cannot be bound or connected to.
    #[error("{address}: {why}")]
    Socket {
        /// Address.
        address: String,
        /// Error of the operating system.
        why: String,
    },
    /// The system provides no thread.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Latest batches, by sequence number.
#[derive(Debug, Default)]
struct History {
    batches: VecDeque<Vec<u8>>,
    /// Sequence number of the first batch.
    first: u64,
    n_bytes: usize,
}

impl History {
    /// Adds a batch. Returns its sequence number.
    fn push(&mut self, batch: Vec<u8>) -> u64 {
        self.n_bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > BATCHES || self.n_bytes > BYTES {
            let Some(old) = self.batches.pop_front() else { break };
            self.n_bytes -= old.len();
            self.first += 1;
        }
        self.first + self.batches.len() as u64 - 1
    }

    /// Returns the batches from sequence number `from` on, with their numbers.
    fn since(&self, from: u64) -> Vec<(u64, Vec<u8>)> {
        let numbered = (self.first..).zip(&self.batches);
        numbered
            .filter(|(number, _)| *number >= from)
            .map(|(number, batch)| (number, batch.clone()))
            .collect()
    }
}

type Shared = Arc<Mutex<History>>;

fn locked(history: &Shared) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Publishes events on its own thread until the last [sink](Self::sink) is dropped.
#[derive(Debug)]
pub struct Publisher {
    events: UnboundedSender<Vec<KvEvent>>,
    address: String,
    replay: Option<String>,
    topic: String,
}

impl Publisher {
    /// Publishes under `topic` at `address`: binds if the host is `*`, `0.0.0.0` or `::`, like
    /// vLLM, and connects otherwise. Missed batches are replayed at `replay`, which is bound.
    ///
    /// # Errors
    /// [`PublishError`]
    pub fn open(address: &str, replay: Option<&str>, topic: &str) -> Result<Self, PublishError> {
        let (address, is_bound) = read(address)?;
        let replay = replay.map(read).transpose()?.map(|(replay, _)| replay);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let failed = |address: &str| {
            let address = address.to_owned();
            |error: ZmqError| PublishError::Socket { address, why: error.to_string() }
        };
        let ((publisher, router), address, replay) = runtime.block_on(async {
            let mut publisher = PubSocket::new();
            let at = match is_bound {
                true => publisher.bind(&address).await.map(|at| at.to_string()),
                false => publisher.connect(&address).await.map(|()| address.clone()),
            };
            let at = at.map_err(failed(&address))?;
            let Some(replay) = replay else { return Ok(((publisher, None), at, None)) };
            let mut router = RouterSocket::new();
            let replay_at = router.bind(&replay).await.map_err(failed(&replay))?;
            Ok::<_, PublishError>(((publisher, Some(router)), at, Some(replay_at.to_string())))
        })?;
        let (events, received) = unbounded_channel();
        let (topic, of_messages) = (topic.to_owned(), topic.to_owned());
        let work = move || runtime.block_on(publish(publisher, router, received, of_messages));
        std::thread::Builder::new().name("kv events".to_owned()).spawn(work)?;
        Ok(Self { events, address, replay, topic })
    }

    /// Returns the publishing address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the replay address.
    pub fn replay(&self) -> Option<&str> {
        self.replay.as_deref()
    }

    /// Returns a sink for events to publish.
    pub fn sink(&self) -> KvEventSink {
        let events = self.events.clone();
        let sink = KvEventSink::new(move |batch| {
            // The thread runs as long as a sender exists.
            _ = events.send(batch);
        });
        sink.with_address(EventAddress {
            endpoint: any_host(&self.address),
            replay: self.replay.as_deref().map(any_host),
            topic: self.topic.clone(),
            n_replayed: BATCHES,
        })
    }
}

/// Returns an address with `*` for any host, which subscribers replace by the host of the server.
fn any_host(address: &str) -> String {
    let port = ["tcp://0.0.0.0:", "tcp://[::]:"].into_iter().find_map(|any| address.strip_prefix(any));
    port.map_or_else(|| address.to_owned(), |port| format!("tcp://*:{port}"))
}

/// Parses an address. Returns whether it is to be bound.
fn read(address: &str) -> Result<(String, bool), PublishError> {
    let unknown = || PublishError::Address(address.to_owned());
    let (host, port) =
        address.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':')).ok_or_else(unknown)?;
    let port: u16 = port.parse().map_err(|_| unknown())?;
    match host {
        "" => Err(unknown()),
        "*" | "0.0.0.0" => Ok((format!("tcp://0.0.0.0:{port}"), true)),
        "::" | "[::]" => Ok((format!("tcp://[::]:{port}"), true)),
        _ => Ok((address.to_owned(), false)),
    }
}

/// Publishes events and serves replays.
async fn publish(
    mut publisher: PubSocket,
    router: Option<RouterSocket>,
    mut events: UnboundedReceiver<Vec<KvEvent>>,
    topic: String,
) {
    let history = Shared::default();
    if let Some(router) = router {
        tokio::spawn(serve_replays(router, Arc::clone(&history)));
    }
    while let Some(events) = events.recv().await {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let batch = wire::batch(now.as_secs_f64(), &events);
        let number = locked(&history).push(batch.clone());
        let parts = vec![topic.clone().into_bytes(), number.to_be_bytes().to_vec(), batch];
        if let Err(error) = send(publisher.send(message(parts))).await {
            tracing::warn!(error, number, "KV events are not published");
        }
    }
}

async fn send(sent: impl Future<Output = Result<(), ZmqError>>) -> Result<(), String> {
    sent.await.map_err(|error| error.to_string())
}

fn message(parts: Vec<Vec<u8>>) -> ZmqMessage {
    let parts: Vec<Bytes> = parts.into_iter().map(Bytes::from).collect();
    ZmqMessage::try_from(parts).expect("a message has parts")
}

/// Replays batches from a sequence number on: a request `[identity, "", number]` is answered by
/// `[identity, "", number, batch]` for each batch, and an end mark.
async fn serve_replays(mut router: RouterSocket, history: Shared) {
    loop {
        let request = match router.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                tracing::warn!(%error, "replay of KV events has ended");
                return;
            }
        };
        let [identity, empty, from] = &request[..] else { continue };
        let Ok(from) = <[u8; 8]>::try_from(&from[..]) else { continue };
        let batches = locked(&history).since(u64::from_be_bytes(from));
        let batches = batches.into_iter().map(|(number, batch)| (number.to_be_bytes(), batch));
        let answers = async {
            for (number, batch) in batches.chain([(END, Vec::new())]) {
                let parts = vec![identity.to_vec(), empty.to_vec(), number.to_vec(), batch];
                send(router.send(message(parts))).await?;
            }
            Ok::<(), String>(())
        };
        match tokio::time::timeout(PATIENCE, answers).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(error, "a subscriber left during a replay of KV events"),
            Err(_) => tracing::warn!("a subscriber does not receive a replay of KV events"),
        }
    }
}

#[cfg(test)]
mod tests {
    use zeromq::{DealerSocket, SubSocket};

    use super::*;
    use crate::events::Medium;

    fn removed(name: u64) -> Vec<KvEvent> {
        vec![KvEvent::Removed { blocks: vec![name], medium: Medium::Device }]
    }

    fn here(address: &str) -> String {
        address.replace("0.0.0.0", "127.0.0.1")
    }

    #[test]
    fn subscribers_receive_events_and_replays_of_missed_ones() {
        let publisher = Publisher::open("tcp://*:0", Some("tcp://*:0"), "kv@here").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(check_subscribers(publisher));
    }

    async fn check_subscribers(publisher: Publisher) {
        let sink = publisher.sink();
        (sink.send)(removed(1));
        let mut listener = SubSocket::new();
        listener.connect(&here(publisher.address())).await.unwrap();
        listener.subscribe("kv@").await.unwrap();
        let mut foreign = SubSocket::new();
        foreign.connect(&here(publisher.address())).await.unwrap();
        foreign.subscribe("other").await.unwrap();
        // The arrival of a subscription is only observable by a received message.
        let (mut n_published, first) = (
            1u64,
            loop {
                (sink.send)(removed(1));
                let received = tokio::time::timeout(Duration::from_millis(20), listener.recv()).await;
                if let Ok(received) = received {
                    break received.unwrap().into_vec();
                }
            },
        );
        assert_eq!((&first[0][..], first.len()), (&b"kv@here"[..], 3));
        let number = |part: &[u8]| u64::from_be_bytes(part.try_into().unwrap());
        // Published before the subscription and missed.
        let missed = number(&first[1]);
        assert!(missed > 0);
        (sink.send)(removed(2));
        loop {
            let received = listener.recv().await.unwrap().into_vec();
            n_published = n_published.max(number(&received[1]) + 1);
            if received[2][10..] == wire::batch(0.0, &removed(2))[10..] {
                break;
            }
        }
        let mut requester = DealerSocket::new();
        requester.connect(&here(publisher.replay().unwrap())).await.unwrap();
        // An invalid request is ignored.
        requester.send(message(vec![vec![], vec![1]])).await.unwrap();
        for from in [0, missed] {
            requester.send(message(vec![vec![], from.to_be_bytes().to_vec()])).await.unwrap();
            for expected in from..n_published {
                let answer = requester.recv().await.unwrap().into_vec();
                assert_eq!((answer[0].len(), number(&answer[1])), (0, expected));
                let expected_events = if expected + 1 == n_published { removed(2) } else { removed(1) };
                assert_eq!(answer[2][10..], wire::batch(0.0, &expected_events)[10..]);
            }
            let end = requester.recv().await.unwrap().into_vec();
            assert_eq!((&end[1][..], end[2].len()), (&END[..], 0));
        }
        let nothing = tokio::time::timeout(Duration::from_millis(1), foreign.recv()).await;
        assert!(nothing.is_err(), "another topic");
    }

    #[test]
    fn replay_history_is_limited_in_batches_and_bytes() {
        let mut history = History::default();
        let n = BATCHES as u64 + 5;
        for number in 0..n {
            assert_eq!(history.push(vec![0; 8]), number);
        }
        assert_eq!((history.since(0).len(), history.since(0)[0].0), (BATCHES, 5));
        assert_eq!((history.since(n - 2).len(), history.since(n).len()), (2, 0));
        assert_eq!(history.push(vec![0; BYTES]), n);
        assert_eq!(history.since(0).len(), 1);
    }

    #[test]
    fn invalid_addresses_are_rejected_with_one_line() {
        for address in ["5557", "tcp://*", "tcp://:1", "tcp://*:70000", "ipc:///tmp/x", "udp://*:1"] {
            let error = Publisher::open(address, None, "").unwrap_err().to_string();
            assert!(error.contains(address) && error.lines().count() == 1, "{error}");
        }
        let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let address = format!("tcp://0.0.0.0:{}", taken.local_addr().unwrap().port());
        let error = Publisher::open(&address, None, "").unwrap_err().to_string();
        assert!(error.contains(&address) && error.lines().count() == 1, "{error}");
    }
}
