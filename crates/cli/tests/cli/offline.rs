//! Commands that need no server.

use std::path::Path;

use eddyline_store::{Embedded, Options, Page, RunFilter, Store};

use super::rig::{Process, command, eddy, finish};

const FULFIL: &str = r#"name: fulfil
steps:
  load:    {run: load_orders, retry: {attempts: 3}, timeout: 30s}
  review:  {after: [load], if: "steps.load.output.total > 100", emits: [order.checked]}
  each:    {after: [load], spread: "steps.load.output.items", as: item, run: price, input: {sku: "${item.sku}"}}
  sum:     {after: [each], set: "${sum(steps.each.output.map(x, x.price))}"}
  poll:    {after: [load], repeat: {until: "steps.check.output.ready", max: 10},
            steps: {check: {run: check}, nap: {after: [check], await: {time: 100ms}}}}
  approve: {after: [sum], await: {webhook: true, timeout: 24h, on_timeout: fail}}
  pay:     {after: [approve, "ended:review"], run: charge, undo: {run: refund}}
  ship:    {after: [pay, poll], subscribes: [order.checked], join: any, flow: shipping, input: {items: "${input}"}}
  alarm:   {after: ["failed:ship"], run: page_someone}
finally: {steps: {tidy: {}}}
output: {total: "${steps.sum.output}"}
"#;

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fulfil.yaml"), FULFIL).unwrap();
    dir
}

fn sh(dir: &Path, script: &str) -> std::process::ExitStatus {
    std::process::Command::new("sh").arg("-c").arg(script).current_dir(dir).status().unwrap()
}

#[test]
fn a_flow_is_listed_by_level() {
    insta::assert_snapshot!(eddy(folder().path(), &["flow", "graph", "fulfil.yaml"]).good().out);
}

#[test]
fn a_flow_is_drawn_by_others() {
    let dir = folder();
    insta::assert_snapshot!(eddy(dir.path(), &["flow", "graph", "fulfil.yaml", "--mermaid"]).good().out);
    insta::assert_snapshot!(eddy(dir.path(), &["flow", "graph", "fulfil.yaml", "--dot"]).good().out);
    let analysis = eddy(dir.path(), &["flow", "graph", "fulfil.yaml", "--json"]).good().json();
    assert_eq!(analysis["analysis"]["entry"], serde_json::json!(["load"]));
    let edges = analysis["analysis"]["groups"]["poll"]["edges"].clone();
    assert_eq!(edges, serde_json::json!([{"from": "check", "to": "nap", "arm": "check", "kind": "step"}]));
    assert_eq!(analysis["analysis"]["finally"]["entry"], serde_json::json!(["tidy"]));
}

