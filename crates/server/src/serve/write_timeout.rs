//! Times out writes to a peer that does not read, so that nothing waits for it for ever, and lets a socket read only as
//! much as the memory budget allows.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::api::{MayRead, ReadMeter};

/// A peer must read something at least this often.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to wait before reading again when the budget is used up.
const READ_AGAIN: Duration = Duration::from_millis(50);

pub(super) struct BoundedStream<S> {
    stream: S,
    meter: Arc<ReadMeter>,
    /// Runs while reading is not allowed.
    read_again: Pin<Box<Sleep>>,
    /// Runs while a write is pending.
    until: Pin<Box<Sleep>>,
    waiting: bool,
    write_timeout: Duration,
}

impl<S> BoundedStream<S> {
    pub fn new(stream: S, meter: Arc<ReadMeter>) -> BoundedStream<S> {
        BoundedStream::with(stream, meter, WRITE_TIMEOUT)
    }

    fn with(stream: S, meter: Arc<ReadMeter>, write_timeout: Duration) -> BoundedStream<S> {
        let (read_again, until) = (Box::pin(sleep(READ_AGAIN)), Box::pin(sleep(write_timeout)));
        BoundedStream { stream, meter, read_again, until, waiting: false, write_timeout }
    }

    /// Passes on the result of a write, or fails if it has been pending too long.
    fn bounded<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = false;
            return written;
        }
        if !self.waiting {
            self.waiting = true;
            self.until.as_mut().reset(Instant::now() + self.write_timeout);
        }
        ready!(self.until.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.meter.may_read() {
            MayRead::Now => {}
            MayRead::Later => {
                self.read_again.as_mut().reset(Instant::now() + READ_AGAIN);
                // The sleep has just been reset, so polling it only registers the waker.
                let _ = self.read_again.as_mut().poll(cx);
                return Poll::Pending;
            }
            MayRead::Never => {
                let why = "the message is incomplete and takes too long or too much memory";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
            }
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.meter.came(buf.filled().len() - before);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.bounded(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.bounded(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.bounded(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.bounded(cx, shut)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_reader_that_takes_nothing_is_given_up_and_one_that_reads_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut ours = BoundedStream::with(ours, Arc::default(), Duration::from_millis(50));
        let error = ours.write_all(&[0; 100]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        let mut taken = [0; 16];
        theirs.read_exact(&mut taken).await.unwrap();
        ours.write_all(b"more").await.unwrap();
        theirs.read_exact(&mut taken[..4]).await.unwrap();
        assert_eq!(&taken[..4], b"more");
    }
}
