//! Explains why a run has not ended: what each open activation waits for, arm by arm, and which activations could still
//! provide it.

use serde::Serialize;
use serde_json::Value;

use crate::decide::gate::name_and_key;
use crate::ids::{ActId, Fence, RunId};
use crate::run::{Activation, Activations, Driver, GateState, Inside, Phase, Place, Run, State, Token, What, queue_of};
use eddyline_language::flow::{Action, Flow, Graph, Source, Waits};

/// What one activation waits for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    #[serde(skip)]
    pub id: ActId,
    pub activation: String,
    pub waits_for: WaitsFor,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum WaitsFor {
    /// A run that has not begun waits for its delay. The engine fills in the time, from its timers.
    Delay {
        until: Option<String>,
    },
    /// A run waits for its unique key.
    Unique {
        key: String,
    },
    /// Arms that have no token yet.
    Arms {
        arms: Vec<ArmView>,
    },
    Gate {
        reason: &'static str,
        event: Option<String>,
        /// For an event gate: the key that the event must have; without one, any event of the name opens it.
        key: Option<Value>,
        /// When a time gate opens, or another gate times out. Filled in by the engine, from its timers.
        until: Option<String>,
    },
    /// A worker has its task, or is still to claim it.
    Worker {
        handler: String,
        queue: String,
        attempt: u32,
        fence: Fence,
        /// Why the task cannot be claimed now. Filled in by the engine, from its queue.
        #[serde(skip_serializing_if = "Option::is_none")]
        bound: Option<Bound>,
        /// What the task requires and no worker offers. Filled in by the engine, from the known workers.
        #[serde(skip_serializing_if = "Option::is_none")]
        lack: Option<Lack>,
    },
    /// Its next attempt.
    BackOff {
        attempt: u32,
        /// Filled in by the engine, from its timers.
        until: Option<String>,
    },
    Child {
        run_id: RunId,
    },
    /// Its open parts.
    Inside {
        open: u32,
        to_come: u32,
    },
    /// The report of an attempt that was running when it was cancelled.
    LastReport {
        fence: Fence,
    },
    /// A suspended code run waits for a change.
    News,
    /// Its function, which will retry it.
    Function {
        /// When it may do so. Filled in by the engine, from its timers.
        until: Option<String>,
    },
    /// The next transition of the run, which is already scheduled.
    NextTransition,
}

/// What prevents a queued task from being claimed, by any worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Bound {
    /// Its queue is paused.
    Paused,
    /// Its queue has reached its limit of `most` running tasks.
    Concurrency { most: u32 },
    /// Its flow has reached its limit of `most` running tasks on the queue.
    FlowConcurrency { most: u32 },
    /// Its queue's rate limit.
    Rate,
    /// A named limit: `most` of its tasks are running; without a number, its rate is used up or a worker asked to slow
    /// it down.
    Limit { name: String, most: Option<u32> },
}

/// What a queued task requires and no known worker offers: the first requirement that rules out the last worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Lack {
    /// No worker serves its queue.
    Queue,
    /// None of these has its handler or function.
    Handler,
    /// None of these has all its labels.
    Labels { labels: Vec<String> },
    /// None of these has the build that its run is pinned to.
    Build { build: String },
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArmView {
    /// As written in the definition.
    pub arm: String,
    /// `open`, `live` or `dead`.
    pub token: &'static str,
    /// The activations that could still provide it.
    pub from: Vec<String>,
}

/// What every open activation waits for; before a run begins, what the run waits for. Never empty for a run that has
/// begun and not ended.
pub fn explain(flow: &Flow, run: &Run) -> Vec<Explanation> {
    let explanation = |activation: &Activation, waits_for| Explanation {
        id: activation.id,
        activation: run.activation_name(flow, activation.id),
        waits_for,
    };
    let shows_root = flow.graph().is_none() || run.header.phase == Phase::Delayed;
    let open = run.activations.iter().filter(|activation| activation.is_open());
    let mut explained: Vec<Explanation> = open
        .filter(|activation| shows_root || activation.place != Place::Root)
        .map(|activation| explanation(activation, waits_for(flow, run, activation)))
        .collect();
    if explained.is_empty() && run.header.phase != Phase::Ended {
        // All its steps have ended, and the rest of its agenda is still to be decided.
        let root = run.activations.iter().find(|activation| activation.place == Place::Root);
        explained.extend(root.map(|root| explanation(root, WaitsFor::NextTransition)));
    }
    explained
}

