//! Streams: the timeline of a run, its projections, and the run index of a flow.

use std::cell::RefCell;
use std::time::Duration;

use axum::http::StatusCode;
use eddyline_engine::Timeline;
use eddyline_language::time::Time;
use eddyline_machine::project::{Projection, Projector, RunIndexed};
use eddyline_machine::wire::{Envelope, MAX_RECORD_BYTES, Meta, WireContext, projection_to_wire, to_wire};
use eddyline_machine::{Data, Numbered, RunId};
use eddyline_protocol as wire;
use eddyline_store::{Page, RunFilter, Summary};
use serde_json::{Value, json};

use super::call::{ApiResult, Call, MAX_PAGE, run_id};
use super::failure::Failure;
use super::projections::CountKey;

/// The maximum number of records that one request examines if the filter rejects most of them.
const MAX_LOOKED_AT: usize = 20_000;
/// A page ends at about this many bytes.
const MAX_PAGE_BYTES: usize = 4 << 20;
/// The kind of log records.
const LOG_KIND: &str = "runner.log";
/// How often a reader that waits for new runs of a flow polls.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// A stream, parsed from its name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stream {
    Timeline(RunId),
    Projected(Projected, RunId),
    /// The run index of a flow.
    Runs(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Projected {
    /// With the flow in the stream's name, which must be the run's flow.
    Snapshot(String),
    Steps,
    StepIndex,
}

impl Stream {
    fn parse(name: &str) -> Option<Stream> {
        let run = |text: &str| run_id(text).ok();
        if let Some(id) = name.strip_prefix("nq:flow:") {
            return run(id).map(Stream::Timeline);
        }
        let (kind, rest) = name.strip_prefix("nq:proj:")?.split_once(':')?;
        match kind {
            "flow" => {
                let (flow, id) = rest.rsplit_once(':')?;
                Some(Stream::Projected(Projected::Snapshot(flow.to_owned()), run(id)?))
            }
            "flow-steps" => Some(Stream::Projected(Projected::Steps, run(rest)?)),
            "flow-step-index" => Some(Stream::Projected(Projected::StepIndex, run(rest)?)),
            "flow-runs" => Some(Stream::Runs(rest.to_owned())),
            _ => None,
        }
    }
}

/// The request.
struct Asked {
    after: u64,
    limit: usize,
    /// Any of these; empty means all.
    kinds: Vec<String>,
    step: Option<String>,
    wait: Duration,
}

impl Asked {
    fn wants(&self, record: &Value) -> bool {
        let kind = &record["kind"];
        (self.kinds.is_empty() || self.kinds.iter().any(|wanted| kind == wanted))
            && self.step.as_deref().is_none_or(|wanted| record["meta"]["stepKey"] == wanted)
    }

    /// If only the logs of one step are requested, that step: an index finds them.
    fn logs_of(&self) -> Option<&str> {
        let logs_alone = !self.kinds.is_empty() && self.kinds.iter().all(|kind| kind == LOG_KIND);
        self.step.as_deref().filter(|_| logs_alone)
    }

    fn wants_all(&self) -> bool {
        self.kinds.is_empty() && self.step.is_none()
    }
}

/// `GET /v1/streams/{stream}`
pub(crate) async fn read(call: Call) -> ApiResult {
    let name = call.param("stream");
    let unknown = || Failure::not_found("stream", name);
    let stream = Stream::parse(name).ok_or_else(unknown)?;
    let asked = Asked {
        after: call.number("after")?.unwrap_or(0),
        limit: call.limit()?,
        kinds: call.texts("kind"),
        step: call.text("step").map(str::to_owned),
        wait: call.wait()?,
    };
    let _room = if asked.wait.is_zero() { None } else { Some(call.api.long_poll(call.ns())?) };
    let counted = call.flag("count")?;
    let (items, next) = match &stream {
        Stream::Timeline(run) => call.while_admitted(timeline(&call, *run, &asked)).await??,
        Stream::Projected(which, run) => {
            if let Projected::Snapshot(flow) = which
                && call.engine().header(call.ns(), *run).await?.header.flow != *flow
            {
                return Err(unknown());
            }
            call.while_admitted(projected(&call, which, *run, &asked)).await??
        }
        Stream::Runs(flow) => call.while_admitted(runs(&call, flow, &asked)).await??,
    };
    let total = if counted { Some(count(&call, &stream, &asked).await?) } else { None };
    call.show(StatusCode::OK, &wire::Page { items, next: next.map(|next| next.to_string()), total })
}

/// The number of records in a stream that match the filter. A projection must be computed, and records must be read, to
/// be counted. The first count reads the timeline to its end; later ones read only new records.
async fn count(call: &Call, stream: &Stream, asked: &Asked) -> Result<u64, Failure> {
    let (which, run) = match stream {
        Stream::Runs(flow) => return count_runs(call, flow, asked).await,
        Stream::Timeline(run) if asked.wants_all() => return Ok(call.engine().header(call.ns(), *run).await?.records),
        Stream::Timeline(run) => (None, *run),
        Stream::Projected(which, run) => (Some(which), *run),
    };
    let (kinds, step) = (asked.kinds.clone(), asked.step.clone());
    let what = CountKey { run, which: which.map(Projected::number), kinds, step };
    let (counted_to, mut count) = call.api.projections().counted(&what);
    let mut reading = which.map(|which| ProjectionReader::begin(call, which, run, counted_to));
    let mut read = reading.as_ref().map_or(counted_to, |reading| reading.at);
    loop {
        let page = call.engine().timeline(call.ns(), run, read, MAX_PAGE, Duration::ZERO).await?;
        let Some(last) = page.records.last().map(|last| last.n) else { break };
        count_folded(&page);
        let ctx = context(run, &page);
        for record in &page.records {
            let shown = match &mut reading {
                None => Some(to_wire(&ctx, record, &|_| None)),
                Some(reading) => reading.next(call, &ctx, record),
            };
            let shown = shown.filter(|_| record.n > counted_to);
            count += u64::from(shown.is_some_and(|record| asked.wants(&record)));
        }
        read = last;
    }
    if let Some(reading) = reading {
        reading.end(call);
    }
    call.api.projections().keep_count(what, read, count);
    Ok(count)
}

/// Counts records that were read for a projection or a count.
fn count_folded(page: &Timeline) {
    metrics::counter!("eddyline_records_folded_total").increment(page.records.len() as u64);
}

/// All records of the index are of one kind and have no step.
async fn count_runs(call: &Call, flow: &str, asked: &Asked) -> Result<u64, Failure> {
    let newest = call.engine().list(call.ns(), &of_flow(flow), Page { after: None, limit: 1 }).await?;
    match newest.first() {
        Some(run) if asked.wants(&indexed(run, None)) => Ok(call.engine().count(call.ns(), &of_flow(flow)).await?),
        _ => Ok(0),
    }
}

fn of_flow(flow: &str) -> RunFilter {
    RunFilter { flow: Some(flow.to_owned()), ..RunFilter::default() }
}

async fn timeline(call: &Call, run: RunId, asked: &Asked) -> Result<(Vec<Value>, Option<u64>), Failure> {
    let (mut items, mut after, mut looked_at, mut wait) = (PageItems::new(asked), asked.after, 0, asked.wait);
    loop {
        let limit = MAX_PAGE.min(asked.limit);
        let page = match asked.logs_of() {
            Some(step) => call.engine().logs(call.ns(), run, step, after, limit, wait).await?,
            None => call.engine().timeline(call.ns(), run, after, limit, wait).await?,
        };
        let Some(last) = page.records.last().map(|last| last.n) else { return Ok((items.found, None)) };
        looked_at += page.records.len();
        let short = page.records.len() < limit;
        for record in &page.records {
            let record = on_the_wire(call, run, &page, record, asked).await?;
            let Some(record) = record else { continue };
            after = read_number(&record);
            if items.is_full_with(record) {
                return Ok((items.found, Some(after)));
            }
        }
        after = last;
        // Without a filter all records are returned now; with one, the request keeps waiting for a match.
        let waits_on = items.found.is_empty() && !asked.wait.is_zero() && !wait.is_zero();
        if short && !waits_on {
            return Ok((items.found, None));
        }
        if looked_at >= MAX_LOOKED_AT {
            return Ok((items.found, Some(after)));
        }
        wait = if waits_on { wait / 2 } else { Duration::ZERO };
    }
}

/// The items of one page.
struct PageItems {
    found: Vec<Value>,
    bytes: usize,
    limit: usize,
}

impl PageItems {
    fn new(asked: &Asked) -> PageItems {
        PageItems { found: Vec::new(), bytes: 0, limit: asked.limit }
    }

    fn is_full_with(&mut self, record: Value) -> bool {
        self.bytes += record.to_string().len();
        self.found.push(record);
        self.found.len() == self.limit || self.bytes >= MAX_PAGE_BYTES
    }
}

fn read_number(record: &Value) -> u64 {
    record["id"].as_str().and_then(|id| id.parse().ok()).unwrap_or(0)
}

/// A record with its payload, if it matches the filter.
async fn on_the_wire(
    call: &Call,
    run: RunId,
    page: &Timeline,
    record: &Numbered,
    asked: &Asked,
) -> Result<Option<Value>, Failure> {
    let ctx = context(run, page);
    // The first pass only finds the payload, the second includes it.
    let payload: RefCell<Option<Data>> = RefCell::new(None);
    let without = to_wire(&ctx, record, &|data| {
        payload.replace(Some(data.clone()));
        None
    });
    if !asked.wants(&without) {
        return Ok(None);
    }
    let Some(payload) = payload.into_inner() else { return Ok(Some(without)) };
    let resolved = call.engine().small_payload(run, &payload, MAX_RECORD_BYTES).await?;
    Ok(Some(to_wire(&ctx, record, &|_| resolved.clone())))
}

async fn projected(
    call: &Call,
    which: &Projected,
    run: RunId,
    asked: &Asked,
) -> Result<(Vec<Value>, Option<u64>), Failure> {
    let mut reading = ProjectionReader::begin(call, which, run, asked.after);
    let (mut items, mut wait) = (PageItems::new(asked), Duration::ZERO);
    loop {
        let page = match (which, &asked.step) {
            (Projected::StepIndex, Some(step)) => {
                call.engine().logs(call.ns(), run, step, reading.at, MAX_PAGE, wait).await?
            }
            _ => call.engine().timeline(call.ns(), run, reading.at, MAX_PAGE, wait).await?,
        };
        if page.records.is_empty() {
            if items.found.is_empty() && wait.is_zero() && !asked.wait.is_zero() {
                wait = asked.wait;
                continue;
            }
            reading.end(call);
            return Ok((items.found, None));
        }
        count_folded(&page);
        let ctx = context(run, &page);
        for record in &page.records {
            reading.pass(call, asked.after, record.n);
            let Some(record) = reading.next(call, &ctx, record).filter(|_| record.n > asked.after) else { continue };
            if asked.wants(&record) && items.is_full_with(record) {
                let at = reading.at;
                reading.end(call);
                return Ok((items.found, Some(at)));
            }
        }
        if !wait.is_zero() {
            reading.end(call);
            return Ok((items.found, None));
        }
    }
}

/// Reads a projection.
struct ProjectionReader<'a> {
    which: &'a Projected,
    run: RunId,
    projector: Projector,
    /// The last folded record, and the last one that changed the projection.
    at: u64,
    last: u64,
    /// The record of the last checkpoint, or where reading began.
    checkpoint: u64,
    /// Records before the first requested one must be folded.
    folded: bool,
}

