-- Milliseconds since the Unix epoch, by the database's clock.
CREATE FUNCTION eddyline.wall_ms() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint
$$;

-- When a lease ends.
CREATE FUNCTION eddyline.lease_end_v1(p_ns text, p_worker text, p_by_worker bool, p_lease_until bigint, p_lease_ms bigint)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_by_worker THEN greatest(p_lease_until, (SELECT w.seen + p_lease_ms FROM eddyline.workers w
        WHERE w.ns = p_ns AND w.worker = p_worker)) ELSE p_lease_until END
$$;

-- A key without waiting tasks is dropped; a new key starts at the queue's current turn.
-- Tasks without a key are of other classes and found by another index.
CREATE FUNCTION eddyline.key_waits_v1(p_ns text, p_queue text, p_key text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    IF p_key = '' THEN
        RETURN EXISTS (SELECT 1 FROM eddyline.classes c CROSS JOIN LATERAL (
            SELECT 1 FROM eddyline.tasks t WHERE t.ns = p_ns AND t.queue = p_queue AND t.class = c.class
            AND t.worker IS NULL AND NOT t.closed AND NOT t.paused LIMIT 1) x
            WHERE c.ns = p_ns AND c.queue = p_queue AND NOT c.keyed);
    END IF;
    RETURN EXISTS (SELECT 1 FROM eddyline.classes c CROSS JOIN LATERAL (
        SELECT 1 FROM eddyline.tasks t WHERE t.ns = p_ns AND t.queue = p_queue AND t.class = c.class
        AND t.key = p_key AND t.key <> '' AND t.worker IS NULL AND NOT t.closed AND NOT t.paused LIMIT 1) x
        WHERE c.ns = p_ns AND c.queue = p_queue AND c.keyed);
END $$;

CREATE FUNCTION eddyline.look_at_keys_v1(p_ns text[], p_queue text[], p_key text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_served bigint;
BEGIN
    FOR v IN SELECT DISTINCT k.ns, k.queue, k.key FROM unnest(p_ns, p_queue, p_key) k(ns, queue, key) ORDER BY 1, 2, 3 LOOP
        IF eddyline.key_waits_v1(v.ns, v.queue, v.key) THEN
            -- The lock prevents a claim from dropping the key before this commit is visible.
            PERFORM 1 FROM eddyline.turns t WHERE t.ns = v.ns AND t.queue = v.queue AND t.key = v.key FOR KEY SHARE;
            CONTINUE WHEN FOUND;
        END IF;
        INSERT INTO eddyline.queues (ns, name) VALUES (v.ns, v.queue) ON CONFLICT DO NOTHING;
        PERFORM 1 FROM eddyline.queues q WHERE q.ns = v.ns AND q.name = v.queue FOR UPDATE;
        IF eddyline.key_waits_v1(v.ns, v.queue, v.key) THEN
            INSERT INTO eddyline.turns (ns, queue, key, served)
                SELECT q.ns, q.name, v.key, q.last FROM eddyline.queues q WHERE q.ns = v.ns AND q.name = v.queue
                ON CONFLICT DO NOTHING;
        ELSE
            PERFORM eddyline.forget_key_v1(v.ns, v.queue, v.key);
        END IF;
    END LOOP;
END $$;

-- Requires the lock of the queue. A key stays while a commit is adding a task to it.
CREATE FUNCTION eddyline.forget_key_v1(p_ns text, p_queue text, p_key text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_served bigint;
BEGIN
    SELECT t.served INTO v_served FROM eddyline.turns t WHERE t.ns = p_ns AND t.queue = p_queue AND t.key = p_key
        FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        DELETE FROM eddyline.turns t WHERE t.ns = p_ns AND t.queue = p_queue AND t.key = p_key;
        UPDATE eddyline.queues q SET last = v_served WHERE q.ns = p_ns AND q.name = p_queue AND q.last < v_served;
    END IF;
END $$;

-- Queues of a namespace that have claimable tasks.
CREATE FUNCTION eddyline.offering_v1(p_ns text) RETURNS SETOF text LANGUAGE sql VOLATILE AS $$
    SELECT DISTINCT c.queue FROM eddyline.classes c CROSS JOIN LATERAL (
        SELECT 1 FROM eddyline.tasks t WHERE t.ns = p_ns AND t.queue = c.queue AND t.class = c.class
        AND t.worker IS NULL AND NOT t.closed AND NOT t.paused LIMIT 1) x
        WHERE c.ns = p_ns
$$;

-- Commits transitions of different runs, each as a whole or not at all, then makes claims. A refusal is a row of the result,
-- not an error.
-- out_code of transition out_c: 0 committed, 1 committed before, 2 conflict, 3 key taken, 4 unique key taken, 5 line full,
-- 6 gone, 7 of another namespace. Other rows: -1 a queue that may have claimable tasks now, -2 claim out_r with the new
-- tasks that it got (out_gone, by their places in t_c), -3 a row of `claim_v1`.
CREATE FUNCTION eddyline.commit_v1(
    p_now bigint, p_lock uuid[],
    c_run uuid[], c_ns text[], c_base bigint[], c_version bigint[], c_command uuid[], c_flow text[], c_status text[],
    c_external text[], c_root uuid[], c_retry_of uuid[], c_paused bool[], c_memo bigint[], c_begun bool[], c_ended bool[],
    c_crc int[], c_header text[], c_count int[], c_records_crc int[], c_records text[],
    tm_c int[], tm_i int[], tm_id text[],
    tt_c int[], tt_i int[], tt_activation bigint[], tt_kind int[], tt_fence bigint[], tt_due bigint[],
    te_c int[], te_i int[], te_fence bigint[], te_why int[],
    a_c int[], a_id bigint[], a_crc int[], a_body text[],
    v_c int[], v_id bigint[], v_crc int[], v_body text[],
    t_c int[], t_fence bigint[], t_activation bigint[], t_queue text[], t_class bigint[], t_key text[], t_age_ms bigint[],
    t_limits text[], t_handler text[], t_is_run bool[], t_start_ms bigint[], t_timeout_ms bigint[], t_closed bool[],
    t_crc int[], t_body text[], t_started_crc int[], t_started text[], t_group int[], t_build text[],
    td_c int[], td_fence bigint[], td_remove bool[],
    x_c int[], x_activation bigint[], x_kind int[], x_fence bigint[], x_set bool[], x_after bigint[], x_at bigint[],
    m_c int[], m_target uuid[], m_id text[], m_crc int[], m_body text[],
    e_c int[], e_id text[], e_name text[], e_key text[], e_crc int[], e_body text[],
    r_group int[], r_request uuid[], r_worker text[], r_max int[], r_most int[], r_lease_ms bigint[],
    g_ns text[], g_queues text[], g_offer text[], l_group int[], l_queue text[], l_class bigint[], l_low bigint[],
    p_more jsonb
) RETURNS TABLE (out_c int, out_code int, out_at bigint, out_first bigint, out_current bigint, out_fingerprint bytea,
    out_gone int[], out_repeats int, out_ns text, out_r int, out_before bool, out_run uuid, out_fence bigint, out_flow text,
    out_crc int, out_body text, out_request uuid, out_since bigint, out_lease_ms bigint, out_lease_until bigint,
    out_deadline bigint, out_build text, out_memo bigint, out_retry_at bigint, out_full bool, out_exhausted bool,
    out_queue text, out_class bigint, out_low bigint)
-- Planned once a connection, with indexes only, like claims.
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    n int := cardinality(c_run);
    v record;
    w record;
    v_now bigint;
    v_code int[];
    v_current bigint[];
    v_ts bigint[];
    v_was_paused bool[];
    v_first bigint[] := array_fill(1::bigint, ARRAY[n]);
    v_repeats int[] := array_fill(0, ARRAY[n]);
    v_other uuid[] := array_fill(NULL::uuid, ARRAY[n]);
    v_fingers bytea[] := array_fill(NULL::bytea, ARRAY[n]);
    v_gone jsonb := '{}';
    v_uuids uuid[];
    v_keys jsonb := p_more -> 'keys';
    v_lines jsonb := p_more -> 'lines';
    k_ns text[] := '{}';
    k_queue text[] := '{}';
    k_key text[] := '{}';
    h_ns text[] := '{}';
    d_ns text[];
    d_queue text[];
    v_limited bool := false;
    v_len bigint;
    v_head uuid;
    v_in bool;
    -- Records of claims, which are numbered with those of the transition.
    v_extra int[] := array_fill(0, ARRAY[n]);
    v_claimed record;
BEGIN
    IF p_lock IS NOT NULL THEN
        PERFORM 1 FROM eddyline.runs WHERE id = ANY (p_lock) ORDER BY id FOR NO KEY UPDATE;
    END IF;
    v_now := coalesce(p_now, eddyline.wall_ms());

    -- Which transitions are refused.
    SELECT array_agg(CASE WHEN coalesce(r.version, 0) <> c.base THEN 2 WHEN r.ns <> c.ns THEN 7 ELSE 0 END ORDER BY c.i),
            array_agg(r.version ORDER BY c.i), array_agg(greatest(v_now, r.changed_at) ORDER BY c.i),
            array_agg(coalesce(r.paused, false) ORDER BY c.i)
        INTO v_code, v_current, v_ts, v_was_paused
        FROM unnest(c_run, c_ns, c_base) WITH ORDINALITY c(run, ns, base, i) LEFT JOIN eddyline.runs r ON r.id = c.run;
    IF v_keys IS NOT NULL THEN
        FOR v IN SELECT k.c, o.run, o.fingerprint FROM jsonb_to_recordset(v_keys) k(c int, flow text, key text)
            JOIN eddyline.keys o ON o.ns = c_ns[k.c] AND o.flow = k.flow AND o.key = k.key
        LOOP
            IF v_code[v.c] = 0 THEN
                v_code[v.c] := 3;
                v_other[v.c] := v.run;
                v_fingers[v.c] := v.fingerprint;
            END IF;
        END LOOP;
    END IF;
    IF v_lines IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(h.h) FROM (
            SELECT DISTINCT hashtextextended(concat_ws(chr(31), c_ns[l.c], c_flow[l.c], l.key), 7) AS h
            FROM jsonb_to_recordset(v_lines) l(c int, key text) ORDER BY 1) h;
        FOR v IN SELECT * FROM jsonb_to_recordset(v_lines) l(c int, key text, in_line bool) ORDER BY c LOOP
            CONTINUE WHEN c_base[v.c] <> 0 OR v_code[v.c] <> 0;
            SELECT count(*), (array_agg(l.run ORDER BY l.place))[1], bool_or(l.run = c_run[v.c]) INTO v_len, v_head, v_in
                FROM eddyline.lines l WHERE l.ns = c_ns[v.c] AND l.flow = c_flow[v.c] AND l.key = v.key;
            IF v_len > 0 AND NOT v_in THEN
                IF NOT v.in_line THEN
                    v_code[v.c] := 4;
                    v_other[v.c] := v_head;
                ELSIF v_len >= 1000 THEN
                    v_code[v.c] := 5;
                END IF;
            END IF;
        END LOOP;
    END IF;
    -- Consumed items are locked in one statement and read in the next, because a statement's snapshot is older than its
    -- locks.
    IF cardinality(tm_c) > 0 THEN
        PERFORM 1 FROM unnest(tm_c, tm_id) x(c, id) JOIN eddyline.messages m ON m.target = c_run[x.c] AND m.id = x.id
            ORDER BY m.target, m.id FOR UPDATE OF m;
    END IF;
    IF cardinality(te_c) > 0 THEN
        PERFORM 1 FROM unnest(te_c, te_fence) x(c, fence) JOIN eddyline.tasks t ON t.run = c_run[x.c] AND t.fence = x.fence
            ORDER BY t.run, t.fence FOR UPDATE OF t;
        -- A heartbeat updates only this row, and then reads its tasks.
        PERFORM 1 FROM eddyline.workers w WHERE (w.ns, w.worker) IN (
            SELECT t.ns, t.worker FROM unnest(te_c, te_fence) x(c, fence)
            JOIN eddyline.tasks t ON t.run = c_run[x.c] AND t.fence = x.fence WHERE t.by_worker)
            ORDER BY w.ns, w.worker FOR SHARE OF w;
        v_now := coalesce(p_now, eddyline.wall_ms());
    END IF;
    IF cardinality(tm_c) + cardinality(tt_c) + cardinality(te_c) > 0 THEN
        FOR v IN SELECT g.c, array_agg(g.i ORDER BY g.i) AS gone FROM (
            SELECT x.c, x.i FROM unnest(tm_c, tm_i, tm_id) x(c, i, id) WHERE NOT EXISTS (
                SELECT 1 FROM eddyline.messages m WHERE m.target = c_run[x.c] AND m.id = x.id)
            UNION ALL
            SELECT x.c, x.i FROM unnest(tt_c, tt_i, tt_activation, tt_kind, tt_fence, tt_due) x(c, i, activation, kind, fence, due)
                WHERE NOT EXISTS (SELECT 1 FROM eddyline.timers t WHERE t.run = c_run[x.c] AND t.activation = x.activation
                    AND t.kind = x.kind AND t.fence = x.fence AND t.due = x.due)
            UNION ALL
            SELECT x.c, x.i FROM unnest(te_c, te_i, te_fence, te_why) x(c, i, fence, why) WHERE NOT EXISTS (
                SELECT 1 FROM eddyline.tasks t WHERE t.run = c_run[x.c] AND t.fence = x.fence AND CASE x.why
                    WHEN 0 THEN t.worker IS NOT NULL AND eddyline.lease_end_v1(t.ns, t.worker, t.by_worker, t.lease_until, t.lease_ms) <= v_now
                    WHEN 1 THEN t.worker IS NOT NULL AND t.deadline <= v_now
                    WHEN 2 THEN t.worker IS NULL AND t.start_by <= v_now
                    ELSE t.worker IS NOT NULL END)
            ) g GROUP BY g.c
        LOOP
            IF v_code[v.c] = 0 THEN
                v_code[v.c] := 6;
                v_gone := v_gone || jsonb_build_object(v.c::text, to_jsonb(v.gone));
            END IF;
        END LOOP;
    END IF;

    -- Each task that may be inserted as claimed gets a number for the record of its claim.
    FOR i IN 1..cardinality(t_group) LOOP
        IF t_group[i] > 0 THEN
            v_extra[t_c[i]] := v_extra[t_c[i]] + 1;
        END IF;
    END LOOP;

    -- New runs.
    IF 0 = ANY (c_base) THEN
        WITH made AS (
            INSERT INTO eddyline.runs (id, ns, flow, status, external_id, root, retry_of, created_at, started_at, ended_at,
                    changed_at, paused, memo, version, records, crc, header)
                SELECT c.run, c.ns, c.flow, c.status, c.external, c.root, c.retry_of, v_ts[c.i],
                    CASE WHEN c.begun THEN v_ts[c.i] END, CASE WHEN c.ended THEN v_ts[c.i] END, v_ts[c.i], c.paused, c.memo,
                    c.version, c.count + v_extra[c.i], c.crc, c.header
                FROM unnest(c_run, c_ns, c_base, c_version, c_flow, c_status, c_external, c_root, c_retry_of, c_begun,
                    c_ended, c_paused, c_memo, c_count, c_crc, c_header) WITH ORDINALITY
                    c(run, ns, base, version, flow, status, external, root, retry_of, begun, ended, paused, memo, count,
                    crc, header, i)
                WHERE c.base = 0 AND c.version > 0 AND v_code[c.i] = 0 ORDER BY c.run
                ON CONFLICT (id) DO NOTHING RETURNING id)
            SELECT coalesce(array_agg(id), '{}') INTO v_uuids FROM made;
        FOR i IN 1..n LOOP
            IF c_base[i] = 0 AND c_version[i] > 0 AND v_code[i] = 0 AND NOT c_run[i] = ANY (v_uuids) THEN
                v_code[i] := 2;
            END IF;
        END LOOP;
        IF v_keys IS NOT NULL THEN
            WITH had AS (
                INSERT INTO eddyline.keys (ns, flow, key, run, fingerprint)
                    SELECT c_ns[k.c], k.flow, k.key, c_run[k.c], decode(k.fingerprint, 'hex')
                    FROM jsonb_to_recordset(v_keys) k(c int, flow text, key text, fingerprint text)
                    WHERE v_code[k.c] = 0 AND c_base[k.c] = 0 AND c_version[k.c] > 0 ORDER BY 1, 2, 3
                    ON CONFLICT DO NOTHING RETURNING run)
                SELECT coalesce(array_agg(run), '{}') INTO v_uuids FROM had;
            FOR v IN SELECT k.c, k.flow, k.key FROM jsonb_to_recordset(v_keys) k(c int, flow text, key text)
                WHERE v_code[k.c] = 0 AND c_base[k.c] = 0 AND c_version[k.c] > 0 AND NOT c_run[k.c] = ANY (v_uuids)
            LOOP
                -- Another commit took the key in the meantime.
                DELETE FROM eddyline.runs WHERE id = c_run[v.c];
                SELECT o.run, o.fingerprint INTO w FROM eddyline.keys o
                    WHERE o.ns = c_ns[v.c] AND o.flow = v.flow AND o.key = v.key;
                v_code[v.c] := 3;
                v_other[v.c] := w.run;
                v_fingers[v.c] := w.fingerprint;
            END LOOP;
        END IF;
        FOR v IN SELECT l.run FROM eddyline.leaving l WHERE l.run = ANY (c_run) LOOP
            PERFORM eddyline.delete_rows_v1(v.run, 2147483647);
            DELETE FROM eddyline.leaving WHERE run = v.run;
        END LOOP;
        INSERT INTO eddyline.fed_runs (ns, run, flow, at)
            SELECT c.ns, c.run, c.flow, v_ts[c.i] FROM unnest(c_ns, c_run, c_flow, c_base, c_version) WITH ORDINALITY
                c(ns, run, flow, base, version, i)
            WHERE c.base = 0 AND c.version > 0 AND v_code[c.i] = 0 ORDER BY c.i;
        IF p_more ? 'tags' THEN
            INSERT INTO eddyline.tags (run, tag) SELECT c_run[g.c], g.tag
                FROM jsonb_to_recordset(p_more -> 'tags') g(c int, tag text) WHERE v_code[g.c] = 0 ON CONFLICT DO NOTHING;
        END IF;
    END IF;

    -- Existing runs.
    FOR v IN WITH moved AS (
        UPDATE eddyline.runs r SET version = c.version, records = r.records + c.count + v_extra[c.i], changed_at = v_ts[c.i],
                paused = c.paused, memo = c.memo, crc = c.crc, header = c.header, status = c.status, flow = c.flow,
                external_id = c.external,
                started_at = coalesce(r.started_at, CASE WHEN c.begun THEN v_ts[c.i] END),
                ended_at = coalesce(r.ended_at, CASE WHEN c.ended THEN v_ts[c.i] END)
            FROM unnest(c_run, c_base, c_version, c_flow, c_status, c_external, c_begun, c_ended, c_paused, c_memo, c_count,
                c_crc, c_header) WITH ORDINALITY
                c(run, base, version, flow, status, external, begun, ended, paused, memo, count, crc, header, i)
            WHERE r.id = c.run AND c.base > 0 AND c.version > c.base AND v_code[c.i] = 0
            RETURNING c.i, r.records - c.count - v_extra[c.i] + 1 AS first)
        SELECT * FROM moved
    LOOP
        v_first[v.i] := v.first;
    END LOOP;
    INSERT INTO eddyline.records (run, first, version, count, ts, command, crc, body)
        SELECT c.run, v_first[c.i], c.version, c.count, v_ts[c.i], c.command, c.records_crc, c.records
        FROM unnest(c_run, c_base, c_version, c_command, c_count, c_records_crc, c_records) WITH ORDINALITY
            c(run, base, version, command, count, records_crc, records, i)
        WHERE c.version > c.base AND v_code[c.i] = 0;

    -- Consumed items are deleted before new ones are inserted: a message may be sent again under the same id.
    IF cardinality(tm_c) > 0 THEN
        DELETE FROM eddyline.messages m USING unnest(tm_c, tm_id) x(c, id)
            WHERE m.target = c_run[x.c] AND m.id = x.id AND v_code[x.c] = 0;
    END IF;
    IF cardinality(tt_c) > 0 THEN
        DELETE FROM eddyline.timers t USING unnest(tt_c, tt_activation, tt_kind, tt_fence) x(c, activation, kind, fence)
            WHERE t.run = c_run[x.c] AND t.activation = x.activation AND t.kind = x.kind AND t.fence = x.fence
            AND v_code[x.c] = 0;
    END IF;
    IF cardinality(te_c) > 0 THEN
        UPDATE eddyline.tasks t SET held_until = 0 FROM unnest(te_c, te_fence) x(c, fence)
            WHERE t.run = c_run[x.c] AND t.fence = x.fence AND t.held_until > 0 AND v_code[x.c] = 0;
    END IF;
    IF cardinality(m_c) > 0 THEN
        INSERT INTO eddyline.messages (ns, target, id, crc, body)
            SELECT c_ns[m.c], m.target, m.id, m.crc, m.body
            FROM unnest(m_c, m_target, m_id, m_crc, m_body) WITH ORDINALITY m(c, target, id, crc, body, i)
            WHERE v_code[m.c] = 0 ORDER BY m.i ON CONFLICT DO NOTHING;
    END IF;
    IF cardinality(e_c) > 0 THEN
        FOR v IN WITH kept AS (
            INSERT INTO eddyline.events (ns, id, name, key, at, crc, body)
                SELECT c_ns[e.c], e.id, e.name, e.key, v_ts[e.c], e.crc, e.body
                FROM unnest(e_c, e_id, e_name, e_key, e_crc, e_body) WITH ORDINALITY e(c, id, name, key, crc, body, i)
                WHERE v_code[e.c] = 0 ORDER BY e.i ON CONFLICT DO NOTHING RETURNING ns, id)
            SELECT e.c, count(*) FILTER (WHERE k.id IS NULL OR e.nth > 1) AS repeats
                FROM (SELECT u.c, u.id, row_number() OVER (PARTITION BY c_ns[u.c], u.id ORDER BY u.i) AS nth
                    FROM unnest(e_c, e_id) WITH ORDINALITY u(c, id, i) WHERE v_code[u.c] = 0) e
                LEFT JOIN kept k ON k.ns = c_ns[e.c] AND k.id = e.id GROUP BY e.c
        LOOP
            v_repeats[v.c] := v.repeats;
        END LOOP;
    END IF;
    IF p_more ? 'events_taken' THEN
        UPDATE eddyline.events e SET gates_opened = e.gates_opened + x.n
            FROM (SELECT c_ns[t.c] AS ns, t.position, count(*) AS n
                FROM jsonb_to_recordset(p_more -> 'events_taken') t(c int, position bigint) WHERE v_code[t.c] = 0
                GROUP BY 1, 2) x
            WHERE e.ns = x.ns AND e.position = x.position;
    END IF;

    -- Queues of unique keys.
    IF v_lines IS NOT NULL THEN
        FOR v IN SELECT * FROM jsonb_to_recordset(v_lines)
            l(c int, key text, in_line bool, continued uuid, tells_id text, tells_crc int, tells text, turn_crc int, turn text)
            ORDER BY c
        LOOP
            CONTINUE WHEN v_code[v.c] <> 0 OR c_version[v.c] <= c_base[v.c];
            IF c_base[v.c] = 0 THEN
                SELECT count(*), coalesce(bool_or(l.run = c_run[v.c]), false) INTO v_len, v_in FROM eddyline.lines l
                    WHERE l.ns = c_ns[v.c] AND l.flow = c_flow[v.c] AND l.key = v.key;
                IF NOT v_in THEN
                    IF v.tells IS NOT NULL THEN
                        INSERT INTO eddyline.messages (ns, target, id, crc, body)
                            SELECT c_ns[v.c], l.run, v.tells_id, v.tells_crc, v.tells FROM eddyline.lines l
                            WHERE l.ns = c_ns[v.c] AND l.flow = c_flow[v.c] AND l.key = v.key
                            ORDER BY l.place ON CONFLICT DO NOTHING;
                    END IF;
                    INSERT INTO eddyline.lines (ns, flow, key, run) VALUES (c_ns[v.c], c_flow[v.c], v.key, c_run[v.c]);
                    IF v_len = 0 AND v.in_line THEN
                        INSERT INTO eddyline.messages (ns, target, id, crc, body)
                            VALUES (c_ns[v.c], c_run[v.c], 'turn', v.turn_crc, v.turn) ON CONFLICT DO NOTHING;
                    END IF;
                END IF;
            END IF;
            IF c_ended[v.c] THEN
                IF v.continued IS NOT NULL THEN
                    UPDATE eddyline.lines SET run = v.continued WHERE run = c_run[v.c];
                ELSE
                    PERFORM eddyline.leave_line_v1(c_ns[v.c], c_run[v.c], v.turn_crc, v.turn);
                END IF;
            END IF;
        END LOOP;
    END IF;

    -- The state that `decide` reads.
    IF cardinality(a_c) > 0 THEN
        INSERT INTO eddyline.activations (run, id, version, crc, body)
            SELECT c_run[a.c], a.id, c_version[a.c], a.crc, a.body FROM unnest(a_c, a_id, a_crc, a_body) a(c, id, crc, body)
            WHERE v_code[a.c] = 0
            ON CONFLICT (run, id) DO UPDATE SET version = excluded.version, crc = excluded.crc, body = excluded.body;
    END IF;
    IF cardinality(v_c) > 0 THEN
        INSERT INTO eddyline."values" (run, id, crc, body)
            SELECT c_run[a.c], a.id, a.crc, a.body FROM unnest(v_c, v_id, v_crc, v_body) a(c, id, crc, body)
            WHERE v_code[a.c] = 0 ON CONFLICT DO NOTHING;
    END IF;
    IF p_more ? 'emitted' THEN
        INSERT INTO eddyline.emitted (run, scope, event, crc, body)
            SELECT c_run[a.c], a.scope, a.event, a.crc, a.body
            FROM jsonb_to_recordset(p_more -> 'emitted') a(c int, scope bigint, event bigint, crc int, body text)
            WHERE v_code[a.c] = 0
            ON CONFLICT (run, scope, event) DO UPDATE SET crc = excluded.crc, body = excluded.body;
    END IF;
    IF p_more ? 'reuse_done' THEN
        DELETE FROM eddyline.reuse r USING jsonb_to_recordset(p_more -> 'reuse_done') a(c int, activation text)
            WHERE r.run = c_run[a.c] AND r.activation = a.activation AND v_code[a.c] = 0;
    END IF;
    IF p_more ? 'reuse' THEN
        INSERT INTO eddyline.reuse (run, activation, crc, body)
            SELECT c_run[a.c], a.activation, a.crc, a.body
            FROM jsonb_to_recordset(p_more -> 'reuse') a(c int, activation text, crc int, body text) WHERE v_code[a.c] = 0
            ON CONFLICT (run, activation) DO UPDATE SET crc = excluded.crc, body = excluded.body;
    END IF;
    IF p_more ? 'cursors' THEN
        INSERT INTO eddyline.cursors (run, name, position)
            SELECT c_run[a.c], a.name, a.position
            FROM jsonb_to_recordset(p_more -> 'cursors') a(c int, name text, position bigint) WHERE v_code[a.c] = 0
            ON CONFLICT (run, name) DO UPDATE SET position = excluded.position;
    END IF;
    IF p_more ? 'logs' THEN
        INSERT INTO eddyline.logs (run, activation, first)
            SELECT c_run[a.c], a.activation, v_first[a.c]
            FROM jsonb_to_recordset(p_more -> 'logs') a(c int, activation text) WHERE v_code[a.c] = 0
            ON CONFLICT DO NOTHING;
    END IF;

    -- Tasks.
    FOR i IN 1..n LOOP
        CONTINUE WHEN v_code[i] <> 0 OR c_version[i] <= c_base[i] OR c_paused[i] = v_was_paused[i];
        FOR v IN UPDATE eddyline.tasks t SET paused = c_paused[i] WHERE t.run = c_run[i]
            RETURNING t.ns, t.queue, t.key, t.worker
        LOOP
            IF v.key <> '' AND v.worker IS NULL THEN
                k_ns := k_ns || v.ns; k_queue := k_queue || v.queue; k_key := k_key || v.key;
            END IF;
        END LOOP;
        IF NOT c_paused[i] AND c_base[i] > 0 THEN
            h_ns := h_ns || c_ns[i];
        END IF;
    END LOOP;
    IF cardinality(td_c) > 0 THEN
        WITH gone AS (
            DELETE FROM eddyline.tasks t USING unnest(td_c, td_fence, td_remove) x(c, fence, remove)
                WHERE t.run = c_run[x.c] AND t.fence = x.fence AND x.remove AND v_code[x.c] = 0
                RETURNING t.ns, t.queue, t.key, t.worker IS NOT NULL AS held, cardinality(t.limits) > 0 AS limited)
            SELECT k_ns || coalesce(array_agg(g.ns) FILTER (WHERE g.waits), '{}'),
                    k_queue || coalesce(array_agg(g.queue) FILTER (WHERE g.waits), '{}'),
                    k_key || coalesce(array_agg(g.key) FILTER (WHERE g.waits), '{}'),
                    coalesce(bool_or(g.held AND g.limited), false), array_agg(g.ns) FILTER (WHERE g.held),
                    array_agg(g.queue) FILTER (WHERE g.held)
                INTO k_ns, k_queue, k_key, v_limited, d_ns, d_queue
                FROM (SELECT *, NOT held AND key <> '' AS waits FROM gone) g;
        -- A claimed task that ends may make room under a rule.
        IF d_ns IS NOT NULL THEN
            h_ns := h_ns || ARRAY(SELECT DISTINCT d.ns FROM (SELECT DISTINCT u.ns, u.queue FROM unnest(d_ns, d_queue) u(ns, queue)) d
                WHERE EXISTS (SELECT 1 FROM eddyline.limits l WHERE l.ns = d.ns AND l.ruled)
                OR EXISTS (SELECT 1 FROM eddyline.queues q WHERE q.ns = d.ns AND q.name = d.queue AND q.ruled));
        END IF;
        IF v_limited THEN
            DELETE FROM eddyline.passing p USING unnest(td_c, td_fence, td_remove) x(c, fence, remove)
                WHERE p.run = c_run[x.c] AND p.fence = x.fence AND x.remove AND v_code[x.c] = 0;
        END IF;
        IF false = ANY (td_remove) THEN
            FOR v IN UPDATE eddyline.tasks t SET closed = true FROM unnest(td_c, td_fence, td_remove) x(c, fence, remove)
                WHERE t.run = c_run[x.c] AND t.fence = x.fence AND NOT x.remove AND v_code[x.c] = 0
                RETURNING t.ns, t.queue, t.key, t.worker
            LOOP
                IF v.key <> '' AND v.worker IS NULL THEN
                    k_ns := k_ns || v.ns; k_queue := k_queue || v.queue; k_key := k_key || v.key;
                END IF;
            END LOOP;
        END IF;
    END IF;
    IF p_more ? 'classes' THEN
        INSERT INTO eddyline.classes (ns, queue, class, is_run, handler, requires, build, keyed, limits)
            SELECT k.ns, k.queue, k.class, k.is_run, k.handler,
                ARRAY(SELECT jsonb_array_elements_text(k.requires)), k.build, k.keyed,
                ARRAY(SELECT jsonb_array_elements_text(k.limits))
            FROM jsonb_to_recordset(p_more -> 'classes')
                k(ns text, queue text, class bigint, is_run bool, handler text, requires jsonb, build text, keyed bool,
                limits jsonb)
            ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING;
    END IF;
    IF p_more ? 'slow_limits' THEN
        INSERT INTO eddyline.limits (ns, name, closed_until)
            SELECT c_ns[s.c], s.name, max(v_ts[s.c] + s.ms)
            FROM jsonb_to_recordset(p_more -> 'slow_limits') s(c int, name text, ms bigint) WHERE v_code[s.c] = 0
            GROUP BY 1, 2 ORDER BY 1, 2
            ON CONFLICT (ns, name) DO UPDATE SET closed_until = greatest(limits.closed_until, excluded.closed_until);
    END IF;

    -- Timers and gates.
    IF cardinality(x_c) > 0 THEN
        DELETE FROM eddyline.timers t USING unnest(x_c, x_activation, x_kind, x_fence, x_set) x(c, activation, kind, fence, set)
            WHERE t.run = c_run[x.c] AND t.activation = x.activation AND t.kind = x.kind AND t.fence = x.fence
            AND NOT x.set AND v_code[x.c] = 0;
        INSERT INTO eddyline.timers (run, activation, kind, fence, ns, due, wall)
            SELECT c_run[x.c], x.activation, x.kind, x.fence, c_ns[x.c], coalesce(x.at, v_ts[x.c] + x.after), x.at IS NOT NULL
            FROM unnest(x_c, x_activation, x_kind, x_fence, x_set, x_after, x_at)
                x(c, activation, kind, fence, set, after, at)
            WHERE x.set AND v_code[x.c] = 0
            ON CONFLICT (run, activation, kind, fence)
                DO UPDATE SET due = excluded.due, wall = excluded.wall, held_until = 0;
    END IF;
    IF p_more ? 'gates' THEN
        INSERT INTO eddyline.gates (run, activation, ns, token, position, at, deadline, reason, event, event_key, closed,
                crc, body)
            SELECT c_run[g.c], g.activation, c_ns[g.c], g.token,
                CASE WHEN g.arrived THEN nextval('eddyline.gate_order') ELSE 0 END,
                CASE WHEN g.arrived THEN v_ts[g.c] END, v_ts[g.c] + g.timeout_ms, g.reason, g.event, g.event_key, g.closed,
                g.crc, g.body
            FROM jsonb_to_recordset(p_more -> 'gates') g(c int, activation bigint, token text, arrived bool,
                timeout_ms bigint, reason text, event text, event_key text, closed bool, crc int, body text)
            WHERE v_code[g.c] = 0
            ON CONFLICT (run, activation) DO UPDATE SET ns = excluded.ns, token = excluded.token,
                position = excluded.position, at = excluded.at, deadline = excluded.deadline, reason = excluded.reason,
                event = excluded.event, event_key = excluded.event_key, closed = excluded.closed, crc = excluded.crc,
                body = excluded.body;
    END IF;
    IF p_more ? 'gates_closed' THEN
        UPDATE eddyline.gates g SET closed = true
            FROM jsonb_to_recordset(p_more -> 'gates_closed') x(c int, activation bigint)
            WHERE g.run = c_run[x.c] AND g.activation = x.activation AND v_code[x.c] = 0;
    END IF;

    -- New tasks, those that a claim of this call gets at once as claimed. Locks of claims come last: other calls may claim
    -- for the same workers.
    IF 0 < ANY (t_group) THEN
        IF cardinality(k_ns) > 0 THEN
            PERFORM eddyline.look_at_keys_v1(k_ns, k_queue, k_key);
            k_ns := '{}'; k_queue := '{}'; k_key := '{}';
        END IF;
        SELECT * INTO v_claimed FROM eddyline.claim_new_v1(t_group, t_age_ms,
            ARRAY(SELECT v_code[t.c] = 0 FROM unnest(t_c) WITH ORDINALITY t(c, i) ORDER BY t.i), r_group, r_request, r_worker,
            r_max, r_most, g_ns, g_queues, g_offer, l_group, l_queue, l_class, l_low);
    ELSE
        SELECT array_fill(0, ARRAY[cardinality(t_c)]) AS o_to, array_fill(false, ARRAY[cardinality(r_group)]) AS o_done
            INTO v_claimed;
    END IF;
    IF cardinality(t_c) > 0 THEN
        INSERT INTO eddyline.tasks (run, fence, activation, ns, queue, flow, class, key, rank, limits, handler, is_run,
                queued_at, start_by, timeout_ms, closed, paused, crc, body, started_crc, started, worker, request, claimed,
                since, lease_ms, lease_until, deadline, build, memo)
            SELECT c_run[t.c], t.fence, t.activation, c_ns[t.c], t.queue, c_flow[t.c], t.class, t.key, v_ts[t.c] - t.age_ms,
                CASE WHEN t.limits = '' THEN '{}' ELSE string_to_array(t.limits, chr(30)) END, t.handler, t.is_run,
                v_ts[t.c], v_ts[t.c] + t.start_ms, t.timeout_ms, t.closed, c_paused[t.c], t.crc, t.body, t.started_crc,
                t.started, r_worker[t.r], r_request[t.r], CASE WHEN t.r > 0 THEN nextval('eddyline.claim_order') * 100000 END,
                CASE WHEN t.r > 0 THEN v_ts[t.c] END, r_lease_ms[t.r], v_ts[t.c] + r_lease_ms[t.r],
                CASE WHEN t.r > 0 THEN v_ts[t.c] + t.timeout_ms END, CASE WHEN t.r > 0 THEN t.build END,
                CASE WHEN t.r > 0 THEN c_memo[t.c] END
            FROM unnest(t_c, t_fence, t_activation, t_queue, t_class, t_key, t_age_ms, t_limits, t_handler, t_is_run,
                t_start_ms, t_timeout_ms, t_closed, t_crc, t_body, t_started_crc, t_started, t_build, v_claimed.o_to)
                WITH ORDINALITY t(c, fence, activation, queue, class, key, age_ms, limits, handler, is_run, start_ms,
                timeout_ms, closed, crc, body, started_crc, started, build, r, i)
            WHERE v_code[t.c] = 0 ORDER BY t.i;
        FOR i IN 1..cardinality(t_c) LOOP
            IF t_key[i] <> '' AND v_code[t_c[i]] = 0 THEN
                k_ns := k_ns || c_ns[t_c[i]]; k_queue := k_queue || t_queue[i]; k_key := k_key || t_key[i];
            END IF;
        END LOOP;
    END IF;
    IF 0 < ANY (t_group) THEN
        INSERT INTO eddyline.records (run, first, version, count, ts, fence, worker, crc, body)
            SELECT c_run[t.c], v_first[t.c] + c_count[t.c] - 1 + row_number() OVER (PARTITION BY t.c ORDER BY t.i),
                c_version[t.c], 1, v_ts[t.c], t.fence, r_worker[t.r], t.crc, t.body
            FROM unnest(t_c, t_fence, t_started_crc, t_started, v_claimed.o_to) WITH ORDINALITY t(c, fence, crc, body, r, i)
            WHERE t.r > 0;
        -- Numbers that no claim used.
        UPDATE eddyline.runs r SET records = r.records - x.n FROM (
            SELECT t.c, count(*) AS n FROM unnest(t_c, t_group, v_claimed.o_to) t(c, g, r)
            WHERE t.g > 0 AND t.r = 0 AND v_code[t.c] = 0 GROUP BY t.c) x WHERE r.id = c_run[x.c];
    END IF;
    IF cardinality(k_ns) > 0 THEN
        PERFORM eddyline.look_at_keys_v1(k_ns, k_queue, k_key);
    END IF;

    FOR i IN 1..n LOOP
        out_c := i;
        out_code := v_code[i];
        out_at := v_ts[i];
        out_first := CASE WHEN c_version[i] > c_base[i] THEN v_first[i] ELSE 0 END;
        out_current := v_current[i];
        out_run := v_other[i];
        out_fingerprint := v_fingers[i];
        out_repeats := v_repeats[i];
        out_gone := NULL;
        IF out_code = 6 THEN
            out_gone := ARRAY(SELECT jsonb_array_elements_text(v_gone -> i::text)::int);
        ELSIF out_code = 2 THEN
            SELECT r.version INTO out_current FROM eddyline.runs r WHERE r.id = c_run[i];
            SELECT 1, o.ts, o.first INTO v FROM eddyline.records o JOIN eddyline.runs r ON r.id = o.run AND NOT r.trimmed
                WHERE o.run = c_run[i] AND o.version = c_base[i] + 1 AND o.command = c_command[i]
                ORDER BY o.first DESC LIMIT 1;
            IF FOUND THEN
                out_code := 1;
                out_at := v.ts;
                out_first := v.first;
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF cardinality(h_ns) > 0 THEN
        FOR out_ns, out_queue IN SELECT h.ns, q.queue FROM (SELECT DISTINCT u.ns FROM unnest(h_ns) u(ns)) h
            CROSS JOIN LATERAL eddyline.offering_v1(h.ns) q(queue)
        LOOP
            out_code := -1;
            RETURN NEXT;
        END LOOP;
    END IF;
    IF cardinality(r_group) > 0 THEN
        FOR i IN 1..cardinality(r_group) LOOP
            CONTINUE WHEN NOT v_claimed.o_done[i];
            out_code := -2;
            out_r := i;
            out_gone := array_positions(v_claimed.o_to, i);
            out_full := v_claimed.o_full[i];
            out_exhausted := v_claimed.o_exhausted;
            RETURN NEXT;
        END LOOP;
        IF NOT true = ALL (v_claimed.o_done) THEN
            RETURN QUERY SELECT NULL::int, -3, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::int[], NULL::int,
                    NULL::text, k.* FROM eddyline.claim_v1(p_now, r_group, r_request, r_worker, r_max, r_most, r_lease_ms,
                v_claimed.o_done, g_ns, g_queues, g_offer, l_group, l_queue, l_class, l_low) k;
        END IF;
    END IF;
END $$;

-- Removes a run from the queue of its unique key. If it was the first, the next one gets a message.
CREATE FUNCTION eddyline.leave_line_v1(p_ns text, p_run uuid, p_turn_crc int, p_turn text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_own record;
    v_first bigint;
    v_next uuid;
BEGIN
    SELECT l.* INTO v_own FROM eddyline.lines l WHERE l.run = p_run;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended(concat_ws(chr(31), v_own.ns, v_own.flow, v_own.key), 7));
    SELECT min(l.place) INTO v_first FROM eddyline.lines l
        WHERE l.ns = v_own.ns AND l.flow = v_own.flow AND l.key = v_own.key;
    DELETE FROM eddyline.lines WHERE run = p_run;
    IF v_first = v_own.place THEN
        SELECT l.run INTO v_next FROM eddyline.lines l
            WHERE l.ns = v_own.ns AND l.flow = v_own.flow AND l.key = v_own.key ORDER BY l.place LIMIT 1;
        IF FOUND THEN
            INSERT INTO eddyline.messages (ns, target, id, crc, body) VALUES (p_ns, v_next, 'turn', p_turn_crc, p_turn)
                ON CONFLICT DO NOTHING;
        END IF;
    END IF;
END $$;

-- Deletes up to p_most rows of each table that belong to a run; true if there may be more.
CREATE FUNCTION eddyline.delete_rows_v1(p_run uuid, p_most int) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE
    v_table text;
    v_count bigint;
    v_more bool := false;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['records', 'logs', 'emitted', 'reuse', 'cursors', 'gates', 'activations', 'values'] LOOP
        EXECUTE format('DELETE FROM eddyline.%I WHERE ctid = ANY (ARRAY(SELECT ctid FROM eddyline.%I WHERE run = $1 LIMIT %s))',
            v_table, v_table, p_most) USING p_run;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_more := v_more OR v_count >= p_most;
    END LOOP;
    RETURN v_more;
END $$;
