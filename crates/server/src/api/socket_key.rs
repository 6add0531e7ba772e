//! API keys of WebSocket clients that cannot set headers, such as browsers: the key travels as a subprotocol.

use axum::http::{HeaderMap, header};
use eddyline_protocol::KEY_SUBPROTOCOL;

/// Longer keys are not decoded.
const MAX_ENCODED_BYTES: usize = 1 << 10;

/// The key among the offered subprotocols: `eddyline.v1, eddyline.key.<base64url>`.
pub(super) fn of(headers: &HeaderMap) -> Option<String> {
    let offered = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    let encoded =
        offered.flat_map(|list| list.split(',')).find_map(|name| name.trim().strip_prefix(KEY_SUBPROTOCOL))?;
    String::from_utf8(decode(encoded)?).ok()
}

/// Base64 with the alphabet for URLs, without padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    if text.len() > MAX_ENCODED_BYTES || text.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut gathered, mut bits) = (0u32, 0);
    for c in text.bytes() {
        let digit = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        gathered = (gathered << 6) | u32::from(digit);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((gathered >> bits) as u8);
            gathered &= (1 << bits) - 1;
        }
    }
    // Bits that are left over must be zero: each key has one encoding.
    (gathered == 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_key_is_found_among_subprotocols() {
        for (offered, key) in [
            ("eddyline.v1, eddyline.key.ZWRkeV9hYmM", Some("eddy_abc")),
            ("eddyline.key.ZWRkeV9hYmM,eddyline.v1", Some("eddy_abc")),
            ("eddyline.v1, eddyline.key.ZWRkeQ", Some("eddy")),
            ("eddyline.v1, eddyline.key.ZWRkeR", None),
            ("eddyline.v1, eddyline.key.ZWRkeQ==", None),
            ("eddyline.v1, eddyline.key.Z", None),
            ("eddyline.v1, eddyline.key._-_-", None),
            ("eddyline.v1", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(offered));
            assert_eq!(of(&headers).as_deref(), key, "{offered}");
        }
        assert_eq!(of(&HeaderMap::new()), None);
    }
}
