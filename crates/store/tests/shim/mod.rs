//! Runs a test of this binary in its own process, under a shim that records file operations and fails writes on demand
//! (`disk.c`).

#![allow(dead_code)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub const ROOT: &str = "DISK_ROOT";
pub const RECORD: &str = "DISK_RECORD";
pub const FAULTS: &str = "DISK_FAULTS";

/// Compiles the shim; quick enough for every test process to do so itself.
pub fn library() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../store/tests/shim/disk.c");
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("disk-{}.so", std::process::id()));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&to, &source])
        .arg("-ldl")
        .output()
        .unwrap_or_else(|error| panic!("cannot start the C compiler {compiler}, which this test needs: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    to
}

/// Runs an ignored test of this binary on files under `root`.
pub fn run(test: &str, root: &Path, record: Option<&Path>, envs: &[(&str, String)]) -> Output {
    let library = library();
    let faults = tempfile::NamedTempFile::new().unwrap();
    let _ = Faults::make(faults.path());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command.env("LD_PRELOAD", &library).env(ROOT, root).env(FAULTS, faults.path());
    command.envs(envs.iter().map(|(name, value)| (name, value)));
    if let Some(record) = record {
        command.env(RECORD, record);
    }
    let output = command.output().unwrap();
    let _ = fs::remove_file(library);
    output
}

/// Runs the test and asserts that it passed.
pub fn succeeds(test: &str, root: &Path) {
    let output = run(test, root, None, &[]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("1 passed"), "{test} was not run: {said}");
}

/// The directory of a child; none if the test is not run as one.
pub fn root() -> Option<PathBuf> {
    std::env::var_os(ROOT).map(PathBuf::from)
}

pub const EIO: i32 = 5;
pub const ENOSPC: i32 = 28;
pub const EDQUOT: i32 = 122;

/// Controls which writes fail.
pub struct Faults(File);

impl Faults {
    pub fn of_child() -> Faults {
        Faults::at(Path::new(&std::env::var_os(FAULTS).unwrap()))
    }

    /// Creates the file for a process to be started.
    pub fn make(path: &Path) -> Faults {
        fs::write(path, [0; 20]).unwrap();
        Faults::at(path)
    }

    fn at(path: &Path) -> Faults {
        Faults(fs::OpenOptions::new().read(true).write(true).open(path).unwrap())
    }

    /// Makes writes hang, or resume.
    pub fn hang(&self, hangs: bool) {
        self.0.write_all_at(&i32::from(hangs).to_ne_bytes(), 16).unwrap();
    }

    /// The next `succeed` writes succeed, then `fail` writes fail with `error`. With `half`, half of the first of these
    /// is written before.
    pub fn set(&self, succeed: i32, fail: i32, error: i32, half: bool) {
        let mut bytes = Vec::new();
        for number in [succeed, fail, error, i32::from(half)] {
            bytes.extend(number.to_ne_bytes());
        }
        self.0.write_all_at(&bytes, 0).unwrap();
    }

    pub fn clear(&self) {
        self.set(0, 0, 0, false);
    }
}
