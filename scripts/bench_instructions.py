"""The third part of scripts/bench: how many instructions an Envoy takes for one request, counted by valgrind.

Unlike times, these hardly depend on what else the machine does: they come out the same within 1 % without leases, and within
some 5 % with them. They are of the process itself: what the kernel does for it
(sockets, about the same for all ways without a callout) is not in them, and neither is how long an instruction takes.

Under valgrind a second has far fewer requests than otherwise, so what Envoy and the filter do by the clock (timers, ticks)
would count for much. The same number of requests is sent at two paces, and what the longer time adds is taken off.
"""

import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
from bench_stack import ENVELOPE, Failure, envoy_config  # noqa: E402
from demo_stack import free_ports  # noqa: E402

# So many that all that runs often is compiled, and that fetching leases is in it as often as under load.
WARM_UP = 600
REQUESTS = 600
SAMPLES = 3
# Slower than most can be sent, and still more than one for each tick of the filter.
PACED_PER_S = 55


class Counted:
    """One Envoy under callgrind."""

    def __init__(self, stack, name, filters, service):
        self.port, admin = free_ports(2)
        config, self.out = stack.work / f"counted-{name}.json", stack.work / f"counted-{name}.out"
        service_port = service.port if service else stack.upstream_port
        config.write_text(json.dumps(envoy_config(filters, self.port, admin, stack.upstream_port, service_port)))
        tool = [stack.tools["valgrind"], "--tool=callgrind", f"--callgrind-out-file={self.out}", "--instr-atstart=no"]
        command = [*tool, "--smc-check=all-non-file", stack.tools["envoy"], "-c", str(config), "--use-dynamic-base-id"]
        self.child = stack.child(f"counted-{name}", [*command, "--concurrency", "1", "--log-level", "error"], is_gateway=True)
        self.child.await_ready(f"http://127.0.0.1:{admin}/ready")
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def requests(self, count, per_s=None):
        started = time.monotonic()
        headers = {f"x-admission-{name}": str(value).replace("@TENANT@", "0000001") for name, value in ENVELOPE.items()}
        for number in range(count):
            if per_s:
                time.sleep(max(0.0, started + number / per_s - time.monotonic()))
            self.connection.request("GET", "/v1/bench", headers=headers)
            answer = self.connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise Failure(f"{self.child.name}: a request was answered with {answer.status}\n{self.child.tail()}")

    def control(self, *arguments):
        command = ["callgrind_control", *arguments, str(self.child.process.pid)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        if done.returncode or "Error" in done.stderr:
            raise Failure(f"{' '.join(command)}: {(done.stdout + done.stderr).strip()[-400:]}")

    def count(self, work):
        """Instructions, and the seconds that passed, while `work` is done."""
        self.control("-z")
        started = time.monotonic()
        work()
        took = time.monotonic() - started
        self.control("-d")
        dumps = sorted(self.out.parent.glob(f"{self.out.name}.*"))
        totals = [int(total) for dump in dumps for total in re.findall(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)]
        for dump in dumps:
            dump.unlink()
        if not totals:
            raise Failure(f"callgrind has counted nothing\n{self.child.tail()}")
        return totals[0], took

    def per_request(self):
        self.requests(WARM_UP)
        self.control("-i", "on")
        self.requests(REQUESTS // 4)
        runs = [self.count(lambda: self.requests(REQUESTS)) for _ in range(SAMPLES)]
        pace = min(PACED_PER_S, min(REQUESTS / seconds for _, seconds in runs) / 2)
        slow, slow_s = self.count(lambda: self.requests(REQUESTS, pace))
        taken = []
        for fast, fast_s in runs:
            by_the_clock = (slow - fast) / (slow_s - fast_s)
            taken.append((fast - by_the_clock * fast_s) / REQUESTS)
        return statistics.median(taken)

    def close(self):
        self.connection.close()
        with contextlib.suppress(OSError):
            self.child.kill()


def measure(stack, ways):
    """`ways` are names, titles, filters and the service that is asked."""
    figures = {}
    for number, (name, title, filters, service) in enumerate(ways):
        print(f"\r== instructions: {number + 1} of {len(ways)} ", end="", flush=True)
        counted = Counted(stack, name, filters, service)
        try:
            figures[name] = {"title": title, "instructions": counted.per_request()}
        finally:
            counted.close()
    print()
    bare = figures["bare"]["instructions"]
    for one in figures.values():
        one["of_bare"] = one["instructions"] / bare
    return figures


def show(figures):
    print(f"\n{'Instructions of Envoy for one request, without the kernel':<58} {'':>9}  of bare")
    for one in figures.values():
        print(f"  {one['title']:<56} {one['instructions']:>9,.0f}  {one['of_bare']:>7.2f}")
