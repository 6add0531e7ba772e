//! TLS connections to the database, with rustls.

use std::io;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio_postgres::config::SslNegotiation;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::settings::{Settings, TlsMode};
use crate::error::{Result, StoreError};

/// Creates the TLS connector. Whether it is used is decided by the driver, from `ssl_mode`.
pub(super) fn connector(settings: &Settings) -> Result<MakeRustlsConnect> {
    let provider = Arc::new(ring::default_provider());
    let unavailable = |error: &dyn std::fmt::Display| StoreError::Unavailable(format!("TLS can't be set up: {error}"));
    let trusted = || -> Result<Arc<WebPkiServerVerifier>> {
        let built = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(settings)?), provider.clone()).build();
        built.map_err(|error| unavailable(&error))
    };
    let verifier: Arc<dyn ServerCertVerifier> = match settings.tls {
        TlsMode::Off | TlsMode::Unverified => Arc::new(Lenient { provider: provider.clone(), authority: None }),
        TlsMode::Authority => Arc::new(Lenient { provider: provider.clone(), authority: Some(trusted()?) }),
        TlsMode::Full => trusted()?,
    };
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| unavailable(&error))?;
    let mut config = builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    if settings.config.get_ssl_negotiation() == SslNegotiation::Direct {
        config.alpn_protocols = vec![b"postgresql".to_vec()];
    }
    Ok(MakeRustlsConnect::new(config))
}

fn roots(settings: &Settings) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(path) = &settings.root_cert else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return match roots.is_empty() {
            true => Err(StoreError::Unavailable(
                "this system has no trusted certificates: set sslrootcert to a file with the authority's certificate"
                    .to_owned(),
            )),
            false => Ok(roots),
        };
    };
    let bad = |why: String| StoreError::Unavailable(format!("sslrootcert {}: {why}", path.display()));
    for cert in CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))? {
        roots.add(cert.map_err(|error| bad(error.to_string()))?).map_err(|error| bad(error.to_string()))?;
    }
    match roots.is_empty() {
        true => Err(bad("it contains no certificate".to_owned())),
        false => Ok(roots),
    }
}

/// What to do about a failed handshake.
pub(super) fn advice(error: &tokio_postgres::Error) -> Option<&'static str> {
    use std::error::Error as _;
    let source = error.source()?;
    if source.to_string().contains("server does not support TLS") {
        return Some("enable ssl on the server, or allow unencrypted connections with sslmode=prefer");
    }
    match source.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref::<Error>()? {
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            Some("set sslrootcert to a file with the certificate of the server's authority")
        }
        Error::InvalidCertificate(why) if is_about_name(why) => {
            Some("connect to a host name in the certificate, or verify only the authority with sslmode=verify-ca")
        }
        Error::InvalidCertificate(CertificateError::Other(why)) if why.to_string().contains("CaUsedAsEndEntity") => {
            Some("the server's certificate is that of an authority: give it one with CA:FALSE")
        }
        _ => None,
    }
}

fn is_about_name(error: &CertificateError) -> bool {
    matches!(error, CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. })
}

/// Verifies less than `verify-full`, as in libpq: `prefer` and `require` only encrypt, `verify-ca` accepts a certificate
/// for any host.
#[derive(Debug)]
struct Lenient {
    provider: Arc<CryptoProvider>,
    /// Verifies the certificate, for `verify-ca`.
    authority: Option<Arc<WebPkiServerVerifier>>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        cert: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, Error> {
        let Some(authority) = &self.authority else { return Ok(ServerCertVerified::assertion()) };
        match authority.verify_server_cert(cert, between, name, ocsp, now) {
            // The name is verified last.
            Err(Error::InvalidCertificate(why)) if is_about_name(&why) => Ok(ServerCertVerified::assertion()),
            checked => checked,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
