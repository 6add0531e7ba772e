//! Ctrl-C leaves no processes or files behind.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::rig::{Process, Server, command, eddy};

fn pid(process: &Process) -> Pid {
    Pid::from_raw(i32::try_from(process.0.id()).unwrap()).unwrap()
}

#[test]
fn a_demo_that_is_interrupted_leaves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let mut demo = command();
    demo.arg("demo").env("TMPDIR", place.path()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut demo = Process(demo.spawn().unwrap());
    let mut lines = BufReader::new(demo.0.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    let engine: String = first.split("process ").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    kill_process(pid(&demo), Signal::INT).unwrap();
    assert_eq!(demo.0.wait().unwrap().code(), Some(130));
    let engine = Pid::from_raw(engine.parse().unwrap()).unwrap();
    assert!(test_kill_process(engine).is_err(), "the engine is still there");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "its folder was not removed");
}

/// `eddy dev` in a new project, and a function that waits for a line of its output with that text.
fn dev(dir: &std::path::Path) -> (Process, impl FnMut(&str) -> String + use<>) {
    eddy(dir, &["init", "."]).good();
    let mut dev = command();
    dev.current_dir(dir).args(["dev", "--listen", "127.0.0.1:0", "--", "./worker.sh"]);
    let mut dev = Process(dev.stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(dev.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let wait_for =
        move |sign: &str| lines.find(|line| line.contains(sign)).unwrap_or_else(|| panic!("{sign} never came"));
    (dev, wait_for)
}

#[test]
fn dev_registers_what_is_written_restarts_its_worker_and_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut dev, mut wait_for) = dev(dir.path());
    let first = wait_for("listens on");
    let url = first.split("listens on ").nth(1).unwrap().split(',').next().unwrap().to_owned();
    wait_for("greet: ./steps/greet.sh");
    let waited = |name: &str| {
        let input = format!("{{\"name\": \"{name}\"}}");
        eddy(dir.path(), &["--json", "--url", &url, "start", "greet", "--wait", "--input", &input]).good().json()
    };
    // The flow and the worker start in parallel: wait until the flow is registered.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while eddy(dir.path(), &["--url", &url, "flow", "show", "greet"]).code != 0 {
        assert!(std::time::Instant::now() < until, "greet was never registered");
    }
    assert_eq!(waited("Ada")["output"]["greeting"], "Hello Ada");
    assert_eq!(waited(r#"\"A\\$(b)'%s"#)["output"]["greeting"], r#"Hello "A\$(b)'%s!"#);
    let bad = dir.path().join("flows/bad.yaml");
    std::fs::write(&bad, "name: bad\nsteps: {a: {after: [b]}}\n").unwrap();
    wait_for("there is no step `b` here");
    std::fs::write(&bad, "name: bad\nsteps: {a: {}}\n").unwrap();
    wait_for("✓ bad ");
    let script = dir.path().join("steps/greet.sh");
    let text = std::fs::read_to_string(&script).unwrap().replace("Hello", "Good morning");
    std::fs::write(&script, text).unwrap();
    wait_for("restarting the worker");
    wait_for("greet: ./steps/greet.sh");
    assert_eq!(waited("Ada")["output"]["greeting"], "Good morning Ada");
    kill_process(pid(&dev), Signal::INT).unwrap();
    wait_for("stopping");
    assert_eq!(dev.0.wait().unwrap().code(), Some(0));
    // It has closed its store.
    eddy(dir.path(), &["doctor", "--store", ".eddyline"]).good();
}

#[test]
fn dev_takes_a_flow_from_one_file_and_says_what_becomes_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join("flows").join(name);
    let (mut dev, mut wait_for) = dev(dir.path());
    wait_for("✓ greet ");
    // A file that was never registered.
    std::fs::write(file("bad.yaml"), "name: bad\nsteps: {a: {after: [b]}}\n").unwrap();
    wait_for("there is no step `b` here");
    std::fs::remove_file(file("bad.yaml")).unwrap();
    assert!(wait_for("bad.yaml was removed").ends_with("bad.yaml was removed"));
    // The first file keeps its flow until it is removed, whatever the names of the files.
    std::fs::write(file("again.yaml"), "name: greet\nsteps: {a: {}}\n").unwrap();
    wait_for("the flow `greet` is also in flows/greet.yaml");
    wait_for("greet stays registered from flows/greet.yaml");
    std::fs::remove_file(file("greet.yaml")).unwrap();
    wait_for("greet.yaml was removed; its flow greet stays registered");
    assert!(wait_for("✓ greet ").ends_with("registered from flows/again.yaml"));
    // Moving a file does not change its flow.
    std::fs::rename(file("again.yaml"), file("later.yaml")).unwrap();
    wait_for("again.yaml was removed");
    assert!(wait_for("✓ greet ").ends_with("unchanged"));
    kill_process(pid(&dev), Signal::INT).unwrap();
    assert_eq!(dev.0.wait().unwrap().code(), Some(0));
}

#[test]
fn dev_ends_if_its_worker_cannot_be_started() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["dev", "--listen", "127.0.0.1:0", "--store", "memory:", "--", "./no-such-program"];
    let ran = eddy(dir.path(), &args).bad(2);
    assert!(ran.err.contains("`./no-such-program` cannot be started"), "{ran:?}");
}

/// A FIFO that a command writes to as soon as it runs.
fn pipe(dir: &std::path::Path) -> std::path::PathBuf {
    let fifo = dir.join("runs");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    fifo
}

fn until_gone(pid: i32) {
    let dead = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        test_kill_process(Pid::from_raw(pid).unwrap()).is_err() || stat.is_ok_and(|stat| stat.contains(") Z "))
    };
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !dead() {
        assert!(std::time::Instant::now() < until, "process {pid} is still there");
        std::thread::yield_now();
    }
}

#[test]
fn a_worker_that_is_interrupted_twice_takes_its_commands_with_it() {
    let server = Server::start();
    server.apply("name: f\nsteps: {a: {}}");
    let fifo = pipe(server.dir.path());
    let (mut worker, mut lines) = server.worker(&["a=echo $$ > runs; exec sleep 1000"]);
    server.eddy(&["start", "f"]).good();
    let command: i32 = std::fs::read_to_string(fifo).unwrap().trim().parse().unwrap();
    kill_process(pid(&worker), Signal::INT).unwrap();
    lines.find(|line| line.contains("Interrupt again")).expect("the worker does not say how to kill its commands");
    kill_process(pid(&worker), Signal::INT).unwrap();
    assert_eq!(worker.0.wait().unwrap().code(), Some(130));
    until_gone(command);
}

#[test]
fn dev_goes_on_while_its_worker_cannot_be_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut dev, mut wait_for) = dev(dir.path());
    wait_for("greet: ./steps/greet.sh");
    std::fs::rename(dir.path().join("worker.sh"), dir.path().join("away")).unwrap();
    std::fs::write(dir.path().join("steps/new.sh"), "").unwrap();
    wait_for("cannot be started");
    std::fs::rename(dir.path().join("away"), dir.path().join("worker.sh")).unwrap();
    wait_for("greet: ./steps/greet.sh");
    kill_process(pid(&dev), Signal::INT).unwrap();
    assert_eq!(dev.0.wait().unwrap().code(), Some(0));
}
