//! Runs named by a part of their id, flows, namespaces and their keys, and commands that are not built yet.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::rig::{Process, Server, command, eddy, finish, scripted};

const ADMIN: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn start(server: &Server, flow: &str) -> String {
    server.eddy(&["start", flow]).good().line()
}

fn runs(server: &Server, args: &[&str]) -> Vec<Value> {
    server.eddy(&[&["--json", "run", "list"], args].concat()).good().json().as_array().unwrap().clone()
}

#[test]
fn a_run_is_named_by_either_end_of_its_id_or_as_the_latest() {
    let server = Server::start();
    server.apply("name: hold\nsteps: {ask: {await: {manual: true}}}\n");
    assert!(server.eddy(&["run", "show", "latest"]).bad(4).err.contains("there are no runs"));
    let (first, second) = (start(&server, "hold"), start(&server, "hold"));
    let shown = |name: &str| server.eddy(&["--json", "run", "show", name]).good().json()["run"]["run_id"].clone();
    assert_eq!(shown("latest"), json!(second));
    assert_eq!(shown(&first[first.len() - 8..]), json!(first));
    assert_eq!(shown(&first[..34]), json!(first));
    assert_eq!(shown(&second.to_uppercase()[20..]), json!(second));
    // Ids begin with the time at which the run was created.
    let both = server.eddy(&["run", "show", &first[..4]]).bad(2);
    assert!(both.err.contains("2 runs begin or end with") && both.err.contains(&second), "{both:?}");
    assert!(server.eddy(&["run", "show", "abc"]).bad(2).err.contains("at least 4 characters"));
    assert!(server.eddy(&["run", "show", "0123456789"]).bad(4).err.contains("begins or ends with 0123456789"));
    assert!(server.eddy(&["run", "show", "no-such-run"]).bad(4).err.contains("there is no run no-such-run"));
    server.eddy(&["run", "cancel", "latest"]).good();
    server.eddy(&["tail", "latest"]).good();
    assert_eq!(server.eddy(&["gate", "list", "--run", &first[24..]]).good().out.lines().count(), 2);
    server.eddy(&["run", "delete", &second[24..]]).good();
    assert_eq!(shown("latest"), json!(first));
}

#[test]
fn runs_of_several_statuses_are_listed_and_the_failed_ones_retried_together() {
    let server = Server::start();
    server.apply("name: job\nsteps: {a: {await: {manual: true}}}\n");
    server.apply("name: other\nsteps: {a: {fail: no}}\n");
    let ids: Vec<String> = (0..4).map(|_| start(&server, "job")).collect();
    start(&server, "other");
    for run in &ids[..2] {
        server.eddy(&["run", "fail", run, "a"]).good();
    }
    server.eddy(&["run", "cancel", &ids[2]]).good();
    let of = |args: &[&str]| runs(&server, &[args, &["--flow", "job"]].concat()).len();
    assert_eq!((of(&["--status", "failed"]), of(&["--status", "failed", "--status", "cancelled"])), (2, 3));
    assert_eq!(of(&["--status", "waiting,cancelled"]), 2);
    let retried = server.eddy(&["--json", "run", "retry", "--failed", "--flow", "job"]).good().json();
    let retried: Vec<&Value> = retried.as_array().unwrap().iter().map(|retry| &retry["retry_of"]).collect();
    assert_eq!(retried, [&json!(ids[0]), &json!(ids[1])], "not oldest first");
    let again = server.eddy(&["run", "retry", "--failed", "--flow", "job"]).good();
    assert_eq!(again.line(), "no failed runs to retry");
    assert_eq!(of(&[]), 6);
    server.eddy(&["run", "retry", "--failed", "--flow", "jbo"]).bad(4);
    server.eddy(&["run", "retry", "--failed"]).bad(2);
    server.eddy(&["run", "retry", &ids[0], "--failed", "--flow", "job"]).bad(2);
    server.eddy(&["run", "retry"]).bad(2);
}

#[test]
fn the_reason_of_a_cancel_is_shown_if_the_server_tells_it() {
    let run = "01a1dff7-abb0-74f5-88e2-53de1b9a8247";
    let info = json!({
        "run_id": run, "flow": "f", "version": "1", "status": "cancelled", "input": null, "output": null, "error": null,
        "created_at": "2026-01-02T03:04:05.678Z", "started_at": null, "completed_at": null, "step_count": 0,
        "completed_steps": 0, "emitted_events": [], "tags": [], "external_id": null, "priority": 0, "waiting_for": [],
        "parent": null, "retry_of": null, "continued_as": null, "trimmed": true, "reason": "not needed any more"
    });
    let gone = json!({"error": {"code": "not_found", "message": "there is no flow f", "details": []}});
    let flows = json!({"items": [], "next": null});
    let (url, _asked) = scripted(vec![(200, info), (404, gone), (200, flows)]);
    let dir = tempfile::tempdir().unwrap();
    let shown = eddy(dir.path(), &["--url", &url, "run", "show", run]).good();
    assert!(shown.out.contains("reason      not needed any more"), "{shown:?}");
}

