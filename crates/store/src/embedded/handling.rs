//! The note of what this process is handling: a small file beside the database, written without a sync. It is for the
//! case that the process dies, and the kernel keeps what was written then. After a power cut it may say anything old;
//! then a run is handled with care for nothing.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

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

#[derive(Debug)]
pub(super) struct Note {
    file: File,
    /// What was noted when the last process ended.
    before: Handling,
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
        Ok(Note { file, before: parse(&bytes[..read]) })
    }

    pub fn before(&self) -> &Handling {
        &self.before
    }

    /// In one write, so that a process that dies meanwhile has noted all of it or nothing.
    pub fn write(&self, handling: &Handling) {
        let apart = handling.apart.len().min(MOST);
        let batch = handling.batch.len().min(MOST - apart);
        let mut bytes = Vec::with_capacity(HEAD + (batch + apart) * ID);
        bytes.extend(MAGIC);
        bytes.extend((batch as u32).to_le_bytes());
        bytes.extend((apart as u32).to_le_bytes());
        for run in handling.batch[..batch].iter().chain(&handling.apart[..apart]) {
            bytes.extend(run.0.into_bytes());
        }
        // Nobody is refused because it can't be noted what would be suspected.
        let _ = self.file.write_all_at(&bytes, 0);
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
        note.write(&Handling { batch: runs(&[1, 2, 3]), apart: runs(&[4]) });
        let handling = Handling { batch: runs(&[5]), apart: runs(&[6, 7]) };
        note.write(&handling);
        assert_eq!(Note::open(dir.path()).unwrap().before(), &handling);
        note.write(&Handling::default());
        assert!(Note::open(dir.path()).unwrap().before().is_empty());
        let many = Handling { batch: runs(&(0..2_000).collect::<Vec<_>>()), apart: runs(&[9]) };
        note.write(&many);
        let found = Note::open(dir.path()).unwrap().before().clone();
        assert_eq!((found.batch.len(), found.apart), (MOST - 1, runs(&[9])));
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
