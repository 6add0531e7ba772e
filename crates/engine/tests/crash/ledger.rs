//! What was acknowledged, on disk before anything else happens.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Mutex;

use eddyline_engine::TaskToken;
use eddyline_machine::RunId;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Line {
    /// A client was told that its run has started.
    Started { run: RunId, key: String },
    /// A worker was told that its completion was taken.
    Completed { token: String, activation: String },
    /// Somebody was told that the gate is open.
    Opened { run: RunId, activation: u32 },
}

#[derive(Debug)]
pub struct Ledger(Mutex<File>);

impl Ledger {
    pub fn open(dir: &Path) -> Ledger {
        Ledger(Mutex::new(OpenOptions::new().create(true).append(true).open(dir.join("ledger")).unwrap()))
    }

    pub fn write(&self, line: &Line) {
        let mut text = serde_json::to_string(line).unwrap();
        text.push('\n');
        let mut file = self.0.lock().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.sync_data().unwrap();
    }
}

/// Everything in the ledger. The last line of a process that was killed may be cut short: nobody relied on it.
pub fn read(dir: &Path) -> Vec<Line> {
    let lines = BufReader::new(File::open(dir.join("ledger")).unwrap()).lines();
    lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok()).collect()
}

/// Completed tasks by run: the activation and the fence.
pub fn completed(lines: &[Line]) -> BTreeMap<RunId, Vec<(String, u64)>> {
    let mut by_run: BTreeMap<RunId, Vec<(String, u64)>> = BTreeMap::new();
    for line in lines {
        if let Line::Completed { token, activation } = line {
            let token: TaskToken = token.parse().unwrap();
            by_run.entry(token.run).or_default().push((activation.clone(), token.fence.0));
        }
    }
    by_run
}
