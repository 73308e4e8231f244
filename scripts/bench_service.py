"""The second half of scripts/bench: the decision service by itself, against the ceiling that its script sets.

Three contract scopes with one resource each. The ceiling is what redis-benchmark reaches with the same script, the same
keys and arguments, on the same Redis.
"""

import csv
import json
import random
import re
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
from bench_stack import LIMIT, ROOT, Failure, cpu_us, lower_quartile, middle_half  # noqa: E402

CONNECTIONS = 64
# As many as the service has under way at once on a busy connection; without it the ceiling is one of system calls.
PIPELINE = 16
SCOPES = ("owner", "org", "auth")
SHAPES = [(scopes, resources) for scopes in (1, 3, 8) for resources in (1, 2, 3)]


def decide_template(stack, limited=SCOPES):
    """What the filter would ask, with limits on these scopes."""
    request = {
        "op": "@OP@",
        "profile": "development",
        "rules": "contract-limits",
        "mode": "enforce",
        "gates": [{"gate": "contract", "when_unavailable": "admit", "limits": "envelope"}],
        "budget_ms": 2000,
        "window_s": 60,
        "subject": {"owner": "tenant-0000000", "org": "org-1", "auth": "auth-1"},
        "limits": {scope: {"requests": LIMIT} for scope in limited},
        "tokens": 1024,
        "request_id": "00000000-0000-4000-8000-000000000000",
    }
    lines = ["POST /v1/decide HTTP/1.1", "Content-Type: application/json"]
    return stack.template(f"decide-{len(limited)}", lines, json.dumps(request, separators=(",", ":")))


