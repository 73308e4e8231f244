-- The order of locks that 0002 lays down, kept also within the operations: known ones and new ones are locked in one pass. Before,
-- a cancel or a journal placed its new operations first and then locked the known ones, so that it could wait for a
-- statement that had locked a known one and waited for a new one.

-- Gives back what these operations recorded, and keeps them from recording anything later. With p_void nothing ran at
-- all: what a service has journaled of them is taken back too, now or when it comes.
CREATE OR REPLACE FUNCTION portcullis_cancel(p_ops uuid[], p_void boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_orgs text[];
    v_months date[];
    v_target text := CASE WHEN p_void THEN 'void' ELSE 'cancelled' END;
BEGIN
    INSERT INTO portcullis_operations AS o (op, org, month, state)
        SELECT DISTINCT t.op, '', portcullis_month_of(clock_timestamp()), v_target FROM unnest(p_ops) AS t (op)
        ORDER BY t.op
        ON CONFLICT (op) DO UPDATE SET op = o.op;
    WITH was AS (
        SELECT o.op, o.org, o.month, o.state FROM portcullis_operations o
        WHERE o.op = ANY (p_ops) AND (o.state = 'recorded' OR (p_void AND o.state = 'cancelled'))
        ORDER BY o.op FOR UPDATE
    ), done AS (
        UPDATE portcullis_operations o SET state = v_target FROM was WHERE o.op = was.op
        RETURNING was.org, was.month, was.state
    )
    SELECT array_agg(d.org), array_agg(d.month) INTO v_orgs, v_months FROM done d WHERE d.state = 'recorded';
    IF p_void THEN
        WITH gone AS (
            DELETE FROM portcullis_unmetered u WHERE u.op IN (
                SELECT t.op FROM portcullis_unmetered t WHERE t.op = ANY (p_ops) AND t.source = 'service'
                ORDER BY t.op FOR UPDATE
            ) RETURNING u.org, portcullis_month_of(u.at) AS month
        )
        SELECT v_orgs || array_agg(g.org), v_months || array_agg(g.month) INTO v_orgs, v_months FROM gone g;
    END IF;
    PERFORM portcullis_take_off(v_orgs, v_months);
END
$$;

-- Journals unmetered runs and adds each to its month, exactly once, as before.
CREATE OR REPLACE FUNCTION portcullis_journal(
    p_ops uuid[], p_orgs text[], p_owners text[], p_rules text[], p_at_ms bigint[], p_request_ids text[], p_sources text[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_new uuid[];
    v_counted uuid[];
BEGIN
    -- First, and then locked: a cancel of the same operation comes wholly before this, and is seen below, or wholly after.
    INSERT INTO portcullis_operations AS o (op, org, month, state)
        SELECT DISTINCT ON (t.op) t.op, t.org, portcullis_month_of(to_timestamp(t.at_ms / 1000.0)), 'cancelled'
        FROM unnest(p_ops, p_orgs, p_at_ms, p_sources) AS t (op, org, at_ms, source)
        ORDER BY t.op, t.source
        ON CONFLICT (op) DO UPDATE SET op = o.op;

    WITH entry AS (
        -- The same run, told by both: the filter knows for certain that it went on.
        SELECT DISTINCT ON (t.op) * FROM
            unnest(p_ops, p_orgs, p_owners, p_rules, p_at_ms, p_request_ids, p_sources)
            AS t (op, org, owner, rules, at_ms, request_id, source)
        ORDER BY t.op, t.source
    ), placed AS (
        INSERT INTO portcullis_unmetered AS u (op, org, owner, rules, at, request_id, source)
            SELECT e.op, e.org, e.owner, e.rules, to_timestamp(e.at_ms / 1000.0), e.request_id, e.source FROM entry e
            WHERE e.source = 'filter'
                OR NOT EXISTS (SELECT FROM portcullis_operations o WHERE o.op = e.op AND o.state = 'void')
            ORDER BY e.op
            ON CONFLICT (op) DO UPDATE SET source = excluded.source WHERE u.source = 'service' AND excluded.source = 'filter'
            RETURNING u.op, (xmax = 0) AS is_new
    )
    SELECT coalesce(array_agg(p.op), '{}') INTO v_new FROM placed p WHERE p.is_new;

    WITH done AS (
        UPDATE portcullis_operations o SET state = 'cancelled' WHERE o.op = ANY (v_new) AND o.state = 'recorded'
        RETURNING o.op
    )
    SELECT coalesce(array_agg(d.op), '{}') INTO v_counted FROM done d;

    INSERT INTO portcullis_months AS m (org, month, runs)
        SELECT u.org, portcullis_month_of(u.at), count(*) FROM portcullis_unmetered u
        WHERE u.op = ANY (v_new) AND NOT u.op = ANY (v_counted)
        GROUP BY 1, 2 ORDER BY 1, 2
        ON CONFLICT (org, month) DO UPDATE SET runs = m.runs + excluded.runs;
    RETURN cardinality(v_new);
END
$$;
