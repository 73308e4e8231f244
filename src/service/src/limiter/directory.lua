#!lua
-- The directory of an operation, in a cluster: which keys it charges, in which attempt, and how far that has come. What was
-- taken stands in a record beside the counters of each group (charge.lua); here is where to find those records.
--
-- KEYS[1]      the directory
-- ARGV[1]      the operation's id: echoed
-- ARGV[2]      'find', 'claim', 'commit', 'retire' or 'cancel'
-- ARGV[3]      how long it is kept from now, at least, in ms
-- ARGV[4]      claim: the size of the block, or 1; commit and retire: the attempt
-- ARGV[5 ...]  claim: the keys that are to be charged
--
-- Returns {id, 'absent' | 'open' | 'charged' | 'denied' | 'cancelled', the attempt, the size, then '<attempt> <key>' for each
-- key}: how it is now.
--
-- Why it is made this way:
-- * It is written before the first group is charged, so that whatever a process that dies has charged can be given back by
--   the operation's id, or lapses.
-- * An attempt is open until all of its groups are charged ('charged') or one denies ('denied': the others are given back).
--   Whoever asks for the same operation meanwhile joins the attempt: the records of the groups say what is done already.
--   Both ends are decided here, so that one process can't give back what another has just granted.
-- * An attempt that was denied is over for good, and its records refuse. The next one has a number of its own, and so
--   records of its own.
-- * A cancel keeps the keys, so that it can be repeated until every group has heard of it.
--
-- Bounds: as many lines as keys were charged, in all attempts.

local op, verb, kept_for, figure = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local state, attempt, size, lines = 'absent', 0, 0, ''
local text = redis.call('GET', KEYS[1])
if text then
  state, attempt, size, lines = string.match(text, '^(%a+) (%d+) (%d+)\n(.*)$')
  if not state then
    return redis.error_reply('PORTCULLIS a directory does not hold one')
  end
  attempt, size = tonumber(attempt), tonumber(size)
end

local before = state
local is_mine = state == 'open' and attempt == figure
if verb == 'claim' and (state == 'absent' or state == 'denied') then
  attempt = state == 'denied' and attempt + 1 or 0
  state, size = 'open', figure
  for i = 5, #ARGV do
    lines = lines .. string.format('%.0f %s\n', attempt, ARGV[i])
  end
elseif verb == 'commit' and is_mine then
  state = 'charged'
elseif verb == 'retire' and is_mine then
  state = 'denied'
elseif verb == 'cancel' then
  state = 'cancelled'
end

local left = redis.call('PTTL', KEYS[1])
if state ~= before then
  local head = string.format('%s %.0f %.0f\n', state, attempt, size)
  redis.call('SET', KEYS[1], head .. lines, 'PX', string.format('%.0f', math.max(left, kept_for, 1)))
elseif text and left < kept_for then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end

local answer = {op, state, attempt, size}
for line in string.gmatch(lines, '([^\n]*)\n') do
  answer[#answer + 1] = line
end
return answer
