"""The whole gateway as it is deployed: client keys, homeport, proxy, upstreams; two replicas with one store."""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from homeport_gateway.targets import names_state
from support.cluster import run_homeport
from support.servers import Provider, Server, run_command, run_provider, run_server

TARGET = "homeport_gateway.asgi:create"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Provider, Provider]]:
    with run_provider("a", api_key="sk-a") as a, run_provider("b", api_key="sk-b") as b:
        yield a, b


@pytest.fixture(scope="module")
def env(pair: tuple[Provider, Provider], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("gateway")
    table = '[[upstreams]]\nname = "{0}"\nbase_url = "{1}/v1"\napi_key_env = "KEY_{0}"\nlabel = "{0}"\n'
    config = folder / "gateway.toml"
    config.write_text("".join(table.format(p, url) for p, url in zip("ab", pair, strict=True)))
    keys = folder / "keys"
    keys.write_text(hashlib.sha256(b"client").hexdigest() + "\n" + hashlib.sha256(b"other").hexdigest())
    return {
        "HOMEPORT_CONFIG_FILE": str(config),
        "HOMEPORT_DATABASE_URL": f"sqlite+aiosqlite:///{folder / 'state.db'}",
        "HOMEPORT_CLIENT_KEYS_FILE": str(keys),
        "KEY_a": "sk-a",
        "KEY_b": "sk-b",
    }


@pytest.fixture(scope="module")
def replicas(env: dict[str, str]) -> Iterator[tuple[Server, Server]]:
    with run_server(TARGET, factory=True, env=env) as one, run_server(TARGET, factory=True, env=env) as two:
        yield one, two


def sdk(server: Server, key: str = "client") -> OpenAI:
    return OpenAI(api_key=key, base_url=f"{server}/v1", max_retries=0)


def test_a_chain_over_both_replicas_stays_at_its_owner(replicas: tuple[Server, Server]) -> None:
    for first in ("one", "another", "third", "fourth"):
        answer = sdk(replicas[0]).responses.create(model="m", input=first)
        owner = answer.output_text[0]
        for turn in range(2, 6):
            client = sdk(replicas[turn % 2])
            if turn == 3:
                events = list(
                    client.responses.create(model="m", input="x", previous_response_id=answer.id, stream=True)
                )
                assert events[-1].type == "response.completed"
                answer = events[-1].response
            else:
                answer = client.responses.create(model="m", input="x", previous_response_id=answer.id)
            assert answer.output_text == f"{owner}: {turn} turns, {2 * turn - 1} items"


def test_another_client_cannot_go_on(replicas: tuple[Server, Server]) -> None:
    answer = sdk(replicas[0]).responses.create(model="m", input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk(replicas[1], "other").responses.create(model="m", input="x", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"


def test_who_has_no_key_learns_nothing(replicas: tuple[Server, Server]) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        sdk(replicas[0], "none").responses.create(model="m", input="x", previous_response_id="resp_1")
    assert caught.value.code == "invalid_api_key"


def test_other_apis_pass(replicas: tuple[Server, Server]) -> None:
    assert [m.id for m in sdk(replicas[0]).models.list()] == ["stand-in"]


def test_health_needs_no_key(replicas: tuple[Server, Server]) -> None:
    for path in ("live", "ready"):
        assert httpx.get(f"{replicas[0]}/healthz/{path}").status_code == 200


def test_a_restarted_replica_goes_on(replicas: tuple[Server, Server]) -> None:
    answer = sdk(replicas[0]).responses.create(model="m", input="x")
    replicas[0].restart()
    again = sdk(replicas[0]).responses.create(model="m", input="x", previous_response_id=answer.id)
    assert again.output_text == f"{answer.output_text[0]}: 2 turns, 3 items"


def test_the_command_serves_with_workers(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "homeport", "serve", "--port", "{port}", "--workers", "2"]
    with run_command(command, env=env) as server:
        assert sdk(server).responses.create(model="m", input="x").status == "completed"
        assert "date" not in httpx.get(f"{server}/healthz/live").headers
        assert server.stop() in (0, -15)
        assert "resp_" not in server.output()


def test_no_open_relay_is_started(env: dict[str, str], tmp_path: Path) -> None:
    closed = {k: v for k, v in env.items() if k != "HOMEPORT_CLIENT_KEYS_FILE"}
    command = [sys.executable, "-m", "homeport", "serve", "--port", "{port}"]
    with pytest.raises(RuntimeError, match="HOMEPORT_OPEN=true"), run_command(command, env=closed):
        pass


EARLY = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2"), (b"x-path", scope["raw_path"])]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})
"""


def test_a_body_that_is_not_there_does_not_take_the_next_request_for_itself(tmp_path) -> None:
    """Request smuggling: at an upgrade a server gives no body, whatever the header of the client's says."""
    (tmp_path / "early.py").write_text(EARLY)
    with (
        run_command(
            [sys.executable, "-m", "uvicorn", "early:app", "--port", "{port}", "--app-dir", str(tmp_path)]
        ) as upstream,
        run_homeport({"a": upstream}, "memory://") as gateway,
    ):

        def raw(*lines: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
                client.sendall(b"\r\n".join((*lines, b"authorization: Bearer k", b"host: x", b"", b"")))
                client.settimeout(3)
                got = b""
                while b"\r\n\r\n" not in got and (piece := client.recv(65536)):
                    got += piece
            return got

        line = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:{upstream.port}\r\nx-pad: ".encode()
        length = b"content-length: %d" % len(line)
        for path in (b"/v1/embeddings", b"/v1/models", b"/v1/conversations", b"/v1/responses"):
            for method in (b"POST", b"GET", b"OPTIONS"):
                raw(b"%b %b HTTP/1.1" % (method, path), b"connection: Upgrade", b"upgrade: h2c", length)
                answer = raw(
                    b"POST /v1/embeddings HTTP/1.1",
                    b"x-pad: GET /v1/responses/resp_foreign HTTP/1.1",
                    b"content-length: 0",
                )
                assert b"x-path: /v1/embeddings" in answer
                assert b"resp_foreign" not in answer


@pytest.mark.parametrize(
    "path",
    [b"/v1\\responses\\x", b"/v1/%5cresponses/x", b"/v1/responses%20/x", b"/v1/responses./x", b"/v1/%09responses"],
)
def test_no_spelling_of_a_stateful_path_passes_ungated(path) -> None:
    assert names_state(path)
    assert not names_state(b"/v1/my-responses/x")
