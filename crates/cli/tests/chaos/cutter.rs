//! A proxy between an instance and its database that understands enough of PostgreSQL's protocol to cut a connection at
//! a commit: before the server gets it, or after it was made and before the response arrives.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::unix::{OwnedReadHalf as FromServer, OwnedWriteHalf as ToServer};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::proxy::Chance;

/// One commit in this many is cut while the proxy cuts.
const ONE_IN: u64 = 4;

/// Substrings of the statements that commit or claim.
const WRITES: [&[u8]; 2] = [b"eddyline.commit", b"eddyline.claim"];

/// Message types of clients.
const QUERY: u8 = b'Q';
const PARSE: u8 = b'P';
const BIND: u8 = b'B';
const SYNC: u8 = b'S';
/// The message of the server that ends a response.
const READY: u8 = b'Z';

pub struct Cutter {
    pub addr: SocketAddr,
    about: Arc<About>,
    accepting: JoinHandle<()>,
}

struct About {
    socket: PathBuf,
    cuts: AtomicBool,
    chance: Mutex<Chance>,
    before: AtomicUsize,
    after: AtomicUsize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Passed,
    CutBefore,
    CutAfter,
}

impl Cutter {
    pub async fn start(socket: PathBuf, seed: u64) -> Cutter {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (cuts, chance) = (AtomicBool::new(false), Mutex::new(Chance(seed)));
        let about = About { socket, cuts, chance, before: AtomicUsize::new(0), after: AtomicUsize::new(0) };
        let about = Arc::new(about);
        let accepting = tokio::spawn(accept(listener, about.clone()));
        Cutter { addr, about, accepting }
    }

    pub fn url(&self) -> String {
        format!("postgres://eddy@{}/postgres?sslmode=disable&pool_size=8", self.addr)
    }

    pub fn cut(&self, cuts: bool) {
        self.about.cuts.store(cuts, Ordering::Relaxed);
    }

    /// How many commits were cut before they arrived, and after they were made.
    pub fn counts(&self) -> (usize, usize) {
        (self.about.before.load(Ordering::Relaxed), self.about.after.load(Ordering::Relaxed))
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl About {
    fn fate(&self) -> Fate {
        if !self.cuts.load(Ordering::Relaxed) {
            return Fate::Passed;
        }
        let roll = self.chance.lock().unwrap().next();
        match (roll % ONE_IN, roll / ONE_IN % 2) {
            (0, 0) => {
                self.before.fetch_add(1, Ordering::Relaxed);
                Fate::CutBefore
            }
            (0, _) => {
                self.after.fetch_add(1, Ordering::Relaxed);
                Fate::CutAfter
            }
            _ => Fate::Passed,
        }
    }
}

async fn accept(listener: TcpListener, about: Arc<About>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let about = about.clone();
        connections.spawn(async move {
            // If the database does not accept connections, neither does the proxy.
            let Ok(server) = UnixStream::connect(&about.socket).await else { return };
            carry(client, server, &about).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(client: TcpStream, server: UnixStream, about: &About) {
    let _ = client.set_nodelay(true);
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, to_server) = server.into_split();
    // The response to the first message, which has no type, ends like all others.
    let (asked, mut answered, mut messages) = (AtomicUsize::new(1), 0, Messages::default());
    let answer_is_lost = {
        let there = orders(from_client, to_server, about, &asked);
        let back = answers(&mut messages, &mut from_server, &mut to_client, &mut answered);
        tokio::select! {
            cut_after = there => cut_after,
            () = back => false,
        }
    };
    // Read until the server is ready for the next query, so that the commit has completed, and drop its response.
    while answer_is_lost && answered < asked.load(Ordering::Relaxed) {
        let Some(message) = messages.next(&mut from_server).await else { return };
        answered += usize::from(message[0] == READY);
    }
}

async fn answers(messages: &mut Messages, from: &mut FromServer, to: &mut OwnedWriteHalf, answered: &mut usize) {
    while let Some(message) = messages.next(from).await {
        *answered += usize::from(message[0] == READY);
        if to.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// Passes on what the client sends. True if the connection is to be cut once the last message has taken effect.
async fn orders(mut from: OwnedReadHalf, mut to: ToServer, about: &About, asked: &AtomicUsize) -> bool {
    // The first message has no type.
    let Some(hello) = untyped(&mut from).await else { return false };
    if to.write_all(&hello).await.is_err() {
        return false;
    }
    let (mut messages, mut commits, mut pending) = (Messages::default(), HashSet::new(), false);
    let mut in_transaction = false;
    while let Some(message) = messages.next(&mut from).await {
        let body = &message[5..];
        let at_commit = match message[0] {
            PARSE => {
                let (name, rest) = text(body);
                let sql = text(rest).0;
                if WRITES.iter().any(|write| sql.windows(write.len()).any(|at| at == *write)) {
                    commits.insert(name.to_vec());
                }
                false
            }
            BIND => {
                pending |= commits.contains(text(text(body).1).0);
                false
            }
            // Outside of a transaction, the end of the statement is the commit.
            SYNC => std::mem::take(&mut pending) && !in_transaction,
            QUERY => {
                let query = text(body).0;
                in_transaction = match query {
                    b"BEGIN" => true,
                    b"COMMIT" | b"ROLLBACK" => false,
                    _ => in_transaction,
                };
                query == b"COMMIT"
            }
            _ => false,
        };
        match if at_commit { about.fate() } else { Fate::Passed } {
            Fate::Passed => {}
            Fate::CutBefore => return false,
            Fate::CutAfter => {
                asked.fetch_add(1, Ordering::Relaxed);
                return to.write_all(&message).await.is_ok();
            }
        }
        asked.fetch_add(usize::from(matches!(message[0], SYNC | QUERY)), Ordering::Relaxed);
        if to.write_all(&message).await.is_err() {
            return false;
        }
    }
    false
}

/// Text up to a zero, and what follows it.
fn text(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    (&bytes[..end], bytes.get(end + 1..).unwrap_or_default())
}

async fn untyped(from: &mut OwnedReadHalf) -> Option<Vec<u8>> {
    let mut message = vec![0; 4];
    from.read_exact(&mut message).await.ok()?;
    let length = u32::from_be_bytes(message[..4].try_into().ok()?) as usize;
    message.resize(length, 0);
    from.read_exact(&mut message[4..]).await.ok()?;
    Some(message)
}

/// Whole messages out of a stream: a type, a length that includes itself, a body.
#[derive(Default)]
struct Messages {
    read: Vec<u8>,
}

impl Messages {
    async fn next(&mut self, from: &mut (impl AsyncReadExt + Unpin)) -> Option<Vec<u8>> {
        loop {
            if let Some(length) = self.read.get(1..5) {
                let length = 1 + u32::from_be_bytes(length.try_into().ok()?) as usize;
                if self.read.len() >= length {
                    let rest = self.read.split_off(length);
                    return Some(std::mem::replace(&mut self.read, rest));
                }
            }
            if from.read_buf(&mut self.read).await.ok()? == 0 {
                return None;
            }
        }
    }
}
