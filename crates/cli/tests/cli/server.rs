//! Commands with a server.

use serde_json::{Value, json};

use super::rig::{Ran, Server, finish, on_terminal};

const ORDER: &str = r#"
name: order
steps:
  pay:  {retry: {attempts: 3, initial: 10ms}, emits: [paid]}
  gift: {after: [pay], if: "input.cents > 1000"}
  ship: {subscribes: [paid], after: ["ended:gift"], input: {to: "${input.to}", receipt: "${events.paid}"}}
output: "${steps.ship.output}"
"#;

/// Fails the first time; logs, emits, and returns its input.
const PAY: &str = r#"#!/bin/sh
echo "attempt $EDDY_ATTEMPT of $EDDY_ACTIVATION in $EDDY_RUN_ID" >&2
[ "$EDDY_ATTEMPT" = 1 ] && { echo "the bank is closed" >&2; exit 75; }
printf '{"event":"paid","payload":"%s"}\n' "$EDDY_TASK_KEY" > "$EDDY_EMITS"
cat
"#;

/// A flow that waits at two gates.
const HOLD: &str = r#"
name: hold
steps:
  ask: {await: {manual: true}}
  tell: {after: [ask], await: {event: news, key: "input.id"}}
output: ["${steps.ask.output}", "${steps.tell.output}"]
"#;

pub fn start(server: &Server, args: &[&str]) -> String {
    server.eddy(&[&["start"], args].concat()).good().line()
}

fn status(server: &Server, run: &str) -> Value {
    server.eddy(&["--json", "run", "show", run]).good().json()["run"]["status"].clone()
}

