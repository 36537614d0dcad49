//! Connections: accept, limits and graceful shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
#[cfg(feature = "tls")]
use tokio_rustls::TlsAcceptor;
use tower_http::cors::CorsLayer;

use crate::error::ServeError;
use crate::http::{Server, router};

/// Maximum concurrent connections; others wait in the backlog.
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

/// Uninhabited without TLS.
#[cfg(not(feature = "tls"))]
#[derive(Clone)]
pub(crate) enum TlsAcceptor {}

/// Serves until a shutdown signal arrives or a worker thread panics.
pub(crate) async fn listen(
    server: Arc<Server>,
    cors: CorsLayer,
    tls: Option<TlsAcceptor>,
    mut has_broken: mpsc::Receiver<()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    let (host, port) = server.options.address.clone();
    let listener = TcpListener::bind((host.as_str(), port)).await;
    let listener = listener.map_err(|source| ServeError::Listen { host, port, source })?;
    // A supervisor may send a signal as soon as the server is ready.
    let signals = Signals::listen()?;
    ready(listener.local_addr()?);
    notify_service_manager();
    let app = router(Arc::clone(&server), cors);
    let graceful = GracefulShutdown::new();
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let take = async {
        loop {
            let permit = Arc::clone(&room).acquire_owned().await;
            let head = if room.available_permits() < CONNECTIONS / 2 { HEAD_IN_CROWD } else { HEAD };
            match (listener.accept().await, permit) {
                (Ok((stream, _)), Ok(permit)) => {
                    serve_connection(stream, tls.clone(), permit, head, app.clone(), graceful.watcher());
                }
                (Err(error), _) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                (_, Err(_)) => return,
            }
        }
    };
    // Until the last response has ended, new requests are still refused with a reason.
    tokio::select! {
        () = take => {}
        () = end(server, signals) => {}
        Some(()) = has_broken.recv() => return Err(ServeError::Broken),
    }
    _ = tokio::time::timeout(HEAD, graceful.shutdown()).await;
    Ok(())
}

/// Serves one connection in its own task.
fn serve_connection(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    permit: OwnedSemaphorePermit,
    head: Duration,
    app: axum::Router,
    watcher: Watcher,
) {
    // A token is a small packet that must not be delayed.
    _ = stream.set_nodelay(true);
    tokio::spawn(async move {
        match tls {
            None => serve(stream, head, app, watcher).await,
            #[cfg(feature = "tls")]
            Some(tls) => match tokio::time::timeout(head, tls.accept(stream)).await {
                Ok(Ok(stream)) => serve(stream, head, app, watcher).await,
                Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                Err(_) => tracing::debug!("a TLS handshake timed out"),
            },
            #[cfg(not(feature = "tls"))]
            Some(none) => match none {},
        }
        drop(permit);
    });
}

/// Serves requests of a connection until it ends.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    head: Duration,
    app: axum::Router,
    watcher: Watcher,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection broke");
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
