"""The processes behind scripts/bench: a fast upstream, the decision service on two stores, one Envoy per way to guard it,
and wrk.

Gateways that are not measured at the moment are stopped (SIGSTOP), so that their timers take nothing from the one that
is. Left out on purpose: what is measured, and what the figures come to (scripts/bench, bench_service.py).
"""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

sys.dont_write_bytecode = True
from demo_stack import Child, Failure, end_all, free_ports, get  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "wasm-tests" / "bench"
TYPE = "type.googleapis.com/envoy.extensions"
# Far from being used up, and far from what a counter can hold.
LIMIT = 1_000_000_000
# What stands in each request. The bare gateway forwards it too: what is compared is what is done with it.
ENVELOPE = {
    "owner-id": "tenant-@TENANT@",
    "org-id": "org-1",
    "owner-rate-limit-requests": LIMIT,
    "org-rate-limit-requests": LIMIT,
}
# Under valgrind a request takes dozens of times as long as otherwise: no deadline must be what is measured.
PATIENT_S = 10
LEASES = {"max_requests": 256, "max_age_ms": 1000, "slots": 8192}


def need(program, package):
    """The path of a program that scripts/setup does not install: only this benchmark needs it."""
    path = shutil.which(program)
    if not path:
        raise Failure(f"{program} is not installed\n    as root: apt-get update && apt-get install {package}")
    return path


def cpu_us(pid):
    """What all threads of a process have used so far, in microseconds. The scheduler's own figure where it is kept, since
    that of /proc/PID/stat comes in steps of 10 ms."""
    total = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int(pathlib.Path(task.path, "schedstat").read_text().split()[0])
        if total:
            return total / 1000
        user, system = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) * 1_000_000 / os.sysconf("SC_CLK_TCK")
    except OSError as error:
        raise Failure(f"process {pid} has no CPU time to read (this benchmark needs Linux): {error}") from error


def memory_mb(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def lower_quartile(values):
    """Not the mean: what else runs on the machine only ever adds."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def middle_half(values):
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def wasm_filter(name, module, configuration=None):
    config = {
        "name": name,
        "failure_policy": "FAIL_RELOAD",
        "allow_on_headers_stop_iteration": True,
        "vm_config": {"vm_id": name, "runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": str(module)}}},
    }
    if configuration:
        text = {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": json.dumps(configuration)}
        config["configuration"] = text
    return {"name": name, "typed_config": {"@type": f"{TYPE}.filters.http.wasm.v3.Wasm", "config": config}}


def portcullis(module, *, everything, leases, patient=False):
    configuration = {
        "profile": "development",
        "rules": "contract-limits",
        "envelope": {"strip": everything},
        "decision": {"upstream": "portcullis"} | ({"timeout_ms": PATIENT_S * 1000} if patient else {}),
        "reply": {"limit_headers": "always" if everything else "denied"},
    }
    lease = LEASES | ({"max_age_ms": 60_000} if patient else {})
    return wasm_filter("portcullis", module, configuration | ({"leases": lease} if leases else {}))


def local_ratelimit():
    on = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    return {
        "name": "local_ratelimit",
        "typed_config": {
            "@type": f"{TYPE}.filters.http.local_ratelimit.v3.LocalRateLimit",
            "stat_prefix": "local",
            "token_bucket": {"max_tokens": LIMIT, "tokens_per_fill": LIMIT, "fill_interval": "1s"},
            "filter_enabled": on,
            "filter_enforced": on,
        },
    }


def ext_authz(patient=False):
    """Decides the same by the same service, without the filter. Like the filter here, it leaves the envelope where it is."""
    service = {"uri": "http://portcullis", "cluster": "portcullis", "timeout": f"{PATIENT_S}s" if patient else "0.25s"}
    return {
        "name": "ext_authz",
        "typed_config": {
            "@type": f"{TYPE}.filters.http.ext_authz.v3.ExtAuthz",
            "transport_api_version": "V3",
            "allowed_headers": {"patterns": [{"prefix": "x-admission-"}, {"exact": "x-request-id"}]},
            "http_service": {"server_uri": service, "path_prefix": "/v1/ext_authz"},
        },
    }


def envoy_config(filters, port, admin, upstream, service):
    def address(port):
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    def cluster(name, port):
        endpoint = {"endpoint": {"address": address(port)}}
        load = {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}
        return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": load}

    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}}]
    router = {"name": "router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}}
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "stream_idle_timeout": "300s",
        "normalize_path": True,
        "merge_slashes": True,
        "http_filters": [*filters, router],
        "route_config": {"virtual_hosts": [{"name": "upstream", "domains": ["*"], "routes": routes}]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [{"name": "ingress", "address": address(port), "filter_chains": [chain]}],
            "clusters": [cluster("upstream", upstream), cluster("portcullis", service)],
        },
    }


@dataclass
class Gateway:
    """One Envoy, stopped unless it is measured."""

    name: str
    child: Child
    port: int
    admin: int
    service: Child | None

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            self.child.process.send_signal(number)

    @contextlib.contextmanager
    def awake(self):
        self.send(signal.SIGCONT)
        try:
            self.child.await_ready(f"http://127.0.0.1:{self.admin}/ready")
            yield
        finally:
            self.send(signal.SIGSTOP)

    def counters(self):
        """Portcullis' own counters; none for another gateway."""
        answer = get(f"http://127.0.0.1:{self.admin}/stats?filter=portcullis_&format=json")
        if not answer or answer[0] != 200:
            raise Failure(f"{self.child.name} does not tell its counters\n{self.child.tail()}")
        stats = json.loads(answer[1])["stats"]
        return {stat["name"].rsplit("portcullis_", 1)[1]: stat["value"] for stat in stats if "value" in stat}


@dataclass
class Load:
    """wrk at work on one address."""

    command: list[str]
    process: subprocess.Popen = field(init=False)

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def summary(self, ends_by_itself=False):
        """Ends it, or waits for its end; what its script tells."""
        if not ends_by_itself:
            self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=120)
        for line in output.splitlines():
            if line.startswith("SUMMARY "):
                return json.loads(line.removeprefix("SUMMARY "))
        raise Failure(f"wrk said nothing that can be read:\n    {output.strip()[-600:]}")