impl<'a> ProjectionReader<'a> {
    fn begin(call: &Call, which: &'a Projected, run: RunId, after: u64) -> ProjectionReader<'a> {
        let (projector, at) = match which {
            // Log pointers do not depend on earlier records.
            Projected::StepIndex => (Projector::new(run), after),
            _ => call.api.projections().resume(run, which.number(), after),
        };
        ProjectionReader { which, run, projector, at, last: after.min(at), checkpoint: at, folded: at < after }
    }

    /// Caches the state before the first requested record if folding was needed to get there, for readers that request
    /// the same page again.
    fn pass(&mut self, call: &Call, after: u64, next: u64) {
        if self.folded && next > after {
            self.folded = false;
            let projector = self.projector.clone();
            call.api.projections().keep(self.run, self.which.number(), self.last, self.at, projector);
        }
    }

    /// Folds the next record and returns the projection's change, if any.
    fn next(&mut self, call: &Call, ctx: &WireContext<'_>, record: &Numbered) -> Option<Value> {
        let shown = self.which.of(ctx, &mut self.projector, record);
        self.at = record.n;
        if shown.is_some() {
            self.last = record.n;
        }
        let (which, since) = (self.which.number(), self.checkpoint);
        if *self.which != Projected::StepIndex
            && call.api.projections().pass(self.run, which, self.last, self.at, since, &self.projector)
        {
            self.checkpoint = self.at;
        }
        shown
    }

    /// Caches the state for the next page.
    fn end(self, call: &Call) {
        if *self.which != Projected::StepIndex {
            call.api.projections().keep(self.run, self.which.number(), self.last, self.at, self.projector);
        }
    }
}

impl Projected {
    /// Identifies the projection, whatever the flow.
    fn number(&self) -> u8 {
        match self {
            Projected::Snapshot(_) => 0,
            Projected::Steps => 1,
            Projected::StepIndex => 2,
        }
    }

