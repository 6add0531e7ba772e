//! Drains request bodies that the server does not read to the end. A client may read the response only after it has
//! sent everything, and may then reuse the connection. So the rest of the body is read and discarded, within limits,
//! while the response is sent. Otherwise the connection would be closed, and the client might miss the response or lose
//! its next request.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};

/// How much of a body is discarded beyond the body limit, and for how long.
const MOST_BYTES: usize = 32 << 20;
const LONGEST: Duration = Duration::from_secs(5);

/// Wraps the request so that its body is always drained. `limit` is the server's body limit.
pub(crate) fn taken_to_its_end(request: Request, limit: usize) -> Request {
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared: Option<usize> = declared.and_then(|length| length.to_str().ok()?.parse().ok());
    // A client that sent `Expect` has not started its body, and a body beyond the limit would not be drained
    // completely.
    let bearable = !request.headers().contains_key(header::EXPECT)
        && declared.is_none_or(|length| length <= limit.saturating_add(MOST_BYTES));
    match bearable && !request.body().is_end_stream() {
        true => request.map(|body| Body::new(DrainedBody { body: Some(body), left: limit.saturating_add(MOST_BYTES) })),
        false => request,
    }
}

struct DrainedBody {
    /// `None` once its end was reached.
    body: Option<Body>,
    /// Bytes that may still be read.
    left: usize,
}

impl HttpBody for DrainedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => self.left = self.left.saturating_sub(frame.data_ref().map_or(0, Bytes::len)),
            Some(Err(_)) | None => self.body = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for DrainedBody {
    fn drop(&mut self) {
        let Some(mut body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let mut left = self.left;
        let drained = async move {
            while let Some(Ok(frame)) = body.frame().await {
                match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                    Some(rest) => left = rest,
                    None => return,
                }
            }
        };
        // The connection closes once nobody reads from it any more.
        runtime.spawn(tokio::time::timeout(LONGEST, drained));
    }
}
