//! Where passwords come from, and that they are not shown.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use eddyline_store::Store;

use crate::private::Private;
use crate::{open, refused, until};

const HBA: &str = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n";

async fn server() -> Private {
    let server = Private::start(HBA, "", None);
    let role = "CREATE ROLE ann SUPERUSER LOGIN PASSWORD 'pa:ss\\word'";
    server.client().await.batch_execute(role).await.unwrap();
    server
}

fn write(file: &Path, text: &str, mode: u32) {
    std::fs::write(file, text).unwrap();
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_comes_from_the_url_or_from_a_file_that_others_cannot_read() {
    let (server, dir) = (server().await, tempfile::tempdir().unwrap());
    let store = open(&server.url("ann:pa%3Ass%5Cword", "127.0.0.1", "schema=a")).await.unwrap();
    assert!(!format!("{store:?}").contains("word"), "{store:?}");
    let why = refused(&server.url("ann:wr0ng", "127.0.0.1", "schema=a")).await;
    assert!(why.contains("28P01") && why.contains("password file") && !why.contains("wr0ng"), "{why}");

    let file = dir.path().join("pass");
    let url = server.url("ann", "127.0.0.1", &format!("schema=a&passfile={}", file.display()));
    let line = format!("elsewhere:*:*:*:no\n127.0.0.1:{}:postgres:ann:pa\\:ss\\\\word\n*:*:*:*:no\n", server.port);
    write(&file, &line, 0o600);
    open(&url).await.unwrap();
    write(&file, &line, 0o644);
    let why = refused(&url).await;
    assert!(why.contains("asks for a password"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_file_is_read_again_for_each_new_connection() {
    let (server, dir) = (server().await, tempfile::tempdir().unwrap());
    let file = dir.path().join("password");
    let url = server.url("ann", "127.0.0.1", &format!("password_file={}", file.display()));
    let why = refused(&url).await;
    assert!(why.contains("password_file") && why.contains("password"), "{why}");
    // As orchestrators mount secrets.
    write(&file, "pa:ss\\word\n", 0o444);
    let store = open(&url).await.unwrap();
    until("it listens", async || store.hears_others() == Some(true)).await;
    write(&file, "n3w", 0o600);
    let rotate = "ALTER ROLE ann PASSWORD 'n3w'; SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                  WHERE usename = 'ann'";
    server.client().await.batch_execute(rotate).await.unwrap();
    store.count_runs(&crate::story::ns(), &Default::default()).await.unwrap();
    until("it listens again", async || store.hears_others() == Some(true)).await;
}

/// Opens the store in a process with its own environment.
fn opens(url: &str, env: &[(&str, &str)]) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "passwords::child_that_opens_the_store", "--ignored"]).env("EDDY_TEST_URL", url);
    command.env_remove("PGPASSWORD").env_remove("PGPASSFILE").env("HOME", "/nonexistent");
    let output = command.envs(env.iter().copied()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("1 passed") || said.contains("1 failed"), "{said}");
    for secret in ["pa:ss", "wrong word"] {
        assert!(!said.contains(secret), "a password is shown: {said}");
    }
    output.status.success()
}

#[tokio::test]
#[ignore = "is started by the next test"]
async fn child_that_opens_the_store() {
    let url = std::env::var("EDDY_TEST_URL").unwrap();
    if let Err(error) = open(&url).await {
        panic!("{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_comes_from_the_environment() {
    let (server, dir) = (server().await, tempfile::tempdir().unwrap());
    let url = server.url("ann", "127.0.0.1", "schema=a");
    assert!(!opens(&url, &[]));
    assert!(opens(&url, &[("PGPASSWORD", "pa:ss\\word")]));
    assert!(!opens(&url, &[("PGPASSWORD", "wrong word")]));
    let (home, line) = (dir.path().join(".pgpass"), "*:*:*:ann:pa\\:ss\\\\word\n");
    write(&home, line, 0o600);
    assert!(opens(&url, &[("HOME", dir.path().to_str().unwrap())]));
    assert!(opens(&url, &[("PGPASSFILE", home.to_str().unwrap())]));
    assert!(!opens(&url, &[("PGPASSWORD", "wrong word"), ("PGPASSFILE", home.to_str().unwrap())]));
    write(&home, line, 0o640);
    assert!(!opens(&url, &[("PGPASSFILE", home.to_str().unwrap())]), "others can read it");
}
