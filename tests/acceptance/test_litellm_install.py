"""Installed by environment variables under every server that the stock ``litellm`` command runs, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from homeport import Settings, verify_store
from support.litellm import Proxy, run_litellm, write_config
from support.litellm_fleet import HOOK, Fleet, follow_up, passed, path_with, refused

pytest_plugins = ("acceptance.litellm_access_fixtures",)
# The first one waits for its workers on a machine that starts the others beside them.
pytestmark = pytest.mark.timeout(300)

SECRET = "the secret of the namespace"
ORIGIN = "https://app.example"


def eventually(check: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows(database: Path) -> int:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT count(*) FROM homeport_state").fetchone()[0])


@pytest.fixture(scope="module", autouse=True)
def proxies(all_proxies: Fleet) -> Iterator[None]:
    all_proxies.prepare("workers", "gunicorn", "granian", "asgi", "pair", "bare", "late")
    yield
    all_proxies.retire("workers", "gunicorn", "granian", "asgi", "late")


# -- one store under all workers


def descendants(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def workers_of(proxy: Proxy) -> list[int]:
    """The processes that serve, once both do."""
    eventually(lambda: proxy.server.output().count("Application startup complete") >= 2, 60)
    assert proxy.server.process is not None
    page = os.sysconf("SC_PAGE_SIZE")
    children = list(descendants(proxy.server.process.pid))
    return [c for c in children if int(Path(f"/proc/{c}/statm").read_text().split()[1]) * page > 200 << 20]


@contextlib.contextmanager
def without(worker: int) -> Iterator[None]:
    """The other one serves, for a moment."""
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@pytest.mark.parametrize("name", ["workers", "gunicorn"])
def test_every_worker_continues_what_another_one_made(fleet: Fleet, name: str) -> None:
    proxy = fleet[name]
    one, two = workers_of(proxy)
    for maker, other in ((one, two), (two, one)):
        with without(other):
            made = passed(proxy.post({"model": "gpt", "input": "1"}))
        with without(maker):
            answers = [passed(follow_up(proxy, made.json()["id"])) for _ in range(2)]
        assert {fleet.owner(a) for a in answers} == {fleet.owner(made)}
    refused(follow_up(proxy, made.json()["id"], "sk-u2"), 400, "missing")


def test_the_workers_of_granian_continue_each_others_turns(fleet: Fleet) -> None:
    """The kernel deals connections out to them: in so many turns, both have served."""
    proxy = fleet["granian"]
    for upstream in (fleet.a, fleet.b):
        last = fleet.on(upstream, proxy)
        for _ in range(8):
            answer = passed(follow_up(proxy, last))
            assert fleet.owner(answer) is upstream
            last = answer.json()["id"]
    refused(follow_up(proxy, last, "sk-u2"), 400, "missing")


def test_the_asgi_app_serves_and_the_hook_finds_it_there(fleet: Fleet) -> None:
    """``uvicorn homeport_litellm.asgi:app``, with the hook set as well."""
    proxy = fleet["asgi"]
    for upstream in (fleet.a, fleet.b):
        last = fleet.on(upstream, proxy)
        for _ in range(3):
            answer = passed(follow_up(proxy, last))
            assert fleet.owner(answer) is upstream
            last = answer.json()["id"]
    refused(follow_up(proxy, last, "sk-u2"), 400, "missing")


@pytest.mark.parametrize("name", ["workers", "asgi"])
def test_mounted_twice_it_is_there_once(fleet: Fleet, name: str) -> None:
    """The hook is listed twice, or stands beside the ASGI app: a turn is still one request and one record."""
    proxy = fleet[name]
    for each in (proxy, fleet["pair"]):  # so that both stores are there
        passed(each.post({"model": "gpt", "input": "0"}))
    fleet.clear()
    added = []
    for once in (name, "pair"):
        database = Path(fleet.database(once).partition("///")[2])
        before = rows(database)
        passed(fleet[once].post({"model": "gpt", "input": "1"}))
        added.append(rows(database) - before)
    assert added[0] == added[1] > 0
    assert len(fleet.seen("create")) == 2
    assert "Traceback" not in proxy.server.output()


# -- what was there before


def same_headers(one: httpx.Response, other: httpx.Response) -> None:
    varying = {"date", "content-length", "server", "x-litellm-call-id"}
    left, right = ({k: v for k, v in a.headers.items() if k not in varying} for a in (one, other))
    assert left == right


@pytest.mark.parametrize("path", ["/health/liveliness", "/health/liveness", "/health/readiness", "/"])
def test_health_routes_answer_as_without_homeport(fleet: Fleet, path: str) -> None:
    with_homeport, alone = (fleet[n].request("GET", path) for n in ("pair", "bare"))
    assert with_homeport.status_code == alone.status_code == 200
    same_headers(with_homeport, alone)
    if path == "/health/readiness":
        assert with_homeport.json().keys() == alone.json().keys()
        assert with_homeport.json()["status"] == alone.json()["status"]
    for name in ("workers", "gunicorn", "granian", "asgi"):
        assert fleet[name].request("GET", path).status_code == 200


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/resp_x", "/openai/v1/conversations"])
def test_preflight_answers_as_without_homeport(fleet: Fleet, path: str, method: str) -> None:
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization",
    }
    with_homeport, alone = (httpx.options(f"{fleet[n]}{path}", headers=headers, verify=False) for n in ("pair", "bare"))
    assert with_homeport.status_code == alone.status_code == 200
    assert with_homeport.content == alone.content
    same_headers(with_homeport, alone)
    assert fleet.seen() == []


SECURITY = ("x-frame-options", "content-security-policy", "x-content-type-options", "vary")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_unknown"),
        ("POST", "/openai_passthrough/v1/responses"),
        ("POST", "/v1/chat/completions"),
        ("DELETE", "/v1/responses/litellm_poll_x"),
    ],
)
@pytest.mark.parametrize("origin", [None, ORIGIN])
def test_rejections_carry_the_headers_for_browsers(fleet: Fleet, method: str, path: str, origin: str | None) -> None:
    body = {"model": "chat", "messages": [], "input": "x", "previous_response_id": "resp_unknown"}
    headers = {"origin": origin} if origin else {}
    rejected = fleet["pair"].request(method, path, json=body, headers=headers)
    assert "x-homeport-outcome" in rejected.headers
    alone = fleet["bare"].request("GET", "/health/liveliness", headers=headers)
    expected = (*SECURITY, *(name for name in alone.headers if name.startswith("access-control-")))
    assert ("access-control-allow-origin" in expected) is (origin is not None)
    assert [rejected.headers.get(name) for name in expected] == [alone.headers.get(name) for name in expected]
    assert fleet.seen() == []


def test_answers_carry_the_same_headers_as_without_homeport(fleet: Fleet) -> None:
    def names(proxy: Proxy) -> set[str]:
        return {name for name in passed(proxy.post({"model": "gpt", "input": "x"})).headers if "provider" not in name}

    assert names(fleet["pair"]) == names(fleet["bare"])


# -- how it ends


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Nobody else can commit."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def test_it_starts_without_its_database_recovers_and_stops_after_held_commits(fleet: Fleet) -> None:
    proxy = fleet["late"]
    assert proxy.request("GET", "/health/liveliness").status_code == 200
    assert proxy.request("GET", "/health/readiness").status_code == 200
    for answer in (proxy.post({"model": "gpt", "input": "1"}), follow_up(proxy, "resp_x")):
        error = refused(answer, 503, "state_store_unavailable")
        assert (error["code"], error["type"]) == ("state_store_unavailable", "server_error")
        assert answer.headers["retry-after"] == "1"
    assert fleet.seen() == []

    database = Path(fleet.database("late").partition("///")[2])
    database.parent.mkdir()
    deadline = time.monotonic() + 15
    while (answer := proxy.post({"model": "gpt", "input": "1"})).status_code != 200:
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.1)
    owner = fleet.owner(answer)
    assert fleet.owner(passed(follow_up(proxy, answer.json()["id"]))) is owner

    fleet.clear()
    before = rows(database)
    with ThreadPoolExecutor(1) as pool:
        with locked(database):
            waiting = pool.submit(proxy.post, {"model": "gpt", "input": "1"})
            eventually(lambda: [e for e in fleet.seen("create") if e["outcome"] == "done"])
            assert proxy.server.process is not None
            proxy.server.process.terminate()
            time.sleep(1)
            assert not waiting.done()
            assert proxy.server.process.poll() is None
        passed(waiting.result())
    assert proxy.server.process.wait(20) in (0, -signal.SIGTERM)
    assert rows(database) > before
    assert "Traceback" not in proxy.server.output().partition("Shutting down")[2]


def test_every_server_stops_at_sigterm(fleet: Fleet) -> None:
    """The last of this file that uses them."""
    processes = {name: fleet[name].server.process for name in ("workers", "gunicorn", "granian", "asgi")}
    for process in processes.values():
        assert process is not None
        process.terminate()
    codes = {name: process.wait(20) for name, process in processes.items() if process is not None}
    assert set(codes.values()) <= {0, -signal.SIGTERM}, codes


# -- starts that fail

CHANGED_CALLBACK = """
from litellm.integrations.custom_logger import CustomLogger

