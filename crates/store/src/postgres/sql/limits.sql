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
