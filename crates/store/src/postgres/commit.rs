//! A call of `commit`: its waves and its claims, in one transaction and mostly in one round trip.

use std::sync::{Arc, LazyLock};

use eddyline_machine::{Millis, RunId, Version};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::claims::{self, ClaimRows};
use super::connect::Object;
use super::database::{COMMIT_TIMEOUT, Database, TRIES, in_time, pause};
use super::encode::Batch;
use super::hinted;
use super::pg_error::{PgError, PgResult};
use super::waves::{Wave, waves};
use crate::Written;
use crate::claim::{ClaimRequest, Claims};
use crate::commit::{Command, Committed};
use crate::error::{Refused, Result, StoreError};

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
    claim_rows: Option<ClaimRows>,
}

#[derive(Debug, Default)]
struct Answers {
    commands: Vec<Option<Answer>>,
    claims: Vec<Claims>,
    /// Claims that were given out before.
    before: Vec<bool>,
    /// Namespace and queue.
    offering: Vec<(String, String)>,
}

pub(super) async fn commit(
    database: &Arc<Database>,
    commands: Vec<Command>,
    claims: Vec<ClaimRequest>,
) -> Result<Written> {
    if commands.is_empty() && claims.is_empty() {
        return Ok(Written::default());
    }
    let waves = waves(database, &commands)?;
    let claim_rows = (!claims.is_empty()).then(|| ClaimRows::of(&claims)).transpose()?;
    let call = Call { database: database.clone(), commands, claims, waves, claim_rows };
    let carried_out = tokio::spawn(call.carry_out()).await;
    carried_out.unwrap_or_else(|error| Err(StoreError::Closed(format!("a commit was stopped: {error}"))))
}

impl Call {
    async fn carry_out(self) -> Result<Written> {
        let mut tries = 0;
        let answers = loop {
            tries += 1;
            match self.attempt().await {
                Ok(answers) => break answers,
                Err(error) if error.is_passing() && tries < TRIES => pause(tries).await,
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
        let written = Written { commands: commands.ok_or_else(missing)?, claims: answers.claims };
        let changes = hinted::changes(&self.commands, &self.claims, &written, &answers.before, answers.offering);
        self.database.hub.tell(changes);
        Ok(written)
    }

    /// Nothing is written if it fails, unless the connection was cut.
    async fn attempt(&self) -> PgResult<Answers> {
        let client = self.database.client().await?;
        let mut answers = Answers { commands: vec![None; self.commands.len()], ..Answers::default() };
        match in_time(COMMIT_TIMEOUT, self.write(&client, &mut answers)).await {
            Ok(()) => Ok(answers),
            Err(error) => {
                self.database.discard(client, &error);
                Err(error)
            }
        }
    }

    async fn write(&self, client: &Object, answers: &mut Answers) -> PgResult<()> {
        match (self.waves.as_slice(), &self.claim_rows) {
            ([wave], None) => self.wave_alone(client, answers, wave).await,
            ([], Some(rows)) => self.claims_alone(client, answers, rows).await,
            ([wave], Some(rows)) => self.at_once(client, answers, wave, rows).await,
            (waves, rows) => self.one_by_one(client, answers, waves, rows.as_ref()).await,
        }
    }

    async fn wave_alone(&self, client: &Object, answers: &mut Answers, wave: &Wave) -> PgResult<()> {
        let written = self.send(client, wave).await?;
        self.answer(answers, wave, written)
    }

    async fn claims_alone(&self, client: &Object, answers: &mut Answers, rows: &ClaimRows) -> PgResult<()> {
        let claimed = claims::send(&self.database, client, rows).await?;
        self.answer_claims(answers, claimed)
    }

    /// One wave and its claims, sent without waiting in between.
    async fn at_once(&self, client: &Object, answers: &mut Answers, wave: &Wave, rows: &ClaimRows) -> PgResult<()> {
        self.prepare(client, wave).await?;
        claims::prepare(&self.database, client, rows).await?;
        let (begun, written, claimed, ended) = tokio::join!(
            biased;
            client.batch_execute("BEGIN"),
            self.send(client, wave),
            claims::send(&self.database, client, rows),
            client.batch_execute("COMMIT")
        );
        begun?;
        let (written, claimed) = (written?, claimed?);
        ended?;
        self.answer(answers, wave, written)?;
        self.answer_claims(answers, claimed)
    }

    async fn one_by_one(
        &self,
        client: &Object,
        answers: &mut Answers,
        waves: &[Wave],
        rows: Option<&ClaimRows>,
    ) -> PgResult<()> {
        client.batch_execute("BEGIN").await?;
        for wave in waves {
            let written = self.send(client, wave).await?;
            self.answer(answers, wave, written)?;
        }
        if let Some(rows) = rows {
            let claimed = claims::send(&self.database, client, rows).await?;
            self.answer_claims(answers, claimed)?;
        }
        client.batch_execute("COMMIT").await?;
        Ok(())
    }

    async fn prepare(&self, client: &Object, wave: &Wave) -> PgResult<()> {
        let now = self.database.now_given();
        match wave {
            Wave::Runs { batch, lock, .. } => {
                let mut params = vec![(&now as _, Type::INT8), (lock as _, Type::UUID_ARRAY)];
                params.extend(batch.params());
                self.database.prepare(client, &COMMIT_RUNS, &params).await
            }
            Wave::Documents { rows, .. } => {
                let params = rows.params(&now);
                self.database.prepare(client, COMMIT_DOCUMENTS, &params).await
            }
        }
    }

    async fn send(&self, client: &Object, wave: &Wave) -> PgResult<Vec<Row>> {
        let now = self.database.now_given();
        match wave {
            Wave::Runs { batch, lock, .. } => {
                let mut params = vec![(&now as _, Type::INT8), (lock as _, Type::UUID_ARRAY)];
                params.extend(batch.params());
                self.database.query(client, &COMMIT_RUNS, &params).await
            }
            Wave::Documents { rows, .. } => self.database.query(client, COMMIT_DOCUMENTS, &rows.params(&now)).await,
        }
    }

    fn answer(&self, answers: &mut Answers, wave: &Wave, rows: Vec<Row>) -> PgResult<()> {
        match wave {
            Wave::Runs { commands, .. } => {
                for row in rows {
                    if row.try_get::<_, i32>("out_code")? == -1 {
                        answers.offering.push((row.try_get("out_ns")?, row.try_get("out_queue")?));
                        continue;
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

    fn answer_claims(&self, answers: &mut Answers, rows: Vec<Row>) -> PgResult<()> {
        (answers.claims, answers.before) = claims::answers(&self.claims, rows)?;
        Ok(())
    }
}

/// The statement, with a place for each parameter; the last is JSON.
static COMMIT_RUNS: LazyLock<String> = LazyLock::new(|| {
    let params = 2 + Batch::default().params().len();
    let places: Vec<String> = (1..params).map(|at| format!("${at}")).collect();
    format!("SELECT * FROM eddyline.commit_v1({}, ${params}::text::jsonb)", places.join(", "))
});

const COMMIT_DOCUMENTS: &str = "SELECT * FROM eddyline.commit_documents_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, \
     $11::text[]::jsonb[], $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24)";
