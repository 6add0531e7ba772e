//! The sizes of tables after many steps, compared with what would be left if nothing in them were dead.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_postgres::Client;

use super::server::Server;
use crate::measure::Row;
use crate::postgres::Failed;
use crate::stores::Opened;
use crate::workloads::{self, STEPS};

const IN_FLIGHT: usize = 200;
const EVERY: Duration = Duration::from_secs(2);
/// Smaller tables are left out.
const SHOWN_MB: f64 = 1.0;

/// A row for each table after `steps` steps of W1, and one for the steps themselves. Autovacuum is left to its settings.
pub async fn sizes(server: &Server, steps: usize) -> Result<Vec<Row>, Failed> {
    let opened = Opened::postgres(&server.url("tables")).await?;
    let client = server.connect().await?;
    let chain = workloads::chain(&opened, IN_FLIGHT, steps / STEPS);
    tokio::pin!(chain);
    let mut most: BTreeMap<String, f64> = BTreeMap::new();
    let mut steps = loop {
        tokio::select! {
            row = &mut chain => break row,
            () = tokio::time::sleep(EVERY) => {
                for (table, mb) in tables(&client).await? {
                    let most = most.entry(table).or_default();
                    *most = most.max(mb);
                }
            }
        }
    };
    steps.what = format!("W1, {} steps", steps.steps);
    let after = tables(&client).await?;
    // Another's snapshot would keep rows; there is none, so this leaves what is live.
    for table in after.keys() {
        client.batch_execute(&format!("VACUUM FULL tables.\"{table}\"")).await?;
    }
    let live = tables(&client).await?;
    let mut rows = vec![steps];
    for (table, size) in after {
        let most = most.get(&table).copied().unwrap_or(0.0).max(size);
        let live = live.get(&table).copied().unwrap_or(0.0);
        if most < SHOWN_MB {
            continue;
        }
        let mut row = rows[0].clone();
        (row.what, row.per_second, row.ratio) = (format!("table {table}"), 0.0, Some(size / live));
        (row.p50_ms, row.p99_ms, row.cpu_us_per_step, row.bytes_per_step) = (0.0, 0.0, 0.0, 0.0);
        row.note = format!("{size:.1} MB at the end, {most:.1} MB at most; without what is dead {live:.2} MB");
        rows.push(row);
    }
    Ok(rows)
}

/// Megabytes, indexes included.
async fn tables(client: &Client) -> Result<BTreeMap<String, f64>, Failed> {
    let sql = "SELECT relname, pg_total_relation_size(oid) FROM pg_class \
               WHERE relnamespace = 'tables'::regnamespace AND relkind = 'r'";
    let rows = client.query(sql, &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get::<_, i64>(1) as f64 / 1048576.0)).collect())
}
