//! Runs a flow from its text to its end, with simulated workers: `cargo run --example tour`.

use std::collections::BTreeMap;

use eddyline_language::definition;
use eddyline_machine::wire::{WireContext, to_wire};
use eddyline_machine::*;
use serde_json::{Value, json};

pub const FLOW: &str = r#"
name: order
steps:
  reserve: {retry: {attempts: 3}}
  review:  {after: [reserve], if: "steps.reserve.output.total > 100"}
  each:    {after: [reserve], spread: "steps.reserve.output.items", run: price}
  sum:     {after: [each], set: "${sum(steps.each.output)}"}
  ship:    {after: [sum, "ended:review"]}
output: {total: "${steps.sum.output}", label: "${steps.ship.output}"}
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", timeline()?);
    Ok(())
}

/// The timeline of the run, one line per record.
pub fn timeline() -> Result<String, Box<dyn std::error::Error>> {
    let flow = definition::parse(FLOW)?.flow;
    let mut host = Host::new(&flow);
    host.submit(Input::Start(Box::new(Start { input: Some(json!({"order": 7}).into()), ..Start::default() })))?;
    while let Some(next) = host.next() {
        host.submit(next)?;
    }
    let mut out = String::new();
    for record in &host.records {
        let wire = to_wire(&host.context(), record, &|data| host.json(data));
        let (kind, data) = (wire["kind"].as_str().unwrap_or("?"), brief(&wire["data"]));
        out += &format!("{:>3}  {kind:<24} {:<9} {data}\n", record.n, step(&wire));
    }
    out += &format!("\n{} after {} commits\n", host.run.header.status().as_str(), host.run.header.version);
    Ok(out)
}

/// A minimal host of a run: it commits at once, and its workers answer by themselves.
struct Host<'a> {
    flow: &'a Flow,
    run: Run,
    records: Vec<Numbered>,
    tasks: Vec<Task>,
    timers: BTreeMap<TimerKey, Millis>,
    now: Millis,
}

impl<'a> Host<'a> {
    fn new(flow: &'a Flow) -> Host<'a> {
        let run = Run::new(RunId::default().derive("tour"));
        Host { flow, run, records: Vec::new(), tasks: Vec::new(), timers: BTreeMap::new(), now: 1_767_323_045_678 }
    }

    fn submit(&mut self, input: Input) -> Result<(), Halt> {
        let env = Env::new(self.now, [7; 32], "http://127.0.0.1:7070/hooks/");
        let transition = decide(self.flow, &self.run, &env, &[input])?;
        self.run.apply(&transition, self.flow);
        for change in transition.tasks {
            match change {
                TaskChange::Add(task) => self.tasks.push(*task),
                TaskChange::Close(fence) | TaskChange::Remove(fence) => self.tasks.retain(|task| task.fence != fence),
            }
        }
        for change in transition.timers {
            match change {
                TimerChange::Set { key, due: Due::After(ms) } => self.timers.insert(key, self.now + ms),
                TimerChange::Set { key, due: Due::At(at) } => self.timers.insert(key, at),
                TimerChange::Clear(key) => self.timers.remove(&key),
            };
        }
        for record in transition.records {
            self.record(record);
        }
        Ok(())
    }

    /// The next input: a worker claims a task and reports, or a timer is due.
    fn next(&mut self) -> Option<Input> {
        if let Some(task) = self.tasks.first().cloned() {
            self.record(task.started(Some("simulated".to_owned())));
            let op = work(&task, &self.json(&task.input).unwrap_or(Value::Null));
            let of = TaskRef { activation: task.activation, fence: task.fence };
            return Some(Input::Report(Report { task: of, seq: Some(1), op, claim: Claim::default() }));
        }
        let (key, due) = self.timers.iter().min_by_key(|(_, due)| **due).map(|(key, due)| (*key, *due))?;
        self.timers.remove(&key);
        self.now = due;
        Some(Input::Due(key))
    }

    fn record(&mut self, record: Record) {
        self.records.push(Numbered { n: self.records.len() as u64 + 1, ts: self.now, record });
    }

    fn json(&self, data: &Data) -> Option<Value> {
        data.materialise(&|id| self.run.values.get(&id)).ok()
    }

    fn context(&self) -> WireContext<'_> {
        let started_at = self.records.first().map_or(self.now, |first| first.ts);
        WireContext { run: self.run.header.run, flow_name: &self.flow.name, queue: None, tags: &[], started_at }
    }
}

/// The worker: reserving fails at first, pricing takes an item, shipping prints a label.
fn work(task: &Task, input: &Value) -> Op {
    let output = match (task.handler.as_str(), task.attempt) {
        ("reserve", 1) => {
            let error = Failure::new("Busy", "the warehouse did not answer");
            return Op::Fail { error, retryable: true, retry_after_ms: None };
        }
        ("reserve", _) => json!({"items": [{"sku": "a", "cents": 250}, {"sku": "b", "cents": 400}], "total": 90}),
        ("price", _) => input["cents"].clone(),
        (handler, _) => json!(format!("{handler} done")),
    };
    Op::Complete { output: output.into(), emits: Vec::new(), logs: Vec::new() }
}

fn step(wire: &Value) -> &str {
    wire["meta"]["stepKey"].as_str().unwrap_or("")
}

fn brief(data: &Value) -> String {
    let mut data = data.clone();
    if let Some(fields) = data.as_object_mut() {
        fields.remove("stepKey");
    }
    data.to_string()
}
