-- The first tasks of each class that is asked for. The limit is a literal: with a parameter the planner would expect a
-- tenth of the table.
DO $do$
DECLARE
    n int;
BEGIN
    FOREACH n IN ARRAY ARRAY[1, 8, 32, 128, 1024] LOOP
        EXECUTE format($sql$
            CREATE FUNCTION eddyline.heads_%1$s_v1(p_ns text, p_queues text[], p_classes bigint[])
            RETURNS TABLE (run uuid, fence bigint, rank bigint, place bigint) LANGUAGE plpgsql AS $$
            #variable_conflict use_column
            BEGIN
                RETURN QUERY SELECT x.run, x.fence, x.rank, x.place FROM unnest(p_queues, p_classes) k(queue, class)
                    CROSS JOIN LATERAL (
                        SELECT t.run, t.fence, t.rank, t.place FROM eddyline.tasks t
                        WHERE t.ns = p_ns AND t.queue = k.queue AND t.class = k.class
                        AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                        ORDER BY t.rank, t.place LIMIT %1$s) x
                    ORDER BY x.rank, x.place LIMIT %1$s;
            END $$
        $sql$, n);
    END LOOP;
END $do$;

-- What is left of a rate, in parts of a claim.
CREATE FUNCTION eddyline.level_v1(p_ns text, p_is_limit bool, p_name text, p_count bigint, p_per_ms bigint, p_burst bigint,
    p_now bigint) RETURNS numeric LANGUAGE plpgsql AS $$
DECLARE
    v_full numeric := greatest(p_per_ms, 1)::numeric * greatest(p_burst, 1);
    v record;
BEGIN
    SELECT b.level, b.at INTO v FROM eddyline.buckets b WHERE b.ns = p_ns AND b.is_limit = p_is_limit AND b.name = p_name;
    IF NOT FOUND THEN
        RETURN v_full;
    END IF;
    RETURN least(v_full, v.level + greatest(p_now - v.at, 0)::numeric * p_count);
END $$;

