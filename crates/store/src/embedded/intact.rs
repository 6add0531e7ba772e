//! Detects removed or replaced files. A file that is removed or replaced while it is open still accepts writes, which
//! are lost when it is closed.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::files;

/// Device and inode.
type Identity = (u64, u64);

#[derive(Debug)]
pub(super) struct Intact {
    opened: Vec<(PathBuf, Identity)>,
}

impl Intact {
    /// Records the files right after everything was opened.
    pub fn new(dir: &Path) -> Intact {
        let paths = [dir.to_owned(), files::database(dir), files::log(dir), files::log_index(dir), files::lock(dir)];
        let known = |path: PathBuf| fs::metadata(&path).ok().map(|found| (path, identity(&found)));
        Intact { opened: paths.into_iter().filter_map(known).collect() }
    }

    /// Fails with a description of the first file that was removed or replaced.
    pub fn check(&self) -> Result<(), String> {
        for (path, opened) in &self.opened {
            let what = match fs::metadata(path) {
                Ok(found) if identity(&found) == *opened => continue,
                Ok(_) => "was replaced",
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => "was removed",
                // No access, or an IO error: this says nothing about the file.
                Err(_) => continue,
            };
            return Err(format!(
                "{} {what} while the store was open. Writes are refused: stop this process, put the files back or \
                 restore a backup, and start it again",
                path.display()
            ));
        }
        Ok(())
    }
}

fn identity(found: &Metadata) -> Identity {
    (found.dev(), found.ino())
}