#[test]
fn a_new_version_is_told_in_words() {
    let dir = folder();
    let new = FULFIL
        .replace("attempts: 3", "attempts: 5, max: 20s")
        .replace("  alarm:   {after: [\"failed:ship\"], run: page_someone}\n", "")
        .replace("\"ended:review\"", "\"failed:review\"")
        .replace("max: 10}", "max: 12}")
        .replace("check: {run: check}", "check: {run: check, timeout: 2s}")
        .replace("finally", "  late: {after: [\"failed:pay\"], run: tell}\nfinally")
        .replace("tidy: {}", "sweep: {}");
    std::fs::write(dir.path().join("new.yaml"), new).unwrap();
    insta::assert_snapshot!(eddy(dir.path(), &["flow", "diff", "new.yaml", "fulfil.yaml"]).good().out);
    // In a field that is new as a whole, durations are printed as authors write them; an `input` is printed unchanged.
    let waits =
        "name: w\nsteps: {a: {await: {event: e, timeout: 1d, since: 90m}, run: a, input: {timeout: 86400000}}}\n";
    std::fs::write(dir.path().join("waits.yaml"), waits).unwrap();
    std::fs::write(dir.path().join("none.yaml"), "name: w\nsteps: {b: {}}\n").unwrap();
    let added = eddy(dir.path(), &["flow", "diff", "waits.yaml", "none.yaml"]).good().out;
    assert!(added.contains(r#"await: {"event":"e","since":"1h30m","timeout":"1d"}"#), "{added}");
    assert!(added.contains(r#"input: {"timeout":86400000}"#), "{added}");
    // Neither is registered, so the output does not mention runs.
    assert!(!added.contains("under way"), "{added}");
    let same = eddy(dir.path(), &["flow", "diff", "fulfil.yaml", "fulfil.yaml"]).good().out;
    assert!(same.contains("in both (file fulfil.yaml, file fulfil.yaml): nothing changes"), "{same}");
    // The name of another flow is printed.
    std::fs::write(dir.path().join("other.yaml"), FULFIL.replace("name: fulfil", "name: other")).unwrap();
    let other = eddy(dir.path(), &["flow", "diff", "other.yaml", "fulfil.yaml"]).good().out;
    let title = other.lines().next().unwrap();
    assert!(title.starts_with("fulfil  6ac3ae1f909e7146 (file fulfil.yaml) → other  "), "{other}");
    assert!(title.ends_with(" (file other.yaml)") && other.ends_with("\n\nonly the name differs\n"), "{other}");
}

#[test]
fn a_sound_file_is_told_to_be_and_a_bad_one_is_told_why() {
    let dir = folder();
    let good = eddy(dir.path(), &["flow", "validate", "fulfil.yaml"]).good();
    assert!(good.out.starts_with("✓ fulfil.yaml: fulfil "), "{good:?}");
    std::fs::write(dir.path().join("bad.yaml"), "name: bad\nsteps:\n  a: {retry: {attempts: 0}}\n  b: {after: [aa]}\n")
        .unwrap();
    let bad = eddy(dir.path(), &["flow", "validate", "."]).bad(5);
    insta::assert_snapshot!(bad.err);
    let json = eddy(dir.path(), &["--json", "flow", "validate", "."]).bad(5);
    let (verdicts, error) = (json.json(), serde_json::from_str::<serde_json::Value>(&json.err).unwrap());
    assert_eq!((&verdicts[0]["valid"], &verdicts[1]["valid"]), (&false.into(), &true.into()));
    assert_eq!(verdicts[0]["problems"].as_array().unwrap().len(), 2);
    assert_eq!(error["error"]["exit"], 5);
}

#[test]
fn a_schema_that_is_none_is_told_with_everything_else() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("bad.yaml"), "input_schema: {type: 12}\nsteps: {a: {rum: a}}\n").unwrap();
    let bad = eddy(dir.path(), &["flow", "validate", "bad.yaml"]).bad(5);
    assert!(bad.err.contains("2 problems") && bad.err.contains("input_schema.type"), "{bad:?}");
    assert!(bad.err.contains("this is not a JSON Schema: 12 is not valid"), "{bad:?}");
}

#[test]
fn a_file_without_a_name_is_named_after_itself() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("nightly.yaml"), "steps: {a: {}}\n").unwrap();
    let good = eddy(dir.path(), &["flow", "validate", "nightly.yaml"]).good();
    assert!(good.out.contains(": nightly "), "{good:?}");
}

#[test]
fn colours_are_used_when_asked_for() {
    let dir = folder();
    let plain = eddy(dir.path(), &["flow", "graph", "fulfil.yaml", "--color", "never"]).good().out;
    let colored = eddy(dir.path(), &["flow", "graph", "fulfil.yaml", "--color", "always"]).good().out;
    assert!(!plain.contains('\x1b') && colored.contains("\x1b[1mload\x1b[0m"));
}

