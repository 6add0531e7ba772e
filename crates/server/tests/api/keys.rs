//! Authorisation: keys, scopes, namespaces, and pages of other sites.

use eddyline_protocol::Scope;
use eddyline_server::{Access, KeysMode, Route, ServeArgs, routes};
use hyper::Method;
use serde_json::{Value, json};

use crate::client::{Client, Rig, args};

async fn key(admin: &Client, scopes: Value, namespace: &str) -> (Client, String) {
    let made = admin.post("/v1/keys", json!({"name": "t", "scopes": scopes, "namespace": namespace})).await;
    assert_eq!(made.status, 201, "{}", made.body);
    (admin.with_key(&made.text("key")), made.text("key_id"))
}

/// A path of the route in which every parameter names something of the tenant `one`.
struct Things {
    run: String,
    worker: String,
    task: String,
    gate: String,
    token: String,
    key: String,
}

impl Things {
    async fn make(one: &Client, key: &str) -> Things {
        one.flow("theirs", "steps: {a: {run: a}, p: {await: {manual: true}}}").await;
        one.put("/v1/limits/theirs", json!({"concurrency": 1})).await;
        let run = one.run("theirs", json!(1)).await;
        let worker = one.post("/v1/workers", json!({})).await.text("worker_id");
        let task = one.claim(&worker).await["task_id"].as_str().unwrap().to_owned();
        let gate = one.get("/v1/gates").await.items()[0].clone();
        let text = |field: &str| gate[field].as_str().unwrap().to_owned();
        Things { run, worker, task, gate: text("gate_id"), token: text("token"), key: key.to_owned() }
    }

    fn path(&self, route: &Route) -> String {
        let id = match route.path {
            path if path.starts_with("/v1/workers") => &self.worker,
            path if path.starts_with("/v1/tasks") => &self.task,
            path if path.starts_with("/v1/keys") => &self.key,
            _ => &self.run,
        };
        let gate = if route.method == Method::DELETE { &self.gate } else { &self.token };
        route
            .path
            .replace("{id}", id)
            .replace("{gate}", gate)
            .replace("{token}", "unknown")
            .replace("{stream}", &format!("nq:flow:{}", self.run))
            .replace("{activation}", "a")
            .replace("{name}", "theirs")
    }
}

/// Names that another tenant may use as well: there they are new and its own.
fn is_shared_name(route: &Route) -> bool {
    route.path.starts_with("/v1/queues") || (route.method == Method::PUT && route.path.contains("{name}"))
}