async def changed(self, model, healthy_deployments, messages, request_kwargs=None, parent_otel_span=None, more=None):
    return healthy_deployments

def install():
    CustomLogger.async_filter_deployments = changed
"""
OTHER_VERSION = """
import importlib.metadata

real = importlib.metadata.version
importlib.metadata.version = lambda name: "1.40.2" if name == "litellm" else real(name)
"""
# Of settings that do not do, one: what else is said of them is in unit/test_litellm_rules.py.
STARTS = {
    "no-database": ({}, ["HOMEPORT_DATABASE_URL"]),
    "other-secrets": (
        {"HOMEPORT_DATABASE_URL": "{database}", "HOMEPORT_SECRETS": f"not {SECRET}"},
        ["HOMEPORT_SECRETS"],
    ),
    "old-litellm": ({"HOMEPORT_DATABASE_URL": "memory://", "PYTHONPATH": "{old}"}, ["LiteLLM 1.40.2", "1.108"]),
    "changed-callback": (
        {
            "HOMEPORT_DATABASE_URL": "memory://",
            "PYTHONPATH": "{changed}",
            "LITELLM_WORKER_STARTUP_HOOKS": f"changed_callbacks:install,{HOOK}",
        },
        ["async_filter_deployments", "parameters"],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def failed_starts(
    all_proxies: Fleet, proxies: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[str]]:
    """How each of them ended. They take their time, in the background of the other tests."""
    folder = tmp_path_factory.mktemp("starts")
    places = {"database": f"sqlite+aiosqlite:///{folder}/state.db"}
    for name, module, text in (
        ("old", "sitecustomize", OTHER_VERSION),
        ("changed", "changed_callbacks", CHANGED_CALLBACK),
    ):
        (folder / name).mkdir()
        (folder / name / f"{module}.py").write_text(text)
        places[name] = path_with(folder / name)
    asyncio.run(verify_store(Settings(secrets=[SECRET], database_url=places["database"])))

    def start(name: str) -> str:
        env = {"LITELLM_WORKER_STARTUP_HOOKS": HOOK, **{k: v.format(**places) for k, v in STARTS[name][0].items()}}
        try:
            with run_litellm(write_config(folder / f"config-{name}", []), env=env):
                return "it started"
        except RuntimeError as error:
            return str(error)

    return {name: all_proxies.background(functools.partial(start, name)) for name in STARTS}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_cannot_keep_the_promise_fails_and_says_why(
    failed_starts: dict[str, Future[str]], name: str
) -> None:
    ended = failed_starts[name].result()
    head, _, output = ended.partition("\n")
    assert head.startswith("exited with "), ended
    assert head != "exited with 0:"
    for text in STARTS[name][1]:
        assert text in output
    assert SECRET not in output
