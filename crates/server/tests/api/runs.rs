//! Flows and runs.

use eddyline_server::ServeArgs;
use hyper::Method;
use serde_json::json;

use crate::client::{DIAMOND, Rig, args};

#[tokio::test]
async fn a_diamond_runs_to_its_end_over_plain_calls() {
    let dir = tempfile::tempdir().unwrap();
    let store = Some(dir.path().join("store").display().to_string());
    let rig = Rig::with(ServeArgs { store, ..args() }).await;
    rig.flow("diamond", DIAMOND).await;
    let run = rig.run("diamond", json!({"x": 1})).await;
    for _ in 0..4 {
        let task = rig.claim("w").await;
        let outcome = rig.report(&task, json!({"op": "complete", "seq": 1, "output": task["step"]})).await;
        assert_eq!(outcome["outcome"], "applied");
    }
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!((result.status, &result.body["output"]), (200, &json!({"all": "d"})));
    let info = rig.get(&format!("/v1/runs/{run}")).await;
    assert_eq!(info.body["status"], "completed");
    assert_eq!((&info.body["step_count"], &info.body["completed_steps"]), (&json!(4), &json!(4)));
    assert_eq!(info.body["waiting_for"], json!([]));
    let steps = rig.get(&format!("/v1/runs/{run}/steps?limit=3&count=true")).await;
    assert_eq!((steps.items().len(), &steps.body["total"]), (3, &json!(4)));
    let next = steps.text("next");
    let rest = rig.get(&format!("/v1/runs/{run}/steps?limit=3&cursor={next}")).await;
    assert_eq!((rest.items()[0]["activation"].as_str(), rest.body["next"].is_null()), (Some("d"), true));
    assert_eq!(rest.items()[0]["attempts"][0]["worker"], "w");
    rig.server.stop().await;
}

#[tokio::test]
async fn definitions_are_taken_as_json_or_yaml_and_their_problems_told_all_at_once() {
    let rig = Rig::start().await;
    let json = rig.put("/v1/flows/one", json!({"steps": {"a": {"run": "a"}}})).await;
    assert_eq!((json.status, &json.body["changed"]), (200, &json!(true)));
    for content_type in [Some("application/yaml"), Some("text/plain"), None] {
        let same = rig.send(Method::PUT, "/v1/flows/one", content_type, "steps: {a: {run: a}}".into()).await;
        assert_eq!((same.status, &same.body["changed"]), (200, &json!(false)), "{content_type:?}");
    }
    let bad = rig.put("/v1/flows/bad", json!({"steps": {"a": {"run": "a", "after": ["x"]}, "b": {"rum": "b"}}})).await;
    assert_eq!(bad.code(), (422, "invalid"));
    let details = bad.body["error"]["details"].as_array().unwrap();
    assert!(details.len() >= 2, "{details:?}");
    assert!(details.iter().all(|detail| detail["path"].is_string() && detail["line"].is_u64()), "{details:?}");
    assert_eq!(rig.get("/v1/flows/bad").await.code(), (404, "not_found"));
    let image = rig.send(Method::PUT, "/v1/flows/one", Some("image/png"), "x".into()).await;
    assert_eq!(image.code(), (415, "unsupported_media_type"));

    rig.flow("two", DIAMOND).await;
    let shown = rig.get("/v1/flows/two").await;
    assert_eq!(shown.body["analysis"]["levels"], json!([["a"], ["b", "c"], ["d"]]));
    let version = shown.text("version");
    assert_eq!(rig.get(&format!("/v1/flows/two?version={version}")).await.status, 200);
    assert_eq!(rig.get("/v1/flows/two?version=none").await.status, 404);
    let first = rig.get("/v1/flows?limit=1").await;
    assert_eq!(first.items()[0]["name"], "one");
    let second = rig.get(&format!("/v1/flows?limit=1&cursor={}", first.text("next"))).await;
    assert_eq!(second.items()[0]["name"], "two");
    rig.server.stop().await;
}

