//! Reads and writes documents, which hold everything that is neither a run nor an event.

use eddyline_store::{
    Command, Document, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, Expect, MAX_PAGE, Namespace,
    Refused,
};
use serde_json::Value;

use crate::certain;
use crate::error::{EngineError, Result};
use crate::instance::Instance;

impl Instance {
    pub(crate) async fn document(&self, ns: Option<&Namespace>, kind: &str, id: &str) -> Result<Option<Document>> {
        let filter = DocumentFilter { kind: kind.to_owned(), id: Some(id.to_owned()), ..DocumentFilter::default() };
        Ok(self.store.documents(ns, &filter, 1).await?.pop())
    }

    /// Documents of a kind, ordered by id, after the given one, at most `limit`.
    pub(crate) async fn documents(
        &self,
        ns: &Namespace,
        kind: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Document>> {
        let filter = DocumentFilter { kind: kind.to_owned(), after, ..DocumentFilter::default() };
        Ok(self.store.documents(Some(ns), &filter, limit).await?)
    }

    /// How many documents of a kind there are.
    pub(crate) async fn count_documents(&self, ns: &Namespace, kind: &str) -> Result<u64> {
        let (mut count, mut after) = (0, None);
        loop {
            let page = self.documents(ns, kind, after, MAX_PAGE).await?;
            count += page.len() as u64;
            if page.len() < MAX_PAGE {
                return Ok(count);
            }
            after = page.into_iter().next_back().map(|last| last.key.id);
        }
    }

    pub(crate) async fn all_documents(&self, ns: &Namespace, kind: &str) -> Result<Vec<Document>> {
        let mut all: Vec<Document> = Vec::new();
        loop {
            let after = all.last().map(|last| last.key.id.clone());
            let page = self.documents(ns, kind, after, MAX_PAGE).await?;
            let last = page.len() < MAX_PAGE;
            all.extend(page);
            if last {
                return Ok(all);
            }
        }
    }

    /// Writes or deletes a document. False if it does not match `expect`.
    pub(crate) async fn put(
        &self,
        ns: &Namespace,
        kind: &str,
        id: &str,
        expect: Expect,
        body: Option<Value>,
    ) -> Result<bool> {
        self.put_all(ns, vec![DocumentChange { key: DocumentKey::new(kind, id), expect, body, due: None }]).await
    }

    /// The same for several documents of a namespace: all are written, or none.
    pub(crate) async fn put_all(&self, ns: &Namespace, documents: Vec<DocumentChange>) -> Result<bool> {
        let commit = DocumentCommit {
            ns: ns.clone(),
            command: self.command(),
            documents,
            messages: Vec::new(),
            events: Vec::new(),
            drops: Vec::new(),
        };
        let written = certain::commit_one(&*self.store, Command::Documents(commit)).await?;
        match written.commands.into_iter().next() {
            Some(Err(Refused::Revision { .. })) => Ok(false),
            Some(Err(refused)) => Err(EngineError::Conflict(refused.to_string())),
            _ => Ok(true),
        }
    }
}
