//! Bodies that nobody reads to their end. Whoever sends one may listen only once everything is sent, and may send the next
//! request on the same connection: what is left is taken and thrown away, as much as is bearable, while the answer is on
//! its way. Without that the connection would be closed, and the client might never hear why, or lose its next request.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};

/// Of a body so many bytes beyond what is read at most are thrown away, for so long.
const MOST_BYTES: usize = 32 << 20;
const LONGEST: Duration = Duration::from_secs(5);

/// The same request, whose body is taken to its end whatever becomes of it. `limit` is what the server reads of one.
pub(crate) fn taken_to_its_end(request: Request, limit: usize) -> Request {
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared: Option<usize> = declared.and_then(|length| length.to_str().ok()?.parse().ok());
    // Whoever asks first whether to send has not begun, and whoever has more than is taken would not be done either.
    let bearable = !request.headers().contains_key(header::EXPECT)
        && declared.is_none_or(|length| length <= limit.saturating_add(MOST_BYTES));
    match bearable && !request.body().is_end_stream() {
        true => request.map(|body| Body::new(Unread { body: Some(body), left: limit.saturating_add(MOST_BYTES) })),
        false => request,
    }
}

struct Unread {
    /// Until its end has come.
    body: Option<Body>,
    /// Bytes that are still taken.
    left: usize,
}

impl HttpBody for Unread {
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

impl Drop for Unread {
    fn drop(&mut self) {
        let Some(mut body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let mut left = self.left;
        let gone = async move {
            while let Some(Ok(frame)) = body.frame().await {
                match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                    Some(rest) => left = rest,
                    None => return,
                }
            }
        };
        // The connection ends once nobody takes from it any more.
        runtime.spawn(tokio::time::timeout(LONGEST, gone));
    }
}
