-- Metering: runs and cost per org and calendar month (UTC, by this server's clock), and the journal of unmetered runs.
--
-- Locks are always taken in the same order (operations, journal, months; each in the order of its key), so that no two
-- of these functions can wait for each other. Whoever has an operation's row decides about its run in all three.

CREATE TABLE portcullis_months (
    org text NOT NULL,
    month date NOT NULL,
    runs bigint NOT NULL DEFAULT 0,
    -- Micro-dollars.
    cost bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (org, month)
);

-- What became of each operation, for as long as it may be asked again.
CREATE TABLE portcullis_operations (
    op uuid PRIMARY KEY,
    org text NOT NULL,
    month date NOT NULL,
    -- recorded: it counts in its month. cancelled: it does not, and never will. void: the same, and nothing ran.
    state text NOT NULL CHECK (state IN ('recorded', 'cancelled', 'void')),
    -- Micro-dollars, once they have been added to the month.
    cost bigint,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX portcullis_operations_created_at ON portcullis_operations (created_at);

-- Runs that went on while they could not be recorded. Each counts in its month from the moment that it stands here.
CREATE TABLE portcullis_unmetered (
    op uuid PRIMARY KEY,
    org text NOT NULL,
    owner text,
    rules text NOT NULL,
    at timestamptz NOT NULL,
    request_id text,
    source text NOT NULL CHECK (source IN ('service', 'filter')),
    journaled_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX portcullis_unmetered_at ON portcullis_unmetered (at);

CREATE FUNCTION portcullis_month_of(p_at timestamptz) RETURNS date LANGUAGE sql STABLE AS
$$ SELECT date_trunc('month', p_at AT TIME ZONE 'UTC')::date $$;

-- Checks a run against its org's month and records it, or neither. A null maximum is unlimited.
-- state: granted, denied or cancelled; what follows is where the month stands, this run not included.
CREATE FUNCTION portcullis_record(
    p_op uuid, p_org text, p_max_runs bigint, p_max_cost bigint, p_records boolean,
    OUT state text, OUT runs bigint, OUT cost bigint, OUT ends_in_ms bigint, OUT length_s bigint
) LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_month date := portcullis_month_of(v_now);
    v_end timestamptz := (v_month + interval '1 month') AT TIME ZONE 'UTC';
    v_known text;
BEGIN
    ends_in_ms := greatest(ceil(extract(epoch FROM v_end - v_now) * 1000), 1)::bigint;
    length_s := extract(epoch FROM v_end - v_month::timestamp AT TIME ZONE 'UTC')::bigint;
    runs := 0;
    cost := 0;
    SELECT o.state INTO v_known FROM portcullis_operations o WHERE o.op = p_op;
    IF v_known IS NULL THEN
        -- Without a lock, and what it denies writes nothing: runs shrink only by what is given back.
        SELECT m.runs, m.cost INTO runs, cost FROM portcullis_months m WHERE m.org = p_org AND m.month = v_month;
        runs := coalesce(runs, 0);
        cost := coalesce(cost, 0);
        IF runs >= p_max_runs OR cost >= p_max_cost THEN
            state := 'denied';
            RETURN;
        ELSIF NOT p_records THEN
            state := 'granted';
            RETURN;
        END IF;
        LOOP
            -- Waits for another statement of the same operation; if that one is denied, nothing is left of it.
            INSERT INTO portcullis_operations (op, org, month, state) VALUES (p_op, p_org, v_month, 'recorded')
                ON CONFLICT (op) DO NOTHING;
            EXIT WHEN FOUND;
            SELECT o.state INTO v_known FROM portcullis_operations o WHERE o.op = p_op;
            EXIT WHEN FOUND;
        END LOOP;
    END IF;
    IF v_known IS NOT NULL THEN
        state := CASE v_known WHEN 'recorded' THEN 'granted' ELSE 'cancelled' END;
        RETURN;
    END IF;
    -- Nobody else changes the month between the check and the increment: both are one statement on a locked row.
    INSERT INTO portcullis_months (org, month) VALUES (p_org, v_month) ON CONFLICT (org, month) DO NOTHING;
    UPDATE portcullis_months m SET runs = m.runs + 1
        WHERE m.org = p_org AND m.month = v_month
            AND (p_max_runs IS NULL OR m.runs < p_max_runs) AND (p_max_cost IS NULL OR m.cost < p_max_cost);
    IF FOUND THEN
        state := 'granted';
        RETURN;
    END IF;
    DELETE FROM portcullis_operations o WHERE o.op = p_op;
    SELECT m.runs, m.cost INTO runs, cost FROM portcullis_months m WHERE m.org = p_org AND m.month = v_month;
    state := 'denied';
END
$$;

-- Takes runs off months; a list with an org and a month for each.
CREATE FUNCTION portcullis_take_off(p_orgs text[], p_months date[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v record;
BEGIN
    FOR v IN
        SELECT t.org, t.month, count(*) AS n FROM unnest(p_orgs, p_months) AS t (org, month) GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
        UPDATE portcullis_months m SET runs = greatest(m.runs - v.n, 0) WHERE m.org = v.org AND m.month = v.month;
    END LOOP;
END
$$;

-- Gives back what these operations recorded, and keeps them from recording anything later. With p_void nothing ran at
-- all: what a service has journaled of them is taken back too, now or when it comes.
CREATE FUNCTION portcullis_cancel(p_ops uuid[], p_void boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_orgs text[];
    v_months date[];
    v_target text := CASE WHEN p_void THEN 'void' ELSE 'cancelled' END;
BEGIN
    INSERT INTO portcullis_operations (op, org, month, state)
        SELECT DISTINCT t.op, '', portcullis_month_of(clock_timestamp()), v_target FROM unnest(p_ops) AS t (op)
        ORDER BY t.op
        ON CONFLICT (op) DO NOTHING;
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

-- Adds what an operation has cost to its org's month, once. An operation that is not known is added to this month.
CREATE FUNCTION portcullis_add_cost(p_op uuid, p_org text, p_cost bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_org text;
    v_month date;
BEGIN
    INSERT INTO portcullis_operations AS o (op, org, month, state, cost)
        VALUES (p_op, p_org, portcullis_month_of(clock_timestamp()), 'cancelled', p_cost)
        ON CONFLICT (op) DO UPDATE SET cost = excluded.cost WHERE o.cost IS NULL
        RETURNING o.month INTO v_month;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    INSERT INTO portcullis_months AS m (org, month, cost) VALUES (p_org, v_month, p_cost)
        ON CONFLICT (org, month) DO UPDATE
        SET cost = least(m.cost::numeric + excluded.cost, 9223372036854775807)::bigint;
END
$$;

-- Journals unmetered runs and adds each to its month, exactly once, whatever else is known of its operation: one that
-- was recorded after all keeps its run, any other gets one, and from then on nothing can be given back or recorded by it.
-- Returns how many are new.
CREATE FUNCTION portcullis_journal(
    p_ops uuid[], p_orgs text[], p_owners text[], p_rules text[], p_at_ms bigint[], p_request_ids text[], p_sources text[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_new uuid[];
    v_counted uuid[];
BEGIN
    -- First, and then locked: a cancel of the same operation comes wholly before this, and is seen below, or wholly after.
    INSERT INTO portcullis_operations (op, org, month, state)
        SELECT DISTINCT ON (t.op) t.op, t.org, portcullis_month_of(to_timestamp(t.at_ms / 1000.0)), 'cancelled'
        FROM unnest(p_ops, p_orgs, p_at_ms, p_sources) AS t (op, org, at_ms, source)
        ORDER BY t.op, t.source
        ON CONFLICT (op) DO NOTHING;
    PERFORM FROM portcullis_operations o WHERE o.op = ANY (p_ops) ORDER BY o.op FOR UPDATE;

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
