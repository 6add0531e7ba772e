//! A worker over a WebSocket.

use std::time::Duration;

use eddyline_protocol::Span;
use eddyline_server::{KeysMode, ServeArgs, Size};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::client::{ADMIN_KEY, Client, DIAMOND, Rig, args, unreadable};

/// Longer than anything here takes; only reached if something hangs.
const LONG: Duration = Duration::from_secs(30);

pub struct Socket(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Socket {
    pub async fn open(client: &Client, hello: Value) -> Socket {
        let mut socket = Socket::raw(client).await;
        let mut said = json!({"type": "hello"});
        said.as_object_mut().unwrap().extend(hello.as_object().unwrap().clone());
        socket.say(said).await;
        let welcome = socket.next().await;
        assert_eq!(welcome["type"], "welcome");
        assert!(welcome["worker_id"].is_string() && welcome["heartbeat_ms"].is_u64(), "{welcome}");
        socket
    }

    async fn raw(client: &Client) -> Socket {
        Socket::try_raw(client).await.unwrap()
    }

    async fn try_raw(client: &Client) -> Result<Socket, tungstenite::Error> {
        let mut request = format!("ws://{}/v1/workers/connect", client.addr).into_client_request().unwrap();
        if let Some(key) = &client.key {
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        connect_async(request).await.map(|(socket, _)| Socket(socket))
    }

    pub async fn say(&mut self, message: Value) {
        self.0.send(Message::text(message.to_string())).await.unwrap();
    }

    pub async fn next(&mut self) -> Value {
        loop {
            match tokio::time::timeout(LONG, self.0.next()).await.expect("no message arrived") {
                Some(Ok(Message::Text(text))) => return serde_json::from_str(&text).unwrap(),
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Close(Some(frame)))) => {
                    return json!({"type": "closed", "code": u16::from(frame.code)});
                }
                Some(Ok(Message::Close(None))) | None => return json!({"type": "closed"}),
                other => panic!("{other:?}"),
            }
        }
    }

    /// The next message of a type; skips others.
    pub async fn until(&mut self, of: &str) -> Value {
        loop {
            let message = self.next().await;
            if message["type"] == of {
                return message;
            }
            assert_ne!(message["type"], "closed", "no {of} came");
        }
    }
}

fn done(task: &Value) -> Value {
    json!({"task_id": task["task_id"], "token": task["token"], "seq": 1, "op": "complete", "output": task["step"]})
}

