//! The ledger of acknowledgements, synced to disk before anything else happens.

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
    /// The start of a run was acknowledged to its client.
    Started { run: RunId, key: String },
    /// A completion was acknowledged to its worker.
    Completed { token: String, activation: String },
    /// The opening of a gate was acknowledged.
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

/// Everything in the ledger. The last line of a killed process may be truncated: nothing was acknowledged by it.
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
