//! Flows: register, list, show, delete.

use eddyline_engine::{BuildUse, FlowName, Registered};
use eddyline_language::definition;
use eddyline_language::time::iso;
use eddyline_machine::{Action, Body, Flow, Graph, ScopeId, Source, Status, Step, When};
use eddyline_protocol::{
    AnalysedStep, Analysis, Edge, FlowBuild, FlowBuilds, FlowInfo, FlowRegistered, FlowStats, Page,
};
use serde_json::json;

use super::body::{BodyKind, check_type};
use super::call::{ApiResult, Call, ok};
use super::failure::Failure;
use super::to_wire;

/// `PUT /v1/flows/{name}`
pub(crate) async fn register(mut call: Call) -> ApiResult {
    let bytes = call.bytes().await?;
    check_type(call.headers(), BodyKind::Definition)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| Failure::bad("the definition is not UTF-8"))?;
    let registered = call.engine().register(call.ns(), Some(call.param("name")), text).await?;
    ok(&FlowRegistered {
        name: registered.name,
        version: registered.version,
        changed: registered.changed,
        warnings: registered.warnings.iter().map(to_wire::problem).collect(),
    })
}

/// `GET /v1/flows`
pub(crate) async fn list(call: Call) -> ApiResult {
    let limit = call.limit()?;
    let flows = call.engine().flows(call.ns(), call.text("cursor").map(str::to_owned), limit).await?;
    let total = call.total(call.engine().count_flows(call.ns())).await?;
    let next = (flows.len() == limit).then(|| flows.last().map(|last| last.name.clone())).flatten();
    let mut items = Vec::with_capacity(flows.len());
    for FlowName { name, version, .. } in flows {
        let registered = call.engine().flow(call.ns(), &name, Some(&version)).await?;
        items.push(describe(&call, &registered).await?);
    }
    ok(&Page { items, next, total })
}

/// `GET /v1/flows/{name}`
pub(crate) async fn show(call: Call) -> ApiResult {
    let registered = call.engine().flow(call.ns(), call.param("name"), call.text("version")).await?;
    ok(&describe(&call, &registered).await?)
}

/// `GET /v1/flows/{name}/builds`
pub(crate) async fn builds(call: Call) -> ApiResult {
    let name = call.param("name");
    let found = call.engine().flow_builds(call.ns(), name).await?;
    let of = |(build, used): (_, BuildUse)| FlowBuild { build, runs: used.runs, workers: used.workers };
    ok(&FlowBuilds {
        flow: name.to_owned(),
        policy: if found.pinned { "pinned" } else { "latest" }.to_owned(),
        items: found.builds.into_iter().map(of).collect(),
    })
}

/// `DELETE /v1/flows/{name}`
pub(crate) async fn delete(call: Call) -> ApiResult {
    call.engine().delete_flow(call.ns(), call.param("name")).await?;
    ok(&json!({"deleted": true}))
}

async fn describe(call: &Call, registered: &Registered) -> Result<FlowInfo, Failure> {
    let flow = &registered.flow;
    let kind = match &flow.body {
        Body::Graph(_) => "graph",
        Body::Code(_) => "code",
    };
    let counts = call.engine().count_by_status(call.ns(), &flow.name).await?;
    let mut stats = FlowStats::default();
    for (status, count) in Status::ALL.into_iter().zip(counts) {
        *match status {
            Status::Pending => &mut stats.pending,
            Status::Running => &mut stats.running,
            Status::Waiting => &mut stats.waiting,
            Status::Paused => &mut stats.paused,
            Status::Completed => &mut stats.completed,
            Status::Failed => &mut stats.failed,
            Status::Cancelled => &mut stats.cancelled,
        } = count;
    }
    let registered_at = call.engine().registered_at(call.ns(), &flow.name, &flow.version).await?;
    Ok(FlowInfo {
        name: flow.name.clone(),
        version: flow.version.clone(),
        kind: kind.to_owned(),
        registered_at: registered_at.map(iso),
        definition: flow.canonical.clone(),
        analysis: analysis(flow),
        stats,
    })
}

/// The analysis of a flow in its wire format.
pub fn analysis(flow: &Flow) -> Analysis {
    match &flow.body {
        Body::Graph(graph) => analyse(graph, Graph::ROOT, definition::analysis(flow)),
        Body::Code(_) => Analysis::default(),
    }
}

fn analyse(graph: &Graph, scope: ScopeId, mut found: definition::Analysis) -> Analysis {
    let steps: Vec<&Step> = graph.scope(scope).steps.iter().map(|id| graph.step(*id)).collect();
    let kind_of = |to: &str, via: &str| {
        let step = steps.iter().find(|step| step.name == to);
        let arm = step.and_then(|step| step.arms.iter().find(|arm| arm.written == via));
        match arm.map(|arm| arm.source) {
            Some(Source::Step(_, When::Failed)) => "failed",
            Some(Source::Step(_, When::Ended)) => "ended",
            Some(Source::Step(_, When::Completed)) => "step",
            Some(Source::Event(_)) | None => "event",
        }
    };
    let edge = |edge: definition::Edge| Edge {
        kind: kind_of(&edge.to, &edge.via).to_owned(),
        from: edge.from,
        to: edge.to,
        arm: edge.via,
    };
    let group = |step: &&Step| match step.action {
        Action::Group(inner) => {
            found.groups.remove(&step.name).map(|found| (step.name.clone(), analyse(graph, inner, found)))
        }
        _ => None,
    };
    let groups = steps.iter().filter_map(group).collect();
    let finally = graph.finally.as_ref().zip(found.finally);
    Analysis {
        groups,
        finally: finally.map(|(finally, found)| Box::new(analyse(graph, finally.scope, *found))),
        levels: found.levels,
        edges: found.edges.into_iter().map(edge).collect(),
        entry: found.entry,
        steps: steps.iter().map(|step| analysed(step)).collect(),
    }
}

fn analysed(step: &Step) -> AnalysedStep {
    let worker = match &step.action {
        Action::Worker(worker) => Some(worker),
        _ => None,
    };
    let iterates = [("spread", step.spread.is_some()), ("repeat", step.repeat.is_some())];
    AnalysedStep {
        name: step.name.clone(),
        kind: step.action.kind().to_owned(),
        handler: worker.map(|worker| worker.handler.clone()),
        queue: worker.map(|worker| worker.queue_or(None).to_owned()),
        iterates: iterates.into_iter().filter(|(_, is)| *is).map(|(name, _)| name.to_owned()).collect(),
    }
}
