-- The tables. Rows of all tables refer to a run by its id. Bodies are JSON stored as text with a checksum; PostgreSQL
-- does not parse them. Texts from outside are escaped (no U+0000).

CREATE TABLE eddyline.meta (name text PRIMARY KEY, value bigint NOT NULL) WITH (fillfactor = 10);
INSERT INTO eddyline.meta (name, value) VALUES ('revision', 0), ('documents_changed', 0);

-- Positions in the feeds of runs and of events, for all namespaces. Rows of a namespace are numbered under the lock of
-- its row in namespaces.
CREATE SEQUENCE eddyline.feed_order;
CREATE TABLE eddyline.namespaces (ns text COLLATE "C" PRIMARY KEY) WITH (fillfactor = 10);

CREATE TABLE eddyline.runs (
    id uuid PRIMARY KEY,
    position bigint GENERATED ALWAYS AS IDENTITY,
    ns text COLLATE "C" NOT NULL,
    flow text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    external_id text COLLATE "C",
    root uuid,
    retry_of uuid,
    created_at bigint NOT NULL,
    started_at bigint,
    ended_at bigint,
    changed_at bigint NOT NULL,
    trimmed bool NOT NULL DEFAULT false,
    paused bool NOT NULL,
    memo bigint NOT NULL,
    version bigint NOT NULL,
    records bigint NOT NULL,
    crc int NOT NULL,
    header text COMPRESSION lz4 NOT NULL
) WITH (fillfactor = 60);
CREATE UNIQUE INDEX runs_by_position ON eddyline.runs (position);
CREATE INDEX runs_by_ns ON eddyline.runs (ns, position);
CREATE INDEX runs_by_flow ON eddyline.runs (ns, flow, position);
CREATE INDEX runs_by_status ON eddyline.runs (ns, status, position);
CREATE INDEX runs_going ON eddyline.runs (status, position) WHERE ended_at IS NULL;
CREATE INDEX runs_by_external_id ON eddyline.runs (ns, external_id, position) WHERE external_id IS NOT NULL;
CREATE INDEX runs_by_root ON eddyline.runs (root, ns) WHERE root IS NOT NULL;
CREATE INDEX runs_by_retry_of ON eddyline.runs (retry_of, ns) WHERE retry_of IS NOT NULL;
CREATE INDEX runs_by_time ON eddyline.runs (ns, created_at);
CREATE INDEX runs_by_end ON eddyline.runs (ns, ended_at) WHERE ended_at IS NOT NULL AND NOT trimmed;
CREATE INDEX runs_trimmed ON eddyline.runs (ns, ended_at) WHERE ended_at IS NOT NULL AND trimmed;

CREATE TABLE eddyline.tags (run uuid, tag text COLLATE "C", PRIMARY KEY (run, tag));
CREATE INDEX tags_by_tag ON eddyline.tags (tag, run);
CREATE TABLE eddyline.keys (
    ns text COLLATE "C",
    flow text COLLATE "C",
    key text COLLATE "C",
    run uuid NOT NULL,
    fingerprint bytea NOT NULL,
    PRIMARY KEY (ns, flow, key)
);
CREATE INDEX keys_by_run ON eddyline.keys (run);
-- The queue of each unique key: its first run may run, the others wait.
CREATE TABLE eddyline.lines (
    place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ns text COLLATE "C" NOT NULL,
    flow text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    run uuid NOT NULL UNIQUE
);
CREATE INDEX lines_by_key ON eddyline.lines (ns, flow, key, place);

-- The feed of runs. Rows commit without a position; the next reader of the feed assigns it.
CREATE TABLE eddyline.fed_runs (
    row bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ns text COLLATE "C" NOT NULL,
    run uuid NOT NULL,
    flow text COLLATE "C" NOT NULL,
    at bigint NOT NULL,
    position bigint
);
CREATE INDEX fed_runs_new ON eddyline.fed_runs (ns, row) WHERE position IS NULL;
CREATE INDEX fed_runs_by_ns ON eddyline.fed_runs (ns, position) WHERE position IS NOT NULL;
CREATE INDEX fed_runs_by_flow ON eddyline.fed_runs (ns, flow, position) WHERE position IS NOT NULL;
CREATE INDEX fed_runs_by_run ON eddyline.fed_runs (run);

