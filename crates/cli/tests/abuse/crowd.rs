//! More connections than the server allows.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::bystander::undisturbed;

const CROWD: u64 = 5_000;
/// File descriptors for everything else in the test.
const OTHERS: u64 = 200;
const MAX_CONNECTIONS: usize = 1_000;

/// Raises the limit of file descriptors of this process, and returns it.
fn room() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // If that fails, the current limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[tokio::test]
async fn thousands_of_connections_that_say_nothing() {
    let crowd = CROWD.min(room().saturating_sub(OTHERS)) as usize;
    assert!(crowd > 2 * MAX_CONNECTIONS, "only {crowd} connections are possible: raise `ulimit -n`");
    undisturbed(&["--max-connections", &MAX_CONNECTIONS.to_string()], async |eddy| {
        let mut idle = Vec::with_capacity(crowd);
        for _ in 0..crowd {
            idle.push(TcpStream::connect(eddy.addr).await.unwrap());
        }
        // Connections over the limit are closed at once, the others after the header timeout.
        let mut ended = 0;
        for stream in &mut idle {
            let mut byte = [0];
            ended += usize::from(!matches!(stream.read(&mut byte).await, Ok(1..)));
        }
        assert_eq!(ended, crowd);
    })
    .await;
}