#[test]
fn a_flow_is_deleted_once_its_runs_have_ended() {
    let server = Server::start();
    server.apply("name: hold\nsteps: {ask: {await: {manual: true}}}\n");
    let run = start(&server, "hold");
    let refused = server.eddy(&["flow", "delete", "hold"]).bad(5);
    assert!(refused.err.contains("1 run that has not ended"), "{refused:?}");
    server.eddy(&["run", "cancel", &run]).good();
    assert_eq!(server.eddy(&["flow", "delete", "hold"]).good().line(), "hold deleted");
    server.eddy(&["start", "hold"]).bad(4);
    server.eddy(&["flow", "delete", "hold"]).bad(4);
    server.eddy(&["run", "show", &run]).good();
}

#[test]
fn namespaces_are_made_and_their_keys_managed_from_default() {
    let server = Server::with(&["--keys", "on", "--admin-key", ADMIN]);
    let admin = |args: &[&str]| server.eddy(&[args, &["--api-key", ADMIN]].concat());
    assert_eq!(admin(&["namespace", "create", "acme"]).good().line(), "acme created");
    admin(&["namespace", "create", "acme"]).bad(5);
    let listed = admin(&["namespace", "list"]).good();
    assert!(listed.out.contains("acme") && listed.out.contains("default"), "{listed:?}");
    admin(&["key", "create", "theirs", "--scope", "read", "--for-namespace", "acme"]).good();
    let keys = |args: &[&str]| admin(&[&["--json", "key", "list"], args].concat()).good().json();
    let theirs = keys(&["--for-namespace", "acme"]);
    assert_eq!((theirs.as_array().unwrap().len(), &theirs[0]["name"]), (1, &json!("theirs")));
    assert!(!keys(&[]).to_string().contains("theirs"));
    let id = theirs[0]["key_id"].as_str().unwrap();
    admin(&["key", "revoke", id]).bad(4);
    admin(&["key", "revoke", id, "--for-namespace", "acme"]).good();
    assert_eq!(keys(&["--for-namespace", "acme"]), json!([]));
    let set = ["namespace", "set", "acme", "--retention-runs", "90d", "--backlog", "5", "--disabled"];
    admin(&set).good();
    let listed = admin(&["--json", "namespace", "list"]).good().json();
    let acme = listed.as_array().unwrap().iter().find(|namespace| namespace["name"] == "acme").unwrap().clone();
    assert_eq!((&acme["disabled"], &acme["backlog"]), (&json!(true), &json!(5)), "{acme}");
    assert_eq!(acme["retention"]["runs"], json!("90d"), "{acme}");
}

#[test]
fn the_settings_of_a_namespace_are_sent_as_far_as_they_are_given() {
    let dir = tempfile::tempdir().unwrap();
    let (url, asked) = scripted(vec![(200, json!({"name": "acme"}))]);
    let set = ["namespace", "set", "acme", "--retention-runs", "90d", "--disabled", "--url", &url];
    assert_eq!(eddy(dir.path(), &set).good().line(), "acme changed");
    assert_eq!(asked.join().unwrap(), ["PATCH /v1/namespaces/acme HTTP/1.1"]);
    assert!(eddy(dir.path(), &["namespace", "set", "acme"]).bad(2).err.contains("nothing to change"));
    eddy(dir.path(), &["namespace", "set", "acme", "--retention-runs", "long"]).bad(2);
}

#[test]
fn wrong_usage_is_told_as_json_and_in_the_colours_that_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let told = |args: &[&str]| -> Value { serde_json::from_str(&eddy(dir.path(), args).bad(2).err).unwrap() };
    let unknown = told(&["--json", "run", "lst"]);
    assert_eq!(unknown["error"]["exit"], 2);
    assert_eq!(unknown["error"]["message"], "unrecognized subcommand 'lst'");
    assert_eq!(unknown["error"]["help"], "did you mean list?");
    assert!(told(&["start", "--json"])["error"]["message"].as_str().unwrap().contains("<FLOW>"));
    assert_eq!(told(&["--json"])["error"]["message"], "a command is missing");
    assert!(told(&["run", "list", "--limit", "x", "--json"])["error"]["message"].as_str().unwrap().contains("'x'"));
    // Arguments after `--` belong to another command.
    assert!(eddy(dir.path(), &["dev", "--frobnicate", "--", "--json"]).bad(2).err.starts_with("error: "));
    assert!(eddy(dir.path(), &["frobnicate", "--color", "always"]).bad(2).err.contains('\x1b'));
    assert!(!eddy(dir.path(), &["frobnicate", "--color=never"]).bad(2).err.contains('\x1b'));
    let help = eddy(dir.path(), &["run", "--help", "--json"]).good();
    assert!(help.out.contains("Usage: eddy run"), "{help:?}");
}

