//! Accepts connections and serves each in its own task, up to the limit.

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

use super::settings::StartError;
use super::write_timeout::BoundedStream;
use crate::api::{Api, GaugeGuard, ReadMeter, router, stopped};

/// The maximum size of a request's head.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// How much a connection reads at a time. A body is read in such pieces, so a connection whose body nobody consumes
/// buffers no more than this.
const MAX_READ_BYTES: usize = 64 << 10;
/// How long to wait after a failed accept, which is mostly due to a lack of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

pub(super) async fn bind(addr: &str) -> Result<TcpListener, StartError> {
    TcpListener::bind(addr).await.map_err(|source| StartError::Bind { addr: addr.to_owned(), source })
}

/// Accepts until the server stops. Every connection holds `open`, so the server knows when all have ended.
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
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        // Closed immediately rather than left in the backlog, so that the client notices.
        let Ok(permit) = room.clone().try_acquire_owned() else {
            metrics::counter!("eddyline_connections_refused_total").increment(1);
            continue;
        };
        let _ = stream.set_nodelay(true);
        let connection = Connection { router: router.clone(), http: http.clone(), stopping: stopping.clone() };
        let (tls, open) = (tls.clone(), open.clone());
        tokio::spawn(async move {
            let _counted = GaugeGuard::new("eddyline_connections");
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
        let stream = TokioIo::new(BoundedStream::new(stream, meter.clone()));
        // The handler that upgrades the connection to a WebSocket takes the meter from its request.
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
            tracing::debug!("connection failed: {error}");
        }
    }
}
