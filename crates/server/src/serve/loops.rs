//! The background loops of the server, in addition to those of its engine.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;

use eddyline_engine::Engine;
use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Runs a loop. If it panics, or ends while the server is not stopping, the server is treated like one whose engine has
/// failed: it is not ready, and `serve` exits the process.
pub(super) fn spawn(
    name: &'static str,
    engine: &Engine,
    stopping: &watch::Receiver<bool>,
    run: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let (engine, stopping) = (engine.clone(), stopping.clone());
    tokio::spawn(async move {
        match AssertUnwindSafe(run).catch_unwind().await {
            Ok(()) if *stopping.borrow() => {}
            Ok(()) => engine.report_failure(&format!("the server's loop {name} has ended")),
            Err(panic) => engine.report_failure(&format!("the server's loop {name} panicked: {}", message(&*panic))),
        }
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::sync::Arc;

    use eddyline_engine::{Config, Health};
    use eddyline_store::Memory;

    use super::*;

    /// The engine's health after a loop has ended this way.
    async fn check(stops: bool, run: impl Future<Output = ()> + Send + 'static) -> Health {
        let engine = Engine::start(Arc::new(Memory::new()), Config::default());
        let (stop, stopping) = watch::channel(false);
        stop.send_replace(stops);
        spawn("test", &engine, &stopping, run).await.unwrap();
        engine.shutdown().await;
        engine.health()
    }

    #[tokio::test]
    async fn a_loop_that_ends_before_the_server_stops_is_a_failure() {
        assert_eq!(check(true, async {}).await, Health::Working);
        assert_eq!(check(false, async {}).await, Health::Failed("the server's loop test has ended".into()));
        let panicked = "the server's loop test panicked: on purpose";
        for stops in [true, false] {
            assert_eq!(check(stops, async { panic!("on purpose") }).await, Health::Failed(panicked.into()));
        }
    }
}