fn waits_for(flow: &Flow, run: &Run, activation: &Activation) -> WaitsFor {
    match &activation.state {
        _ if run.header.phase == Phase::Delayed => match &run.header.unique {
            Some(unique) if run.header.in_line => WaitsFor::Unique { key: unique.key.clone() },
            _ => WaitsFor::Delay { until: None },
        },
        State::Waiting => {
            WaitsFor::Arms { arms: flow.graph().map_or_else(Vec::new, |graph| arms(graph, run, activation)) }
        }
        State::Gated => gate(flow, run, activation),
        State::Queued(fence) => worker(flow, run, activation, *fence),
        State::Draining(fence) => WaitsFor::LastReport { fence: *fence },
        State::BackOff { .. } => WaitsFor::BackOff { attempt: activation.attempt, until: None },
        State::Child(child) | State::Starting(child) => WaitsFor::Child { run_id: *child },
        State::Retrying { .. } => WaitsFor::Function { until: None },
        State::Open(Inside { what: What::Code(driver), .. }) => match driver {
            Driver::Queued(fence) => worker(flow, run, activation, *fence),
            Driver::BackOff { .. } => WaitsFor::BackOff { attempt: activation.attempt, until: None },
            Driver::Suspended { .. } => WaitsFor::News,
            Driver::Done => WaitsFor::NextTransition,
        },
        State::Open(inside) => {
            let to_come = match &inside.what {
                What::Spread { items, next, .. } if inside.closing.is_none() => items - next,
                _ => 0,
            };
            WaitsFor::Inside { open: inside.open, to_come }
        }
        State::Certain { .. } | State::Ready | State::Ended(_) => WaitsFor::NextTransition,
    }
}

fn arms(graph: &Graph, run: &Run, activation: &Activation) -> Vec<ArmView> {
    let Place::Step { step, scope } = activation.place else { return Vec::new() };
    let step = graph.step(step);
    let Some(body) = run.at(scope).body else { return Vec::new() };
    let sender = |step| ActId(body.first.0 + graph.step(step).slot);
    let view = |(arm, token): (&eddyline_language::flow::Arm, &Token)| {
        let senders: Vec<ActId> = match arm.source {
            Source::Step(step, _) => vec![sender(step)],
            Source::Event(event) => {
                graph.scope(body.scope).events[event].producers.iter().map(|(step, _)| sender(*step)).collect()
            }
        };
        let from = match token {
            Token::Open => senders.into_iter().filter(|id| run.at(*id).is_open()).collect(),
            _ => Vec::new(),
        };
        let from = from.into_iter().map(|id| run.name(Some(graph), id)).collect();
        let token = match token {
            Token::Open => "open",
            Token::Live | Token::LateLive => "live",
            Token::Dead | Token::LateDead => "dead",
        };
        ArmView { arm: arm.written.clone(), token, from }
    };
    step.arms.iter().zip(&activation.arms).map(view).collect()
}

fn gate(flow: &Flow, run: &Run, activation: &Activation) -> WaitsFor {
    let definition = flow.graph().and_then(|graph| graph.step(run.step_of(activation.id)?).gate.as_ref());
    let (event, key) = match &activation.gate {
        GateState::Waiting { event: Some(taken), .. } => name_and_key(taken),
        _ => (None, None),
    };
    let reason = match definition.map(|gate| &gate.waits) {
        Some(Waits::Time { .. } | Waits::Until(_)) => "time",
        Some(Waits::Webhook) => "webhook",
        Some(Waits::Manual) => "manual",
        Some(Waits::Event { .. }) => "event",
        None if event.is_some() => "event",
        None if matches!(activation.gate, GateState::Waiting { manual: true, .. }) => "manual",
        None if activation.gate_token.is_some() => "webhook",
        None => "time",
    };
    WaitsFor::Gate { reason, event, key, until: None }
}

fn worker(flow: &Flow, run: &Run, activation: &Activation, fence: Fence) -> WaitsFor {
    let step = flow.graph().and_then(|graph| Some(graph.step(run.step_of(activation.id)?)));
    let handler = match (&activation.place, step.map(|step| (&step.action, &step.undo))) {
        (Place::Memo(memo), _) => memo.call.clone().unwrap_or_default().0,
        (Place::Undo { .. }, Some((_, undo))) => undo.clone().unwrap_or_default(),
        (_, Some((Action::Worker(worker), _))) => worker.handler.clone(),
        _ => flow.name.clone(),
    };
    let queue = queue_of(run, flow, &run.header, activation.id).unwrap_or_default().to_owned();
    WaitsFor::Worker { handler, queue, attempt: activation.attempt, fence, bound: None, lack: None }
}
