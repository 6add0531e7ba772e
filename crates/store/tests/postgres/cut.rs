//! A proxy that loses answers: what is sent to the server arrives, and what it says is thrown away.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};

pub struct Proxy {
    pub url: String,
    loses: Arc<AtomicBool>,
}

impl Proxy {
    /// None if the server is not on a socket in a directory.
    pub async fn before(url: &str) -> Option<Proxy> {
        let host = url.split("host=").nth(1)?.split('&').next()?;
        let socket = PathBuf::from(host).join(".s.PGSQL.5432");
        let rest = url.replacen(&format!("host={host}&"), "", 1);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url = rest.replacen("@/", &format!("@{address}/"), 1);
        let loses = Arc::new(AtomicBool::new(false));
        let asked = loses.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = UnixStream::connect(&socket).await.unwrap();
                tokio::spawn(pass_on(client, server, asked.clone()));
            }
        });
        Some(Proxy { url, loses })
    }

    pub fn lose_answers(&self, lose: bool) {
        self.loses.store(lose, Ordering::SeqCst);
    }
}

async fn pass_on(client: TcpStream, server: UnixStream, loses: Arc<AtomicBool>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let sending = tokio::spawn(async move {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
            if to_server.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    });
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
        if loses.load(Ordering::SeqCst) {
            // The server is done with it by the time it answers; a moment for what follows.
            tokio::time::sleep(Duration::from_millis(20)).await;
            break;
        }
        if to_client.write_all(&buffer[..read]).await.is_err() {
            break;
        }
    }
    sending.abort();
}
