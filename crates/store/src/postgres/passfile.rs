//! Passwords from a file, as libpq reads them: lines of `host:port:database:user:password`.

use std::path::PathBuf;

use tokio_postgres::config::{Config, Host};

/// The password for a connection, from the file that is named, `PGPASSFILE` or `~/.pgpass`.
pub(super) fn find(config: &Config, named: Option<PathBuf>) -> Option<String> {
    let path = named.or_else(|| std::env::var_os("PGPASSFILE").map(PathBuf::from)).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(PathBuf::from(home).join(".pgpass"))
    })?;
    let text = std::fs::read_to_string(&path).ok()?;
    if is_open_to_others(&path) {
        tracing::warn!(path = %path.display(), "the password file is ignored: others may read it (chmod 600)");
        return None;
    }
    let host = match config.get_hosts().first() {
        Some(Host::Tcp(host)) => host.clone(),
        _ => "localhost".to_owned(),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432).to_string();
    let user = config.get_user().unwrap_or_default();
    let database = config.get_dbname().unwrap_or(user);
    password(&text, [&host, &port, database, user])
}

#[cfg(unix)]
fn is_open_to_others(path: &std::path::Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o077 != 0)
}

#[cfg(not(unix))]
fn is_open_to_others(_: &std::path::Path) -> bool {
    false
}

/// The password of the first line that fits host, port, database and user.
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
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_fits_has_the_password() {
        let text = "# a comment\nother:5432:*:ann:no\n*:5432:flows:ann:pa\\:ss\\\\word:x\n*:*:*:*:any";
        assert_eq!(password(text, ["db", "5432", "flows", "ann"]).as_deref(), Some("pa:ss\\word:x"));
        assert_eq!(password(text, ["db", "5433", "flows", "ann"]).as_deref(), Some("any"));
        assert_eq!(password("db:5432:flows", ["db", "5432", "flows", "ann"]), None);
    }
}
