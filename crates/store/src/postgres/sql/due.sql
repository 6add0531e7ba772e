-- Due items, each handed out to one caller for ten seconds. A row without a run (a document: without an id) contains
-- the time until the next item is due. Planned with indexes only: a plan made while a table was empty may stay in use.

CREATE FUNCTION eddyline.due_timers_v1(p_now bigint, p_wall bigint, p_skip text[], p_limit int)
RETURNS TABLE (out_run uuid, out_ns text, out_activation bigint, out_kind int, out_fence bigint, out_due bigint,
    out_wall bool, out_next bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := coalesce(p_now, eddyline.wall_ms());
    v_clock bigint;
    v_left int := p_limit;
    v_next bigint;
    v_got int;
BEGIN
    FOREACH out_wall IN ARRAY ARRAY[false, true] LOOP
        v_clock := CASE WHEN out_wall THEN coalesce(p_wall, v_now) ELSE v_now END;
        RETURN QUERY EXECUTE format('
            WITH d AS MATERIALIZED (
                SELECT run, activation, kind, fence FROM eddyline.timers
                WHERE wall = $1 AND due <= $2 AND held_until <= $3 AND ns <> ALL ($4)
                ORDER BY due, run, activation, kind, fence LIMIT %s FOR UPDATE SKIP LOCKED)
            UPDATE eddyline.timers t SET held_until = $3 + 10000 FROM d
                WHERE t.run = d.run AND t.activation = d.activation AND t.kind = d.kind AND t.fence = d.fence
                RETURNING t.run, t.ns, t.activation, t.kind, t.fence, t.due, t.wall, NULL::bigint', v_left)
            USING out_wall, v_clock, v_now, p_skip;
        GET DIAGNOSTICS v_got = ROW_COUNT;
        v_left := v_left - v_got;
        EXIT WHEN v_left = 0;
        -- What is due and was not handed out is held: those are few.
        SELECT least(v_next, min(greatest(t.held_until - v_now, 0))) INTO v_next FROM eddyline.timers t
            WHERE t.wall = out_wall AND t.due <= v_clock AND t.ns <> ALL (p_skip);
        SELECT least(v_next, min(t.due) - v_clock) INTO v_next FROM eddyline.timers t
            WHERE t.wall = out_wall AND t.due > v_clock;
    END LOOP;
    out_run := NULL;
    out_next := CASE WHEN v_left = 0 THEN 0 ELSE v_next END;
    RETURN NEXT;
END $$;

CREATE FUNCTION eddyline.due_documents_v1(p_now bigint, p_wall bigint, p_skip text[], p_limit int)
RETURNS TABLE (out_crc int, out_body text, out_ns text, out_kind text, out_id text, out_revision bigint, out_due bigint,
    out_changed_at bigint, out_next bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := coalesce(p_now, eddyline.wall_ms());
    v_wall bigint := coalesce(p_wall, v_now);
    v_got int;
BEGIN
    RETURN QUERY EXECUTE format('
        WITH d AS MATERIALIZED (
            SELECT ns, kind, id FROM eddyline.documents
            WHERE due <= $1 AND held_until <= $2 AND ns <> ALL ($3)
            ORDER BY due, ns, kind, id LIMIT %s FOR UPDATE SKIP LOCKED)
        UPDATE eddyline.documents t SET held_until = $2 + 10000 FROM d
            WHERE t.ns = d.ns AND t.kind = d.kind AND t.id = d.id
            RETURNING t.crc, t.body, t.ns, t.kind, t.id, t.revision, t.due, t.changed_at, NULL::bigint', p_limit)
        USING v_wall, v_now, p_skip;
    GET DIAGNOSTICS v_got = ROW_COUNT;
    IF v_got >= p_limit THEN
        out_next := 0;
    ELSE
        SELECT min(greatest(t.held_until - v_now, 0)) INTO out_next FROM eddyline.documents t
            WHERE t.due <= v_wall AND t.ns <> ALL (p_skip);
        SELECT least(out_next, min(t.due) - v_wall) INTO out_next FROM eddyline.documents t WHERE t.due > v_wall;
    END IF;
    out_id := NULL;
    RETURN NEXT;
END $$;

-- Messages are held by their target: while some that were handed out are not consumed, no caller gets others.
CREATE FUNCTION eddyline.due_messages_v1(p_now bigint, p_skip text[], p_limit int, p_most int, p_bytes bigint)
RETURNS TABLE (out_target uuid, out_ns text, out_place bigint, out_id text, out_crc int, out_body text, out_next bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := coalesce(p_now, eddyline.wall_ms());
    v record;
    v_places bigint[];
    v_bytes bigint;
    v_handed bigint := 0;
    v_count int := 0;
    v_more bool := false;
    v_others bool;
BEGIN
    FOR v IN EXECUTE format('
        SELECT m.target, m.ns FROM eddyline.messages m
        WHERE m.held_until <= $2 AND m.ns <> ALL ($1) AND NOT EXISTS (
            SELECT 1 FROM eddyline.messages e WHERE e.target = m.target AND e.place < m.place OFFSET 0)
        ORDER BY m.place LIMIT %s FOR UPDATE OF m SKIP LOCKED', p_limit + 1) USING p_skip, v_now
    LOOP
        IF v_count >= p_limit OR v_handed >= p_bytes THEN
            v_more := true;
            EXIT;
        END IF;
        CONTINUE WHEN EXISTS (SELECT 1 FROM eddyline.messages m WHERE m.target = v.target AND m.held_until > v_now);
        SELECT array_agg(x.place ORDER BY x.place) FILTER (WHERE x.fits), sum(x.bytes) FILTER (WHERE x.fits),
                bool_or(NOT x.fits) INTO v_places, v_bytes, v_others
            FROM (SELECT i.place, i.bytes, i.nth = 1 OR (i.nth <= p_most AND i.so_far <= p_bytes) AS fits FROM (
                SELECT m.place, octet_length(m.body) AS bytes, row_number() OVER (ORDER BY m.place) AS nth,
                    sum(octet_length(m.body)) OVER (ORDER BY m.place) AS so_far
                FROM (SELECT * FROM eddyline.messages o WHERE o.target = v.target ORDER BY o.place LIMIT p_most + 1) m) i) x;
        CONTINUE WHEN v_places IS NULL;
        v_more := v_more OR v_others;
        v_handed := v_handed + v_bytes;
        v_count := v_count + 1;
        UPDATE eddyline.messages m SET held_until = v_now + 10000 WHERE m.place = ANY (v_places);
        RETURN QUERY SELECT m.target, v.ns, m.place, m.id, m.crc, m.body, NULL::bigint FROM eddyline.messages m
            WHERE m.place = ANY (v_places) ORDER BY m.place;
    END LOOP;
    IF v_more THEN
        out_next := 0;
    ELSE
        SELECT min(greatest(h.until - v_now, 0)) INTO out_next FROM (
            SELECT max(m.held_until) AS until FROM eddyline.messages m WHERE m.ns <> ALL (p_skip) GROUP BY m.target) h;
    END IF;
    out_target := NULL;
    RETURN NEXT;
END $$;

-- Tasks with an expired lease or timeout. Time in which no process watched is added to their time.
CREATE FUNCTION eddyline.due_leases_v1(p_now bigint, p_skip text[], p_limit int, p_unwatched_ms bigint)
RETURNS TABLE (out_run uuid, out_ns text, out_fence bigint, out_activation bigint, out_why int, out_build text,
    out_memo bigint, out_next bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint;
    v_looked bigint;
    v_got int;
BEGIN
    SELECT m.value INTO v_looked FROM eddyline.meta m WHERE m.name = 'looked_at' FOR UPDATE;
    v_now := coalesce(p_now, eddyline.wall_ms());
    IF v_now - v_looked > p_unwatched_ms THEN
        UPDATE eddyline.tasks t SET
                lease_until = c.ends + c.unserved, by_worker = false, deadline = t.deadline + c.unserved
            FROM (SELECT o.run, o.fence, eddyline.lease_end_v1(o.ns, o.worker, o.by_worker, o.lease_until, o.lease_ms) AS ends,
                    greatest(v_now - greatest(v_looked, eddyline.lease_end_v1(o.ns, o.worker, o.by_worker, o.lease_until, o.lease_ms) - o.lease_ms, o.since), 0) AS unserved
                FROM eddyline.tasks o WHERE o.worker IS NOT NULL ORDER BY o.run, o.fence FOR NO KEY UPDATE) c
            WHERE t.run = c.run AND t.fence = c.fence AND t.worker IS NOT NULL;
        UPDATE eddyline.tasks t SET start_by = t.start_by + greatest(v_now - greatest(v_looked, t.queued_at), 0)
            WHERE t.worker IS NULL AND t.start_by IS NOT NULL;
    END IF;
    UPDATE eddyline.meta SET value = v_now WHERE name = 'looked_at' AND value < v_now;
    RETURN QUERY EXECUTE format('
        WITH up AS (
            (SELECT o.run, o.fence, least(greatest(o.lease_until, w.seen + o.lease_ms), o.deadline) AS ends
                FROM eddyline.tasks o
                LEFT JOIN eddyline.workers w ON o.by_worker AND w.ns = o.ns AND w.worker = o.worker
                WHERE o.worker IS NOT NULL AND least(greatest(o.lease_until, w.seen + o.lease_ms), o.deadline) <= $1
                AND o.held_until <= $1 AND o.ns <> ALL ($2) ORDER BY 3, 1, 2 LIMIT %1$s)
            UNION ALL
            (SELECT run, fence, start_by FROM eddyline.tasks
                WHERE worker IS NULL AND NOT closed AND start_by <= $1 AND held_until <= $1 AND ns <> ALL ($2)
                ORDER BY start_by LIMIT %1$s)
            ORDER BY 3, 1, 2 LIMIT %1$s),
        d AS MATERIALIZED (
            SELECT t.run, t.fence, up.ends FROM up JOIN eddyline.tasks t ON t.run = up.run AND t.fence = up.fence
            WHERE t.held_until <= $1 FOR NO KEY UPDATE OF t SKIP LOCKED),
        h AS (UPDATE eddyline.tasks t SET held_until = $1 + 10000 FROM d WHERE t.run = d.run AND t.fence = d.fence
            RETURNING t.*, d.ends)
        SELECT run, ns, fence, activation, CASE WHEN worker IS NULL THEN 2 WHEN deadline <= $1 THEN 1 ELSE 0 END,
            build, memo, NULL::bigint FROM h ORDER BY ends, run, fence', p_limit) USING v_now, p_skip;
    GET DIAGNOSTICS v_got = ROW_COUNT;
    IF v_got >= p_limit THEN
        out_next := 0;
    ELSE
        SELECT least(
            (SELECT min(greatest(least(greatest(t.lease_until, w.seen + t.lease_ms), t.deadline), t.held_until))
                FROM eddyline.tasks t LEFT JOIN eddyline.workers w ON t.by_worker AND w.ns = t.ns AND w.worker = t.worker
                WHERE t.worker IS NOT NULL AND t.ns <> ALL (p_skip)),
            -- What is up and was not handed out is held: those are few.
            (SELECT min(t.held_until) FROM eddyline.tasks t
                WHERE t.worker IS NULL AND NOT t.closed AND t.start_by <= v_now AND t.ns <> ALL (p_skip)),
            (SELECT min(t.start_by) FROM eddyline.tasks t
                WHERE t.worker IS NULL AND NOT t.closed AND t.start_by > v_now)) - v_now
            INTO out_next;
    END IF;
    out_run := NULL;
    RETURN NEXT;
END $$;
