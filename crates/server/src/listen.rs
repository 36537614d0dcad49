//! Connections of HTTP and gRPC: accept, limits and graceful shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use futures_util::future::join_all;
use hyper::server::conn::http1;
#[cfg(feature = "grpc")]
use hyper::server::conn::http2;
#[cfg(feature = "grpc")]
use hyper_util::rt::TokioExecutor;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
#[cfg(feature = "tls")]
use tokio_rustls::TlsAcceptor;
use tower_http::add_extension::AddExtension;
use tower_http::cors::CorsLayer;

use crate::address::Address;
use crate::error::ServeError;
#[cfg(feature = "grpc")]
use crate::grpc;
use crate::http::{ConnectionAddress, Server, router};
use crate::options::Options;
#[cfg(feature = "tls")]
use crate::tls;

/// Maximum concurrent connections of a protocol; others wait in the backlog.
const CONNECTIONS: usize = 1024;
/// Timeout of a request head, and the same once half of all connections are in use.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_IN_CROWD: Duration = Duration::from_secs(1);
/// Polling interval for the end of the last response.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time that a shutdown waits for the last responses.
const DRAIN: Duration = Duration::from_secs(120);
/// Pause when the system has no more sockets.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Maximum concurrent calls of a gRPC connection.
#[cfg(feature = "grpc")]
const CALLS: u32 = 1024;
/// Interval at which a gRPC connection is probed, and the time it has to respond.
#[cfg(feature = "grpc")]
const PROBE: Duration = Duration::from_secs(30);

/// Addresses that a server listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listening {
    /// HTTP.
    pub http: SocketAddr,
    /// gRPC, if it is served.
    pub grpc: Option<SocketAddr>,
}

/// Uninhabited without TLS.
#[cfg(not(feature = "tls"))]
#[derive(Clone)]
pub(crate) enum TlsAcceptor {}

/// TLS acceptors, if TLS is configured: each protocol has its own name in a handshake.
#[derive(Default)]
pub(crate) struct Acceptors {
    http: Option<TlsAcceptor>,
    #[cfg(feature = "grpc")]
    grpc: Option<TlsAcceptor>,
}

impl Acceptors {
    /// Creates the acceptors from the files of the options.
    ///
    /// # Errors
    /// [`ServeError::Tls`]
    pub fn new(options: &Options) -> Result<Self, ServeError> {
        match &options.tls {
            None => Ok(Self::default()),
            #[cfg(feature = "tls")]
            Some(files) => Ok(Self {
                http: Some(tls::acceptor(files, b"http/1.1")?),
                #[cfg(feature = "grpc")]
                grpc: Some(tls::acceptor(files, b"h2")?),
            }),
            #[cfg(not(feature = "tls"))]
            Some(none) => match *none {},
        }
    }
}

/// Protocol of a listener.
#[derive(Clone, Copy)]
enum Protocol {
    Http,
    #[cfg(feature = "grpc")]
    Grpc,
}

/// Listener and what it serves.
struct Endpoint {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    app: Router,
    protocol: Protocol,
}

/// Serves until a shutdown signal arrives or a worker thread panics.
pub(crate) async fn listen(
    server: Arc<Server>,
    cors: CorsLayer,
    acceptors: Acceptors,
    mut has_broken: mpsc::Receiver<()>,
    ready: impl FnOnce(Listening),
) -> Result<(), ServeError> {
    let listener = bind(&server.options.address).await?;
    let (app, protocol) = (router(Arc::clone(&server), cors), Protocol::Http);
    let http = Endpoint { listener, tls: acceptors.http, app, protocol };
    #[cfg(feature = "grpc")]
    let grpc = match &server.options.grpc {
        Some(address) => {
            let (listener, app) = (bind(address).await?, grpc::router(Arc::clone(&server)));
            Some(Endpoint { listener, tls: acceptors.grpc, app, protocol: Protocol::Grpc })
        }
        None => None,
    };
    #[cfg(not(feature = "grpc"))]
    let grpc: Option<Endpoint> = None;
    let of_grpc = grpc.as_ref().map(|endpoint| endpoint.listener.local_addr()).transpose()?;
    let listening = Listening { http: http.listener.local_addr()?, grpc: of_grpc };
    server.http_port.store(listening.http.port(), Ordering::Relaxed);
    // A supervisor may send a signal as soon as the server is ready.
    let signals = Signals::listen()?;
    ready(listening);
    notify_service_manager();
    let graceful = GracefulShutdown::new();
    let endpoints = std::iter::once(&http).chain(&grpc);
    let take = join_all(endpoints.map(|endpoint| endpoint.accept(&graceful)));
    // Until the last response has ended, new requests are still refused with a reason.
    tokio::select! {
        _ = take => {}
        () = end(server, signals) => {}
        Some(()) = has_broken.recv() => return Err(ServeError::Broken),
    }
    _ = tokio::time::timeout(HEAD, graceful.shutdown()).await;
    Ok(())
}