#[tokio::test]
async fn schemas_that_are_none_are_told_with_everything_else() {
    let rig = Rig::start().await;
    let text = "input_schema: {type: 12, properties: {a: {minimum: x}}}
steps:
  a: {run: a, emits: {paid: {type: nothing}}}
  b: {rum: b}
  c: {run: c, emits: [{sent: {pattern: '('}}, {lost: {$ref: '#/nowhere'}}]}
  d: {run: d, emits: {far: {$ref: 'http://example.com/x'}}}
";
    let reply = rig.send(Method::PUT, "/v1/flows/f", Some("application/yaml"), text.into()).await;
    assert_eq!(reply.code(), (422, "invalid"));
    let details = reply.body["error"]["details"].as_array().unwrap();
    let found: Vec<(&str, u64, u64)> = details
        .iter()
        .map(|problem| {
            let number = |field: &str| problem[field].as_u64().unwrap();
            (problem["path"].as_str().unwrap(), number("line"), number("column"))
        })
        .collect();
    assert_eq!(
        found,
        [
            ("input_schema.type", 1, 22),
            ("input_schema.properties.a.minimum", 1, 52),
            ("steps.a.emits.paid.type", 3, 36),
            ("steps.b.rum", 4, 7),
            ("steps.c.emits[0].pattern", 5, 41),
            ("steps.c.emits[1]", 5, 54),
            ("steps.d.emits.far", 6, 28),
        ],
        "{details:#?}"
    );
    let far = details[6]["message"].as_str().unwrap();
    assert!(far.ends_with("it refers to http://example.com/x; remote schemas are not fetched"), "{far}");
    rig.flow("f", "input_schema: {type: object}\nsteps: {a: {run: a, emits: {paid: {type: [string, 'null']}}}}").await;
    rig.server.stop().await;
}

#[tokio::test]
async fn a_start_is_made_once_a_key_and_refused_where_it_is_wrong() {
    let rig = Rig::start().await;
    rig.flow("f", "input_schema: {type: object, required: [x]}\nsteps: {a: {run: a}}").await;
    rig.flow("g", "steps: {a: {run: a}}").await;
    let start = async |body| rig.post("/v1/flows/f/runs", body).await;
    let first = start(json!({"input": {"x": 1}, "idempotency_key": "k", "tags": ["t"], "external_id": "e"})).await;
    assert_eq!((first.status, &first.body["existing"]), (201, &json!(false)));
    let again = start(json!({"input": {"x": 1}, "idempotency_key": "k"})).await;
    assert_eq!((again.status, &again.body["existing"]), (200, &json!(true)));
    assert_eq!(again.body["run_id"], first.body["run_id"]);
    assert_eq!(start(json!({"input": {"x": 2}, "idempotency_key": "k"})).await.code(), (409, "conflict"));
    assert_eq!(start(json!({"idempotency_key": ""})).await.code(), (400, "bad_request"));
    assert_eq!(start(json!({"input": {}})).await.code(), (422, "invalid"));
    assert_eq!(start(json!({"input": {"x": "y".repeat(3 << 20)}})).await.code(), (413, "too_large"));
    assert_eq!(start(json!({"input": {"x": 1}, "delay": "soon"})).await.code(), (400, "bad_request"));
    assert_eq!(rig.post("/v1/flows/none/runs", json!({})).await.code(), (404, "not_found"));

    let empty = rig.send(Method::POST, "/v1/flows/g/runs", None, "".into()).await;
    assert_eq!(empty.status, 201);
    let delayed = rig.post("/v1/flows/g/runs", json!({"delay": 3_600_000, "deadline": "2h", "priority": 3})).await;
    let info = rig.get(&format!("/v1/runs/{}", delayed.text("run_id"))).await;
    assert_eq!((&info.body["status"], &info.body["priority"]), (&json!("pending"), &json!(3)));
    let waiting = &info.body["waiting_for"];
    assert_eq!((&waiting[0]["activation"], &waiting[0]["waits_for"]["what"]), (&json!("@run"), &json!("delay")));
    assert_eq!(waiting.as_array().map(Vec::len), Some(1));
    let at = |time: &serde_json::Value| time.as_str().unwrap().parse::<jiff::Timestamp>().unwrap().as_millisecond();
    assert_eq!(at(&waiting[0]["waits_for"]["until"]) - at(&info.body["created_at"]), 3_600_000);
    rig.server.stop().await;
}

