//! A connection whose other side does not take what is written to it is given up after a while: nothing waits for ever
//! for a reader. And a socket reads only as much as the memory budget has room for.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::api::{MayRead, ReadMeter};

/// A reader takes something at least this often.
const SLOWEST: Duration = Duration::from_secs(30);

/// Whoever may not read now looks again after this long.
const READ_AGAIN: Duration = Duration::from_millis(50);

pub(super) struct Patient<S> {
    stream: S,
    meter: Arc<ReadMeter>,
    /// Runs while nothing may be read.
    read_again: Pin<Box<Sleep>>,
    /// Runs while a write waits.
    until: Pin<Box<Sleep>>,
    waiting: bool,
    patience: Duration,
}

impl<S> Patient<S> {
    pub fn new(stream: S, meter: Arc<ReadMeter>) -> Patient<S> {
        Patient::with(stream, meter, SLOWEST)
    }

    fn with(stream: S, meter: Arc<ReadMeter>, patience: Duration) -> Patient<S> {
        let (read_again, until) = (Box::pin(sleep(READ_AGAIN)), Box::pin(sleep(patience)));
        Patient { stream, meter, read_again, until, waiting: false, patience }
    }

    /// The outcome of a write, or that it has waited too long.
    fn bounded<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = false;
            return written;
        }
        if !self.waiting {
            self.waiting = true;
            self.until.as_mut().reset(Instant::now() + self.patience);
        }
        ready!(self.until.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the other side does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.meter.may_read() {
            MayRead::Now => {}
            MayRead::Later => {
                self.read_again.as_mut().reset(Instant::now() + READ_AGAIN);
                // It has just begun, so that this only says who is to be woken.
                let _ = self.read_again.as_mut().poll(cx);
                return Poll::Pending;
            }
            MayRead::Never => {
                let why = "the message is not complete, and takes too long or too much memory";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
            }
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.meter.came(buf.filled().len() - before);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
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
        let mut ours = Patient::with(ours, Arc::default(), Duration::from_millis(50));
        let error = ours.write_all(&[0; 100]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        let mut taken = [0; 16];
        theirs.read_exact(&mut taken).await.unwrap();
        ours.write_all(b"more").await.unwrap();
        theirs.read_exact(&mut taken[..4]).await.unwrap();
        assert_eq!(&taken[..4], b"more");
    }
}
