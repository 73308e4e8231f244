#!lua
-- Charges every entry of a plan, or none; once per operation, however often it is asked. A plan may ask for a block: then
-- every entry is charged as often as there are admissions in it.
--
-- KEYS[1]      the operation's record
-- KEYS[1 + i]  entry i: a counter of a window (string) or a set of slots (sorted set); all distinct
-- ARGV[1]      the operation's id, 32 hexadecimal digits: echoed, so that an answer is never taken for another's
-- ARGV[2]      how long a slot lives without renewal, in ms
-- ARGV[3]      how long the record outlives what was taken, in ms
-- ARGV[4 ...]  four for each entry: 'w' (window of requests), 't' (window of tokens) or 's' (slots), limit, cost,
--               length of a fresh window in ms
-- ARGV[... 3]  only for a block, and only without slots: the most admissions, how many parts what is left is divided into,
--               '1' if no request waits for it ('0' if one does)
-- ARGV[...]    only for a block in a cluster: 'exact'. The size has been settled with the other groups: that many, or none
--
-- Returns {id, 'granted' | 'denied', then three for each entry: used, ms until the window ends, 1 if exhausted}
-- (after the charge if granted, before it if denied) or {id, 'cancelled'}. If a block was asked for, {id, 'block', how many
-- admissions, then the same threes} in place of 'granted'.
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
-- * A block is as large as asked for, but no more than one part of what the tightest window has left; below 8 it is not
--   worth its bookkeeping, and 1, or 0 if no request waits: then nothing is charged and nothing written. Its lines stand
--   beside those of the request that waits: 'r' (requests) and 'b' (tokens), which go back in parts (part.lua). A record
--   of a block begins with its size, for whoever asks again before the first of its windows is over: a block ends with
--   them, since nothing is charged for it in the next ones.
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
local most = tonumber(ARGV[4 * #KEYS])
local parts, is_ahead = tonumber(ARGV[4 * #KEYS + 1]), ARGV[4 * #KEYS + 2] == '1'
local is_exact = ARGV[4 * #KEYS + 3] == 'exact'
local times = is_exact and most or 1
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
  entry.exhausted = entry.limit == 0 or entry.used + entry.cost * times > entry.limit
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

local own = is_ahead and 0 or 1
local admissions = 1
if most and record then
  admissions = tonumber(string.match(record, '^charged:(%d+)\n')) or own
  for ends in string.gmatch(record, '\n[rb] (%d+) ') do
    admissions = tonumber(ends) > now and admissions or own
  end
elseif is_exact then
  admissions = most
elseif most and not denied then
  -- Divided by fmod, which is exact, where a quotient of doubles would be rounded.
  local function whole_parts(amount, part)
    return (amount - math.fmod(amount, part)) / part
  end
  admissions = most
  for _, entry in ipairs(entries) do
    if entry.cost > 0 then
      local fitting = whole_parts(entry.limit - entry.used, entry.cost)
      admissions = math.min(admissions, whole_parts(fitting, parts))
    end
  end
  if admissions < 8 then
    admissions = own
  end
end

local granted = record or not denied
if granted and not record and admissions > 0 then
  local taken = {most and 'charged:' .. text(admissions) .. '\n' or 'charged\n'}
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
      entry.used = entry.used + 1
    else
      local amount = entry.cost * admissions
      if entry.ends > 0 then
        redis.call('INCRBY', entry.key, text(amount))
      else
        entry.ends = now + entry.window
        redis.call('SET', entry.key, text(amount), 'PXAT', text(entry.ends))
      end
      local ends = ' ' .. text(entry.ends) .. ' '
      if own > 0 then
        taken[#taken + 1] = entry.kind .. ends .. text(entry.cost) .. ' ' .. entry.key .. '\n'
      end
      if admissions > own then
        local of_block = text(amount - entry.cost * own)
        taken[#taken + 1] = (entry.kind == 't' and 'b' or 'r') .. ends .. of_block .. ' ' .. entry.key .. '\n'
      end
      last = math.max(last, entry.ends)
      entry.used = entry.used + amount
    end
  end
  -- The leading line keeps the record of an empty plan from being empty.
  redis.call('SET', KEYS[1], table.concat(taken), 'PXAT', text(last + grace))
end

local answer = {op, granted and 'granted' or 'denied'}
if granted and most then
  answer = {op, 'block', admissions}
end
for _, entry in ipairs(entries) do
  answer[#answer + 1] = entry.used
  answer[#answer + 1] = entry.reset
  answer[#answer + 1] = (entry.exhausted and not granted) and 1 or 0
end
return answer
