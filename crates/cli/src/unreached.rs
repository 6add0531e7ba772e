//! Why there is no talking to a server, and what to do about it.

use std::error::Error as Cause;
use std::io;

use eddyline::Error;
use tokio_rustls::rustls;

use super::trouble::Trouble;

/// Of a call that was not answered.
pub fn unreached(url: &str, error: &Error) -> Trouble {
    let chain = causes(error);
    if let Some(address) = url.strip_prefix("https://")
        && chain.iter().any(|cause| is_no_tls(*cause))
    {
        return Trouble::unreachable(format!("what answers at {url} does not speak TLS"))
            .help(format!("it may speak plain HTTP: try --url http://{address}"));
    }
    if let Some(address) = url.strip_prefix("http://")
        && chain.iter().any(|cause| is_no_http(*cause))
    {
        return Trouble::unreachable(format!("what answers at {url} does not speak HTTP"))
            .help(format!("it may speak TLS: try --url https://{address}"));
    }
    let Error::Connect { .. } = error else { return Trouble::unavailable(error.to_string()) };
    // "Connection refused", at the bottom, says more than "client error", at the top.
    let why = chain.last().map(ToString::to_string).unwrap_or_default();
    let help = match why.contains("certificate") {
        true => "name the authority that its certificate is from: a PEM file, in SSL_CERT_FILE",
        false => "start one with `eddy dev`, or say where it is with --url or EDDY_URL",
    };
    Trouble::unreachable(format!("no server answers at {url}: {why}")).help(help)
}

fn causes(error: &Error) -> Vec<&(dyn Cause + 'static)> {
    std::iter::successors(Some(error as &(dyn Cause + 'static)), |cause| behind(*cause)).collect()
}

/// Of an `io::Error` the error that it holds, which it does not name as its source.
fn behind<'a>(cause: &'a (dyn Cause + 'static)) -> Option<&'a (dyn Cause + 'static)> {
    match cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(held) => Some(held),
        None => cause.source(),
    }
}

/// The first bytes that came back are not those of TLS.
fn is_no_tls(cause: &(dyn Cause + 'static)) -> bool {
    let wrong = cause.downcast_ref::<rustls::Error>();
    matches!(wrong, Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)))
}

/// They are not those of HTTP: an alert of TLS, most likely.
fn is_no_http(cause: &(dyn Cause + 'static)) -> bool {
    cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse)
}
