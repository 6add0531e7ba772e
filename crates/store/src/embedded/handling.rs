//! The note of what this process is handling: a small file beside the database, written without a sync. It is for the
//! case that the process dies, and the kernel keeps what was written then. After a power cut it may say anything old;
//! then a run is handled with care for nothing.

use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use eddyline_machine::RunId;
use uuid::Uuid;

use super::files;
use crate::error::{Result, StoreError};
use crate::handling::Handling;

/// Runs that are noted at most; a batch has fewer.
const MOST: usize = 1_024;
const MAGIC: [u8; 4] = *b"EDH1";
const HEAD: usize = 12;
const ID: usize = 16;

/// How long a thread that must not wait for a disk waits for the note, which usually takes microseconds.
const PATIENCE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Note {
    /// What was noted when the last process ended.
    before: Handling,
    scribe: Scribe,
}

impl Note {
    pub fn open(dir: &Path) -> Result<Note> {
        let path = files::handling(dir);
        let failed = |error| StoreError::Unavailable(format!("{} can't be opened: {error}", path.display()));
        let file = files::open_private(&path).map_err(failed)?;
        let mut bytes = vec![0; HEAD + MOST * ID];
        let mut read = 0;
        loop {
            match file.read_at(&mut bytes[read..], read as u64).map_err(failed)? {
                0 => break,
                more => read += more,
            }
        }
        // Nobody is refused because it can't be noted what would be suspected.
        let write = move |handling: &Handling| drop(file.write_all_at(&written(handling), 0));
        Ok(Note { before: parse(&bytes[..read]), scribe: Scribe::start(write)? })
    }

    pub fn before(&self) -> &Handling {
        &self.before
    }

    /// Writes a note in place of the one before. A thread that may not wait for the disk has it written by another one,
    /// and goes on when that takes too long.
    pub fn write(&self, handling: &Handling, may_wait: bool) {
        self.scribe.write(handling, may_wait);
    }
}

/// In one piece, so that a process that dies meanwhile has noted all of it or nothing.
fn written(handling: &Handling) -> Vec<u8> {
    let apart = handling.apart.len().min(MOST);
    let batch = handling.batch.len().min(MOST - apart);
    let mut bytes = Vec::with_capacity(HEAD + (batch + apart) * ID);
    bytes.extend(MAGIC);
    bytes.extend((batch as u32).to_le_bytes());
    bytes.extend((apart as u32).to_le_bytes());
    for run in handling.batch[..batch].iter().chain(&handling.apart[..apart]) {
        bytes.extend(run.0.into_bytes());
    }
    bytes
}

/// Writes the newest note, on the thread that notes or on one of its own. No lock is held meanwhile.
struct Scribe {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

struct Desk {
    write: Box<dyn Fn(&Handling) + Send + Sync>,
    state: Mutex<State>,
    change: Condvar,
}

/// What the thread has to write.
#[derive(Default)]
struct State {
    next: Option<Handling>,
    asked: u64,
    /// The last of these that is written. While it is behind, nobody else writes: an old note must not come last.
    written: u64,
    ended: bool,
}

impl Scribe {
    fn start(write: impl Fn(&Handling) + Send + Sync + 'static) -> Result<Scribe> {
        let desk = Arc::new(Desk { write: Box::new(write), state: Mutex::default(), change: Condvar::new() });
        let served = desk.clone();
        let thread = super::spawn("eddyline-note", move || served.run())?;
        Ok(Scribe { desk, thread: Some(thread) })
    }

    fn write(&self, handling: &Handling, may_wait: bool) {
        let mut state = self.desk.state();
        if may_wait && state.written == state.asked {
            drop(state);
            return (self.desk.write)(handling);
        }
        state.next = Some(handling.clone());
        state.asked += 1;
        let asked = state.asked;
        self.desk.change.notify_all();
        let unwritten = |state: &mut State| state.written < asked;
        drop(self.desk.change.wait_timeout_while(state, PATIENCE, unwritten));
    }
}

impl Drop for Scribe {
    fn drop(&mut self) {
        self.desk.state().ended = true;
        self.desk.change.notify_all();
        self.thread.take().map(JoinHandle::join);
    }
}

impl fmt::Debug for Scribe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scribe").finish_non_exhaustive()
    }
}

