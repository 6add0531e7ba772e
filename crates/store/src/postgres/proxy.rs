//! Finds out whether there is a proxy between us and the server that lends its connections to many clients (PgBouncer).
//!
//! Behind one, statements must not be prepared: they would be kept in a session that the next transaction does not see,
//! under names that other processes use too, so that the statement of another process could run. Waiting for an error is
//! therefore too late. Such a proxy cannot pass on the key by which a client cancels its queries, since a session of the
//! server has many clients: it makes up its own, and the process id in it is not that of the server's process.

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

/// Of a cancel request: its length, its code, the process id and the secret.
const REQUEST_BYTES: usize = 16;

pub(super) async fn is_between(client: &Client) -> PgResult<bool> {
    let told = process_told(client).await?;
    let row = client.query_typed_one("SELECT pg_backend_pid()", &[]).await?;
    Ok(told != Some(row.try_get(0)?))
}

/// The process id that came with the connection. The driver shows it only in the request that it would send to cancel.
async fn process_told(client: &Client) -> PgResult<Option<i32>> {
    let sent = Recorder::default();
    client.cancel_token().cancel_query_raw(sent.clone(), Unencrypted).await?;
    let bytes = sent.0.lock().unwrap_or_else(PoisonError::into_inner);
    let request = bytes.len().checked_sub(REQUEST_BYTES).and_then(|at| bytes.get(at..));
    let process = request.and_then(|request| request.get(8..12)?.try_into().ok());
    Ok(process.map(i32::from_be_bytes))
}

/// Keeps what is written to it, and agrees to everything.
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