#[tokio::test]
async fn time_gates_and_back_offs_say_until_when() {
    let rig = Rig::start().await;
    let text =
        "steps: {nap: {await: {time: 1h}}, ask: {await: {manual: true, timeout: 2h}}, ever: {await: {manual: true}},
        a: {run: a, retry: {initial: 1m, max: 1m, jitter: 0}}}";
    rig.flow("f", text).await;
    let run = rig.run("f", json!(null)).await;
    let task = rig.claim("w").await;
    rig.report(&task, json!({"op": "fail", "seq": 1, "error": {"kind": "Busy", "message": "later"}})).await;
    let at = |time: &serde_json::Value| time.as_str().unwrap().parse::<jiff::Timestamp>().unwrap().as_millisecond();
    let info = rig.get(&format!("/v1/runs/{run}")).await;
    let waiting = info.body["waiting_for"].as_array().unwrap();
    let until = |step: &str| {
        let found = waiting.iter().find(|waiting| waiting["activation"] == step).unwrap();
        &found["waits_for"]["until"]
    };
    let begun = at(&info.body["started_at"]);
    for (step, ms) in [("nap", 3_600_000), ("ask", 7_200_000), ("a", 60_000)] {
        // Counted from when the gate was reached, or the attempt failed.
        let after = at(until(step)) - begun - ms;
        assert!((0..30_000).contains(&after), "{step}: {after} ms in {}", info.body);
    }
    assert_eq!(until("ever"), &json!(null), "it waits without end");
    let steps = rig.get(&format!("/v1/runs/{run}/steps")).await;
    let nap = steps.items().iter().find(|step| step["activation"] == "nap").unwrap().clone();
    assert_eq!(&nap["waits_for"]["until"], until("nap"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_batch_starts_what_it_can() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let batch = json!([{"flow": "f", "input": 1}, {"flow": "none"}, {"input": 2}, {"flow": "f"}]);
    let reply = rig.post("/v1/runs/batch", batch.clone()).await;
    let items = reply.items();
    assert_eq!(items.len(), 4);
    assert!(items[0]["run_id"].is_string() && items[3]["run_id"].is_string());
    assert_eq!((&items[1]["error"]["code"], &items[2]["error"]["code"]), (&json!("not_found"), &json!("invalid")));
    assert_eq!(rig.post("/v1/runs/batch", json!({"runs": batch})).await.items().len(), 4);
    assert_eq!(rig.post("/v1/runs/batch", json!({"x": 1})).await.status, 400);
    rig.server.stop().await;
}

#[tokio::test]
async fn runs_are_listed_newest_first_by_what_is_asked_for() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    rig.flow("g", "steps: {a: {run: a}}").await;
    let mut runs = Vec::new();
    for n in 0..5 {
        let body = json!({"tags": ["all", format!("n{n}")], "external_id": format!("e{n}")});
        runs.push(rig.post("/v1/flows/f/runs", body).await.text("run_id"));
    }
    let waiting = rig.run("g", json!(null)).await;
    let mut seen = Vec::new();
    let mut path = "/v1/runs?flow=f&limit=2&count=true".to_owned();
    loop {
        let page = rig.get(&path).await;
        assert_eq!(page.body["total"], 5);
        seen.extend(page.items().iter().map(|run| run["run_id"].as_str().unwrap().to_owned()));
        let Some(next) = page.body["next"].as_str() else { break };
        path = format!("/v1/runs?flow=f&limit=2&count=true&cursor={next}");
    }
    runs.reverse();
    assert_eq!(seen, runs);
    let count = async |query: &str| rig.get(&format!("/v1/runs?{query}")).await.items().len();
    assert_eq!(count("tag=all&tag=n3").await, 1);
    assert_eq!(count("external_id=e1").await, 1);
    assert_eq!(count("status=completed").await, 5);
    assert_eq!(count("status=running").await, 1);
    assert_eq!(count("since=2100-01-01T00:00:00Z").await, 0);
    assert_eq!(count("until=2100-01-01T00:00:00Z&flow=").await, 6);
    for bad in ["status=x", "limit=0", "limit=x", "cursor=x", "since=yesterday", "count=maybe"] {
        let reply = rig.get(&format!("/v1/runs?{bad}")).await;
        assert_eq!(reply.code(), (400, "bad_request"), "{bad}");
        let name = bad.split('=').next().unwrap();
        assert!(reply.body["error"]["message"].as_str().unwrap().contains(name), "{}", reply.body);
    }
    assert_eq!(rig.get("/v1/runs?limit=999999").await.status, 200);
    assert_eq!(rig.get(&format!("/v1/runs/{waiting}/result?wait=10")).await.status, 202);
    assert_eq!(rig.get(&format!("/v1/runs/{waiting}/result?wait=later")).await.status, 400);
    rig.server.stop().await;
}

