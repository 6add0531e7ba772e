//! Why a server cannot be reached, and what to do about it.

use std::error::Error as Cause;
use std::io;

use eddyline::Error;
use tokio_rustls::rustls;

use super::trouble::Trouble;

/// The error of a call without a response.
pub fn unreached(url: &str, error: &Error) -> Trouble {
    let chain = causes(error);
    if let Some(address) = url.strip_prefix("https://")
        && chain.iter().any(|cause| is_no_tls(*cause))
    {
        return Trouble::unreachable(format!("the server at {url} does not speak TLS"))
            .help(format!("it may speak plain HTTP: try --url http://{address}"));
    }
    if let Some(address) = url.strip_prefix("http://")
        && chain.iter().any(|cause| is_no_http(*cause))
    {
        return Trouble::unreachable(format!("the server at {url} does not speak plain HTTP"))
            .help(format!("it may speak TLS: try --url https://{address}"));
    }
    let help = format!("is there an Eddyline server at {url}? Its address is set with --url or EDDY_URL");
    match error {
        Error::Connect { .. } => {}
        Error::Interrupted { .. } | Error::Decode { .. } => return Trouble::unavailable(error.to_string()).help(help),
        _ => return Trouble::unavailable(error.to_string()),
    }
    // The root cause, such as "Connection refused", says more than the outermost error, "client error".
    let why = chain.last().map(ToString::to_string).unwrap_or_default();
    let help = match why.contains("certificate") {
        true => "set SSL_CERT_FILE to a PEM file with the authority that issued the server's certificate",
        false => "start one with `eddy dev`, or set its address with --url or EDDY_URL",
    };
    Trouble::unreachable(format!("no server answers at {url}: {why}")).help(help)
}

fn causes(error: &Error) -> Vec<&(dyn Cause + 'static)> {
    std::iter::successors(Some(error as &(dyn Cause + 'static)), |cause| behind(*cause)).collect()
}

/// The source of an error. `io::Error::source` skips the error that it wraps, so that one is read directly.
fn behind<'a>(cause: &'a (dyn Cause + 'static)) -> Option<&'a (dyn Cause + 'static)> {
    match cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(held) => Some(held),
        None => cause.source(),
    }
}

/// The response does not begin like TLS.
fn is_no_tls(cause: &(dyn Cause + 'static)) -> bool {
    let wrong = cause.downcast_ref::<rustls::Error>();
    matches!(wrong, Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)))
}

/// The response is not HTTP: most likely a TLS alert.
fn is_no_http(cause: &(dyn Cause + 'static)) -> bool {
    cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse)
}
