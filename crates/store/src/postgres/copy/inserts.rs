//! Copied rows as columns, and the statements that write them: one per table and chunk.

use super::super::connect::Object;
use serde_json::Value;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::postgres::database::{Database, Param};
use crate::postgres::pg_error::PgResult;

macro_rules! tables {
    ($($field_of:ident: $name:ident $table:literal { $($field:ident: $of:ty => $type:ident,)+ })+) => {
        $(
            #[derive(Debug, Default)]
            pub(super) struct $name {
                $(pub $field: Vec<$of>,)+
            }

            impl $name {
                const TABLE: &str = $table;
                const COLUMNS: &[&str] = &[$(stringify!($field)),+];

                fn params(&self) -> Vec<Param<'_>> {
                    vec![$((&self.$field as _, Type::$type)),+]
                }

                fn is_empty(&self) -> bool {
                    [$(self.$field.is_empty()),+][0]
                }
            }
        )+

        /// The rows of a chunk.
        #[derive(Debug, Default)]
        pub(super) struct Inserts {
            /// Task classes, as JSON.
            pub classes: Vec<Value>,
            $(pub $field_of: $name,)+
        }

        impl Inserts {
            pub async fn send(&self, database: &Database, client: &Object) -> PgResult<()> {
                $(
                    if !self.$field_of.is_empty() {
                        let sql = insert($name::TABLE, $name::COLUMNS);
                        database.query(client, &sql, &self.$field_of.params()).await?;
                    }
                )+
                self.send_classes(database, client).await
            }
        }
    };
}