#[tokio::test]
async fn a_worker_on_a_socket_runs_flows_to_their_end() {
    let dir = tempfile::tempdir().unwrap();
    let store = Some(dir.path().join("store").display().to_string());
    let rig = Rig::with(ServeArgs { store, ..args() }).await;
    rig.flow("diamond", DIAMOND).await;
    let mut socket = Socket::open(&rig, json!({"handlers": ["a", "b", "c", "d"], "host": "h", "pid": 5})).await;
    socket.say(json!({"type": "credit", "n": 2})).await;
    let mut runs = Vec::new();
    for n in 0..5 {
        runs.push(rig.run("diamond", json!(n)).await);
    }
    let (mut tasks, mut answered, mut id) = (0, 0, 0);
    while answered < 20 {
        let message = socket.next().await;
        match message["type"].as_str().unwrap() {
            "tasks" => {
                let pushed = message["tasks"].as_array().unwrap();
                tasks += pushed.len();
                assert!(tasks - answered <= 2, "more tasks than credits");
                for task in pushed {
                    id += 1;
                    socket.say(json!({"type": "report", "id": id, "reports": [done(task)], "credit": 1})).await;
                }
            }
            "reported" => {
                assert_eq!(message["outcomes"][0]["outcome"], "applied", "{message}");
                answered += 1;
            }
            other => panic!("{other}: {message}"),
        }
    }
    for run in runs {
        assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["output"], json!({"all": "d"}));
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn cancels_drains_and_signs_of_life_reach_the_worker() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    rig.flow("g", "steps: {a: {run: a}, b: {run: b, retry: {attempts: 1}}}\nfail_fast: true\n").await;
    let mut socket = Socket::open(&rig, json!({})).await;
    socket.say(json!({"type": "credit", "n": 1})).await;
    let run = rig.run("f", json!(1)).await;
    let task = socket.until("tasks").await["tasks"][0].clone();
    socket.say(json!({"type": "heartbeat", "tasks": [task["task_id"]], "completed": 3})).await;
    let beat = socket.until("beat").await;
    assert_eq!((&beat["lost"], &beat["cancel"], &beat["drain"]), (&json!([]), &json!([]), &json!(false)));
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    let beat = socket.until("beat").await;
    assert_eq!(beat["cancel"], json!([task["task_id"]]), "unasked");

    // A step that is cancelled while its run continues.
    socket.say(json!({"type": "credit", "n": 2})).await;
    let run = rig.run("f", json!(1)).await;
    let task = socket.until("tasks").await["tasks"][0].clone();
    rig.post(&format!("/v1/runs/{run}/steps/a/skip"), json!({})).await;
    assert_eq!(socket.until("beat").await["cancel"], json!([task["task_id"]]));

    let worker = rig.get("/v1/workers").await.items()[0]["worker_id"].as_str().unwrap().to_owned();
    rig.post(&format!("/v1/workers/{worker}/drain"), json!({})).await;
    assert_eq!(socket.until("beat").await["drain"], true);
    let run = rig.run("f", json!(2)).await;
    assert_eq!(rig.claim("another").await["run_id"], json!(run), "a draining worker gets no tasks");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_that_has_fallen_silent_is_given_nothing_that_another_could_have() {
    let lease = Duration::from_millis(1_500);
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(1_500)), ..args() }).await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let mut frozen = Socket::open(&rig, json!({})).await;
    frozen.say(json!({"type": "credit", "n": 5})).await;
    // Like a stopped process: the connection is open, but nobody reads, so nobody answers pings.
    tokio::time::sleep(lease * 6 / 5).await;
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("another").await;
    assert_eq!((&task["run_id"], &task["attempt"]), (&json!(run), &json!(1)), "no attempt was used up");
    rig.report(&task, json!({"op": "complete"})).await;
    // It wakes up, and its credits count again.
    frozen.say(json!({"type": "heartbeat", "tasks": []})).await;
    let run = rig.run("f", json!(2)).await;
    assert_eq!(frozen.until("tasks").await["tasks"][0]["run_id"], json!(run));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_that_says_it_drains_is_shown_so_and_is_online_until_then() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(300)), ..args() }).await;
    let mut socket = Socket::open(&rig, json!({"flows": ["job"], "queues": ["slow"]})).await;
    assert_eq!(rig.get("/v1/flows/job").await.body["definition"]["queue"], "slow", "the worker registered it");
    // It sends nothing, but answers pings for longer than a lease.
    let seen = async || {
        let workers = rig.get("/v1/workers").await;
        assert_eq!(workers.items()[0]["status"], "online");
        workers.items()[0]["seen_at"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap()
    };
    let first = seen().await;
    while seen().await.as_millisecond() - first.as_millisecond() < 1_200 {
        let _ = tokio::time::timeout(Duration::from_millis(20), socket.0.next()).await;
    }
    socket.say(json!({"type": "drain"})).await;
    socket.say(json!({"type": "heartbeat", "tasks": []})).await;
    assert_eq!(socket.until("beat").await["drain"], true);
    assert_eq!(rig.get("/v1/workers").await.items()[0]["status"], "draining");
    rig.server.stop().await;
}

