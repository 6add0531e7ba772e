//! Several instances of `eddy serve` on one PostgreSQL database: any of them takes any request.

use std::time::Duration;

use eddyline::protocol::Page;
use eddyline::{Client, Method, StepCtx, StepError, Worker};
use serde_json::{Value, json};

use crate::eddy::{Eddy, LONG, metric};
use crate::order;
use crate::postgres::{drop_schemas_now, fresh_url};
use crate::timeline::{check, records};
use crate::working::{Transport, work};

const RUNS: u64 = 60;
const ITEMS: usize = 300;

/// Instances on one new schema, which is deleted at the end.
struct Instances {
    url: String,
    all: Vec<Eddy>,
}

impl Instances {
    fn start(count: usize, flags: &[&str]) -> Instances {
        let url = fresh_url();
        // Each tries to create the tables.
        let all = std::thread::scope(|scope| {
            let starting: Vec<_> = (0..count).map(|_| scope.spawn(|| Eddy::on_store(&url, flags))).collect();
            starting.into_iter().map(|started| started.join().unwrap()).collect()
        });
        Instances { url, all }
    }

    /// Clients of the instances in turn.
    fn client(&self, n: usize) -> Client {
        self.all[n % self.all.len()].client()
    }

    async fn total(&self, name: &str) -> f64 {
        let mut total = 0.0;
        for eddy in &self.all {
            total += metric(eddy, name).await;
        }
        total
    }
}

