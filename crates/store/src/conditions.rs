//! The conditions of lists in SQL. What a filter means is written once; a [`Dialect`] has what differs between databases.

use eddyline_machine::RunId;
use eddyline_machine::record::GateReason;

use crate::ids::Namespace;
use crate::query::{DocumentFilter, GateFilter, RunFilter};

/// How a database writes conditions.
#[derive(Debug)]
pub(crate) struct Dialect {
    /// What precedes the number of a parameter.
    pub parameter: char,
    /// The names of the tables `runs` and `gates` in a statement.
    pub runs: &'static str,
    pub gates: &'static str,
    pub tagged: &'static str,
    /// Literal, so that partial indexes are used.
    pub trimmed: &'static str,
    pub kept: &'static str,
    pub gate_is_open: &'static str,
    /// The run of the gate is not trimmed: the gates of a trimmed run are about to be deleted.
    pub gate_is_kept: &'static str,
    pub gate_of_run: &'static str,
    pub begins_with: &'static str,
}

/// The value of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Text(String),
    Number(i64),
    Run(RunId),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Value {
        Value::Number(number)
    }
}

impl From<RunId> for Value {
    fn from(run: RunId) -> Value {
        Value::Run(run)
    }
}

/// Conditions joined by AND, with their parameters. Values are bound, not inlined, so there are few distinct statements,
/// and they stay prepared.
#[derive(Debug)]
pub(crate) struct Conditions {
    dialect: &'static Dialect,
    texts: Vec<String>,
    pub values: Vec<Value>,
}

impl Conditions {
    pub fn new(dialect: &'static Dialect) -> Conditions {
        Conditions { dialect, texts: Vec::new(), values: Vec::new() }
    }

    /// Every `?` in the condition stands for this value.
    pub fn and(&mut self, condition: &str, value: impl Into<Value>) {
        let place = self.bind(value);
        self.texts.push(condition.replace('?', &place));
    }

    pub fn only(&mut self, condition: impl Into<String>) {
        self.texts.push(condition.into());
    }

    fn bind(&mut self, value: impl Into<Value>) -> String {
        self.values.push(value.into());
        format!("{}{}", self.dialect.parameter, self.values.len())
    }

    pub fn text(&self) -> String {
        match self.texts.is_empty() {
            true => String::new(),
            false => format!(" WHERE {}", self.texts.join(" AND ")),
        }
    }

    pub fn of_runs(dialect: &'static Dialect, ns: Option<&Namespace>, filter: &RunFilter) -> Conditions {
        let (mut wanted, runs) = (Conditions::new(dialect), dialect.runs);
        if let Some(ns) = ns {
            wanted.and(&format!("{runs}.ns = ?"), ns.as_str());
        }
        if let Some(flow) = &filter.flow {
            wanted.and(&format!("{runs}.flow = ?"), flow.as_str());
        }
        match filter.status.as_slice() {
            [] => {}
            [status] => wanted.and(&format!("{runs}.status = ?"), status.as_str()),
            several => {
                let places: Vec<String> = several.iter().map(|status| wanted.bind(status.as_str())).collect();
                wanted.only(format!("{runs}.status IN ({})", places.join(", ")));
            }
        }
        if ns.is_none() && !filter.status.is_empty() && filter.status.iter().all(|status| !status.is_end()) {
            // Literal, so that the partial index of runs that have not ended is used.
            wanted.only(format!("{runs}.ended_at IS NULL"));
        }
        if let Some(id) = &filter.external_id {
            wanted.and(&format!("{runs}.external_id = ?"), id.as_str());
        }
        if let Some(root) = filter.root {
            wanted.and(&format!("{runs}.root = ?"), root);
        }
        if let Some(run) = filter.retry_of {
            wanted.and(&format!("{runs}.retry_of = ?"), run);
        }
        for tag in &filter.tags {
            wanted.and(dialect.tagged, tag.as_str());
        }
        let times = [
            ("created_at >= ?", filter.since),
            ("created_at < ?", filter.until),
            ("ended_at < ?", filter.ended_before),
        ];
        for (condition, time) in times {
            if let Some(time) = time {
                wanted.and(&format!("{runs}.{condition}"), time);
            }
        }
        if let Some(trimmed) = filter.trimmed {
            wanted.only(if trimmed { dialect.trimmed } else { dialect.kept });
        }
        wanted
    }

    /// `ns_column` is the column that has the namespace, which may be written so that its index is not used.
    pub fn of_gates(
        dialect: &'static Dialect,
        ns_column: &str,
        ns: Option<&Namespace>,
        filter: &GateFilter,
    ) -> Conditions {
        let (mut wanted, gates) = (Conditions::new(dialect), dialect.gates);
        if let Some(ns) = ns {
            wanted.and(&format!("{ns_column} = ?"), ns.as_str());
        }
        wanted.only(dialect.gate_is_kept);
        if let Some(token) = &filter.token {
            wanted.and(&format!("{gates}.token = ?"), token.as_str());
            return wanted;
        }
        wanted.only(dialect.gate_is_open);
        if let Some(run) = filter.run {
            wanted.and(dialect.gate_of_run, run);
        }
        if let Some((from, to)) = filter.activations {
            wanted.and(&format!("{gates}.activation >= ?"), i64::from(from.0));
            wanted.and(&format!("{gates}.activation <= ?"), i64::from(to.0));
        }
        if let Some(reason) = filter.reason {
            wanted.and(&format!("{gates}.reason = ?"), reason_text(reason));
        }
        if let Some((name, key)) = &filter.event {
            wanted.and(&format!("{gates}.event = ?"), name.as_str());
            match key {
                Some(key) => wanted.and(&format!("{gates}.event_key = ?"), key.as_str()),
                None => wanted.only(format!("{gates}.event_key IS NULL")),
            }
        }
        wanted
    }

    pub fn of_documents(dialect: &'static Dialect, ns: Option<&Namespace>, filter: &DocumentFilter) -> Conditions {
        let mut wanted = Conditions::new(dialect);
        wanted.and("kind = ?", filter.kind.as_str());
        if let Some(ns) = ns {
            wanted.and("ns = ?", ns.as_str());
        }
        if let Some(id) = &filter.id {
            wanted.and("id = ?", id.as_str());
        }
        if let Some(prefix) = &filter.prefix {
            wanted.and("id >= ?", prefix.as_str());
            wanted.and(dialect.begins_with, prefix.as_str());
        }
        match (&filter.after, &filter.after_ns) {
            (Some(after), None) => wanted.and("id > ?", after.as_str()),
            (Some(after), Some(ns)) => {
                // The first condition seeks in the index, the second is exact.
                wanted.and("id >= ?", after.as_str());
                let (id, ns) = (wanted.bind(after.as_str()), wanted.bind(ns.as_str()));
                wanted.only(format!("(id, ns) > ({id}, {ns})"));
            }
            (None, _) => {}
        }
        wanted
    }
}

/// Positions in SQL are signed; a larger one is after every row.
pub(crate) fn clamped(position: u64) -> i64 {
    i64::try_from(position).unwrap_or(i64::MAX)
}

/// A reason in a column.
pub(crate) fn reason_text(reason: GateReason) -> &'static str {
    match reason {
        GateReason::Time => "time",
        GateReason::Webhook => "webhook",
        GateReason::Event => "event",
        GateReason::Manual => "manual",
    }
}
