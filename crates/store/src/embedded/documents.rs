//! Commits of documents, with their messages and events.

use std::result::Result as Verdict;

use rusqlite::{OptionalExtension, params};

use super::body::Body;
use super::encode::EncodedDocuments;
use super::group::{Group, UsedUp};
use super::sqlite_error::SqliteResult;
use crate::commit::{CommandId, Committed};
use crate::document::{DocumentChange, DocumentKey, Expect};
use crate::error::Refused;
use crate::holds::Item;
use crate::ids::Namespace;
use crate::query::Change;

impl Group<'_> {
    pub fn commit_documents(&mut self, encoded: &EncodedDocuments) -> SqliteResult<Verdict<Committed, Refused>> {
        let commit = &encoded.commit;
        if let Some(at) = self.find_document_command(commit.command)? {
            return Ok(Ok(Committed { at, first: 0, before: true, repeats: 0 }));
        }
        for change in &commit.documents {
            let current = self.revision_of(&commit.ns, &change.key)?;
            let expected = match change.expect {
                Expect::Any => true,
                Expect::Absent => current.is_none(),
                Expect::Revision(revision) => current == Some(revision),
            };
            if !expected {
                return Ok(Err(Refused::Revision { key: change.key.clone(), current }));
            }
        }
        for (change, body) in commit.documents.iter().zip(&encoded.documents) {
            self.change_document(&commit.ns, change, body.as_ref())?;
        }
        for (message, body) in commit.messages.iter().zip(&encoded.messages) {
            self.send(&commit.ns, message, body)?;
        }
        let repeats = self.publish(&commit.ns, &commit.events, &encoded.events)?;
        for (to, id) in &commit.drops {
            self.drop_message(*to, id)?;
            // A continued run whose start is dropped is never stored.
            if self.cache.head(self.conn, *to)?.is_none() {
                self.leave_line(&commit.ns, *to)?;
            }
        }
        let now = self.now;
        self.write("INSERT INTO commands (id, at) VALUES (?1, ?2)", params![commit.command.0.as_bytes(), now])?;
        Ok(Ok(Committed { at: now, first: 0, before: false, repeats }))
    }

    fn find_document_command(&self, command: CommandId) -> SqliteResult<Option<i64>> {
        let mut statement = self.conn.prepare_cached("SELECT at FROM commands WHERE id = ?1")?;
        Ok(statement.query_row([command.0.as_bytes()], |row| row.get(0)).optional()?)
    }

    fn revision_of(&self, ns: &Namespace, key: &DocumentKey) -> SqliteResult<Option<u64>> {
        let mut statement =
            self.conn.prepare_cached("SELECT revision FROM documents WHERE kind = ?1 AND id = ?2 AND ns = ?3")?;
        let revision = statement.query_row(params![key.kind, key.id, ns.as_str()], |row| row.get::<_, i64>(0));
        Ok(revision.optional()?.map(|revision| revision as u64))
    }

    fn change_document(&mut self, ns: &Namespace, change: &DocumentChange, body: Option<&Body>) -> SqliteResult<()> {
        let key = &change.key;
        self.documents_moved = true;
        if let Some(old) = self.revision_of(ns, key)? {
            self.used_up(UsedUp::Item(Item::Document(ns.clone(), key.clone(), old)));
        }
        self.touched.document(ns, key);
        let queues = self.shared.tasks().queues.set_rules(ns, key, change.body.as_ref());
        for queue in queues {
            self.hint(Change::Tasks { ns: ns.clone(), queue });
        }
        self.hint(Change::Documents { ns: ns.clone(), kind: key.kind.clone() });
        let Some(body) = body else {
            self.write(
                "DELETE FROM documents WHERE kind = ?1 AND id = ?2 AND ns = ?3",
                params![key.kind, key.id, ns.as_str()],
            )?;
            return Ok(());
        };
        self.cache.revision += 1;
        self.revision_moved = true;
        let (revision, now) = (self.cache.revision, self.now);
        self.write(
            "INSERT INTO documents (ns, kind, id, revision, due, changed_at, crc, body) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) \
             ON CONFLICT (kind, id, ns) DO UPDATE SET revision = excluded.revision, due = excluded.due, \
             changed_at = excluded.changed_at, crc = excluded.crc, body = excluded.body",
            params![ns.as_str(), key.kind, key.id, revision, change.due, now, body.seal(&[revision, now]), body.text],
        )?;
        Ok(())
    }
}
