-- wrk's script: the requests of tests/bench/prompts.py, one after the other. Environment:
-- HEAD, TAIL, SENTENCES (files), COUNT (sentences a request), TOKENS (of a request), CONNECTIONS.
local function read(name)
  local file = assert(io.open(os.getenv(name), "r"))
  local text = file:read("*a")
  file:close()
  return text
end

local head, tail = read("HEAD"), read("TAIL")
local count, tokens = tonumber(os.getenv("COUNT")), tonumber(os.getenv("TOKENS"))
local connections = tonumber(os.getenv("CONNECTIONS"))
local headers = { ["Content-Type"] = "application/json" }
local sentences = {}
for line in read("SENTENCES"):gmatch("[^\n]+") do
  sentences[#sentences + 1] = line
end
math.randomseed(7)

local number = -1 -- wrk calls once before it begins
local picked = {}

-- The first request of each connection is a part of one, all parts different, so that from the
-- beginning streams are as old as they would be after a long time, and do not end together.
local function length()
  if number >= connections then
    return tokens
  end
  return math.ceil(tokens * math.max(number, 1) / connections)
end

request = function()
  number = number + 1
  local text = ""
  if count > 0 then
    for i = 1, count do
      picked[i] = sentences[math.random(#sentences)]
    end
    text = string.format("%d. ", number) .. table.concat(picked, "", 1, count)
  end
  return wrk.format("POST", nil, headers, head .. text .. tail .. length() .. "}")
end

done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "bytes": %d, "errors": %d, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.bytes,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
