-- Extends leases. A worker that names all its tasks writes its own row and no other; then the tasks are read: an expiry may
-- have been faster.
CREATE FUNCTION eddyline.extend_v1(p_now bigint, p_ns text, p_worker text, p_runs uuid[], p_fences bigint[])
RETURNS TABLE (out_i int, out_lease_until bigint, out_deadline bigint, out_closed bool, out_memo bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
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
