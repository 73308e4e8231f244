"""The processes behind scripts/demo: a counting upstream, the decision service, and one Envoy per set of rules.

Every one of them is started from the files of examples/envoy/, in which only ports, the module's path and the rules are
replaced, on free ports, and is waited for rather than slept for. What the scenarios are is left to scripts/demo.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "envoy"
# What Envoy says at "info" is mostly about itself; the filter's lines come through its component "wasm".
ENVOY_LOG = ["--log-level", "warning", "--component-log-level", "wasm:info"]
# These beat the configuration file (the service's documentation), so a shell that has them would change the demo.
OVERRIDES = {
    "PORTCULLIS_PROFILE", "PORTCULLIS_ALLOW_PASSTHROUGH", "IBEX_MODEL_POLICY_ALLOW_PASSTHROUGH", "REDIS_URL", "POSTGRES_DSN",
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
}  # fmt: skip
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
START_DEADLINE_S = 30
STOP_DEADLINE_S = 10


class Failure(Exception):
    """The demo cannot go on; the text says why, and for a child process where its log is."""


def free_ports(count):
    """Ports that nothing listens on. All are held until the last is found, so that no two are the same."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def replace_once(text, old, new, name):
    """A replacement that finds nothing would silently run something else than what it seems to."""
    if text.count(old) != 1:
        raise Failure(f"{name} should hold {old!r} once, but holds it {text.count(old)} times")
    return text.replace(old, new)


def get(url):
    """The status and body of an answer, whatever the status; None while there is no answer."""
    # No proxy of the environment: these are processes on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError:
        return None


class Child:
    """A child process with a log file, in a process group of its own: ctrl-C is for the demo, which ends its children."""

    def __init__(self, name, command, log):
        self.name, self.log = name, log
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )

    def await_ready(self, url):
        deadline = time.monotonic() + START_DEADLINE_S
        answer = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended at once with exit code {self.process.returncode}\n{self.tail()}")
            answer = get(url)
            if answer and answer[0] == 200:
                return
            time.sleep(0.05)
        said = f"last answer: {answer[0]}" if answer else "no answer"
        raise Failure(f"{self.name} was not ready within {START_DEADLINE_S} s ({url}, {said})\n{self.tail()}")

    def stop(self):
        """Ends it in its own way; returns whether it kept to the deadline."""
        if self.process.poll() is not None:
            return True
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE_S)
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self, lines=12):
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"the last lines of {self.log}:", *(f"    {line[:400]}" for line in text)])


def end_all(children):
    """Asks all children to end, waits for the newest first, and kills what does not."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + 5
    for child in reversed(children):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, deadline - time.monotonic()))
        child.kill()
    children.clear()


class Stack:
    """All the processes. `rules` maps a name to what stands in for "contract-limits", whether the edge strips, and keys of
    the filter's configuration besides."""

    def __init__(self, work, tools, rules):
        self.work, self.tools, self.rules = work, tools, rules
        self.children, self.envoys = [], {}
        ports = iter(free_ports(2 + 2 * len(rules)))
        self.upstream_port, self.service_port = next(ports), next(ports)
        self.ports = {name: (next(ports), next(ports)) for name in rules}

    def start(self):
        upstream = self.child(
            "upstream", [sys.executable, str(EXAMPLE / "upstream.py"), "--port", str(self.upstream_port)]
        )
        self.start_service()
        for number, name in enumerate(self.rules):
            config = self.work / f"envoy-{name}.yaml"
            config.write_text(self.envoy_config(name))
            # A base id of its own for each, or they would take each other for a hot restart.
            command = [self.tools["envoy"], "-c", str(config), "--use-dynamic-base-id", "--concurrency", "2"]
            self.envoys[name] = self.child(f"envoy-{name}", [*command, *ENVOY_LOG])
        upstream.await_ready(f"http://127.0.0.1:{self.upstream_port}/-/hits")
        self.service.await_ready(f"http://127.0.0.1:{self.service_port}/live")
        for name, child in self.envoys.items():
            child.await_ready(f"http://127.0.0.1:{self.ports[name][1]}/ready")

    def start_service(self):
        text = (EXAMPLE / "service.json").read_text()
        config = self.work / "service.json"
        config.write_text(replace_once(text, "127.0.0.1:8181", f"127.0.0.1:{self.service_port}", "service.json"))
        self.service = self.child("service", [self.tools["service"], "serve", "--config", str(config)])

    def stop_service(self):
        if not self.service.stop():
            raise Failure(f"the service did not end within {STOP_DEADLINE_S} s of SIGTERM\n{self.service.tail()}")
        self.children.remove(self.service)

    def envoy_config(self, name):
        rules, edge, more = self.rules[name]
        listener, admin = self.ports[name]
        text = (EXAMPLE / "envoy.yaml").read_text()
        for old, new in [
            ("port_value: 9901}", f"port_value: {admin}}}"),
            ("port_value: 10000}", f"port_value: {listener}}}"),
            ("port_value: 8181}", f"port_value: {self.service_port}}}"),
            ("port_value: 9000}", f"port_value: {self.upstream_port}}}"),
            ("filename: target/wasm32-wasip1/filter/portcullis.wasm", f"filename: {json.dumps(self.tools['wasm'])}"),
            ('"rules": "contract-limits"', json.dumps({"rules": rules, **more})[1:-1]),
        ]:
            text = replace_once(text, old, new, "envoy.yaml")
        if edge:
            block = re.search(r"# --- edge ---\n(.*?)\n *# --- end of edge ---", text, re.DOTALL)
            if not block:
                raise Failure("envoy.yaml has no block between '--- edge ---' and '--- end of edge ---'")
            text = text.replace(block[1], re.sub(r"^( *)# ", r"\1", block[1], flags=re.MULTILINE))
        return text

    def child(self, name, command):
        child = Child(name, command, self.work / f"{name}.log")
        self.children.append(child)
        return child

    def hits(self):
        answer = get(f"http://127.0.0.1:{self.upstream_port}/-/hits")
        if not answer:
            raise Failure("the counting upstream does not answer")
        return json.loads(answer[1])["hits"]

    def settled(self):
        """How many holds the service has replaced by what was used."""
        answer = get(f"http://127.0.0.1:{self.service_port}/metrics")
        found = re.search(r"^portcullis_settled_total (\d+)$", answer[1] if answer else "", re.MULTILINE)
        if not found:
            raise Failure("the service shows no portcullis_settled_total")
        return int(found[1])

    def await_settled(self, count):
        deadline = time.monotonic() + STOP_DEADLINE_S
        while self.settled() < count:
            if time.monotonic() > deadline:
                raise Failure(f"{count} settlements did not come within {STOP_DEADLINE_S} s\n{self.service.tail()}")
            time.sleep(0.01)

    def ended(self):
        """The first child that ended by itself, if any."""
        return next((child for child in self.children if child.process.poll() is not None), None)

    def close(self):
        """Nothing may be left of a demo, however it ended."""
        end_all(self.children)
