"""Settings: names, defaults, bounds, sources and what may not be combined (DESIGN.md sections 3, 4, 12, 13)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport.settings import Settings, UpstreamSettings, normalise_base_url, settings_reference
from homeport.tenants import TenantPolicy
from homeport.units import duration_text, parse_duration, parse_list, parse_size, size_text

SECRET = "correct horse battery"
HEADERS = {"tenant_mode": "headers", "tenant_headers": "x-tenant", "secrets": SECRET, "trusted_proxies": "10.0.0.0/8"}
SIGNED = {**HEADERS, "tenant_signature_header": "x-signature", "tenant_signing_keys": f"a:{SECRET}"}
UNSIGNED = {k: v for k, v in HEADERS.items() if k != "trusted_proxies"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in os.environ:
        if name.upper().startswith("HOMEPORT_") or name == "FORWARDED_ALLOW_IPS":
            monkeypatch.delenv(name)
    return monkeypatch


def problem(**values: object) -> str:
    with pytest.raises(ValueError) as caught:
        Settings(**values)
    return str(caught.value)


def test_defaults() -> None:
    s = Settings()
    assert (s.mode, s.namespace, s.route, s.tenant_mode) == ("enforce", "default", "default", "credential")
    assert s.database_url == "sqlite+aiosqlite:///./homeport.db"
    assert (s.ttl, s.pending_ttl, s.tombstone_ttl, s.encrypted_ttl) == (2592000, 86400, 2592000, 604800)
    assert (s.cache_size, s.cache_ttl, s.max_selectors, s.max_records_per_tenant) == (100_000, 30, 256, 0)
    assert s.max_request_bytes == s.max_response_bytes == s.max_event_bytes == 64 << 20
    assert (s.lookup_timeout, s.commit_timeout, s.hold_keepalive, s.linger) == (5, 10, 5, 5)
    assert s.path_prefixes == ("", "/v1", "/openai", "/openai/v1")
    assert s.unknown_encrypted == "forward"
    assert s.decompress_for_app is False
    assert {s.single_upstream_miss, s.unknown_conversation, s.unknown_item, s.unknown_container} == {"reject"}
    assert s.secret_bytes == ()
    assert s.signing_keys == {}


def test_constructor_goes_before_environment_before_file_before_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "homeport.toml"
    file.write_text('ttl = "3d"\nnamespace = "file"\nroute = "file"\npool_size = 7\ncache_ttl = 0.5\n')
    monkeypatch.setenv("HOMEPORT_CONFIG_FILE", str(file))
    monkeypatch.setenv("HOMEPORT_NAMESPACE", "environment")
    monkeypatch.setenv("HOMEPORT_ROUTE", "environment")
    s = Settings(route="constructor")
    assert (s.route, s.namespace, s.ttl, s.pool_size, s.cache_ttl) == ("constructor", "environment", 259200, 7, 0.5)
    assert Settings(config_file=None).namespace == "environment"
    assert Settings(config_file=None).ttl == 2592000


def test_the_environment_is_read_when_settings_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Settings(tenant_mode="single")
    monkeypatch.setenv("HOMEPORT_TTL", "5m")
    assert before.ttl == 2592000
    assert Settings().ttl == 300
    monkeypatch.setenv("HOMEPORT_TTL", "")
    assert Settings().ttl == 2592000, "an empty variable is unset"
    with pytest.raises(ValueError):
        before.ttl = 1


def test_every_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, default, _ in settings_reference():
        if default:
            monkeypatch.setenv(name, default)
    assert Settings() == Settings(config_file=None)
    for name, default, _ in settings_reference():
        if default:
            monkeypatch.delenv(name)
    assert Settings().model_dump() == Settings.model_construct().model_dump()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("HOMEPORT_TENNANT_MODE", "HOMEPORT_TENANT_MODE"), ("homeport_tttl", "HOMEPORT_TTL"), ("HOMEPORT_XQZJ", None)],
)
def test_an_unknown_variable_stops_the_start(name: str, nearest: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "single")
    message = problem()
    expected = f"; did you mean {nearest}?" if nearest else ""
    assert message == f"the setting {name.upper()} is not known{expected}"


def test_what_kubernetes_injects_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOMEPORT_SERVICE_HOST", "HOMEPORT_SERVICE_PORT_HTTP", "HOMEPORT_PORT", "HOMEPORT_PORT_80_TCP_ADDR"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    Settings()
    assert not [n for n, _, _ in settings_reference() if n.startswith(("HOMEPORT_SERVICE", "HOMEPORT_PORT"))]
    monkeypatch.setenv("HOMEPORT_PORTS", "1")
    assert "HOMEPORT_PORTS" in problem()


def test_unknown_names_elsewhere(tmp_path: Path) -> None:
    assert problem(tennant_mode="single") == "the setting tennant_mode is not known; did you mean tenant_mode?"
    file = tmp_path / "homeport.toml"
    file.write_text("max_selector = 3\n")
    assert "the setting max_selector is not known; did you mean max_selectors?" in problem(config_file=file)
    file.write_text('[[upstreams]]\nname = "a"\nbase_url = "http://a"\nmodle = []\n')
    assert "the upstream setting modle is not known; did you mean models?" in problem(config_file=file)


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "homeport.toml"
    assert "HOMEPORT_CONFIG_FILE" in problem(config_file=file)
    file.write_text(f'ttl = 1\nsecrets = {SECRET}"\n')
    message = problem(config_file=file)
    assert "line 2" in message
    assert "horse" not in message
    file.write_bytes(b'secrets = "\xff"')
    assert "UTF-8" in problem(config_file=str(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "off"),
        ("namespace", ""),
        ("route", "  "),
        ("database_url", ""),
        ("database_url", "homeport.db"),
        ("database_url", "postgresql://u@h/d"),
        ("database_url", "postgresql+asyncpg://u@h:abc/d"),
        ("database_url", "postgresql+asyncpg://u@h:65536/d"),
        ("database_url", "sqlite+aiosqlite://homeport.db"),
        ("database_url", "sqlite+aiosqlite:///:memory:"),
        ("listen_url", "memory://"),
        ("listen_url", "postgresql+asyncpg://u@h:abc/d"),
        ("pool_size", 0),
        ("ttl", 0),
        ("ttl", "1w"),
        ("pending_ttl", "-1"),
        ("cache_ttl", -1),
        ("cache_size", 0),
        ("max_selectors", 0),
        ("max_records_per_tenant", -1),
        ("max_request_bytes", "64MB"),
        ("max_event_bytes", 0),
        ("lookup_timeout", "inf"),
        ("commit_timeout", float("nan")),
        ("retryable_status", 500),
        ("path_prefixes", "v1"),
        ("path_prefixes", ","),
        ("path_prefixes", "/v1,/v1/"),
        ("path_prefixes", "/v1?x"),
        ("pin_header", "x pin"),
        ("pin_header", "x-ü"),
        ("pin_header", "Content-Length"),
        ("tenant_headers", "x-a,X-A"),
        ("trusted_proxies", "proxy.example"),
        ("trusted_proxies", "10.0.0.1/8"),
        ("trusted_proxies", "UNIX"),
        ("secrets", "fifteen bytes.."),
        ("secrets", f"{SECRET},{SECRET}"),
        ("tenant_signing_keys", SECRET),
        ("tenant_signing_keys", "a:short"),
        ("upstreams", "http://a"),
        ("upstreams", "http://a?b=c"),
        ("tenant_signing_keys", f"a b:{SECRET}"),
        ("tenant_signing_keys", f"a:{SECRET},a:{SECRET}2"),
        ("upstreams", "a"),
        ("upstreams", 5),
        ("upstreams", [5]),
        ("upstreams", "a=http://a,a=http://b"),
        ("upstreams", "a b=http://a"),
        ("upstreams", [{"name": "a", "base_url": "http://a", "weight": 0}]),
        ("upstreams", [{"name": "a", "base_url": "http://a", "weight": float("inf")}]),
        ("upstreams", [{"name": "a", "base_url": "http://a", "api_key_env": "sk-1"}]),
        ("upstreams", [{"name": "a"}]),
    ],
)
def test_a_wrong_value_names_the_setting(name: str, value: object) -> None:
    message = problem(**{name: value})
    assert f"the setting HOMEPORT_{name.upper()} is not usable" in message
    assert f"HOMEPORT_{name.upper()}:" not in message, "LiteLLM's redaction eats NAME:"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tenant_mode": "headers"}, "HOMEPORT_TENANT_HEADERS"),
        ({**HEADERS, "secrets": ()}, "HOMEPORT_SECRETS"),
        (UNSIGNED, "HOMEPORT_TRUSTED_PROXIES"),
        ({"tenant_headers": "x-tenant"}, "HOMEPORT_TENANT_MODE=headers"),
        ({**SIGNED, "tenant_mode": "single", "tenant_headers": ()}, "HOMEPORT_TENANT_MODE=headers"),
        ({**SIGNED, "tenant_signing_keys": ()}, "HOMEPORT_TENANT_SIGNING_KEYS"),
        ({**SIGNED, "tenant_signature_header": None}, "HOMEPORT_TENANT_SIGNATURE_HEADER"),
        ({**HEADERS, "tenant_signature_body": True}, "HOMEPORT_TENANT_SIGNATURE_HEADER"),
        ({**SIGNED, "tenant_signature_header": "X-Tenant"}, "same header"),
        ({**HEADERS, "pin_header": "x_tenant"}, "same header"),
        ({"pin_header": "x-upstream", "served_by_header": "X-Upstream"}, "same header"),
        ({"single_upstream_miss": "forward"}, "HOMEPORT_SHARED_ACCOUNT_OK"),
        ({"unknown_conversation": "new"}, "HOMEPORT_SHARED_ACCOUNT_OK"),
        ({"unknown_item": "forward", "tenant_mode": "host"}, "HOMEPORT_SHARED_ACCOUNT_OK"),
        ({**HEADERS, "unknown_container": "forward"}, "HOMEPORT_SHARED_ACCOUNT_OK"),
    ],
)
def test_what_may_not_be_combined(values: dict[str, object], named: str) -> None:
    message = problem(**values)
    assert named in message
    assert "horse" not in message


def test_what_may_be_combined() -> None:
    Settings(**HEADERS)
    Settings(**SIGNED, tenant_signature_body=True)
    Settings(**{k: v for k, v in SIGNED.items() if k != "trusted_proxies"})
    Settings(tenant_mode="single", unknown_item="forward", single_upstream_miss="forward")
    Settings(shared_account_ok="true", unknown_conversation="new", unknown_container="forward")
    Settings(unknown_encrypted="reject", pin_header="x-a", served_by_header="x-b")


@pytest.mark.parametrize("value", ["*", "127.0.0.1, *"])
def test_a_start_with_peers_that_anybody_can_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", value)
    assert "FORWARDED_ALLOW_IPS" in problem(**HEADERS)
    Settings(**SIGNED)
    Settings()
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1")
    Settings(**HEADERS)


def test_a_secret_is_never_shown() -> None:
    url = "postgresql+asyncpg://u:horse@db/x"
    s = Settings(**SIGNED, database_url=url, listen_url=url)
    for shown in (repr(s), str(s), repr(s.secrets), repr(s.model_dump(include={"secrets", "tenant_signing_keys"}))):
        assert "horse" not in shown
    assert s.secret_bytes == (SECRET.encode(),)
    assert s.signing_keys == {"a": SECRET.encode()}
    for values in (
        {"database_url": "postgresql+asyncpg://u:horse@127.0.0.1:abc/db"},
        {"database_url": "postgresql+asyncpg://u:x@127.0.0.1:horse/db"},
        {"database_url": "postgres://u:horse@127.0.0.1/db"},
        {"listen_url": "postgresql+asyncpg://u:x@127.0.0.1:horse/db"},
        {"secrets": {"horse": 1}},
        {"secrets": ["horse"]},
        {"tenant_signing_keys": "horse:"},
        {"secrets": 1},
    ):
        assert "horse" not in problem(**values)
    assert "horse" not in problem(upstreams=[{"name": "a", "base_url": "http://u:horse@a"}])
    assert "horse" not in problem(upstreams=[{"name": "a", "base_url": "http://a", "api_key_env": "sk-horse"}])


def test_a_secret_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"{SECRET}, with a comma\n\n  second {SECRET}  \r\n")
    monkeypatch.setenv("HOMEPORT_SECRETS_FILE", str(file))
    assert Settings().secret_bytes == (f"{SECRET}, with a comma".encode(), f"second {SECRET}".encode())
    assert Settings(secrets=SECRET).secret_bytes == (SECRET.encode(),), "the constructor goes before the environment"
    monkeypatch.setenv("HOMEPORT_SECRETS", SECRET)
    assert "exclude each other" in problem()
    monkeypatch.delenv("HOMEPORT_SECRETS")
    file.write_text("\n")
    assert "HOMEPORT_SECRETS_FILE is empty" in problem()
    file.unlink()
    assert "HOMEPORT_SECRETS_FILE cannot be read" in problem()


def test_other_settings_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text("memory://\n")
    assert Settings(database_url_file=file).database_url == "memory://"
    file.write_text(f"a:{SECRET}\nb:other {SECRET}\n")
    signed = {k: v for k, v in SIGNED.items() if k != "tenant_signing_keys"}
    assert set(Settings(**signed, tenant_signing_keys_file=file).signing_keys) == {"a", "b"}
    assert "more than one line" in problem(database_url_file=file)


def test_a_wrong_form_shows_the_right_one() -> None:
    assert "name=url" in problem(upstreams="http://a")
    assert "id:secret" in problem(tenant_signing_keys=SECRET)
    assert "postgresql+asyncpg://" in problem(database_url="postgres://h/d")


def test_lists_and_header_names() -> None:
    s = Settings(**{**HEADERS, "tenant_headers": " X-Org , x-User,", "trusted_proxies": "10.0.0.0/8, ::1,unix"})
    assert s.tenant_headers == ("x-org", "x-user")
    assert s.trusted_proxies == ("10.0.0.0/8", "::1", "unix")
    assert Settings(path_prefixes="/, /api/").path_prefixes == ("", "/api")
    assert Settings(path_prefixes=["", "/api"]).path_prefixes == ("", "/api")
    assert Settings(retryable_status="400").retryable_status == 400
    TenantPolicy(s)


def test_upstreams_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMEPORT_UPSTREAMS", "a=http://10.0.0.1:8000/v1, b=HTTPS://Api.Example:443/openai/v1/,")
    a, b = Settings().upstreams
    assert a == UpstreamSettings(name="a", base_url="http://10.0.0.1:8000")
    assert b == UpstreamSettings(name="b", base_url="https://api.example/openai")


def test_upstreams_in_tables(tmp_path: Path) -> None:
    file = tmp_path / "homeport.toml"
    file.write_text(
        """
        tenant_mode = "single"
        [[upstreams]]
        name = "a"
        base_url = "http://a:8000"
        models = ["m1", "m2"]
        weight = 2
        api_key_env = "A_KEY"
        label = "account 7"
        stateful = false
        shared = true
        paused = true
        """
    )
    assert Settings(config_file=file).upstreams == (
        UpstreamSettings("a", "http://a:8000", ("m1", "m2"), 2.0, "A_KEY", "account 7", False, True, True),
    )


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://Host.Example", "http://host.example"),
        ("HTTP://host:80/", "http://host"),
        ("https://host:443/v1", "https://host"),
        ("https://host:80/v1///", "https://host:80"),
        ("https://host/openai/v1/", "https://host/openai"),
        ("https://host/Openai/V1", "https://host/Openai/V1"),
        ("https://host/v10", "https://host/v10"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://[FE80::1]", "http://[fe80::1]"),
    ],
)
def test_base_urls_have_one_spelling(given: str, normal: str) -> None:
    assert normalise_base_url(given) == normal
    assert normalise_base_url(normal) == normal


@pytest.mark.parametrize(
    "url",
    ["", "host", "ftp://host", "http://", "http:///v1", "http://u:p@host", "http://h?x", "http://h#x", "http://h:x", "http://h/a b", "http://[h"],
)  # fmt: skip
def test_what_no_base_url_may_be(url: str) -> None:
    with pytest.raises(ValueError):
        normalise_base_url(url)


def test_the_reference_documents_every_setting() -> None:
    table = {name: (default, text) for name, default, text in settings_reference()}
    assert set(table) == {f"HOMEPORT_{name.upper()}" for name in Settings.model_fields}
    assert all(text.endswith(".") and "|" not in text for _, text in table.values())
    assert table["HOMEPORT_TTL"][0] == "30d"
    assert table["HOMEPORT_MAX_REQUEST_BYTES"][0] == "64MiB"
    assert table["HOMEPORT_PATH_PREFIXES"][0] == "/,/v1,/openai,/openai/v1"
    assert table["HOMEPORT_CACHE_SIZE"][0] == "100000"
    assert table["HOMEPORT_SHARED_ACCOUNT_OK"][0] == "false"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("30", 30), (" 0.5 ", 0.5), ("250ms", 0.25), ("2s", 2), ("5m", 300), ("1.5h", 5400), ("30 d", 2592000), (7, 7)],
)
def test_durations(given: object, seconds: float) -> None:
    assert parse_duration(given) == seconds


@pytest.mark.parametrize(
    "given",
    ["", "x", "5 minutes", "-1", "1e3", ".5", "5.", "٣", "1d2h", "inf", -1, float("inf"), float("nan"), True, None, []],
)
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(given)


@pytest.mark.parametrize(("given", "size"), [("0", 0), ("65536", 65536), ("1 KiB", 1024), ("2GiB", 2 << 30), (9, 9)])
def test_sizes(given: object, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", "64MB", "64mib", "1.5MiB", "-1", "٣", -1, 1.0, True, None])
def test_what_is_no_size(given: object) -> None:
    with pytest.raises(ValueError):
        parse_size(given)


@given(st.integers(0, 10**12))
def test_units_are_read_back(number: int) -> None:
    assert parse_size(size_text(number)) == number
    if number < 10**6 or number % 60 == 0:
        assert parse_duration(duration_text(number)) == number
    assert parse_duration(duration_text(number / 8 % 1000)) == pytest.approx(number / 8 % 1000, rel=1e-5)


def test_lists() -> None:
    assert parse_list("a, b ,,c,") == ["a", "b", "c"]
    assert parse_list(("a",)) == ("a",)
    assert parse_list(" , ") == []
