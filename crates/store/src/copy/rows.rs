//! Streams rows from a source in chunks, while the target writes earlier ones.

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::row::Row;
use crate::error::{Result, StoreError};

/// The most rows, and roughly the most bytes, of a chunk.
const CHUNK_ROWS: usize = 500;
const CHUNK_BYTES: usize = 1 << 20;
/// The most chunks that are read ahead.
const AHEAD: usize = 4;

/// All rows of a source.
#[derive(Debug)]
pub struct Rows {
    chunks: mpsc::Receiver<Vec<Row>>,
    reading: Option<JoinHandle<Result<()>>>,
}

impl Rows {
    /// Reads on a thread that may block.
    pub(crate) fn read_blocking(read: impl FnOnce(&mut Chunks) -> Result<()> + Send + 'static) -> Rows {
        let (send, chunks) = mpsc::channel(AHEAD);
        let reading = tokio::task::spawn_blocking(move || {
            let mut out = Chunks::new(send);
            read(&mut out)?;
            out.flush_blocking();
            Ok(())
        });
        Rows { chunks, reading: Some(reading) }
    }

    pub(crate) fn read<F>(read: impl FnOnce(Chunks) -> F) -> Rows
    where
        F: Future<Output = Result<Chunks>> + Send + 'static,
    {
        let (send, chunks) = mpsc::channel(AHEAD);
        let reading = read(Chunks::new(send));
        let reading = tokio::spawn(async move {
            let mut out = reading.await?;
            out.flush().await;
            Ok(())
        });
        Rows { chunks, reading: Some(reading) }
    }

    /// The next rows; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<Row>>> {
        if let Some(chunk) = self.chunks.recv().await {
            return Ok(Some(chunk));
        }
        // The end of the channel is not enough: the reader must also have succeeded.
        let Some(reading) = self.reading.take() else { return Ok(None) };
        match reading.await {
            Ok(read) => read.map(|()| None),
            Err(failed) => Err(StoreError::Unavailable(format!("the thread that reads the store failed: {failed}"))),
        }
    }
}

/// The sending end, for a source.
#[derive(Debug)]
pub(crate) struct Chunks {
    send: mpsc::Sender<Vec<Row>>,
    rows: Vec<Row>,
    bytes: usize,
}

impl Chunks {
    fn new(send: mpsc::Sender<Vec<Row>>) -> Chunks {
        Chunks { send, rows: Vec::new(), bytes: 0 }
    }

    /// If the receiver is gone, which happens only when the copy has failed, the remaining rows are dropped.
    pub fn put_blocking(&mut self, row: Row) {
        if self.add(row) {
            self.flush_blocking();
        }
    }

    pub async fn put(&mut self, row: Row) {
        if self.add(row) {
            self.flush().await;
        }
    }

    /// Whether the receiver is gone.
    pub fn is_closed(&self) -> bool {
        self.send.is_closed()
    }

    /// Whether the chunk is full.
    fn add(&mut self, row: Row) -> bool {
        self.bytes += row.bytes();
        self.rows.push(row);
        self.rows.len() >= CHUNK_ROWS || self.bytes >= CHUNK_BYTES
    }

    fn take(&mut self) -> Vec<Row> {
        self.bytes = 0;
        std::mem::take(&mut self.rows)
    }

    fn flush_blocking(&mut self) {
        let rows = self.take();
        if !rows.is_empty() {
            let _ = self.send.blocking_send(rows);
        }
    }

    async fn flush(&mut self) {
        let rows = self.take();
        if !rows.is_empty() {
            let _ = self.send.send(rows).await;
        }
    }
}