impl Drop for Instances {
    fn drop(&mut self) {
        self.all.clear();
        drop_schemas_now(vec![std::mem::take(&mut self.url)]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_started_anywhere_are_worked_on_everywhere() {
    let instances = Instances::start(3, &[]);
    order::register(&instances.client(0)).await;
    let workers: Vec<_> = (0..3)
        .map(|n| work(order::worker(instances.all[n].url()), [Transport::Socket, Transport::Http][n % 2]))
        .collect();
    let mut runs = Vec::new();
    for n in 0..RUNS {
        let client = instances.client(n as usize);
        runs.push((n, client.start(order::NAME, &order::input(n)).await.unwrap().id().to_owned()));
    }
    for (n, run) in &runs {
        let client = instances.client(*n as usize + 1);
        let ended = client.run(run).wait(LONG).await.unwrap().unwrap_or_else(|| panic!("{run} did not end"));
        assert_eq!((ended.status.as_str(), &ended.output), ("completed", &order::output(*n)), "{run}");
        let attempts = check(&instances.client(*n as usize + 2), run).await;
        assert_eq!(attempts.len(), order::TASKS, "{run}");
        assert!(attempts.values().all(|attempts| *attempts == 1), "{run}: {attempts:?}");
    }
    let query = [("count", "true".to_owned())];
    let listed: Page<Value> = instances.client(1).call(Method::GET, "/v1/runs", &query, None::<&()>).await.unwrap();
    assert_eq!(listed.total, Some(RUNS));
    for worker in workers {
        worker.stop().await;
    }
}

async fn double(_: StepCtx, item: u64) -> Result<u64, StepError> {
    Ok(item * 2)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_wide_run_is_worked_on_through_all_instances() {
    let instances = Instances::start(3, &[]);
    let flow = "steps: {each: {spread: \"input.items\", run: double}, \
                total: {after: [each], set: \"${sum(steps.each.output)}\"}}\noutput: \"${steps.total.output}\"";
    instances.client(0).register_flow("wide", flow).await.unwrap();
    let worker = |url: String| Worker::connect(url).handler("double", double).max_concurrent(16);
    let workers: Vec<_> = instances.all.iter().map(|eddy| work(worker(eddy.url()), Transport::Socket)).collect();
    let items: Vec<usize> = (0..ITEMS).collect();
    let run = instances.client(1).start("wide", &json!({ "items": items })).await.unwrap().id().to_owned();
    let ended = instances.client(2).run(&run).wait(LONG).await.unwrap().expect("it ends");
    assert_eq!((ended.status.as_str(), ended.output), ("completed", json!(ITEMS * (ITEMS - 1))));
    let attempts = check(&instances.client(0), &run).await;
    assert_eq!(attempts.len(), ITEMS);
    assert!(attempts.values().all(|attempts| *attempts == 1), "{attempts:?}");
    let conflicts = instances.total("eddyline_conflicts_total").await;
    println!("{conflicts} conflicts in {} records", records(&instances.client(0), &run).await.len());
    for worker in workers {
        worker.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gates_events_children_and_cancels_reach_runs_from_any_instance() {
    let instances = Instances::start(2, &[]);
    let [one, two] = [instances.client(0), instances.client(1)];
    let parent = "steps: {child: {flow: waits, input: \"${input}\"}}\noutput: \"${steps.child.output}\"";
    let child = "steps: {ask: {await: {manual: true}}, paid: {after: [ask], await: {event: paid, key: \"input.id\"}}}\n\
                 output: {ask: \"${steps.ask.output}\", paid: \"${steps.paid.output}\"}";
    one.register_flow("waits", child).await.unwrap();
    two.register_flow("parent", parent).await.unwrap();
    let run = one.start("parent", &json!({"id": "a"})).await.unwrap().id().to_owned();
    let gate = open_gate(&two).await;
    let token = gate["token"].as_str().unwrap();
    let path = format!("/v1/gates/{token}");
    let _: Value = two.call(Method::POST, &path, &[], Some(&json!({"yes": true}))).await.unwrap();
    let again = one.call::<Value>(Method::POST, &path, &[], Some(&json!({"yes": false}))).await;
    assert!(again.is_err(), "a gate opens once");
    let event = json!({"name": "paid", "key": "a", "payload": 7});
    let _: Value = one.call(Method::POST, "/v1/events", &[], Some(&event)).await.unwrap();
    let ended = two.run(&run).wait(LONG).await.unwrap().expect("it ends");
    assert_eq!((ended.status.as_str(), ended.output), ("completed", json!({"ask": {"yes": true}, "paid": 7})));
    let run = two.start("parent", &json!({"id": "b"})).await.unwrap().id().to_owned();
    let child = open_gate(&one).await["run_id"].as_str().unwrap().to_owned();
    let _: Value = one.call(Method::POST, &format!("/v1/runs/{run}/cancel"), &[], Some(&json!({}))).await.unwrap();
    let ended = two.run(&child).wait(LONG).await.unwrap().expect("it ends");
    assert_eq!(ended.status.as_str(), "cancelled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_changed_through_one_instance_holds_on_the_others() {
    let instances = Instances::start(2, &[]);
    let [one, two] = [instances.client(0), instances.client(1)];
    for n in 0..5 {
        let (here, there) = if n % 2 == 0 { (&one, &two) } else { (&two, &one) };
        here.register_flow("f", &format!("{{steps: {{a: {{set: {n}}}}}, output: \"${{steps.a.output}}\"}}"))
            .await
            .unwrap();
        let run = there.start("f", &json!(null)).await.unwrap().id().to_owned();
        let ended = here.run(&run).wait(LONG).await.unwrap().expect("it ends");
        assert_eq!(ended.output, json!(n));
    }
    one.register_flow("work", "steps: {double: {input: 1}}").await.unwrap();
    let _: Value = one.call(Method::POST, "/v1/queues/default/pause", &[], Some(&json!({}))).await.unwrap();
    let run = two.start("work", &json!(null)).await.unwrap().id().to_owned();
    let register = json!({"queues": ["default"], "handlers": ["double"], "max_concurrent": 1});
    let worker: Value = two.call(Method::POST, "/v1/workers", &[], Some(&register)).await.unwrap();
    let claim = json!({"worker_id": worker["worker_id"], "queues": ["default"], "max": 1, "wait_ms": 0});
    let claimed: Value = two.call(Method::POST, "/v1/tasks/claim", &[], Some(&claim)).await.unwrap();
    assert_eq!(claimed["tasks"], json!([]), "the queue is paused");
    let _: Value = one.call(Method::POST, "/v1/queues/default/resume", &[], Some(&json!({}))).await.unwrap();
    let claimed: Value = two.call(Method::POST, "/v1/tasks/claim", &[], Some(&claim)).await.unwrap();
    let task = &claimed["tasks"][0];
    // The report comes in where neither the run was started nor the task was claimed.
    let report = json!({"task_id": task["task_id"], "token": task["token"], "op": "complete", "output": 2});
    let reports = json!({"worker_id": worker["worker_id"], "reports": [report]});
    let reported: Value = one.call(Method::POST, "/v1/tasks/report", &[], Some(&reports)).await.unwrap();
    assert_eq!(reported["outcomes"][0]["outcome"], "applied", "{reported}");
    assert_eq!(one.run(&run).wait(LONG).await.unwrap().expect("it ends").status.as_str(), "completed");
}

/// Waits for the only open gate.
async fn open_gate(client: &Client) -> Value {
    let deadline = tokio::time::Instant::now() + LONG;
    loop {
        let gates: Page<Value> = client.call(Method::GET, "/v1/gates", &[], None::<&()>).await.unwrap();
        if let [gate] = gates.items.as_slice() {
            return gate.clone();
        }
        assert!(tokio::time::Instant::now() < deadline, "{:?}", gates.items);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_is_killed_loses_nothing() {
    let mut instances = Instances::start(3, &["--lease", "1s"]);
    order::register(&instances.client(0)).await;
    // The workers of the first instance reach nobody while it is down; the others go on.
    let workers: Vec<_> = instances.all.iter().map(|eddy| work(order::worker(eddy.url()), Transport::Socket)).collect();
    let mut runs = Vec::new();
    for round in 0..4 {
        for n in round * 15..(round + 1) * 15 {
            let client = instances.client(n as usize);
            runs.push((n, client.start(order::NAME, &order::input(n)).await.unwrap().id().to_owned()));
        }
        let victim = &mut instances.all[round as usize % 3];
        victim.kill();
        victim.restart();
    }
    for (n, run) in &runs {
        let client = instances.client(*n as usize + 1);
        let ended = client.run(run).wait(LONG).await.unwrap().unwrap_or_else(|| panic!("{run} did not end"));
        assert_eq!((ended.status.as_str(), &ended.output), ("completed", &order::output(*n)), "{run}");
        assert_eq!(check(&client, run).await.len(), order::TASKS, "{run}");
    }
    for worker in workers {
        worker.stop().await;
    }
}