class Stack:
    """All the processes."""

    def __init__(self, work, tools, connections, pin):
        self.work, self.tools, self.connections, self.pin = work, tools, connections, pin
        self.children, self.gateways = [], {}
        self.seed = 0
        self.counter = None

    def child(self, name, command, is_gateway=False):
        if self.pin:
            # A core of its own for the Envoy that is measured, the others for everything else.
            command = ["taskset", "-c", "0" if is_gateway else f"1-{os.cpu_count() - 1}", *command]
        child = Child(name, command, self.work / f"{name}.log")
        self.children.append(child)
        return child

    def start_upstream(self):
        [port] = free_ports(1)
        self.upstream_port = port
        self.upstream = self.child("upstream", [str(self.tools["upstream"]), str(port)])
        self.upstream.await_ready(f"http://127.0.0.1:{port}/-/hits")
        self.counter = http.client.HTTPConnection("127.0.0.1", port, timeout=5)

    def start_redis(self):
        [port] = free_ports(1)
        self.redis_port = port
        options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self.work]
        self.redis = self.child("redis", [self.tools["redis-server"], *map(str, options)])
        deadline = time.monotonic() + 10
        while self.redis_cli("PING").strip() != "PONG":
            if time.monotonic() > deadline or self.redis.process.poll() is not None:
                raise Failure(f"redis-server does not start\n{self.redis.tail()}")
            time.sleep(0.05)

    def redis_cli(self, *words):
        command = [self.tools["redis-cli"], "-p", str(self.redis_port), *map(str, words)]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60).stdout

    def start_service(self, name, url):
        [port] = free_ports(1)
        config = self.work / f"service-{name}.json"
        listen = f"127.0.0.1:{port}"
        checks = {"rules": "contract-limits", "envelope": {"strip": False}}
        service = {"profile": "development", "listen": listen, "limiter": {"url": url}, "ext_authz": checks}
        config.write_text(json.dumps(service))
        child = self.child(f"service-{name}", [str(self.tools["service"]), "serve", "--config", str(config)])
        # An embedded store is never "ready": it is not shared.
        child.await_ready(f"http://127.0.0.1:{port}/{'live' if url == 'memory:' else 'ready'}")
        child.port = port
        return child

    def start_gateway(self, name, filters, service=None):
        port, admin = free_ports(2)
        config = self.work / f"envoy-{name}.json"
        service_port = service.port if service else self.upstream_port
        config.write_text(json.dumps(envoy_config(filters, port, admin, self.upstream_port, service_port)))
        command = [self.tools["envoy"], "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1"]
        child = self.child(f"envoy-{name}", [*command, "--log-level", "warning"], is_gateway=True)
        gateway = self.gateways[name] = Gateway(name, child, port, admin, service)
        child.await_ready(f"http://127.0.0.1:{admin}/ready")
        gateway.send(signal.SIGSTOP)

    def hits(self):
        """How many requests the upstream has answered."""
        try:
            self.counter.request("GET", "/-/hits")
            return int(self.counter.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failure(f"the upstream does not tell its hits: {error!r}\n{self.upstream.tail()}") from error

    def load(self, port, template, tenants=1, seconds=60, connections=None, pause_ms=0):
        self.seed += 1
        connections = connections or self.connections
        script = [str(SOURCES / "load.lua"), f"http://127.0.0.1:{port}/", "--", str(template), tenants, self.seed, pause_ms]
        command = [self.tools["wrk"], "-t1", f"-c{connections}", f"-d{seconds}s", "-s", *map(str, script)]
        if self.pin:
            command = ["taskset", "-c", f"1-{os.cpu_count() - 1}", *command]
        return Load(command)

    def template(self, name, lines, body=""):
        """A request as it goes over the wire, with load.lua's places in it."""
        path = self.work / f"{name}.http"
        # Each place stands for a text of another length than its name.
        length = len(body.replace("@OP@", "0" * 32).replace("@TENANT@", "0" * 7))
        lines = [*lines, "Host: bench", *([f"Content-Length: {length}"] if body else [])]
        path.write_bytes("\r\n".join([*lines, "", body]).encode())
        return path

    def close(self):
        for gateway in self.gateways.values():
            gateway.send(signal.SIGCONT)
        end_all(self.children)
