//! Answers that wait to be sent. Readers may be slow; all of them together keep only so much in memory.

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use eddyline_protocol::Code;
use eddyline_store::Namespace;
use http_body_util::BodyExt;

use super::failure::Failure;
use super::memory_budget::{MemoryBudget, Reservation};

/// A namespace may use one of so many parts of the budget: half of it, since what does not fit is refused at once, also where
/// its readers are only slow.
const PARTS: u32 = 2;

#[derive(Debug)]
pub(crate) struct Unsent(MemoryBudget);

impl Unsent {
    pub fn new(bytes: usize) -> Unsent {
        Unsent(MemoryBudget::new(bytes, PARTS))
    }

    /// The same answer, which takes up room until it is sent or given up; where there is none, that is the answer.
    pub async fn hold(&self, ns: &Namespace, response: Response) -> Response {
        self.try_hold(ns, response).await.unwrap_or_else(Failure::response)
    }

    /// Room for what a streamed answer is made from, for as long as the stream has it.
    pub fn room(&self, ns: &Namespace, bytes: usize) -> Result<Reservation, Failure> {
        let mut room = self.0.reservation(ns);
        room.try_grow_to(bytes).map_err(|_| {
            metrics::counter!("eddyline_answers_refused_total").increment(1);
            Failure::new(Code::TooMany, "too many large answers wait to be read; come back in a second")
        })?;
        Ok(room)
    }

    /// The same for those who have something to undo where there is no room. An answer that has its room keeps it.
    pub async fn try_hold(&self, ns: &Namespace, response: Response) -> Result<Response, Failure> {
        if response.extensions().get::<HasRoom>().is_some() {
            return Ok(response);
        }
        // One that is streamed has no length, and room of its own for what it is made from.
        let bytes = response.body().size_hint().exact().unwrap_or(0);
        let room = self.room(ns, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        if !room.is_counted() {
            return Ok(response);
        }
        let (mut head, body) = response.into_parts();
        match body.collect().await {
            Ok(whole) => {
                let held = Held { bytes: whole.to_bytes(), _room: room };
                head.extensions.insert(HasRoom);
                Ok(Response::from_parts(head, Body::from(Bytes::from_owner(held))))
            }
            Err(error) => {
                tracing::error!("an answer could not be put together: {error}");
                Err(Failure::new(Code::Internal, "the answer could not be put together"))
            }
        }
    }
}

/// Marks an answer that is counted already.
#[derive(Clone)]
struct HasRoom;

/// The last one who has a part of the answer gives its room back.
struct Held {
    bytes: Bytes,
    _room: Reservation,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn room_is_taken_until_the_answer_is_gone_and_small_answers_take_none() {
        let (unsent, ns) = (Unsent::new(200 << 10), Namespace::default());
        let answer = |kib: usize| Response::new(Body::from(vec![b'x'; kib << 10]));
        let held = unsent.hold(&ns, answer(80)).await;
        assert_eq!(held.status(), 200);
        assert_eq!(unsent.hold(&ns, answer(30)).await.status(), 429);
        assert_eq!(unsent.hold(&ns, answer(1)).await.status(), 200);
        // What is being written are the bytes, not the body that they came in.
        let written = held.into_body().collect().await.map(|whole| whole.to_bytes()).unwrap_or_default();
        assert_eq!(unsent.hold(&ns, answer(30)).await.status(), 429);
        drop(written);
        assert_eq!(unsent.hold(&ns, answer(30)).await.status(), 200);
        assert_eq!(unsent.hold(&ns, answer(200)).await.status(), 200, "nothing is too large for ever");
    }
}
