//! A call of `commit`: its waves and its claims, mostly in one transaction and one round trip.
//!
//! A transaction holds its locks until all of it is written, so a large call is written in parts. If a part fails because of
//! what is in it, it is halved until it is known which command cannot be stored; the others are written.

use std::sync::{Arc, LazyLock};

use eddyline_machine::{Millis, RunId, Version};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::unescape;
use super::claim_new;
use super::claims::{self, ClaimAnswers, ClaimRows};
use super::connect::Object;
use super::database::{COMMIT_TIMEOUT, Database, TRIES, in_time, pause};
use super::encode::Batch;
use super::hinted;
use super::pg_error::{PgError, PgResult};
use super::waves::{Wave, parts, waves};
use crate::Written;
use crate::claim::ClaimRequest;
use crate::commit::{Command, Committed};
use crate::error::{Refused, Result, StoreError};
use crate::ids::Namespace;

/// What a command came to, and the queues of its namespace that may have something to offer because of it.
type Answer = std::result::Result<Committed, Refused>;

/// A call that is under way. It goes on if the caller stops waiting for it, so that no connection is left in the middle of
/// a transaction.
#[derive(Debug)]
struct Call {
    database: Arc<Database>,
    commands: Vec<Command>,
    claims: Vec<ClaimRequest>,
    waves: Vec<Wave>,
    claim_rows: ClaimRows,
}

#[derive(Debug, Default)]
struct Answers {
    commands: Vec<Option<Answer>>,
    claims: ClaimAnswers,
    /// Namespace and queue.
    offering: Vec<(String, String)>,
    /// Claims that got tasks of the commit, each with the places of those.
    got_new: Vec<(usize, Vec<i32>)>,
}

pub(super) async fn commit(
    database: &Arc<Database>,
    commands: Vec<Command>,
    claims: Vec<ClaimRequest>,
) -> Result<Written> {
    if commands.is_empty() && claims.is_empty() {
        return Ok(Written::default());
    }
    database.check_format()?;
    let mut parts = parts(commands);
    let last = parts.pop().unwrap_or_default();
    if parts.is_empty() {
        return spawned(Call::new(database, last, claims)?.carry_out()).await;
    }
    let database = database.clone();
    let one_by_one = async move {
        let mut written = Written::default();
        for part in parts {
            written = followed_by(written, Call::new(&database, part, Vec::new())?.carry_out().await)?;
        }
        followed_by(written, Call::new(&database, last, claims)?.carry_out().await)
    };
    spawned(one_by_one).await
}

async fn spawned(carrying_out: impl Future<Output = Result<Written>> + Send + 'static) -> Result<Written> {
    let carried_out = tokio::spawn(carrying_out).await;
    carried_out.unwrap_or_else(|error| Err(StoreError::Closed(format!("a commit was stopped: {error}"))))
}

/// What became of commands, after those before them. If it is not known, or they failed, it is not known of all: who
/// submits them again is told what was written.
fn followed_by(mut written: Written, next: Result<Written>) -> Result<Written> {
    match next {
        Ok(next) => {
            written.commands.extend(next.commands);
            written.claims.extend(next.claims);
            Ok(written)
        }
        Err(error) if written.commands.is_empty() => Err(error),
        Err(_) => Err(StoreError::Unknown),
    }
}

impl Call {
    fn new(database: &Arc<Database>, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Call> {
        let mut waves = waves(database, &commands)?;
        let claim_rows = ClaimRows::of(database, &claims)?;
        if let ([Wave::Runs { batch, commands: of, .. }], false) = (waves.as_mut_slice(), claims.is_empty()) {
            claim_new::match_new(batch, &claim_new::commits(&commands, of), &claims, &claim_rows);
        }
        Ok(Call { database: database.clone(), commands, claims, waves, claim_rows })
    }

    /// The commands in halves, because one of them cannot be stored.
    fn halved(mut self, error: PgError) -> BoxFuture<'static, Result<Written>> {
        let halves = async move {
            if self.commands.len() == 1 {
                let why = match error.into_error() {
                    StoreError::Unavailable(why) => why,
                    other => other.to_string(),
                };
                let written = Written { commands: vec![Err(Refused::Unstorable(why))], claims: Vec::new() };
                if self.claims.is_empty() {
                    return Ok(written);
                }
                let claims = Call::new(&self.database, Vec::new(), self.claims)?;
                return followed_by(written, claims.carry_out().await);
            }
            let second = self.commands.split_off(self.commands.len() / 2);
            let first = Call::new(&self.database, self.commands, Vec::new())?;
            let written = first.carry_out().await?;
            let second = Call::new(&self.database, second, self.claims)?;
            followed_by(written, second.carry_out().await)
        };
        halves.boxed()
    }

