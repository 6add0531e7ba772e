//! A proxy that breaks connections: requests arrive, but their replies are lost or cut in half.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// What happens to a piece of data. A lost or halved piece closes both connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Passed,
    /// All of it is lost.
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
    /// The seed determines the sequence of fates; which pieces they hit depends on timing.
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

    /// How many pieces were lost or halved.
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
    /// Loses replies far more often than requests: only then has the server acted without the client knowing.
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
            // When one direction ends, both connections are closed.
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
        let (passed, continues) = match about.fate(way) {
            _ if read == 0 => return,
            Fate::Passed => (read, true),
            Fate::Halved => (read / 2, false),
            Fate::Lost => (0, false),
        };
        if to.write_all(&piece[..passed]).await.is_err() || !continues {
            return;
        }
    }
}

/// Reproducible pseudo-random numbers (xorshift).
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