#[tokio::test]
async fn people_act_on_runs_and_steps() {
    let rig = Rig::start().await;
    rig.flow("f", "steps:\n  a: {run: a, retry: {attempts: 2, initial: 1h}}\n  each: {spread: \"[1, 2]\", run: b}\n")
        .await;
    let run = rig.run("f", json!(1)).await;
    let act = async |path: &str, body| rig.post(&format!("/v1/runs/{run}/{path}"), body).await;
    assert_eq!(act("pause", json!({})).await.body["status"], "paused");
    assert_eq!(act("resume", json!({})).await.body["status"], "running");
    assert_eq!(act("steps/a/retry", json!({})).await.code(), (409, "conflict"));
    assert_eq!(act("steps/none/skip", json!({})).await.code(), (404, "not_found"));
    assert_eq!(act("retry", json!({})).await.code(), (409, "conflict"));
    assert_eq!(rig.delete(&format!("/v1/runs/{run}")).await.code(), (409, "conflict"));
    assert_eq!(act("steps/each%5B0%5D/complete", json!({"output": 7})).await.status, 200);
    assert_eq!(act("steps/each%5B1%5D/skip", json!({})).await.status, 200);
    let failed = act("steps/a/fail", json!({"error": {"kind": "Mine", "message": "no"}})).await;
    assert_eq!(failed.status, 200);
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!((&result.body["status"], &result.body["error"]["kind"]), (&json!("failed"), &json!("Mine")));

    assert_eq!(act("steps/a/retry", json!({})).await.code(), (409, "conflict"), "the run has ended");
    assert_eq!(act("steps/none/retry", json!({})).await.code(), (404, "not_found"), "whether it has ended or not");

    let again = act("retry", json!({})).await.text("run_id");
    assert_eq!(rig.get(&format!("/v1/runs/{again}")).await.body["retry_of"], json!(run));
    let cancelled = rig.post(&format!("/v1/runs/{again}/cancel"), json!({"reason": "enough"})).await;
    assert_eq!(cancelled.body["status"], "cancelled");
    let rerun = act("rerun", json!({"from": "a", "input": 5})).await.text("run_id");
    assert_eq!(rig.get(&format!("/v1/runs/{rerun}")).await.body["input"], 5);
    assert_eq!(act("rerun", json!({"from": "none"})).await.code(), (422, "invalid"));
    for (run, data) in
        [(&again, json!({"act": "retry", "by": "api"})), (&rerun, json!({"act": "rerun", "by": "api", "from": "a"}))]
    {
        let records = rig.get(&format!("/v1/streams/nq:flow:{run}?limit=2")).await;
        let second = &records.items()[1];
        assert_eq!((&second["kind"], &second["data"]), (&json!("act"), &data), "who requested it");
    }

    assert_eq!(rig.delete(&format!("/v1/runs/{run}")).await.body["deleted"], true);
    assert_eq!(rig.get(&format!("/v1/runs/{run}")).await.status, 404);
    for unknown in ["not-a-uuid", "00000000-0000-7000-8000-000000000000"] {
        for path in ["", "/steps", "/result"] {
            assert_eq!(rig.get(&format!("/v1/runs/{unknown}{path}")).await.status, 404);
        }
        assert_eq!(rig.post(&format!("/v1/runs/{unknown}/cancel"), json!({})).await.status, 404);
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn events_are_listed_in_the_order_of_their_first_emits() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, emits: [alpha, mid, zulu]}, g: {after: [a], steps: {b: {emits: [beta]}}}}")
        .await;
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    assert_eq!(rig.report(&task, json!({"op": "emit", "event": "zulu"})).await["outcome"], "applied");
    let emits = json!([{"event": "mid"}, {"event": "zulu"}, {"event": "alpha"}]);
    assert_eq!(rig.report(&task, json!({"op": "complete", "emits": emits})).await["outcome"], "applied");
    let task = rig.claim("w").await;
    rig.report(&task, json!({"op": "complete", "emits": [{"event": "beta"}]})).await;
    let info = rig.get(&format!("/v1/runs/{run}")).await;
    assert_eq!(info.body["emitted_events"], json!(["zulu", "mid", "alpha", "beta"]));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_child_names_the_step_that_started_it() {
    let rig = Rig::start().await;
    rig.flow("child", "steps: {a: {run: a}}").await;
    rig.flow("parent", "steps: {each: {spread: \"[1, 2]\", flow: child}}").await;
    let run = rig.run("parent", json!(1)).await;
    let task = rig.claim("w").await;
    let child = task["run_id"].as_str().unwrap();
    let info = rig.get(&format!("/v1/runs/{child}")).await;
    assert_eq!(info.body["parent"]["run_id"], json!(run));
    rig.claim("w").await;
    let listed = rig.get("/v1/runs?flow=child").await;
    let mut names: Vec<&str> =
        listed.items().iter().map(|child| child["parent"]["activation"].as_str().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["each[0]", "each[1]"]);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_run_that_was_continued_stands_where_the_last_of_its_chain_stands() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    let cancel = async |run: &str| rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    let result = async |run: &str| rig.get(&format!("/v1/runs/{run}/result")).await;
    let old = rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    assert_eq!(rig.report(&task, json!({"op": "continue", "input": 2})).await["outcome"], "applied");
    // Its successor may not exist yet; once it does, it is claimed.
    let going = result(&old).await;
    assert!(going.status == 202 && going.body["status"] != "completed", "{}", going.body);
    let task = rig.claim("w").await;
    let new = task["run_id"].as_str().unwrap();
    let going = result(&old).await;
    assert_eq!((going.status, &going.body["status"]), (202, &json!("running")), "{}", going.body);
    assert_eq!(going.body["run_id"], json!(new));

    let cancelled = cancel(&old).await;
    assert_eq!((cancelled.status, &cancelled.body["status"]), (200, &json!("cancelled")), "{}", cancelled.body);
    assert_eq!(cancelled.body["run_id"], json!(new));
    let ended = result(&old).await;
    assert_eq!((ended.status, &ended.body["status"]), (200, &json!("cancelled")), "{}", ended.body);
    assert_eq!(cancel(&old).await.code(), (409, "conflict"));
    assert_eq!(cancel(new).await.code(), (409, "conflict"));

    // Before the successor exists, its start is pending.
    let old = rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    assert_eq!(rig.report(&task, json!({"op": "continue"})).await["outcome"], "applied");
    let cancelled = cancel(&old).await;
    assert!(cancelled.status == 200 && cancelled.body["status"] != "completed", "{}", cancelled.body);
    let ended = rig.get(&format!("/v1/runs/{old}/result?wait=20s")).await;
    assert_eq!(ended.body["status"], "cancelled", "{}", ended.body);
    rig.server.stop().await;
}

