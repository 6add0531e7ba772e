//! A line to the server that breaks: requests arrive, and their replies are lost, or come half.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// What becomes of a piece of what is said. A cut ends the connection, on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Passed,
    /// It is lost as a whole.
    Lost,
    /// The first half arrives.
    Halved,
}

pub struct Proxy {
    pub addr: SocketAddr,
    about: Arc<About>,
    accepting: JoinHandle<()>,
}

struct About {
    chance: Mutex<Chance>,
    calm: AtomicBool,
    lost: AtomicUsize,
}

impl Proxy {
    /// Its decisions follow from the seed alone; what they fall on is a matter of timing.
    pub async fn start(server: SocketAddr, seed: u64) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (calm, lost) = (AtomicBool::new(false), AtomicUsize::new(0));
        let about = Arc::new(About { chance: Mutex::new(Chance(seed)), calm, lost });
        let accepting = tokio::spawn(accept(listener, server, about.clone()));
        Proxy { addr, about, accepting }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// How many pieces were lost, whole or in part.
    pub fn lost(&self) -> usize {
        self.about.lost.load(Ordering::Relaxed)
    }

    /// From now on everything arrives.
    pub fn calm_down(&self) {
        self.about.calm.store(true, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl About {
    /// Replies are lost far more often than requests: only then has something happened that the other does not know of.
    fn fate(&self, way: Way) -> Fate {
        if self.calm.load(Ordering::Relaxed) {
            return Fate::Passed;
        }
        let roll = self.chance.lock().unwrap().next() % 32;
        let fate = match (way, roll) {
            (Way::Back, 0..=3) => Fate::Lost,
            (Way::Back, 4) | (Way::There, 0) => Fate::Halved,
            _ => Fate::Passed,
        };
        self.lost.fetch_add(usize::from(fate != Fate::Passed), Ordering::Relaxed);
        fate
    }
}

#[derive(Debug, Clone, Copy)]
enum Way {
    There,
    Back,
}

async fn accept(listener: TcpListener, server: SocketAddr, about: Arc<About>) {
    // Connections end with the task that accepts.
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let about = about.clone();
        connections.spawn(async move {
            let Ok(server) = TcpStream::connect(server).await else { return };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            // Whichever ends first ends both.
            tokio::select! {
                () = carry(from_client, to_server, Way::There, &about) => {}
                () = carry(from_server, to_client, Way::Back, &about) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, way: Way, about: &About) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(read) = from.read(&mut piece).await {
        let (passed, goes_on) = match about.fate(way) {
            _ if read == 0 => return,
            Fate::Passed => (read, true),
            Fate::Halved => (read / 2, false),
            Fate::Lost => (0, false),
        };
        if to.write_all(&piece[..passed]).await.is_err() || !goes_on {
            return;
        }
    }
}

/// Numbers that look like chance and are the same each time (xorshift).
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
