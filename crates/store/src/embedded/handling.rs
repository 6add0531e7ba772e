//! The note of the runs that this process is deciding on: a small file next to the database, written without a sync. It
//! survives a crash of the process, because the kernel has the written pages. After a power cut it may be outdated;
//! then a run is suspected without reason, which is harmless.

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

/// The most runs in a note; a batch has fewer.
const MOST: usize = 1_024;
const MAGIC: [u8; 4] = *b"EDH1";
const HEAD: usize = 12;
const ID: usize = 16;

/// How long a thread that must not block on the disk waits for the note, which usually takes microseconds.
const PATIENCE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Note {
    /// The note that the previous process left.
    before: Handling,
    scribe: Scribe,
}

impl Note {
    pub fn open(dir: &Path) -> Result<Note> {
        let path = files::handling(dir);
        let failed = |error| StoreError::Unavailable(format!("cannot open {}: {error}", path.display()));
        let file = files::open_private(&path).map_err(failed)?;
        let mut bytes = vec![0; HEAD + MOST * ID];
        let mut read = 0;
        loop {
            match file.read_at(&mut bytes[read..], read as u64).map_err(failed)? {
                0 => break,
                more => read += more,
            }
        }
        // A note that cannot be written must not fail a commit.
        let write = move |handling: &Handling| drop(file.write_all_at(&written(handling), 0));
        Ok(Note { before: parse(&bytes[..read]), scribe: Scribe::start(write)? })
    }

    pub fn before(&self) -> &Handling {
        &self.before
    }

    /// Replaces the note. Without `may_wait` another thread writes it, and this one waits for at most `PATIENCE`.
    pub fn write(&self, handling: &Handling, may_wait: bool) {
        self.scribe.write(handling, may_wait);
    }
}

/// Encodes a note for a single write, so that a crash leaves the whole note or the previous one.
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

/// Writes the newest note, on the calling thread or on its own. No lock is held meanwhile.
struct Scribe {
    writer: Arc<NoteWriter>,
    thread: Option<JoinHandle<()>>,
}

struct NoteWriter {
    write: Box<dyn Fn(&Handling) + Send + Sync>,
    state: Mutex<NoteState>,
    change: Condvar,
}

/// The work of the thread.
#[derive(Default)]
struct NoteState {
    next: Option<Handling>,
    asked: u64,
    /// The last of `asked` that is written. While it is behind, no other thread writes: an old note must not overwrite
    /// a newer one.
    written: u64,
    ended: bool,
}

impl Scribe {
    fn start(write: impl Fn(&Handling) + Send + Sync + 'static) -> Result<Scribe> {
        let writer = Arc::new(NoteWriter { write: Box::new(write), state: Mutex::default(), change: Condvar::new() });
        let served = writer.clone();
        let thread = super::spawn("eddyline-note", move || served.run())?;
        Ok(Scribe { writer, thread: Some(thread) })
    }

    fn write(&self, handling: &Handling, may_wait: bool) {
        let mut state = self.writer.state();
        if may_wait && state.written == state.asked {
            drop(state);
            return (self.writer.write)(handling);
        }
        state.next = Some(handling.clone());
        state.asked += 1;
        let asked = state.asked;
        self.writer.change.notify_all();
        let unwritten = |state: &mut NoteState| state.written < asked;
        drop(self.writer.change.wait_timeout_while(state, PATIENCE, unwritten));
    }
}

impl Drop for Scribe {
    fn drop(&mut self) {
        self.writer.state().ended = true;
        self.writer.change.notify_all();
        self.thread.take().map(JoinHandle::join);
    }
}

impl fmt::Debug for Scribe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scribe").finish_non_exhaustive()
    }
}

impl NoteWriter {
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

    fn state(&self) -> MutexGuard<'_, NoteState> {
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
    fn the_last_note_is_found_when_the_file_is_opened_again() {
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
    fn no_caller_waits_for_a_hanging_disk_and_the_newest_note_is_written_last() {
        let (hang, hung) = std::sync::mpsc::channel();
        let (resume, resumed) = std::sync::mpsc::channel::<()>();
        let (found, resumed) = (Arc::new(Mutex::new(Vec::new())), Mutex::new(resumed));
        let noted = found.clone();
        let scribe = Scribe::start(move |handling: &Handling| {
            if handling.apart.len() == 1 {
                hang.send(()).unwrap();
                let _ = resumed.lock().unwrap().recv();
            }
            noted.lock().unwrap().push(handling.clone());
        });
        let scribe = scribe.unwrap();
        let [first, second, last] =
            [1, 2, 3].map(|n| Handling { batch: Vec::new(), apart: runs(&(0..n).collect::<Vec<_>>()) });
        let since = std::time::Instant::now();
        scribe.write(&first, false);
        hung.recv().unwrap();
        // Even a caller that may wait does not overtake the pending note.
        scribe.write(&second, true);
        scribe.write(&last, true);
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        assert!(found.lock().unwrap().is_empty());
        resume.send(()).unwrap();
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
