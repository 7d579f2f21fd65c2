"""`homeport register` and `homeport check`, as they are typed (README.md, "Commands")."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from homeport.cli import app
from support.cluster import client, run_homeport
from support.servers import free_port, run_provider


def homeport(
    *arguments: str, stdin: str = "", typed: bool = False, **settings: str
) -> subprocess.CompletedProcess[str]:
    """The command in this process, where all that it imports is there already; ``typed``, as a process of its own."""
    env = {f"HOMEPORT_{k.upper()}": v for k, v in settings.items()} | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    foreign = {k for k in os.environ if k.startswith("HOMEPORT_")} - env.keys()
    if typed:
        command = [sys.executable, "-m", "homeport", *arguments]
        env = {k: v for k, v in os.environ.items() if k not in foreign} | env
        return subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    done = CliRunner().invoke(app, arguments, input=stdin, env={**env, **dict.fromkeys(foreign)}, prog_name="homeport")
    assert isinstance(done.exception, SystemExit | None), done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def upstream():
    with run_provider("a") as a, run_provider("b") as b:
        yield a, b


def register(url: str, a, b, *arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
    keywords = {"upstreams": f"a={a},b={b}", "database_url": url, **keywords}
    return homeport("register", *arguments, **keywords)


def test_what_was_made_elsewhere_is_registered_and_continued(sqlite_url, upstream) -> None:
    a, b = upstream
    conversation = client(b).conversations.create().id
    made = client(b).responses.create(model="m", input="first").id
    with run_homeport({"a": a, "b": b}, sqlite_url) as replica:
        sdk = client(replica, "sk-mine")
        follow = {"model": "m", "input": "x", "conversation": conversation}
        assert httpx.post(f"{replica}/v1/responses", json=follow, headers={"api-key": "sk-mine"}).status_code == 404
        for kind, name in (("conversation", conversation), ("response", made)):
            for typed in (True, False):  # again is a success
                mine = ("--tenant", "credential=-")
                done = register(sqlite_url, a, b, kind, name, "--upstream", "b", *mine, stdin="sk-mine\n", typed=typed)
                assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert sdk.responses.create(model="m", input="x", conversation=conversation).output_text.startswith("b: 1")
        assert sdk.responses.create(model="m", input="x", previous_response_id=made).output_text.startswith("b: 2")
        taken = register(sqlite_url, a, b, "response", made, "--upstream", "b", "--tenant", "credential=sk-other")
        assert taken.returncode == 1
        assert "belongs to another" in taken.stderr
        assert made not in taken.stderr


def test_what_was_deleted_is_not_registered_again(sqlite_url, upstream) -> None:
    a, b = upstream
    with run_homeport({"a": a, "b": b}, sqlite_url) as replica:
        made = client(replica, "sk-mine").responses.create(model="m", input="first")
        client(replica, "sk-mine").responses.delete(made.id)
    owner = made.output_text[0]
    done = register(sqlite_url, a, b, "response", made.id, "--upstream", owner, "--tenant", "credential=sk-mine")
    assert (done.returncode, "was deleted" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "problem"),
    [
        (("item", "x", "--upstream", "a"), {}, "response, conversation, container"),
        (("response", "x", "--upstream", "c", "--tenant", "credential=k"), {}, "no upstream of this name"),
        (("response", "x", "--upstream", "a", "--tenant", "team=t"), {}, "credential="),
        (("response", "x", "--upstream", "a", "--tenant", "credential"), {}, "name=value"),
        (("response", "x", "--upstream", "a", "--tenant", "credential=a b"), {}, "no request could have"),
        (("response", "x", "--upstream", "a"), {"tenant_mode": "host"}, "HOMEPORT_TENANT_MODE=host"),
        (("response", "x", "--upstream", "a"), {"database_url": "memory://", "tenant_mode": "single"}, "memory://"),
        (("response", "x", "--upstream", "a"), {"upstreams": ""}, "HOMEPORT_UPSTREAMS"),
    ],
)
def test_what_does_not_do_is_said(sqlite_url, upstream, arguments, settings, problem) -> None:
    done = register(sqlite_url, *upstream, *arguments, **settings)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tenant_by_headers_and_a_single_one(sqlite_url, upstream) -> None:
    headers = {"tenant_mode": "headers", "tenant_headers": "x-org", "trusted_proxies": "127.0.0.1", "secrets": "s" * 16}
    done = register(sqlite_url, *upstream, "response", "r1", "--upstream", "a", "--tenant", "x-org=acme", **headers)
    assert done.returncode == 0, done.stderr
    single = {"tenant_mode": "single", "route": "other"}
    other = register(sqlite_url, *upstream, "response", "r1", "--upstream", "a", typed=True, **single)
    assert other.returncode == 2, "other secrets than the store was written with"


def test_a_store_that_is_down_is_another_exit_code(tmp_path: Path, upstream) -> None:
    url = f"postgresql+asyncpg://nobody@127.0.0.1:{free_port()}/none"
    done = register(url, *upstream, "response", "r1", "--upstream", "a", "--tenant", "credential=k", lookup_timeout="2")
    assert done.returncode == 3, done.stderr


@pytest.mark.filterwarnings("ignore")  # what LiteLLM's modules say while they are imported
def test_the_deployment_of_a_litellm_configuration(sqlite_url, upstream, tmp_path: Path) -> None:
    a, b = upstream
    params = {"model": "openai/x", "api_key": "k"}
    entries = [
        {
            "model_name": "gpt",
            "litellm_params": {**params, "api_base": f"{u}/v1"},
            "model_info": {"homeport_upstream": label},
        }
        for u, label in ((a, "one"), (b, "two"))
    ]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model_list": entries}))
    common = ("register", "conversation", "conv_1", "--litellm", str(config), "--tenant", "team=t")
    done = homeport(*common, "--upstream", "one", database_url=sqlite_url, typed=True)
    assert done.returncode == 0, done.stderr
    config.write_text(json.dumps({"model_list": [{**entries[0], "model_info": {}}], "credential_list": []}))
    bare = homeport(*common, "--upstream", "gpt", database_url=sqlite_url)
    assert (bare.returncode, "label" in bare.stderr) == (2, True), "its account may come from elsewhere"
    config.write_text(json.dumps({"model_list": entries}))
    for name, problem in (("gpt", "different accounts"), ("three", "no deployment")):
        wrong = homeport(*common, "--upstream", name, database_url=sqlite_url)
        assert wrong.returncode == 2
        assert problem in wrong.stderr
    assert homeport(*common, "--upstream", "two", database_url=sqlite_url).returncode == 1, "first owner wins"


def test_check_tells_the_gate_from_an_open_door(sqlite_url, upstream) -> None:
    a, b = upstream
    with run_homeport({"a": a, "b": b}, sqlite_url) as replica:
        os.environ["KEY_OF_TESTS"] = "sk-x"
        try:
            there = homeport("check", "--url", f"{replica}/v1", "--key-env", "KEY_OF_TESTS", typed=True)
        finally:
            del os.environ["KEY_OF_TESTS"]
        assert (there.returncode, "the gate is there" in there.stdout) == (0, True), there.stderr
        anonymous = homeport("check", "--url", str(replica))
        assert (anonymous.returncode, "tenant_missing" in anonymous.stderr) == (1, True)
    open_door = homeport("check", "--url", str(a))
    assert (open_door.returncode, "not seen" in open_door.stderr) == (1, True)
    nothing = homeport("check", "--url", f"http://127.0.0.1:{free_port()}")
    assert (nothing.returncode, "nothing answers" in nothing.stderr) == (3, True)
    for wrong in (("--url", "ftp://x"), ("--url", str(a), "--key-env", "NO_SUCH_VARIABLE")):
        assert homeport("check", *wrong).returncode == 2
