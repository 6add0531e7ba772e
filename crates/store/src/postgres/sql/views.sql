-- Views for people: runs, steps and timelines with readable columns. Eddyline itself does not read them.

-- JSON may contain U+0000, which jsonb refuses; it is shown as U+FFFD.
CREATE FUNCTION eddyline.json_v1(body text) RETURNS jsonb LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE WHEN strpos(body, '\u0000') = 0 THEN body::jsonb
        ELSE regexp_replace(body, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g')::jsonb END
$$;

-- A text column with its escapes removed.
CREATE FUNCTION eddyline.plain_v1(escaped text) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT replace(replace(escaped, chr(1) || '0', chr(65533)), chr(1) || '1', chr(1))
$$;

CREATE FUNCTION eddyline.time_v1(ms bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT to_timestamp(ms / 1000.0)
$$;

CREATE VIEW eddyline.runs_view AS
    SELECT r.id AS run, eddyline.plain_v1(r.ns) AS namespace, eddyline.plain_v1(r.flow) AS flow,
        h.header ->> 'flow_version' AS flow_version, r.status,
        coalesce((h.header ->> 'paused')::bool, false) AS paused,
        eddyline.plain_v1(r.external_id) AS external_id,
        ARRAY(SELECT eddyline.plain_v1(t.tag) FROM eddyline.tags t WHERE t.run = r.id ORDER BY 1) AS tags,
        eddyline.time_v1(r.created_at) AS created_at, eddyline.time_v1(r.started_at) AS started_at,
        eddyline.time_v1(r.ended_at) AS ended_at, eddyline.time_v1(r.changed_at) AS changed_at,
        h.header #>> '{outcome,Failed,kind}' AS error_kind, h.header #>> '{outcome,Failed,message}' AS error_message,
        (h.header #>> '{parent,run}')::uuid AS parent, r.retry_of, r.version, r.records,
        r.trimmed AS timeline_deleted
    FROM eddyline.runs r, LATERAL (SELECT eddyline.json_v1(r.header)) h(header);

CREATE VIEW eddyline.timeline_view AS
    SELECT o.run, eddyline.plain_v1(r.ns) AS namespace, eddyline.plain_v1(r.flow) AS flow,
        o.first + e.place - 1 AS n, eddyline.time_v1(o.ts) AS at, e.record ->> 'kind' AS kind,
        e.record #>> '{data,stepKey}' AS step, (e.record #>> '{attempt,number}')::int AS attempt,
        e.record #>> '{attempt,queue}' AS queue, eddyline.plain_v1(o.worker) AS worker, e.record -> 'data' AS data
    FROM eddyline.records o JOIN eddyline.runs r ON r.id = o.run,
        LATERAL jsonb_array_elements(eddyline.json_v1(o.body)) WITH ORDINALITY e(record, place)
    WHERE o.count > 0 AND NOT r.trimmed;

-- The steps that a run has reached, from its timeline.
CREATE VIEW eddyline.steps_view AS
    SELECT t.run, t.namespace, t.flow, t.step,
        (array_agg(s.status ORDER BY t.n DESC) FILTER (WHERE s.status IS NOT NULL))[1] AS status,
        coalesce(max(t.attempt), 0) AS attempts,
        (array_agg(t.queue ORDER BY t.n DESC) FILTER (WHERE t.queue IS NOT NULL))[1] AS queue,
        (array_agg(t.worker ORDER BY t.n DESC) FILTER (WHERE t.worker IS NOT NULL))[1] AS worker,
        min(t.at) AS scheduled_at, min(t.at) FILTER (WHERE t.kind = 'step.attempt.started') AS started_at,
        CASE WHEN (array_agg(s.ended ORDER BY t.n DESC) FILTER (WHERE s.status IS NOT NULL))[1]
            THEN max(t.at) FILTER (WHERE s.ended) END AS ended_at,
        (array_agg(t.data -> 'result' ORDER BY t.n DESC) FILTER (WHERE t.kind = 'step.completed'))[1] AS result,
        (array_agg(t.data #>> '{error,message}' ORDER BY t.n DESC) FILTER (WHERE t.data ? 'error'))[1] AS error_message
    FROM eddyline.timeline_view t, LATERAL (
        SELECT CASE t.kind
                WHEN 'step.scheduled' THEN 'scheduled' WHEN 'step.attempt.started' THEN 'running'
                WHEN 'step.retry.scheduled' THEN 'retrying' WHEN 'step.await.scheduled' THEN 'waiting'
                WHEN 'step.completed' THEN 'completed' WHEN 'step.failed' THEN 'failed'
                WHEN 'step.skipped' THEN 'skipped' WHEN 'step.cancelled' THEN 'cancelled' END,
            t.kind IN ('step.completed', 'step.failed', 'step.skipped', 'step.cancelled')) s(status, ended)
    WHERE t.step IS NOT NULL
    GROUP BY t.run, t.namespace, t.flow, t.step;