    /// Applies the next record of the timeline.
    fn of(&self, ctx: &WireContext<'_>, projector: &mut Projector, record: &Numbered) -> Option<Value> {
        let projections = projector.apply(record);
        let wanted = projections.iter().find(|projection| self.is(projection));
        wanted.map(|projection| projection_to_wire(ctx, record, projection))
    }

    fn is(&self, projection: &Projection<'_>) -> bool {
        matches!(
            (self, projection),
            (Projected::Snapshot(_), Projection::Snapshot(_))
                | (Projected::Steps, Projection::Step(_))
                | (Projected::StepIndex, Projection::Log(_))
        )
    }
}

fn context(run: RunId, page: &Timeline) -> WireContext<'_> {
    let (queue, started_at) = (page.queue.as_deref(), page.started_at);
    WireContext { run, flow_name: &page.flow, queue, tags: &page.tags, started_at }
}

async fn runs(call: &Call, flow: &str, asked: &Asked) -> Result<(Vec<Value>, Option<u64>), Failure> {
    call.engine().flow(call.ns(), flow, None).await?;
    let until = tokio::time::Instant::now() + asked.wait;
    loop {
        let page = Page { after: Some(asked.after), limit: asked.limit };
        let found = call.engine().run_feed(call.ns(), flow, page).await?;
        let next = (found.len() == asked.limit).then(|| found.last().map(|last| last.position)).flatten();
        let mut items = Vec::with_capacity(found.len());
        for summary in &found {
            items.push(indexed(summary, call.engine().run_queue(call.ns(), summary).await?));
        }
        items.retain(|record| asked.wants(record));
        if !items.is_empty() || tokio::time::Instant::now() >= until || *call.api.stopping().borrow() {
            return Ok((items, next));
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// A run's record in the index, numbered by the feed.
fn indexed(summary: &Summary, queue: Option<String>) -> Value {
    let header = &summary.header;
    let created_at = Time::at(summary.created_at);
    let line = RunIndexed {
        id: summary.run,
        flow_name: header.flow.clone(),
        queue: queue.clone(),
        created_at,
        source_id: "1".to_owned(),
    };
    let meta = Meta {
        flow_id: summary.run,
        flow_name: &header.flow,
        step_key: None,
        step_run_id: None,
        attempt: None,
        job_id: None,
        queue: queue.as_deref().unwrap_or(super::tasks::DEFAULT_QUEUE),
        tags: &header.tags,
    };
    json!(Envelope {
        id: summary.position.to_string(),
        stream: format!("nq:proj:flow-runs:{}", header.flow),
        ts: created_at,
        kind: Projection::Indexed(&line).kind().to_owned(),
        subject: queue.as_deref().unwrap_or(super::tasks::DEFAULT_QUEUE),
        data: json!(line),
        meta,
        v: 1,
    })
}