#[test]
fn every_way_to_go_wrong_has_its_code() {
    let dir = tempfile::tempdir().unwrap();
    // A port that was free a moment ago, on which nothing listens.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let unreachable_url = format!("http://127.0.0.1:{port}");
    let unreachable = eddy(dir.path(), &["run", "list", "--url", &unreachable_url]).bad(3);
    assert!(
        unreachable.err.contains("no server answers at") && unreachable.err.contains("eddy dev"),
        "{unreachable:?}"
    );
    eddy(dir.path(), &["flow", "validate", "nothing.yaml"]).bad(2);
    eddy(dir.path(), &["flow", "graph", "nothing.yaml"]).bad(2);
    eddy(dir.path(), &["start", "x", "--input", "{not json"]).bad(2);
    eddy(dir.path(), &["start", "x", "--delay", "soon"]).bad(2);
    eddy(dir.path(), &["worker", "exec", "no-command"]).bad(2);
    for handler in ["a\nb", "\u{1b}[2J", " ", &"x".repeat(129)] {
        let ran = eddy(dir.path(), &["worker", "exec", &format!("{handler}=true"), "--url", &unreachable_url]).bad(2);
        assert!(ran.err.contains("no step has such a handler: expected one line of 1 to 128 characters"), "{ran:?}");
    }
    let twice = eddy(dir.path(), &["worker", "exec", "a=1", "b=1", "a=2", "--url", &unreachable_url]).bad(2);
    assert_eq!(twice.err, "error: the handler a is given twice\n");
    let rate = eddy(dir.path(), &["queue", "set", "q", "--rate", "5/x"]).bad(2);
    assert!(rate.err.contains("\"x\" is not a duration"), "{rate:?}");
    let id = eddy(dir.path(), &["event", "publish", "paid", "--id", "", "--url", &unreachable_url]).bad(2);
    assert!(id.err.contains("a value is required for '--id <ID>'"), "{id:?}");
    eddy(dir.path(), &["frobnicate"]).bad(2);
    eddy(dir.path(), &["run", "list", "--url", "no url"]).bad(2);
    let nowhere = eddy(dir.path(), &["run", "list", "--url", "http://127.0.0.1:0"]).bad(2);
    assert!(nowhere.err.contains("its port is not a number from 1 to 65535"), "{nowhere:?}");
    eddy(dir.path(), &["backup", "--store", "nothing", "to"]).bad(4);
    eddy(dir.path(), &["doctor", "--store", "nothing"]).bad(1);
    for (args, message) in [
        (&["run", "list", "--limit", "0"][..], "expected 1 or more"),
        (&["run", "list", "--limit", "ten"], "expected a whole number"),
        (&["start", "x", "--priority", "99999999999"], "the number is out of range"),
        (&["start", "x", "--delay", "-3s"], "\"-3s\" is not a duration"),
        (&["queue", "set", "q", "--concurrency", "-1"], "the number is out of range"),
        (&["store", "copy", "--from", "memory:", "--to", "x"], "--from cannot be a memory store"),
    ] {
        let ran = eddy(dir.path(), args).bad(2);
        assert!(ran.err.contains(message), "{ran:?}");
    }
    // The URL of another kind of store is refused, and its password is not shown.
    let url = "postgres://u:secret@db/x";
    for (args, message) in [
        (&["backup", "--store", url, "to"][..], "back up a PostgreSQL store"),
        (&["doctor", "--store", url], "for a PostgreSQL store"),
        (&["serve", "--store", "mysql://u:secret@db/x"], "mysql://u@db/x is not a store"),
    ] {
        let ran = eddy(dir.path(), args).bad(2);
        assert!(ran.err.contains(message) && !ran.err.contains("secret"), "{ran:?}");
    }
    let mut help = command();
    help.args(["backup", "--help"]).env("EDDY_STORE", url);
    let help = finish(help).good();
    assert!(help.out.contains("EDDY_STORE") && !help.out.contains("secret"), "{help:?}");
    for (command, listen, example) in [
        ("serve", "17270", "127.0.0.1:17270"),
        ("serve", "foo:bar", "127.0.0.1:7070"),
        ("serve", ":99999", "127.0.0.1:7070"),
        ("serve", "127.0.0.1:+0", "127.0.0.1:7070"),
        ("dev", "17270", "127.0.0.1:17270"),
    ] {
        let ran = eddy(dir.path(), &[command, "--store", "memory:", "--listen", listen]).bad(2);
        assert!(ran.err.contains(&format!("expected HOST:PORT, such as {example}\n")), "{ran:?}");
    }
    let watch = eddy(dir.path(), &["dev", "--store", "memory:", "--watch", "nothing", "--", "true"]).bad(2);
    assert!(watch.err.contains("--watch nothing: there is no such directory"), "{watch:?}");
    let key = eddy(dir.path(), &["run", "list", "--api-key", "clé", "--url", &unreachable_url]).bad(2);
    assert!(key.err.contains("the key from --api-key is not a valid key") && !key.err.contains("clé"), "{key:?}");
    let mut strange = command();
    strange.args(["run", "list", "--url", &unreachable_url]).env("EDDY_KEY", "é");
    assert!(finish(strange).bad(2).err.contains("the key from EDDY_KEY is not a valid key"));
    let admin = "é".repeat(40);
    let listen = ["--store", "memory:", "--listen", "127.0.0.1:0", "--keys", "on", "--admin-key", &admin];
    let admin = eddy(dir.path(), &[&["serve"], &listen[..]].concat()).bad(2);
    assert!(admin.err.contains("no request header can contain"), "{admin:?}");
    for what in ["open", "cancel"] {
        let gate = eddy(dir.path(), &["gate", what, "", "--url", &unreachable_url]).bad(2);
        assert!(gate.err.contains("a value is required for '<"), "{gate:?}");
    }
    let help = eddy(dir.path(), &["--help"]).good().out;
    assert!(help.contains("Exit codes:") && help.contains("  3    the server cannot be reached"), "{help}");
}

