//! Malicious or broken worker sockets.

use std::time::Duration;

use eddyline::{StepCtx, StepError, Worker};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::bystander::{memory, undisturbed};
use crate::eddy::{Eddy, LONG, metric};

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn open(eddy: &Eddy) -> Socket {
    connect_async(format!("ws://{}/v1/workers/connect", eddy.addr)).await.unwrap().0
}

/// Sends the messages, and checks that the server closes the connection.
async fn ends(mut socket: Socket, messages: impl IntoIterator<Item = Message>) {
    for message in messages {
        if socket.send(message).await.is_err() {
            break;
        }
    }
    let ending = async { while let Some(Ok(_)) = socket.next().await {} };
    tokio::time::timeout(LONG, ending).await.expect("the server does not close the connection");
}

#[tokio::test]
async fn messages_that_are_too_large_too_deep_or_nonsense() {
    undisturbed(&[], async |eddy| {
        let hello = || Message::text("{\"type\": \"hello\", \"queues\": [\"none\"]}");
        let deep =
            format!("{{\"type\": \"report\", \"id\": 1, \"reports\": [{}{}]}}", "[".repeat(10_000), "]".repeat(10_000));
        ends(open(eddy).await, [Message::text("x".repeat(20 << 20))]).await;
        ends(open(eddy).await, [hello(), Message::text("x".repeat(20 << 20))]).await;
        ends(open(eddy).await, [hello(), Message::text(deep)]).await;
        ends(open(eddy).await, [hello(), hello()]).await;
        ends(open(eddy).await, [hello(), Message::binary(vec![0xff; 1_000])]).await;
        ends(open(eddy).await, [Message::text("{\"type\": \"credit\", \"n\": 4294967295}")]).await;
    })
    .await;
}

/// A raw connection after the upgrade to a WebSocket.
async fn upgraded(eddy: &Eddy) -> TcpStream {
    upgrade(eddy, TcpStream::connect(eddy.addr).await.unwrap()).await
}

