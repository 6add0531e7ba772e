//! Bounds the memory of responses that wait for slow readers.

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use eddyline_protocol::Code;
use eddyline_store::Namespace;
use http_body_util::BodyExt;

use super::failure::Failure;
use super::memory_budget::{MemoryBudget, Reservation};

/// A namespace can use one of this many parts of the budget: half of it, because a response that does not fit is
/// refused immediately, even if the readers are only slow.
const PARTS: u32 = 2;

#[derive(Debug)]
pub(crate) struct ResponseBudget(MemoryBudget);

impl ResponseBudget {
    pub fn new(bytes: usize) -> ResponseBudget {
        ResponseBudget(MemoryBudget::new(bytes, PARTS))
    }

    /// Charges a response to the budget until it is sent or dropped; responds with an error if there is no room.
    pub async fn hold(&self, ns: &Namespace, response: Response) -> Response {
        self.try_hold(ns, response).await.unwrap_or_else(Failure::response)
    }

    /// Charges the data that a streamed response is made from.
    pub fn room(&self, ns: &Namespace, bytes: usize) -> Result<Reservation, Failure> {
        let mut room = self.0.reservation(ns);
        room.try_grow_to(bytes).map_err(|_| {
            metrics::counter!("eddyline_answers_refused_total").increment(1);
            Failure::new(Code::TooMany, "too many large responses are waiting to be read; retry in a second")
        })?;
        Ok(room)
    }

    /// Like `hold`, for callers that must clean up if there is no room. A response that is already charged is returned
    /// as is.
    pub async fn try_hold(&self, ns: &Namespace, response: Response) -> Result<Response, Failure> {
        if response.extensions().get::<HasRoom>().is_some() {
            return Ok(response);
        }
        // A streamed response has no length; its data is charged separately.
        let bytes = response.body().size_hint().exact().unwrap_or(0);
        let room = self.room(ns, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        if !room.is_counted() {
            return Ok(response);
        }
        let (mut head, body) = response.into_parts();
        match body.collect().await {
            Ok(whole) => {
                let held = BudgetedBytes { bytes: whole.to_bytes(), _room: room };
                head.extensions.insert(HasRoom);
                Ok(Response::from_parts(head, Body::from(Bytes::from_owner(held))))
            }
            Err(error) => {
                tracing::error!("cannot build a response: {error}");
                Err(Failure::new(Code::Internal, "the response could not be built"))
            }
        }
    }
}

/// Marks a response that is already charged.
#[derive(Clone)]
struct HasRoom;

/// Released when the last part of the response is dropped.
struct BudgetedBytes {
    bytes: Bytes,
    _room: Reservation,
}

impl AsRef<[u8]> for BudgetedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn room_is_taken_until_the_answer_is_gone_and_small_answers_take_none() {
        let (unsent, ns) = (ResponseBudget::new(200 << 10), Namespace::default());
        let answer = |kib: usize| Response::new(Body::from(vec![b'x'; kib << 10]));
        let held = unsent.hold(&ns, answer(80)).await;
        assert_eq!(held.status(), 200);
        assert_eq!(unsent.hold(&ns, answer(30)).await.status(), 429);
        assert_eq!(unsent.hold(&ns, answer(1)).await.status(), 200);
        // The bytes hold the room while they are written, not the body that contained them.
        let written = held.into_body().collect().await.map(|whole| whole.to_bytes()).unwrap_or_default();
        assert_eq!(unsent.hold(&ns, answer(30)).await.status(), 429);
        drop(written);
        assert_eq!(unsent.hold(&ns, answer(30)).await.status(), 200);
        assert_eq!(unsent.hold(&ns, answer(200)).await.status(), 200, "nothing is too large for ever");
    }
}
