//! Payloads that are too large to be shown inline.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use eddyline_engine::Stored;
use eddyline_machine::wire::reference;
use eddyline_machine::{Data, RunId};
use eddyline_protocol::{Code, Scope};
use futures_util::stream;

use super::call::{ApiResult, Call};
use super::failure::Failure;
use super::memory_budget::Reservation;
use super::secrets;

/// Streamed responses are sent in pieces of about this many bytes.
const PIECE_BYTES: usize = 32 << 10;

/// `GET /v1/runs/{id}/values/{key}`
pub(crate) async fn show(call: Call) -> ApiResult {
    let run = call.run()?;
    match call.engine().value(call.ns(), run, call.param("key")).await? {
        Stored::Whole(value) => call.show(StatusCode::OK, &value),
        Stored::Parts(data) => {
            // An aggregate can have hundreds of thousands of elements: they are in memory, but never the whole text.
            let mut data = MeasuredPayload::measure(data).await?;
            data.room = Some(call.api.unsent().room(call.ns(), data.bytes)?);
            let parts = Parts { run, data, next: 0, secrets: call.may(Scope::Signal) };
            let body = stream::iter(parts.map(Ok::<_, std::convert::Infallible>));
            let mut response = Response::new(Body::from_stream(body));
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            Ok(response)
        }
    }
}

/// A payload of many elements. Counting or freeing them takes milliseconds, so both happen on a blocking thread.
struct MeasuredPayload {
    data: Data,
    /// The approximate size in memory.
    bytes: usize,
    /// Released when the payload is freed.
    room: Option<Reservation>,
}

impl MeasuredPayload {
    async fn measure(data: Data) -> Result<MeasuredPayload, Failure> {
        let measured = tokio::task::spawn_blocking(move || MeasuredPayload {
            bytes: data.memory_bytes(usize::MAX),
            data,
            room: None,
        })
        .await;
        measured.map_err(|_| Failure::new(Code::Internal, "the value could not be measured"))
    }
}

impl Drop for MeasuredPayload {
    fn drop(&mut self) {
        let freed = (std::mem::replace(&mut self.data, Data::null()), self.room.take());
        if tokio::runtime::Handle::try_current().is_ok() {
            tokio::task::spawn_blocking(move || drop(freed));
        }
    }
}

/// The JSON of an aggregate, with references for its elements, in pieces.
struct Parts {
    run: RunId,
    data: MeasuredPayload,
    next: usize,
    /// Whether gate URLs are shown with their tokens.
    secrets: bool,
}

impl Iterator for Parts {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let (open, close, count) = match &self.data.data {
            Data::List(items) => ('[', ']', items.len()),
            Data::Map(fields) => ('{', '}', fields.len()),
            // Written in one piece.
            Data::Json(_) | Data::Ref(_) => (' ', ' ', 1),
        };
        if self.next > count {
            return None;
        }
        let mut piece = String::new();
        if self.next == 0 {
            piece.push(open);
        }
        while self.next < count && piece.len() < PIECE_BYTES {
            if self.next > 0 {
                piece.push(',');
            }
            piece.push_str(&self.element());
            self.next += 1;
        }
        if self.next == count {
            piece.push(close);
            self.next += 1;
        }
        Some(Bytes::from(piece))
    }
}

impl Parts {
    fn element(&self) -> String {
        let text = match &self.data.data {
            Data::List(items) => reference(self.run, &items[self.next]).to_string(),
            Data::Map(fields) => {
                let (key, item) = &fields[self.next];
                format!("{}:{}", serde_json::Value::from(&**key), reference(self.run, item))
            }
            whole => reference(self.run, whole).to_string(),
        };
        if self.secrets { text } else { secrets::left_out(text) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use eddyline_machine::{ValueId, ValueRef};
    use serde_json::{Value, json};

    use super::*;

    fn whole(data: Data) -> (usize, Value) {
        let data = MeasuredPayload { bytes: data.memory_bytes(usize::MAX), data, room: None };
        let parts = Parts { run: RunId::default(), data, next: 0, secrets: false };
        let pieces: Vec<Bytes> = parts.collect();
        (pieces.len(), serde_json::from_slice(&pieces.concat()).unwrap())
    }

    #[test]
    fn an_aggregate_is_written_in_pieces_that_are_json_together() {
        let stored =
            |id| Data::Ref(ValueRef { id: ValueId(id), bytes: 3_000_000, depth: 1, read_size: Default::default() });
        let reference = |id: u32| json!({"$value": format!("{}/{id}", RunId::default()), "bytes": 3_000_000});
        let url = format!("http://x/hooks/{}", "a".repeat(64));
        assert_eq!(whole(Data::List(Arc::new(vec![]))), (1, json!([])));
        let list = vec![stored(1), Data::from(json!(url)), Data::List(Arc::new(vec![stored(2)]))];
        let shown = json!([reference(1), "http://x/hooks/…", [reference(2)]]);
        assert_eq!(whole(Data::List(Arc::new(list))), (1, shown));
        let fields = vec![("a\"".into(), stored(1)), ("b".into(), Data::from(json!(null)))];
        assert_eq!(whole(Data::Map(Arc::new(fields))), (1, json!({"a\"": reference(1), "b": null})));
        let (pieces, list) = whole(Data::List(Arc::new((0..10_000).map(stored).collect())));
        assert!(pieces > 10 && list.as_array().unwrap().len() == 10_000 && list[9_999] == reference(9_999));
    }
}
