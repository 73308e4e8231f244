-- What wrk sends, and what it tells at the end. The request is a text with places in it:
--   @TENANT@  a number from 0 to TENANTS - 1, seven digits, another one for each request
--   @OP@      32 random hexadecimal digits
--
--   wrk ... -s load.lua URL -- TEMPLATE TENANTS SEED PAUSE_MS
--
-- PAUSE_MS is the mean of what a connection waits before each request, exponentially distributed, so that many connections
-- together arrive as if they knew nothing of each other; 0 sends as fast as answers come.

local parts = {}
local tenants, pause

local filled = {
  TENANT = function() return string.format('%07d', math.random(0, tenants - 1)) end,
  OP = function()
    local word = function() return math.random(0, 0xffff) end
    return string.format('%04x%04x%04x%04x%04x%04x%04x%04x', word(), word(), word(), word(), word(), word(), word(), word())
  end
}

function init(arguments)
  local file = assert(io.open(arguments[1], 'rb'))
  local text = file:read('*a')
  file:close()
  tenants, pause = tonumber(arguments[2]), tonumber(arguments[4])
  math.randomseed(tonumber(arguments[3]))
  local at = 1
  for before, place, after in string.gmatch(text, '()@(%u+)@()') do
    parts[#parts + 1] = string.sub(text, at, before - 1)
    parts[#parts + 1] = assert(filled[place], place)
    at = after
  end
  parts[#parts + 1] = string.sub(text, at)
  if pause > 0 then
    delay = function() return math.floor(-pause * math.log(1 - math.random()) + 0.5) end
  end
end

function request()
  local text = {}
  for at, part in ipairs(parts) do
    text[at] = type(part) == 'string' and part or part()
  end
  return table.concat(text)
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\nSUMMARY {"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "refused": %d, "broken": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
