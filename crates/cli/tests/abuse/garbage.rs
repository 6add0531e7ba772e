//! Input that is not HTTP.

use crate::bystander::undisturbed;
use crate::raw::{say, status};

#[tokio::test]
async fn bytes_that_are_no_request() {
    undisturbed(&["--header-timeout", "1s"], async |eddy| {
        let host = eddy.addr;
        let noise: Vec<u8> = (0..100_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let garbage: Vec<Vec<u8>> = vec![
            noise,
            vec![0; 10_000],
            b"\r\n\r\n\r\n\r\n".to_vec(),
            b"GET / HTTP/9.9\r\n\r\n".to_vec(),
            b"GET\r\n\r\n".to_vec(),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            // The beginning of a TLS handshake.
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
            format!("GET /healthz HTTP/1.1\r\nhost: {host}\r\nx\x00y: 1\r\n\r\n").into_bytes(),
            format!("POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-length: -1\r\n\r\n").into_bytes(),
            format!("POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-length: 99999999999999999999999\r\n\r\n")
                .into_bytes(),
            format!("POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n[]")
                .into_bytes(),
            format!("POST /v1/events HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n")
                .into_bytes(),
            format!(
                "POST /v1/events HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n"
            )
            .into_bytes(),
        ];
        for bytes in garbage {
            let said = say(eddy.addr, &bytes).await;
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]).into_owned();
            assert!(matches!(status(&said), Some(400..=499) | None), "{shown:?}: {said}");
        }
    })
    .await;
}
