//! Finds changed files in a directory by polling.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Bounds on the files that are watched.
const MOST_FILES: usize = 10_000;
const DEEPEST: usize = 16;
/// Directories of build output, which changes with every build.
const IGNORED: [&str; 5] = ["target", "node_modules", "__pycache__", "dist", "build"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileChange {
    Written(PathBuf),
    Removed(PathBuf),
}

pub type Wanted = dyn Fn(&Path) -> bool + Send + Sync;

/// Modification time and size: if either differs, the file has changed.
type Look = (Option<SystemTime>, u64);

pub struct Changes<'a> {
    dir: PathBuf,
    wanted: &'a Wanted,
    seen: BTreeMap<PathBuf, Look>,
}

impl<'a> Changes<'a> {
    /// The first `look` reports every file.
    pub fn of(dir: &Path, wanted: &'a Wanted) -> Changes<'a> {
        Changes { dir: dir.to_owned(), wanted, seen: BTreeMap::new() }
    }

    pub fn look(&mut self) -> Vec<FileChange> {
        let mut found = BTreeMap::new();
        walk(&self.dir, self.wanted, 0, &mut found);
        // Removed files first: a moved file is removed under its old name.
        let removed = self.seen.keys().filter(|path| !found.contains_key(*path));
        let mut changes: Vec<FileChange> = removed.cloned().map(FileChange::Removed).collect();
        let written = found.iter().filter(|(path, look)| self.seen.get(*path) != Some(look));
        changes.extend(written.map(|(path, _)| FileChange::Written(path.clone())));
        self.seen = found;
        changes
    }
}

fn walk(dir: &Path, wanted: &dyn Fn(&Path) -> bool, depth: usize, found: &mut BTreeMap<PathBuf, Look>) {
    // A directory that cannot be read counts as empty.
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if name.starts_with('.') || found.len() >= MOST_FILES {
            continue;
        }
        let Ok(about) = entry.metadata() else { continue };
        if about.is_dir() && depth < DEEPEST && !IGNORED.contains(&name.as_ref()) {
            walk(&path, wanted, depth + 1, found);
        } else if about.is_file() && wanted(&path) {
            found.insert(path, (about.modified().ok(), about.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn every_change_is_seen_once() {
        let place = tempfile::tempdir().unwrap();
        let (a, b) = (place.path().join("a.yaml"), place.path().join("deep/b.yaml"));
        let mut changes = Changes::of(place.path(), &|path| path.extension().is_some_and(|ending| ending == "yaml"));
        assert_eq!(changes.look(), []);
        fs::write(&a, "1").unwrap();
        fs::create_dir(place.path().join("deep")).unwrap();
        fs::write(&b, "1").unwrap();
        for ignored in ["c.txt", ".hidden.yaml"] {
            fs::write(place.path().join(ignored), "1").unwrap();
        }
        fs::create_dir(place.path().join("target")).unwrap();
        fs::write(place.path().join("target/d.yaml"), "1").unwrap();
        assert_eq!(changes.look(), [FileChange::Written(a.clone()), FileChange::Written(b.clone())]);
        assert_eq!(changes.look(), []);
        fs::write(&a, "12").unwrap();
        fs::remove_file(&b).unwrap();
        assert_eq!(changes.look(), [FileChange::Removed(b), FileChange::Written(a)]);
    }
}
