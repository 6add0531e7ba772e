//! Watches from outside whether instances respond and are ready, as a load balancer does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

const EVERY: Duration = Duration::from_millis(100);
/// An instance that takes longer to answer counts as dead.
const TIMEOUT: Duration = Duration::from_millis(800);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Dead,
    /// It responds, but is not ready.
    Unready,
    Ready,
}

/// The state of each instance, kept up to date.
pub struct Health {
    pub states: Arc<Vec<(SocketAddr, watch::Sender<State>)>>,
    _asking: JoinSet<()>,
}

impl Health {
    pub fn of(addrs: impl IntoIterator<Item = SocketAddr>) -> Health {
        let states: Vec<_> = addrs.into_iter().map(|addr| (addr, watch::Sender::new(State::Ready))).collect();
        let states = Arc::new(states);
        let mut asking = JoinSet::new();
        for at in 0..states.len() {
            let states = states.clone();
            asking.spawn(async move {
                let (addr, state) = &states[at];
                loop {
                    let now = look(*addr).await;
                    state.send_if_modified(|state| std::mem::replace(state, now) != now);
                    tokio::time::sleep(EVERY).await;
                }
            });
        }
        Health { states, _asking: asking }
    }
}

pub async fn look(addr: SocketAddr) -> State {
    match get(addr, "/healthz", TIMEOUT).await {
        Some(200) => {}
        _ => return State::Dead,
    }
    match get(addr, "/readyz", TIMEOUT).await {
        Some(200) => State::Ready,
        _ => State::Unready,
    }
}

/// The status of the response to a GET, if there is one in time.
pub async fn get(addr: SocketAddr, path: &str, timeout: Duration) -> Option<u16> {
    let asking = async {
        let mut stream = TcpStream::connect(addr).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await.ok()?;
        response.split_whitespace().nth(1)?.parse().ok()
    };
    tokio::time::timeout(timeout, asking).await.ok()?
}
