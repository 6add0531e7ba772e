//! Answers that wait to be sent. Readers may be slow; all of them together keep only so much in memory.

use std::sync::Arc;

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use eddyline_protocol::Code;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::failure::Failure;

/// What all answers that are not small may have together, in KiB.
const ROOM_KIB: u32 = 64 << 10;
/// Smaller answers are not counted: the bound on connections is theirs.
const SMALL_BYTES: u64 = 16 << 10;

#[derive(Debug)]
pub(crate) struct Unsent {
    room: Arc<Semaphore>,
    kib: u32,
}

impl Default for Unsent {
    fn default() -> Unsent {
        Unsent::with(ROOM_KIB)
    }
}

impl Unsent {
    fn with(kib: u32) -> Unsent {
        Unsent { room: Arc::new(Semaphore::new(kib as usize)), kib }
    }

    /// The same answer, which takes up room until it is sent or given up; where there is none, that is the answer.
    pub async fn hold(&self, response: Response) -> Response {
        let bytes = response.body().size_hint().exact().unwrap_or(0);
        if bytes < SMALL_BYTES {
            return response;
        }
        // One that is larger than everything goes alone.
        let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(self.kib);
        let Ok(room) = self.room.clone().try_acquire_many_owned(kib) else {
            metrics::counter!("eddyline_answers_refused_total").increment(1);
            let message = "too many large answers wait to be read; come back in a second";
            return Failure::new(Code::TooMany, message).response();
        };
        let (head, body) = response.into_parts();
        match body.collect().await {
            Ok(whole) => {
                let held = Held { bytes: whole.to_bytes(), _room: room };
                Response::from_parts(head, Body::from(Bytes::from_owner(held)))
            }
            Err(error) => {
                tracing::error!("an answer could not be put together: {error}");
                Failure::new(Code::Internal, "the answer could not be put together").response()
            }
        }
    }
}

/// The last one who has a part of the answer gives its room back.
struct Held {
    bytes: Bytes,
    _room: OwnedSemaphorePermit,
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
        let unsent = Unsent::with(100);
        let answer = |kib: usize| Response::new(Body::from(vec![b'x'; kib << 10]));
        let held = unsent.hold(answer(80)).await;
        assert_eq!(held.status(), 200);
        assert_eq!(unsent.hold(answer(30)).await.status(), 429);
        assert_eq!(unsent.hold(answer(1)).await.status(), 200);
        // What is being written are the bytes, not the body that they came in.
        let written = held.into_body().collect().await.map(|whole| whole.to_bytes()).unwrap_or_default();
        assert_eq!(unsent.hold(answer(30)).await.status(), 429);
        drop(written);
        assert_eq!(unsent.hold(answer(30)).await.status(), 200);
        assert_eq!(unsent.hold(answer(200)).await.status(), 200, "nothing is too large for ever");
    }
}