#[tokio::test]
async fn every_route_asks_for_its_key_and_scope_and_hides_what_is_anothers() {
    let rig = Rig::with_keys().await;
    let (one, one_id) = key(&rig, json!(["admin"]), "one").await;
    let (two, _) = key(&rig, json!(["admin"]), "two").await;
    let things = Things::make(&one, &one_id).await;
    let nobody = Client { key: None, ..rig.client.clone() };
    let stranger = rig.with_key("eddy_0123456789abcdef_0123456789abcdef");
    let mut single = Vec::new();
    for scope in Scope::ALL {
        single.push((scope, key(&rig, json!([scope]), "two").await.0));
    }
    for route in routes() {
        let path = things.path(route);
        let send = async |client: &Client| client.send(route.method.clone(), &path, None, "".into()).await;
        if route.access == Access::Open {
            assert_ne!(send(&nobody).await.status, 401, "{path}");
            continue;
        }
        assert_eq!(send(&nobody).await.code(), (401, "unauthorized"), "{path}");
        assert_eq!(send(&stranger).await.code(), (401, "unauthorized"), "{path}");
        let needed = match route.access {
            Access::Needs(scope) => vec![scope],
            Access::Either(one, other) => vec![one, other],
            Access::Open | Access::Key => continue,
        };
        for (scope, client) in &single {
            let refused = send(client).await.status == 403;
            // Servers belong to no tenant: only an admin of `default` sees them.
            let allowed = (needed.contains(scope) || *scope == Scope::Admin) && path != "/v1/instances";
            assert_eq!(refused, !allowed, "{path} with {scope:?}");
        }
        if route.path.contains('{') && !is_shared_name(route) {
            assert_eq!(send(&two).await.code(), (404, "not_found"), "{} {path}", route.method);
        }
    }
    // Whatever was tried, the data of `one` is unchanged.
    assert_eq!(one.get(&format!("/v1/runs/{}", things.run)).await.body["status"], "running");
    assert_eq!(one.get("/v1/gates").await.items().len(), 1);
    assert_eq!(two.get("/v1/runs").await.items().len(), 0);
    assert_eq!(two.get("/v1/workers").await.items().iter().filter(|w| w["worker_id"] == things.worker).count(), 0);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_key_is_shown_once_bound_to_its_namespace_and_can_be_revoked() {
    let rig = Rig::with_keys().await;
    let (reader, id) = key(&rig, json!(["read"]), "default").await;
    assert_eq!(reader.get("/v1/runs").await.status, 200);
    assert_eq!(reader.header("eddyline-namespace", "other").get("/v1/runs").await.code(), (403, "forbidden"));
    let listed = rig.get("/v1/keys").await;
    assert!(listed.items().iter().any(|key| key["key_id"] == id));
    assert!(!listed.body.to_string().contains(reader.key.as_ref().unwrap()));
    assert_eq!(rig.delete(&format!("/v1/keys/{id}")).await.status, 200);
    assert_eq!(reader.get("/v1/runs").await.status, 401);
    assert_eq!(rig.delete(&format!("/v1/keys/{id}")).await.status, 404);

    let short = rig.post("/v1/keys", json!({"scopes": ["read"], "expires_in": 0})).await.text("key");
    assert_eq!(rig.with_key(&short).get("/v1/runs").await.status, 401);
    assert_eq!(rig.post("/v1/keys", json!({"scopes": []})).await.code(), (422, "invalid"));
    assert_eq!(rig.post("/v1/keys", json!({"scopes": ["all"]})).await.code(), (400, "bad_request"));

    let (tenant, _) = key(&rig, json!(["admin"]), "tenant").await;
    assert_eq!(tenant.post("/v1/keys", json!({"scopes": ["read"], "namespace": "default"})).await.status, 403);
    assert_eq!(tenant.post("/v1/namespaces", json!({"name": "mine"})).await.status, 403);
    assert_eq!(tenant.get("/v1/keys").await.items().len(), 1);
    assert_eq!(tenant.get("/v1/keys?namespace=default").await.status, 403);
    let theirs = rig.get("/v1/keys?namespace=tenant").await.items()[0]["key_id"].as_str().unwrap().to_owned();
    assert_eq!(rig.delete(&format!("/v1/keys/{theirs}")).await.status, 404);
    assert_eq!(rig.delete(&format!("/v1/keys/{theirs}?namespace=tenant")).await.status, 200);
    assert_eq!(tenant.get("/v1/keys").await.status, 401);
    assert_eq!(rig.post("/v1/namespaces", json!({"name": "made"})).await.status, 201);
    assert_eq!(rig.post("/v1/namespaces", json!({"name": "made"})).await.code(), (409, "conflict"));
    assert_eq!(rig.post("/v1/namespaces", json!({"name": "a b"})).await.code(), (422, "invalid"));
    assert!(rig.get("/v1/namespaces").await.items().iter().any(|ns| ns["name"] == "made"));
    rig.server.stop().await;
}

#[tokio::test]
async fn the_secret_of_a_gate_is_for_those_who_may_open_it() {
    let rig = Rig::with_keys().await;
    rig.flow("f", "steps: {p: {await: {manual: true}}, h: {await: {webhook: true}}}").await;
    rig.run("f", json!(1)).await;
    let (reader, _) = key(&rig, json!(["read"]), "default").await;
    let (signaller, _) = key(&rig, json!(["read", "signal"]), "default").await;
    let secrets = async |client: &Client| {
        let gates = client.get("/v1/gates").await;
        gates.items().iter().filter(|gate| gate["token"].is_string() || gate["url"].is_string()).count()
    };
    assert_eq!((secrets(&reader).await, secrets(&signaller).await), (0, 2));
    let gates = signaller.get("/v1/gates?reason=webhook").await;
    let token = gates.items()[0]["token"].as_str().unwrap();
    let nobody = Client { key: None, ..rig.client.clone() };
    assert_eq!(nobody.post(&format!("/hooks/{token}"), json!(1)).await.status, 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn without_keys_only_this_machine_may() {
    let rig = Rig::start().await;
    let status = async |headers: &[(&str, &str)]| {
        let client = headers.iter().fold(rig.client.clone(), |client, (name, value)| client.header(name, value));
        client.get("/v1/runs").await.status
    };
    let here = rig.addr.to_string();
    let port = rig.addr.port();
    assert_eq!(status(&[("host", "evil.example")]).await, 403);
    assert_eq!(status(&[("host", &format!("evil.example:{port}"))]).await, 403);
    assert_eq!(status(&[("host", &format!("localhost:{port}"))]).await, 200);
    assert_eq!(status(&[("host", &format!("[::1]:{port}"))]).await, 200);
    assert_eq!(status(&[("origin", "http://evil.example")]).await, 403);
    assert_eq!(status(&[("origin", "null")]).await, 403);
    assert_eq!(status(&[("origin", "http://127.0.0.1:1")]).await, 403);
    assert_eq!(status(&[("origin", &format!("http://{here}"))]).await, 200);
    assert_eq!(status(&[("sec-fetch-site", "cross-site")]).await, 403);
    assert_eq!(status(&[("sec-fetch-site", "same-origin")]).await, 200);
    assert_eq!(status(&[("eddyline-namespace", "../x")]).await, 400);
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let hidden = rig.header("host", "evil.example").post("/v1/flows/f/runs", json!({})).await;
    assert_eq!(hidden.status, 403);
    assert_eq!(rig.get("/v1/runs").await.items().len(), 0);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_server_that_others_could_reach_does_not_start_unprotected() {
    let open = |keys, behind_proxy| ServeArgs { listen: Some("0.0.0.0:0".into()), keys, behind_proxy, ..args() };
    let error = eddyline_server::start(&open(None, None)).await.unwrap_err().to_string();
    assert!(error.contains("--tls-cert"), "{error}");
    let error = eddyline_server::start(&open(Some(KeysMode::Off), Some(true))).await.unwrap_err().to_string();
    assert!(error.contains("--keys off"), "{error}");
    for store in ["redis://x", "ftp://x"] {
        let error = eddyline_server::start(&ServeArgs { store: Some(store.into()), ..args() }).await.unwrap_err();
        assert!(error.to_string().contains("memory:"), "{error}");
    }
}

#[tokio::test]
async fn whoever_may_not_open_gates_is_not_shown_what_opens_them() {
    let rig = Rig::with_keys().await;
    let (reader, _) = key(&rig, json!(["read"]), "default").await;
    let (signaller, _) = key(&rig, json!(["signal"]), "default").await;
    let ask = "{run: ask, input: {mail: \"open ${gates.ok.url} please\"}}";
    let flow = format!("steps: {{ask: {ask}, ok: {{await: {{webhook: true}}}}}}\noutput: \"${{steps.ask.output}}\"");
    rig.flow("f", &flow).await;
    let gates = async |client: &Client| client.get("/v1/gates").await;
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    let mail = task["input"]["mail"].as_str().unwrap().to_owned();
    rig.report(&task, json!({"op": "complete", "seq": 1, "output": [mail]})).await;
    let gate = gates(&signaller).await.items()[0].clone();
    let token = gate["token"].as_str().unwrap();
    assert!(mail.contains(gate["url"].as_str().unwrap()));
    let hidden = gates(&reader).await.items()[0].clone();
    assert!(hidden["token"].is_null() && hidden["url"].is_null(), "{hidden}");
    assert_eq!(rig.post(&format!("/hooks/{token}"), json!(1)).await.status, 200);
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["output"], json!([mail]));

    let other = rig.run("f", json!({"link": mail})).await;
    let paths = [
        format!("/v1/runs/{run}"),
        format!("/v1/runs/{run}/steps"),
        format!("/v1/runs/{run}/result"),
        format!("/v1/streams/nq:flow:{run}"),
        format!("/v1/runs/{other}"),
    ];
    for path in paths {
        let (whole, part) = (rig.get(&path).await.body.to_string(), reader.get(&path).await.body.to_string());
        assert!(whole.contains(token), "{path}: {whole}");
        assert!(!part.contains(token) && part.contains("/hooks/… please"), "{path}: {part}");
    }
    rig.server.stop().await;
}