impl Desk {
    fn run(&self) {
        let mut state = self.state();
        loop {
            if let Some(next) = state.next.take() {
                let asked = state.asked;
                drop(state);
                (self.write)(&next);
                state = self.state();
                state.written = asked;
                self.change.notify_all();
            } else if state.ended {
                return;
            } else {
                state = self.change.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(bytes: &[u8]) -> Handling {
    let count = |at: usize| {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes) as usize)
    };
    let (Some(batch), Some(apart)) = (count(4), count(8)) else { return Handling::default() };
    if !bytes.starts_with(&MAGIC) || batch > MOST || apart > MOST {
        return Handling::default();
    }
    let ids = bytes[HEAD..].chunks_exact(ID).filter_map(|id| Some(RunId(Uuid::from_bytes(id.try_into().ok()?))));
    let mut runs: Vec<RunId> = ids.take(batch + apart).collect();
    let apart = runs.split_off(batch.min(runs.len()));
    Handling { batch: runs, apart }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn runs(of: &[u128]) -> Vec<RunId> {
        of.iter().map(|n| RunId(Uuid::from_u128(*n))).collect()
    }

    #[test]
    fn what_was_noted_last_is_found_by_whoever_opens_it_next() {
        let dir = tempfile::tempdir().unwrap();
        let note = Note::open(dir.path()).unwrap();
        assert!(note.before().is_empty());
        note.write(&Handling { batch: runs(&[1, 2, 3]), apart: runs(&[4]) }, true);
        let handling = Handling { batch: runs(&[5]), apart: runs(&[6, 7]) };
        note.write(&handling, false);
        assert_eq!(Note::open(dir.path()).unwrap().before(), &handling);
        note.write(&Handling::default(), true);
        assert!(Note::open(dir.path()).unwrap().before().is_empty());
        let many = Handling { batch: runs(&(0..2_000).collect::<Vec<_>>()), apart: runs(&[9]) };
        note.write(&many, true);
        let found = Note::open(dir.path()).unwrap().before().clone();
        assert_eq!((found.batch.len(), found.apart), (MOST - 1, runs(&[9])));
    }

    #[test]
    fn whoever_must_not_wait_for_a_disk_that_hangs_does_not_and_the_newest_note_is_written_last() {
        let (hang, hung) = std::sync::mpsc::channel();
        let (go_on, gone_on) = std::sync::mpsc::channel::<()>();
        let (found, gone_on) = (Arc::new(Mutex::new(Vec::new())), Mutex::new(gone_on));
        let noted = found.clone();
        let scribe = Scribe::start(move |handling: &Handling| {
            if handling.apart.len() == 1 {
                hang.send(()).unwrap();
                let _ = gone_on.lock().unwrap().recv();
            }
            noted.lock().unwrap().push(handling.clone());
        });
        let scribe = scribe.unwrap();
        let [first, second, last] =
            [1, 2, 3].map(|n| Handling { batch: Vec::new(), apart: runs(&(0..n).collect::<Vec<_>>()) });
        let since = std::time::Instant::now();
        scribe.write(&first, false);
        hung.recv().unwrap();
        // Even one that may wait does not write past it.
        scribe.write(&second, true);
        scribe.write(&last, true);
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        assert!(found.lock().unwrap().is_empty());
        go_on.send(()).unwrap();
        drop(scribe);
        assert_eq!(*found.lock().unwrap(), [first, last]);
    }

    #[test]
    fn a_note_that_cannot_be_read_says_nothing() {
        for bytes in [
            &b"EDH1"[..],
            b"",
            b"something else entirely",
            b"EDH1\xff\xff\xff\xff\0\0\0\0",
            b"EDH1\x02\0\0\0\0\0\0\0abc",
        ] {
            assert!(parse(bytes).is_empty(), "{bytes:?}");
        }
    }
}
