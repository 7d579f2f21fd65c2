"""``homeport check-request``, as people run it: what it says of a request, what it never says, and how it ends."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homeport import Settings
from homeport.commands.check_request import examine, parse

ROOT = Path(__file__).resolve().parents[2]
SECRET = "correct horse battery"
BODY = b'{"model":"m","previous_response_id":"resp_victim","store":false,"input":[{"type":"message","id":"msg_1"}]}'
KEY = b"authorization: Bearer sk-secret\r\n"


def request(line: str, *headers: bytes, body: bytes = b"", newline: bytes = b"\r\n", length: bool = True) -> bytes:
    fields = [h.strip() for h in headers] + ([b"content-length: %d" % len(body)] if length and body else [])
    return newline.join([line.encode(), *fields, b"", body])


def run(*arguments: str, data: bytes = b"", **settings: str) -> subprocess.CompletedProcess[bytes]:
    """The real command. Its store must not be touched: there is none at that address."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOMEPORT_")}
    settings = {"database_url": "postgresql+asyncpg://u@127.0.0.1:1/none", **settings}
    env = {**kept, **{f"HOMEPORT_{name.upper()}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "homeport", "check-request", *arguments]
    return subprocess.run(command, input=data, env=env, capture_output=True, timeout=30, check=False)


def seen(data: bytes, *, peer: str = "127.0.0.1", show_ids: bool = False, **settings: Any) -> dict[str, Any]:
    """What the command would print as JSON, without a process for each case."""
    report = examine(parse(data), Settings(**settings), peer=peer, show_ids=show_ids)
    assert report.refused is (report.seen["decision"]["verdict"] == "refused")
    assert list(report.lines())
    shown = json.dumps(report.seen) + "".join(report.lines())
    assert "sk-secret" not in shown
    assert "acme" not in shown
    assert show_ids or "victim" not in shown
    return report.seen


# -- the command


def test_the_example_of_the_readme() -> None:
    _, example = (ROOT / "README.md").read_text().split("$ homeport check-request - <<'EOF'\n")
    sent, printed = example.split("\nEOF\n")
    done = run("-", data=sent.encode())
    assert done.stdout.decode() == printed.split("```")[0]
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_request_in_a_file_as_json(tmp_path: Path) -> None:
    file = tmp_path / "request"
    file.write_bytes(request("POST /v1/responses HTTP/1.1", KEY, b"content-encoding: br", body=BODY))
    done = run(str(file), "--json", "--show-ids", "--peer", "::1")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, b"")
    assert (told["decision"]["outcome"], told["decision"]["status"]) == ("invalid_json", 400)
    assert (told["operation"], told["gated"], told["selectors"]) == ("create", True, [])
    assert list(told) == ["operation", "gated", "tenant", "selectors", "body", "notes", "decision"]
    assert list(told["decision"]) == ["verdict", "text", "outcome", "status", "message"]


@pytest.mark.parametrize(
    ("arguments", "data", "settings"),
    [
        (["-"], b"hello", {}),
        (["/no/such/file"], b"", {}),
        (["-"], b"GET / HTTP/1.1\n\n", {"tenant_mode": "nonsense"}),
    ],
)
def test_wrong_use_ends_with_2_and_one_line(arguments: list[str], data: bytes, settings: dict[str, str]) -> None:
    done = run(*arguments, data=data, **settings)
    assert (done.returncode, done.stdout) == (2, b"")
    [line] = done.stderr.splitlines()
    assert line.startswith(b"homeport: ")


@pytest.mark.parametrize("length", [b"5x", b"-1", b"1" * 5000])
def test_a_length_that_no_body_has_is_told(length: bytes) -> None:
    with pytest.raises(ValueError, match="content-length is no number of bytes"):
        parse(request("POST /v1/responses HTTP/1.1", b"content-length: " + length))


# -- what it says


@pytest.mark.parametrize("newline", [b"\r\n", b"\n"])
@pytest.mark.parametrize("framing", ["length", "chunked", "none", "gzip"])
def test_a_follow_up_in_any_framing(framing: str, newline: bytes) -> None:
    body, extra = BODY, [KEY]
    if framing == "gzip":
        body, extra = gzip.compress(BODY), [KEY, b"Content-Encoding: gzip"]
    if framing == "chunked":
        body = newline.join([b"10;x=y", BODY[:16], b"%X" % len(BODY[16:]), BODY[16:], b"0", b"", b""])
        extra = [KEY, b"transfer-encoding: chunked"]
    length = framing in ("length", "gzip")
    told = seen(request("POST /v1/responses HTTP/1.1", *extra, body=body, newline=newline, length=length))
    assert told["decision"]["verdict"] == "follow-up"
    [selector] = told["selectors"]
    assert selector == {
        "kind": "response",
        "in": "body",
        "hard": True,
        "if_unknown": "is refused with 400 previous_response_not_found",
    }
    assert told["body"] == {"store": False, "stream": False, "background": False, "model": "m"}
    assert told["tenant"] == {"found": True, "source": "credential in authorization (bearer)"}
    assert len(told["notes"]) == (framing == "none")


def test_ids_only_if_asked_for() -> None:
    data = request("GET /v1/responses/resp_victim HTTP/1.1", KEY)
    [selector] = seen(data, show_ids=True)["selectors"]
    assert (selector["id"], selector["in"]) == ("resp_victim", "path")
    report = examine(parse(data), Settings(), peer="127.0.0.1", show_ids=True)
    assert "selector    response 'resp_victim' in the path, hard; unknown it is refused with 404" in report.lines()


@pytest.mark.parametrize(
    ("line", "body", "operation", "verdict"),
    [
        ("GET /v1/models HTTP/1.1", b"", None, "passes"),
        ("POST /v1/chat/completions HTTP/1.1", BODY, None, "passes"),
        ("POST /v1/responses?beta=true HTTP/1.1", b'{"model":"m"}', "create", "passes"),
        ("DELETE /openai/v1/conversations/victim HTTP/1.1", b"", "conversation_delete", "follow-up"),
        ("POST /v1/responses HTTP/1.1", b'{"a":1,"previous_response_id":"x","previous_response_id":"y"}', "create", "refused"),
        ("POST /v1/responses HTTP/1.1", b"{", "create", "refused"),
        ("POST /v1/responses/victim%2Fcancel HTTP/1.1", b"", None, "refused"),
        ("GET /v1/containers HTTP/1.1", b"", "collection", "refused"),
        ("HEAD /v1/responses/victim", b"", "response_other", "follow-up"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_request(line: str, body: bytes, operation: str | None, verdict: str) -> None:
    told = seen(request(line, KEY, body=body))
    assert (told["operation"], told["decision"]["verdict"]) == (operation, verdict)
    if verdict == "refused":
        assert told["decision"]["text"].startswith(f"would be refused: {told['decision']['outcome']} 4")


def test_a_websocket_is_inspected_message_by_message() -> None:
    told = seen(request("GET /v1/responses HTTP/1.1", KEY, b"upgrade: websocket", b"connection: upgrade"))
    assert told["decision"] == {
        "verdict": "passes",
        "text": "a WebSocket: each of its messages is inspected when it comes",
    }


@pytest.mark.parametrize("settings", [{"tenant_mode": "host"}, {"litellm_tenant": "team"}])
def test_an_integration_may_judge_more_than_is_told(settings: dict[str, Any]) -> None:
    [note] = seen(request("GET /v1/models HTTP/1.1"), **settings)["notes"]
    assert "integration" in note
    assert seen(request("GET /v1/models HTTP/1.1"))["notes"] == []


TENANTS: dict[str, Any] = {"tenant_mode": "headers", "tenant_headers": "x-org", "secrets": SECRET}


@pytest.mark.parametrize(
    ("peer", "headers", "settings", "found", "source"),
    [
        ("10.1.2.3", [b"x-org: acme"], {**TENANTS, "trusted_proxies": "10.0.0.0/8"}, True, "headers x-org, from this peer"),
        ("11.1.2.3", [b"x-org: acme"], {**TENANTS, "trusted_proxies": "10.0.0.0/8"}, False, "tenant_untrusted"),
        ("unix", [b"x-org: acme"], {**TENANTS, "trusted_proxies": "unix"}, True, "from this peer"),
        ("10.1.2.3", [b"x-org: acme", b"X_Org: acme"], {**TENANTS, "trusted_proxies": "10.0.0.0/8"}, False, "tenant_ambiguous"),
        ("127.0.0.1", [], {}, False, "no credential was sent (tenant_missing)"),
        ("127.0.0.1", [b"api-key: sk-secret", b"openai-project: p"], {}, True, "credential in api-key, openai-project"),
        ("127.0.0.1", [KEY, b"api-key: other"], {}, False, "tenant_ambiguous"),
        ("127.0.0.1", [], {"tenant_mode": "single"}, True, "one tenant only"),
        ("127.0.0.1", [], {"tenant_mode": "host"}, None, "the application tells"),
    ],
)  # fmt: skip
def test_where_the_tenant_comes_from(
    peer: str, headers: list[bytes], settings: dict[str, Any], found: bool | None, source: str
) -> None:
    told = seen(request("POST /v1/responses HTTP/1.1", *headers, body=b'{"model":"m"}'), peer=peer, **settings)
    assert told["tenant"]["found"] is found
    assert source in told["tenant"]["source"]
    assert told["decision"]["verdict"] == ("refused" if found is False else "passes")


def test_what_the_settings_let_pass() -> None:
    opened = {"tenant_mode": "single", "unknown_item": "forward", "single_upstream_miss": "forward"}
    body = b'{"previous_response_id":"x","input":[{"id":"y"}]}'
    told = seen(request("POST /v1/responses HTTP/1.1", body=body), **opened)
    assert [s["if_unknown"] for s in told["selectors"]] == [
        "passes with one upstream, else is refused with 400 previous_response_not_found",
        "passes",
    ]
    assert told["decision"]["verdict"] == "passes"
    told = seen(request("POST /v1/responses HTTP/1.1", body=body), **opened, upstreams="a=http://a,b=http://b")
    assert told["decision"]["verdict"] == "follow-up"
    told = seen(request("POST /v1/responses HTTP/1.1", KEY, body=b"{"), mode="observe")
    assert told["decision"]["verdict"] == "refused"
    assert "observe" in told["notes"][0]
