//! The shape of a flow, for drawing it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::resolve::steps_of;
use crate::flow::{Action, Body, Flow, Graph};
use crate::ids::ScopeId;

/// The shape of one scope and the groups in it. Empty for a code flow, whose steps are known only at run time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Analysis {
    /// The steps that wait for nothing.
    pub entry: Vec<String>,
    /// Step names, by the length of the longest chain of steps before them.
    pub levels: Vec<Vec<String>>,
    pub edges: Vec<Edge>,
    /// By the name of the group step.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, Analysis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finally: Option<Box<Analysis>>,
}

/// `to` waits for `from`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Edge {
    pub from: String,
    pub to: String,
    /// The arm as written: an event's name if `from` may emit it.
    pub via: String,
}

pub fn analysis(flow: &Flow) -> Analysis {
    let Body::Graph(graph) = &flow.body else { return Analysis::default() };
    let finally = graph.finally.as_ref().map(|finally| Box::new(scope(graph, finally.scope)));
    Analysis { finally, ..scope(graph, Graph::ROOT) }
}

fn scope(graph: &Graph, id: ScopeId) -> Analysis {
    let mut analysis = Analysis::default();
    let body = graph.scope(id);
    for step in body.steps.iter().map(|id| graph.step(*id)) {
        let level = step.level as usize;
        if analysis.levels.len() <= level {
            analysis.levels.resize(level + 1, Vec::new());
        }
        analysis.levels[level].push(step.name.clone());
        if step.arms.is_empty() {
            analysis.entry.push(step.name.clone());
        }
        for arm in &step.arms {
            analysis.edges.extend(steps_of(&body.events, arm.source).into_iter().map(|from| Edge {
                from: graph.step(from).name.clone(),
                to: step.name.clone(),
                via: arm.written.clone(),
            }));
        }
        if let Action::Group(inner) = step.action {
            analysis.groups.insert(step.name.clone(), scope(graph, inner));
        }
    }
    analysis
}
