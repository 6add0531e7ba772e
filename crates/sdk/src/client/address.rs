//! Server addresses, paths and queries.

use std::fmt::Write;

use http::Uri;

use crate::error::Error;

/// The address of a server: scheme, host and, behind a proxy, a prefix of every path.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    /// Without a trailing slash.
    pub url: String,
    pub tls: bool,
    pub host: String,
    pub port: u16,
    /// Host and port as written: the `Host` of requests.
    pub authority: String,
    prefix: String,
}

impl Address {
    pub fn parse(text: &str) -> Result<Address, Error> {
        let wrong = |problem: &str| {
            Error::Config(format!(
                "\"{text}\" is not a server address: {problem}; expected one such as http://host:7070"
            ))
        };
        let uri: Uri = text.trim().parse().map_err(|error| wrong(&format!("{error}")))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            Some(other) => return Err(wrong(&format!("{other}:// is neither http:// nor https://"))),
            None => return Err(wrong("it does not begin with http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("it must not contain a key"));
        }
        // Reject invalid ports instead of falling back to the default. Port 0 cannot be connected to.
        let port = authority.as_str().strip_prefix(authority.host()).and_then(|rest| rest.strip_prefix(':'));
        let is_port = |port: &str| {
            port.bytes().all(|digit| digit.is_ascii_digit()) && authority.port_u16().is_some_and(|port| port > 0)
        };
        if port.is_some_and(|port| !is_port(port)) {
            return Err(wrong("its port is not a number from 1 to 65535"));
        }
        if uri.query().is_some() {
            return Err(wrong("it has a query"));
        }
        let prefix = uri.path().trim_end_matches('/').to_owned();
        let scheme = if tls { "https" } else { "http" };
        Ok(Address {
            url: format!("{scheme}://{authority}{prefix}"),
            tls,
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            authority: authority.to_string(),
            prefix,
        })
    }

    pub fn uri(&self, path: &str, query: &[(&str, String)]) -> Result<Uri, Error> {
        let scheme = if self.tls { "https" } else { "http" };
        self.at(scheme, path, query)
    }

    /// The URI of a WebSocket.
    pub fn socket_uri(&self, path: &str) -> Result<Uri, Error> {
        self.at(if self.tls { "wss" } else { "ws" }, path, &[])
    }

    fn at(&self, scheme: &str, path: &str, query: &[(&str, String)]) -> Result<Uri, Error> {
        let mut whole = format!("{}{}", self.prefix, encoded(path, |c| keeps(c) || b":@/%!$&'()*+,;=".contains(&c)));
        for (at, (name, value)) in query.iter().enumerate() {
            let _ = write!(whole, "{}{}={}", if at == 0 { '?' } else { '&' }, segment(name), segment(value));
        }
        Uri::builder()
            .scheme(scheme)
            .authority(self.authority.as_str())
            .path_and_query(whole)
            .build()
            .map_err(|error| Error::Config(format!("invalid path {path}: {error}")))
    }
}

/// A name as one segment of a path: encodes slashes, percent signs and spaces.
pub fn segment(name: &str) -> String {
    encoded(name, keeps)
}

/// A path without what follows its resource, for messages: ids and tokens do not belong there.
pub(crate) fn route(path: &str) -> String {
    match path.match_indices('/').nth(2) {
        Some((at, _)) => format!("{}/…", &path[..at]),
        None => path.to_owned(),
    }
}

fn keeps(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

fn encoded(text: &str, keeps: impl Fn(u8) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if keeps(byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_maybe_a_prefix() {
        let address = Address::parse("https://flows.example.com/eddy/").unwrap();
        assert_eq!((address.host.as_str(), address.port, address.tls), ("flows.example.com", 443, true));
        let uri = address.uri("/v1/runs", &[("flow", "a b&c".to_owned()), ("limit", "5".to_owned())]).unwrap();
        assert_eq!(uri.to_string(), "https://flows.example.com/eddy/v1/runs?flow=a%20b%26c&limit=5");
        let local = Address::parse("http://[::1]:7070").unwrap();
        assert_eq!((local.host.as_str(), local.port), ("::1", 7070));
        assert_eq!(local.socket_uri("/v1/workers/connect").unwrap().to_string(), "ws://[::1]:7070/v1/workers/connect");
    }

    #[test]
    fn names_of_activations_stand_in_paths_written_either_way() {
        let address = Address::parse("http://127.0.0.1:7070").unwrap();
        for path in ["/v1/runs/x/steps/each[3].price/skip", "/v1/runs/x/steps/each%5B3%5D.price/skip"] {
            let uri = address.uri(path, &[]).unwrap();
            assert_eq!(uri.path(), "/v1/runs/x/steps/each%5B3%5D.price/skip");
        }
        assert_eq!(segment("a/b%"), "a%2Fb%25");
        assert_eq!(route("/v1/gates/secret"), "/v1/gates/…");
    }

    #[test]
    fn what_is_not_an_address_is_told_so() {
        for text in ["", "localhost:7070", "ftp://x", "http://", "http://key@host", "http://host/?x=1", "/v1"] {
            assert!(matches!(Address::parse(text), Err(Error::Config(_))), "{text}");
        }
        for port in ["99999", "abc", "-1", "", "+80", "0", "00"] {
            for host in ["127.0.0.1", "[::1]", "host"] {
                let text = format!("http://{host}:{port}/eddy");
                assert!(matches!(Address::parse(&text), Err(Error::Config(_))), "{text}");
            }
        }
    }
}
