//! A link over a WebSocket.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{ApiError, CLOSE_UNAUTHORIZED, Code, FromServer};
use futures_util::{Sink, SinkExt, Stream};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{Connector, MaybeTlsStream, WebSocketStream, client_async_tls_with_config};

use super::link::{Cut, Hello, Link, Opened, ToServer};
use crate::client::{ANSWER, CONNECT, Client, refusal};
use crate::error::{Error, Refusal};

const PATH: &str = "/v1/workers/connect";
/// The largest message from the server: a frame of many tasks with the largest inputs.
const MAX_MESSAGE_BYTES: usize = 128 << 20;
/// How much is read at a time. The whole buffer is zeroed before each read, however little there is to read: the
/// default of 128 KiB costs more than all other work on a message.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// How long closing a connection may take.
const CLOSE: Duration = Duration::from_secs(1);

/// Why there is no socket.
#[derive(Debug)]
pub(crate) enum NoSocket {
    /// The server, or a proxy in front of it, does not support WebSockets.
    NotOffered(String),
    Cut(Cut),
}

pub(crate) async fn open(client: &Client, hello: &Hello) -> Result<Opened, NoSocket> {
    let shaking_hands = tokio::time::timeout(ANSWER, shake_hands(client));
    let socket =
        shaking_hands.await.unwrap_or_else(|_| Err(NoSocket::Cut(Cut::lost("the server does not respond"))))?;
    let mut link = SocketLink { socket, outgoing: VecDeque::new(), unflushed: false };
    link.say(ToServer::Hello { worker: hello.worker.clone(), tasks: hello.tasks.clone() });
    match tokio::time::timeout(ANSWER, link.hear()).await {
        Ok(Ok(FromServer::Welcome { worker })) => Ok((Box::new(link), worker)),
        Ok(Ok(_)) => Err(NoSocket::Cut(Cut::lost("the server's first message is not `welcome`"))),
        Ok(Err(cut)) => Err(NoSocket::Cut(cut)),
        Err(_) => Err(NoSocket::Cut(Cut::lost("the server did not send `welcome` in time"))),
    }
}

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn shake_hands(client: &Client) -> Result<Socket, NoSocket> {
    let wrong = |error: Error| NoSocket::Cut(Cut::Refused(error));
    let address = client.address();
    let connecting = tokio::time::timeout(CONNECT, TcpStream::connect((address.host.as_str(), address.port)));
    let stream = match connecting.await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(NoSocket::Cut(Cut::lost(format!("cannot reach {}: {error}", address.url)))),
        Err(_) => return Err(NoSocket::Cut(Cut::lost(format!("cannot reach {} in time", address.url)))),
    };
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("cannot set TCP_NODELAY, so small messages may be delayed: {error}");
    }
    let uri = address.socket_uri(PATH).map_err(wrong)?;
    let mut request =
        uri.into_client_request().map_err(|error| wrong(Error::Config(format!("{}: {error}", address.url))))?;
    request.headers_mut().extend(client.headers().map_err(wrong)?);
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES))
        .read_buffer_size(READ_BUFFER_BYTES);
    let connector = Connector::Rustls(client.tls());
    match client_async_tls_with_config(request, stream, Some(config), Some(connector)).await {
        Ok((socket, _)) => Ok(socket),
        Err(error) => Err(no_socket(error)),
    }
}

fn no_socket(error: tungstenite::Error) -> NoSocket {
    match error {
        tungstenite::Error::Http(response) => {
            let status = response.status().as_u16();
            let retry_after = response.headers().get(http::header::RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| value.to_str().ok()?.parse().ok()).map(Duration::from_secs);
            let error = refusal(status, response.body().as_deref().unwrap_or_default());
            match status {
                401 | 403 | 429 | 500 | 502.. => NoSocket::Cut(Refusal { error, retry_after }.into()),
                _ => NoSocket::NotOffered(error.to_string()),
            }
        }
        // The connection broke: that says nothing about WebSocket support.
        tungstenite::Error::Protocol(ProtocolError::HandshakeIncomplete) => NoSocket::Cut(Cut::lost(error.to_string())),
        tungstenite::Error::Protocol(_) | tungstenite::Error::HttpFormat(_) => NoSocket::NotOffered(error.to_string()),
        _ => NoSocket::Cut(Cut::lost(error.to_string())),
    }
}

struct SocketLink {
    socket: Socket,
    /// At most one batch of reports and the messages between two batches.
    outgoing: VecDeque<Message>,
    unflushed: bool,
}

#[async_trait]
impl Link for SocketLink {
    fn say(&mut self, message: ToServer) {
        match serde_json::to_string(&message) {
            Ok(text) => self.outgoing.push_back(Message::text(text)),
            Err(error) => tracing::error!("cannot serialise a message: {error}"),
        }
    }

    async fn hear(&mut self) -> Result<FromServer, Cut> {
        std::future::poll_fn(|cx| self.turn(cx)).await
    }

    async fn close(&mut self) {
        let closing = async {
            for message in std::mem::take(&mut self.outgoing) {
                self.socket.feed(message).await?;
            }
            self.socket.close(None).await
        };
        if let Ok(Err(error)) = tokio::time::timeout(CLOSE, closing).await {
            tracing::debug!("the connection did not close cleanly: {error}");
        }
    }
}

impl SocketLink {
    /// Writes what can be written, then reads. Both in one poll: if each side waited for the other to read, neither
    /// would.
    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<Result<FromServer, Cut>> {
        if let Poll::Ready(Err(error)) = self.write(cx) {
            return Poll::Ready(Err(Cut::lost(error.to_string())));
        }
        loop {
            let message = match ready!(Pin::new(&mut self.socket).poll_next(cx)) {
                Some(Ok(message)) => message,
                Some(Err(error)) => return Poll::Ready(Err(Cut::lost(error.to_string()))),
                None => return Poll::Ready(Err(Cut::lost("the server closed the connection"))),
            };
            match message {
                Message::Text(text) => return Poll::Ready(read(text.as_str())),
                Message::Close(Some(frame)) if u16::from(frame.code) == CLOSE_UNAUTHORIZED => {
                    let message = "the server no longer accepts the worker's key".to_owned();
                    let error = ApiError { code: Code::Unauthorized, message, details: Vec::new() };
                    return Poll::Ready(Err(Cut::Refused(Error::Api { status: error.code.status(), error })));
                }
                Message::Close(frame) => {
                    let why = frame.map_or_else(String::new, |frame| format!(": {}", frame.reason));
                    return Poll::Ready(Err(Cut::lost(format!("the server closed the connection{why}"))));
                }
                // tungstenite answers pings while reading.
                _ => {}
            }
        }
    }

    fn write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), tungstenite::Error>> {
        while !self.outgoing.is_empty() {
            ready!(Pin::new(&mut self.socket).poll_ready(cx))?;
            if let Some(message) = self.outgoing.pop_front() {
                Pin::new(&mut self.socket).start_send(message)?;
                self.unflushed = true;
            }
        }
        if self.unflushed {
            ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }
}

fn read(text: &str) -> Result<FromServer, Cut> {
    match serde_json::from_str(text) {
        Ok(FromServer::Error { error }) => Err(match error.code {
            Code::BadRequest | Code::Unauthorized | Code::Forbidden | Code::Invalid => {
                Cut::Refused(Error::Api { status: error.code.status(), error })
            }
            _ => Cut::lost(error.message),
        }),
        Ok(message) => Ok(message),
        Err(error) => Err(Cut::lost(format!("cannot parse a message from the server: {error}"))),
    }
}
