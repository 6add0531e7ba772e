//! The wire form of records: payloads are plain JSON or a reference, times are RFC 3339.

use std::io;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::ids::{Millis, RunId};
use crate::project::{Projection, gate_name, timeline_stream};
use crate::record::{Entry, Numbered, Record, Scheduled};
use crate::view::due;
use eddyline_language::data::Data;
use eddyline_language::time::{Time, iso};

/// The largest JSON of a record.
pub const MAX_RECORD_BYTES: usize = 64 << 10;

/// The part of a record reserved for everything around a log message, except the run's tags and the step's name.
pub const AROUND_LOG_BYTES: usize = 4 << 10;

/// Ends a text that was cut.
pub const CUT: &str = "… (cut)";

/// Texts are never cut shorter than this, so that names and ids stay whole.
const SHORTEST_CUT: usize = 256;

/// Facts about a run that its records do not contain.
#[derive(Debug, Clone, Copy)]
pub struct WireContext<'a> {
    pub run: RunId,
    pub flow_name: &'a str,
    /// The queue of the run's tasks, unless a record names another.
    pub queue: Option<&'a str>,
    pub tags: &'a [String],
    /// When the run started, by the store's clock; its duration is counted from here.
    pub started_at: Millis,
}

/// A record on the wire.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Envelope<'a> {
    pub id: String,
    pub stream: String,
    pub ts: Time,
    pub kind: String,
    pub subject: &'a str,
    pub data: Value,
    pub meta: Meta<'a>,
    pub v: u8,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Meta<'a> {
    pub flow_id: RunId,
    pub flow_name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_run_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    pub queue: &'a str,
    pub tags: &'a [String],
}

/// A record of the timeline. `resolve` returns a payload as JSON, or `None` if it is too large or was deleted; such a
/// payload, and any that would not fit, is replaced by its [`reference`].
pub fn envelope<'a>(
    ctx: &WireContext<'a>,
    numbered: &'a Numbered,
    resolve: &dyn Fn(&Data) -> Option<Value>,
) -> Envelope<'a> {
    let mut entry = numbered.record.entry.clone();
    let payload = take_payload(&mut entry);
    let (kind, mut data) = kind_and_data(&entry);
    shape(&mut data, &entry, numbered, ctx);
    let resolved = payload.as_ref().and_then(|(_, payload)| resolve(payload));
    if let Entry::Log { long: Some(long), .. } = &entry {
        data.remove("long");
        data.insert("msg".to_owned(), reference(ctx.run, long));
    }
    if let Some((field, payload)) = &payload {
        data.insert((*field).to_owned(), resolved.unwrap_or_else(|| reference(ctx.run, payload)));
    }
    let mut envelope = wrap(ctx, numbered, timeline_stream(ctx.run), kind, Value::Object(data));
    if let Some((field, payload)) = payload
        && envelope.bytes() > MAX_RECORD_BYTES
    {
        envelope.data[field] = reference(ctx.run, &payload);
    }
    envelope.cut_to_size();
    envelope
}

/// A projection of the record `numbered`, under its source's id.
pub fn projection_envelope<'a>(
    ctx: &WireContext<'a>,
    numbered: &'a Numbered,
    projection: Projection<'_>,
) -> Envelope<'a> {
    let stream = projection.stream(ctx.flow_name, ctx.run);
    wrap(ctx, numbered, stream, projection.kind().to_owned(), plain(&projection))
}

/// [`envelope`] as JSON.
pub fn to_wire(ctx: &WireContext<'_>, numbered: &Numbered, resolve: &dyn Fn(&Data) -> Option<Value>) -> Value {
    plain(&envelope(ctx, numbered, resolve))
}

/// [`projection_envelope`] as JSON.
pub fn projection_to_wire(ctx: &WireContext<'_>, numbered: &Numbered, projection: Projection<'_>) -> Value {
    plain(&projection_envelope(ctx, numbered, projection))
}

impl Envelope<'_> {
    fn bytes(&self) -> usize {
        let mut count = Count(0);
        match serde_json::to_writer(&mut count, self) {
            Ok(()) => count.0,
            Err(_) => usize::MAX,
        }
    }

    fn cut_to_size(&mut self) {
        let whole = self.bytes();
        let (mut bytes, mut longest) = (whole, MAX_RECORD_BYTES / 2);
        // Cut all texts to the same length, so that a long stack does not displace the message.
        while bytes > MAX_RECORD_BYTES && longest >= SHORTEST_CUT {
            cut_texts(&mut self.data, longest);
            longest /= 2;
            bytes = self.bytes();
        }
        if bytes > MAX_RECORD_BYTES {
            self.data = json!({"$value": null, "bytes": whole});
        }
    }
}

