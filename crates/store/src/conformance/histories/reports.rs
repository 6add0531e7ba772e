//! Random reports on tasks that workers hold or held.

use eddyline_machine::{CallOptions, CodeOp, CodeWait, Due, Failure, Log, Op, TaskKind};
use serde_json::{Value, json};

use super::Same;
use super::operations::Happening;
use super::world::World;

impl World<'_> {
    pub async fn report(&mut self, h: &mut Happening<'_>) -> Same {
        if self.claimed.is_empty() {
            return Ok(());
        }
        // On one of the tasks claimed last; some of these reports are late.
        let back = h.below(self.claimed.len().min(6));
        let claimed = self.claimed[self.claimed.len() - 1 - back].clone();
        if !self.is_there(claimed.run).await {
            return Ok(());
        }
        let op = if claimed.task.kind == TaskKind::Run { code_op(h) } else { step_op(h) };
        let input = self.drive.report_of(&claimed, op);
        let claims = self.requests_beside(h);
        self.decide_and_write(claimed.run, input, claims).await
    }
}

fn step_op(h: &mut Happening<'_>) -> Op {
    match h.below(12) {
        0..=6 => {
            let emits = if h.one_in(3) { vec![("x".to_owned(), payload(h).into())] } else { Vec::new() };
            Op::Complete { output: payload(h).into(), emits, logs: Vec::new() }
        }
        7 | 8 => fail(h),
        9 => Op::Defer { after_ms: h.below(2) as i64 * 700, limit: h.one_in(2).then(|| "api".to_owned()) },
        10 => Op::Publish {
            name: "ping".to_owned(),
            as_name: None,
            key: Some(json!(h.below(2)).into()),
            payload: payload(h).into(),
        },
        _ => Op::Log(Log { level: "info".to_owned(), msg: "hello".to_owned(), meta: Some(payload(h).into()) }),
    }
}

fn code_op(h: &mut Happening<'_>) -> Op {
    let name = ["pay", "mail", "ship", "undo:pay"][h.below(4)].to_owned();
    let op = match h.below(16) {
        0..=2 => CodeOp::Done { output: payload(h).into(), undo: h.one_in(2) },
        3 => {
            let limits = vec![("api".to_owned(), None), ("tenant".to_owned(), Some(h.below(2).to_string()))];
            let (timeout_ms, start_timeout_ms) = (h.one_in(2).then_some(900), h.one_in(3).then_some(1_200));
            let options = CallOptions { priority: 1, limits, timeout_ms, start_timeout_ms, ..CallOptions::default() };
            let options = h.one_in(2).then(|| Box::new(options));
            CodeOp::Call { handler: "pay".to_owned(), input: payload(h).into(), queue: None, options }
        }
        4 => CodeOp::Sleep { due: Due::After(800) },
        5 => CodeOp::Wait { wait: CodeWait::Manual, timeout_ms: h.one_in(2).then_some(2_000) },
        6 => CodeOp::Child { flow: "chain".to_owned(), input: payload(h).into(), detached: h.one_in(2), options: None },
        7 | 8 => return Op::Suspend { seen: None },
        9 => return fail(h),
        10 => return Op::LetGo { name },
        11 => return Op::Release,
        12 if h.one_in(2) => return Op::Unwind { error: Failure::new("Boom", "for good") },
        13 => {
            let (as_name, key) = (Some(name), Some(json!(h.below(2)).into()));
            return Op::Publish { name: "ping".to_owned(), as_name, key, payload: payload(h).into() };
        }
        _ => return Op::Complete { output: payload(h).into(), emits: Vec::new(), logs: Vec::new() },
    };
    Op::Code { name, op }
}

fn fail(h: &mut Happening<'_>) -> Op {
    let error = Failure::new("Boom", "it broke");
    Op::Fail { error, retryable: !h.one_in(3), retry_after_ms: h.one_in(3).then_some(1_500) }
}

fn payload(h: &mut Happening<'_>) -> Value {
    [json!({"n": 1}), json!(null), json!({"text": "y".repeat(600)}), json!([1, "two", 3.5])][h.below(4)].clone()
}
