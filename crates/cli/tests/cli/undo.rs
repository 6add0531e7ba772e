//! Commands of flows with `undo`.

use super::rig::Server;
use super::server::{start, until};

const BOOK: &str = "name: book
steps:
  flight: {undo: {run: cancel_flight}}
  hotel: {after: [flight]}
";

/// Waits for the file `go`, so that the test controls when the command ends.
const FLIGHT: &str = "flight=echo begun >&2; until [ -e go ]; do sleep 0.05; done; echo '{\"seat\": 7}'";
const UNDO: &str = "cancel_flight=cat > undone; echo undone >&2";

#[test]
fn a_command_whose_run_is_cancelled_finishes_and_what_it_did_is_undone() {
    let server = Server::with(&["--lease", "2s"]);
    server.apply(BOOK);
    // A grace period that ends long before the command.
    let (_worker, mut said) = server.worker(&[FLIGHT, UNDO, "--grace", "100ms"]);
    let run = start(&server, &["book"]);
    until(&server, &run, "runner.log");
    server.eddy(&["run", "cancel", &run]).good();
    let told = said.find(|line| line.contains(" flight ")).unwrap();
    assert!(told.contains("the run was cancelled; the command may finish"), "{told}");
    server.write("go", "");
    server.eddy(&["run", "watch", &run]).bad(1);
    let undone: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(server.dir.path().join("undone")).unwrap()).unwrap();
    assert_eq!(undone["output"], serde_json::json!({"seat": 7}), "{undone}");
    assert!(said.any(|line| line.starts_with("✓ flight ")), "the result was not accepted");
    let shown = server.eddy(&["--json", "tail", &run]).good();
    let kinds: Vec<String> = shown.out.lines().map(|line| super::server::kind_of(line).1).collect();
    let has = |kind: &str| kinds.iter().filter(|of| *of == kind).count();
    assert_eq!((has("step.attempt.completed"), has("flow.cancelled")), (2, 1), "{kinds:?}");
}

#[test]
fn a_command_whose_task_is_lost_is_ended_in_a_flow_with_undo_too() {
    let server = Server::with(&["--lease", "2s"]);
    server.apply("name: book\nsteps: {flight: {timeout: 1s, retry: {attempts: 1}, undo: {run: cancel_flight}}}\n");
    let (_worker, mut said) = server.worker(&["flight=exec sleep 1000", UNDO, "--grace", "100ms"]);
    server.eddy(&["start", "book", "--wait"]).bad(1);
    assert!(said.any(|line| line.starts_with("– flight ")), "the command was not ended");
}