#[tokio::test]
async fn deleting_a_run_says_what_stays_of_it() {
    let rig = Rig::start().await;
    rig.flow("leaf", "steps: {a: {set: 1}}").await;
    rig.flow("middle", "steps: {a: {flow: leaf}}").await;
    rig.flow("top", "steps: {w: {run: w}, a: {after: [w], flow: middle}}").await;
    let top = rig.run("top", json!(1)).await;
    let task = rig.claim("w").await;
    for n in 0..2 {
        assert_eq!(rig.report(&task, json!({"op": "publish", "name": "e", "payload": n})).await["outcome"], "applied");
    }
    assert_eq!(rig.report(&task, json!({"op": "complete"})).await["outcome"], "applied");
    assert_eq!(rig.get(&format!("/v1/runs/{top}/result?wait=20s")).await.body["status"], "completed");
    let again = rig.post(&format!("/v1/runs/{top}/rerun"), json!({"from": "a"})).await.text("run_id");
    assert_eq!(rig.get(&format!("/v1/runs/{again}/result?wait=20s")).await.body["status"], "completed");
    let of =
        async |flow: &str| rig.get(&format!("/v1/runs?flow={flow}")).await.items().last().unwrap()["run_id"].clone();
    let middle = of("middle").await.as_str().unwrap().to_owned();
    let deleted = async |run: &str| {
        let reply = rig.delete(&format!("/v1/runs/{run}")).await;
        assert_eq!((reply.status, &reply.body["run_id"], &reply.body["deleted"]), (200, &json!(run), &json!(true)));
        reply.body["stays"].clone()
    };
    let expected = json!({"events": 0, "children": 1, "referred_to_by": [top]});
    assert_eq!(deleted(&middle).await, expected, "a run in the middle of a tree");
    // The first tree has lost its middle, and the second is not below this run.
    assert_eq!(deleted(&top).await, json!({"events": 2, "children": 1, "referred_to_by": [again]}));
    assert_eq!(rig.get(&format!("/v1/events/{top}.1")).await.body["name"], "e", "what it published stays");
    assert_eq!(deleted(&again).await, json!({"events": 0, "children": 2, "referred_to_by": []}));
    rig.server.stop().await;
}