class Script:
    """charge.lua, run by redis-benchmark."""

    def __init__(self, stack):
        self.stack = stack
        text = (ROOT / "src/service/src/limiter/charge.lua").read_text()
        self.sha = stack.redis_cli("SCRIPT", "LOAD", text).strip()
        if not re.fullmatch("[0-9a-f]{40}", self.sha):
            raise Failure(f"Redis does not take charge.lua: {self.sha}")

    def call(self, scopes, resources):
        """The words of one charge. Each has a record of its own; the counters are the same for all."""
        record = "portcullis:op:00000000000000000000__rand_int__"
        # Slots that nobody gives back: they live so shortly that some dozens are held at any time.
        slot_ttl_ms, grace_ms, window_ms = 5, 60_000, 60_000
        keys, arguments = [record], ["0" * 32, slot_ttl_ms, grace_ms]
        kinds = [("requests:60", "w", 1), ("tokens:60", "t", 1024), ("concurrency", "s", 1)][:resources]
        for scope in range(scopes):
            name = SCOPES[scope] if scope < len(SCOPES) else f"scope{scope}"
            for resource, kind, cost in kinds:
                keys.append(f"portcullis:{{{name}:{name}-1}}:{resource}")
                arguments += [kind, LIMIT * 1000, cost, window_ms]
        return ["EVALSHA", self.sha, len(keys), *keys, *arguments]

    def run(self, words, calls, pipeline):
        """Calls per second."""
        self.stack.redis_cli("FLUSHALL")
        options = ["-p", self.stack.redis_port, "-c", CONNECTIONS, "-P", pipeline, "-n", calls, "-r", 10**12 - 1, "--csv"]
        command = [self.stack.tools["redis-benchmark"], *map(str, options), *map(str, words)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        try:
            return float(list(csv.reader(done.stdout.splitlines()))[-1][1])
        except (IndexError, ValueError) as error:
            raise Failure(f"redis-benchmark: {(done.stdout + done.stderr).strip()[-400:]}") from error

    def cost_us(self, words, calls):
        """By the server's own clock, without what it takes to read a call and to write its answer."""
        self.stack.redis_cli("CONFIG", "RESETSTAT")
        self.run(words, calls, PIPELINE)
        found = re.search(r"cmdstat_evalsha:calls=(\d+),.*?usec_per_call=([\d.]+),.*?failed_calls=(\d+)",
                          self.stack.redis_cli("INFO", "commandstats"))  # fmt: skip
        if not found or int(found[3]) or int(found[1]) < calls:
            raise Failure(f"charge.lua fails: {self.stack.redis_cli(*words).strip()[:300]}")
        return float(found[2])


def full_load(stack, service, template, seconds):
    with stack.load(service.port, template, connections=CONNECTIONS) as load:
        time.sleep(0.3)
        before, redis_before = cpu_us(service.process.pid), cpu_us(stack.redis.process.pid)
        decisions_before, started = decisions(stack), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - started
        count = decisions(stack) - decisions_before
        used, redis_used = cpu_us(service.process.pid) - before, cpu_us(stack.redis.process.pid) - redis_before
        summary = load.summary()
    check(summary)
    if count <= 0:
        raise Failure(f"the service did not decide anything\n{service.tail()}")
    return {"per_s": count / took, "service_us": used / count, "redis_us": redis_used / count} | {
        name: summary[name] for name in ("p50_us", "p99_us")
    }


def without_limits(stack, service, seconds):
    """Decisions about scopes that no limit binds, and what the store was asked meanwhile but by this script."""
    asked = "evalsha", "eval", "get", "set", "incrby", "zcount", "zadd"

    def commands():
        told = stack.redis_cli("INFO", "commandstats")
        return sum(int(calls) for name in asked for calls in re.findall(rf"cmdstat_{name}:calls=(\d+)", told))

    before = commands()
    with stack.load(service.port, decide_template(stack, ()), seconds=seconds, connections=CONNECTIONS) as load:
        summary = load.summary(ends_by_itself=True)
    check(summary)
    # The service's own probe of the store is a script too, twice a second at most.
    return {"decisions": summary["requests"], "store_commands": commands() - before, "seconds": seconds}


def decisions(stack):
    """Scripts that Redis has run: one for each decision."""
    found = re.search(r"cmdstat_evalsha:calls=(\d+)", stack.redis_cli("INFO", "commandstats"))
    return int(found[1]) if found else 0


def check(summary):
    if summary["refused"] or summary["broken"]:
        raise Failure(f"the service refused {summary['refused']} and lost {summary['broken']} of {summary['requests']}")


def half_load(stack, service, template, per_s, seconds):
    """Many connections, each of which pauses: requests come independently of how fast answers do."""
    connections = 256
    pause_ms = connections / per_s * 1000
    with stack.load(service.port, template, seconds=seconds, connections=connections, pause_ms=pause_ms) as load:
        summary = load.summary(ends_by_itself=True)
    check(summary)
    return {
        "wanted_per_s": per_s,
        "per_s": summary["requests"] / summary["duration_us"] * 1_000_000,
        "p50_us": summary["p50_us"],
        "p99_us": summary["p99_us"],
    }


def measure(stack, service, rounds, calls):
    """`calls` of the script for each ceiling and shape, `rounds` of them."""
    script, template = Script(stack), decide_template(stack)
    kinds, taken = ["service", "plain", "pipelined"], {"service": [], "plain": [], "pipelined": []}
    words = script.call(3, 1)
    for number in range(rounds):
        for kind in random.sample(kinds, len(kinds)):
            if kind == "service":
                stack.redis_cli("FLUSHALL")
                taken[kind].append(full_load(stack, service, template, 1.0))
            else:
                taken[kind].append(script.run(words, calls, PIPELINE if kind == "pipelined" else 1))
        print(f"\r== service and script: round {number + 1} of {rounds}", end="", flush=True)
    full = taken["service"]
    per_s = statistics.median(one["per_s"] for one in full)
    ceilings = {kind: statistics.median(taken[kind]) for kind in ("plain", "pipelined")}
    half = half_load(stack, service, template, per_s / 2, 5 if rounds > 5 else 2)
    unlimited = without_limits(stack, service, 1)
    print(f"\r== the script's cost for {len(SHAPES)} shapes" + " " * 30, flush=True)
    costs = {shape: [] for shape in SHAPES}
    for _ in range(max(1, rounds // 4)):
        for shape in random.sample(SHAPES, len(SHAPES)):
            costs[shape].append(script.cost_us(script.call(*shape), calls // 4))
    return {
        "per_s": per_s,
        "per_s_spread": middle_half([one["per_s"] for one in full]),
        "service_us": lower_quartile([one["service_us"] for one in full]),
        "redis_us": lower_quartile([one["redis_us"] for one in full]),
        "ceiling_per_s": max(ceilings.values()),
        "ceilings_per_s": ceilings,
        "of_ceiling": per_s / max(ceilings.values()),
        "p50_us": statistics.median(one["p50_us"] for one in full),
        "p99_us": statistics.median(one["p99_us"] for one in full),
        "half_load": half,
        "without_limits": unlimited,
        "script_us": {f"{scopes}x{resources}": lower_quartile(costs[scopes, resources]) for scopes, resources in SHAPES},
    }


def show(figures):
    half, script, unlimited = figures["half_load"], figures["script_us"], figures["without_limits"]
    low, high = figures["per_s_spread"]
    print(
        f"""
The service, three contract scopes with one resource each, {CONNECTIONS} connections
  decisions/s             {figures["per_s"]:>9,.0f}   ({low:,.0f} to {high:,.0f})
  the script's ceiling    {figures["ceiling_per_s"]:>9,.0f}   plain {figures["ceilings_per_s"]["plain"]:,.0f}, {PIPELINE} pipelined {figures["ceilings_per_s"]["pipelined"]:,.0f}
  of the ceiling          {figures["of_ceiling"]:>9.2f}
  CPU per decision        {figures["service_us"]:>9.1f} us of the service, {figures["redis_us"]:.1f} us of Redis
  at full load            {figures["per_s"]:>9,.0f}   decisions/s: p50 {figures["p50_us"] / 1000:.2f} ms, p99 {figures["p99_us"] / 1000:.2f} ms
  at half load            {half["per_s"]:>9,.0f}   decisions/s: p50 {half["p50_us"] / 1000:.2f} ms, p99 {half["p99_us"] / 1000:.2f} ms
  without any limit       {unlimited["decisions"]:>9,.0f}   decisions in {unlimited["seconds"]} s: {unlimited["store_commands"]} commands to the store, its probes included

charge.lua, microseconds of one run by the server's clock
  scopes  requests  and tokens  and concurrency"""
    )
    for scopes in (1, 3, 8):
        print(f"  {scopes:>6}  {script[f'{scopes}x1']:>8.1f}  {script[f'{scopes}x2']:>10.1f}  {script[f'{scopes}x3']:>15.1f}")