CREATE TABLE eddyline.activations (
    run uuid, id bigint, version bigint NOT NULL, crc int NOT NULL, body text COMPRESSION lz4 NOT NULL,
    PRIMARY KEY (run, id)
) WITH (fillfactor = 80);
CREATE TABLE eddyline."values" (
    run uuid, id bigint, crc int NOT NULL, body text COMPRESSION lz4 NOT NULL,
    PRIMARY KEY (run, id)
);
CREATE TABLE eddyline.emitted (
    run uuid, scope bigint, event bigint, crc int NOT NULL, body text COMPRESSION lz4 NOT NULL,
    PRIMARY KEY (run, scope, event)
);
CREATE TABLE eddyline.reuse (
    run uuid, activation text COLLATE "C", crc int NOT NULL, body text COMPRESSION lz4 NOT NULL,
    PRIMARY KEY (run, activation)
);
CREATE TABLE eddyline.cursors (
    run uuid, name text COLLATE "C", position bigint NOT NULL,
    PRIMARY KEY (run, name)
);

-- One row holds the records of a transition or of a claim. A claim has no command, and its worker is a column.
CREATE TABLE eddyline.records (
    run uuid, first bigint, version bigint, count int, ts bigint NOT NULL, command uuid, fence bigint,
    worker text COLLATE "C", crc int NOT NULL, body text COMPRESSION lz4 NOT NULL,
    PRIMARY KEY (run, first, version, count)
);
-- The rows of records that contain logs of an activation.
CREATE TABLE eddyline.logs (
    run uuid, activation text COLLATE "C", first bigint,
    PRIMARY KEY (run, activation, first)
);

