//! 100,000 rows in each table, copied from rows that the store wrote. Those are offered, listed and due before the copies,
//! whose checksums are wrong.

use crate::private::Private;

const ROWS: u32 = 100_000;

const FILL: &str = "
SET auto_explain.log_min_duration = -1;
SET search_path = plans;
SET synchronous_commit = off;
CREATE TEMP TABLE c AS SELECT gen_random_uuid() AS run, n, 'line' AS flow FROM generate_series(1, ROWS) n;
CREATE INDEX ON c (n);
CREATE TEMP TABLE t0 AS SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now;

-- One run in ten has ended; one in a hundred is paused.
INSERT INTO runs (position, id, ns, flow, status, external_id, root, retry_of, created_at, started_at, ended_at, changed_at, paused,
        memo, version, records, crc, header)
    OVERRIDING SYSTEM VALUE
    SELECT c.n - 2 * ROWS, c.run, r.ns, CASE WHEN c.n % 3 = 0 THEN 'wide' ELSE 'line' END,
        CASE WHEN c.n % 10 = 0 THEN 'completed' ELSE 'running' END, 'external-' || c.n / 5,
        (SELECT o.run FROM c o WHERE o.n = c.n / 10 * 10 + 1), (SELECT o.run FROM c o WHERE o.n = c.n / 10 * 10 + 2),
        r.created_at, r.started_at, CASE WHEN c.n % 10 = 0 THEN t0.now END, r.changed_at, c.n % 100 = 1, 0, r.version,
        r.records, r.crc, r.header
    FROM c, t0, (SELECT * FROM runs WHERE flow = 'line' LIMIT 1) r;
INSERT INTO tags SELECT run, 'tag-' || n % 1000 FROM c;
INSERT INTO keys SELECT 'default', 'line', 'key-' || n, run, '\\x00' FROM c;
INSERT INTO lines (ns, flow, key, run) SELECT 'default', 'line', 'unique-' || n / 5, run FROM c;
INSERT INTO fed_runs (ns, run, flow, at, position) SELECT 'default', run, flow, 0, nextval('feed_order') FROM c;
INSERT INTO activations SELECT c.run, a.id, a.version, a.crc, a.body FROM c, generate_series(0, 1) i(i),
    LATERAL (SELECT * FROM activations a WHERE a.id = i LIMIT 1) a;
INSERT INTO \"values\" SELECT c.run, 0, 0, '{}' FROM c;
INSERT INTO emitted SELECT c.run, 0, 0, 0, '{}' FROM c;
INSERT INTO reuse SELECT c.run, 'a', 0, '{}' FROM c;
INSERT INTO cursors SELECT c.run, 'x', 0 FROM c;
INSERT INTO records (run, first, version, count, ts, command, crc, body)
    SELECT c.run, i * 3 + 1, i + 1, 3, 0, gen_random_uuid(), 0, '[]' FROM c, generate_series(0, 1) i(i);
INSERT INTO logs SELECT run, 'a', 1 FROM c;

-- Tasks of three queues, one with keys, one with a limit, of many classes; 600 of them are held by 60 workers.
INSERT INTO classes SELECT k.ns, k.queue, i, k.is_run, k.handler || i, k.requires, k.build, k.keyed, k.limits
    FROM (SELECT DISTINCT ON (queue) * FROM classes ORDER BY queue, class) k, generate_series(1, 20) i
    WHERE k.queue = 'default' OR (k.queue IN ('fair', 'capped') AND i <= 2);
