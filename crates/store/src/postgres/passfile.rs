//! Passwords from outside the URL: from `PGPASSWORD`, from a file that contains only the password, or from a password
//! file of libpq with lines of `host:port:database:user:password`. Files are read for each new connection, so a
//! password can be replaced while the store is open.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use tokio_postgres::config::{Config, Host};

/// Where libpq looks for sockets if no host is given: password file lines for such a host say `localhost`.
const SOCKET_DIRS: [&str; 3] = ["/var/run/postgresql", "/run/postgresql", "/tmp"];

/// Where the password of a connection comes from.
#[derive(Clone)]
pub(super) enum Password {
    /// The URL has the password, or there is none.
    OfUrl,
    Given(Vec<u8>),
    /// The content of the file without a trailing newline.
    File(PathBuf),
    PassFile(PathBuf),
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Password::OfUrl => f.write_str("OfUrl"),
            Password::Given(_) => f.write_str("Given(_)"),
            Password::File(path) => f.debug_tuple("File").field(path).finish(),
            Password::PassFile(path) => f.debug_tuple("PassFile").field(path).finish(),
        }
    }
}

impl Password {
    /// The first source that exists, in libpq's order: the URL, the environment, a password file.
    pub fn choose(
        config: &Config,
        file: Option<PathBuf>,
        pass_file: Option<PathBuf>,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Password {
        if let Some(path) = file {
            return Password::File(path);
        }
        if config.get_password().is_some() {
            return Password::OfUrl;
        }
        if let Some(given) = env("PGPASSWORD") {
            return Password::Given(given.into_encoded_bytes());
        }
        let home = || Some(PathBuf::from(env("HOME")?).join(".pgpass"));
        match pass_file.or_else(|| env("PGPASSFILE").map(PathBuf::from)).or_else(home) {
            Some(path) => Password::PassFile(path),
            None => Password::OfUrl,
        }
    }

    /// The password for a new connection; `None` if the configuration has it or none is needed.
    pub async fn look_up(&self, config: &Config) -> std::result::Result<Option<Vec<u8>>, String> {
        let (this, config) = (self.clone(), config.clone());
        let read = tokio::task::spawn_blocking(move || match this {
            Password::OfUrl => Ok(None),
            Password::Given(given) => Ok(Some(given)),
            Password::File(path) => match std::fs::read(&path) {
                Ok(bytes) => Ok(Some(without_line_end(bytes))),
                Err(error) => Err(format!("password_file {} can't be read: {error}", path.display())),
            },
            Password::PassFile(path) => Ok(in_pass_file(&config, &path)),
        });
        read.await.unwrap_or_else(|error| Err(format!("the password can't be read: {error}")))
    }
}

fn without_line_end(mut bytes: Vec<u8>) -> Vec<u8> {
    while bytes.last().is_some_and(|last| matches!(last, b'\n' | b'\r')) {
        bytes.pop();
    }
    bytes
}

fn in_pass_file(config: &Config, path: &Path) -> Option<Vec<u8>> {
    let meta = std::fs::metadata(path).ok()?;
    if !meta.is_file() {
        tracing::warn!(path = %path.display(), "the password file is ignored: it is not a regular file");
        return None;
    }
    if is_open_to_others(&meta) {
        tracing::warn!(path = %path.display(), "the password file is ignored: other users can read it (use chmod 600)");
        return None;
    }
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            tracing::warn!(path = %path.display(), "the password file is ignored: {error}");
            return None;
        }
    };
    let user = config.get_user().unwrap_or_default();
    let database = config.get_dbname().unwrap_or(user);
    let hosts = config.get_hosts().iter().enumerate();
    hosts.flat_map(names).find_map(|(at, name)| {
        let ports = config.get_ports();
        let port = ports.get(at).or(ports.first()).copied().unwrap_or(5432).to_string();
        password(&text, [&name, &port, database, user]).map(String::into_bytes)
    })
}

