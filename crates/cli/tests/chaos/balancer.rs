//! A load balancer between workers and instances: it sends each connection to the first instance on its list that is
//! ready, and cuts the connections of one that is dead.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::health::{Health, State};

type States = Arc<Vec<(SocketAddr, watch::Sender<State>)>>;

pub struct Balancer {
    addr: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Balancer {
    /// `first` is the instance that it prefers.
    pub async fn start(health: &Health, first: usize) -> Balancer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let accepting = tokio::spawn(accept(listener, health.states.clone(), first));
        Balancer { addr, accepting }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, states: States, first: usize) {
    let mut connections = JoinSet::new();
    while let Ok((mut client, _)) = listener.accept().await {
        let states = states.clone();
        connections.spawn(async move {
            let Some((addr, mut state)) = choose(&states, first) else { return };
            let Ok(mut server) = TcpStream::connect(addr).await else { return };
            let (_, _) = (client.set_nodelay(true), server.set_nodelay(true));
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                () = until_dead(&mut state) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn until_dead(state: &mut watch::Receiver<State>) {
    let _ = state.wait_for(|state| *state == State::Dead).await;
}

fn choose(states: &States, first: usize) -> Option<(SocketAddr, watch::Receiver<State>)> {
    let in_turn = || (0..states.len()).map(|at| &states[(first + at) % states.len()]);
    let of = |wanted: State| in_turn().find(|(_, state)| *state.borrow() == wanted);
    let (addr, state) = of(State::Ready).or_else(|| of(State::Unready))?;
    Some((*addr, state.subscribe()))
}
