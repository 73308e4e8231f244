#!lua
-- Frees the slots of an operation and, if told the tokens, replaces its holds of tokens by them, once.
--
-- KEYS[1]  the operation's record
-- KEYS[..] only in a cluster: what it took, in this group
-- ARGV[1]  the operation's id: echoed
-- ARGV[2]  what each window of tokens is charged in place of the hold, at most 2^53; absent: the holds stay as they are
--
-- Returns {id, 'done'}.
--
-- Why it is made this way:
-- * A slot is a member with its holder's id, never a count that goes down, so a second settlement, or one of a slot that
--   lapsed and was taken by somebody else, frees nothing. The record outlives slots and windows, so without one there is
--   nothing left to settle; nor is there after a cancel, which leaves no lines.
-- * A hold of tokens is a 't' line. It becomes a 'w' line with the new amount: a second settlement finds no hold, and a
--   cancel gives back what is then charged. Windows of requests, and all those that an older version wrote, are 'w' lines
--   from the start, and stay as they were charged; so do the lines of a block, which goes back in parts (part.lua).
-- * The amount goes to the window that was charged and to no later one of the same key (see cancel.lua). It may go over
--   a limit, since the tokens are used, but not over 2^53, the last integer that Lua's numbers tell apart; and the share
--   of others never below zero, whatever was done to the counter.
-- * All that can fail comes before the counters and the record are written, so that a settlement which is asked again was
--   made as a whole or not at all. The keys stand in the record (see cancel.lua).
--
-- Bounds: as many entries as the charge had, and for each 3 commands of O(log slots).

local op, tokens = ARGV[1], ARGV[2] and tonumber(ARGV[2])

local function text(number)
  return string.format('%.0f', number)
end

local record = redis.call('GET', KEYS[1])
if not record then
  return {op, 'done'}
end

local lines, counts = {string.match(record, '^[^\n]*\n')}, {}
local is_settled = false
for kind, rest in string.gmatch(record, '(%a) ([^\n]*)\n') do
  if kind == 's' then
    redis.call('ZREM', rest, op)
  elseif kind == 't' and tokens then
    local ends, amount, key = string.match(rest, '^(%d+) (%d+) (.*)$')
    local is_same = math.abs(redis.call('PEXPIRETIME', key) - tonumber(ends)) < 500
    local value = is_same and redis.call('GET', key)
    if value and string.find(value, '^%d+$') then
      local others = math.max(0, tonumber(value) - tonumber(amount))
      local used = math.min(others + tokens, 9007199254740992)
      counts[key] = text(used)
      amount = text(math.max(0, used - others))
    end
    kind, rest = 'w', ends .. ' ' .. amount .. ' ' .. key
    is_settled = true
  end
  lines[#lines + 1] = kind .. ' ' .. rest .. '\n'
end

for key, used in pairs(counts) do
  redis.call('SET', key, used, 'KEEPTTL')
end
if is_settled then
  redis.call('SET', KEYS[1], table.concat(lines), 'KEEPTTL')
end
return {op, 'done'}
