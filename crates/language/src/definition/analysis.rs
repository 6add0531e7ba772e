//! The shape of a flow, for those who draw it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::analyse::steps_of;
use crate::flow::{Action, Body, Flow, Graph};
use crate::ids::ScopeId;

/// The shape of one scope, with those of the groups in it. Empty for a code flow, whose steps are known only when it
/// runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Analysis {
    /// The steps that start at once.
    pub entry: Vec<String>,
    /// The names of the steps, by how many others come before them at most.
    pub levels: Vec<Vec<String>>,
    pub edges: Vec<Edge>,
    /// By the name of the step that is the group.
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
    /// The arm as it is written: the name of an event if `from` may emit it.
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
