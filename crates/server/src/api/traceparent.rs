//! The W3C trace context of a run: `00-<trace>-<span>-<flags>`.

use axum::http::HeaderMap;

use super::failure::Failure;

const HEADER: &str = "traceparent";
/// Future versions may be longer.
const LONGEST: usize = 256;

/// The trace context from the body, or else from the header. One in the body must be valid. Headers are added by
/// proxies, so an invalid one is ignored.
pub(crate) fn of(body: Option<String>, headers: &HeaderMap) -> Result<Option<String>, Failure> {
    match body {
        Some(written) if is_traceparent(&written) => Ok(Some(written)),
        Some(_) => Err(Failure::bad(
            "`traceparent` is invalid: expected 00-<trace: 32 hex digits>-<span: 16 hex digits>-<flags: 2 hex digits>",
        )),
        None => {
            let mut sent = headers.get_all(HEADER).iter();
            let alone = sent.next().filter(|_| sent.next().is_none()).and_then(|value| value.to_str().ok());
            Ok(alone.map(str::trim).filter(|written| is_traceparent(written)).map(str::to_owned))
        }
    }
}

fn is_traceparent(written: &str) -> bool {
    let hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let id = |part: &str, length: usize| hex(part, length) && part.bytes().any(|byte| byte != b'0');
    let mut parts = written.splitn(5, '-');
    let mut next = || parts.next().unwrap_or("");
    let (version, trace, span, flags) = (next(), next(), next(), next());
    let more = parts.next();
    hex(version, 2)
        && version != "ff"
        && id(trace, 32)
        && id(span, 16)
        && hex(flags, 2)
        && (more.is_none() || version != "00")
        && written.len() <= LONGEST
        && written.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_w3c_takes_is_taken_and_nothing_else() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert!(is_traceparent(good));
        assert!(is_traceparent(&format!("cc{}-what-comes", &good[2..])));
        for bad in [
            "",
            "x",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        ] {
            assert!(!is_traceparent(bad), "{bad}");
        }
    }
}
