"""Whose state it is, on real sockets (DESIGN.md section 4, CASES 2.2)."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from homeport import sign
from support.canaries import dump, files_of, found
from support.cluster import Cluster, run_homeport

SECRET = "a-secret-of-the-state-store"
SIGNING = "a-secret-of-the-gateway"


def post(server, body, path: str = "/v1/responses", **headers: str) -> httpx.Response:
    names = [(k.replace("_", "-"), v) for k, v in headers.items()]
    return httpx.post(f"{server}{path}", json=body, headers=names)


def test_b1_no_identity_is_no_shared_identity(cluster: Cluster) -> None:
    answer = post(cluster.replicas[0], {"model": "m", "input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "tenant_required")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["x-homeport-outcome"] == "tenant_missing"
    assert cluster.requests() == []


def test_b2_b3_the_scope_is_the_credential(cluster: Cluster) -> None:
    """Another credential, organization or project is another tenant; the same key in another header is not."""
    made = cluster.client(0, "sk-one").responses.create(model="m", input="x").id
    follow = {"model": "m", "input": "x", "previous_response_id": made}
    assert post(cluster.replicas[1], follow, authorization="Bearer sk-one").status_code == 200
    assert post(cluster.replicas[1], follow, api_key="sk-one").status_code == 200
    for headers in (
        {"authorization": "Bearer sk-two"},
        {"authorization": "Bearer sk-one", "openai_project": "p"},
        {"authorization": "Bearer sk-one", "openai_organization": "o"},
    ):
        foreign = post(cluster.replicas[1], follow, **headers)
        unknown = post(
            cluster.replicas[1], {**follow, "previous_response_id": "resp_" + "0" * (len(made) - 5)}, **headers
        )
        assert foreign.status_code == 400
        assert foreign.content == unknown.content.replace(b"resp_" + b"0" * (len(made) - 5), made.encode())
        skip = ("date",)
        assert [h for h in foreign.headers.raw if h[0].lower().decode() not in skip] == [
            h for h in unknown.headers.raw if h[0].lower().decode() not in skip
        ]
    two = post(cluster.replicas[0], follow, authorization="Bearer sk-one", api_key="sk-two")
    assert two.headers["x-homeport-outcome"] == "tenant_ambiguous"


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ([("x-tenant", "victim"), ("x-tenant", "mine")], "tenant_ambiguous"),
        ([("X-Tenant", "victim"), ("x-TENANT", "victim")], "tenant_ambiguous"),
        ([("x-tenant", "victim,mine")], "tenant_ambiguous"),
        ([("x-tenant", "")], "tenant_ambiguous"),
        ([], "tenant_missing"),
    ],
)
def test_b5_b7_ambiguous_identity_is_refused(providers, sqlite_url, headers, outcome) -> None:
    a, b = providers
    with run_homeport(
        {"a": a, "b": b}, sqlite_url, tenant_mode="headers", tenant_headers="x-tenant", secrets=SECRET, trusted_proxies="127.0.0.1"
    ) as server:  # fmt: skip
        a.clear()
        b.clear()
        answer = httpx.post(f"{server}/v1/responses", json={"model": "m"}, headers=headers)
        assert (answer.status_code, answer.headers["x-homeport-outcome"]) == (401, outcome)
        assert a.log() + b.log() == []


def test_b4_b6_forged_headers_are_refused_and_trusted_ones_stay_inside(providers, sqlite_url) -> None:
    a, b = providers
    settings = {"tenant_mode": "headers", "tenant_headers": "x-tenant,x-user", "secrets": SECRET}
    with run_homeport({"a": a, "b": b}, sqlite_url, trusted_proxies="10.0.0.0/8", **settings) as server:
        forged = post(server, {"model": "m"}, x_tenant="t", x_user="u")
        assert (forged.status_code, forged.headers["x-homeport-outcome"]) == (401, "tenant_untrusted")
        spoofed = post(server, {"model": "m"}, x_tenant="t", x_user="u", x_forwarded_for="10.0.0.1")
        assert spoofed.headers["x-homeport-outcome"] == "tenant_untrusted"
    with run_homeport({"a": a, "b": b}, sqlite_url, trusted_proxies="127.0.0.1", **settings) as server:
        a.clear()
        b.clear()
        made = post(server, {"model": "m", "input": "x"}, x_tenant="t", x_user="u").json()["id"]
        follow = {"model": "m", "input": "x", "previous_response_id": made}
        assert post(server, follow, x_tenant="t", x_user="u").status_code == 200
        assert post(server, follow, x_tenant="t", x_user="v").status_code == 400
        assert post(server, follow, x_tenant="tu", x_user="").headers["x-homeport-outcome"] == "tenant_ambiguous"
        seen = [name for e in a.log() + b.log() for name in e["headers"]]
        assert "x-tenant" not in seen
        assert "x-user" not in seen


def test_signed_headers_are_trusted_from_anywhere(providers, sqlite_url) -> None:
    a, b = providers
    with run_homeport(
        {"a": a, "b": b}, sqlite_url, tenant_mode="headers", tenant_headers="x-tenant", secrets=SECRET,
        tenant_signature_header="x-signature", tenant_signing_keys=f"k1:{SIGNING}",
    ) as server:  # fmt: skip

        def signed(age: float = 0, tenant: str = "t", target: str = "/v1/responses", secret: str = SIGNING) -> str:
            now = int(time.time() - age)
            return sign(
                secret.encode(),
                "k1",
                timestamp=now,
                method="POST",
                target=target.encode(),
                headers=[("x-tenant", tenant.encode())],
            )

        body = {"model": "m", "input": "x"}
        assert post(server, body, x_tenant="t", x_signature=signed()).status_code == 200
        for wrong in (
            signed(age=120),
            signed(tenant="u"),
            signed(target="/v1/responses?x"),
            signed(secret="x" * 20),
            "v1",
        ):
            answer = post(server, body, x_tenant="t", x_signature=wrong)
            assert (answer.status_code, answer.headers["x-homeport-outcome"]) == (401, "tenant_unsigned")
        assert post(server, body, x_tenant="t").headers["x-homeport-outcome"] == "tenant_unsigned"


def test_nothing_in_the_database_the_log_or_the_answers_tells_who_or_what(providers, tmp_path) -> None:
    """Standards: ids, tenants, credentials and content appear in no log and no column in clear."""
    a, b = providers
    url = f"sqlite+aiosqlite:///{tmp_path}/state.db"
    with run_homeport(
        {"a": a, "b": b}, url, tenant_mode="headers", tenant_headers="x-tenant", secrets=SECRET,
        trusted_proxies="127.0.0.1",
    ) as server:  # fmt: skip
        tenant, content = "tenant-in-clear", "content in clear"
        made = post(
            server, {"model": "m", "input": content}, x_tenant=tenant, authorization="Bearer sk-key-in-clear"
        ).json()
        conversation = post(server, {}, path="/v1/conversations", x_tenant=tenant).json()["id"]
        post(server, {"model": "m", "input": "x", "conversation": conversation}, x_tenant=tenant)
        post(server, {"model": "m", "input": "x", "previous_response_id": "resp_unknown_in_clear"}, x_tenant=tenant)
        post(server, {"model": "m", "input": "x", "previous_response_id": made["id"]}, x_tenant=tenant)
        httpx.delete(f"{server}/v1/responses/{made['id']}", headers={"x-tenant": tenant})
        server.stop()
        output = server.output()
    places = {"files": files_of(url), "log": output.encode()}
    dumped = asyncio.run(dump(url))
    secrets = [
        tenant,
        content,
        made["id"],
        made["output"][0]["id"],
        conversation,
        "unknown_in_clear",
        "sk-key-in-clear",
        SECRET,
    ]
    assert found(secrets, {**places, "columns": dumped.rest, "content": dumped.content}) == []
    assert dumped.rows


def test_replicas_with_other_secrets_do_not_start(providers, sqlite_url) -> None:
    """§4: the store holds a check value per namespace."""
    a, b = providers
    with run_homeport({"a": a, "b": b}, sqlite_url, secrets=SECRET):
        pass
    with (
        pytest.raises(RuntimeError, match="HOMEPORT_SECRETS"),
        run_homeport({"a": a, "b": b}, sqlite_url, secrets="x" * 32),
    ):
        pass
    with run_homeport({"a": a, "b": b}, sqlite_url, secrets=f"{'x' * 32},{SECRET}"):
        pass