/// Binds an address.
async fn bind(address: &Address) -> Result<TcpListener, ServeError> {
    let listener = TcpListener::bind((address.host.as_str(), address.port)).await;
    listener.map_err(|source| ServeError::Listen { address: address.clone(), source })
}

impl Endpoint {
    /// Accepts connections forever.
    async fn accept(&self, graceful: &GracefulShutdown) {
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let permit = Arc::clone(&room).acquire_owned().await;
            let head = if room.available_permits() < CONNECTIONS / 2 { HEAD_IN_CROWD } else { HEAD };
            match (self.listener.accept().await, permit) {
                (Ok((stream, _)), Ok(permit)) => {
                    let (app, protocol) = (self.app.clone(), self.protocol);
                    let connection = Connection { head, app, protocol, permit };
                    connection.start(stream, self.tls.clone(), graceful.watcher());
                }
                (Err(error), _) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                (_, Err(_)) => return,
            }
        }
    }
}

/// Connection and what it serves.
struct Connection {
    /// Timeout of a request head.
    head: Duration,
    app: Router,
    protocol: Protocol,
    permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Serves the connection in its own task.
    fn start(self, stream: TcpStream, tls: Option<TlsAcceptor>, watcher: Watcher) {
        let address = stream.local_addr().map(ConnectionAddress).unwrap_or_default();
        // A token is a small packet that must not be delayed.
        _ = stream.set_nodelay(true);
        tokio::spawn(async move {
            match tls {
                None => self.serve(stream, address, watcher).await,
                #[cfg(feature = "tls")]
                Some(tls) => match tokio::time::timeout(self.head, tls.accept(stream)).await {
                    Ok(Ok(stream)) => self.serve(stream, address, watcher).await,
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake timed out"),
                },
                #[cfg(not(feature = "tls"))]
                Some(none) => match none {},
            }
        });
    }

    /// Serves requests until the connection ends.
    async fn serve(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        address: ConnectionAddress,
        watcher: Watcher,
    ) {
        let Self { head, app, protocol, permit } = self;
        let app = TowerToHyperService::new(AddExtension::new(app, address));
        let stream = TokioIo::new(stream);
        let ended = match protocol {
            Protocol::Http => {
                let mut http = http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(head);
                watcher.watch(http.serve_connection(stream, app)).await
            }
            #[cfg(feature = "grpc")]
            Protocol::Grpc => {
                let mut http = http2::Builder::new(TokioExecutor::new());
                http.timer(TokioTimer::new()).max_concurrent_streams(CALLS);
                http.keep_alive_interval(Some(PROBE)).keep_alive_timeout(PROBE);
                watcher.watch(http.serve_connection(stream, app)).await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke");
        }
        drop(permit);
    }
}

/// Returns once a shutdown signal has arrived and the last response has ended, or at a second
/// signal.
async fn end(server: Arc<Server>, mut signals: Signals) {
    signals.recv().await;
    tracing::info!("shutting down: no more work is accepted");
    server.is_shutting_down.store(true, Ordering::Relaxed);
    let drained = async {
        while Arc::strong_count(&server.work) > 1 {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        () = drained => {}
        () = tokio::time::sleep(DRAIN) => tracing::warn!("the last responses take too long: they are aborted"),
        () = signals.recv() => tracing::warn!("second signal: the last responses are aborted"),
    }
}

/// Shutdown signals, received from now on.
#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 3]);

/// Signal for a write beyond the file size limit; the same number on Linux and on macOS.
#[cfg(unix)]
const SIGXFSZ: i32 = 25;

#[cfg(unix)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        // From now on such a write fails like one to a full disk: the conversation is not saved,
        // and the server continues.
        drop(signal(SignalKind::from_raw(SIGXFSZ))?);
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// Returns when a signal arrives.
    async fn recv(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {}, _ = hangup.recv() => {} }
    }
}

/// Shutdown signal.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self)
    }

    /// Returns when the signal arrives.
    async fn recv(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            // No signal can be received.
            std::future::pending::<()>().await;
        }
    }
}

/// Notifies systemd that the server is ready, if requested.
fn notify_service_manager() {
    #[cfg(unix)]
    if let Some(path) = std::env::var_os("NOTIFY_SOCKET") {
        let sent = std::os::unix::net::UnixDatagram::unbound()
            .and_then(|socket| socket.send_to(b"READY=1", std::path::Path::new(&path)));
        if let Err(error) = sent {
            tracing::warn!(%error, "the service manager cannot be notified");
        }
    }
}
