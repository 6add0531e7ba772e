//! What the log of the server says about plans.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Tables that stay small, or hold a row for each worker, queue, limit or instance that there is; and the states of rates,
/// which only retention reads as a whole.
const SMALL: [&str; 10] =
    ["meta", "versions", "namespaces", "instances", "queues", "limits", "classes", "workers", "leaving", "buckets"];
/// A call asks for at most 100 items. It may read some rows for each of them: what is held by others, what a run has.
const MOST_ROWS: f64 = 2_000.0;

pub struct Plans {
    file: PathBuf,
    from: u64,
    bad: Vec<String>,
    seen: usize,
}

impl Plans {
    pub fn of(file: &Path) -> Plans {
        Plans { file: file.to_owned(), from: 0, bad: Vec::new(), seen: 0 }
    }

    /// The text that was logged since the last look.
    fn logged(&mut self) -> String {
        let mut file = File::open(&self.file).unwrap();
        file.seek(SeekFrom::Start(self.from)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        self.from += text.len() as u64;
        text
    }

    pub fn skip(&mut self) {
        self.logged();
    }

    /// Looks at the plans since the last look, which are those of one call.
    pub fn check(&mut self, call: &str, when: &str) {
        let text = self.logged();
        let plans = plans(&text);
        assert!(!plans.is_empty() || call == "now", "{call}: no plan was logged");
        self.seen += plans.len();
        for plan in &plans {
            let mut why = Vec::new();
            look(&plan["Plan"], &mut why);
            for why in why {
                let text = plan["Query Text"].as_str().unwrap_or_default();
                let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect();
                self.bad.push(format!("{call}, {when}: {why}\n    in {text}"));
            }
        }
    }

    pub fn assert_good(&self) {
        assert!(self.seen > 200, "only {} plans were logged", self.seen);
        assert!(self.bad.is_empty(), "{} bad plans:\n{}", self.bad.len(), self.bad.join("\n"));
    }
}

/// A plan is the continuation of a line that ends with `plan:`, each of its lines behind a tab.
fn plans(text: &str) -> Vec<Value> {
    let mut lines = text.lines().peekable();
    let mut plans = Vec::new();
    while let Some(line) = lines.next() {
        if !line.trim_end().ends_with("plan:") {
            continue;
        }
        let mut plan = String::new();
        while let Some(line) = lines.next_if(|line| line.starts_with('\t')) {
            plan.push_str(line);
        }
        plans.push(serde_json::from_str(&plan).unwrap_or_else(|error| panic!("{error}: {plan}")));
    }
    plans
}

fn number(node: &Value, name: &str) -> f64 {
    node[name].as_f64().unwrap_or(0.0)
}

fn look(node: &Value, why: &mut Vec<String>) {
    let kind = node["Node Type"].as_str().unwrap_or_default();
    let loops = number(node, "Actual Loops");
    let rows = number(node, "Actual Rows") * loops;
    if let Some(table) = node["Relation Name"].as_str().filter(|table| !SMALL.contains(table)) {
        if kind == "Seq Scan" {
            why.push(format!("it reads {table} from end to end"));
        }
        let dropped = ["Rows Removed by Filter", "Rows Removed by Index Recheck", "Rows Removed by Join Filter"];
        let read = rows + dropped.iter().map(|name| number(node, name)).sum::<f64>() * loops;
        if read > MOST_ROWS && kind != "ModifyTable" {
            let index = node["Index Name"].as_str().map(|index| format!(" by {index}")).unwrap_or_default();
            why.push(format!("it reads {read} rows of {table}{index}"));
        }
    }
    let inner = node["Plans"].as_array().map(Vec::as_slice).unwrap_or_default();
    if kind.contains("Sort") {
        let sorted: f64 = inner.iter().map(|of| number(of, "Actual Rows") * number(of, "Actual Loops")).sum();
        if sorted > MOST_ROWS {
            why.push(format!("it sorts {sorted} rows by {}", node["Sort Key"]));
        }
    }
    for node in inner {
        look(node, why);
    }
}
