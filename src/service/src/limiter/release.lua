#!lua
-- Frees the slots of an operation; what it charged to windows stays.
--
-- KEYS[1]  the operation's record
-- ARGV[1]  the operation's id: echoed
--
-- Returns {id, 'done'}.
--
-- Why it is made this way: a slot is a member with its holder's id, never a count that goes down, so a second release,
-- or one of a slot that lapsed and was taken by somebody else, frees nothing. The record outlives the slots, so without
-- one there is none left to free. The keys stand in the record (see cancel.lua).
--
-- Bounds: as many entries as the charge had.

local record = redis.call('GET', KEYS[1])
if record then
  for kind, key in string.gmatch(record, '(%a) ([^\n]*)\n') do
    if kind == 's' then
      redis.call('ZREM', key, ARGV[1])
    end
  end
end
return {ARGV[1], 'done'}
