//! The signal to shut down.

use tokio::sync::watch;

/// The receiver of the signal.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<bool>);

#[derive(Debug)]
pub(crate) struct Stop(watch::Sender<bool>);

pub(crate) fn channel() -> (Stop, Shutdown) {
    let (sender, receiver) = watch::channel(false);
    (Stop(sender), Shutdown(receiver))
}

impl Stop {
    pub fn now(&self) {
        self.0.send_replace(true);
    }
}

impl Shutdown {
    pub fn is_now(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns when the engine shuts down.
    pub async fn wait(&mut self) {
        while !*self.0.borrow_and_update() {
            if self.0.changed().await.is_err() {
                return;
            }
        }
    }
}