#[tokio::test]
async fn news_of_a_code_run_is_told_once_on_a_socket() {
    let rig = Rig::start().await;
    let mut socket = Socket::open(&rig, json!({"flows": ["job"], "handlers": ["embed"]})).await;
    socket.say(json!({"type": "credit", "n": 2})).await;
    rig.run("job", json!(1)).await;
    let task = socket.until("tasks").await["tasks"][0].clone();
    let mut say = async |id: u32, op: Value| {
        let mut report = op;
        (report["task_id"], report["token"]) = (task["task_id"].clone(), task["token"].clone());
        socket.say(json!({"type": "report", "id": id, "reports": [report]})).await;
        let reported = socket.until("reported").await;
        assert_eq!(reported["outcomes"][0]["outcome"], "applied", "{reported}");
        reported["news"].clone()
    };
    assert_eq!(say(1, json!({"op": "step", "seq": 1, "name": "a", "output": 1})).await, json!({}));
    assert_eq!(say(2, json!({"op": "step", "seq": 2, "name": "b", "output": 2})).await, json!({}));
    assert_eq!(say(3, json!({"op": "call", "seq": 3, "name": "c", "handler": "embed"})).await, json!({}));
    let call = socket.until("tasks").await["tasks"][0].clone();
    assert_eq!(rig.report(&call, done(&call)).await["outcome"], "applied");
    let id = task["task_id"].as_str().unwrap();
    let beat = socket.until("beat").await;
    let names: Vec<&String> = beat["news"][id].as_object().unwrap().keys().collect();
    assert_eq!(names, ["c"], "sent unasked, without what the worker reported itself");
    socket.say(json!({"type": "heartbeat", "tasks": [id]})).await;
    assert_eq!(socket.until("beat").await["news"], json!({}), "it was already sent");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_report_that_cannot_be_read_does_not_end_the_connection() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {run: b}}").await;
    let mut socket = Socket::open(&rig, json!({})).await;
    for (id, unreadable) in unreadable().into_iter().enumerate() {
        socket.say(json!({"type": "credit", "n": 2})).await;
        rig.run("f", json!(1)).await;
        let mut tasks = Vec::new();
        while tasks.len() < 2 {
            tasks.extend(socket.until("tasks").await["tasks"].as_array().unwrap().clone());
        }
        let (task, token) = (&tasks[0]["task_id"], &tasks[0]["token"]);
        let bad = format!(r#"{{"task_id": {task}, "token": {token}, "op": "complete", "output": {unreadable}}}"#);
        let frame = format!(r#"{{"type": "report", "id": {id}, "reports": [{bad}, {}]}}"#, done(&tasks[1]));
        socket.0.send(Message::text(frame)).await.unwrap();
        let reported = socket.until("reported").await;
        assert_eq!((&reported["id"], &reported["outcomes"][0]["task_id"]), (&json!(id), task));
        assert_eq!(reported["outcomes"][0]["outcome"], "invalid", "{reported}");
        assert_eq!(reported["outcomes"][1]["outcome"], "applied", "{reported}");
        assert_eq!(rig.report(&tasks[0], done(&tasks[0])).await["outcome"], "applied", "it is still the worker's");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn what_is_lost_to_its_worker_is_told_as_that() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(60_000)), ..args() }).await;
    rig.flow("goes-on", "steps: {a: {timeout: 100ms, retry: {attempts: 1}}, b: {await: {manual: true}}}").await;
    rig.flow("ends", "steps: {a: {timeout: 100ms, retry: {attempts: 1}}}").await;
    let mut socket = Socket::open(&rig, json!({})).await;
    for flow in ["goes-on", "ends"] {
        socket.say(json!({"type": "credit", "n": 1})).await;
        rig.run(flow, json!(1)).await;
        let task = socket.until("tasks").await["tasks"][0].clone();
        let beat = socket.until("beat").await;
        assert_eq!((&beat["lost"], &beat["cancel"]), (&json!([task["task_id"]]), &json!([])), "{flow}");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn what_never_arrived_is_offered_again_without_costing_an_attempt() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let me = json!({"instance": "i", "host": "h", "pid": 9});
    let mut socket = Socket::open(&rig, me.clone()).await;
    socket.say(json!({"type": "credit", "n": 2})).await;
    rig.run("f", json!(1)).await;
    rig.run("f", json!(2)).await;
    let mut held = Vec::new();
    while held.len() < 2 {
        held.extend(socket.until("tasks").await["tasks"].as_array().unwrap().clone());
    }
    socket.0.close(None).await.unwrap();
    assert_eq!(socket.next().await["type"], "closed");
    // It says that it only has the first one.
    let mut hello = me;
    hello["tasks"] = json!([held[0]["task_id"]]);
    let mut socket = Socket::open(&rig, hello).await;
    socket.say(json!({"type": "credit", "n": 5})).await;
    let again = socket.until("tasks").await["tasks"].as_array().unwrap().clone();
    assert_eq!(again.len(), 1);
    assert_eq!((&again[0]["run_id"], &again[0]["attempt"]), (&held[1]["run_id"], &json!(1)));
    socket.say(json!({"type": "report", "id": 1, "reports": [done(&held[0])]})).await;
    assert_eq!(socket.until("reported").await["outcomes"][0]["outcome"], "applied");
    rig.server.stop().await;
}