#[test]
fn what_the_environment_sets_is_not_asked_for_again() {
    let mut start = command();
    start.args(["start"]).env("EDDY_URL", "http://127.0.0.1:1").env("EDDY_KEY", "k").env("EDDY_NAMESPACE", "n");
    let ran = finish(start).bad(2);
    assert!(ran.err.contains("Usage: eddy start <FLOW>\n"), "{ran:?}");
    // Errors in the environment are reported, and help shows what the environment sets.
    let mut serve = command();
    serve.arg("serve").env("EDDY_LEASE", "soon");
    assert!(finish(serve).bad(2).err.contains("\"soon\" is not a duration"));
    let mut help = command();
    help.args(["start", "--help"]).env("EDDY_URL", "http://127.0.0.1:1");
    assert!(finish(help).good().out.contains("EDDY_URL=http://127.0.0.1:1"));
}

#[test]
fn a_flow_that_is_in_two_files_is_refused() {
    let dir = folder();
    std::fs::write(dir.path().join("other.yaml"), "# The same.\nname: fulfil\nsteps: {a: {}}\n").unwrap();
    std::fs::create_dir(dir.path().join("more")).unwrap();
    // Named after its file.
    std::fs::write(dir.path().join("more/fulfil.yml"), "steps: {a: {}}\n").unwrap();
    // No server is needed: nothing is registered unless all files are valid.
    let apply = eddy(dir.path(), &["flow", "apply", "."]).bad(5);
    assert!(apply.err.contains("other.yaml: 1 problem") && apply.err.contains(" --> 2:7"), "{apply:?}");
    assert!(apply.err.contains("the flow `fulfil` is also in ./fulfil.yaml"), "{apply:?}");
    assert!(apply.err.contains("nothing was registered"), "{apply:?}");
    let named = eddy(dir.path(), &["flow", "validate", "more", "fulfil.yaml"]).bad(5);
    assert!(named.err.contains("the flow `fulfil` is also in more/fulfil.yml"), "{named:?}");
    let verdicts = eddy(dir.path(), &["--json", "flow", "validate", "."]).bad(5).json();
    assert_eq!((&verdicts[0]["valid"], &verdicts[1]["valid"]), (&true.into(), &false.into()));
    assert_eq!(verdicts[1]["problems"][0]["line"], 2);
    // The same file under two paths is one file.
    eddy(dir.path(), &["flow", "validate", "fulfil.yaml", "./more/../fulfil.yaml"]).good();
}

