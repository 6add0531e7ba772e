//! `eddy init`: a new project folder.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde_json::json;

use super::Context;
use super::trouble::Trouble;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Lang {
    Rust,
    Shell,
}

#[derive(Debug, clap::Args)]
pub struct Init {
    /// The folder; it is created if it does not exist
    #[arg(default_value = ".", value_name = "DIR")]
    dir: PathBuf,
    /// What the worker is written in
    #[arg(long, value_enum, default_value_t = Lang::Shell)]
    lang: Lang,
}

struct Template {
    path: &'static str,
    text: &'static str,
    runs: bool,
}

const fn text(path: &'static str, text: &'static str) -> Template {
    Template { path, text, runs: false }
}

const fn program(path: &'static str, text: &'static str) -> Template {
    Template { path, text, runs: true }
}

const SHELL: [Template; 6] = [
    text("flows/greet.yaml", include_str!("../templates/greet.yaml")),
    program("steps/look_up.sh", include_str!("../templates/shell/look_up.sh")),
    program("steps/greet.sh", include_str!("../templates/shell/greet.sh")),
    program("worker.sh", include_str!("../templates/shell/worker.sh")),
    text("README.md", include_str!("../templates/shell/README.md")),
    text(".gitignore", include_str!("../templates/shell/gitignore")),
];

const RUST: [Template; 5] = [
    text("flows/greet.yaml", include_str!("../templates/greet.yaml")),
    text("src/main.rs", include_str!("../templates/rust/main.rs")),
    text("Cargo.toml", include_str!("../templates/rust/Cargo.toml.template")),
    text("README.md", include_str!("../templates/rust/README.md")),
    text(".gitignore", include_str!("../templates/rust/gitignore")),
];

/// Placeholder in a template for the dependency on the crate `eddyline`.
const DEPENDENCY: &str = "{eddyline}";
const SDK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../sdk");

/// Overwrites nothing: if one of the files exists, none is written.
pub fn run(ctx: &Context, init: &Init) -> Result<(), Trouble> {
    let templates: &[Template] = match init.lang {
        Lang::Shell => &SHELL,
        Lang::Rust => &RUST,
    };
    let there: Vec<&str> = templates.iter().map(|file| file.path).filter(|path| init.dir.join(path).exists()).collect();
    if !there.is_empty() {
        return Err(Trouble::refused(format!("{} already has {}", init.dir.display(), there.join(", ")))
            .help("choose another folder: `eddy init DIR`"));
    }
    for file in templates {
        let text = file.text.replace(DEPENDENCY, &dependency(Path::new(SDK)));
        write(init, file, &text).map_err(|error| {
            Trouble::failed(format!("cannot write {}: {error}", init.dir.join(file.path).display()))
        })?;
    }
    let dev = match init.lang {
        Lang::Shell => "eddy dev -- ./worker.sh",
        Lang::Rust => "eddy dev -- cargo run",
    };
    let enter = if init.dir.as_os_str() == "." { String::new() } else { format!("  cd {}\n", typed(&init.dir)) };
    if ctx.screen.json {
        let files: Vec<PathBuf> = templates.iter().map(|file| init.dir.join(file.path)).collect();
        return ctx.screen.document(&json!({ "files": files }));
    }
    for file in templates {
        ctx.screen.say(format!("  {}", init.dir.join(file.path).display()))?;
    }
    ctx.screen.say(format!(
        "\nNext steps:\n{enter}  {dev}\nand in another terminal:\n  eddy start greet --input '{{\"name\": \"Ada\"}}' --wait"
    ))
}

/// A path, quoted for a shell.
fn typed(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+@%,:".contains(c);
    let text = if text.starts_with('-') { format!("./{text}") } else { text };
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// The dependency on `eddyline`: the source tree that this `eddy` was built from if it still exists, else the
/// repository.
fn dependency(sdk: &Path) -> String {
    match sdk.canonicalize().ok().filter(|sdk| sdk.join("Cargo.toml").is_file()) {
        Some(sdk) => format!(
            "# The source tree that `eddy` was built from.\neddyline = {{ path = {} }}",
            // A JSON string is a valid TOML string.
            json!(sdk)
        ),
        None => format!(
            "# If you have the source tree of Eddyline: {{ path = \"…/crates/sdk\" }}.\neddyline = {{ git = {} }}",
            json!(env!("CARGO_PKG_REPOSITORY"))
        ),
    }
}

fn write(init: &Init, file: &Template, text: &str) -> std::io::Result<()> {
    let path = init.dir.join(file.path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut out = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path)?;
    out.write_all(text.as_bytes())?;
    if file.runs {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_entered_as_it_is_called() {
        for (path, entered) in [
            ("a/b-c", "a/b-c"),
            ("-dash", "./-dash"),
            ("sp ace", "'sp ace'"),
            ("it's", r"'it'\''s'"),
            ("$(x)", "'$(x)'"),
        ] {
            assert_eq!(typed(Path::new(path)), entered);
        }
    }

    #[test]
    fn the_crate_is_taken_from_where_it_is() {
        let template = RUST.iter().find(|file| file.path == "Cargo.toml").unwrap();
        let eddyline = |sdk: &Path| {
            let manifest: toml::Table = toml::from_str(&template.text.replace(DEPENDENCY, &dependency(sdk))).unwrap();
            manifest["dependencies"]["eddyline"].clone()
        };
        let path = PathBuf::from(eddyline(Path::new(SDK))["path"].as_str().unwrap());
        let sdk: toml::Table = toml::from_str(&fs::read_to_string(path.join("Cargo.toml")).unwrap()).unwrap();
        assert_eq!(sdk["package"]["name"].as_str(), Some("eddyline"));
        let elsewhere = eddyline(Path::new("no/such/folder"));
        assert_eq!(elsewhere["git"].as_str(), Some(env!("CARGO_PKG_REPOSITORY")));
    }
}
