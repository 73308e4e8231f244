#!lua
-- Gives back a part of a block of admissions, once for each return's id.
--
-- KEYS[1]  the record of the operation that charged the block
-- KEYS[2]  the record under the return's own id
-- KEYS[..] only in a cluster: what the operation took, in this group
-- ARGV[1]  the return's id: echoed
-- ARGV[2]  requests that go back, at most 2^53
-- ARGV[3]  tokens that go back, from -2^53 to 2^53; fewer than none are charged
-- ARGV[4]  how long a record outlives what it is about, in ms
--
-- Returns {id, 'done'}.
--
-- Why it is made this way:
-- * A return that was made leaves what a cancel leaves, under its own id: nothing is taken or given back by it any more. It
--   outlives the block's record, without which there is nothing to give back.
-- * Only 'r' and 'b' lines go back in parts (see charge.lua): what the request itself took is its settlement's and its
--   cancel's. No more goes back than the line still has, so that a cancel gives back exactly the rest.
-- * The amounts go to the windows that were charged and to no later ones of the same keys (see cancel.lua), never below
--   zero, and not over 2^53 (see settle.lua).
-- * All that can fail comes before the writes, so that a return which is asked again was made as a whole or not at all. The
--   keys stand in the record (see cancel.lua).
--
-- Bounds: as many entries as the charge had, and for each 3 commands of O(1).

local id, grace = ARGV[1], tonumber(ARGV[4])

local function text(number)
  return string.format('%.0f', number)
end

local record = redis.call('GET', KEYS[1])
if not record or record == 'x' or redis.call('GET', KEYS[2]) then
  return {id, 'done'}
end
local record_ends = redis.call('PEXPIRETIME', KEYS[1])

local back_by_kind = {r = tonumber(ARGV[2]), b = tonumber(ARGV[3])}
local lines, counts = {string.match(record, '^[^\n]*\n')}, {}
for kind, rest in string.gmatch(record, '(%a) ([^\n]*)\n') do
  local back = back_by_kind[kind]
  if back then
    local ends, amount, key = string.match(rest, '^(%d+) (%d+) (.*)$')
    local is_same = math.abs(redis.call('PEXPIRETIME', key) - tonumber(ends)) < 500
    local value = is_same and redis.call('GET', key)
    if value and string.find(value, '^%d+$') then
      local used, mine = tonumber(value), tonumber(amount)
      local given = math.max(0, math.min(back, mine))
      local others = math.max(0, used - given)
      used = math.min(others + math.max(0, -back), 9007199254740992)
      counts[key] = text(used)
      mine = math.max(0, mine - given) + math.max(0, used - others)
      rest = ends .. ' ' .. text(mine) .. ' ' .. key
    end
  end
  lines[#lines + 1] = kind .. ' ' .. rest .. '\n'
end

for key, used in pairs(counts) do
  redis.call('SET', key, used, 'KEEPTTL')
end
redis.call('SET', KEYS[1], table.concat(lines), 'KEEPTTL')
if record_ends > 0 then
  redis.call('SET', KEYS[2], 'x', 'PXAT', text(record_ends + grace))
else
  redis.call('SET', KEYS[2], 'x', 'PX', text(grace))
end
return {id, 'done'}
