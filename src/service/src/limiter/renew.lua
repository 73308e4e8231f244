#!lua
-- Prolongs the slots of an operation.
--
-- KEYS[1]  the operation's record
-- KEYS[..] only in a cluster: what it took, in this group
-- ARGV[1]  the operation's id: echoed
-- ARGV[2]  how long a slot lives from now, in ms
-- ARGV[3]  how long the record outlives what was taken, in ms
--
-- Returns {id, 'kept' | 'lost'}.
--
-- Why it is made this way: a slot that has lapsed is not revived, since another request may hold its place; the record
-- outlives the slots, so without one they have lapsed as well. The set of slots and the record live at least as long as
-- the last slot. The keys stand in the record (see cancel.lua).
--
-- Bounds: as many entries as the charge had, and for each 4 commands of O(log slots).

local op = ARGV[1]
local record = redis.call('GET', KEYS[1])
if not record or record == 'x' then
  return {op, 'lost'}
end

local function text(number)
  return string.format('%.0f', number)
end

local function live_until(key, ends)
  if redis.call('PEXPIRETIME', key) < ends then
    redis.call('PEXPIREAT', key, text(ends))
  end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expires = now + tonumber(ARGV[2])
local word = 'kept'
for kind, key in string.gmatch(record, '(%a) ([^\n]*)\n') do
  if kind == 's' then
    local until_now = redis.call('ZSCORE', key, op)
    if until_now and tonumber(until_now) > now then
      redis.call('ZADD', key, text(expires), op)
      live_until(key, expires)
    else
      word = 'lost'
    end
  end
end
live_until(KEYS[1], expires + tonumber(ARGV[3]))
return {op, word}