#[test]
fn commands_that_are_planned_say_that_they_are_not_built() {
    let dir = tempfile::tempdir().unwrap();
    for (line, name) in [
        ("schedule list", "schedule"),
        ("trigger", "trigger"),
        ("bench --runs 5", "bench"),
        ("verify", "verify"),
        ("export x", "export"),
        ("import x", "import"),
    ] {
        let ran = eddy(dir.path(), &line.split(' ').collect::<Vec<_>>()).bad(2);
        assert!(ran.err.starts_with(&format!("error: `eddy {name}` is not built yet\n")), "{ran:?}");
    }
    let help = eddy(dir.path(), &["--help"]).good().out;
    assert!(!help.contains("schedule") && !help.contains("bench"), "{help}");
}

#[test]
fn a_worker_waits_for_a_server_that_is_not_up_yet() {
    let dir = tempfile::tempdir().unwrap();
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let url = format!("http://{addr}");
    let mut worker = command();
    worker.args(["worker", "exec", "a=echo 7", "--url", &url]).stderr(Stdio::piped());
    let mut worker = Process(worker.spawn().unwrap());
    let mut lines = BufReader::new(worker.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let waits = lines.next().unwrap();
    assert!(waits.starts_with("waiting for the server: no server answers at"), "{waits}");
    let (_server, url) = Server::serve(dir.path(), &["--store", "memory:", "--listen", &addr]);
    std::fs::write(dir.path().join("f.yaml"), "name: f\nsteps: {a: {run: a}}\n").unwrap();
    eddy(dir.path(), &["--url", &url, "flow", "apply", "f.yaml"]).good();
    let done = eddy(dir.path(), &["--url", &url, "--json", "start", "f", "--wait"]).good().json();
    assert_eq!(done["status"], "completed");
    // A server that refuses the worker is not waited for.
    let (_keyed, url) = Server::serve(
        dir.path(),
        &["--store", "memory:", "--listen", "127.0.0.1:0", "--keys", "on", "--admin-key", ADMIN],
    );
    eddy(dir.path(), &["worker", "exec", "a=true", "--url", &url]).bad(6);
}

#[test]
fn a_server_without_keys_that_others_can_reach_is_asked_for_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let open = ["serve", "--store", "memory:", "--listen", "0.0.0.0:0"];
    let refused = eddy(dir.path(), &[&open[..], &["--keys", "off"]].concat()).bad(2);
    assert!(refused.err.contains("--insecure"), "{refused:?}");
    let (_server, url) = Server::serve(dir.path(), &["--store", "memory:", "--listen", "0.0.0.0:0", "--insecure"]);
    let port = url.rsplit(':').next().unwrap();
    eddy(dir.path(), &["--url", &format!("http://127.0.0.1:{port}"), "run", "list"]).good();
    // Any host name is accepted, such as that of a container, but a page of another origin is refused.
    let asked = |headers: &str| {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        let request = format!("GET /v1/runs HTTP/1.1\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply.lines().next().unwrap().to_owned()
    };
    assert_eq!(asked("host: eddyline:7070\r\n"), "HTTP/1.1 200 OK");
    assert_eq!(asked("host: eddyline:7070\r\norigin: http://eddyline:7070\r\n"), "HTTP/1.1 200 OK");
    assert_eq!(asked("host: eddyline:7070\r\norigin: http://evil.example\r\n"), "HTTP/1.1 403 Forbidden");
}

#[test]
fn dev_takes_the_flags_of_a_server_and_uses_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["dev", "--store", "memory:", "--listen", "127.0.0.1:0", "--keys", "on"];
    let keyless = eddy(dir.path(), &flags).bad(2);
    assert!(keyless.err.contains("--admin-key"), "{keyless:?}");
    std::fs::create_dir(dir.path().join("flows")).unwrap();
    std::fs::write(dir.path().join("flows/f.yaml"), "name: f\nsteps: {a: {run: a}}\n").unwrap();
    let mut dev = command();
    dev.current_dir(dir.path()).args(flags).args(["--admin-key", ADMIN]).stderr(Stdio::piped());
    let mut dev = Process(dev.spawn().unwrap());
    let mut lines = BufReader::new(dev.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("✓ f ") && line.contains("registered")), "the flow is never registered");
    let mut other = command();
    other.current_dir(dir.path()).args(["dev", "--listen", "0.0.0.0:0", "--store", "memory:"]);
    assert!(finish(other).bad(2).err.contains("--behind-proxy"));
}
