-- Costs: many at once, in the order of locks that 0002 lays down (operations, then months, each in the order of its key).

DROP FUNCTION portcullis_add_cost(uuid, text, bigint);

-- Adds what these operations have cost to their orgs' months, each operation once: to the month of its record, or, if it is
-- not known, to this one. Of an operation that is listed twice one line counts. A month that is full stays full.
-- Returns how many were added.
CREATE FUNCTION portcullis_add_costs(p_ops uuid[], p_orgs text[], p_costs bigint[]) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_added bigint;
BEGIN
    WITH told AS (
        SELECT DISTINCT ON (t.op) t.op, t.org, t.cost FROM unnest(p_ops, p_orgs, p_costs) AS t (op, org, cost)
        ORDER BY t.op, t.org, t.cost
    ), added AS (
        -- Not known: it ran, and what recorded its run has been forgotten or never was. It is not recorded after this.
        INSERT INTO portcullis_operations AS o (op, org, month, state, cost)
            SELECT t.op, t.org, portcullis_month_of(clock_timestamp()), 'cancelled', t.cost FROM told t ORDER BY t.op
            -- Remembered for half a day at least, so that nobody tells it a second time after it has been forgotten.
            ON CONFLICT (op) DO UPDATE SET cost = excluded.cost,
                created_at = greatest(o.created_at, clock_timestamp() - interval '12 hours')
                WHERE o.cost IS NULL
            RETURNING o.op, o.month, o.cost
    ), counted AS (
        -- The whole list, so that every operation is locked before the first month.
        SELECT t.org, a.month, sum(a.cost) AS cost, count(*) AS n FROM added a JOIN told t ON t.op = a.op
        GROUP BY 1, 2 ORDER BY 1, 2
    ), placed AS (
        INSERT INTO portcullis_months AS m (org, month, cost)
            SELECT c.org, c.month, least(c.cost, 9223372036854775807)::bigint FROM counted c ORDER BY c.org, c.month
            ON CONFLICT (org, month) DO UPDATE
            SET cost = least(m.cost::numeric + excluded.cost, 9223372036854775807)::bigint
    )
    SELECT coalesce(sum(c.n), 0) INTO v_added FROM counted c;
    RETURN v_added;
END
$$;
