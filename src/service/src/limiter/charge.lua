#!lua
-- Charges every entry of a plan, or none; once per operation, however often it is asked.
--
-- KEYS[1]      the operation's record
-- KEYS[1 + i]  entry i: a counter of a window (string) or a set of slots (sorted set); all distinct
-- ARGV[1]      the operation's id, 32 hexadecimal digits: echoed, so that an answer is never taken for another's
-- ARGV[2]      how long a slot lives without renewal, in ms
-- ARGV[3]      how long the record outlives what was taken, in ms
-- ARGV[4 ...]  four for each entry: 'w' (window of requests), 't' (window of tokens) or 's' (slots), limit, cost,
--               length of a fresh window in ms
--
-- Returns {id, 'granted' | 'denied', then three for each entry: used, ms until the window ends, 1 if exhausted}
-- (after the charge if granted, before it if denied) or {id, 'cancelled'}.
--
-- Why it is made this way:
-- * The bare shebang makes the server refuse the whole script, before its first line, on a read-only replica and when
--   it is out of memory. Otherwise a replica that stayed behind would still answer denials from its stale counters.
-- * All reads come before all writes: a key of a wrong type fails the script while nothing has been charged.
-- * Only durations come in; what time it is, the server says. A window is told from a later one of the same key by the
--   time at which it ends (PEXPIRETIME, so Redis 7.0): that is what the record remembers for a refund.
-- * A window that ends at this very millisecond is over, though its key may still be there: whoever waited for as long
--   as a denial said has waited enough.
-- * A key without a time to live (planted, or restored from elsewhere) gets a whole window, or it would deny for ever.
-- * The record has a line for each entry: 's <key>', or 'w' or 't', '<end of the window> <amount> <key>'. A 't' is a hold
--   that a settlement may replace, once (settle.lua); a 'w' stays as it is. A process of an older version wrote 'w' for
--   both, and reads 't' as it reads 'w'.
-- * Numbers go back to the server as text by '%.0f': Lua would write 2^53 - 1 as 9.007199254741e+15.
--
-- Bounds: at most about 30 entries, and for each 4 commands of O(log slots); expired slots are dropped as they are met.

local op, slot_ttl, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local function text(number)
  return string.format('%.0f', number)
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local record = redis.call('GET', KEYS[1])
if record == 'x' then
  return {op, 'cancelled'}
end

local entries = {}
local denied = false
for i = 2, #KEYS do
  local at = 4 * (i - 1)
  local entry = {
    key = KEYS[i],
    kind = ARGV[at],
    is_slot = ARGV[at] == 's',
    limit = tonumber(ARGV[at + 1]),
    cost = tonumber(ARGV[at + 2]),
    window = tonumber(ARGV[at + 3]),
    used = 0,
    ends = 0,
    reset = 0
  }
  if entry.is_slot then
    entry.used = redis.call('ZCOUNT', entry.key, '(' .. text(now), '+inf')
    entry.ends = redis.call('PEXPIRETIME', entry.key)
  else
    local value = redis.call('GET', entry.key)
    local ends = redis.call('PEXPIRETIME', entry.key)
    if value and (ends > now or ends == -1) then
      if not string.find(value, '^%d+$') then
        return redis.error_reply('PORTCULLIS a counter does not hold a count')
      end
      entry.used = math.min(tonumber(value), 9007199254740992)
      entry.ends = ends
    end
    entry.reset = entry.ends > 0 and entry.ends - now or entry.window
  end
  -- Neither is above 2^53, and a limit is below it, so a sum that is rounded is still on the right side of the limit.
  entry.exhausted = entry.limit == 0 or entry.used + entry.cost > entry.limit
  denied = denied or entry.exhausted
  entries[#entries + 1] = entry
end

-- Writes from here on. First what keys need that nobody gave a time to live, whatever the verdict.
for _, entry in ipairs(entries) do
  if entry.ends == -1 then
    entry.ends = now + (entry.is_slot and slot_ttl or entry.window)
    redis.call('PEXPIREAT', entry.key, text(entry.ends))
  end
end

local granted = record or not denied
if granted and not record then
  local taken = {}
  local last = now
  for _, entry in ipairs(entries) do
    if entry.is_slot then
      local expires = now + slot_ttl
      redis.call('ZREMRANGEBYSCORE', entry.key, '-inf', text(now))
      redis.call('ZADD', entry.key, text(expires), op)
      if entry.ends < expires then
        redis.call('PEXPIREAT', entry.key, text(expires))
      end
      taken[#taken + 1] = 's ' .. entry.key .. '\n'
      last = math.max(last, expires)
    else
      if entry.ends > 0 then
        redis.call('INCRBY', entry.key, text(entry.cost))
      else
        entry.ends = now + entry.window
        redis.call('SET', entry.key, text(entry.cost), 'PXAT', text(entry.ends))
      end
      taken[#taken + 1] =
        entry.kind .. ' ' .. text(entry.ends) .. ' ' .. text(entry.cost) .. ' ' .. entry.key .. '\n'
      last = math.max(last, entry.ends)
    end
    entry.used = entry.used + entry.cost
  end
  -- The leading line keeps the record of an empty plan from being empty.
  redis.call('SET', KEYS[1], 'charged\n' .. table.concat(taken), 'PXAT', text(last + grace))
end

local answer = {op, granted and 'granted' or 'denied'}
for _, entry in ipairs(entries) do
  answer[#answer + 1] = entry.used
  answer[#answer + 1] = entry.reset
  answer[#answer + 1] = (entry.exhausted and not granted) and 1 or 0
end
return answer