/// Follows a run until it has a record of that kind.
pub fn until(server: &Server, run: &str, kind: &str) {
    use std::io::{BufRead, BufReader};
    let mut tail = server.command(&["--json", "tail", run, "--follow"]);
    let mut tail = super::rig::Process(tail.stdout(std::process::Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(tail.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(&format!("\"kind\":\"{kind}\""))), "{kind} never came");
}

#[test]
fn a_run_from_its_flow_to_its_timeline_with_scripts_for_workers() {
    let server = Server::start();
    server.write("pay.sh", PAY);
    server.apply(ORDER);
    let (_worker, mut said) = server.worker(&["pay=sh ./pay.sh", "ship=cat", "gift=false"]);
    let ran =
        server.eddy(&["start", "order", "--input", r#"{"cents": 7, "to": "ada"}"#, "--wait", "--tag", "web"]).good();
    assert!(ran.out.contains("✓ pay ") && ran.out.contains("2 attempts") && ran.out.contains("– gift"), "{ran:?}");
    let runs = server.eddy(&["--json", "run", "list", "--tag", "web"]).good().json();
    let run = runs[0]["run_id"].as_str().unwrap().to_owned();
    let shown = server.eddy(&["--json", "run", "show", &run]).good().json();
    assert_eq!(shown["run"]["output"]["to"], "ada");
    let receipt = shown["run"]["output"]["receipt"].as_str().unwrap();
    assert!(receipt.contains(&run) && receipt.contains("pay"), "{receipt}");
    assert_eq!(shown["run"]["emitted_events"], json!(["paid"]));
    let tail = server.eddy(&["--json", "tail", &run]).good();
    let records: Vec<Value> = tail.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let logs: Vec<&str> = records
        .iter()
        .filter(|record| record["kind"] == "runner.log")
        .map(|record| record["data"]["msg"].as_str().unwrap())
        .collect();
    assert_eq!(logs[0], format!("attempt 1 of pay in {run}"));
    assert_eq!(logs[1], "the bank is closed");
    assert_eq!(records.last().unwrap()["kind"], "flow.completed");
    let ids: Vec<&str> = records.iter().map(|record| record["id"].as_str().unwrap()).collect();
    let dense: Vec<String> = (1..=ids.len()).map(|id| id.to_string()).collect();
    assert_eq!(ids, dense);
    // A tail after the last record has nothing to wait for.
    let rest = server.eddy(&["tail", &run, "--follow", "--after", &records.len().to_string()]).good();
    assert_eq!(rest.out, "");
    assert!(said.any(|line| line.contains("exited with 75: the bank is closed")));
    let listed = server.eddy(&["worker", "list"]).good();
    assert!(listed.out.contains("online") && listed.out.contains("gift, pay, ship"), "{listed:?}");
}

#[test]
fn a_run_that_fails_fails_whoever_waits_for_it() {
    let server = Server::start();
    server.apply("name: job\nsteps: {work: {retry: {attempts: 3}}}\n");
    let (_worker, _said) = server.worker(&["work=echo wrong format >&2; exit 65"]);
    let waited = server.eddy(&["start", "job", "--wait"]).bad(1);
    assert!(waited.out.contains("✗ work") && waited.out.contains("wrong format"), "{waited:?}");
    let waited = server.eddy(&["--json", "start", "job", "--wait"]).bad(1);
    let result = waited.json();
    assert_eq!((&result["status"], &result["error"]["kind"]), (&json!("failed"), &json!("BadInput")));
    let run = result["run_id"].as_str().unwrap();
    let steps = server.eddy(&["--json", "run", "show", run]).good().json()["steps"].clone();
    assert_eq!(steps[0]["attempts"].as_array().unwrap().len(), 1, "65 is retried: {steps}");
    server.eddy(&["run", "watch", run]).bad(1);
    let again = server.eddy(&["--json", "run", "retry", run]).good().json();
    assert_ne!(again["run_id"], run);
    server.eddy(&["run", "watch", again["run_id"].as_str().unwrap()]).bad(1);
    server.eddy(&["run", "delete", run]).good();
    server.eddy(&["run", "show", run]).bad(4);
}

#[test]
fn a_run_that_is_continued_is_watched_to_the_end_of_the_last() {
    let server = Server::start();
    server.apply("name: job\ncode: true\n");
    let run = start(&server, &["job"]);
    let report = |op: Value| {
        let asked = super::rig::post(&server.url, "/v1/tasks/claim", &json!({"worker_id": "w", "wait_ms": 20_000}));
        let mut report = json!({"task_id": asked["tasks"][0]["task_id"], "token": asked["tasks"][0]["token"]});
        report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
        let told = super::rig::post(&server.url, "/v1/tasks/report", &json!({"worker_id": "w", "reports": [report]}));
        assert_eq!(told["outcomes"][0]["outcome"], "applied", "{told}");
    };
    report(json!({"op": "continue", "input": 2}));
    let mut watch = server.command(&["run", "watch", &run]);
    let watch = watch.stdout(std::process::Stdio::piped()).spawn().unwrap();
    report(json!({"op": "continue", "input": 3}));
    report(json!({"op": "complete", "output": "all pages"}));
    let watched = watch.wait_with_output().unwrap();
    let out = String::from_utf8(watched.stdout).unwrap();
    assert!(watched.status.success() && out.contains("all pages"), "{out}");
    assert_eq!(out.matches("flow.start").count(), 3, "{out}");
    let run = start(&server, &["job"]);
    report(json!({"op": "continue"}));
    report(json!({"op": "fail", "error": {"kind": "Boom", "message": "no"}, "retryable": false}));
    server.eddy(&["run", "watch", &run]).bad(1);
}

#[test]
fn a_run_that_has_not_begun_says_when_it_will() {
    let server = Server::start();
    server.apply(HOLD);
    let run = start(&server, &["hold", "--delay", "1h"]);
    let shown = server.eddy(&["run", "show", &run]).good();
    assert!(shown.out.contains("the run begins at 20"), "{shown:?}");
}

#[test]
fn a_gate_is_opened_by_its_id_before_the_run_gets_there() {
    let server = Server::start();
    server
        .apply("name: f\nsteps: {ask: {}, ok: {after: [ask], await: {manual: true}}}\noutput: '${steps.ok.output}'\n");
    let run = start(&server, &["f"]);
    let gate = format!("{run}.2");
    server.eddy(&["gate", "open", &gate, r#"{"by": "ada"}"#]).good();
    let twice = server.eddy(&["gate", "open", &gate]).bad(5);
    assert!(twice.err.contains("the gate of ok is already open"), "{twice:?}");
    server.eddy(&["run", "complete", &run, "ask"]).good();
    let shown = server.eddy(&["--json", "run", "show", &run]).good().json();
    assert_eq!((&shown["run"]["status"], &shown["run"]["output"]), (&json!("completed"), &json!({"by": "ada"})));
}

#[test]
fn a_run_is_started_with_a_queue_metadata_and_a_unique_key() {
    let server = Server::start();
    server.apply(HOLD);
    let flags = ["hold", "--queue", "slow", "--metadata", r#"{"team": "ops"}"#, "--unique", "u"];
    let run = start(&server, &flags);
    let shown = server.eddy(&["--json", "run", "show", &run]).good().json();
    assert_eq!((&shown["run"]["queue"], &shown["run"]["metadata"]), (&json!("slow"), &json!({"team": "ops"})));
    assert_eq!(start(&server, &["hold", "--unique", "u"]), run, "the run that has the key");
    server.eddy(&["start", "hold", "--unique", "u", "--on-conflict", "reject"]).bad(5);
    let next = start(&server, &["hold", "--unique", "u", "--on-conflict", "queue"]);
    assert_eq!((status(&server, &run), status(&server, &next)), (json!("waiting"), json!("pending")));
    for wrong in [&["--metadata", "5"][..], &["--unique", "u", "--on-conflict", "ask"], &["--on-conflict", "queue"]] {
        server.eddy(&[&["start", "hold"], wrong].concat()).bad(2);
    }
}

#[test]
fn runs_are_acted_upon() {
    let server = Server::start();
    server.apply(HOLD);
    let run = start(&server, &["hold", "--input", r#"{"id": 7}"#, "--key", "k", "--external-id", "mine"]);
    assert_eq!(start(&server, &["hold", "--input", r#"{"id": 7}"#, "--key", "k"]), run);
    server.eddy(&["start", "hold", "--input", r#"{"id": 8}"#, "--key", "k"]).bad(5);
    let shown = server.eddy(&["run", "show", &run]).good();
    assert!(shown.out.contains("⏸ ask") && shown.out.contains("ask waits for a person"), "{shown:?}");
    assert!(shown.out.contains("tell waits for ask (at its gate)"), "{shown:?}");
    server.eddy(&["run", "pause", &run]).good();
    assert_eq!(status(&server, &run), "paused");
    server.eddy(&["run", "resume", &run]).good();
    let gates = server.eddy(&["--json", "gate", "list", "--run", &run]).good().json();
    let gate = gates[0]["gate_id"].as_str().unwrap();
    server.eddy(&["gate", "open", gate, r#"{"by": "ada"}"#]).good();
    let twice = server.eddy(&["gate", "open", gate]).bad(5);
    assert!(twice.err.contains(&format!("the gate {gate} is no longer open: opened at 20")), "{twice:?}");
    let tell = gate.strip_suffix(".1").map(|run| format!("{run}.2")).unwrap();
    let event = server.eddy(&["gate", "open", &tell]).bad(5);
    assert!(
        event.err.contains(&format!("the gate {tell} opens by an event or at a time; it cannot be opened by hand")),
        "{event:?}"
    );
    let none = server.eddy(&["gate", "open", &format!("{run}.99")]).bad(4);
    assert!(none.err.contains(&format!("there is no gate {run}.99")), "{none:?}");
    let token = server.eddy(&["gate", "open", "nothing"]).bad(4);
    assert_eq!(token.err, "error: there is no gate with this token or id\n");
    // Neither another number nor a text matches the number that the gate waits for.
    server.eddy(&["event", "publish", "news", "1", "--key-json", "8"]).good();
    server.eddy(&["event", "publish", "news", "1", "--key", "7"]).good();
    let publish =
        |payload: &str| server.eddy(&["event", "publish", "news", payload, "--key-json", "7", "--id", "n1"]).good();
    assert_eq!(publish("2").line(), "news published: it has opened 1 gate");
    let before = "an event with the id n1 already exists: it has opened 1 gate";
    assert_eq!(publish("3").line(), before);
    let unawaited = server.eddy(&["event", "publish", "other"]).good();
    assert_eq!(unawaited.line(), "other published: it has not opened any gate so far");
    let json = server.eddy(&["--json", "event", "publish", "other", "--id", "o1"]).good().json();
    assert_eq!((&json["published"], &json["ids"][0]), (&json!(1), &json!("o1")));
    assert_eq!((&json["event"]["delivered"], &json["event"]["gates_opened"]), (&json!(true), &json!(0)));
    let watched = server.eddy(&["run", "watch", &run]).good();
    assert!(watched.out.contains(r#"output [{"by":"ada"},2]"#), "{watched:?}");
    server.eddy(&["run", "cancel", &run]).bad(5);
    let again = server.eddy(&["run", "rerun", &run, "--input", r#"{"id": 9}"#]).good().line();
    server.eddy(&["run", "complete", &again, "ask", "--output", "3"]).good();
    server.eddy(&["run", "cancel", &again, "--reason", "enough"]).good();
    server.eddy(&["run", "watch", &again]).bad(1);
    let deleted = server.eddy(&["run", "delete", &again]).good();
    assert_eq!(deleted.out.lines().collect::<Vec<_>>(), [format!("{again} deleted")]);
    let other = server.eddy(&["run", "rerun", &run, "--input", r#"{"id": 9}"#]).good().line();
    let listed = server.eddy(&["run", "list", "--external-id", "mine"]).good();
    assert!(listed.out.contains(&run) && listed.out.contains("completed"), "{listed:?}");
    let skipped = start(&server, &["hold", "--input", r#"{"id": 1}"#]);
    server.eddy(&["run", "skip", &skipped, "ask"]).good();
    let failed = start(&server, &["hold", "--input", r#"{"id": 1}"#]);
    server.eddy(&["run", "fail", &failed, "ask", "--message", "no"]).good();
    let watched = server.eddy(&["run", "watch", &failed]).bad(1);
    assert!(watched.out.contains("no"), "{watched:?}");
    let deleted = server.eddy(&["run", "delete", &run]).good();
    let lines = [format!("{run} deleted"), format!("these runs refer to it: {other}")];
    assert_eq!(deleted.out.lines().collect::<Vec<_>>(), lines);
}

#[test]
fn a_command_is_ended_when_its_run_is_cancelled() {
    let server = Server::with(&["--lease", "2s"]);
    server.apply("name: job\nsteps: {work: {}}\n");
    let (_worker, mut said) = server.worker(&["work=echo $$ > pid; echo ready >&2; exec sleep 1000"]);
    let run = start(&server, &["job"]);
    until(&server, &run, "runner.log");
    server.eddy(&["run", "cancel", &run]).good();
    assert!(said.any(|line| line.contains("cancelled")));
    let pid = std::fs::read_to_string(server.dir.path().join("pid")).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    assert!(rustix::process::test_kill_process(pid).is_err(), "the command is still there");
}

#[test]
fn a_result_that_the_server_does_not_take_is_told_as_such() {
    let server = Server::start();
    server.apply("name: job\nsteps: {leak: {}, tell: {after: [\"ended:leak\"]}}\n");
    let leak = r#"leak=echo '{"event":"secret","payload":1}' > $EDDY_EMITS"#;
    let (_worker, said) = server.worker(&[leak, "tell=true"]);
    server.eddy(&["start", "job", "--wait"]).good();
    let told: Vec<String> = said.filter(|line| line.contains(" attempt 1")).take(2).collect();
    assert!(told[0].starts_with("✗ leak "), "{told:?}");
    assert!(told[0].contains("the server rejected the result: `secret` is not among the `emits`"), "{told:?}");
    assert!(told[1].starts_with("✓ tell "), "{told:?}");
}

#[test]
fn a_tail_goes_on_where_it_was_when_its_server_is_restarted() {
    let mut server = Server::on_disk();
    server.apply(HOLD);
    let run = start(&server, &["hold", "--input", r#"{"id": 7}"#]);
    let mut tail = server.command(&["--json", "tail", &run, "--follow"]);
    let mut tail = super::rig::Process(tail.stdout(std::process::Stdio::piped()).spawn().unwrap());
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(tail.0.stdout.take().unwrap()));
    let mut kinds = vec![kind_of(&lines.next().unwrap().unwrap()), kind_of(&lines.next().unwrap().unwrap())];
    server.restart();
    server.eddy(&["run", "cancel", &run]).good();
    kinds.extend(lines.map(|line| kind_of(&line.unwrap())));
    assert!(tail.0.wait().unwrap().success());
    let whole = server.eddy(&["--json", "tail", &run]).good();
    assert_eq!(kinds, whole.out.lines().map(kind_of).collect::<Vec<_>>());
    assert_eq!(kinds.last().unwrap().1, "flow.cancelled");
}

#[test]
fn a_tail_waits_for_a_server_that_goes_away_while_it_waits_for_records() {
    let record = |id: &str, kind: &str| json!({"id": id, "kind": kind, "data": {}, "meta": {}, "ts": ""});
    let page = |records: Vec<Value>| (200, json!({"items": records, "next": null}));
    let down = || (503, json!({"error": {"code": "unavailable", "message": "the server is stopping", "details": []}}));
    let run = json!({"run_id": "r", "flow": "f", "version": "v", "status": "completed", "input": null, "output": null,
        "error": null, "created_at": "", "started_at": "", "completed_at": "", "step_count": 1, "completed_steps": 1,
        "emitted_events": [], "tags": [], "external_id": null, "priority": 0, "waiting_for": [], "parent": null,
        "retry_of": null, "continued_as": null, "trimmed": false});
    let (url, asked) = super::rig::scripted(vec![
        page(vec![record("1", "flow.start"), record("2", "step.scheduled")]),
        // A stopping server ends long polls like this.
        page(vec![]),
        down(),
        // The run has ended meanwhile, and its last record has not been read.
        (200, run),
        down(),
        page(vec![record("3", "flow.completed")]),
    ]);
    let dir = tempfile::tempdir().unwrap();
    let tail = super::rig::eddy(dir.path(), &["--json", "--url", &url, "tail", "r", "--follow"]).good();
    let ids: Vec<String> = tail.out.lines().map(|line| kind_of(line).0).collect();
    assert_eq!(ids, ["1", "2", "3"]);
    assert!(asked.join().unwrap()[5].contains("after=2&"), "it does not continue where it was");
}

/// The number and the kind of a record.
pub fn kind_of(line: &str) -> (String, String) {
    let record: Value = serde_json::from_str(line).unwrap();
    let text = |field: &str| record[field].as_str().unwrap().to_owned();
    (text("id"), text("kind"))
}

#[test]
fn a_worker_that_cannot_begin_says_why() {
    let server = Server::start();
    let queue = server.eddy(&["worker", "exec", "a=true", "--queue", "bad queue"]).bad(2);
    assert!(queue.err.contains("`bad queue` is not a valid name: ` ` is not allowed"), "{queue:?}");
    let twice = server.eddy(&["worker", "exec", "a=true", "a=false"]).bad(2);
    assert_eq!(twice.err, "error: the handler a is given twice\n", "something else was printed");
}

#[test]
fn queues_are_paused_and_doctors_say_so() {
    let server = Server::start();
    server.apply("name: job\nsteps: {work: {queue: slow}}\n");
    server.eddy(&["doctor"]).good();
    server.eddy(&["queue", "set", "slow", "--concurrency", "2", "--rate", "10/1s"]).good();
    let paused = server.eddy(&["queue", "pause", "slow"]).good();
    assert_eq!(paused.err, "", "a warning for a queue with rules");
    let slip = server.eddy(&["queue", "pause", "slwo"]).good();
    assert!(slip.err.contains("warning: queue slwo has never had tasks or workers"), "{slip:?}");
    let run = start(&server, &["job"]);
    let shown = server.eddy(&["run", "show", &run]).good();
    let why = "work is queued (attempt 1): queue slow is paused: `eddy queue resume slow`";
    assert!(shown.out.contains(why), "{shown:?}");
    let sick = server.eddy(&["doctor"]).bad(1);
    assert!(sick.out.contains("none online, and 1 task waiting") && sick.out.contains("slow is paused"), "{sick:?}");
    let listed = server.eddy(&["queue", "list"]).good();
    assert!(listed.out.contains("2 at once, 10 per 1s") && listed.out.contains("paused"), "{listed:?}");
    let (_worker, _said) = server.worker(&["other=true", "--queue", "slow"]);
    server.eddy(&["queue", "resume", "slow"]).good();
    // The worker is online, but does not have the handler.
    let sick = poll(|| server.eddy(&["doctor"]), |ran| ran.out.contains("1 online"));
    assert!(sick.out.contains("tasks of work wait on slow, and no online worker has this handler"), "{sick:?}");
    let shown = server.eddy(&["run", "show", &run]).good();
    assert!(
        shown.out.contains("work waits for a worker (attempt 1): no online worker handles work on queue slow"),
        "{shown:?}"
    );
    let (_other, _said) = server.worker(&["work=echo 1", "--queue", "slow"]);
    server.eddy(&["run", "watch", &run]).good();
    server.eddy(&["doctor"]).good();
}

#[test]
fn limits_are_set_listed_and_removed() {
    let server = Server::start();
    server.eddy(&["limit", "set", "stripe", "--concurrency", "5", "--rate", "100/1m"]).good();
    let listed = server.eddy(&["limit", "list"]).good();
    assert!(listed.out.contains("stripe") && listed.out.contains("5 at once, 100 per 1m"), "{listed:?}");
    server.eddy(&["limit", "delete", "stripe"]).good();
    assert_eq!(server.eddy(&["--json", "limit", "list"]).good().json(), json!([]));
}

/// Repeats `ask` until `is_so`: the server sends no signal when a worker comes online.
fn poll(ask: impl Fn() -> Ran, is_so: impl Fn(&Ran) -> bool) -> Ran {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let ran = ask();
        if is_so(&ran) || std::time::Instant::now() > until {
            return ran;
        }
    }
}

#[test]
fn keys_open_what_they_are_for_until_they_are_revoked() {
    let admin = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    let server = Server::with(&["--keys", "on", "--admin-key", admin]);
    let denied = server.eddy(&["run", "list"]).bad(6);
    assert!(denied.err.contains("a key is required") && denied.err.contains("EDDY_KEY"), "{denied:?}");
    let with = |key: &str, args: &[&str]| server.eddy(&[args, &["--api-key", key]].concat());
    let created = with(admin, &["key", "create", "ci", "--scope", "read,start", "--expires-in", "1h"]).good();
    let key = created.line();
    with(&key, &["run", "list"]).good();
    let scopes = with(&key, &["key", "list"]).bad(6);
    assert!(scopes.err.contains("lacks the scope `admin`") && scopes.err.contains("more scopes"), "{scopes:?}");
    let elsewhere = with(&key, &["run", "list", "--namespace", "other"]).bad(6);
    assert!(elsewhere.err.contains("this key belongs to the namespace default"), "{elsewhere:?}");
    assert!(elsewhere.err.contains("--namespace") && !elsewhere.err.contains("scopes"), "{elsewhere:?}");
    let keys = with(admin, &["--json", "key", "list"]).good().json();
    let listed = keys.as_array().unwrap().iter().find(|listed| listed["name"] == "ci").unwrap();
    assert!(!keys.to_string().contains(&key), "a key is shown again");
    with(admin, &["key", "revoke", listed["key_id"].as_str().unwrap()]).good();
    let revoked = with(&key, &["run", "list"]).bad(6);
    assert!(revoked.err.contains("is not valid: it is unknown, revoked or expired"), "{revoked:?}");
    assert!(revoked.err.contains("from --api-key"), "{revoked:?}");
    let mut unknown = server.command(&["run", "list"]);
    unknown.env("EDDY_KEY", "eddy_made_up");
    assert!(finish(unknown).bad(6).err.contains("from EDDY_KEY"));
}

#[test]
fn a_server_that_speaks_otherwise_is_told_from_none() {
    let plain = Server::start();
    let https = plain.url.replace("http://", "https://");
    let told = plain.eddy(&["run", "list", "--url", &https]).bad(3);
    assert!(told.err.contains("does not speak TLS"), "{told:?}");
    assert!(told.err.contains(&format!("try --url {}\n", plain.url)), "{told:?}");

    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&cert, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let secure = Server::with(&["--tls-cert", cert.to_str().unwrap(), "--tls-key", key.to_str().unwrap()]);
    let http = secure.url.replace("https://", "http://");
    let told = secure.eddy(&["run", "list", "--url", &http]).bad(3);
    assert!(told.err.contains("does not speak plain HTTP"), "{told:?}");
    assert!(told.err.contains(&format!("try --url {}\n", secure.url)), "{told:?}");
}

#[test]
fn flows_are_listed_shown_compared_and_missed() {
    let server = Server::start();
    let empty = server.eddy(&["start", "order"]).bad(4);
    assert!(empty.err.contains("no flow is registered yet"), "{empty:?}");
    server.apply(ORDER);
    let again = server.eddy(&["--json", "flow", "apply", "flow.yaml"]).good().json();
    assert_eq!(again[0]["changed"], false);
    let near = server.eddy(&["start", "ordr"]).bad(4);
    assert!(near.err.contains("did you mean order?"), "{near:?}");
    assert!(server.eddy(&["flow", "list"]).good().out.contains("order"));
    assert!(server.eddy(&["flow", "show", "order"]).good().out.contains("pay"));
    // The analysis of a file equals that of the registered flow.
    let drawn = server.eddy(&["--json", "flow", "graph", "flow.yaml"]).good().json();
    let shown = server.eddy(&["--json", "flow", "show", "order"]).good().json();
    assert_eq!(drawn["analysis"], shown["analysis"]);
    server.write("flow.yaml", &ORDER.replace("attempts: 3", "attempts: 4"));
    let diff = server.eddy(&["flow", "diff", "flow.yaml"]).good();
    assert!(
        diff.out.contains("retry.attempts: 3 → 4") && diff.out.contains("Runs that are under way keep"),
        "{diff:?}"
    );
    server.write("flow.yaml", "name: order\nsteps: {a: {after: [b]}}\n");
    let bad = server.eddy(&["flow", "apply", "flow.yaml"]).bad(5);
    assert!(bad.err.contains("there is no step `b` here"), "{bad:?}");
    assert!(server.eddy(&["flow", "show", "order"]).good().out.contains("pay"), "the registered flow has changed");
}

#[test]
fn a_difference_says_which_side_is_a_file_and_which_is_registered() {
    let server = Server::start();
    server.apply("name: order\nsteps: {a: {}}\n");
    server.write("new.yaml", "name: order\nsteps: {a: {}, b: {}}\n");
    let registered = server.eddy(&["flow", "diff", "new.yaml", "order"]).good();
    assert!(registered.line().contains(" (registered) → ") && registered.err.is_empty(), "{registered:?}");
    assert!(registered.out.contains("Runs that are under way keep"), "{registered:?}");
    let json = server.eddy(&["--json", "flow", "diff", "new.yaml"]).good().json();
    assert_eq!((&json["from_file"], &json["to_file"]), (&Value::Null, &json!("new.yaml")));
    // A file with the name of a flow takes precedence, with a note.
    server.write("order", "name: mine\nsteps: {a: {}}\n");
    let file = server.eddy(&["flow", "diff", "new.yaml", "order"]).good();
    assert!(file.line().starts_with("mine  ") && file.line().contains(" (file order) → order  "), "{file:?}");
    assert_eq!(file.err, "order is a file here: using the file, not a registered flow\n");
    assert!(!file.out.contains("under way"), "{file:?}");
    let json = server.eddy(&["--json", "flow", "diff", "new.yaml", "order"]).good().json();
    assert_eq!((&json["flow"], &json["from_flow"]), (&json!("order"), &json!("mine")));
    assert!(server.eddy(&["flow", "graph", "order"]).good().err.contains("order is a file here"));
}

#[test]
fn rows_end_where_the_terminal_does_and_are_whole_where_there_is_none() {
    let server = Server::start();
    let name = "a-flow-of-quite-some-length";
    server.apply(&format!("name: {name}\nsteps: {{a: {{}}}}\n"));
    let run = start(&server, &[name, "--input", &json!("x".repeat(300)).to_string()]);
    server.eddy(&["run", "fail", &run, "a", "--message", &"for no reason at all ".repeat(10)]).good();
    for args in [&["run", "list"][..], &["flow", "list"], &["tail", &run]] {
        let whole = server.eddy(args).good().out;
        assert!(!whole.contains('…') && whole.lines().any(|line| line.chars().count() > 60), "{args:?}: {whole}");
        let shown = on_terminal(server.command(args), 60);
        assert_eq!(shown.len(), whole.lines().count(), "{args:?}: {shown:?}");
        assert!(shown.iter().any(|line| line.ends_with('…')), "{args:?}: {shown:?}");
        for line in shown {
            assert!(line.chars().count() <= 60, "{args:?}: {line}");
        }
    }
}

#[test]
fn the_end_of_each_run_is_logged_once_and_every_decision_at_debug() {
    let server = Server::logging();
    server.apply("name: good\nsteps: {a: {set: 1}}\n");
    server.apply("name: bad\nsteps: {a: {fail: \"no ${input}\"}}\n");
    server.apply("name: slow\nsteps: {a: {await: {manual: true}}}\n");
    let [good, bad, slow] = ["good", "bad", "slow"].map(|flow| start(&server, &[flow, "--input", "7"]));
    server.eddy(&["run", "watch", &good]).good();
    server.eddy(&["run", "watch", &bad]).bad(1);
    server.eddy(&["run", "cancel", &slow, "--reason", "enough"]).good();
    for (message, level, flow, run, reason) in [
        ("run completed", "INFO", "good", &good, json!(null)),
        ("run failed", "WARN", "bad", &bad, json!("Fail: no 7")),
        ("run cancelled", "INFO", "slow", &slow, json!("enough")),
    ] {
        let logged = server.logged(message);
        assert_eq!(logged.len(), 1, "{logged:?}");
        let fields = &logged[0];
        assert_eq!((&fields["level"], &fields["flow"], &fields["run"]), (&json!(level), &json!(flow), &json!(run)));
        assert_eq!(fields["reason"], reason, "{fields}");
        assert!(fields["ms"].is_u64() && fields["instance"].is_string(), "{fields}");
    }
    let decided = server.logged("decided");
    let of = |run: &str, event: &str| {
        let named = |line: &Value| line["flow"].is_string() && line["instance"].is_string();
        decided.iter().any(|line| named(line) && line["run"] == run && line["event"] == event)
    };
    assert!(of(&good, "start") && of(&bad, "start") && of(&slow, "cancel"), "{decided:?}");
}

#[test]
fn the_builds_of_a_code_flow_are_shown_and_its_runs_unpinned() {
    let server = Server::start();
    server.apply("{name: job, code: true, builds: pinned}");
    let shown = server.eddy(&["flow", "builds", "job"]).good();
    assert!(shown.out.starts_with("job (pinned)\nno runs"), "{shown:?}");
    let run = start(&server, &["job"]);
    let shown = server.eddy(&["flow", "builds", "job"]).good();
    assert!(shown.out.contains("BUILD") && shown.out.contains("none") && shown.out.contains('1'), "{shown:?}");
    let listed = server.eddy(&["--json", "flow", "builds", "job"]).good().json();
    assert_eq!(listed["items"], json!([{"build": null, "runs": 1, "workers": 0}]));
    assert!(server.eddy(&["run", "unpin", &run]).good().out.starts_with(&run));
    server.eddy(&["flow", "builds", "nojob"]).bad(4);
    server.apply(HOLD);
    let graph = start(&server, &["hold"]);
    server.eddy(&["run", "unpin", &graph]).bad(5);
}
