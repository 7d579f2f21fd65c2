"""``make demo-replica``: what it counts, how it ends, and the balancer that it stands behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from homeport_replica.demo import __main__ as demo
from homeport_replica.demo import runner
from homeport_replica.demo.balancer import Turns
from homeport_replica.demo.runner import APP, all_cases
from homeport_replica.demo.world import Checks, Trouble, expect
from support.servers import Server, free_port, run_command

COMMAND = [sys.executable, "-m", "homeport_replica.demo"]
CHECKS = sum(case.checks for case in all_cases())

# What the user's shell may hold must not get in.
SHELL = {**os.environ, "HOMEPORT_TENANT_MODE": "headers", "APP_BARE": "1", "HTTP_PROXY": "http://127.0.0.1:1"}


@pytest.mark.timeout(150)
def test_every_replica_serves_every_response(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [*COMMAND, "--json", str(file)]  # on SQLite; test_replica.py and its like are run on PostgreSQL too
    done = subprocess.run(command, env=SHELL, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    alone = figures["right"]["without"]
    assert done.stdout.splitlines()[-1] == f"homeport replica demo: PASS {CHECKS}/{CHECKS} (without: {alone}/{CHECKS})"
    # Alone a request is right where the balancer happens to find the process that made the response.
    assert 0 < alone < CHECKS / 3
    cancelled = figures["cases"]["cancel at another replica"]
    assert cancelled["with"]["tokens after a cancel"] < 30 < cancelled["without"]["tokens after a cancel"]


def test_one_check_that_does_not_hold_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(folder: Path, homeport: object, say: object) -> dict[str, Checks]:
        results = {case.name: Checks(right=case.checks) for case in all_cases()}
        if homeport is not None:
            results["resume of a stream"].right -= 1
        return results

    monkeypatch.setattr(runner, "half", half)
    said: list[str] = []
    assert not runner.run(echo=said.append)["passed"]
    assert said[-1] == f"homeport replica demo: FAIL {CHECKS - 1}/{CHECKS} (without: {CHECKS}/{CHECKS})"


def test_a_check_holds_if_nothing_goes_wrong_in_it() -> None:
    check = Checks()
    with check("right"):
        expect(True, "never said")
    for error in (Trouble("a"), openai.OpenAIError("b"), httpx.ReadError("c"), IndexError("d")):
        with check("wrong"):
            raise error
    with pytest.raises(ZeroDivisionError), check("a mistake of the demo's own"):
        raise ZeroDivisionError
    assert check.right == 1
    assert check.notes == ["wrong: Trouble: a", "wrong: OpenAIError: b", "wrong: ReadError: c", "wrong: IndexError: d"]


def test_a_process_that_does_not_start_is_shown(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("raise SystemExit('no such thing')")
    script = f"""
import pathlib, sys
from homeport_replica.demo import __main__ as demo, runner
runner.APP = pathlib.Path({str(tmp_path)!r})
sys.exit(demo.main([]))
"""
    done = subprocess.run([sys.executable, "-c", script], env=SHELL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such thing" in done.stderr
    assert done.stdout.splitlines()[-1] == "homeport replica demo: FAIL, a process did not start"


def test_what_keeps_it_from_starting_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--json", str(tmp_path / "none" / "figures")])
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.setattr(demo, "APP", tmp_path)  # installed without a checkout
    with pytest.raises(SystemExit, match="2"):
        demo.main([])
    assert "the app of a checkout" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory(prefix="hp-") as folder:
        env = {**SHELL, "TMPDIR": folder}
        process = subprocess.Popen(COMMAND, env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            while not re.match(r"without: .*\d/\d", process.stdout.readline()):
                assert process.poll() is None
            listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()
            process.stdout.close()
        children = [int(pid) for pid in listed.stdout.split()]
        assert len(children) == 4
        for pid in children:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert list(Path(folder).iterdir()) == []


# -- the balancer


def test_the_turns_are_strict() -> None:
    turns = Turns(["a", "b", "c"])
    taken = []
    for refused in ("", "", "", "", "b", "b", ""):
        backend = next(backend for backend in turns.next() if backend != refused)
        turns.taken(backend)
        taken.append(backend)
    assert taken == ["a", "b", "c", "a", "c", "a", "b"]


@pytest.fixture(scope="module")
def balanced() -> Iterator[tuple[Server, Server, httpx.Client]]:
    """Two bare apps and a third that never listens, and a client at the balancer before them."""
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(APP), "app:app", "--port", "{port}"]
        env = {"APP_BARE": "1", "APP_TOKEN_DELAY": "0.02"}
        a, b = (stack.enter_context(run_command(command, env={**env, "APP_NAME": name})) for name in ("a", "b"))
        backends = ",".join((a.url, f"http://127.0.0.1:{free_port()}", b.url))
        balancer = [sys.executable, "-m", "uvicorn", "homeport_replica.demo.balancer:create", "--factory"]
        server = run_command([*balancer, "--port", "{port}"], env={"BALANCER_BACKENDS": backends})
        url = stack.enter_context(server).url
        yield a, b, stack.enter_context(httpx.Client(base_url=url, trust_env=False))


def test_the_balancer_passes_over_what_does_not_listen(balanced: tuple[Server, Server, httpx.Client]) -> None:
    client = balanced[2]
    body = {"model": "m", "input": "alpha" * 50_000, "background": True}
    answers = [client.post("/v1/responses", json=body) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    first = answers[0].headers["x-app-replica"]
    other = "b" if first == "a" else "a"
    assert [answer.headers["x-app-replica"] for answer in answers] == [first, other] * 2
    seen = client.get(f"/v1/responses/{answers[2].json()['id']}/input_items", params={"limit": 1})
    assert seen.json()["data"][0]["content"][0]["text"] == body["input"]
    assert client.get("/v1/responses/resp_x").json()["error"]["message"].startswith("Response with id")


def test_the_balancer_streams_and_a_dead_backend_is_a_cut(balanced: tuple[Server, Server, httpx.Client]) -> None:
    a, b, client = balanced
    body = {"model": "m", "input": "alpha", "background": True, "stream": True}
    with client.stream("POST", "/v1/responses", json=body) as answer:
        pieces = answer.iter_text()
        started = time.monotonic()
        next(pieces)
        assert time.monotonic() - started < 0.5  # of the 0.8 s that the answer takes
        dead, alive = (a, b) if answer.headers["x-app-replica"] == "a" else (b, a)
        dead.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
    assert [client.get("/_process").json()["pid"] for _ in range(3)] == [alive.process.pid] * 3
    alive.kill()
    assert client.get("/_process").status_code == 503
