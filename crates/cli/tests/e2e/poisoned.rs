//! A run during whose decisions the process dies is quarantined, and all other runs continue.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use eddyline::{Client, Method};
use serde_json::{Value, json};

use crate::eddy::{Eddy, LONG};

/// The run must be quarantined after this many kills at most. Not every kill hits a decision.
const MAX_DEATHS: u32 = 20;
/// The format of the file `handling`: the length of its head, and of an id.
const HEAD: usize = 12;
const ID: usize = 16;

/// A short timer, then many steps whose expressions use most of their budget.
fn heavy() -> String {
    let mut steps = "nap: {await: {time: 100ms}}".to_owned();
    let mut before = "nap".to_owned();
    for n in 0..40 {
        let set = "${size(range(90000).filter(i, i % 2 == 0))}";
        steps.push_str(&format!(", s{n}: {{after: [{before}], set: '{set}'}}"));
        before = format!("s{n}");
    }
    format!("{{steps: {{{steps}}}}}")
}

/// Whether the file `handling` lists exactly this run.
fn is_handled(store: &Path, run: &str) -> bool {
    let note = std::fs::read(store.join("handling")).unwrap_or_default();
    let count = |at: usize| note.get(at..at + 4).map_or(0, |count| u32::from_le_bytes(count.try_into().unwrap()));
    let noted: Vec<&[u8]> = note.get(HEAD..).unwrap_or_default().chunks_exact(ID).collect();
    let run = uuid::Uuid::parse_str(run).unwrap();
    count(4) + count(8) == 1 && noted.first() == Some(&&run.into_bytes()[..])
}

fn signal(eddy: &Eddy, name: &str) {
    assert!(Command::new("kill").args([name, &eddy.pid().to_string()]).status().unwrap().success());
}

/// SIGKILL while the process decides the run. SIGSTOP comes first, so that the decision cannot end in between.
fn kill_while_it_decides(eddy: &mut Eddy, run: &str) {
    let began = Instant::now();
    loop {
        while !is_handled(&eddy.store(), run) {
            assert!(began.elapsed() < LONG, "{run} is not decided");
            std::thread::sleep(Duration::from_micros(100));
        }
        signal(eddy, "-STOP");
        if is_handled(&eddy.store(), run) {
            return eddy.kill();
        }
        signal(eddy, "-CONT");
    }
}

fn cli(arguments: &[&str]) -> (Output, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
    let output = command.args(arguments).env_remove("EDDY_URL").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, said)
}

async fn error(client: &Client, run: &str) -> Option<String> {
    client.run(run).info().await.unwrap().error.map(|error| error.kind)
}

async fn quarantined(client: &Client) -> Vec<String> {
    let page: Value = client.call(Method::GET, "/v1/quarantine", &[], None::<&Value>).await.unwrap();
    page["items"].as_array().unwrap().iter().map(|run| run["run_id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_during_whose_decisions_the_process_is_killed_is_parked_named_and_released() {
    let mut eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("heavy", &heavy()).await.unwrap();
    client.register_flow("light", "{steps: {nap: {await: {time: 50ms}}, a: {after: [nap], set: 1}}}").await.unwrap();
    let poisoned = client.start("heavy", &json!(null)).await.unwrap().id().to_owned();
    let (mut deaths, mut others) = (0, Vec::new());
    while error(&client, &poisoned).await.is_none() {
        assert!(deaths < MAX_DEATHS, "it is not quarantined after {deaths} deaths");
        kill_while_it_decides(&mut eddy, &poisoned);
        deaths += 1;
        eddy.restart();
        // The engine reads the suspected runs when it starts, before it decides anything.
        others.push(client.start("light", &json!(null)).await.unwrap());
    }
    for other in others {
        other.result::<Value>().await.unwrap();
    }
    assert!(deaths >= 2, "it is quarantined after {deaths} deaths");
    assert_eq!(error(&client, &poisoned).await.as_deref(), Some("Quarantined"));
    assert_eq!(quarantined(&client).await, [poisoned.as_str()]);
    let resume = format!("`eddy run resume {poisoned}`");

    let url = eddy.url();
    let (doctor, said) = cli(&["doctor", "--url", &url]);
    assert_eq!(doctor.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("run {poisoned} of heavy is quarantined")) && said.contains(&resume), "{said}");
    let (_, said) = cli(&["run", "show", "--url", &url, &poisoned]);
    assert!(said.contains("processes died while handling this run") && said.contains(&resume), "{said}");

    // `doctor --store` reports it without a server, and a restart without a crash changes nothing.
    assert!(eddy.terminate().await.success());
    let store = eddy.store().display().to_string();
    let (doctor, said) = cli(&["doctor", "--store", &store]);
    assert_eq!(doctor.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("run {poisoned} of heavy is quarantined")) && said.contains(&resume), "{said}");
    eddy.restart();
    client.start("light", &json!(null)).await.unwrap().result::<Value>().await.unwrap();
    assert_eq!(error(&client, &poisoned).await.as_deref(), Some("Quarantined"));

    let (resumed, _) = cli(&["run", "resume", "--url", &url, &poisoned]);
    assert!(resumed.status.success(), "{resumed:?}");
    let ended = client.run(&poisoned).wait(LONG).await.unwrap().unwrap();
    assert_eq!(ended.status, "completed", "{ended:?}");
    assert!(quarantined(&client).await.is_empty());
    let (doctor, said) = cli(&["doctor", "--url", &url]);
    assert!(doctor.status.success() && !said.contains("quarantined"), "{said}");
}