fn wrap<'a>(ctx: &WireContext<'a>, from: &'a Numbered, stream: String, kind: String, data: Value) -> Envelope<'a> {
    let Record { entry, attempt } = &from.record;
    let queue = match (attempt, entry) {
        (Some(attempt), _) => attempt.queue.as_str(),
        (None, Entry::StepScheduled { work: Scheduled::Task { queue, .. }, .. }) => queue,
        (None, Entry::FlowStart { queue: Some(queue), .. }) => queue,
        _ => ctx.queue.unwrap_or("default"),
    };
    let task = attempt.as_ref().map(|attempt| format!("{}.{}", ctx.run, attempt.fence));
    let meta = Meta {
        flow_id: ctx.run,
        flow_name: ctx.flow_name,
        step_key: entry.step_key(),
        step_run_id: task.clone(),
        attempt: attempt.as_ref().map(|attempt| attempt.number),
        job_id: task,
        queue,
        tags: ctx.tags,
    };
    Envelope { id: from.n.to_string(), stream, ts: Time::at(from.ts), kind, subject: queue, data, meta, v: 1 }
}

/// The payload of an entry and its field. No entry has two.
fn take_payload(entry: &mut Entry) -> Option<(&'static str, Data)> {
    let (field, data) = match entry {
        Entry::FlowCompleted { output, .. } => ("output", output),
        Entry::StepCompleted { result, .. } | Entry::AttemptCompleted { result, .. } => ("result", result),
        Entry::Emit { payload, .. } => ("payload", payload),
        Entry::Log { meta: Some(meta), .. } => ("meta", meta),
        _ => return None,
    };
    Some((field, std::mem::replace(data, Data::null())))
}

fn kind_and_data(entry: &Entry) -> (String, Map<String, Value>) {
    match plain(entry) {
        Value::Object(mut fields) => match (fields.remove("kind"), fields.remove("data")) {
            (Some(Value::String(kind)), Some(Value::Object(data))) => (kind, data),
            _ => Default::default(),
        },
        _ => Default::default(),
    }
}

/// Shows gates by name, waits by their end, and the end of a run with its duration. The duration is not recorded,
/// because only the store knows the times of its records.
fn shape(data: &mut Map<String, Value>, entry: &Entry, numbered: &Numbered, ctx: &WireContext<'_>) {
    match entry {
        Entry::FlowCompleted { .. } => {
            data.insert("durationMs".to_owned(), numbered.ts.saturating_sub(ctx.started_at).max(0).into());
        }
        Entry::AwaitScheduled { token, for_ms, until_ms, .. } => {
            data.insert("token".to_owned(), gate_name(*token).into());
            data.remove("forMs");
            data.remove("untilMs");
            if let Some(until) = due(numbered.ts, *for_ms, *until_ms) {
                data.insert("until".to_owned(), iso(until).into());
            }
        }
        Entry::AwaitTriggered { token, .. }
        | Entry::AwaitTimeout { token, .. }
        | Entry::AwaitCancelled { token, .. } => {
            data.insert("token".to_owned(), gate_name(*token).into());
        }
        _ => {}
    }
}

/// The placeholder of a payload that is too large to show: a stored value is `{"$value": "<run>/<value>", "bytes": n}`,
/// an aggregate contains such references. A payload that is not stored by itself has a null key.
pub fn reference(run: RunId, data: &Data) -> Value {
    match data {
        Data::Ref(value) => json!({"$value": format!("{run}/{}", value.id), "bytes": value.bytes}),
        Data::List(items) => items.iter().map(|item| reference(run, item)).collect(),
        Data::Map(fields) => {
            fields.iter().map(|(key, item)| (key.to_string(), reference(run, item))).collect::<Map<_, _>>().into()
        }
        Data::Json(json) if data.is_inline() => Value::clone(json),
        Data::Json(_) => json!({"$value": null, "bytes": data.bytes(eddyline_language::data::MAX_BUILT_BYTES)}),
    }
}