async fn upgrade(eddy: &Eddy, mut stream: TcpStream) -> TcpStream {
    let request = format!(
        "GET /v1/workers/connect HTTP/1.1\r\nhost: {}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        eddy.addr
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101"));
    stream
}

#[tokio::test]
async fn frames_that_are_none() {
    undisturbed(&[], async |eddy| {
        let frames: Vec<Vec<u8>> = vec![
            // Not masked; an unknown opcode; reserved bits; a ping that is too long.
            b"\x81\x02hi".to_vec(),
            b"\x8b\x80\0\0\0\0".to_vec(),
            b"\xf1\x80\0\0\0\0".to_vec(),
            [b"\x89\xfe\x03\xe8\0\0\0\0".to_vec(), vec![0; 1_000]].concat(),
            // The greatest length without a payload; a continuation without a first frame.
            b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0".to_vec(),
            b"\x80\x81\0\0\0\0x".to_vec(),
            // Invalid UTF-8.
            b"\x81\x82\0\0\0\0\xff\xfe".to_vec(),
        ];
        for frame in frames {
            let mut stream = upgraded(eddy).await;
            stream.write_all(&frame).await.unwrap();
            let mut rest = Vec::new();
            let ending = tokio::time::timeout(LONG, stream.read_to_end(&mut rest)).await;
            assert!(ending.is_ok(), "the server does not close after {frame:?}");
        }
        // Fragments of one message that exceeds the limit.
        let mut stream = upgraded(eddy).await;
        let piece = [b"\x00\xff\0\0\0\0\0\x10\0\0\0\0\0\0".to_vec(), vec![b'x'; 1 << 20]].concat();
        let mut first = piece.clone();
        first[0] = 0x01;
        let mut sent = stream.write_all(&first).await;
        for _ in 0..40 {
            if sent.is_err() {
                break;
            }
            sent = stream.write_all(&piece).await;
        }
        assert!(sent.is_err(), "the server took 40 MB of one message");
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_never_reads_loses_what_it_was_sent_to_one_that_does() {
    undisturbed(&["--lease", "5s"], async |eddy| {
        let client = eddy.client();
        client.register_flow("heavy", "{steps: {a: {run: weigh, queue: heavy}}}").await.unwrap();
        let mut runs = Vec::new();
        for _ in 0..20 {
            runs.push(client.start("heavy", &json!("x".repeat(1_000_000))).await.unwrap());
        }
        // It asks for more than the socket buffers hold, and reads nothing.
        let mut socket = open(eddy).await;
        socket.send(Message::text("{\"type\": \"hello\", \"queues\": [\"heavy\"]}")).await.unwrap();
        socket.send(Message::text("{\"type\": \"credit\", \"n\": 1000}")).await.unwrap();
        // The first task was sent, so the rest waits behind it.
        while runs[0].info().await.unwrap().status == "pending" {}
        let weigh = async |_: StepCtx, what: Value| Ok::<_, StepError>(what.as_str().map(str::len));
        let worker = Worker::connect(eddy.url()).queue("heavy").handler("weigh", weigh);
        let worker = tokio::spawn(worker.run_until(std::future::pending::<()>()));
        for run in runs {
            // The server believes that the first few were delivered; they are offered again when their lease expires.
            let ended = run.wait(Duration::from_secs(60)).await.unwrap().expect("it ends");
            assert_eq!(ended.status, "completed");
        }
        worker.abort();
    })
    .await;
}

/// Sockets that read nothing, and the credit of each.
const DEAF: usize = 60;
const CREDITS: usize = 40;
/// How much the memory of the server may grow.
const FLAT_KB: u64 = 150 << 10;

/// A text frame of a client, with a mask of zeros.
fn frame(text: &str) -> Vec<u8> {
    [&[0x81, 0x80 | u8::try_from(text.len()).unwrap(), 0, 0, 0, 0], text.as_bytes()].concat()
}

#[tokio::test]
async fn sixty_sockets_that_do_not_read_what_they_asked_for() {
    undisturbed(&[], async |eddy| {
        let client = eddy.client();
        // Every task carries the input of its run, 1 MB.
        let flow = "{steps: {each: {spread: input.items, max_parallel: 5000, run: weigh, queue: heavy}}}";
        client.register_flow("heavy", flow).await.unwrap();
        let items: Vec<usize> = (0..DEAF * CREDITS).collect();
        client.start("heavy", &json!({"text": "x".repeat(1_000_000), "items": items})).await.unwrap();
        let before = memory(eddy, "VmHWM");
        let mut sockets = Vec::new();
        for _ in 0..DEAF {
            // A small receive buffer, so that little is buffered on the way.
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_recv_buffer_size(4 << 10).unwrap();
            let mut stream = upgrade(eddy, socket.connect(eddy.addr).await.unwrap()).await;
            stream.write_all(&frame("{\"type\": \"hello\", \"queues\": [\"heavy\"]}")).await.unwrap();
            stream.write_all(&frame(&format!("{{\"type\": \"credit\", \"n\": {CREDITS}}}"))).await.unwrap();
            sockets.push(stream);
        }
        let all = (DEAF + 1) as f64;
        let connected = async { while metric(eddy, "eddyline_sockets").await < all {} };
        tokio::time::timeout(LONG, connected).await.expect("not all of them are connected");
        // The first socket is closed after ten seconds; by then everything that could be written was written.
        let cut = async { while metric(eddy, "eddyline_sockets").await >= all {} };
        tokio::time::timeout(LONG, cut).await.expect("no socket is closed");
        let grown = memory(eddy, "VmHWM") - before;
        assert!(grown < FLAT_KB, "{DEAF} sockets took {} MiB", grown >> 10);
        drop(sockets);
    })
    .await;
}

/// The head of a frame of 15 MiB, and the first `sent` bytes of its payload.
fn unfinished_frame(sent: usize) -> Vec<u8> {
    [b"\x81\xff\0\0\0\0\0\xf0\0\0\0\0\0\0".to_vec(), vec![b'x'; sent]].concat()
}

#[tokio::test]
async fn sockets_that_send_the_first_part_of_large_messages() {
    undisturbed(&["--body-memory", "64MiB"], async |eddy| {
        let before = memory(eddy, "VmHWM");
        let frame = unfinished_frame(14 << 20);
        let send = async || {
            let mut stream = upgraded(eddy).await;
            // The rest never follows; sockets without room in the budget are closed.
            let _ = stream.write_all(&frame).await;
            stream
        };
        let open = tokio::time::timeout(LONG, futures_util::future::join_all((0..30).map(|_| send()))).await;
        let open = open.expect("the server neither reads nor closes");
        let grown = memory(eddy, "VmHWM") - before;
        assert!(grown < FLAT_KB, "{} sockets took {} MiB", open.len(), grown >> 10);
    })
    .await;
}
