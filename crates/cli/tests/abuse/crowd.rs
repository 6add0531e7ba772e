//! More connections than there is room for.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::bystander::undisturbed;

const CROWD: u64 = 5_000;
/// What the test needs besides.
const OTHERS: u64 = 200;
const MAX_CONNECTIONS: usize = 1_000;

/// How many connections this process may open, once it has asked for as many as it can get.
fn room() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // If it may not, it is what it is.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[tokio::test]
async fn thousands_of_connections_that_say_nothing() {
    let crowd = CROWD.min(room().saturating_sub(OTHERS)) as usize;
    assert!(crowd > 2 * MAX_CONNECTIONS, "there is room for {crowd} connections only: raise `ulimit -n`");
    undisturbed(&["--max-connections", &MAX_CONNECTIONS.to_string()], async |eddy| {
        let mut idle = Vec::with_capacity(crowd);
        for _ in 0..crowd {
            idle.push(TcpStream::connect(eddy.addr).await.unwrap());
        }
        // Whoever came too late knows at once; the others when their time is up.
        let mut ended = 0;
        for stream in &mut idle {
            let mut byte = [0];
            ended += usize::from(!matches!(stream.read(&mut byte).await, Ok(1..)));
        }
        assert_eq!(ended, crowd);
    })
    .await;
}
