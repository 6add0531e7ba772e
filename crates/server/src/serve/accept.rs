//! Connections: accepted one by one, served each by a task, never more than are allowed.

use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use super::patience::Patient;
use super::settings::StartError;
use crate::api::{Api, Counted, ReadMeter, router, stopped};

/// The head of a request takes at most this many bytes.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// What a connection reads at a time. A body is read in many such pieces, so that a connection whose body nobody takes
/// keeps no more than this.
const MAX_READ_BYTES: usize = 64 << 10;
/// How long to wait after an accept that failed, for want of file descriptors mostly.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

pub(super) async fn bind(addr: &str) -> Result<TcpListener, StartError> {
    TcpListener::bind(addr).await.map_err(|source| StartError::Bind { addr: addr.to_owned(), source })
}

/// Accepts until the server stops. `open` is held by every connection, so that the server knows when all have ended.
pub(super) async fn run(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    api: Api,
    mut stopping: watch::Receiver<bool>,
    open: mpsc::Sender<()>,
) {
    let router = router(api.clone());
    let header_timeout = api.about().settings.header_timeout;
    let room = Arc::new(Semaphore::new(api.about().settings.max_connections));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(header_timeout).max_header_size(MAX_HEAD_BYTES);
    http.max_buf_size(MAX_READ_BYTES);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(&mut stopping) => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("a connection could not be accepted: {error}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        // Closed at once rather than left in the backlog, so that whoever comes knows.
        let Ok(permit) = room.clone().try_acquire_owned() else {
            metrics::counter!("eddyline_connections_refused_total").increment(1);
            continue;
        };
        let _ = stream.set_nodelay(true);
        let connection = Connection { router: router.clone(), http: http.clone(), stopping: stopping.clone() };
        let (tls, open) = (tls.clone(), open.clone());
        tokio::spawn(async move {
            let _counted = Counted::new("eddyline_connections");
            match tls {
                Some(tls) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(header_timeout, tls.accept(stream)).await {
                        connection.serve(stream).await;
                    }
                }
                None => connection.serve(stream).await,
            }
            drop((permit, open));
        });
    }
}

struct Connection {
    router: axum::Router,
    http: http1::Builder,
    stopping: watch::Receiver<bool>,
}

impl Connection {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(mut self, stream: S) {
        let meter = Arc::new(ReadMeter::default());
        let stream = TokioIo::new(Patient::new(stream, meter.clone()));
        // Whoever makes a socket of the connection finds the meter in its request.
        let service = self.router.map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(meter.clone());
            request
        });
        let connection = self.http.serve_connection(stream, TowerToHyperService::new(service)).with_upgrades();
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = stopped(&mut self.stopping) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!("a connection ended: {error}");
        }
    }
}
