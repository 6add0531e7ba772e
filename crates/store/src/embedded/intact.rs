//! Whether the files of a store are still those that were opened. A file that is removed or replaced while it is open goes
//! on taking writes, which nobody will ever find again.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::files;

/// A file as the system knows it, whatever its name.
type Identity = (u64, u64);

#[derive(Debug)]
pub(super) struct Intact {
    opened: Vec<(PathBuf, Identity)>,
}

impl Intact {
    /// The files as they are right after everything was opened.
    pub fn new(dir: &Path) -> Intact {
        let paths = [dir.to_owned(), files::database(dir), files::log(dir), files::log_index(dir), files::lock(dir)];
        let known = |path: PathBuf| fs::metadata(&path).ok().map(|found| (path, identity(&found)));
        Intact { opened: paths.into_iter().filter_map(known).collect() }
    }

    /// What happened to the first that is not there any more.
    pub fn check(&self) -> Result<(), String> {
        for (path, opened) in &self.opened {
            let what = match fs::metadata(path) {
                Ok(found) if identity(&found) == *opened => continue,
                Ok(_) => "was replaced",
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => "was removed",
                // Who may not look, or can't, knows nothing of it.
                Err(_) => continue,
            };
            return Err(format!(
                "{} {what} while the store was open. Nothing is written any more: stop this process, put the files back \
                 as they were or restore a backup, and start it again",
                path.display()
            ));
        }
        Ok(())
    }
}

fn identity(found: &Metadata) -> Identity {
    (found.dev(), found.ino())
}
