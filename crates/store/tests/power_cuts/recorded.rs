//! The recorded operations on a disk, and the states that a power cut may leave.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::story::Dice;

/// The unit that a disk writes atomically.
const SECTOR: usize = 512;
/// The size of `struct Entry` in `disk.c`.
const ENTRY_BYTES: usize = 24;

/// Which syncs a disk honours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    Syncs,
    Nothing,
}

#[derive(Debug, Clone)]
enum Operation {
    Write { file: u64, at: usize, bytes: Vec<u8> },
    Truncate { file: u64, length: usize },
    Sync { file: u64 },
    Create { file: u64, name: String },
    Rename { from: String, to: String },
    Unlink { name: String },
    MakeDirectory { file: u64, name: String },
}

#[derive(Debug)]
pub struct Recorded {
    /// The directory that all names are relative to.
    root: u64,
    operations: Vec<Operation>,
}

impl Recorded {
    pub fn read(root: &Path, log: &Path) -> Recorded {
        let bytes = fs::read(log).unwrap();
        let (mut operations, mut at) = (Vec::new(), 0);
        while at + ENTRY_BYTES <= bytes.len() {
            let number = |from: usize, len: usize| {
                bytes[at + from..at + from + len]
                    .iter()
                    .rev()
                    .fold(0_u64, |number, byte| (number << 8) | u64::from(*byte))
            };
            let (kind, length, file, offset) = (number(0, 4), number(4, 4) as usize, number(8, 8), number(16, 8));
            let content = &bytes[at + ENTRY_BYTES..at + ENTRY_BYTES + length];
            let name = |bytes: &[u8]| {
                let path = PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
                path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()
            };
            operations.push(match kind {
                1 => Operation::Write { file, at: offset as usize, bytes: content.to_vec() },
                2 => Operation::Truncate { file, length: offset as usize },
                3 => Operation::Sync { file },
                4 => Operation::Create { file, name: name(content) },
                5 => {
                    let (from, to) = content.split_at(content.iter().position(|byte| *byte == 0).unwrap());
                    Operation::Rename { from: name(from), to: name(&to[1..]) }
                }
                6 => Operation::Unlink { name: name(content) },
                7 => Operation::MakeDirectory { file, name: name(content) },
                other => panic!("an operation of kind {other}"),
            });
            at += ENTRY_BYTES + length;
        }
        Recorded { root: fs::metadata(root).unwrap().ino(), operations }
    }

    pub fn len(&self) -> usize {
        self.operations.len()
    }

    pub fn replay(&self, disk: &mut Disk, which: Range<usize>) {
        disk.directories.entry(self.root).or_default();
        for operation in &self.operations[which] {
            disk.apply(operation);
        }
    }
}

/// A file: its durable contents, and the changes since the last sync.
#[derive(Debug, Clone, Default)]
struct Contents {
    is_directory: bool,
    durable: Vec<u8>,
    since: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Write(usize, Vec<u8>),
    Truncate(usize),
}

/// A change of a directory, whose files are numbers in [`Disk::files`].
#[derive(Debug, Clone)]
enum Naming {
    Add(String, usize),
    Remove(String),
}

#[derive(Debug)]
pub struct Disk {
    trust: Trust,
    files: Vec<Contents>,
    /// Inode numbers are reused; this maps each to its current file.
    by_inode: BTreeMap<u64, usize>,
    /// Directories by their inode, with their names; the root's is empty.
    directories: BTreeMap<u64, String>,
    names: BTreeMap<String, usize>,
    renamings: Vec<Naming>,
}

