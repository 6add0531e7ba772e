//! Detects a proxy that shares server connections between clients (PgBouncer).
//!
//! Behind one, statements must not be prepared: they would be kept in a session that the next transaction does not use,
//! under names that other processes also use, so another process's statement could run. So waiting for an error is too
//! late. Such a proxy cannot pass on the key with which a client cancels its queries, since many clients share a server
//! session: it invents its own key, whose process id is not that of the server's process.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Client;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use super::pg_error::PgResult;

/// The size of a cancel request: length, code, process id and secret.
const REQUEST_BYTES: usize = 16;

pub(super) async fn is_between(client: &Client) -> PgResult<bool> {
    let told = process_told(client).await?;
    let row = client.query_typed_one("SELECT pg_backend_pid()", &[]).await?;
    Ok(told != Some(row.try_get(0)?))
}

/// The process id that was sent with the connection. The driver exposes it only in its cancel request.
async fn process_told(client: &Client) -> PgResult<Option<i32>> {
    let sent = Recorder::default();
    client.cancel_token().cancel_query_raw(sent.clone(), Unencrypted).await?;
    let bytes = sent.0.lock().unwrap_or_else(PoisonError::into_inner);
    let request = bytes.len().checked_sub(REQUEST_BYTES).and_then(|at| bytes.get(at..));
    let process = request.and_then(|request| request.get(8..12)?.try_into().ok());
    Ok(process.map(i32::from_be_bytes))
}

/// Records what is written to it, and accepts everything.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<u8>>>);

impl AsyncRead for Recorder {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        into.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Recorder {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Recorder {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

struct Unencrypted;

impl TlsConnect<Recorder> for Unencrypted {
    type Stream = Recorder;
    type Error = Infallible;
    type Future = Ready<Result<Recorder, Infallible>>;

    fn connect(self, stream: Recorder) -> Self::Future {
        ready(Ok(stream))
    }
}