INSERT INTO tasks (run, fence, activation, ns, queue, flow, class, key, rank, limits, handler, is_run, queued_at, start_by,
        timeout_ms, closed, paused, worker, request, claimed, since, lease_ms, lease_until, by_worker, deadline, crc, body,
        started_crc, started)
    SELECT c.run, 1, 1, 'default', (ARRAY['default', 'fair', 'default', 'capped'])[c.n % 4 + 1], c.flow,
        CASE WHEN c.n % 2 = 0 THEN c.n / 2 % 20 ELSE c.n / 4 % 2 END + 1,
        CASE WHEN c.n % 4 = 1 THEN '=' || c.n / 4 % 10 ELSE '' END, t0.now + 10000000 + c.n,
        CASE WHEN c.n % 4 = 3 THEN ARRAY['api'] ELSE '{}' END, 'h', false, t0.now,
        CASE WHEN c.n % 4 = 0 THEN t0.now + c.n - ROWS / 2 END, NULL, c.n % 50 = 3, c.n % 100 = 1,
        CASE WHEN c.n > ROWS - 600 THEN 'worker-' || c.n % 60 END, CASE WHEN c.n > ROWS - 600 THEN gen_random_uuid() END,
        CASE WHEN c.n > ROWS - 600 THEN c.n END, CASE WHEN c.n > ROWS - 600 THEN t0.now END,
        CASE WHEN c.n > ROWS - 600 THEN 600000 END, CASE WHEN c.n > ROWS - 600 THEN t0.now + 600000 END,
        c.n > ROWS - 600 AND c.n % 2 = 0, NULL, 0, '{}', 0, '{}'
    FROM c, t0;
INSERT INTO workers SELECT 'default', 'worker-' || i, t0.now FROM generate_series(0, 59) i, t0;
INSERT INTO turns SELECT 'default', 'fair', '=' || i, 1000 FROM generate_series(0, 9) i;
INSERT INTO passing SELECT 'default', 'api', c.run, 1 FROM c WHERE c.n > ROWS - 10;
INSERT INTO passing SELECT 'default', 'other-' || c.n, c.run, 1 FROM c;
INSERT INTO buckets SELECT 'default', true, 'other-' || c.n, 1, 0 FROM c;

-- Half of the timers and documents are overdue, and half of the documents are of other namespaces.
INSERT INTO timers SELECT c.run, 1, 0, 0, 'default', t0.now + (c.n - ROWS / 2) * 100, c.n % 5 = 0, 0 FROM c, t0;
INSERT INTO gates (run, activation, ns, token, position, at, deadline, reason, event, event_key, closed, crc, body)
    SELECT c.run, 1, 'default', 'token-' || c.n, nextval('gate_order'), t0.now, NULL,
        CASE WHEN c.n % 2 = 0 THEN 'webhook' ELSE 'event' END, CASE WHEN c.n % 2 = 1 THEN 'paid' END,
        CASE WHEN c.n % 2 = 1 THEN c.n::text END, c.n % 10 = 0, 0, '{}'
    FROM c, t0;
INSERT INTO messages (place, ns, target, id, crc, body) OVERRIDING SYSTEM VALUE
    SELECT c.n + 1000000, 'default', c.run, 'm', 0, '{}' FROM c;
INSERT INTO events (ns, id, name, key, at, position, crc, body)
    SELECT 'default', 'e-' || c.n, CASE WHEN c.n % 10 = 0 THEN 'rare' ELSE 'paid' END, (c.n % 1000)::text, t0.now - c.n,
        nextval('feed_order'), 0, '{}'
    FROM c, t0;
INSERT INTO documents (ns, kind, id, revision, due, changed_at, crc, body)
    SELECT CASE WHEN c.n % 2 = 0 THEN 'default' ELSE 'ns-' || c.n % 999 END,
        CASE WHEN c.n % 4 < 2 THEN 'slot' ELSE 'worker' END, lpad(c.n::text, 8, '0'), c.n + 1000,
        CASE WHEN c.n % 4 < 2 THEN t0.now + (c.n - ROWS / 2) * 100 END, t0.now, 0, '{}'
    FROM c, t0;
INSERT INTO commands SELECT gen_random_uuid(), now + n FROM c, t0;
UPDATE meta SET value = ROWS * 2 WHERE name = 'revision';
";

pub async fn fill(server: &Private) {
    server.client().await.batch_execute(&FILL.replace("ROWS", &ROWS.to_string())).await.unwrap();
}