-- Until when a rate lets nothing pass; null if it does now.
CREATE FUNCTION eddyline.rate_until_v1(p_ns text, p_is_limit bool, p_name text, p_count bigint, p_per_ms bigint,
    p_burst bigint, p_now bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN l.level < greatest(p_per_ms, 1)
        THEN p_now + ceil((greatest(p_per_ms, 1) - l.level) / greatest(p_count, 1))::bigint END
    FROM eddyline.level_v1(p_ns, p_is_limit, p_name, p_count, p_per_ms, p_burst, p_now) l(level)
$$;

CREATE FUNCTION eddyline.spend_v1(p_ns text, p_is_limit bool, p_name text, p_count bigint, p_per_ms bigint, p_burst bigint,
    p_now bigint) RETURNS void LANGUAGE sql VOLATILE AS $$
    INSERT INTO eddyline.buckets (ns, is_limit, name, level, at)
        SELECT p_ns, p_is_limit, p_name, greatest(l.level - greatest(p_per_ms, 1), 0), p_now
        FROM eddyline.level_v1(p_ns, p_is_limit, p_name, p_count, p_per_ms, p_burst, p_now) l(level)
        ON CONFLICT (ns, is_limit, name) DO UPDATE SET level = excluded.level, at = greatest(buckets.at, excluded.at)
$$;

-- Why a limit lets nothing pass: 'closed', 'most' or 'rate'.
CREATE FUNCTION eddyline.limit_bound_v1(p_ns text, p_limit text, p_now bigint, OUT why text, OUT most bigint,
    OUT until bigint) LANGUAGE plpgsql AS $$
DECLARE
    v eddyline.limits;
BEGIN
    SELECT * INTO v FROM eddyline.limits l WHERE l.ns = p_ns AND l.name = split_part(p_limit, chr(31), 1);
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF v.closed_until > p_now THEN
        why := 'closed';
        until := v.closed_until;
        RETURN;
    END IF;
    IF v.concurrency IS NOT NULL AND v.concurrency
        <= (SELECT count(*) FROM eddyline.passing p WHERE p.ns = p_ns AND p."limit" = p_limit)
    THEN
        why := 'most';
        most := v.concurrency;
        RETURN;
    END IF;
    IF v.rate_count IS NOT NULL THEN
        until := eddyline.rate_until_v1(p_ns, true, p_limit, v.rate_count, v.rate_per_ms, v.rate_burst, p_now);
        IF until IS NOT NULL THEN
            why := 'rate';
        END IF;
    END IF;
END $$;

-- The first thing that keeps a task that waits from being claimed.
CREATE FUNCTION eddyline.bound_v1(p_ns text, p_queue text, p_flow text, p_limits text[], p_now bigint, OUT why text,
    OUT most bigint, OUT name text) LANGUAGE plpgsql AS $$
DECLARE
    q eddyline.queues;
    v record;
    v_limit text;
BEGIN
    SELECT * INTO q FROM eddyline.queues o WHERE o.ns = p_ns AND o.name = p_queue AND o.ruled;
    IF FOUND THEN
        IF q.paused THEN
            why := 'paused';
            RETURN;
        END IF;
        IF q.concurrency IS NOT NULL AND q.concurrency <= (SELECT count(*) FROM eddyline.tasks t
            WHERE t.ns = p_ns AND t.queue = p_queue AND t.worker IS NOT NULL)
        THEN
            why := 'concurrency';
            most := q.concurrency;
            RETURN;
        END IF;
        IF q.rate_count IS NOT NULL AND eddyline.rate_until_v1(p_ns, false, p_queue, q.rate_count, q.rate_per_ms,
            q.rate_burst, p_now) IS NOT NULL
        THEN
            why := 'rate';
            RETURN;
        END IF;
        IF q.flow_concurrency IS NOT NULL AND q.flow_concurrency <= (SELECT count(*) FROM eddyline.tasks t
            WHERE t.ns = p_ns AND t.queue = p_queue AND t.flow = p_flow AND t.worker IS NOT NULL)
        THEN
            why := 'flow';
            most := q.flow_concurrency;
            RETURN;
        END IF;
    END IF;
    FOREACH v_limit IN ARRAY p_limits LOOP
        SELECT * INTO v FROM eddyline.limit_bound_v1(p_ns, v_limit, p_now);
        IF v.why IS NOT NULL THEN
            why := 'limit';
            most := v.most;
            name := split_part(v_limit, chr(31), 1);
            RETURN;
        END IF;
    END LOOP;
END $$;

-- Gives locked tasks to a worker, and records it.
CREATE FUNCTION eddyline.hand_over_v1(p_now bigint, p_runs uuid[], p_fences bigint[], p_worker text, p_request uuid,
    p_lease_ms bigint, p_flows jsonb, p_build text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_order bigint := nextval('eddyline.claim_order') * 100000;
BEGIN
    UPDATE eddyline.tasks t SET worker = p_worker, request = p_request, claimed = v_order + x.i, since = p_now,
            lease_ms = p_lease_ms, lease_until = p_now + p_lease_ms, by_worker = false, deadline = p_now + t.timeout_ms,
            build = coalesce(p_flows ->> t.handler, p_build), memo = r.memo, held_until = 0
        FROM unnest(p_runs, p_fences) WITH ORDINALITY x(run, fence, i) JOIN eddyline.runs r ON r.id = x.run
        WHERE t.run = x.run AND t.fence = x.fence;
    WITH moved AS (
        UPDATE eddyline.runs r SET records = r.records + k.n, changed_at = greatest(r.changed_at, p_now)
            FROM (SELECT x.run, count(*) AS n FROM unnest(p_runs) x(run) GROUP BY x.run) k WHERE r.id = k.run
            RETURNING r.id, r.records - k.n AS was, r.version, r.changed_at)
        INSERT INTO eddyline.records (run, first, version, count, ts, fence, worker, crc, body)
            SELECT t.run, m.was + row_number() OVER (PARTITION BY x.run ORDER BY x.i), m.version, 1, m.changed_at, t.fence,
                p_worker, t.started_crc, t.started
            FROM unnest(p_runs, p_fences) WITH ORDINALITY x(run, fence, i)
            JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence JOIN moved m ON m.id = x.run;
END $$;

-- Gives out tasks, each request in turn. Rows without a run say how a request ended.
CREATE FUNCTION eddyline.claim_v1(p_now bigint, r_ns text[], r_request uuid[], r_worker text[], r_queues text[],
    r_offer text[], r_max int[], r_most int[], r_lease_ms bigint[])
RETURNS TABLE (out_r int, out_before bool, out_run uuid, out_fence bigint, out_flow text, out_crc int, out_body text,
    out_request uuid, out_since bigint, out_lease_ms bigint, out_lease_until bigint, out_deadline bigint, out_build text,
    out_memo bigint, out_retry_at bigint, out_full bool)
-- Planned once a connection, with indexes only: planning each statement anew took two thirds of the time of a claim.
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_now bigint;
    v record;
    v_best record;
    q eddyline.queues;
    v_offer jsonb;
    v_flows jsonb;
    v_build text;
    v_handlers text[];
    v_labels text[];
    v_any bool;
    v_queues text[];
    v_pq text[];
    v_pc bigint[];
    v_limited bool;
    v_exact bool;
    v_held bigint;
    v_room bigint;
    v_runs uuid[];
    v_fences bigint[];
    v_wanted int;
    v_retry bigint;
    v_got_runs uuid[];
    v_got_fences bigint[];
    v_blocked text[];
    v_blocked_flows text[];
    v_blocked_limits text[];
    v_skip uuid[];
    v_keyed bool;
    v_limit text;
    v_served bigint;
    v_why record;
    v_found bool;
BEGIN
    PERFORM 1 FROM eddyline.queues q JOIN (
            SELECT DISTINCT u.ns, s.queue FROM unnest(r_ns, r_queues) u(ns, queues),
            LATERAL unnest(string_to_array(u.queues, chr(30))) s(queue)) a ON q.ns = a.ns AND q.name = a.queue
        WHERE q.ruled OR EXISTS (SELECT 1 FROM eddyline.classes c WHERE c.ns = q.ns AND c.queue = q.name AND c.keyed)
        ORDER BY q.ns, q.name FOR UPDATE OF q;
    PERFORM 1 FROM eddyline.limits l JOIN (
            SELECT DISTINCT c.ns, m.name FROM unnest(r_ns, r_queues) u(ns, queues),
            LATERAL unnest(string_to_array(u.queues, chr(30))) s(queue)
            JOIN eddyline.classes c ON c.queue = s.queue, LATERAL unnest(c.limits) m(name)
            WHERE c.ns = u.ns) a ON l.ns = a.ns AND l.name = a.name
        ORDER BY l.ns, l.name FOR UPDATE OF l;
    -- Claims of one worker go one after the other, so that a repeat finds what the first got. Locked last: commits of the
    -- same call may have locked queues.
    PERFORM pg_advisory_xact_lock(h.h) FROM (
        SELECT DISTINCT hashtextextended(concat_ws(chr(31), u.ns, u.worker), 11) AS h FROM unnest(r_ns, r_worker) u(ns, worker)
        ORDER BY 1) h;
    v_now := coalesce(p_now, eddyline.wall_ms());

    FOR r IN 1..cardinality(r_ns) LOOP
        v_got_runs := '{}';
        v_got_fences := '{}';
        v_retry := NULL;
        out_r := r;
        out_run := NULL;
        out_before := EXISTS (SELECT 1 FROM eddyline.tasks t WHERE t.request = r_request[r] AND t.worker IS NOT NULL);
        IF out_before THEN
            RETURN QUERY SELECT r, true, t.run, t.fence, t.flow, t.crc, t.body, t.request, t.since, t.lease_ms,
                    eddyline.lease_end_v1(t.ns, t.worker, t.by_worker, t.lease_until, t.lease_ms), t.deadline, t.build, t.memo, NULL::bigint, false
                FROM eddyline.tasks t
                WHERE t.request = r_request[r] AND t.worker = r_worker[r] AND t.ns = r_ns[r] ORDER BY t.claimed;
            CONTINUE;
        END IF;
        v_held := 0;
        IF r_most[r] IS NOT NULL THEN
            SELECT count(*) INTO v_held FROM eddyline.tasks t WHERE t.ns = r_ns[r] AND t.worker = r_worker[r];
        END IF;
        v_room := greatest(least(r_max[r], r_most[r] - v_held), 0);
        v_offer := r_offer[r]::jsonb;
        v_flows := v_offer -> 'flows';
        v_build := v_offer ->> 'build';
        v_handlers := ARRAY(SELECT jsonb_array_elements_text(v_offer -> 'handlers'));
        v_labels := ARRAY(SELECT jsonb_array_elements_text(v_offer -> 'labels'));
        v_any := cardinality(v_handlers) = 0 AND v_flows = '{}'::jsonb;
        v_queues := string_to_array(r_queues[r], chr(30));
        SELECT array_agg(c.queue), array_agg(c.class), coalesce(bool_or(cardinality(c.limits) > 0), false)
            INTO v_pq, v_pc, v_limited FROM eddyline.classes c
            WHERE c.ns = r_ns[r] AND c.queue = ANY (v_queues)
            AND (v_any OR (NOT c.is_run AND c.handler = ANY (v_handlers)) OR (c.is_run AND v_flows ? c.handler))
            AND c.requires <@ v_labels
            AND (c.build IS NULL OR c.build = coalesce(v_flows ->> c.handler, v_build));
        v_exact := v_limited
            OR EXISTS (SELECT 1 FROM eddyline.queues q WHERE q.ns = r_ns[r] AND q.name = ANY (v_queues) AND q.ruled)
            OR EXISTS (SELECT 1 FROM eddyline.classes c WHERE c.ns = r_ns[r] AND c.queue = ANY (v_queues) AND c.keyed);

        IF v_room > 0 AND v_pc IS NOT NULL AND NOT v_exact THEN
            v_wanted := least(v_room, 1024);
            IF v_wanted <= 1 THEN
                SELECT array_agg(h.run ORDER BY h.rank, h.place), array_agg(h.fence ORDER BY h.rank, h.place)
                    INTO v_runs, v_fences FROM eddyline.heads_1_v1(r_ns[r], v_pq, v_pc) h;
            ELSIF v_wanted <= 8 THEN
                SELECT array_agg(h.run ORDER BY h.rank, h.place), array_agg(h.fence ORDER BY h.rank, h.place)
                    INTO v_runs, v_fences FROM eddyline.heads_8_v1(r_ns[r], v_pq, v_pc) h;
            ELSIF v_wanted <= 32 THEN
                SELECT array_agg(h.run ORDER BY h.rank, h.place), array_agg(h.fence ORDER BY h.rank, h.place)
                    INTO v_runs, v_fences FROM eddyline.heads_32_v1(r_ns[r], v_pq, v_pc) h;
            ELSIF v_wanted <= 128 THEN
                SELECT array_agg(h.run ORDER BY h.rank, h.place), array_agg(h.fence ORDER BY h.rank, h.place)
                    INTO v_runs, v_fences FROM eddyline.heads_128_v1(r_ns[r], v_pq, v_pc) h;
            ELSE
                SELECT array_agg(h.run ORDER BY h.rank, h.place), array_agg(h.fence ORDER BY h.rank, h.place)
                    INTO v_runs, v_fences FROM eddyline.heads_1024_v1(r_ns[r], v_pq, v_pc) h;
            END IF;
            IF v_runs IS NOT NULL THEN
                v_runs := v_runs[:v_wanted];
                v_fences := v_fences[:v_wanted];
                SELECT coalesce(array_agg(x.run ORDER BY x.i), '{}'), coalesce(array_agg(x.fence ORDER BY x.i), '{}')
                    INTO v_got_runs, v_got_fences FROM (
                        SELECT t.run, t.fence, h.i FROM unnest(v_runs, v_fences) WITH ORDINALITY h(run, fence, i)
                        JOIN eddyline.tasks t ON t.run = h.run AND t.fence = h.fence JOIN eddyline.runs u ON u.id = t.run
                        WHERE t.worker IS NULL AND NOT t.closed AND NOT t.paused
                        ORDER BY h.i FOR NO KEY UPDATE OF t, u SKIP LOCKED) x;
                IF cardinality(v_got_runs) < cardinality(v_runs) THEN
                    -- Others are at some of them: there may be more in a moment.
                    v_retry := v_now + 10;
                ELSIF cardinality(v_runs) = v_wanted THEN
                    v_retry := v_now;
                END IF;
                IF cardinality(v_got_runs) > 0 THEN
                    PERFORM eddyline.hand_over_v1(v_now, v_got_runs, v_got_fences, r_worker[r], r_request[r], r_lease_ms[r],
                        v_flows, v_build);
                END IF;
            END IF;
        ELSIF v_room > 0 AND v_pc IS NOT NULL THEN
            v_blocked := '{}';
            v_blocked_flows := '{}';
            v_blocked_limits := '{}';
            v_skip := '{}';
            WHILE cardinality(v_got_runs) < v_room LOOP
                -- Of each queue the first: least served key, then rank; of these the one of the lowest rank.
                v_found := false;
                FOR v IN SELECT a.queue, array_agg(a.class) AS classes FROM unnest(v_pq, v_pc) a(queue, class)
                    WHERE NOT a.queue = ANY (v_blocked) GROUP BY a.queue
                LOOP
                    v_keyed := EXISTS (SELECT 1 FROM eddyline.turns u WHERE u.ns = r_ns[r] AND u.queue = v.queue AND u.key <> '');
                    IF v_keyed THEN
                        SELECT x.* INTO v_why FROM (
                            SELECT u.key, u.served FROM eddyline.turns u WHERE u.ns = r_ns[r] AND u.queue = v.queue
                            UNION ALL
                            SELECT '', o.last FROM eddyline.queues o WHERE o.ns = r_ns[r] AND o.name = v.queue
                                AND NOT EXISTS (SELECT 1 FROM eddyline.turns u
                                    WHERE u.ns = r_ns[r] AND u.queue = v.queue AND u.key = '')) k
                            CROSS JOIN unnest(v.classes) c(class)
                            CROSS JOIN LATERAL (
                                SELECT t.run, t.fence, t.queue, t.key, t.flow, t.limits, t.rank, t.place
                                FROM eddyline.tasks t WHERE t.ns = r_ns[r] AND t.queue = v.queue AND t.class = c.class
                                AND t.key = k.key AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                                AND NOT concat_ws(chr(31), t.queue, t.flow) = ANY (v_blocked_flows)
                                AND NOT t.limits && v_blocked_limits AND NOT t.run = ANY (v_skip)
                                ORDER BY t.rank, t.place LIMIT 1) x
                            ORDER BY k.served, x.rank, x.place LIMIT 1;
                    ELSE
                        SELECT x.* INTO v_why FROM unnest(v.classes) c(class)
                            CROSS JOIN LATERAL (
                                SELECT t.run, t.fence, t.queue, t.key, t.flow, t.limits, t.rank, t.place
                                FROM eddyline.tasks t WHERE t.ns = r_ns[r] AND t.queue = v.queue AND t.class = c.class
                                AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                                AND NOT concat_ws(chr(31), t.queue, t.flow) = ANY (v_blocked_flows)
                                AND NOT t.limits && v_blocked_limits AND NOT t.run = ANY (v_skip)
                                ORDER BY t.rank, t.place LIMIT 1) x
                            ORDER BY x.rank, x.place LIMIT 1;
                    END IF;
                    IF NOT FOUND THEN
                        v_blocked := v_blocked || v.queue;
                    ELSIF NOT v_found THEN
                        v_found := true;
                        v_best := v_why;
                    ELSIF (v_why.rank, v_why.place) < (v_best.rank, v_best.place) THEN
                        v_best := v_why;
                    END IF;
                END LOOP;
                EXIT WHEN NOT v_found;

                SELECT * INTO q FROM eddyline.queues o WHERE o.ns = r_ns[r] AND o.name = v_best.queue;
                IF q.ruled THEN
                    IF q.paused OR q.concurrency <= (SELECT count(*) FROM eddyline.tasks t
                        WHERE t.ns = r_ns[r] AND t.queue = v_best.queue AND t.worker IS NOT NULL)
                    THEN
                        v_blocked := v_blocked || v_best.queue;
                        CONTINUE;
                    END IF;
                    IF q.rate_count IS NOT NULL THEN
                        SELECT eddyline.rate_until_v1(r_ns[r], false, q.name, q.rate_count, q.rate_per_ms, q.rate_burst,
                            v_now) AS until INTO v_why;
                        IF v_why.until IS NOT NULL THEN
                            v_retry := least(v_retry, v_why.until);
                            v_blocked := v_blocked || v_best.queue;
                            CONTINUE;
                        END IF;
                    END IF;
                    IF q.flow_concurrency <= (SELECT count(*) FROM eddyline.tasks t WHERE t.ns = r_ns[r]
                        AND t.queue = v_best.queue AND t.flow = v_best.flow AND t.worker IS NOT NULL)
                    THEN
                        v_blocked_flows := v_blocked_flows || concat_ws(chr(31), v_best.queue, v_best.flow);
                        CONTINUE;
                    END IF;
                END IF;
                v_found := true;
                FOREACH v_limit IN ARRAY v_best.limits LOOP
                    SELECT * INTO v_why FROM eddyline.limit_bound_v1(r_ns[r], v_limit, v_now);
                    IF v_why.why IS NOT NULL THEN
                        v_retry := least(v_retry, v_why.until);
                        v_blocked_limits := v_blocked_limits || v_limit;
                        v_found := false;
                    END IF;
                END LOOP;
                CONTINUE WHEN NOT v_found;
                PERFORM 1 FROM eddyline.tasks t JOIN eddyline.runs u ON u.id = t.run
                    WHERE t.run = v_best.run AND t.fence = v_best.fence AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                    FOR NO KEY UPDATE OF t, u SKIP LOCKED;
                IF NOT FOUND THEN
                    v_skip := v_skip || v_best.run;
                    v_retry := least(v_retry, v_now + 10);
                    CONTINUE;
                END IF;

                PERFORM eddyline.hand_over_v1(v_now, ARRAY[v_best.run], ARRAY[v_best.fence], r_worker[r], r_request[r],
                    r_lease_ms[r], v_flows, v_build);
                v_got_runs := v_got_runs || v_best.run;
                v_got_fences := v_got_fences || v_best.fence;
                IF q.rate_count IS NOT NULL THEN
                    PERFORM eddyline.spend_v1(r_ns[r], false, q.name, q.rate_count, q.rate_per_ms, q.rate_burst, v_now);
                END IF;
                FOREACH v_limit IN ARRAY v_best.limits LOOP
                    INSERT INTO eddyline.passing (ns, "limit", run, fence)
                        VALUES (r_ns[r], v_limit, v_best.run, v_best.fence) ON CONFLICT DO NOTHING;
                    PERFORM eddyline.spend_v1(r_ns[r], true, v_limit, l.rate_count, l.rate_per_ms, l.rate_burst, v_now)
                        FROM eddyline.limits l
                        WHERE l.ns = r_ns[r] AND l.name = split_part(v_limit, chr(31), 1) AND l.rate_count IS NOT NULL;
                END LOOP;
                IF EXISTS (SELECT 1 FROM eddyline.classes c WHERE c.ns = r_ns[r] AND c.queue = v_best.queue AND c.keyed) THEN
                    SELECT u.served INTO v_served FROM eddyline.turns u
                        WHERE u.ns = r_ns[r] AND u.queue = v_best.queue AND u.key = v_best.key;
                    v_served := coalesce(v_served, q.last);
                    UPDATE eddyline.queues o SET last = v_served
                        WHERE o.ns = r_ns[r] AND o.name = v_best.queue AND o.last < v_served;
                    INSERT INTO eddyline.turns (ns, queue, key, served)
                        VALUES (r_ns[r], v_best.queue, v_best.key, v_served + 1)
                        ON CONFLICT (ns, queue, key) DO UPDATE SET served = excluded.served;
                    IF NOT eddyline.key_waits_v1(r_ns[r], v_best.queue, v_best.key) THEN
                        PERFORM eddyline.forget_key_v1(r_ns[r], v_best.queue, v_best.key);
                    END IF;
                END IF;
            END LOOP;
        END IF;

        RETURN QUERY SELECT r, false, t.run, t.fence, t.flow, t.crc, t.body, t.request, t.since, t.lease_ms, t.lease_until,
                t.deadline, t.build, t.memo, NULL::bigint, false
            FROM unnest(v_got_runs, v_got_fences) WITH ORDINALITY x(run, fence, i)
            JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence ORDER BY x.i;
        out_run := NULL;
        out_before := false;
        out_full := cardinality(v_got_runs) < r_max[r] AND r_most[r] IS NOT NULL
            AND v_held + cardinality(v_got_runs) >= r_most[r];
        out_retry_at := CASE WHEN cardinality(v_got_runs) < v_room THEN v_retry END;
        RETURN NEXT;
    END LOOP;
END $$;

-- Extends leases. A worker that names all its tasks writes its own row and no other; then the tasks are read: an expiry may
-- have been faster.
CREATE FUNCTION eddyline.extend_v1(p_now bigint, p_ns text, p_worker text, p_runs uuid[], p_fences bigint[])
RETURNS TABLE (out_i int, out_lease_until bigint, out_deadline bigint, out_closed bool, out_memo bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint;
    v_named bigint;
    v_apart bigint;
BEGIN
    IF p_worker IS NOT NULL THEN
        SELECT count(DISTINCT (t.run, t.fence)), count(DISTINCT (t.run, t.fence)) FILTER (WHERE NOT t.by_worker)
            INTO v_named, v_apart FROM unnest(p_runs, p_fences) x(run, fence)
            JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence WHERE t.ns = p_ns AND t.worker = p_worker;
    END IF;
    IF v_named > 0 AND v_named = (SELECT count(*) FROM eddyline.tasks t WHERE t.ns = p_ns AND t.worker = p_worker) THEN
        IF v_apart > 0 THEN
            PERFORM 1 FROM unnest(p_runs, p_fences) x(run, fence)
                JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence
                WHERE t.ns = p_ns AND t.worker = p_worker AND NOT t.by_worker
                ORDER BY t.run, t.fence FOR NO KEY UPDATE OF t;
        END IF;
        INSERT INTO eddyline.workers (ns, worker, seen) VALUES (p_ns, p_worker, coalesce(p_now, eddyline.wall_ms()))
            ON CONFLICT (ns, worker) DO UPDATE SET seen = greatest(workers.seen, coalesce(p_now, eddyline.wall_ms()));
        IF v_apart > 0 THEN
            UPDATE eddyline.tasks t SET by_worker = true FROM unnest(p_runs, p_fences) x(run, fence)
                WHERE t.run = x.run AND t.fence = x.fence AND t.ns = p_ns AND t.worker = p_worker AND NOT t.by_worker;
        END IF;
    ELSE
        PERFORM 1 FROM unnest(p_runs, p_fences) x(run, fence) JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence
            WHERE t.ns = p_ns AND t.worker IS NOT NULL AND (p_worker IS NULL OR t.worker = p_worker)
            ORDER BY t.run, t.fence FOR NO KEY UPDATE OF t;
        v_now := coalesce(p_now, eddyline.wall_ms());
        UPDATE eddyline.tasks t SET lease_until = greatest(eddyline.lease_end_v1(t.ns, t.worker, t.by_worker, t.lease_until, t.lease_ms), v_now + t.lease_ms)
            FROM unnest(p_runs, p_fences) x(run, fence) WHERE t.run = x.run AND t.fence = x.fence
            AND t.ns = p_ns AND t.worker IS NOT NULL AND (p_worker IS NULL OR t.worker = p_worker);
    END IF;
    RETURN QUERY SELECT x.i::int, eddyline.lease_end_v1(t.ns, t.worker, t.by_worker, t.lease_until, t.lease_ms), t.deadline, t.closed, CASE WHEN t.is_run THEN t.memo END
        FROM unnest(p_runs, p_fences) WITH ORDINALITY x(run, fence, i)
        JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence
        WHERE t.ns = p_ns AND t.worker IS NOT NULL AND (p_worker IS NULL OR t.worker = p_worker) ORDER BY x.i;
END $$;