    async fn carry_out(self) -> Result<Written> {
        let mut tries = 0;
        let answers = loop {
            tries += 1;
            match self.attempt().await {
                Ok(answers) => break answers,
                Err(error) if error.is_passing() && tries < TRIES => pause(tries).await,
                Err(error) if error.is_of_data() && !self.commands.is_empty() => return self.halved(error).await,
                Err(error) => return Err(error.into_write_error()),
            }
        };
        for wave in &self.waves {
            if let Wave::Runs { batch, .. } = wave {
                self.database.know_classes(batch.classes.iter().cloned());
            }
        }
        let missing = || StoreError::Corrupt("a command was not answered".to_owned());
        let commands: Option<Vec<Answer>> = answers.commands.into_iter().collect();
        let ClaimAnswers { claims, before } = answers.claims;
        let written = Written { commands: commands.ok_or_else(missing)?, claims };
        for (ns, queue) in &answers.offering {
            self.database.forget_low_marks(&Namespace::new(&unescape(ns.clone())), queue);
        }
        let changes = hinted::changes(&self.commands, &self.claims, &written, &before, answers.offering);
        self.database.hub.tell(changes);
        Ok(written)
    }

    /// Nothing is written if it fails, unless the connection was cut.
    async fn attempt(&self) -> PgResult<Answers> {
        let client = self.database.client().await?;
        let mut answers = Answers {
            commands: vec![None; self.commands.len()],
            claims: ClaimAnswers::new(&self.claims),
            ..Answers::default()
        };
        match in_time(COMMIT_TIMEOUT, self.write(&client, &mut answers)).await {
            Ok(()) => Ok(answers),
            Err(error) => {
                self.database.discard(client, &error);
                Err(error)
            }
        }
    }

    /// Mostly one statement, which is a transaction of its own.
    async fn write(&self, client: &Object, answers: &mut Answers) -> PgResult<()> {
        match self.waves.as_slice() {
            [wave @ Wave::Runs { batch, .. }] => {
                let written = self.send(client, wave, &self.claim_rows).await?;
                self.answer(answers, wave, written)?;
                self.answer_new(answers, batch)
            }
            [wave] if self.claims.is_empty() => {
                let written = self.send(client, wave, &self.claim_rows).await?;
                self.answer(answers, wave, written)
            }
            [] => self.claims_alone(client, answers).await,
            waves => self.one_by_one(client, answers, waves).await,
        }
    }

    async fn claims_alone(&self, client: &Object, answers: &mut Answers) -> PgResult<()> {
        for row in claims::send(&self.database, client, &self.claim_rows).await? {
            answers.claims.add(&self.database, &self.claims, &row)?;
        }
        Ok(())
    }

    async fn one_by_one(&self, client: &Object, answers: &mut Answers, waves: &[Wave]) -> PgResult<()> {
        client.batch_execute("BEGIN").await?;
        for wave in waves {
            let written = self.send(client, wave, &ClaimRows::default()).await?;
            self.answer(answers, wave, written)?;
        }
        if !self.claims.is_empty() {
            self.claims_alone(client, answers).await?;
        }
        client.batch_execute("COMMIT").await?;
        Ok(())
    }

    async fn send(&self, client: &Object, wave: &Wave, claims: &ClaimRows) -> PgResult<Vec<Row>> {
        let now = self.database.now_given();
        match wave {
            Wave::Runs { batch, lock, .. } => {
                let mut params = vec![(&now as _, Type::INT8), (lock as _, Type::UUID_ARRAY)];
                params.extend(batch.params(claims));
                self.database.query(client, &COMMIT_RUNS, &params).await
            }
            Wave::Documents { rows, .. } => self.database.query(client, COMMIT_DOCUMENTS, &rows.params(&now)).await,
        }
    }

    fn answer(&self, answers: &mut Answers, wave: &Wave, rows: Vec<Row>) -> PgResult<()> {
        match wave {
            Wave::Runs { commands, .. } => {
                for row in rows {
                    match row.try_get::<_, i32>("out_code")? {
                        -1 => {
                            answers.offering.push((row.try_get("out_ns")?, row.try_get("out_queue")?));
                            continue;
                        }
                        -2 => {
                            let at = row.try_get::<_, i32>("out_r")? as usize - 1;
                            answers.got_new.push((at, row.try_get("out_gone")?));
                            if let Some(claims) = answers.claims.claims.get_mut(at) {
                                claims.full = row.try_get("out_full")?;
                                claims.exhausted = row.try_get("out_exhausted")?;
                            }
                            continue;
                        }
                        -3 => {
                            answers.claims.add(&self.database, &self.claims, &row)?;
                            continue;
                        }
                        _ => {}
                    }
                    let c = row.try_get::<_, i32>("out_c")? as usize;
                    let Some(at) = commands.get(c.wrapping_sub(1)) else { continue };
                    answers.commands[*at] = Some(self.run_answer(*at, &row)?);
                }
            }
            Wave::Documents { command, .. } => {
                for row in rows {
                    match row.try_get::<_, i32>("out_code")? {
                        -1 => {
                            if let Command::Documents(commit) = &self.commands[*command] {
                                let ns = super::body::escaped(commit.ns.as_str());
                                answers.offering.push((ns, row.try_get("out_queue")?));
                            }
                        }
                        code => answers.commands[*command] = Some(self.documents_answer(*command, code, &row)?),
                    }
                }
            }
        }
        Ok(())
    }