-- What a task requires of a worker. The class is a hash of the other columns, so it needs no lookup.
CREATE TABLE eddyline.classes (
    ns text COLLATE "C", queue text COLLATE "C", class bigint, is_run bool NOT NULL, handler text COLLATE "C" NOT NULL,
    requires text[] COLLATE "C" NOT NULL, build text COLLATE "C", keyed bool NOT NULL, limits text[] COLLATE "C" NOT NULL,
    PRIMARY KEY (ns, queue, class)
);
-- rank: when the task was queued, minus a minute for each step of its priority. key: empty, or '=' and the key. limits:
-- names; a limit with a key is its name, U+001F and the key.
CREATE TABLE eddyline.tasks (
    run uuid, fence bigint, activation bigint NOT NULL, ns text COLLATE "C" NOT NULL, queue text COLLATE "C" NOT NULL,
    flow text COLLATE "C" NOT NULL, class bigint NOT NULL, key text COLLATE "C" NOT NULL, rank bigint NOT NULL,
    place bigint GENERATED ALWAYS AS IDENTITY, limits text[] COLLATE "C" NOT NULL, handler text COLLATE "C" NOT NULL,
    is_run bool NOT NULL, queued_at bigint NOT NULL, start_by bigint, timeout_ms bigint,
    closed bool NOT NULL, paused bool NOT NULL,
    worker text COLLATE "C", request uuid, claimed bigint, since bigint, lease_ms bigint, lease_until bigint,
    by_worker bool NOT NULL DEFAULT false, deadline bigint, build text COLLATE "C", memo bigint,
    held_until bigint NOT NULL DEFAULT 0,
    crc int NOT NULL, body text COMPRESSION lz4 NOT NULL, started_crc int NOT NULL, started text NOT NULL,
    PRIMARY KEY (run, fence)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX tasks_ready ON eddyline.tasks (ns, queue, class, rank, place)
    WHERE worker IS NULL AND NOT closed AND NOT paused;
CREATE INDEX tasks_fair ON eddyline.tasks (ns, queue, class, key, rank, place)
    WHERE worker IS NULL AND NOT closed AND NOT paused AND key <> '';
CREATE INDEX tasks_held ON eddyline.tasks (ns, queue, flow) WHERE worker IS NOT NULL;
CREATE INDEX tasks_of ON eddyline.tasks (ns, worker) WHERE worker IS NOT NULL;
CREATE INDEX tasks_request ON eddyline.tasks (request) WHERE worker IS NOT NULL;
CREATE INDEX tasks_start_by ON eddyline.tasks (start_by) WHERE worker IS NULL AND NOT closed AND start_by IS NOT NULL;
CREATE SEQUENCE eddyline.claim_order;
-- When a worker last confirmed, by a heartbeat, that it holds all its tasks. Leases of tasks with by_worker are
-- extended by this.
CREATE TABLE eddyline.workers (ns text COLLATE "C", worker text COLLATE "C", seen bigint NOT NULL, PRIMARY KEY (ns, worker))
    WITH (fillfactor = 10);
-- A row for each claimed task and each limit that applies to it.
CREATE TABLE eddyline.passing (ns text COLLATE "C", "limit" text COLLATE "C", run uuid, fence bigint,
    PRIMARY KEY (ns, "limit", run, fence));
CREATE INDEX passing_by_task ON eddyline.passing (run, fence);
-- The rules of queues, and the state of their keys' turns. Locked by every claim to which the rules apply.
CREATE TABLE eddyline.queues (
    ns text COLLATE "C", name text COLLATE "C", ruled bool NOT NULL DEFAULT false, paused bool NOT NULL DEFAULT false,
    concurrency bigint, flow_concurrency bigint, rate_count bigint, rate_per_ms bigint, rate_burst bigint,
    last bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (ns, name)
) WITH (fillfactor = 10);
CREATE TABLE eddyline.turns (
    ns text COLLATE "C", queue text COLLATE "C", key text COLLATE "C", served bigint NOT NULL,
    PRIMARY KEY (ns, queue, key)
) WITH (fillfactor = 50);
CREATE TABLE eddyline.limits (
    ns text COLLATE "C", name text COLLATE "C", ruled bool NOT NULL DEFAULT false, concurrency bigint, rate_count bigint,
    rate_per_ms bigint, rate_burst bigint, closed_until bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (ns, name)
) WITH (fillfactor = 10);
-- The level of a rate's token bucket, in fractions of a claim: a claim costs per_ms, each millisecond adds count.
CREATE TABLE eddyline.buckets (
    ns text COLLATE "C", is_limit bool, name text COLLATE "C", level numeric NOT NULL, at bigint NOT NULL,
    PRIMARY KEY (ns, is_limit, name)
) WITH (fillfactor = 50);

CREATE TABLE eddyline.timers (
    run uuid, activation bigint, kind int, fence bigint, ns text COLLATE "C" NOT NULL, due bigint NOT NULL,
    wall bool NOT NULL, held_until bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (run, activation, kind, fence)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX timers_by_due ON eddyline.timers (wall, due);

CREATE TABLE eddyline.gates (
    run uuid, activation bigint, ns text COLLATE "C" NOT NULL, token text COLLATE "C", position bigint NOT NULL,
    at bigint, deadline bigint, reason text COLLATE "C", event text COLLATE "C", event_key text COLLATE "C",
    closed bool NOT NULL, crc int, body text COMPRESSION lz4,
    PRIMARY KEY (run, activation)
);
CREATE SEQUENCE eddyline.gate_order;
CREATE INDEX gates_by_token ON eddyline.gates (token) WHERE token IS NOT NULL;
CREATE INDEX gates_open ON eddyline.gates (ns, position) WHERE at IS NOT NULL AND NOT closed;
CREATE INDEX gates_by_event ON eddyline.gates (ns, event, event_key, position)
    WHERE event IS NOT NULL AND at IS NOT NULL AND NOT closed;

CREATE TABLE eddyline.messages (
    place bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, ns text COLLATE "C" NOT NULL, target uuid NOT NULL,
    id text COLLATE "C" NOT NULL, held_until bigint NOT NULL DEFAULT 0, crc int NOT NULL,
    body text COMPRESSION lz4 NOT NULL,
    UNIQUE (target, id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE INDEX messages_by_target ON eddyline.messages (target, place);

-- Events commit without a position; the next reader of the feed assigns it. noted: the latest time of all events up to
-- this position. It never decreases, so the first event since a time can be found.
CREATE TABLE eddyline.events (
    row bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, ns text COLLATE "C" NOT NULL, id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL, key text COLLATE "C", at bigint NOT NULL, position bigint, noted bigint,
    gates_opened bigint NOT NULL DEFAULT 0, crc int NOT NULL, body text COMPRESSION lz4 NOT NULL,
    UNIQUE (ns, id)
);
CREATE INDEX events_new ON eddyline.events (ns, row) WHERE position IS NULL;
CREATE INDEX events_by_ns ON eddyline.events (ns, position) WHERE position IS NOT NULL;
CREATE INDEX events_by_name ON eddyline.events (ns, name, position) WHERE position IS NOT NULL;
CREATE INDEX events_by_key ON eddyline.events (ns, name, key, position) WHERE position IS NOT NULL AND key IS NOT NULL;
CREATE INDEX events_by_time ON eddyline.events (ns, at);
CREATE INDEX events_noted ON eddyline.events (ns, noted, position) WHERE position IS NOT NULL;

CREATE TABLE eddyline.documents (
    ns text COLLATE "C", kind text COLLATE "C", id text COLLATE "C", revision bigint NOT NULL, due bigint,
    changed_at bigint NOT NULL, held_until bigint NOT NULL DEFAULT 0, crc int NOT NULL,
    body text COMPRESSION lz4 NOT NULL,
    PRIMARY KEY (kind, id, ns)
);
CREATE INDEX documents_by_due ON eddyline.documents (due, ns, kind, id) WHERE due IS NOT NULL;
-- Ids of commits of documents, to detect repeats.
CREATE TABLE eddyline.commands (id uuid PRIMARY KEY, at bigint NOT NULL);
CREATE INDEX commands_by_time ON eddyline.commands (at);

-- Deleted runs that may still have rows in other tables.
CREATE TABLE eddyline.leaving (run uuid PRIMARY KEY);