impl Disk {
    pub fn new(trust: Trust) -> Disk {
        let (files, by_inode, directories) = Default::default();
        Disk { trust, files, by_inode, directories, names: BTreeMap::new(), renamings: Vec::new() }
    }

    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Write { file, at, bytes } => self.change(*file, Change::Write(*at, bytes.clone())),
            Operation::Truncate { file, length } => self.change(*file, Change::Truncate(*length)),
            Operation::Sync { file } => self.sync(*file),
            Operation::Create { file, name } => {
                self.files.push(Contents::default());
                self.by_inode.insert(*file, self.files.len() - 1);
                self.renamings.push(Naming::Add(name.clone(), self.files.len() - 1));
            }
            Operation::Rename { from, to } => {
                if let Some(file) = self.current().get(from).copied() {
                    self.renamings.push(Naming::Remove(from.clone()));
                    self.renamings.push(Naming::Add(to.clone(), file));
                }
            }
            Operation::Unlink { name } => self.renamings.push(Naming::Remove(name.clone())),
            Operation::MakeDirectory { file, name } => {
                self.directories.insert(*file, name.clone());
                self.files.push(Contents { is_directory: true, ..Contents::default() });
                self.renamings.push(Naming::Add(name.clone(), self.files.len() - 1));
            }
        }
    }

    fn change(&mut self, file: u64, change: Change) {
        let Some(file) = self.by_inode.get(&file) else { panic!("an unknown file was changed") };
        self.files[*file].since.push(change);
    }

    fn sync(&mut self, file: u64) {
        if self.trust == Trust::Nothing {
            return;
        }
        if let Some(directory) = self.directories.get(&file) {
            let of = |naming: &Naming| {
                let (Naming::Add(name, _) | Naming::Remove(name)) = naming;
                Path::new(name).parent().is_some_and(|parent| parent == Path::new(directory))
            };
            let (durable, left) = std::mem::take(&mut self.renamings).into_iter().partition(of);
            self.renamings = left;
            rename(&mut self.names, durable);
        } else if let Some(file) = self.by_inode.get(&file) {
            let file = &mut self.files[*file];
            for change in std::mem::take(&mut file.since) {
                apply(&mut file.durable, &change);
            }
        }
    }

    fn current(&self) -> BTreeMap<String, usize> {
        let mut names = self.names.clone();
        rename(&mut names, self.renamings.clone());
        names
    }

    /// The contents of a file as the running process sees it.
    pub fn now(&self, name: &str) -> Vec<u8> {
        let Some(file) = self.current().get(name).map(|file| &self.files[*file]) else { return Vec::new() };
        let mut bytes = file.durable.clone();
        file.since.iter().for_each(|change| apply(&mut bytes, change));
        bytes
    }

    pub fn unsynced(&self) -> usize {
        self.current().iter().filter(|(name, _)| *name != "ledger").map(|(_, file)| self.files[*file].since.len()).sum()
    }

    /// Writes the files as a power cut left them.
    pub fn rebuild(&self, to: &Path, dice: &mut Dice) {
        let mut names = self.names.clone();
        let kept = dice.below(self.renamings.len() + 1);
        rename(&mut names, self.renamings[..kept].to_vec());
        // A file exists if all its parent directories do.
        let is_there =
            |path: &Path| path.as_os_str().is_empty() || path.to_str().is_some_and(|name| names.contains_key(name));
        for (name, file) in &names {
            if self.files[*file].is_directory || !Path::new(name).ancestors().all(is_there) {
                continue;
            }
            // The index of the log is not durable state: SQLite rebuilds it.
            if name.ends_with("-shm") || name == "ledger" {
                continue;
            }
            let path = to.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, self.files[*file].after_a_cut(dice)).unwrap();
        }
    }
}

impl Contents {
    fn after_a_cut(&self, dice: &mut Dice) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        let manner = dice.below(4);
        for change in &self.since {
            match (manner, dice.below(3)) {
                (0, _) => apply(&mut bytes, change),
                (1, _) => {}
                (_, 0) => apply(&mut bytes, change),
                (_, 1) => {}
                _ => tear(&mut bytes, change, dice),
            }
        }
        bytes
    }
}

/// Applies only some sectors of a write.
fn tear(bytes: &mut Vec<u8>, change: &Change, dice: &mut Dice) {
    let Change::Write(at, content) = change else { return apply(bytes, change) };
    let mut from = 0;
    while from < content.len() {
        let to = (from + SECTOR - (at + from) % SECTOR).min(content.len());
        if dice.below(2) == 0 {
            apply(bytes, &Change::Write(at + from, content[from..to].to_vec()));
        }
        from = to;
    }
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Truncate(length) => bytes.resize(*length, 0),
        Change::Write(at, content) => {
            let end = at + content.len();
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[*at..end].copy_from_slice(content);
        }
    }
}

fn rename(names: &mut BTreeMap<String, usize>, namings: Vec<Naming>) {
    for naming in namings {
        match naming {
            Naming::Add(name, file) => names.insert(name, file),
            Naming::Remove(name) => names.remove(&name),
        };
    }
}