#[tokio::test]
async fn two_workers_of_one_host_and_pid_do_not_take_each_others_tasks() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    // Like two containers made from one image.
    let container = |instance: &str| json!({"host": "web", "pid": 1, "instance": instance});
    let mut first = Socket::open(&rig, container("one")).await;
    first.say(json!({"type": "credit", "n": 1})).await;
    let run = rig.run("f", json!(1)).await;
    let task = first.until("tasks").await["tasks"][0].clone();
    first.0.close(None).await.unwrap();
    assert_eq!(first.next().await["type"], "closed");
    // A worker other than the one it was pushed to does not affect it by connecting.
    for other in [container("two"), json!({"host": "web", "pid": 1})] {
        let mut other = Socket::open(&rig, other).await;
        other.say(json!({"type": "heartbeat", "tasks": [task["task_id"]]})).await;
        assert_eq!(other.until("beat").await["lost"], json!([task["task_id"]]));
    }
    let records = rig.get(&format!("/v1/streams/nq:flow:{run}")).await;
    let last = records.items().last().unwrap();
    assert_eq!(last["kind"], "step.attempt.started", "it was not released: {}", records.body);

    let mut hello = container("one");
    hello["tasks"] = json!([task["task_id"]]);
    let mut first = Socket::open(&rig, hello).await;
    first.say(json!({"type": "heartbeat", "tasks": [task["task_id"]]})).await;
    let beat = first.until("beat").await;
    assert_eq!((&beat["lost"], &beat["cancel"]), (&json!([]), &json!([])), "it is the same worker");
    first.say(json!({"type": "report", "id": 1, "reports": [done(&task)]})).await;
    assert_eq!(first.until("reported").await["outcomes"][0]["outcome"], "applied");
    rig.server.stop().await;
}

#[tokio::test]
async fn many_large_tasks_come_in_several_frames() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    for _ in 0..6 {
        rig.run("f", json!("x".repeat(1 << 20))).await;
    }
    let mut socket = Socket::open(&rig, json!({})).await;
    socket.say(json!({"type": "credit", "n": 6})).await;
    let (mut tasks, mut frames) = (0, 0);
    while tasks < 6 {
        let pushed = socket.until("tasks").await;
        assert!(pushed.to_string().len() < 5 << 20);
        tasks += pushed["tasks"].as_array().unwrap().len();
        frames += 1;
    }
    assert!(frames > 1, "12 MiB came in one frame");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_socket_that_says_nonsense_is_told_and_closed() {
    let rig = Rig::start().await;
    for nonsense in ["{}", "no json", "{\"type\": \"credit\", \"n\": 1}"] {
        let mut socket = Socket::raw(&rig).await;
        socket.0.send(Message::text(nonsense)).await.unwrap();
        let error = socket.next().await;
        assert_eq!((&error["type"], &error["error"]["code"]), (&json!("error"), &json!("bad_request")), "{nonsense}");
        assert_eq!(socket.next().await["type"], "closed");
    }
    assert_eq!(rig.get("/v1/workers/connect").await.code(), (400, "bad_request"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_silent_worker_is_cut_off_and_a_stopping_server_says_so() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(200)), ..args() }).await;
    let mut silent = Socket::open(&rig, json!({})).await;
    // Not read from, so that no ping is answered.
    let cut = async {
        let mut parts = SocketParts::of(&mut silent);
        let SocketParts(stream) = &mut parts;
        let mut buffer = [0; 4_096];
        loop {
            use tokio::io::AsyncReadExt;
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    };
    tokio::time::timeout(LONG, cut).await.expect("it is cut off");
    let mut socket = Socket::open(&rig, json!({})).await;
    let stopping = tokio::spawn(rig.server.stop());
    let error = socket.until("error").await;
    assert_eq!(error["error"]["code"], "unavailable");
    drop(socket);
    stopping.await.unwrap();
}

/// The bytes under a socket.
struct SocketParts<'a>(&'a mut TcpStream);

impl SocketParts<'_> {
    fn of(socket: &mut Socket) -> SocketParts<'_> {
        match socket.0.get_mut() {
            MaybeTlsStream::Plain(stream) => SocketParts(stream),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn one_namespace_gets_half_of_the_sockets() {
    let admin_key = Some(ADMIN_KEY.to_owned());
    let settings = ServeArgs { max_connections: Some(16), keys: Some(KeysMode::On), admin_key, ..args() };
    let mut rig = Rig::with(settings).await;
    rig.client.key = Some(ADMIN_KEY.to_owned());
    let made = rig.post("/v1/keys", json!({"name": "t", "scopes": ["admin"], "namespace": "one"})).await;
    let one = rig.with_key(&made.text("key"));
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(Socket::open(&one, json!({})).await);
    }
    match Socket::try_raw(&one).await.map(|_| ()) {
        Err(tungstenite::Error::Http(response)) => assert_eq!(response.status(), 429),
        other => panic!("{other:?}"),
    }
    // Without an upgrade, the same response can be read.
    let refused = one.get("/v1/workers/connect").await;
    assert!(refused.body.to_string().contains("used its whole share of 8 sockets"), "{}", refused.body);
    Socket::open(&rig, json!({})).await;
    drop(open);
    let again = async { while Socket::try_raw(&one).await.is_err() {} };
    tokio::time::timeout(LONG, again).await.expect("the sockets are closed");
    rig.server.stop().await;
}

