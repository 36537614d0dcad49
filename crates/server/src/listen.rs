//! Connections: taken, kept from taking forever, and brought to their end.

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

use crate::ServeError;
use crate::http::{Server, router};

/// Connections at once; others wait to be taken.
const CONNECTIONS: usize = 1024;
/// The longest that the head of a request may take to come, and while half of all connections are taken.
const HEAD: Duration = Duration::from_secs(10);
const HEAD_IN_CROWD: Duration = Duration::from_secs(1);
/// How often it is looked whether the last answer has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The longest that the end waits for the last answers.
const DRAIN: Duration = Duration::from_secs(120);
/// How long to wait when the system has no more sockets.
const BREATH: Duration = Duration::from_millis(100);

/// Without TLS nobody asks for any.
#[cfg(not(feature = "tls"))]
#[derive(Clone)]
pub(crate) enum TlsAcceptor {}

/// Listens until the process is told to end, or a thread that has a model has broken.
pub(crate) async fn listen(
    server: Arc<Server>,
    (cors, tls): (CorsLayer, Option<TlsAcceptor>),
    mut has_broken: mpsc::Receiver<()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    let (host, port) = server.options.address.clone();
    let listener = TcpListener::bind((host.as_str(), port)).await;
    let listener = listener.map_err(|source| ServeError::Listen { host, port, source })?;
    // Whoever is told that it is ready may tell it to end.
    let signals = Signals::listen()?;
    ready(listener.local_addr()?);
    tell_service_manager();
    let app = router(Arc::clone(&server), cors);
    let graceful = GracefulShutdown::new();
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let take = async {
        loop {
            let permit = Arc::clone(&room).acquire_owned().await;
            let head = if room.available_permits() < CONNECTIONS / 2 { HEAD_IN_CROWD } else { HEAD };
            match (listener.accept().await, permit) {
                (Ok((stream, _)), Ok(permit)) => {
                    talk((stream, tls.clone()), (permit, head), app.clone(), graceful.watcher())
                }
                (Err(error), _) => {
                    tracing::warn!(%error, "a connection cannot be taken");
                    tokio::time::sleep(BREATH).await;
                }
                (_, Err(_)) => return,
            }
        }
    };
    // Until the last answer has ended others are still told why there is none for them.
    tokio::select! {
        () = take => {}
        () = end(server, signals) => {}
        Some(()) = has_broken.recv() => return Err(ServeError::Broken),
    }
    _ = tokio::time::timeout(HEAD, graceful.shutdown()).await;
    Ok(())
}

/// Serves one connection, whatever becomes of others.
fn talk(
    (stream, tls): (TcpStream, Option<TlsAcceptor>),
    (permit, head): (OwnedSemaphorePermit, Duration),
    app: axum::Router,
    watcher: Watcher,
) {
    // A token is a small packet, and somebody waits for it.
    _ = stream.set_nodelay(true);
    tokio::spawn(async move {
        match tls {
            None => serve(stream, head, app, watcher).await,
            #[cfg(feature = "tls")]
            Some(tls) => match tokio::time::timeout(head, tls.accept(stream)).await {
                Ok(Ok(stream)) => serve(stream, head, app, watcher).await,
                Ok(Err(error)) => tracing::debug!(%error, "a connection does not speak TLS as it should"),
                Err(_) => tracing::debug!("a connection speaks no TLS"),
            },
            #[cfg(not(feature = "tls"))]
            Some(none) => match none {},
        }
        drop(permit);
    });
}

/// Answers what comes over a connection until it ends.
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

/// Returns when the process was told to end and the last answer has ended, or it is told again.
async fn end(server: Arc<Server>, mut signals: Signals) {
    signals.come().await;
    tracing::info!("told to end: no more work is taken on");
    server.is_leaving.store(true, Ordering::Relaxed);
    let drained = async {
        while Arc::strong_count(&server.work) > 1 {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    tokio::select! {
        () = drained => {}
        () = tokio::time::sleep(DRAIN) => tracing::warn!("the last answers take too long: they are broken off"),
        () = signals.come() => tracing::warn!("told to end again: the last answers are broken off"),
    }
}

/// Signals that tell the process to end, listened for from now on.
#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 3]);

/// Sent to who writes beyond the largest file that it may; the same number on Linux and on macOS.
#[cfg(unix)]
const SIGXFSZ: i32 = 25;

#[cfg(unix)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        // From now on the write fails instead, as on a full disk: what is put away is left out, and the server goes on.
        drop(signal(SignalKind::from_raw(SIGXFSZ))?);
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// Returns when one comes.
    async fn come(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {}, _ = hangup.recv() => {} }
    }
}

/// The signal that tells the process to end.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self)
    }

    /// Returns when it comes.
    async fn come(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            // Nobody can tell.
            std::future::pending::<()>().await;
        }
    }
}

/// Tells systemd that the server is ready, where it asks to be told.
fn tell_service_manager() {
    #[cfg(unix)]
    if let Some(path) = std::env::var_os("NOTIFY_SOCKET") {
        let sent = std::os::unix::net::UnixDatagram::unbound()
            .and_then(|socket| socket.send_to(b"READY=1", std::path::Path::new(&path)));
        if let Err(error) = sent {
            tracing::warn!(%error, "the service manager cannot be told");
        }
    }
}