#[test]
fn nobody_reading_on_is_no_failure() {
    let dir = folder();
    let script = format!("{} flow graph fulfil.yaml | head -n 1 > /dev/null", env!("CARGO_BIN_EXE_eddy"));
    assert!(sh(dir.path(), &script).success());
}

#[test]
fn completions_are_scripts() {
    let dir = tempfile::tempdir().unwrap();
    for (shell, sign) in [("bash", "complete -F _eddy"), ("zsh", "#compdef eddy"), ("fish", "complete -c eddy")] {
        let script = eddy(dir.path(), &["completions", shell]).good().out;
        assert!(script.contains(sign), "{shell}");
    }
}

#[test]
fn a_folder_to_begin_with() {
    for (lang, main) in [("shell", "worker.sh"), ("rust", "src/main.rs")] {
        let dir = tempfile::tempdir().unwrap();
        let made = eddy(dir.path(), &["init", "mine", "--lang", lang]).good();
        assert!(made.out.contains("cd mine\n  eddy dev -- "), "{made:?}");
        assert!(dir.path().join("mine").join(main).is_file());
        eddy(dir.path(), &["flow", "validate", "mine/flows"]).good();
        let again = eddy(dir.path(), &["init", "mine", "--lang", lang]).bad(5);
        assert!(again.err.contains("has flows/greet.yaml"), "{again:?}");
    }
}

fn runs_in(store: &Path) -> usize {
    let store = Embedded::open(store, Options::default()).unwrap();
    let page = Page { after: None, limit: 10 };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.runs(None, &RunFilter::default(), page)).unwrap().len()
}

#[test]
fn a_store_is_copied_and_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let mut serve = command();
    serve.current_dir(dir.path()).args(["serve", "--store", "store", "--listen", "127.0.0.1:0"]);
    let mut serve = Process(serve.env("EDDY_LOG", "error").stdout(std::process::Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    let mut lines = std::io::BufReader::new(serve.0.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
    let url = line.split_whitespace().find(|word| word.starts_with("http://")).unwrap().to_owned();
    std::fs::write(dir.path().join("f.yaml"), "name: f\nsteps: {a: {}}\n").unwrap();
    eddy(dir.path(), &["flow", "apply", "f.yaml", "--url", &url]).good();
    eddy(dir.path(), &["start", "f", "--url", &url]).good();
    let held = eddy(dir.path(), &["doctor", "--store", "store"]).bad(1);
    assert!(held.out.contains("is locked by process"), "{held:?}");
    // The server keeps running, and the copy has everything it has acknowledged.
    eddy(dir.path(), &["backup", "--store", "store", "copy"]).good();
    eddy(dir.path(), &["start", "f", "--url", &url]).good();
    drop(serve);
    eddy(dir.path(), &["backup", "--store", "store", "later"]).good();
    assert_eq!((runs_in(&dir.path().join("copy")), runs_in(&dir.path().join("later"))), (1, 2));
    let again = eddy(dir.path(), &["backup", "--store", "store", "copy"]).bad(5);
    assert!(again.err.contains("is not empty"), "{again:?}");
    let looked = eddy(dir.path(), &["doctor", "--store", "copy"]).good();
    assert!(looked.out.contains("opens, and is not in use") && looked.out.contains("MiB free"), "{looked:?}");
}

#[test]
fn a_key_in_the_environment_is_not_shown() {
    let mut command = command();
    command.env("EDDY_KEY", "secret-of-mine").arg("--help");
    assert!(!finish(command).out.contains("secret-of-mine"));
}
