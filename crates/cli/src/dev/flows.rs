//! Registers the definitions of a directory whenever they change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::files::{Changes, FileChange};
use super::{LOOK, say};
use crate::Context;
use crate::connect::Remote;
use crate::flow::{Source, is_definition, register};
use crate::screen::Ink;
use crate::trouble::Trouble;

/// Registers every definition in the directory, and each one again when it changes.
pub async fn keep_registered(ctx: &Context, remote: &Remote, dir: &Path) -> Result<(), Trouble> {
    let mut changes = Changes::of(dir, &is_definition);
    if !dir.is_dir() {
        say(ctx, Ink::Note, &format!("{} does not exist yet: flows are registered once it does", dir.display()));
    }
    let mut files = Files { ctx, remote, registered: BTreeMap::new(), held_back: BTreeMap::new() };
    loop {
        for change in changes.look() {
            match change {
                FileChange::Written(path) => files.written(&path).await,
                FileChange::Removed(path) => files.removed(&path),
            }
        }
        files.register_held_back().await;
        tokio::time::sleep(LOOK).await;
    }
}

/// Which flow is in which file. If two files define the same flow, the first one wins: otherwise every save would
/// switch it.
struct Files<'a> {
    ctx: &'a Context,
    remote: &'a Remote,
    registered: BTreeMap<PathBuf, String>,
    /// Files whose flow is registered from another file.
    held_back: BTreeMap<PathBuf, String>,
}

impl Files<'_> {
    /// Registers the flow of a file, or prints what is wrong with it.
    async fn written(&mut self, path: &Path) {
        self.held_back.remove(path);
        let source = match Source::read(path) {
            Ok(source) => source,
            Err(trouble) => return say(self.ctx, Ink::Bad, trouble.text().trim_end()),
        };
        let parsed = match source.parse() {
            Ok(parsed) => parsed,
            Err(problems) => return self.ctx.screen.aside(source.render(&problems)),
        };
        let name = &parsed.flow.name;
        self.registered.remove(path);
        if let Some((other, _)) = self.registered.iter().find(|(_, flow)| *flow == name) {
            self.ctx.screen.aside(source.render(&source.also_in(name, other)));
            say(self.ctx, Ink::Note, &format!("{name} stays registered from {}", other.display()));
            self.held_back.insert(path.to_owned(), name.clone());
            return;
        }
        for warning in &parsed.warnings {
            self.ctx.screen.aside(format!("warning: {}", warning.render(&source.text)));
        }
        let answer = match register(self.remote, &source, &parsed.flow).await {
            Ok(answer) => answer,
            Err(trouble) => return self.ctx.screen.aside(trouble.text().trim_end()),
        };
        self.registered.insert(path.to_owned(), name.clone());
        let (name, version) = (answer.name, answer.version);
        match answer.changed {
            true => say(self.ctx, Ink::Good, &format!("✓ {name} {version} registered from {}", path.display())),
            false => say(self.ctx, Ink::Faint, &format!("✓ {name} {version} unchanged")),
        }
    }

    fn removed(&mut self, path: &Path) {
        self.held_back.remove(path);
        let text = match self.registered.remove(path) {
            Some(flow) => format!("{} was removed; its flow {flow} stays registered", path.display()),
            None => format!("{} was removed", path.display()),
        };
        say(self.ctx, Ink::Note, &text);
    }

    /// Registers held-back flows whose other file was removed or now defines another flow.
    async fn register_held_back(&mut self) {
        let free = |flow: &String| self.registered.values().all(|registered| registered != flow);
        let now: Vec<PathBuf> =
            self.held_back.iter().filter(|(_, flow)| free(flow)).map(|(path, _)| path.clone()).collect();
        for path in now {
            self.written(&path).await;
        }
    }
}
