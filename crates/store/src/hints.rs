//! Hints about changes. They only speed up noticing a change: the state itself is read from the store.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use crate::query::Change;

/// How many hints are buffered for a listener before it gets [`Heard::Missed`].
const MOST: usize = 4_096;

/// An item that a listener receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// The changes of one commit.
    Changes(Arc<[Change]>),
    /// The listener was too slow: anything may have changed.
    Missed,
}

/// A subscription: receives every hint sent since it was created.
#[derive(Debug)]
pub struct Hints(Arc<Mutex<HintQueue>>);

/// The sending side: a store broadcasts its changes here.
#[derive(Debug, Default)]
pub struct Teller(Mutex<Vec<Weak<Mutex<HintQueue>>>>);

#[derive(Debug, Default)]
struct HintQueue {
    unheard: VecDeque<Arc<[Change]>>,
    missed: bool,
    closed: bool,
    listener: Option<Waker>,
}

impl Hints {
    /// The next item; none once the store is dropped.
    pub async fn next(&mut self) -> Option<Heard> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Heard>> {
        let mut inbox = lock(&self.0);
        if std::mem::take(&mut inbox.missed) {
            return Poll::Ready(Some(Heard::Missed));
        }
        if let Some(changes) = inbox.unheard.pop_front() {
            return Poll::Ready(Some(Heard::Changes(changes)));
        }
        if inbox.closed {
            return Poll::Ready(None);
        }
        match &mut inbox.listener {
            Some(listener) => listener.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Suppresses wake-ups until the next poll: for a listener that is about to commit itself and polls afterwards.
    pub fn hush(&mut self) {
        lock(&self.0).listener = None;
    }
}

impl Teller {
    pub fn listen(&self) -> Hints {
        let inbox = Arc::<Mutex<HintQueue>>::default();
        let mut listeners = lock(&self.0);
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(&inbox));
        Hints(inbox)
    }

    pub fn tell(&self, changes: Vec<Change>) {
        if changes.is_empty() {
            return;
        }
        let changes: Arc<[Change]> = changes.into();
        for inbox in lock(&self.0).iter().filter_map(Weak::upgrade) {
            let mut inbox = lock(&inbox);
            if inbox.unheard.len() >= MOST {
                inbox.unheard.clear();
                inbox.missed = true;
            }
            inbox.unheard.push_back(changes.clone());
            let listener = inbox.listener.take();
            drop(inbox);
            listener.into_iter().for_each(Waker::wake);
        }
    }
}

impl Teller {
    /// Something was changed and it is not known what.
    pub fn tell_missed(&self) {
        for inbox in lock(&self.0).iter().filter_map(Weak::upgrade) {
            let mut inbox = lock(&inbox);
            inbox.missed = true;
            let listener = inbox.listener.take();
            drop(inbox);
            listener.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        for inbox in lock(&self.0).drain(..).filter_map(|inbox| inbox.upgrade()) {
            let mut inbox = lock(&inbox);
            inbox.closed = true;
            let listener = inbox.listener.take();
            drop(inbox);
            listener.into_iter().for_each(Waker::wake);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn everybody_hears_everything_in_order_and_then_the_end() {
        let (teller, woken) = (Teller::default(), Arc::new(Woken::default()));
        let (mut early, waker) = (teller.listen(), Waker::from(woken.clone()));
        let mut cx = Context::from_waker(&waker);
        assert!(early.poll_next(&mut cx).is_pending());
        teller.tell(vec![Change::Timers]);
        let mut late = teller.listen();
        teller.tell(vec![Change::Leases, Change::Messages]);
        teller.tell(Vec::new());
        assert_eq!(woken.0.load(Ordering::Relaxed), 1, "a listener is woken once between two polls");
        let heard = |changes: &[Change]| Poll::Ready(Some(Heard::Changes(changes.into())));
        assert_eq!(early.poll_next(&mut cx), heard(&[Change::Timers]));
        for hints in [&mut early, &mut late] {
            assert_eq!(hints.poll_next(&mut cx), heard(&[Change::Leases, Change::Messages]));
            assert!(hints.poll_next(&mut cx).is_pending());
        }
        drop(teller);
        assert_eq!(woken.0.load(Ordering::Relaxed), 3);
        assert_eq!(early.poll_next(&mut cx), Poll::Ready(None));
    }

    #[test]
    fn who_is_too_slow_is_told_so_and_hears_what_comes_then() {
        let (teller, mut cx) = (Teller::default(), Context::from_waker(Waker::noop()));
        let mut hints = teller.listen();
        for _ in 0..=MOST {
            teller.tell(vec![Change::Timers]);
        }
        assert_eq!(hints.poll_next(&mut cx), Poll::Ready(Some(Heard::Missed)));
        assert!(matches!(hints.poll_next(&mut cx), Poll::Ready(Some(Heard::Changes(_)))));
        assert!(hints.poll_next(&mut cx).is_pending());
    }

    #[test]
    fn who_is_hushed_is_not_woken_and_misses_nothing() {
        let (teller, woken) = (Teller::default(), Arc::new(Woken::default()));
        let (mut hints, waker) = (teller.listen(), Waker::from(woken.clone()));
        let mut cx = Context::from_waker(&waker);
        assert!(hints.poll_next(&mut cx).is_pending());
        hints.hush();
        teller.tell(vec![Change::Timers]);
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
        assert!(hints.poll_next(&mut cx).is_ready());
    }
}
