"""The commands as people run them: real processes, what they print, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from homeport import Settings, verify_store
from support.cluster import run_homeport
from support.servers import Provider, read_until_cut, run_command

SERVE = [sys.executable, "-m", "homeport", "serve"]
SECRET = "horse battery staple"


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOMEPORT_")}
    env = {**kept, **{f"HOMEPORT_{name.upper()}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "homeport", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


def refused(code: int, *arguments: str, **settings: str) -> str:
    """The one line with which a start is refused."""
    settings = {"upstreams": "a=http://127.0.0.1:1", "database_url": "memory://", **settings}
    done = run("serve", "--port", "0", *arguments, **settings)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("homeport: ")
    return line


# -- starts that are refused


def test_wrong_settings_end_with_2_and_one_line(tmp_path: Path) -> None:
    assert "HOMEPORT_UPSTREAMS" in refused(2, upstreams="")
    assert "name=url" in refused(2, upstreams="http://127.0.0.1:1")
    assert "HOMEPORT_CLIENT_KEYS_FILE cannot be read" in refused(2, client_keys_file=str(tmp_path / "none"))
    assert "HOMEPORT_CLIENT_KEYS_FILE cannot be read" in refused(2, client_keys_file=str(tmp_path))
    assert "HOMEPORT_TENANT_MODE=host" in refused(2, tenant_mode="host")
    assert "HOMEPORT_TENANT_MODE" in refused(2, tenant_mod="host")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://u:horse@127.0.0.1:abc/db",
        "postgresql+asyncpg://u:horse@127.0.0.1:1/db?sslmode=require",
        "postgresql+asyncpg://u:horse@127.0.0.1:1/db?prepared_statement_cache_size=horse",
        "postgres://u:horse@127.0.0.1/db",
        "horse",
    ],
)
def test_a_database_url_is_never_repeated(url: str) -> None:
    line = refused(2, database_url=url)
    assert "HOMEPORT_DATABASE_URL" in line
    assert "horse" not in line


def test_a_driver_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "asyncpg.py").write_text("raise ModuleNotFoundError('No module named asyncpg', name='asyncpg')")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOMEPORT_")}
    path = os.pathsep.join(filter(None, (str(tmp_path), kept.get("PYTHONPATH"))))
    settings = {"HOMEPORT_UPSTREAMS": "a=http://h", "HOMEPORT_DATABASE_URL": "postgresql+asyncpg://u@127.0.0.1:1/d"}
    env = {**kept, "PYTHONPATH": path, **settings}
    done = subprocess.run(SERVE, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "asyncpg" in line
    assert "pip install 'homeport[postgres]'" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_secrets_that_do_not_fit_the_store(workers: str, sqlite_url: str) -> None:
    asyncio.run(verify_store(Settings(secrets=[SECRET], database_url=sqlite_url)))
    line = refused(2, "--workers", workers, database_url=sqlite_url, secrets=f"another {SECRET}")
    assert "HOMEPORT_SECRETS" in line
    assert "horse" not in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_where_it_cannot_listen_it_ends_with_3(workers: str, tmp_path: Path, sqlite_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(3, "--workers", workers, "--port", str(port), database_url=sqlite_url)
        assert f"127.0.0.1:{port}" in line
    for host in ("192.0.2.1", "no.such.host.invalid"):
        assert host in refused(3, "--workers", workers, "--host", host, database_url=sqlite_url)
    missing = str(tmp_path / "none" / "socket")
    assert missing in refused(3, "--workers", workers, "--uds", missing, database_url=sqlite_url)


def test_the_file_of_the_demo_is_tried_before_its_work(tmp_path: Path) -> None:
    done = run("demo", "--json", str(tmp_path / "none" / "figures"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("homeport: cannot write ")


# -- a start without its store


def test_it_starts_without_its_store_and_recovers(tmp_path: Path, providers: tuple[Provider, Provider]) -> None:
    """Follow-ups and creates that would be recorded are refused meanwhile; the log has the reason and no path."""
    folder = tmp_path / "later"
    url = f"sqlite+aiosqlite:///{folder}/homeport.db"
    with run_homeport({"a": providers[0]}, url) as server:
        for _ in range(2):
            answer = httpx.post(
                f"{server}/v1/responses", json={"model": "m", "input": "1"}, headers={"api-key": "k"}, timeout=30
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_store_unavailable")
        assert httpx.get(f"{server}/healthz/ready").status_code == 503
        assert httpx.get(f"{server}/healthz/live").status_code == 200
        folder.mkdir()
        for _ in range(100):
            if httpx.get(f"{server}/healthz/ready", timeout=30).status_code == 200:
                break
        assert str(folder) not in server.output()
        assert "ERROR homeport.state: the state store failed" in server.output()


# -- what is logged


def handshake(port: int, target: str) -> bytes:
    head = f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    head += "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    got = b""
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(head.encode())
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65536):
                got += piece
    return got


@pytest.mark.parametrize("workers", ["1", "2"])
def test_no_id_reaches_the_log(workers: str, sqlite_url: str, providers: tuple[Provider, Provider]) -> None:
    a = providers[0]
    with run_homeport({"a": a}, sqlite_url, "--workers", workers) as server:
        for path in ("/v1/responses/resp_hidden?after=item_hidden", "/v1/realtime/resp_hidden"):
            answer = handshake(server.port, path)
            assert answer.startswith(b"HTTP/1.1 426 "), answer
            assert b"x-homeport-outcome: websocket_unsupported" in answer
        a.next_ids("resp_hidden")
        a.fault(match="create", reset_after_events=4)
        body = {"model": "m", "input": "item_hidden", "stream": True}
        got = read_until_cut("POST", f"{server}/v1/responses", json=body, headers={"api-key": "key_hidden"})
        assert b"resp_hidden" in got
        httpx.get(f"{server}/v1/responses/resp_hidden", headers={"api-key": "another"})
        server.stop()
        log = server.output()
    assert "hidden" not in log
    assert "Traceback" not in log
    assert "handshake" not in log
    assert log.count("WARNING homeport: an answer was cut short: ") == 1
    assert "INFO uvicorn: Uvicorn running on " in log


# -- how it ends


def test_sigterm_is_an_ordinary_end(sqlite_url: str) -> None:
    env = {"HOMEPORT_UPSTREAMS": "a=http://127.0.0.1:1", "HOMEPORT_DATABASE_URL": sqlite_url}
    for workers in ("1", "2"):
        with run_command([*SERVE, "--port", "{port}", "--workers", workers], env=env) as server:
            assert server.stop(30) in (0, -15)
            assert "Traceback" not in server.output()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            return
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_a_unix_socket_is_served_and_one_left_behind_replaced(tmp_path: Path, sqlite_url: str) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    env = {**os.environ, "HOMEPORT_UPSTREAMS": "a=http://127.0.0.1:1", "HOMEPORT_DATABASE_URL": sqlite_url}
    for workers in ("1", "2"):
        process = subprocess.Popen(
            [*SERVE, "--uds", str(path), "--workers", workers], env=env, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(path)
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
                assert client.get("http://x/healthz/ready", timeout=30).status_code == 200
        finally:
            process.terminate()
            process.wait(30)


# -- the demo


def test_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "homeport", "demo", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("homeport demo: PASS 200/200 on the owner (without: "), done.stdout
    figures = json.loads(file.read_text())
    assert (figures["passed"], figures["with"]["owner"], figures["errors"]) == (True, 200, [])
    assert figures["without"]["wrong"] > 0
    assert figures["without"]["error"] == 0
