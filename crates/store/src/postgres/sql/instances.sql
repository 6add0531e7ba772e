-- The processes that serve from this schema.
CREATE TABLE eddyline.instances (
    id uuid PRIMARY KEY, started_at bigint NOT NULL, seen bigint NOT NULL, body text NOT NULL
) WITH (fillfactor = 10);

-- A process says that it serves, and learns of the others. As long as one does, leases are watched: the time that passes
-- counts. If nobody did for too long, 'looked_at' is left to due_leases_v1, which adds that time to every lease.
CREATE FUNCTION eddyline.check_in_v1(p_now bigint, p_id uuid, p_started_at bigint, p_body text, p_listed_ms bigint,
    p_unwatched_ms bigint)
RETURNS TABLE (out_now bigint, out_changed bigint, out_unwatched bool, out_id uuid, out_started_at bigint,
    out_seen bigint, out_body text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_looked bigint;
BEGIN
    out_now := coalesce(p_now, eddyline.wall_ms());
    UPDATE eddyline.instances SET seen = greatest(seen, out_now) WHERE id = p_id;
    IF NOT FOUND THEN
        INSERT INTO eddyline.instances (id, started_at, seen, body) VALUES (p_id, p_started_at, out_now, p_body)
            ON CONFLICT DO NOTHING;
        DELETE FROM eddyline.instances WHERE seen < out_now - p_listed_ms;
    END IF;
    SELECT m.value INTO v_looked FROM eddyline.meta m WHERE m.name = 'looked_at';
    out_unwatched := out_now - v_looked > p_unwatched_ms;
    IF NOT out_unwatched THEN
        UPDATE eddyline.meta SET value = out_now WHERE name = 'looked_at' AND value < out_now;
    END IF;
    SELECT m.value INTO out_changed FROM eddyline.meta m WHERE m.name = 'documents_changed';
    FOR out_id, out_started_at, out_seen, out_body IN
        SELECT i.id, i.started_at, i.seen, i.body FROM eddyline.instances i WHERE i.seen >= out_now - p_listed_ms
        ORDER BY i.started_at, i.id
    LOOP
        RETURN NEXT;
    END LOOP;
END $$;
