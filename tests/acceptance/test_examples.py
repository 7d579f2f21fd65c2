"""The examples do what their READMEs say."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import client
from support.servers import Server, run_command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def upstreams() -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                run_command([sys.executable, str(EXAMPLES / "upstreams/run.py"), "--name", name, "--port", "{port}"])
            )
            for name in ("a", "b")
        }


def chain(sdk, *others) -> str:
    answer = sdk.responses.create(model="m", input="one")
    for number, text in enumerate(("two", "three", "four")):
        replica = (sdk, *others)[number % (1 + len(others))]
        answer = replica.responses.create(model="m", input=text, previous_response_id=answer.id)
    return answer.output_text


def test_the_starlette_app(upstreams: dict[str, Server], tmp_path: Path) -> None:
    env = {
        "UPSTREAM_A": upstreams["a"].url,
        "UPSTREAM_B": upstreams["b"].url,
        "HOMEPORT_TENANT_MODE": "single",
    }
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        str(EXAMPLES / "starlette_app"),
        "app:app",
        "--port",
        "{port}",
    ]
    with run_command(command, env=env, cwd=str(tmp_path)) as server:
        for _ in range(4):
            assert ": 4 turns" in chain(client(server))
        conversation = client(server).conversations.create()
        for _ in range(4):
            client(server).responses.create(model="m", input="x", conversation=conversation.id)
        with client(server).responses.stream(model="m", input="x", conversation=conversation.id) as events:
            for _ in events:
                pass
            assert ": 5 turns" in events.get_final_response().output_text


def test_the_gateway(upstreams: dict[str, Server], tmp_path: Path) -> None:
    """As its README has it, on other ports: the file is taken as it is, but for the URLs."""
    text = (EXAMPLES / "gateway/gateway.toml").read_text()
    for port, name in (("8801", "a"), ("8802", "b")):
        assert f"http://127.0.0.1:{port}" in text
        text = text.replace(f"http://127.0.0.1:{port}", upstreams[name].url)
    config = tmp_path / "gateway.toml"
    config.write_text(text)
    env = {"HOMEPORT_CONFIG_FILE": str(config)}
    command = [sys.executable, "-m", "homeport", "serve", "--port", "{port}"]
    assert not [name for name in os.environ if name.startswith("HOMEPORT_")]
    with (
        run_command(command, env=env, cwd=str(tmp_path)) as one,
        run_command(command, env=env, cwd=str(tmp_path)) as two,
    ):
        for _ in range(4):
            assert ": 4 turns" in chain(client(one), client(two))