/// Cuts a text to at most `longest` bytes, including the mark, at a character boundary.
pub(crate) fn cut(text: &mut String, longest: usize) {
    if text.len() > longest {
        text.truncate(text.floor_char_boundary(longest.saturating_sub(CUT.len())));
        text.push_str(CUT);
    }
}

fn cut_texts(value: &mut Value, longest: usize) {
    match value {
        Value::String(text) => cut(text, longest),
        Value::Array(items) => items.iter_mut().for_each(|item| cut_texts(item, longest)),
        Value::Object(fields) => fields.values_mut().for_each(|field| cut_texts(field, longest)),
        _ => {}
    }
}

/// Serialisation fails only for maps with non-string keys, and we have none.
fn plain(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

struct Count(usize);

impl io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use insta::assert_snapshot;

    use super::*;
    use crate::failure::Failure;
    use crate::ids::{Fence, ValueId};
    use crate::project::Projector;
    use crate::record::Attempt;
    use crate::view::tests::timeline;
    use eddyline_language::data::ValueRef;

    const TAGS: [String; 0] = [];

    fn ctx() -> WireContext<'static> {
        WireContext { run: RunId::default(), flow_name: "order", queue: None, tags: &TAGS, started_at: 0 }
    }

    fn inline(data: &Data) -> Option<Value> {
        data.materialise(&|_| None).ok()
    }

    fn numbered(entry: Entry) -> Numbered {
        let attempt = Some(Attempt { number: 1, fence: Fence(12), queue: "slow".into() });
        Numbered { n: 7, ts: 1_767_323_045_678, record: Record { entry, attempt } }
    }

    fn result(result: Data) -> Numbered {
        numbered(Entry::AttemptCompleted { step_key: "pay".into(), result, suspended: false })
    }

    fn read(envelope: &Envelope<'_>) -> String {
        let text = serde_json::to_string_pretty(envelope).unwrap();
        text.replace("00000000-0000-0000-0000-000000000000", "RUN")
    }

    #[test]
    fn an_attempt_shows_its_result() {
        let record = result(Data::from(json!({"paid": true})));
        assert_snapshot!(read(&envelope(&ctx(), &record, &inline)), @r#"
        {
          "id": "7",
          "stream": "nq:flow:RUN",
          "ts": "2026-01-02T03:04:05.678Z",
          "kind": "step.attempt.completed",
          "subject": "slow",
          "data": {
            "result": {
              "paid": true
            },
            "stepKey": "pay"
          },
          "meta": {
            "flowId": "RUN",
            "flowName": "order",
            "stepKey": "pay",
            "stepRunId": "RUN.12",
            "attempt": 1,
            "jobId": "RUN.12",
            "queue": "slow",
            "tags": []
          },
          "v": 1
        }
        "#);
    }

    #[test]
    fn a_gate_shows_its_name_and_its_end() {
        let record = &timeline(&["start 1", "sleep pay"])[1];
        assert_snapshot!(read(&envelope(&ctx(), record, &inline)), @r#"
        {
          "id": "2",
          "stream": "nq:flow:RUN",
          "ts": "2026-01-02T03:04:05.010Z",
          "kind": "step.await.scheduled",
          "subject": "default",
          "data": {
            "reason": "time",
            "stepKey": "pay",
            "token": "RUN.330",
            "until": "2026-01-02T03:04:06.010Z"
          },
          "meta": {
            "flowId": "RUN",
            "flowName": "order",
            "stepKey": "pay",
            "queue": "default",
            "tags": []
          },
          "v": 1
        }
        "#);
    }

    #[test]
    fn a_projection_has_the_envelope_of_its_source() {
        let records = timeline(&["start 1", "task pay"]);
        let mut projector = Projector::new(RunId::default());
        projector.apply(&records[0]);
        let projections = projector.apply(&records[1]);
        let shown: Vec<_> = projections.iter().map(|it| read(&projection_envelope(&ctx(), &records[1], it))).collect();
        assert_snapshot!(shown.join("\n"), @r#"
        {
          "id": "2",
          "stream": "nq:proj:flow:order:RUN",
          "ts": "2026-01-02T03:04:05.010Z",
          "kind": "flow.snapshot.patch",
          "subject": "default",
          "data": {
            "lastEventAt": "2026-01-02T03:04:05.010Z",
            "status": "running",
            "steps": {
              "pay": {
                "status": "running"
              }
            }
          },
          "meta": {
            "flowId": "RUN",
            "flowName": "order",
            "stepKey": "pay",
            "queue": "default",
            "tags": []
          },
          "v": 1
        }
        {
          "id": "2",
          "stream": "nq:proj:flow-steps:RUN",
          "ts": "2026-01-02T03:04:05.010Z",
          "kind": "flow.step.patch",
          "subject": "default",
          "data": {
            "lastEventAt": "2026-01-02T03:04:05.010Z",
            "startedAt": "2026-01-02T03:04:05.010Z",
            "status": "running",
            "stepKey": "pay"
          },
          "meta": {
            "flowId": "RUN",
            "flowName": "order",
            "stepKey": "pay",
            "queue": "default",
            "tags": []
          },
          "v": 1
        }
        "#);
    }

    #[test]
    fn a_payload_that_is_elsewhere_is_a_reference() {
        let stored = Data::Ref(ValueRef { id: ValueId(3), bytes: 70_000, depth: 1, read_size: Default::default() });
        let wire = to_wire(&ctx(), &result(stored.clone()), &inline);
        let key = "00000000-0000-0000-0000-000000000000/3";
        assert_eq!(wire["data"], json!({"stepKey": "pay", "result": {"$value": key, "bytes": 70_000}}));
        let list = Data::List(Arc::new(vec![stored, Data::from(json!(1))]));
        let wire = to_wire(&ctx(), &result(list), &inline);
        assert_eq!(wire["data"]["result"], json!([{"$value": key, "bytes": 70_000}, 1]));
    }

    #[test]
    fn a_long_log_message_is_a_reference() {
        let value = |id| ValueRef { id: ValueId(id), bytes: 100_002, depth: 0, read_size: Default::default() };
        let (long, meta) = (Some(Data::Ref(value(3))), Some(Data::Ref(value(4))));
        let log = Entry::Log { step_key: "pay".into(), level: "info".into(), msg: String::new(), long, meta };
        let key = |id: u32| json!({"$value": format!("{}/{id}", RunId::default()), "bytes": 100_002});
        let wire = to_wire(&ctx(), &numbered(log), &inline);
        assert_eq!(wire["data"], json!({"stepKey": "pay", "level": "info", "msg": key(3), "meta": key(4)}));
    }

    #[test]
    fn no_record_is_too_large() {
        // In JSON, quotes double and control characters grow sixfold.
        for text in ["x", "\"", "\u{1}", "é", "🦀"] {
            let long = text.repeat(300_000);
            let mut error = Failure::new("Oops", long.clone());
            error.stack = Some(long.clone());
            error.also = vec![Failure::new(long.clone(), "short"); 10];
            let step_key = || "pay".to_owned();
            let meta = Some(Data::from(json!([long])));
            for entry in [
                Entry::FlowCompleted { output: Data::from(json!(long)), step_count: Some(1), continued_as: None },
                Entry::FlowFailed { error: error.clone() },
                Entry::AttemptFailed { step_key: step_key(), error },
                Entry::Log { step_key: step_key(), level: "info".into(), msg: long.clone(), long: None, meta },
            ] {
                let record = numbered(entry);
                let wire = to_wire(&ctx(), &record, &inline);
                assert!(wire.to_string().len() <= MAX_RECORD_BYTES);
                match &record.record.entry {
                    Entry::FlowCompleted { .. } => assert!(wire["data"]["output"]["$value"].is_null()),
                    Entry::Log { .. } => assert!(wire["data"]["msg"].as_str().unwrap().ends_with(CUT)),
                    _ => {
                        assert!(wire["data"]["error"]["stack"].as_str().unwrap().ends_with(CUT));
                        assert_eq!(wire["data"]["error"]["also"][0]["message"], "short");
                    }
                }
            }
        }
        let mut nested = Failure::new("Oops", "small");
        for _ in 0..4 {
            nested.also = vec![nested.clone(); 10];
        }
        let wire = to_wire(&ctx(), &numbered(Entry::FlowFailed { error: nested }), &inline);
        assert!(wire.to_string().len() <= MAX_RECORD_BYTES);
    }

    #[test]
    fn every_kind_has_its_name_and_its_data() {
        for line in ["start 1", "pause", "resume", "task pay", "emit pay", "log pay", "act pay", "end-failed"] {
            let wire = to_wire(&ctx(), &timeline(&[line])[0], &inline);
            assert!(wire["kind"].as_str().is_some_and(|kind| !kind.is_empty()), "{line}");
            assert!(wire["data"].is_object(), "{line}");
        }
    }
}