/// A request that declares a body of this size and sends none of it: the bytes stay reserved until it times out.
async fn reserve_bodies(client: &Client, bytes: usize) -> TcpStream {
    let mut stream = TcpStream::connect(client.addr).await.unwrap();
    let head = format!(
        "POST /v1/events HTTP/1.1\r\nhost: {}\r\ncontent-length: {bytes}\r\nexpect: 100-continue\r\n\r\n",
        client.addr
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server asks for the body once it starts to read it, which is after the bytes were reserved.
    let mut said = [0; 12];
    stream.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"HTTP/1.1 100");
    stream
}

#[tokio::test]
async fn the_values_of_a_complete_message_count_against_the_body_memory() {
    // A namespace can use a quarter of it: 1 MiB.
    let rig = Rig::with(ServeArgs { body_memory: Some(Size { bytes: 4 << 20 }), ..args() }).await;
    let report = |id: u32, values: usize| {
        let output = vec![0; values];
        json!({"type": "report", "id": id, "reports": [{"task_id": "none", "op": "complete", "output": output}]})
    };
    let mut socket = Socket::open(&rig, json!({})).await;
    socket.say(report(1, 7_000)).await;
    assert_eq!(socket.until("reported").await["id"], 1);
    // Others hold almost everything: a message that is small as text and large as values must wait.
    let others = reserve_bodies(&rig, 1 << 20).await;
    socket.say(report(2, 7_000)).await;
    let waited = tokio::time::timeout(Duration::from_millis(500), socket.until("reported")).await;
    assert!(waited.is_err(), "it was handled at once: {waited:?}");
    drop(others);
    assert_eq!(socket.until("reported").await["id"], 2);
    // A message that is small both ways does not wait, and the other one does not wait for long.
    let _others = reserve_bodies(&rig, 1 << 20).await;
    socket.say(report(3, 10)).await;
    assert_eq!(socket.until("reported").await["id"], 3);
    socket.say(report(4, 7_000)).await;
    assert_eq!(socket.until("error").await["error"]["code"], "unavailable");
    assert_eq!(socket.next().await["type"], "closed");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_whose_socket_closes_is_offline_at_once_and_online_when_it_comes_back() {
    // With this lease no worker goes offline by silence alone while the test runs.
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(600_000)), ..args() }).await;
    let hello = || json!({"queues": ["q"], "instance": "one"});
    let listed = async |status: &str| rig.get(&format!("/v1/workers?status={status}")).await.items().len();
    let first = Socket::open(&rig, hello()).await;
    assert_eq!((listed("online").await, listed("offline").await), (1, 0));
    // It may reconnect before the end of its first connection is noticed: it is still online.
    let second = Socket::open(&rig, hello()).await;
    drop(first);
    let mut third = Socket::open(&rig, json!({"queues": ["q"], "instance": "two"})).await;
    assert_eq!((listed("online").await, listed("offline").await), (2, 0));
    drop(second);
    let deadline = std::time::Instant::now() + LONG;
    while listed("offline").await == 0 {
        assert!(std::time::Instant::now() < deadline, "it is shown as online");
    }
    assert_eq!(listed("online").await, 1);
    let _back = Socket::open(&rig, hello()).await;
    assert_eq!((listed("online").await, listed("offline").await), (2, 0));
    third.say(json!({"type": "heartbeat", "tasks": []})).await;
    third.until("beat").await;
    rig.server.stop().await;
}

#[tokio::test]
async fn a_socket_with_credits_for_more_gets_no_more_than_max_concurrent() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    for n in 0..4 {
        rig.run("f", json!(n)).await;
    }
    let mut socket = Socket::open(&rig, json!({"max_concurrent": 2})).await;
    socket.say(json!({"type": "credit", "n": 10})).await;
    let tasks = socket.until("tasks").await["tasks"].as_array().unwrap().clone();
    assert_eq!(tasks.len(), 2);
    assert_eq!(rig.get("/v1/workers").await.items()[0]["tasks"], 2);
    assert_eq!(rig.claim("another").await["step"], "a", "other workers get the rest");
    socket.say(json!({"type": "report", "id": 1, "reports": [done(&tasks[0])]})).await;
    assert_eq!(socket.until("tasks").await["tasks"].as_array().unwrap().len(), 1);
    assert_eq!(rig.get("/v1/workers").await.items()[0]["tasks"], 2);
    rig.server.stop().await;
}