tables! {
    documents: Documents "documents" {
        ns: String => TEXT_ARRAY,
        kind: String => TEXT_ARRAY,
        id: String => TEXT_ARRAY,
        revision: i64 => INT8_ARRAY,
        due: Option<i64> => INT8_ARRAY,
        changed_at: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    queues: Queues "queues" {
        ns: String => TEXT_ARRAY,
        name: String => TEXT_ARRAY,
        ruled: bool => BOOL_ARRAY,
        paused: bool => BOOL_ARRAY,
        concurrency: Option<i64> => INT8_ARRAY,
        flow_concurrency: Option<i64> => INT8_ARRAY,
        rate_count: Option<i64> => INT8_ARRAY,
        rate_per_ms: Option<i64> => INT8_ARRAY,
        rate_burst: Option<i64> => INT8_ARRAY,
    }
    limits: Limits "limits" {
        ns: String => TEXT_ARRAY,
        name: String => TEXT_ARRAY,
        ruled: bool => BOOL_ARRAY,
        concurrency: Option<i64> => INT8_ARRAY,
        rate_count: Option<i64> => INT8_ARRAY,
        rate_per_ms: Option<i64> => INT8_ARRAY,
        rate_burst: Option<i64> => INT8_ARRAY,
    }
    closed_limits: ClosedLimits "limits" {
        ns: String => TEXT_ARRAY,
        name: String => TEXT_ARRAY,
        closed_until: i64 => INT8_ARRAY,
    }
    buckets: Buckets "buckets" {
        ns: String => TEXT_ARRAY,
        is_limit: bool => BOOL_ARRAY,
        name: String => TEXT_ARRAY,
        level: i64 => INT8_ARRAY,
        at: i64 => INT8_ARRAY,
    }
    commands: Commands "commands" {
        id: Uuid => UUID_ARRAY,
        at: i64 => INT8_ARRAY,
    }
    lines: Lines "lines" {
        place: i64 => INT8_ARRAY,
        ns: String => TEXT_ARRAY,
        flow: String => TEXT_ARRAY,
        key: String => TEXT_ARRAY,
        run: Uuid => UUID_ARRAY,
    }
    messages: Messages "messages" {
        place: i64 => INT8_ARRAY,
        ns: String => TEXT_ARRAY,
        target: Uuid => UUID_ARRAY,
        id: String => TEXT_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    events: Events "events" {
        ns: String => TEXT_ARRAY,
        id: String => TEXT_ARRAY,
        name: String => TEXT_ARRAY,
        key: Option<String> => TEXT_ARRAY,
        at: i64 => INT8_ARRAY,
        position: i64 => INT8_ARRAY,
        gates_opened: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    runs: Runs "runs" {
        id: Uuid => UUID_ARRAY,
        position: i64 => INT8_ARRAY,
        ns: String => TEXT_ARRAY,
        flow: String => TEXT_ARRAY,
        status: &'static str => TEXT_ARRAY,
        external_id: Option<String> => TEXT_ARRAY,
        root: Option<Uuid> => UUID_ARRAY,
        retry_of: Option<Uuid> => UUID_ARRAY,
        created_at: i64 => INT8_ARRAY,
        started_at: Option<i64> => INT8_ARRAY,
        ended_at: Option<i64> => INT8_ARRAY,
        changed_at: i64 => INT8_ARRAY,
        trimmed: bool => BOOL_ARRAY,
        paused: bool => BOOL_ARRAY,
        memo: i64 => INT8_ARRAY,
        version: i64 => INT8_ARRAY,
        records: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        header: String => TEXT_ARRAY,
    }
    fed_runs: FedRuns "fed_runs" {
        ns: String => TEXT_ARRAY,
        run: Uuid => UUID_ARRAY,
        flow: String => TEXT_ARRAY,
        at: i64 => INT8_ARRAY,
        position: i64 => INT8_ARRAY,
    }
    tags: Tags "tags" {
        run: Uuid => UUID_ARRAY,
        tag: String => TEXT_ARRAY,
    }
    keys: Keys "keys" {
        ns: String => TEXT_ARRAY,
        flow: String => TEXT_ARRAY,
        key: String => TEXT_ARRAY,
        run: Uuid => UUID_ARRAY,
        fingerprint: Vec<u8> => BYTEA_ARRAY,
    }
    activations: Activations "activations" {
        run: Uuid => UUID_ARRAY,
        id: i64 => INT8_ARRAY,
        version: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    values: Values "values" {
        run: Uuid => UUID_ARRAY,
        id: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    emitted: Emitted "emitted" {
        run: Uuid => UUID_ARRAY,
        scope: i64 => INT8_ARRAY,
        event: i64 => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    reuse: Reuse "reuse" {
        run: Uuid => UUID_ARRAY,
        activation: String => TEXT_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    cursors: Cursors "cursors" {
        run: Uuid => UUID_ARRAY,
        name: String => TEXT_ARRAY,
        position: i64 => INT8_ARRAY,
    }
    records: Records "records" {
        run: Uuid => UUID_ARRAY,
        first: i64 => INT8_ARRAY,
        version: i64 => INT8_ARRAY,
        count: i32 => INT4_ARRAY,
        ts: i64 => INT8_ARRAY,
        command: Option<Uuid> => UUID_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
    }
    logs: Logs "logs" {
        run: Uuid => UUID_ARRAY,
        activation: String => TEXT_ARRAY,
        first: i64 => INT8_ARRAY,
    }
    tasks: Tasks "tasks" {
        run: Uuid => UUID_ARRAY,
        fence: i64 => INT8_ARRAY,
        activation: i64 => INT8_ARRAY,
        ns: String => TEXT_ARRAY,
        queue: String => TEXT_ARRAY,
        flow: String => TEXT_ARRAY,
        class: i64 => INT8_ARRAY,
        key: String => TEXT_ARRAY,
        rank: i64 => INT8_ARRAY,
        place: i64 => INT8_ARRAY,
        limits: String => TEXT_ARRAY,
        handler: String => TEXT_ARRAY,
        is_run: bool => BOOL_ARRAY,
        queued_at: i64 => INT8_ARRAY,
        start_by: Option<i64> => INT8_ARRAY,
        timeout_ms: Option<i64> => INT8_ARRAY,
        closed: bool => BOOL_ARRAY,
        paused: bool => BOOL_ARRAY,
        worker: Option<String> => TEXT_ARRAY,
        request: Option<Uuid> => UUID_ARRAY,
        claimed: Option<i64> => INT8_ARRAY,
        since: Option<i64> => INT8_ARRAY,
        lease_ms: Option<i64> => INT8_ARRAY,
        lease_until: Option<i64> => INT8_ARRAY,
        deadline: Option<i64> => INT8_ARRAY,
        build: Option<String> => TEXT_ARRAY,
        memo: Option<i64> => INT8_ARRAY,
        crc: i32 => INT4_ARRAY,
        body: String => TEXT_ARRAY,
        started_crc: i32 => INT4_ARRAY,
        started: String => TEXT_ARRAY,
    }
    passing: Passing "passing" {
        ns: String => TEXT_ARRAY,
        limit: String => TEXT_ARRAY,
        run: Uuid => UUID_ARRAY,
        fence: i64 => INT8_ARRAY,
    }
    timers: Timers "timers" {
        run: Uuid => UUID_ARRAY,
        activation: i64 => INT8_ARRAY,
        kind: i32 => INT4_ARRAY,
        fence: i64 => INT8_ARRAY,
        ns: String => TEXT_ARRAY,
        due: i64 => INT8_ARRAY,
        wall: bool => BOOL_ARRAY,
    }
    gates: Gates "gates" {
        run: Uuid => UUID_ARRAY,
        activation: i64 => INT8_ARRAY,
        ns: String => TEXT_ARRAY,
        token: Option<String> => TEXT_ARRAY,
        position: i64 => INT8_ARRAY,
        at: Option<i64> => INT8_ARRAY,
        deadline: Option<i64> => INT8_ARRAY,
        reason: Option<&'static str> => TEXT_ARRAY,
        event: Option<String> => TEXT_ARRAY,
        event_key: Option<String> => TEXT_ARRAY,
        closed: bool => BOOL_ARRAY,
        crc: Option<i32> => INT4_ARRAY,
        body: Option<String> => TEXT_ARRAY,
    }
}

fn insert(table: &str, columns: &[&str]) -> String {
    let quoted: Vec<String> = columns.iter().map(|column| format!("\"{column}\"")).collect();
    let selected = columns.iter().zip(&quoted).map(|(column, quoted)| match (table, *column) {
        ("tasks", "limits") => "CASE WHEN limits = '' THEN '{}' ELSE string_to_array(limits, chr(30)) END".to_owned(),
        _ => quoted.clone(),
    });
    let selected: Vec<String> = selected.collect();
    let places: Vec<String> = (1..=columns.len()).map(|at| format!("${at}")).collect();
    let conflict = match columns {
        // A limit can have rules and also be closed.
        ["ns", "name", "closed_until"] => " ON CONFLICT (ns, name) DO UPDATE SET closed_until = excluded.closed_until",
        _ => "",
    };
    format!(
        "INSERT INTO eddyline.\"{table}\" ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM unnest({}) x({}){conflict}",
        quoted.join(", "),
        selected.join(", "),
        places.join(", "),
        quoted.join(", ")
    )
}

impl Inserts {
    async fn send_classes(&self, database: &Database, client: &Object) -> PgResult<()> {
        if self.classes.is_empty() {
            return Ok(());
        }
        let sql = "INSERT INTO eddyline.classes (ns, queue, class, is_run, handler, requires, build, keyed, limits) \
             SELECT k.ns, k.queue, k.class, k.is_run, k.handler, ARRAY(SELECT jsonb_array_elements_text(k.requires)), \
                 k.build, k.keyed, ARRAY(SELECT jsonb_array_elements_text(k.limits)) \
             FROM jsonb_to_recordset($1::text::jsonb) k(ns text, queue text, class bigint, is_run bool, handler text, \
                 requires jsonb, build text, keyed bool, limits jsonb) ON CONFLICT DO NOTHING";
        let rows = Value::Array(self.classes.clone()).to_string();
        database.query(client, sql, &[(&rows, Type::TEXT)]).await?;
        Ok(())
    }
}
