//! The lock on the directory. Only one process may have it: each writer trusts its own memory.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use eddyline_language::time;
use eddyline_machine::Millis;

use super::files;
use crate::error::StoreError;

/// Held until dropped. The operating system releases it when the process ends, however it ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub fn take(dir: &Path, wall: Millis) -> Result<Lock, StoreError> {
        let path = files::lock(dir);
        let failed =
            |error: std::io::Error| StoreError::Unavailable(format!("cannot lock {}: {error}", path.display()));
        let mut file = files::open_private(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(taken(dir, &mut file)),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let line = format!("process {} since {}\n", std::process::id(), time::iso(wall));
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(line.as_bytes())).map_err(failed)?;
        Ok(Lock { _file: file })
    }
}

fn taken(dir: &Path, file: &mut File) -> StoreError {
    let mut holder = String::new();
    let _ = file.read_to_string(&mut holder);
    let holder = match holder.trim() {
        "" => "another process",
        holder => holder,
    };
    StoreError::Unavailable(format!(
        "{} is locked by {holder}; stop that process or use another directory",
        dir.display()
    ))
}
