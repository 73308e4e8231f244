#!lua
-- Gives back all that an operation took, and keeps it from taking anything later, whichever of the two comes first.
--
-- KEYS[1]  the operation's record
-- KEYS[..] only in a cluster: what it took, in this group
-- ARGV[1]  the operation's id: echoed
-- ARGV[2]  how long the refusal is remembered, in ms: longer than any charge that may still be on its way
--
-- Returns {id, 'done'}.
--
-- Why it is made this way: the record says what was taken, so nobody has to know it, and a second cancel finds nothing
-- left. What a settlement replaced stands there as it is now charged (see settle.lua). A refund goes to the window that was
-- charged and to no later one of the same key, and never below zero. Their ends differ by a window at least, which is a
-- second or more; the end of one and the same moves by milliseconds when its key moves to another member of a cluster. The
-- keys that it touches stand in the record. One server needs no more; a cluster has to be told them, or it would run a
-- script that meets a key on its way to another member, and break it off halfway.
--
-- Bounds: as many entries as the charge had.

local op = ARGV[1]
local record = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], 'x', 'PX', ARGV[2])
if not record then
  return {op, 'done'}
end
for kind, rest in string.gmatch(record, '(%a) ([^\n]*)\n') do
  if kind == 's' then
    redis.call('ZREM', rest, op)
  else
    local ends, amount, key = string.match(rest, '^(%d+) (%d+) (.*)$')
    if math.abs(redis.call('PEXPIRETIME', key) - tonumber(ends)) < 500 then
      local used = tonumber(redis.call('GET', key)) or 0
      redis.call('DECRBY', key, string.format('%.0f', math.max(0, math.min(used, tonumber(amount)))))
    end
  end
end
return {op, 'done'}
