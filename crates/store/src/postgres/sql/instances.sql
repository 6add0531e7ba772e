-- The processes that serve this schema. reads: the newest format of bodies that a process knows.
CREATE TABLE eddyline.instances (
    id uuid PRIMARY KEY, started_at bigint NOT NULL, seen bigint NOT NULL, reads int NOT NULL, body text NOT NULL
) WITH (fillfactor = 10);
-- The format in which bodies are written: the newest that all processes know. Never lowered.
INSERT INTO eddyline.meta (name, value) VALUES ('format', 1);

-- Stores the time. If it is more than a day after the last stored one, the clock may be wrong, or no process served for
-- so long: deletion by age is suspended for an hour, so that an operator can check. Returns until when, or null if it
-- is not suspended.
CREATE FUNCTION eddyline.note_time_v1(p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := coalesce(p_now, eddyline.wall_ms());
    v_seen bigint;
    v_until bigint;
BEGIN
    SELECT m.value INTO v_seen FROM eddyline.meta m WHERE m.name = 'time_seen';
    -- The time is written once a minute.
    IF v_seen IS NULL OR v_now - v_seen > 60000 THEN
        INSERT INTO eddyline.meta (name, value) VALUES ('time_seen', v_now) ON CONFLICT DO NOTHING;
        SELECT m.value INTO v_seen FROM eddyline.meta m WHERE m.name = 'time_seen' FOR UPDATE;
        IF v_now - v_seen > 86400000 THEN
            INSERT INTO eddyline.meta (name, value) VALUES ('deletion_waits', v_now + 3600000)
                ON CONFLICT (name) DO UPDATE SET value = excluded.value;
        END IF;
        UPDATE eddyline.meta SET value = v_now WHERE name = 'time_seen' AND value < v_now;
    END IF;
    SELECT m.value INTO v_until FROM eddyline.meta m WHERE m.name = 'deletion_waits' AND m.value > v_now;
    RETURN v_until;
END $$;

-- Records that a process serves, and returns all that do. While one does, leases are watched, and passing time counts.
-- If none did for too long, 'looked_at' is left to due_leases_v1, which adds that time to every lease.
CREATE FUNCTION eddyline.check_in_v1(p_now bigint, p_id uuid, p_started_at bigint, p_reads int, p_body text,
    p_listed_ms bigint, p_unwatched_ms bigint)
RETURNS TABLE (out_now bigint, out_changed bigint, out_unwatched bool, out_format bigint, out_id uuid, out_started_at bigint,
    out_seen bigint, out_body text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_looked bigint;
BEGIN
    out_now := coalesce(p_now, eddyline.wall_ms());
    UPDATE eddyline.instances SET seen = greatest(seen, out_now) WHERE id = p_id;
    IF NOT FOUND THEN
        INSERT INTO eddyline.instances (id, started_at, seen, reads, body)
            VALUES (p_id, p_started_at, out_now, p_reads, p_body)
            ON CONFLICT DO NOTHING;
        DELETE FROM eddyline.instances WHERE seen < out_now - p_listed_ms;
    END IF;
    SELECT m.value INTO v_looked FROM eddyline.meta m WHERE m.name = 'looked_at';
    PERFORM eddyline.note_time_v1(out_now);
    out_unwatched := out_now - v_looked > p_unwatched_ms;
    IF NOT out_unwatched THEN
        UPDATE eddyline.meta SET value = out_now WHERE name = 'looked_at' AND value < out_now;
    END IF;
    SELECT m.value INTO out_format FROM eddyline.meta m WHERE m.name = 'format';
    IF out_format < p_reads AND NOT EXISTS (
        SELECT 1 FROM eddyline.instances i WHERE i.seen >= out_now - p_listed_ms AND i.reads < p_reads)
    THEN
        UPDATE eddyline.meta SET value = p_reads WHERE name = 'format' AND value < p_reads;
        out_format := p_reads;
    END IF;
    SELECT m.value INTO out_changed FROM eddyline.meta m WHERE m.name = 'documents_changed';
    FOR out_id, out_started_at, out_seen, out_body IN
        SELECT i.id, i.started_at, i.seen, i.body FROM eddyline.instances i WHERE i.seen >= out_now - p_listed_ms
        ORDER BY i.started_at, i.id
    LOOP
        RETURN NEXT;
    END LOOP;
END $$;