/// The names that password file lines may use for a host.
fn names((at, host): (usize, &Host)) -> Vec<(usize, String)> {
    let mut names = match host {
        Host::Tcp(name) => vec![name.clone()],
        #[cfg(unix)]
        Host::Unix(path) => vec![path.display().to_string()],
    };
    if SOCKET_DIRS.contains(&names[0].as_str()) {
        names.push("localhost".to_owned());
    }
    names.into_iter().map(|name| (at, name)).collect()
}

#[cfg(unix)]
fn is_open_to_others(meta: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    meta.permissions().mode() & 0o077 != 0
}

#[cfg(not(unix))]
fn is_open_to_others(_: &std::fs::Metadata) -> bool {
    false
}

/// The password of the first line that matches host, port, database and user.
fn password(text: &str, wanted: [&str; 4]) -> Option<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(fields).find_map(|fields| match fields.split_at_checked(4) {
        Some((keys, [password, ..])) => {
            let fits = keys.iter().zip(wanted).all(|(key, wanted)| key == "*" || key == wanted);
            fits.then(|| password.clone())
        }
        _ => None,
    })
}

fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut field, mut chars) = (Vec::new(), String::new(), line.chars());
    while let Some(c) = chars.next() {
        match c {
            ':' if fields.len() < 4 => fields.push(std::mem::take(&mut field)),
            '\\' => field.extend(chars.next()),
            c => field.push(c),
        }
    }
    fields.push(field);
    fields
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn chosen(url: &str, file: Option<&str>, env: &[(&str, &str)]) -> String {
        let config: Config = url.parse().unwrap();
        let find = |name: &str| env.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
        format!("{:?}", Password::choose(&config, file.map(PathBuf::from), None, find))
    }

    #[test]
    fn the_url_comes_before_the_environment_and_that_before_password_files() {
        let (with, without) = ("postgres://ann:secret@db/flows", "postgres://ann@db/flows");
        let all = [("PGPASSWORD", "secret"), ("PGPASSFILE", "/pass"), ("HOME", "/home/ann")];
        assert_eq!(chosen(with, None, &all), "OfUrl");
        assert_eq!(chosen(without, None, &all), "Given(_)", "the password is not shown");
        assert_eq!(chosen(without, Some("/secret/pw"), &all), "File(\"/secret/pw\")");
        assert_eq!(chosen(without, None, &all[1..]), "PassFile(\"/pass\")");
        assert_eq!(chosen(without, None, &all[2..]), "PassFile(\"/home/ann/.pgpass\")");
        assert_eq!(chosen(without, None, &[]), "OfUrl");
    }

    #[test]
    fn the_first_matching_line_has_the_password() {
        let text = "# a comment\nother:5432:*:ann:no\n*:5432:flows:ann:pa\\:ss\\\\word:x\n*:*:*:*:any";
        assert_eq!(password(text, ["db", "5432", "flows", "ann"]).as_deref(), Some("pa:ss\\word:x"));
        assert_eq!(password(text, ["db", "5433", "flows", "ann"]).as_deref(), Some("any"));
        assert_eq!(password("db:5432:flows", ["db", "5432", "flows", "ann"]), None);
        assert_eq!(password("a\\:b:1:x:y:odd host", ["a:b", "1", "x", "y"]).as_deref(), Some("odd host"));
    }

    #[test]
    fn a_socket_in_the_usual_place_is_also_called_localhost() {
        let config: Config = "host=/run/postgresql,db.test port=1,2 user=ann dbname=flows".parse().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pass");
        for (line, found) in [
            ("localhost:1:flows:ann:one", Some("one")),
            ("/run/postgresql:1:flows:ann:two", Some("two")),
            ("db.test:2:flows:ann:three", Some("three")),
            ("db.test:1:flows:ann:four", None),
        ] {
            write(&file, line, 0o600);
            assert_eq!(in_pass_file(&config, &file).as_deref(), found.map(str::as_bytes), "{line}");
        }
        write(&file, "*:*:*:*:any", 0o640);
        assert_eq!(in_pass_file(&config, &file), None, "other users can read it");
        assert_eq!(in_pass_file(&config, dir.path()), None, "a directory");
    }

    fn write(file: &Path, text: &str, mode: u32) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(file, text).unwrap();
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
    }
}
