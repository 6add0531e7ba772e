//! Commits one transition of one run: refuses it, recognises it as already applied, or writes it.

use std::result::Result as Verdict;

use eddyline_machine::run::Phase;
use eddyline_machine::{Due, Entry, GateChange, Record, RunId, TimerChange, Version};
use rusqlite::{OptionalExtension, params};

use super::body::Body;
use super::encode::EncodedRun;
use super::group::{Group, UsedUp};
use super::options::call;
use super::schema::key_of;
use super::sqlite_error::SqliteResult;
use super::writer_cache::{Facts, Head};
use crate::commit::{CommandId, Committed, Consumed, StartKey};
use crate::error::Refused;
use crate::holds::Item;
use crate::ids::Namespace;
use crate::query::Change;
use crate::timer_columns;

impl Group<'_> {
    pub fn commit_run(&mut self, encoded: &EncodedRun) -> SqliteResult<Verdict<Committed, Refused>> {
        if let Some(answer) = self.answer_without(encoded)? {
            return Ok(answer);
        }
        let gone = self.find_gone(encoded)?;
        let gone = self.change_mirror(encoded, &gone);
        if !gone.is_empty() {
            return Ok(Err(Refused::Gone(gone)));
        }
        let commit = &encoded.commit;
        let transition = &*commit.transition;
        let run = transition.header.run;
        for taken in &commit.takes {
            self.use_up(run, taken)?;
        }
        for (message, body) in commit.messages.iter().zip(&encoded.messages) {
            self.send(&commit.ns, message, body)?;
        }
        let repeats = self.publish(&commit.ns, &commit.events, &encoded.events)?;
        for position in &transition.events_taken {
            let position = *position as i64;
            self.write("UPDATE events SET gates_opened = gates_opened + 1 WHERE position = ?1", [position])?;
        }
        if transition.is_empty() {
            return Ok(Ok(Committed { at: self.now, first: 0, before: false, repeats }));
        }
        let (position, first) = self.write_head(encoded)?;
        self.end_in_line(&commit.ns, &transition.header)?;
        self.write_state(position, encoded)?;
        let (count, version) = (transition.records.len() as i64, transition.header.version.0);
        self.append(position, first, count, version, Some(commit.command), &encoded.records)?;
        self.index_logs(position, first, &transition.records)?;
        self.write_tasks(position, encoded)?;
        self.change_timers(position, encoded)?;
        self.change_gates(position, encoded)?;
        self.runs.push((run, transition.header.phase == Phase::Ended));
        Ok(Ok(Committed { at: self.now, first: first as u64, before: false, repeats }))
    }

    /// The response to a commit that is refused or was applied before; none if it is to be applied.
    fn answer_without(&mut self, encoded: &EncodedRun) -> SqliteResult<Option<Verdict<Committed, Refused>>> {
        call(&self.shared.options.inside_commit);
        let commit = &encoded.commit;
        let transition = &*commit.transition;
        let run = transition.header.run;
        let head = self.cache.head(self.conn, run)?.map(|head| &*head);
        let current = head.map(|head| Version(head.version));
        let at = head.map(|head| (head.position, head.trimmed, head.ns == commit.ns));
        if current.unwrap_or_default() != transition.base {
            let done = match (current, at) {
                (Some(current), Some((position, false, _))) if transition.base < current => {
                    self.find_command(position, transition.base.0 + 1)?
                }
                _ => None,
            };
            return Ok(Some(match done {
                Some((command, committed)) if command == commit.command => Ok(committed),
                _ => Err(Refused::Conflict { current }),
            }));
        }
        if let Some((_, _, false)) = at {
            return Ok(Some(Err(Refused::Conflict { current: None })));
        }
        if let Some(key) = &commit.key
            && let Some((run, fingerprint)) = self.find_key(&commit.ns, key)?
        {
            return Ok(Some(Err(Refused::KeyTaken { run, fingerprint })));
        }
        if transition.base == Version(0)
            && let Some(refused) = self.refused_by_line(commit)?
        {
            return Ok(Some(Err(refused)));
        }
        Ok(None)
    }

    /// The messages and timers that a commit consumes and that do not exist.
    fn find_gone(&mut self, encoded: &EncodedRun) -> SqliteResult<Vec<Consumed>> {
        let commit = &encoded.commit;
        let run = commit.transition.header.run;
        let position = self.cache.head(self.conn, run)?.map(|head| head.position);
        let mut gone = Vec::new();
        for taken in &commit.takes {
            if !self.is_there(run, position, taken)? {
                gone.push(taken.clone());
            }
        }
        Ok(gone)
    }

    /// Checks the expiries that a commit consumes and changes its tasks under one lock, so that no heartbeat
    /// intervenes. Changes nothing if any item to consume is gone.
    fn change_mirror(&mut self, encoded: &EncodedRun, gone: &[Consumed]) -> Vec<Consumed> {
        let commit = &encoded.commit;
        let run = commit.transition.header.run;
        let shared = self.shared;
        let queues = &mut shared.tasks().queues;
        let is_gone = |taken: &&Consumed| match taken {
            Consumed::Expiry(fence, why) => !queues.is_up(run, *fence, *why, self.now),
            Consumed::Message(_) | Consumed::Timer(..) => gone.contains(taken),
        };
        let gone: Vec<Consumed> = commit.takes.iter().filter(is_gone).cloned().collect();
        if !gone.is_empty() || commit.transition.is_empty() {
            return gone;
        }
        self.change_tasks(queues, encoded);
        for (limit, ms) in &commit.transition.slow_limits {
            queues.slow(&commit.ns, limit, self.now + ms);
        }
        gone
    }

    /// The command that brought the run to a version. Looked up only while its outcome is unknown, so it is a recent
    /// one.
    fn find_command(&self, position: i64, version: u64) -> SqliteResult<Option<(CommandId, Committed)>> {
        let mut statement = self.conn.prepare_cached(
            "SELECT command, ts, first FROM records WHERE run = ?1 AND version = ?2 AND command IS NOT NULL \
             ORDER BY first DESC, row DESC LIMIT 1",
        )?;
        let found = statement.query_row(params![position, version as i64], |row| {
            let first = row.get::<_, i64>(2)? as u64;
            let committed = Committed { at: row.get(1)?, first, before: true, repeats: 0 };
            Ok((CommandId(uuid::Uuid::from_bytes(row.get(0)?)), committed))
        });
        Ok(found.optional()?)
    }

    fn find_key(&self, ns: &Namespace, key: &StartKey) -> SqliteResult<Option<(RunId, [u8; 32])>> {
        let mut statement = self.conn.prepare_cached(
            "SELECT runs.id, keys.fingerprint FROM keys JOIN runs ON runs.position = keys.run \
             WHERE keys.ns = ?1 AND keys.flow = ?2 AND keys.key = ?3",
        )?;
        let found = statement.query_row(params![ns.as_str(), key.flow, key.key], |row| {
            Ok((RunId(uuid::Uuid::from_bytes(row.get(0)?)), row.get(1)?))
        });
        Ok(found.optional()?)
    }

    fn is_there(&self, run: RunId, position: Option<i64>, taken: &Consumed) -> SqliteResult<bool> {
        match taken {
            Consumed::Message(id) => {
                let mut statement = self.conn.prepare_cached("SELECT 1 FROM messages WHERE target = ?1 AND id = ?2")?;
                Ok(statement.exists(params![run.0.as_bytes(), id])?)
            }
            Consumed::Timer(key, due) => {
                let Some(position) = position else { return Ok(false) };
                let (activation, kind, fence) = timer_columns::columns(*key);
                let mut statement = self.conn.prepare_cached(
                    "SELECT 1 FROM timers WHERE run = ?1 AND activation = ?2 AND kind = ?3 AND fence = ?4 AND due = ?5",
                )?;
                Ok(statement.exists(params![position, activation, kind, fence, due])?)
            }
            // Checked in the mirror.
            Consumed::Expiry(..) => Ok(true),
        }
    }

    fn use_up(&mut self, run: RunId, taken: &Consumed) -> SqliteResult<()> {
        match taken {
            Consumed::Message(id) => self.drop_message(run, id)?,
            Consumed::Timer(key, due) => {
                if let Some(head) = self.cache.head(self.conn, run)? {
                    let position = head.position;
                    self.clear_timer(position, timer_columns::columns(*key))?;
                }
                self.used_up(UsedUp::Item(Item::Timer(run, *key, *due)));
            }
            Consumed::Expiry(fence, _) => self.used_up(UsedUp::Item(Item::Lease(run, *fence))),
        }
        Ok(())
    }

    /// Inserts or updates the row of the run; returns its position and the number of its next record.
    fn write_head(&mut self, encoded: &EncodedRun) -> SqliteResult<(i64, i64)> {
        let transition = &*encoded.commit.transition;
        if transition.base == Version(0) {
            return Ok((self.create(encoded)?, 1));
        }
        let (header, now) = (&transition.header, self.now);
        let Some(head) = self.cache.head(self.conn, header.run)? else { return Ok((self.create(encoded)?, 1)) };
        let (position, first) = (head.position, head.records as i64 + 1);
        let started_at = head.started_at.or(header.begun.then_some(now));
        let ended_at = head.ended_at.or((header.phase == Phase::Ended).then_some(now));
        // Updating indexed columns is expensive, so unchanged ones are not written.
        let same_place = (head.status, head.started_at, head.ended_at) == (encoded.status, started_at, ended_at);
        let same_facts = head.facts.are_of(header);
        (head.status, head.started_at, head.ended_at) = (encoded.status, started_at, ended_at);
        head.version = header.version.0;
        head.records += transition.records.len() as u64;
        if !same_facts {
            head.facts = Facts::of(header);
        }
        let (crc, text) = (seal_header(&encoded.header, header.run), &encoded.header.text);
        let (version, memo) = (header.version.0 as i64, encoded.memo as i64);
        if same_place {
            self.write(
                "UPDATE runs SET paused = ?2, memo = ?3, version = ?4, crc = ?5, header = ?6 WHERE position = ?1",
                params![position, header.holds_tasks(), memo, version, crc, text],
            )?;
        } else {
            self.write(
                "UPDATE runs SET paused = ?2, memo = ?3, version = ?4, crc = ?5, header = ?6, status = ?7, \
                 started_at = ?8, ended_at = ?9 WHERE position = ?1",
                params![
                    position,
                    header.holds_tasks(),
                    memo,
                    version,
                    crc,
                    text,
                    encoded.status.as_str(),
                    started_at,
                    ended_at
                ],
            )?;
        }
        if !same_facts {
            self.write(
                "UPDATE runs SET flow = ?2, external_id = ?3 WHERE position = ?1",
                params![position, header.flow, header.external_id],
            )?;
            self.write("DELETE FROM tags WHERE run = ?1", [position])?;
            self.write_tags(position, &header.tags)?;
        }
        Ok((position, first))
    }

    fn create(&mut self, encoded: &EncodedRun) -> SqliteResult<i64> {
        let (commit, now) = (&encoded.commit, self.now);
        let header = &commit.transition.header;
        self.cache.position += 1;
        let position = self.cache.position;
        let started_at = header.begun.then_some(now);
        let ended_at = (header.phase == Phase::Ended).then_some(now);
        self.write(
            "INSERT INTO runs (position, id, ns, flow, status, external_id, created_at, started_at, ended_at, paused, \
             memo, version, crc, header, root, retry_of) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
            params![
                position,
                header.run.0.as_bytes(),
                commit.ns.as_str(),
                header.flow,
                encoded.status.as_str(),
                header.external_id,
                now,
                started_at,
                ended_at,
                header.holds_tasks(),
                encoded.memo as i64,
                header.version.0 as i64,
                seal_header(&encoded.header, header.run),
                encoded.header.text,
                header.root.as_ref().map(|root| root.0.as_bytes()),
                header.retry_of.as_ref().map(|run| run.0.as_bytes())
            ],
        )?;
        self.write_tags(position, &header.tags)?;
        if let Some(key) = &commit.key {
            self.write(
                "INSERT INTO keys (run, ns, flow, key, fingerprint) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![position, commit.ns.as_str(), key.flow, key.key, key.fingerprint],
            )?;
        }
        self.join_line(commit)?;
        let head = Head {
            position,
            ns: commit.ns.clone(),
            version: header.version.0,
            records: commit.transition.records.len() as u64,
            status: encoded.status,
            started_at,
            ended_at,
            trimmed: false,
            facts: Facts::of(header),
        };
        self.cache.remember(header.run, head);
        Ok(position)
    }

    fn write_tags(&mut self, position: i64, tags: &[String]) -> SqliteResult<()> {
        for tag in tags {
            self.write("INSERT OR IGNORE INTO tags (tag, run) VALUES (?1, ?2)", params![tag, position])?;
        }
        Ok(())
    }

    /// Writes everything that `decide` reads except the header.
    fn write_state(&mut self, position: i64, encoded: &EncodedRun) -> SqliteResult<()> {
        let transition = &*encoded.commit.transition;
        for (activation, body) in transition.activations.iter().zip(&encoded.activations) {
            let key = key_of(position, u64::from(activation.id.0));
            self.write(
                "INSERT INTO activations (key, crc, body) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (key) DO UPDATE SET crc = excluded.crc, body = excluded.body",
                params![key, body.seal(&[key]), body.text],
            )?;
        }
        for (((scope, event), _), body) in transition.emitted.iter().zip(&encoded.emitted) {
            let numbers = [position, i64::from(scope.0), i64::from(*event)];
            self.write(
                "INSERT OR REPLACE INTO emitted (run, scope, event, crc, body) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![numbers[0], numbers[1], numbers[2], body.seal(&numbers), body.text],
            )?;
        }
        for (name, taken) in &transition.cursors {
            self.write(
                "INSERT OR REPLACE INTO cursors (run, name, position) VALUES (?1, ?2, ?3)",
                params![position, name, *taken as i64],
            )?;
        }
        for name in &transition.reuse_done {
            self.write("DELETE FROM reuse WHERE run = ?1 AND activation = ?2", params![position, name])?;
        }
        for (reused, body) in transition.reuse.iter().zip(&encoded.reuse) {
            self.write(
                "INSERT OR REPLACE INTO reuse (run, activation, crc, body) VALUES (?1, ?2, ?3, ?4)",
                params![position, reused.activation, body.seal(&[position]), body.text],
            )?;
        }
        for ((id, _), body) in transition.values.iter().zip(&encoded.values) {
            let key = key_of(position, u64::from(id.0));
            self.write(
                "INSERT INTO \"values\" (key, crc, body) VALUES (?1, ?2, ?3) ON CONFLICT (key) DO NOTHING",
                params![key, body.seal(&[key]), body.text],
            )?;
        }
        Ok(())
    }

    /// Appends the records of one commit to the timeline, even if there are none: the row also records the command.
    pub fn append(
        &mut self,
        position: i64,
        first: i64,
        count: i64,
        version: u64,
        command: Option<CommandId>,
        body: &Body,
    ) -> SqliteResult<()> {
        let now = self.now;
        self.write(
            "INSERT INTO records (run, first, count, version, command, ts, crc, body) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                position,
                first,
                count,
                version as i64,
                command.as_ref().map(|command| command.0.as_bytes()),
                now,
                body.seal(&[position, first, count, now]),
                body.text
            ],
        )?;
        Ok(())
    }

    /// Indexes a row of records by the activations whose logs it contains.
    fn index_logs(&mut self, position: i64, first: i64, records: &[Record]) -> SqliteResult<()> {
        let mut last = None;
        for record in records {
            let Entry::Log { step_key, .. } = &record.entry else { continue };
            // A report often has many consecutive logs of one activation.
            if last.replace(step_key) != Some(step_key) {
                self.write(
                    "INSERT OR IGNORE INTO logs (run, activation, first) VALUES (?1, ?2, ?3)",
                    params![position, step_key, first],
                )?;
            }
        }
        Ok(())
    }

    fn change_timers(&mut self, position: i64, encoded: &EncodedRun) -> SqliteResult<()> {
        for change in &encoded.commit.transition.timers {
            match change {
                TimerChange::Clear(key) => self.clear_timer(position, timer_columns::columns(*key))?,
                TimerChange::Set { key, due } => {
                    let (due, wall) = match *due {
                        Due::After(ms) => (self.now + ms, false),
                        Due::At(at) => (at, true),
                    };
                    let (activation, kind, fence) = timer_columns::columns(*key);
                    self.write(
                        "INSERT OR REPLACE INTO timers (run, activation, kind, fence, due, wall) \
                         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                        params![position, activation, kind, fence, due, wall],
                    )?;
                    self.hint(Change::Timers);
                }
            }
        }
        Ok(())
    }

    fn clear_timer(&mut self, position: i64, (activation, kind, fence): (i64, i32, i64)) -> SqliteResult<()> {
        self.write(
            "DELETE FROM timers WHERE run = ?1 AND activation = ?2 AND kind = ?3 AND fence = ?4",
            params![position, activation, kind, fence],
        )?;
        Ok(())
    }

    fn change_gates(&mut self, position: i64, encoded: &EncodedRun) -> SqliteResult<()> {
        let ns = &encoded.commit.ns;
        for (change, body) in encoded.commit.transition.gates.iter().zip(&encoded.gates) {
            match (change, body) {
                (GateChange::Add { id, token }, _) => {
                    self.write(
                        "INSERT OR REPLACE INTO gates (run, activation, ns, token, position, closed) \
                         VALUES (?1, ?2, ?3, ?4, 0, 0)",
                        params![position, id.activation.0, ns.as_str(), token],
                    )?;
                }
                (GateChange::Arrive(gate), Some(body)) => {
                    self.cache.gate += 1;
                    self.gates_moved = true;
                    let (place, now, activation) = (self.cache.gate, self.now, i64::from(gate.id.activation.0));
                    let event = gate.event.as_ref();
                    self.write(
                        "INSERT OR REPLACE INTO gates (run, activation, ns, token, position, at, deadline, reason, \
                         event, event_key, closed, crc, body) \
                         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 0, ?11, ?12)",
                        params![
                            position,
                            activation,
                            ns.as_str(),
                            gate.token,
                            place,
                            now,
                            gate.timeout_ms.map(|ms| now + ms),
                            crate::conditions::reason_text(gate.reason),
                            event.map(|event| &event.name),
                            event.and_then(|event| event.key.as_ref()),
                            body.seal(&[position, activation]),
                            body.text
                        ],
                    )?;
                }
                (GateChange::Arrive(_), None) => {}
                (GateChange::Close { id }, _) => {
                    self.write(
                        "UPDATE gates SET closed = 1 WHERE run = ?1 AND activation = ?2",
                        params![position, id.activation.0],
                    )?;
                }
            }
        }
        Ok(())
    }
}

fn seal_header(header: &Body, run: RunId) -> u32 {
    header.seal(&header_numbers(run))
}

/// The checksum of a header covers the id of its run.
pub(super) fn header_numbers(run: RunId) -> [i64; 2] {
    let (high, low) = run.0.as_u64_pair();
    [high as i64, low as i64]
}
