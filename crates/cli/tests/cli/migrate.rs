//! Tables of a PostgreSQL store: `eddy migrate`, and `serve --no-migrate`.

use crate::postgres;
use crate::rig::{command, eddy, finish};

#[test]
fn migrate_creates_the_tables_that_serve_does_not() {
    let (dir, url) = (tempfile::tempdir().unwrap(), postgres::fresh_url());
    let refused = eddy(dir.path(), &["serve", "--store", &url, "--no-migrate", "--listen", "127.0.0.1:0"]).bad(1);
    assert!(refused.err.contains("has no tables") && refused.err.contains("eddy migrate --store URL"), "{refused:?}");
    let first = eddy(dir.path(), &["migrate", "--store", &url]).good();
    assert!(first.out.starts_with("schema test_") && first.out.contains(": created the tables, version "), "{first:?}");
    let mut again = command();
    again.args(["migrate", "--json"]).env("EDDY_STORE", &url);
    let again = finish(again).good().json();
    assert_eq!(again["from"], again["to"]);
    let up_to_date = eddy(dir.path(), &["migrate", "--store", &url]).good();
    assert!(up_to_date.out.contains("up to date"), "{up_to_date:?}");
}

#[test]
fn migrate_says_what_is_wrong_without_showing_a_password() {
    let dir = tempfile::tempdir().unwrap();
    let embedded = eddy(dir.path(), &["migrate", "--store", "sqlite:here"]).good();
    assert!(embedded.out.contains("updates itself"), "{embedded:?}");
    assert!(!dir.path().join("here").exists());
    for url in ["postgres://ann:s3cret@127.0.0.1:1/none", "postgres://ann:s3@cret@127.0.0.1:1/none"] {
        let refused = eddy(dir.path(), &["migrate", "--store", url]).bad(5);
        assert!(!refused.err.contains("s3") && !refused.err.contains("cret"), "{refused:?}");
        let mut help = command();
        help.args(["migrate", "--help"]).env("EDDY_STORE", url);
        assert!(!finish(help).good().out.contains("s3"));
    }
    eddy(dir.path(), &["migrate", "--store", "redis://127.0.0.1"]).bad(2);
}
