-- The first ready tasks of each class. `p_lows` is the rank from which to look: index entries of tasks that are long gone
-- stay as long as any transaction of the database may see them, and are passed by one at a time. The limit is a literal:
-- for a parameter the planner expects a tenth of the table.
DO $do$
DECLARE
    n int;
BEGIN
    FOREACH n IN ARRAY ARRAY[1, 8, 32, 128, 1024] LOOP
        EXECUTE format($sql$
            CREATE FUNCTION eddyline.heads_%1$s_v1(p_ns text, p_queues text[], p_classes bigint[], p_lows bigint[],
                OUT o_runs uuid[], OUT o_fences bigint[], OUT o_queues text[], OUT o_classes bigint[], OUT o_ranks bigint[])
            LANGUAGE plpgsql AS $$
            BEGIN
                SELECT array_agg(h.run ORDER BY h.rank, h.place), array_agg(h.fence ORDER BY h.rank, h.place),
                        array_agg(h.queue ORDER BY h.rank, h.place), array_agg(h.class ORDER BY h.rank, h.place),
                        array_agg(h.rank ORDER BY h.rank, h.place)
                    INTO o_runs, o_fences, o_queues, o_classes, o_ranks FROM (
                        SELECT x.run, x.fence, x.rank, x.place, k.queue, k.class
                        FROM unnest(p_queues, p_classes, p_lows) k(queue, class, low)
                        CROSS JOIN LATERAL (
                            SELECT t.run, t.fence, t.rank, t.place FROM eddyline.tasks t
                            WHERE t.ns = p_ns AND t.queue = k.queue AND t.class = k.class AND t.rank >= k.low
                            AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                            ORDER BY t.rank, t.place LIMIT %1$s) x
                        ORDER BY x.rank, x.place LIMIT %1$s) h;
            END $$
        $sql$, n);
    END LOOP;
END $do$;

