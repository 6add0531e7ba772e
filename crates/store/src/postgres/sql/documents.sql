-- Commits documents, messages and events together, without a run. out_code: 0 committed, 1 committed before, 2 another
-- revision, -1 a queue that may have claimable tasks now.
CREATE FUNCTION eddyline.commit_documents_v1(
    p_now bigint, p_ns text, p_command uuid,
    d_kind text[], d_id text[], d_expect int[], d_revision bigint[], d_crc int[], d_body text[], d_due bigint[],
    d_rules jsonb[],
    m_target uuid[], m_id text[], m_crc int[], m_body text[],
    e_id text[], e_name text[], e_key text[], e_crc int[], e_body text[],
    x_target uuid[], x_id text[], p_turn_crc int, p_turn text
) RETURNS TABLE (out_code int, out_at bigint, out_repeats int, out_i int, out_revision bigint, out_queue text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_revision bigint;
    v_current bigint;
    v_rules bool := false;
    v record;
BEGIN
    out_at := coalesce(p_now, eddyline.wall_ms());
    out_repeats := 0;
    INSERT INTO eddyline.commands (id, at) VALUES (p_command, out_at) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        SELECT 1, c.at INTO out_code, out_at FROM eddyline.commands c WHERE c.id = p_command;
        RETURN NEXT;
        RETURN;
    END IF;
    IF cardinality(d_kind) > 0 THEN
        -- Serialized, so that a reader who has seen a revision cannot miss a lower one.
        SELECT m.value INTO v_revision FROM eddyline.meta m WHERE m.name = 'revision' FOR UPDATE;
        out_at := coalesce(p_now, eddyline.wall_ms());
        FOR i IN 1..cardinality(d_kind) LOOP
            SELECT d.revision INTO v_current FROM eddyline.documents d
                WHERE d.kind = d_kind[i] AND d.id = d_id[i] AND d.ns = p_ns;
            IF (d_expect[i] = 1 AND v_current IS NOT NULL)
                OR (d_expect[i] = 2 AND v_current IS DISTINCT FROM d_revision[i])
            THEN
                DELETE FROM eddyline.commands WHERE id = p_command;
                out_code := 2;
                out_i := i;
                out_revision := v_current;
                RETURN NEXT;
                RETURN;
            END IF;
        END LOOP;
        FOR i IN 1..cardinality(d_kind) LOOP
            IF d_body[i] IS NULL THEN
                DELETE FROM eddyline.documents d WHERE d.kind = d_kind[i] AND d.id = d_id[i] AND d.ns = p_ns;
            ELSE
                v_revision := v_revision + 1;
                INSERT INTO eddyline.documents (ns, kind, id, revision, due, changed_at, crc, body)
                    VALUES (p_ns, d_kind[i], d_id[i], v_revision, d_due[i], out_at, d_crc[i], d_body[i])
                    ON CONFLICT (kind, id, ns) DO UPDATE SET revision = excluded.revision, due = excluded.due,
                        changed_at = excluded.changed_at, held_until = 0, crc = excluded.crc, body = excluded.body;
            END IF;
            IF d_kind[i] = 'queue' THEN
                v_rules := true;
                SELECT * INTO v FROM jsonb_to_record(coalesce(d_rules[i], '{}')) r(ruled bool, paused bool,
                    concurrency bigint, flow_concurrency bigint, count bigint, per_ms bigint, burst bigint);
                INSERT INTO eddyline.queues (ns, name, ruled, paused, concurrency, flow_concurrency, rate_count, rate_per_ms,
                        rate_burst)
                    VALUES (p_ns, d_id[i], coalesce(v.ruled, false), coalesce(v.paused, false), v.concurrency,
                        v.flow_concurrency, v.count, v.per_ms, v.burst)
                    ON CONFLICT (ns, name) DO UPDATE SET ruled = excluded.ruled, paused = excluded.paused,
                        concurrency = excluded.concurrency, flow_concurrency = excluded.flow_concurrency,
                        rate_count = excluded.rate_count, rate_per_ms = excluded.rate_per_ms,
                        rate_burst = excluded.rate_burst;
            ELSIF d_kind[i] = 'limit' THEN
                v_rules := true;
                SELECT * INTO v FROM jsonb_to_record(coalesce(d_rules[i], '{}')) r(ruled bool, concurrency bigint,
                    count bigint, per_ms bigint, burst bigint);
                INSERT INTO eddyline.limits (ns, name, ruled, concurrency, rate_count, rate_per_ms, rate_burst)
                    VALUES (p_ns, d_id[i], coalesce(v.ruled, false), v.concurrency, v.count, v.per_ms, v.burst)
                    ON CONFLICT (ns, name) DO UPDATE SET ruled = excluded.ruled, concurrency = excluded.concurrency,
                        rate_count = excluded.rate_count, rate_per_ms = excluded.rate_per_ms,
                        rate_burst = excluded.rate_burst, closed_until = 0;
            END IF;
        END LOOP;
        UPDATE eddyline.meta SET value = CASE name WHEN 'revision' THEN v_revision ELSE value + 1 END
            WHERE name IN ('revision', 'documents_changed');
    END IF;
    INSERT INTO eddyline.messages (ns, target, id, crc, body)
        SELECT p_ns, m.target, m.id, m.crc, m.body
        FROM unnest(m_target, m_id, m_crc, m_body) WITH ORDINALITY m(target, id, crc, body, i) ORDER BY m.i
        ON CONFLICT DO NOTHING;
    IF cardinality(e_id) > 0 THEN
        WITH kept AS (
            INSERT INTO eddyline.events (ns, id, name, key, at, crc, body)
                SELECT p_ns, e.id, e.name, e.key, out_at, e.crc, e.body
                FROM unnest(e_id, e_name, e_key, e_crc, e_body) WITH ORDINALITY e(id, name, key, crc, body, i) ORDER BY e.i
                ON CONFLICT DO NOTHING RETURNING 1)
            SELECT cardinality(e_id) - count(*) INTO out_repeats FROM kept;
    END IF;
    FOR v IN SELECT * FROM unnest(x_target, x_id) x(target, id) LOOP
        DELETE FROM eddyline.messages m WHERE m.target = v.target AND m.id = v.id;
        -- If the start of a continued run is dropped, the run is never stored.
        IF NOT EXISTS (SELECT 1 FROM eddyline.runs r WHERE r.id = v.target) THEN
            PERFORM eddyline.leave_line_v1(p_ns, v.target, p_turn_crc, p_turn);
        END IF;
    END LOOP;
    UPDATE eddyline.commands SET at = out_at WHERE id = p_command AND at <> out_at;
    out_code := 0;
    RETURN NEXT;
    IF v_rules THEN
        FOR out_queue IN SELECT q.queue FROM eddyline.offering_v1(p_ns) q(queue) LOOP
            out_code := -1;
            RETURN NEXT;
        END LOOP;
    END IF;
END $$;

-- Numbers the committed runs and events of a namespace, one caller at a time. Readers see only numbered rows, so a row
-- that commits late is not skipped.
CREATE FUNCTION eddyline.number_v1(p_ns text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_noted bigint;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM eddyline.fed_runs f WHERE f.ns = p_ns AND f.position IS NULL)
        AND NOT EXISTS (SELECT 1 FROM eddyline.events e WHERE e.ns = p_ns AND e.position IS NULL)
    THEN
        RETURN;
    END IF;
    INSERT INTO eddyline.namespaces (ns) VALUES (p_ns) ON CONFLICT DO NOTHING;
    PERFORM 1 FROM eddyline.namespaces n WHERE n.ns = p_ns FOR UPDATE;
    -- Materialized, so that each row gets one number, in order, whatever the plan of the update.
    WITH x AS MATERIALIZED (
        SELECT o.row, nextval('eddyline.feed_order') AS position FROM (SELECT i.row FROM eddyline.fed_runs i
            WHERE i.ns = p_ns AND i.position IS NULL ORDER BY i.row) o)
        UPDATE eddyline.fed_runs f SET position = x.position FROM x WHERE f.row = x.row;
    SELECT e.noted INTO v_noted FROM eddyline.events e WHERE e.ns = p_ns AND e.position IS NOT NULL
        ORDER BY e.position DESC LIMIT 1;
    WITH x AS MATERIALIZED (
        SELECT o.row, o.noted, nextval('eddyline.feed_order') AS position FROM (
            SELECT i.row, greatest(v_noted, max(i.at) OVER (ORDER BY i.row)) AS noted FROM eddyline.events i
            WHERE i.ns = p_ns AND i.position IS NULL ORDER BY i.row) o)
        UPDATE eddyline.events f SET position = x.position, noted = x.noted FROM x WHERE f.row = x.row;
END $$;

-- Deletes rows permanently, a bounded number at a time; true while there are more.
CREATE FUNCTION eddyline.trim_timeline_v1(p_run uuid, p_most int) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM eddyline.runs r WHERE r.id = p_run AND r.ended_at IS NOT NULL FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE eddyline.runs SET trimmed = true WHERE id = p_run AND NOT trimmed;
    RETURN eddyline.delete_rows_v1(p_run, p_most);
END $$;

CREATE FUNCTION eddyline.trim_run_v1(p_run uuid, p_most int) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM eddyline.runs r WHERE r.id = p_run AND r.ended_at IS NOT NULL FOR UPDATE;
    IF FOUND THEN
        INSERT INTO eddyline.leaving (run) VALUES (p_run) ON CONFLICT DO NOTHING;
        DELETE FROM eddyline.runs WHERE id = p_run;
        DELETE FROM eddyline.keys WHERE run = p_run;
        DELETE FROM eddyline.tags WHERE run = p_run;
        DELETE FROM eddyline.fed_runs WHERE run = p_run;
        DELETE FROM eddyline.timers WHERE run = p_run;
        DELETE FROM eddyline.tasks WHERE run = p_run;
    END IF;
    PERFORM 1 FROM eddyline.leaving l WHERE l.run = p_run FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF eddyline.delete_rows_v1(p_run, p_most) THEN
        RETURN true;
    END IF;
    DELETE FROM eddyline.leaving WHERE run = p_run;
    RETURN false;
END $$;
