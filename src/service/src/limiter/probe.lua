#!lua
-- Asks whether the store would take a charge: runs every command of the other scripts on keys of its own.
--
-- KEYS[1]  a counter that nobody else uses
-- KEYS[2]  a set of slots that nobody else uses
-- ARGV[1]  any text: echoed
--
-- Returns {text, 'done'}.
--
-- Why it is made this way: a connection counts as good only after this. A replica, a full memory, a missing password
-- and a user who may not run one of the commands show here, and not halfway through somebody's charge.
--
-- Bounds: 12 commands of O(1); leaves one key, for 10 s.

redis.call('TIME')
redis.call('SET', KEYS[1], '1', 'PX', 10000)
redis.call('INCRBY', KEYS[1], 1)
redis.call('DECRBY', KEYS[1], 1)
redis.call('GET', KEYS[1])
redis.call('PEXPIREAT', KEYS[1], redis.call('PEXPIRETIME', KEYS[1]))
redis.call('ZADD', KEYS[2], 1, 'probe')
redis.call('ZSCORE', KEYS[2], 'probe')
redis.call('ZCOUNT', KEYS[2], '(1', '+inf')
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', 0)
redis.call('ZREM', KEYS[2], 'probe')
return {ARGV[1], 'done'}