-- Locks the rules and turns that bind claims of queues. Always before `lock_workers_v1`.
CREATE FUNCTION eddyline.lock_rules_v1(g_ns text[], g_queues text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM eddyline.queues q JOIN (
            SELECT DISTINCT g.ns, s.queue FROM unnest(g_ns, g_queues) g(ns, queues),
            LATERAL unnest(string_to_array(g.queues, chr(30))) s(queue)) a ON q.ns = a.ns AND q.name = a.queue
        WHERE q.ruled OR EXISTS (SELECT 1 FROM eddyline.classes c WHERE c.ns = q.ns AND c.queue = q.name AND c.keyed)
        ORDER BY q.ns, q.name FOR UPDATE OF q;
    PERFORM 1 FROM eddyline.limits l JOIN (
            SELECT DISTINCT c.ns, m.name FROM unnest(g_ns, g_queues) g(ns, queues),
            LATERAL unnest(string_to_array(g.queues, chr(30))) s(queue)
            JOIN eddyline.classes c ON c.queue = s.queue, LATERAL unnest(c.limits) m(name)
            WHERE c.ns = g.ns) a ON l.ns = a.ns AND l.name = a.name
        ORDER BY l.ns, l.name FOR UPDATE OF l;
END $$;

-- Claims of one worker are made one after the other, so that a repeated request finds what the first one got, and a worker
-- never has more tasks than it may.
CREATE FUNCTION eddyline.lock_workers_v1(r_group int[], r_worker text[], g_ns text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(h.h) FROM (
        SELECT DISTINCT hashtextextended(concat_ws(chr(31), g_ns[r."group"], r.worker), 11) AS h
        FROM unnest(r_group, r_worker) r("group", worker) ORDER BY 1) h;
END $$;

-- The classes of tasks that an offer takes in some queues, and whether keys, limits or rules of queues decide who gets them.
CREATE FUNCTION eddyline.offered_v1(p_group int, p_ns text, p_queues text, p_offer text, l_group int[], l_queue text[],
    l_class bigint[], l_low bigint[], OUT o_queues text[], OUT o_classes bigint[], OUT o_lows bigint[], OUT o_ruled bool, OUT o_flows jsonb, OUT o_build text)
LANGUAGE plpgsql AS $$
DECLARE
    v_queues text[] := string_to_array(p_queues, chr(30));
    v_offer jsonb := p_offer::jsonb;
    v_handlers jsonb := v_offer -> 'handlers';
    v_labels jsonb := v_offer -> 'labels';
    v_all bool := v_handlers = '[]'::jsonb AND v_offer -> 'flows' = '{}'::jsonb;
BEGIN
    o_flows := v_offer -> 'flows';
    o_build := v_offer ->> 'build';
    SELECT array_agg(c.queue) FILTER (WHERE c.taken), array_agg(c.class) FILTER (WHERE c.taken),
            array_agg(coalesce(c.low, -9223372036854775808)) FILTER (WHERE c.taken),
            coalesce(bool_or(c.keyed OR (c.taken AND cardinality(c.limits) > 0)), false)
                OR EXISTS (SELECT 1 FROM eddyline.queues q WHERE q.ns = p_ns AND q.name = ANY (v_queues) AND q.ruled)
        INTO o_queues, o_classes, o_lows, o_ruled FROM (
            SELECT k.queue, k.class, k.keyed, k.limits, l.low,
                (v_all OR (NOT k.is_run AND v_handlers ? k.handler) OR (k.is_run AND o_flows ? k.handler))
                AND v_labels ?& k.requires AND (k.build IS NULL OR k.build = coalesce(o_flows ->> k.handler, o_build)) AS taken
            FROM eddyline.classes k LEFT JOIN unnest(l_group, l_queue, l_class, l_low) l("group", queue, class, low)
                ON l."group" = p_group AND l.queue = k.queue AND l.class = k.class
            WHERE k.ns = p_ns AND k.queue = ANY (v_queues)) c;
END $$;

-- How many tasks the workers have whose claims are bounded by that.
CREATE FUNCTION eddyline.held_v1(r_group int[], r_worker text[], r_most int[], g_ns text[], OUT o_workers text[],
    OUT o_held bigint[]) LANGUAGE plpgsql AS $$
BEGIN
    SELECT array_agg(concat_ws(chr(31), w.ns, w.worker)), array_agg((SELECT count(*) FROM eddyline.tasks t
            WHERE t.ns = w.ns AND t.worker = w.worker))
        INTO o_workers, o_held FROM (SELECT DISTINCT g_ns[r."group"] AS ns, r.worker
            FROM unnest(r_group, r_worker, r_most) r("group", worker, most) WHERE r.most IS NOT NULL) w;
END $$;

-- Claims among requests that were given tasks before.
CREATE FUNCTION eddyline.repeated_v1(r_request uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(SELECT DISTINCT t.request FROM eddyline.tasks t WHERE t.request = ANY (r_request) AND t.worker IS NOT NULL);
END $$;

-- Which tasks of a commit are inserted as claimed, by which request of the same call. `t_group` names the requests that a
-- task may go to; within a group, requests get tasks in their order, by rank. That is what a claim after the commit would do,
-- unless rules bind the queue or older tasks wait there: then nothing is given to that group here.
-- o_done: the request has got all that it can get; o_exhausted: no task was left.
CREATE FUNCTION eddyline.claim_new_v1(t_group int[], t_age_ms bigint[], t_valid bool[], r_group int[], r_request uuid[], r_worker text[],
    r_max int[], r_most int[], g_ns text[], g_queues text[], g_offer text[], l_group int[], l_queue text[],
    l_class bigint[], l_low bigint[], OUT o_to int[], OUT o_done bool[], OUT o_full bool[], OUT o_exhausted bool)
LANGUAGE plpgsql AS $$
DECLARE
    n int := cardinality(r_group);
    v_fit bool[] := array_fill(false, ARRAY[cardinality(g_ns)]);
    v_from int[] := array_fill(1, ARRAY[cardinality(g_ns)]);
    v_got int[] := array_fill(0, ARRAY[n]);
    v_at int[] := array_fill(NULL::int, ARRAY[n]);
    v_offered record;
    v_before uuid[];
    v_workers text[];
    v_held bigint[];
    v_left bool := false;
    i int;
    g int;
    r int;
    k int;
BEGIN
    o_to := array_fill(0, ARRAY[cardinality(t_group)]);
    o_done := array_fill(false, ARRAY[n]);
    o_full := array_fill(false, ARRAY[n]);
    o_exhausted := false;
    FOR g IN 1..cardinality(g_ns) LOOP
        SELECT * INTO v_offered FROM eddyline.offered_v1(g, g_ns[g], g_queues[g], g_offer[g], l_group, l_queue, l_class, l_low);
        IF v_offered.o_ruled THEN
            -- Its locks come before those of workers.
            RETURN;
        END IF;
        v_fit[g] := NOT EXISTS (
            SELECT 1 FROM unnest(v_offered.o_queues, v_offered.o_classes, v_offered.o_lows) c(queue, class, low)
            CROSS JOIN LATERAL (SELECT 1 FROM eddyline.tasks t
                WHERE t.ns = g_ns[g] AND t.queue = c.queue AND t.class = c.class AND t.rank >= c.low
                AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                ORDER BY t.rank, t.place LIMIT 1) x);
    END LOOP;
    PERFORM eddyline.lock_workers_v1(r_group, r_worker, g_ns);
    v_before := eddyline.repeated_v1(r_request);
    IF cardinality(array_positions(r_most, NULL)) < n THEN
        SELECT * INTO v_workers, v_held FROM eddyline.held_v1(r_group, r_worker, r_most, g_ns);
    END IF;
    FOR i IN 1..n LOOP
        IF r_most[i] IS NOT NULL THEN
            v_at[i] := array_position(v_workers, concat_ws(chr(31), g_ns[r_group[i]], r_worker[i]));
        END IF;
    END LOOP;
    FOR i, g IN SELECT t.i, t."group" FROM unnest(t_group, t_age_ms, t_valid) WITH ORDINALITY t("group", age_ms, valid, i)
        WHERE t."group" > 0 AND t.valid ORDER BY t.age_ms DESC, t.i
    LOOP
        IF v_fit[g] THEN
            r := v_from[g];
            LOOP
                k := v_at[r];
                EXIT WHEN r > n OR (r_group[r] = g AND v_got[r] < r_max[r] AND NOT r_request[r] = ANY (v_before)
                    AND (k IS NULL OR v_held[k] < r_most[r]));
                r := r + 1;
            END LOOP;
            v_from[g] := r;
            IF r <= n THEN
                o_to[i] := r;
                v_got[r] := v_got[r] + 1;
                IF k IS NOT NULL THEN
                    v_held[k] := v_held[k] + 1;
                END IF;
                CONTINUE;
            END IF;
        END IF;
        v_left := true;
    END LOOP;
    o_exhausted := NOT v_left AND NOT 0 = ANY (t_group);
    FOR i IN 1..n LOOP
        o_done[i] := v_got[i] > 0 OR (v_fit[r_group[i]] AND NOT v_left AND NOT r_request[i] = ANY (v_before));
        o_full[i] := v_got[i] < r_max[i] AND v_at[i] IS NOT NULL AND v_held[v_at[i]] >= r_most[i];
    END LOOP;
END $$;

-- Gives locked tasks to workers, and records it.
CREATE FUNCTION eddyline.hand_over_v1(p_now bigint, p_runs uuid[], p_fences bigint[], p_workers text[], p_requests uuid[],
    p_lease_ms bigint[], p_flows jsonb, p_build text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_order bigint := nextval('eddyline.claim_order') * 100000;
BEGIN
    UPDATE eddyline.tasks t SET worker = x.worker, request = x.request, claimed = v_order + x.i, since = p_now,
            lease_ms = x.lease_ms, lease_until = p_now + x.lease_ms, by_worker = false, deadline = p_now + t.timeout_ms,
            build = coalesce(p_flows ->> t.handler, p_build), memo = r.memo, held_until = 0
        FROM unnest(p_runs, p_fences, p_workers, p_requests, p_lease_ms) WITH ORDINALITY
            x(run, fence, worker, request, lease_ms, i) JOIN eddyline.runs r ON r.id = x.run
        WHERE t.run = x.run AND t.fence = x.fence;
    WITH moved AS (
        UPDATE eddyline.runs r SET records = r.records + k.n, changed_at = greatest(r.changed_at, p_now)
            FROM (SELECT x.run, count(*) AS n FROM unnest(p_runs) x(run) GROUP BY x.run) k WHERE r.id = k.run
            RETURNING r.id, r.records - k.n AS was, r.version, r.changed_at)
        INSERT INTO eddyline.records (run, first, version, count, ts, fence, worker, crc, body)
            SELECT t.run, m.was + row_number() OVER (PARTITION BY x.run ORDER BY x.i), m.version, 1, m.changed_at, t.fence,
                x.worker, t.started_crc, t.started
            FROM unnest(p_runs, p_fences, p_workers) WITH ORDINALITY x(run, fence, worker, i)
            JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence JOIN moved m ON m.id = x.run;
END $$;

-- Up to `p_room` tasks for one request, where keys, limits or rules of queues decide who gets them: picked one at a time.
-- o_retry: when to ask again, if less was given because of something that passes.
CREATE FUNCTION eddyline.claim_ruled_v1(p_now bigint, p_ns text, p_queues text[], p_classes bigint[], p_flows jsonb,
    p_build text, p_worker text, p_request uuid, p_lease_ms bigint, p_room bigint, OUT o_runs uuid[], OUT o_fences bigint[],
    OUT o_retry bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v record;
    v_best record;
    q eddyline.queues;
    v_blocked text[] := '{}';
    v_blocked_flows text[] := '{}';
    v_blocked_limits text[] := '{}';
    v_skip uuid[] := '{}';
    v_keyed bool;
    v_limit text;
    v_served bigint;
    v_why record;
    v_found bool;
BEGIN
    o_runs := '{}';
    o_fences := '{}';
    WHILE cardinality(o_runs) < p_room LOOP
        -- Of each queue the first: least served key, then rank; of these the one of the lowest rank.
        v_found := false;
        FOR v IN SELECT a.queue, array_agg(a.class) AS classes FROM unnest(p_queues, p_classes) a(queue, class)
            WHERE NOT a.queue = ANY (v_blocked) GROUP BY a.queue
        LOOP
            v_keyed := EXISTS (SELECT 1 FROM eddyline.turns u WHERE u.ns = p_ns AND u.queue = v.queue AND u.key <> '');
            IF v_keyed THEN
                -- Tasks without a key are of other classes and found by another index.
                SELECT x.run, x.fence, x.queue, x.key, x.flow, x.limits, x.rank, x.place INTO v_why FROM (
                    SELECT k.served, f.* FROM eddyline.turns k CROSS JOIN unnest(v.classes) c(class)
                    CROSS JOIN LATERAL (
                        SELECT t.run, t.fence, t.queue, t.key, t.flow, t.limits, t.rank, t.place
                        FROM eddyline.tasks t WHERE t.ns = p_ns AND t.queue = v.queue AND t.class = c.class
                        AND t.key = k.key AND t.key <> '' AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                        AND NOT concat_ws(chr(31), t.queue, t.flow) = ANY (v_blocked_flows)
                        AND NOT t.limits && v_blocked_limits AND NOT t.run = ANY (v_skip)
                        ORDER BY t.rank, t.place LIMIT 1) f
                    WHERE k.ns = p_ns AND k.queue = v.queue AND k.key <> ''
                    UNION ALL
                    SELECT coalesce((SELECT u.served FROM eddyline.turns u WHERE u.ns = p_ns AND u.queue = v.queue AND u.key = ''),
                        (SELECT o.last FROM eddyline.queues o WHERE o.ns = p_ns AND o.name = v.queue)), f.*
                    FROM unnest(v.classes) c(class)
                    JOIN eddyline.classes s ON s.ns = p_ns AND s.queue = v.queue AND s.class = c.class AND NOT s.keyed
                    CROSS JOIN LATERAL (
                        SELECT t.run, t.fence, t.queue, t.key, t.flow, t.limits, t.rank, t.place
                        FROM eddyline.tasks t WHERE t.ns = p_ns AND t.queue = v.queue AND t.class = c.class
                        AND t.worker IS NULL AND NOT t.closed AND NOT t.paused
                        AND NOT concat_ws(chr(31), t.queue, t.flow) = ANY (v_blocked_flows)
                        AND NOT t.limits && v_blocked_limits AND NOT t.run = ANY (v_skip)
                        ORDER BY t.rank, t.place LIMIT 1) f) x
                    ORDER BY x.served, x.rank, x.place LIMIT 1;
            ELSE
                SELECT x.* INTO v_why FROM unnest(v.classes) c(class)
                    CROSS JOIN LATERAL (
                        SELECT t.run, t.fence, t.queue, t.key, t.flow, t.limits, t.rank, t.place
                        FROM eddyline.tasks t WHERE t.ns = p_ns AND t.queue = v.queue AND t.class = c.class
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

        SELECT * INTO q FROM eddyline.queues o WHERE o.ns = p_ns AND o.name = v_best.queue;
        IF q.ruled THEN
            IF q.paused OR q.concurrency <= (SELECT count(*) FROM eddyline.tasks t
                WHERE t.ns = p_ns AND t.queue = v_best.queue AND t.worker IS NOT NULL)
            THEN
                v_blocked := v_blocked || v_best.queue;
                CONTINUE;
            END IF;
            IF q.rate_count IS NOT NULL THEN
                SELECT eddyline.rate_until_v1(p_ns, false, q.name, q.rate_count, q.rate_per_ms, q.rate_burst,
                    p_now) AS until INTO v_why;
                IF v_why.until IS NOT NULL THEN
                    o_retry := least(o_retry, v_why.until);
                    v_blocked := v_blocked || v_best.queue;
                    CONTINUE;
                END IF;
            END IF;
            IF q.flow_concurrency <= (SELECT count(*) FROM eddyline.tasks t WHERE t.ns = p_ns
                AND t.queue = v_best.queue AND t.flow = v_best.flow AND t.worker IS NOT NULL)
            THEN
                v_blocked_flows := v_blocked_flows || concat_ws(chr(31), v_best.queue, v_best.flow);
                CONTINUE;
            END IF;
        END IF;
        v_found := true;
        FOREACH v_limit IN ARRAY v_best.limits LOOP
            SELECT * INTO v_why FROM eddyline.limit_bound_v1(p_ns, v_limit, p_now);
            IF v_why.why IS NOT NULL THEN
                o_retry := least(o_retry, v_why.until);
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
            o_retry := least(o_retry, p_now + 10);
            CONTINUE;
        END IF;

        PERFORM eddyline.hand_over_v1(p_now, ARRAY[v_best.run], ARRAY[v_best.fence], ARRAY[p_worker],
            ARRAY[p_request], ARRAY[p_lease_ms], p_flows, p_build);
        o_runs := o_runs || v_best.run;
        o_fences := o_fences || v_best.fence;
        IF q.rate_count IS NOT NULL THEN
            PERFORM eddyline.spend_v1(p_ns, false, q.name, q.rate_count, q.rate_per_ms, q.rate_burst, p_now);
        END IF;
        FOREACH v_limit IN ARRAY v_best.limits LOOP
            INSERT INTO eddyline.passing (ns, "limit", run, fence)
                VALUES (p_ns, v_limit, v_best.run, v_best.fence) ON CONFLICT DO NOTHING;
            PERFORM eddyline.spend_v1(p_ns, true, v_limit, l.rate_count, l.rate_per_ms, l.rate_burst, p_now)
                FROM eddyline.limits l
                WHERE l.ns = p_ns AND l.name = split_part(v_limit, chr(31), 1) AND l.rate_count IS NOT NULL;
        END LOOP;
        IF EXISTS (SELECT 1 FROM eddyline.classes c WHERE c.ns = p_ns AND c.queue = v_best.queue AND c.keyed) THEN
            SELECT u.served INTO v_served FROM eddyline.turns u
                WHERE u.ns = p_ns AND u.queue = v_best.queue AND u.key = v_best.key;
            v_served := coalesce(v_served, q.last);
            UPDATE eddyline.queues o SET last = v_served
                WHERE o.ns = p_ns AND o.name = v_best.queue AND o.last < v_served;
            INSERT INTO eddyline.turns (ns, queue, key, served)
                VALUES (p_ns, v_best.queue, v_best.key, v_served + 1)
                ON CONFLICT (ns, queue, key) DO UPDATE SET served = excluded.served;
            IF NOT eddyline.key_waits_v1(p_ns, v_best.queue, v_best.key) THEN
                PERFORM eddyline.forget_key_v1(p_ns, v_best.queue, v_best.key);
            END IF;
        END IF;
    END LOOP;
END $$;

-- Gives tasks to workers, one request after the other; requests that follow each other in one group are given theirs
-- together. out_r is the request. A row without a run says how it ended; a row with out_low is the first rank at which a
-- class had a task. r_done: requests that are not to be looked at.
CREATE FUNCTION eddyline.claim_v1(p_now bigint, r_group int[], r_request uuid[], r_worker text[], r_max int[], r_most int[],
    r_lease_ms bigint[], r_done bool[], g_ns text[], g_queues text[], g_offer text[], l_group int[], l_queue text[],
    l_class bigint[], l_low bigint[])
RETURNS TABLE (out_r int, out_before bool, out_run uuid, out_fence bigint, out_flow text, out_crc int, out_body text,
    out_request uuid, out_since bigint, out_lease_ms bigint, out_lease_until bigint, out_deadline bigint, out_build text,
    out_memo bigint, out_retry_at bigint, out_full bool, out_exhausted bool, out_queue text, out_class bigint, out_low bigint)
-- Planned once a connection, with indexes only: planning each statement anew took two thirds of the time of a claim.
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    n int := cardinality(r_group);
    v_now bigint;
    v_offered record;
    v_before uuid[];
    v_workers text[];
    v_held bigint[];
    -- What they would have if there were tasks for all.
    v_full bigint[];
    v_heads record;
    v_owner int[];
    v_runs uuid[];
    v_fences bigint[];
    v_retry bigint;
    v_exhausted bool;
    v_wanted bigint;
    v_room bigint;
    v_got int;
    v_from int := 1;
    v_to int;
    g int;
    k int;
BEGIN
    FOR g IN 1..cardinality(g_ns) LOOP
        IF (eddyline.offered_v1(g, g_ns[g], g_queues[g], g_offer[g], l_group, l_queue, l_class, l_low)).o_ruled THEN
            PERFORM eddyline.lock_rules_v1(g_ns, g_queues);
            EXIT;
        END IF;
    END LOOP;
    PERFORM eddyline.lock_workers_v1(r_group, r_worker, g_ns);
    v_now := coalesce(p_now, eddyline.wall_ms());
    WHILE v_from <= n LOOP
        IF r_done[v_from] THEN
            v_from := v_from + 1;
            CONTINUE;
        END IF;
        g := r_group[v_from];
        v_to := v_from;
        WHILE v_to < n AND r_group[v_to + 1] = g AND r_done[v_to + 1] IS NOT TRUE LOOP
            v_to := v_to + 1;
        END LOOP;
        SELECT * INTO v_offered FROM eddyline.offered_v1(g, g_ns[g], g_queues[g], g_offer[g], l_group, l_queue, l_class, l_low);
        IF v_offered.o_ruled THEN
            v_to := v_from;
        END IF;
        v_before := eddyline.repeated_v1(r_request[v_from:v_to]);
        SELECT * INTO v_workers, v_held
            FROM eddyline.held_v1(r_group[v_from:v_to], r_worker[v_from:v_to], r_most[v_from:v_to], g_ns);
        v_runs := '{}';
        v_fences := '{}';
        v_owner := '{}';
        v_retry := NULL;
        v_exhausted := false;
        v_wanted := 0;
        v_full := v_held;
        FOR r IN v_from..v_to LOOP
            CONTINUE WHEN r_request[r] = ANY (v_before);
            k := array_position(v_workers, concat_ws(chr(31), g_ns[g], r_worker[r]));
            v_room := greatest(least(r_max[r], r_most[r] - v_full[k]), 0);
            v_wanted := v_wanted + v_room;
            IF k IS NOT NULL THEN
                v_full[k] := v_full[k] + v_room;
            END IF;
        END LOOP;

        IF v_wanted > 0 AND v_offered.o_classes IS NOT NULL AND v_offered.o_ruled THEN
            -- One request, and it is not a repeat.
            SELECT c.o_runs, c.o_fences, c.o_retry INTO v_runs, v_fences, v_retry FROM eddyline.claim_ruled_v1(v_now, g_ns[g],
                v_offered.o_queues, v_offered.o_classes, v_offered.o_flows, v_offered.o_build, r_worker[v_from],
                r_request[v_from], r_lease_ms[v_from], v_wanted) c;
            v_owner := array_fill(v_from, ARRAY[cardinality(v_runs)]);
            IF v_held IS NOT NULL THEN
                v_held[1] := v_held[1] + cardinality(v_runs);
            END IF;
        ELSIF v_wanted > 0 AND v_offered.o_classes IS NOT NULL THEN
            v_wanted := least(v_wanted, 1024);
            IF v_wanted <= 1 THEN
                SELECT * INTO v_heads FROM eddyline.heads_1_v1(g_ns[g], v_offered.o_queues, v_offered.o_classes, v_offered.o_lows);
            ELSIF v_wanted <= 8 THEN
                SELECT * INTO v_heads FROM eddyline.heads_8_v1(g_ns[g], v_offered.o_queues, v_offered.o_classes, v_offered.o_lows);
            ELSIF v_wanted <= 32 THEN
                SELECT * INTO v_heads FROM eddyline.heads_32_v1(g_ns[g], v_offered.o_queues, v_offered.o_classes, v_offered.o_lows);
            ELSIF v_wanted <= 128 THEN
                SELECT * INTO v_heads FROM eddyline.heads_128_v1(g_ns[g], v_offered.o_queues, v_offered.o_classes, v_offered.o_lows);
            ELSE
                SELECT * INTO v_heads FROM eddyline.heads_1024_v1(g_ns[g], v_offered.o_queues, v_offered.o_classes, v_offered.o_lows);
            END IF;
            IF v_heads.o_runs IS NOT NULL THEN
                SELECT coalesce(array_agg(x.run ORDER BY x.i), '{}'), coalesce(array_agg(x.fence ORDER BY x.i), '{}')
                    INTO v_runs, v_fences FROM (
                        SELECT t.run, t.fence, h.i
                        FROM unnest(v_heads.o_runs[:v_wanted], v_heads.o_fences[:v_wanted]) WITH ORDINALITY h(run, fence, i)
                        JOIN eddyline.tasks t ON t.run = h.run AND t.fence = h.fence JOIN eddyline.runs u ON u.id = t.run
                        WHERE t.worker IS NULL AND NOT t.closed AND NOT t.paused
                        ORDER BY h.i FOR NO KEY UPDATE OF t, u SKIP LOCKED) x;
                IF cardinality(v_runs) < least(cardinality(v_heads.o_runs), v_wanted) THEN
                    -- Others are at some of them: there may be more in a moment.
                    v_retry := v_now + 10;
                ELSIF cardinality(v_heads.o_runs) >= v_wanted THEN
                    v_retry := v_now;
                ELSE
                    v_exhausted := true;
                END IF;
                FOR r IN v_from..v_to LOOP
                    CONTINUE WHEN r_request[r] = ANY (v_before);
                    k := array_position(v_workers, concat_ws(chr(31), g_ns[g], r_worker[r]));
                    v_room := greatest(least(r_max[r], r_most[r] - v_held[k], cardinality(v_runs) - cardinality(v_owner)), 0);
                    v_owner := v_owner || array_fill(r, ARRAY[v_room::int]);
                    IF k IS NOT NULL THEN
                        v_held[k] := v_held[k] + v_room;
                    END IF;
                END LOOP;
                IF cardinality(v_runs) > 0 THEN
                    PERFORM eddyline.hand_over_v1(v_now, v_runs, v_fences,
                        ARRAY(SELECT r_worker[o.owner] FROM unnest(v_owner) WITH ORDINALITY o(owner, i) ORDER BY o.i),
                        ARRAY(SELECT r_request[o.owner] FROM unnest(v_owner) WITH ORDINALITY o(owner, i) ORDER BY o.i),
                        ARRAY(SELECT r_lease_ms[o.owner] FROM unnest(v_owner) WITH ORDINALITY o(owner, i) ORDER BY o.i),
                        v_offered.o_flows, v_offered.o_build);
                END IF;
                RETURN QUERY SELECT v_from, NULL::bool, NULL::uuid, NULL::bigint, NULL::text, NULL::int, NULL::text,
                        NULL::uuid, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::text, NULL::bigint,
                        NULL::bigint, NULL::bool, NULL::bool, h.queue, h.class, min(h.rank)
                    FROM unnest(v_heads.o_queues, v_heads.o_classes, v_heads.o_ranks) h(queue, class, rank)
                    GROUP BY h.queue, h.class;
            END IF;
        END IF;

        IF cardinality(v_before) > 0 THEN
            RETURN QUERY SELECT x.i::int + v_from - 1, true, t.run, t.fence, t.flow, t.crc, t.body, t.request, t.since, t.lease_ms,
                    eddyline.lease_end_v1(t.ns, t.worker, t.by_worker, t.lease_until, t.lease_ms), t.deadline, t.build, t.memo,
                    NULL::bigint, false, NULL::bool, NULL::text, NULL::bigint, NULL::bigint
                FROM unnest(r_request[v_from:v_to], r_worker[v_from:v_to]) WITH ORDINALITY x(request, worker, i)
                JOIN eddyline.tasks t ON t.request = x.request AND t.worker = x.worker
                WHERE t.ns = g_ns[g] AND t.worker IS NOT NULL AND x.request = ANY (v_before) ORDER BY x.i, t.claimed;
        END IF;
        IF cardinality(v_runs) > 0 THEN
            RETURN QUERY SELECT x.owner, false, t.run, t.fence, t.flow, t.crc, t.body, t.request, t.since, t.lease_ms, t.lease_until,
                    t.deadline, t.build, t.memo, NULL::bigint, false, NULL::bool, NULL::text, NULL::bigint, NULL::bigint
                FROM unnest(v_owner, v_runs, v_fences) WITH ORDINALITY x(owner, run, fence, i)
                JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence ORDER BY x.i;
        END IF;
        out_run := NULL;
        out_before := NULL;
        FOR r IN v_from..v_to LOOP
            out_r := r;
            out_exhausted := v_exhausted;
            IF r_request[r] = ANY (v_before) THEN
                out_before := true;
                out_full := false;
                out_retry_at := NULL;
            ELSE
                k := array_position(v_workers, concat_ws(chr(31), g_ns[g], r_worker[r]));
                v_got := cardinality(array_positions(v_owner, r));
                out_before := false;
                out_full := v_got < r_max[r] AND r_most[r] IS NOT NULL AND v_held[k] >= r_most[r];
                out_retry_at := CASE WHEN v_got < r_max[r] AND NOT out_full THEN v_retry END;
            END IF;
            RETURN NEXT;
        END LOOP;
        v_from := v_to + 1;
    END LOOP;
END $$;
