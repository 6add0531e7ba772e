//! Encryption: who is trusted, and what happens if there is none.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::private::{Private, TRUST};
use crate::{open, refused};

/// A server with a certificate for `localhost`, and files with its authority's certificate and with another's.
struct Encrypted {
    server: Private,
    _dir: tempfile::TempDir,
    authority: PathBuf,
    stranger: PathBuf,
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl Encrypted {
    fn start(hba: &str) -> Encrypted {
        let (ours, other) = (authority("ours"), authority("a stranger"));
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &ours).unwrap();
        let server = Private::start(hba, "", Some((cert.pem(), key.serialize_pem())));
        let dir = tempfile::tempdir().unwrap();
        let (authority, stranger) = (dir.path().join("authority.pem"), dir.path().join("stranger.pem"));
        std::fs::write(&authority, ours.pem()).unwrap();
        std::fs::write(&stranger, other.pem()).unwrap();
        Encrypted { server, _dir: dir, authority, stranger }
    }

    /// Whether all connections of a store are encrypted.
    async fn is_encrypted(&self, url: &str) -> bool {
        let name = format!("of-{}", uuid::Uuid::new_v4());
        let store = open(&format!("{url}&application_name={name}")).await.unwrap();
        let sql = "SELECT count(*), count(*) FILTER (WHERE s.ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) \
                   WHERE a.application_name = $1";
        let row = self.server.client().await.query_one(sql, &[&name]).await.unwrap();
        let (all, encrypted): (i64, i64) = (row.get(0), row.get(1));
        drop(store);
        assert!(all >= 2, "one for statements, one for hints");
        assert!(encrypted == 0 || encrypted == all);
        encrypted == all
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_verified_by_its_authority_and_its_name() {
    let encrypted = Encrypted::start(TRUST);
    let url = |host: &str, mode: &str, file: &PathBuf| {
        encrypted.server.url("eddy", host, &format!("sslmode={mode}&sslrootcert={}", file.display()))
    };
    assert!(encrypted.is_encrypted(&url("localhost", "verify-full", &encrypted.authority)).await);
    assert!(encrypted.is_encrypted(&url("127.0.0.1", "verify-ca", &encrypted.authority)).await, "for any name");
    for (host, mode, file, words) in [
        ("localhost", "verify-full", &encrypted.stranger, ["UnknownIssuer", "sslrootcert"]),
        ("localhost", "verify-ca", &encrypted.stranger, ["UnknownIssuer", "sslrootcert"]),
        ("localhost", "require", &encrypted.stranger, ["UnknownIssuer", "sslrootcert"]),
        ("127.0.0.1", "verify-full", &encrypted.authority, ["not valid for name", "localhost"]),
        ("127.0.0.1", "verify-full", &encrypted.authority, ["127.0.0.1", "sslmode=verify-ca"]),
    ] {
        let why = refused(&url(host, mode, file)).await;
        assert!(words.iter().all(|word| why.contains(word)), "{host} {mode}: {why}");
    }
    let systems = refused(&encrypted.server.url("eddy", "localhost", "sslmode=verify-full")).await;
    assert!(systems.contains("sslrootcert"), "the system trusts another: {systems}");
    let missing = refused(&url("localhost", "verify-full", &PathBuf::from("/none.pem"))).await;
    assert!(missing.contains("sslrootcert /none.pem"), "{missing}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_verification_it_is_encrypted_where_it_can_be() {
    let hba = "local all all trust\nhostnossl all plain 127.0.0.1/32 trust\nhostssl all sealed 127.0.0.1/32 trust\n\
               host all eddy 127.0.0.1/32 trust\n";
    let encrypted = Encrypted::start(hba);
    let roles = "CREATE ROLE plain SUPERUSER LOGIN; CREATE ROLE sealed SUPERUSER LOGIN";
    encrypted.server.client().await.batch_execute(roles).await.unwrap();
    let url = |user: &str, mode: &str| encrypted.server.url(user, "127.0.0.1", &format!("sslmode={mode}"));
    assert!(encrypted.is_encrypted(&url("eddy", "require")).await);
    assert!(encrypted.is_encrypted(&url("eddy", "prefer")).await);
    assert!(!encrypted.is_encrypted(&url("eddy", "disable")).await);
    assert!(encrypted.is_encrypted(&url("sealed", "prefer")).await);
    assert!(!encrypted.is_encrypted(&url("plain", "prefer")).await, "a server that wants it unencrypted");
    let why = refused(&url("plain", "require")).await;
    assert!(why.contains("pg_hba.conf"), "{why}");
    let why = refused(&url("sealed", "disable")).await;
    assert!(why.contains("no encryption"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_encryption_is_refused_unless_that_is_allowed() {
    let server = Private::start(TRUST, "", None);
    for mode in ["require", "verify-full"] {
        let why = refused(&server.url("eddy", "localhost", &format!("sslmode={mode}"))).await;
        assert!(why.contains("does not support TLS") && why.contains("sslmode=prefer"), "{mode}: {why}");
    }
    for mode in ["prefer", "disable"] {
        open(&server.url("eddy", "localhost", &format!("sslmode={mode}"))).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_is_bound_to_the_encryption() {
    let hba = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
    let encrypted = Encrypted::start(hba);
    let role = "CREATE ROLE ann SUPERUSER LOGIN PASSWORD 's3cret'";
    encrypted.server.client().await.batch_execute(role).await.unwrap();
    let url = |parameters: &str| encrypted.server.url("ann:s3cret", "localhost", parameters);
    let trusted = format!("sslrootcert={}", encrypted.authority.display());
    for parameters in ["sslmode=verify-full&channel_binding=require", "sslmode=verify-full&channel_binding=disable"] {
        assert!(encrypted.is_encrypted(&url(&format!("{parameters}&{trusted}"))).await);
    }
    assert!(!encrypted.is_encrypted(&url("sslmode=disable")).await, "scram-sha-256 needs no encryption");
    let why = refused(&url("sslmode=disable&channel_binding=require")).await;
    assert!(why.contains("channel binding"), "{why}");
}