    fn run_answer(&self, at: usize, row: &Row) -> PgResult<Answer> {
        let current = row.try_get::<_, Option<i64>>("out_current")?.map(|version| Version(version as u64));
        let other = row.try_get::<_, Option<Uuid>>("out_run")?.map(RunId).unwrap_or_default();
        Ok(match row.try_get::<_, i32>("out_code")? {
            code @ (0 | 1) => Ok(Committed {
                at: row.try_get::<_, Millis>("out_at")?,
                first: row.try_get::<_, i64>("out_first")? as u64,
                before: code == 1,
                repeats: if code == 1 { 0 } else { row.try_get::<_, i32>("out_repeats")? as u32 },
            }),
            3 => {
                let bytes: Vec<u8> = row.try_get("out_fingerprint")?;
                let fingerprint = bytes.try_into();
                let fingerprint = fingerprint
                    .map_err(|_| PgError::Corrupt(format!("keys: the fingerprint of run {other} has another size")))?;
                Err(Refused::KeyTaken { run: other, fingerprint })
            }
            4 => Err(Refused::UniqueTaken { run: other }),
            5 => Err(Refused::LineFull),
            6 => {
                let places: Vec<i32> = row.try_get("out_gone")?;
                let takes = match &self.commands[at] {
                    Command::Run(commit) => commit.takes.as_slice(),
                    Command::Documents(_) => &[],
                };
                Err(Refused::Gone(places.into_iter().filter_map(|place| takes.get(place as usize).cloned()).collect()))
            }
            7 => Err(Refused::Conflict { current: None }),
            _ => Err(Refused::Conflict { current }),
        })
    }

    fn documents_answer(&self, at: usize, code: i32, row: &Row) -> PgResult<Answer> {
        if code == 2 {
            let place = row.try_get::<_, i32>("out_i")? as usize;
            let current = row.try_get::<_, Option<i64>>("out_revision")?.map(|revision| revision as u64);
            if let Command::Documents(commit) = &self.commands[at]
                && let Some(change) = commit.documents.get(place.wrapping_sub(1))
            {
                return Ok(Err(Refused::Revision { key: change.key.clone(), current }));
            }
        }
        Ok(Ok(Committed {
            at: row.try_get("out_at")?,
            first: 0,
            before: code == 1,
            repeats: if code == 1 { 0 } else { row.try_get::<_, i32>("out_repeats")? as u32 },
        }))
    }

    /// The tasks that were inserted as claimed.
    fn answer_new(&self, answers: &mut Answers, batch: &Batch) -> PgResult<()> {
        let [Wave::Runs { commands, .. }] = self.waves.as_slice() else { return Ok(()) };
        for (at, places) in std::mem::take(&mut answers.got_new) {
            for place in places {
                let task = place as usize - 1;
                let at_command = batch.tasks.c.get(task).and_then(|c| commands.get(*c as usize - 1));
                let claimed =
                    at_command.and_then(|command| match (&self.commands[*command], &answers.commands[*command]) {
                        (Command::Run(commit), Some(Ok(done))) => {
                            claim_new::claimed(batch, commit, task, self.claims.get(at)?, done.at)
                        }
                        _ => None,
                    });
                let unknown =
                    || PgError::Corrupt(format!("a commit gave claim {at} task {place}, which it did not add"));
                answers.claims.claims[at].tasks.push(claimed.ok_or_else(unknown)?);
            }
        }
        Ok(())
    }
}

/// The statement, with a place for each parameter; the last is JSON.
static COMMIT_RUNS: LazyLock<String> = LazyLock::new(|| {
    let params = 2 + Batch::default().params(&ClaimRows::default()).len();
    let places: Vec<String> = (1..params).map(|at| format!("${at}")).collect();
    format!("SELECT * FROM eddyline.commit_v1({}, ${params}::text::jsonb)", places.join(", "))
});

const COMMIT_DOCUMENTS: &str = "SELECT * FROM eddyline.commit_documents_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, \
     $11::text[]::jsonb[], $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24)";
