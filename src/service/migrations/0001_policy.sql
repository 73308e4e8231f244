-- Policies: who an organization is, which models it may use, who serves them, what its plan allows.
-- Figures are whole numbers up to 2^53 - 1; NULL is unlimited, 0 blocks. Money is in micro-dollars.

CREATE TABLE portcullis_plans (
    name         text PRIMARY KEY,
    concurrency  bigint CHECK (concurrency >= 0),
    requests     bigint CHECK (requests >= 0),
    tokens       bigint CHECK (tokens >= 0),
    monthly_runs bigint CHECK (monthly_runs >= 0),
    monthly_cost bigint CHECK (monthly_cost >= 0)
);

CREATE TABLE portcullis_orgs (
    id     text PRIMARY KEY,
    status text NOT NULL CHECK (status IN ('active', 'suspended', 'read_only')),
    plan   text REFERENCES portcullis_plans (name),
    models text[] NOT NULL DEFAULT '{}'
);

-- Which provider serves which model: exact names, or a prefix that ends in *.
CREATE TABLE portcullis_providers (
    model    text PRIMARY KEY,
    provider text NOT NULL CHECK (provider <> '')
);

-- Per million tokens.
CREATE TABLE portcullis_prices (
    model        text PRIMARY KEY,
    input        bigint NOT NULL CHECK (input >= 0),
    cached_input bigint NOT NULL CHECK (cached_input >= 0),
    output       bigint NOT NULL CHECK (output >= 0)
);
