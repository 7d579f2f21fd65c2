"""The settings: each one's name, default, bounds and documentation, in one place (DESIGN.md sections 3 to 13)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from homeport import settings_checks as checks
from homeport.decisions import MissPolicy
from homeport.settings_checks import UpstreamSettings, normalise_base_url
from homeport.settings_sources import SettingsSource, env_name, read_environment, read_toml, unknown_name
from homeport.units import duration_text, parse_duration, parse_list, parse_size, size_text

__all__ = ["Settings", "UpstreamSettings", "normalise_base_url", "settings_reference"]

_DAY = 86400.0
_MIB = 1 << 20

_Text = Annotated[str, AfterValidator(checks.text)]
_Seconds = Annotated[float, BeforeValidator(parse_duration)]
_SomeSeconds = Annotated[_Seconds, Field(gt=0)]
_Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
_Header = Annotated[str, AfterValidator(checks.header_name)]
_Headers = Annotated[tuple[_Header, ...], BeforeValidator(parse_list), AfterValidator(checks.unique)]
_Names = Annotated[tuple[str, ...], BeforeValidator(parse_list), AfterValidator(checks.unique)]
_Status = Annotated[Literal[400], BeforeValidator(lambda value: 400 if value == "400" else value)]
_Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(parse_list)]


class Settings(BaseSettings):
    """Everything that can be configured.

    Read once, when it is constructed: keywords (field names) go before ``HOMEPORT_*`` variables, those before the TOML
    file of ``HOMEPORT_CONFIG_FILE``. Durations are kept in seconds, sizes in bytes. Raises ``ValueError`` that names
    the setting and never repeats its value.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=False)

    config_file: Path | None = Field(None, description="A TOML file with settings, named in lower case without prefix.")
    mode: Literal["enforce", "observe"] = Field(
        "enforce", description="`observe` records and pins but refuses nothing, for a first roll-out."
    )
    namespace: _Text = Field("default", description="A name shared by equivalent replicas.")
    route: _Text = Field("default", description="The name of this mount; two mounts do not share keys.")
    path_prefixes: Annotated[tuple[str, ...], BeforeValidator(parse_list), AfterValidator(checks.path_prefixes)] = (
        Field(("", "/v1", "/openai", "/openai/v1"), description="Where the API is served; `/` stands for no prefix.")
    )

    database_url: Annotated[_Text, AfterValidator(checks.database_url)] = Field(
        "sqlite+aiosqlite:///./homeport.db",
        repr=False,
        description="The store: `memory://`, `sqlite+aiosqlite:///…` or `postgresql+asyncpg://…`.",
    )
    database_url_file: Path | None = Field(None, description="A file that holds HOMEPORT_DATABASE_URL.")
    listen_url: Annotated[_Text, AfterValidator(checks.listen_url)] | None = Field(
        None,
        repr=False,
        description="A direct connection for notifications, where a pooler stands before the database.",
    )
    listen_url_file: Path | None = Field(None, description="A file that holds HOMEPORT_LISTEN_URL.")
    pool_size: int = Field(5, gt=0, description="Connections to the database.")

    tenant_mode: Literal["credential", "headers", "single", "host"] = Field(
        "credential", description="Where the tenant comes from; `host` is an integration."
    )
    tenant_headers: _Headers = Field((), description="Headers that make up the tenant, all of them.")
    trusted_proxies: Annotated[_Names, AfterValidator(checks.proxies)] = Field(
        (), description="Peers whose tenant headers are believed: addresses, networks, or `unix`."
    )
    forward_tenant_headers: bool = Field(False, description="Leave the tenant headers in the request to the app.")
    tenant_signature_header: _Header | None = Field(None, description="The header that signs the tenant headers.")
    tenant_signing_keys: Annotated[_Secrets, AfterValidator(checks.signing_keys)] = Field(
        (), description="Keys of signatures, `id:secret` each, at least 16 bytes a secret."
    )
    tenant_signing_keys_file: Path | None = Field(None, description="A file that holds HOMEPORT_TENANT_SIGNING_KEYS.")
    tenant_signature_max_age: _SomeSeconds = Field(60.0, description="How old a signature may be, and how far ahead.")
    tenant_signature_body: bool = Field(False, description="Demand that signatures cover the body.")
    tenant_jwt_claims: _Names = Field((), description="Claims that identify the caller where the credential is a JWT.")
    secrets: Annotated[_Secrets, AfterValidator(checks.secrets)] = Field(
        (), description="Secrets of the digests in the store, at least 16 bytes each: the first writes, all read."
    )
    secrets_file: Path | None = Field(None, description="A file that holds HOMEPORT_SECRETS.")
    shared_account_ok: bool = Field(
        False, description="Allow `forward` and `new` below though several tenants share an account."
    )

    single_upstream_miss: Literal["reject", "forward"] = Field(
        "reject", description="`reject` or `forward` an unknown response id, where there is exactly one upstream."
    )
    unknown_conversation: Literal["reject", "new"] = Field(
        "reject", description="`reject` an unknown conversation id or let it be `new`."
    )
    unknown_item: Literal["reject", "forward"] = Field(
        "reject", description="`reject` or `forward` a reference to an unknown item."
    )
    unknown_container: Literal["reject", "forward"] = Field(
        "reject", description="`reject` or `forward` an unknown container in a tool."
    )
    unknown_encrypted: Literal["forward", "reject"] = Field(
        "forward", description="`forward` or `reject` encrypted content never seen."
    )
    max_selectors: int = Field(256, gt=0, description="References to stored state in one request.")

    ttl: _SomeSeconds = Field(30 * _DAY, description="How long ownership of a response is kept.")
    pending_ttl: _SomeSeconds = Field(_DAY, description="The same, for a stream that was cut.")
    encrypted_ttl: _SomeSeconds = Field(7 * _DAY, description="The same, for encrypted content.")
    tombstone_ttl: _SomeSeconds = Field(30 * _DAY, description="How long after that the answer says that it expired.")
    refresh_on_read: bool = Field(False, description="Let use prolong the TTL.")
    cache_size: int = Field(100_000, gt=0, description="Facts of ownership cached in the process.")
    cache_ttl: _Seconds = Field(30.0, description="How long they are believed; 0 is no cache.")
    max_records_per_tenant: int = Field(0, ge=0, description="Responses and conversations of a tenant; 0 is unbounded.")

    max_request_bytes: _Size = Field(64 * _MIB, description="The largest body that is inspected, also decoded.")
    decompress_for_app: bool = Field(False, description="Decode inspected bodies for an app that cannot (LiteLLM).")
    max_response_bytes: _Size = Field(64 * _MIB, description="How much of a buffered answer is held in memory.")
    max_event_bytes: _Size = Field(64 * _MIB, description="The largest event of a stream.")
    lookup_timeout: _SomeSeconds = Field(5.0, description="For one lookup in the store.")
    commit_timeout: _SomeSeconds = Field(10.0, description="For one commit; an answer is held no longer.")
    hold_keepalive: _SomeSeconds = Field(5.0, description="After this a held stream gets keepalive comments.")
    linger: _Seconds = Field(5.0, description="How long a stream may stay open after its last terminal event.")
    retryable_status: _Status | None = Field(
        None, description="400 replaces statuses that some clients repeat at once."
    )
    pin_header: _Header | None = Field(None, description="A request header that tells the app the upstream.")
    served_by_header: _Header | None = Field(None, description="A response header in which the app tells the upstream.")
    expose_served_by: bool = Field(False, description="Leave that header in the response to the client.")

    upstreams: Annotated[tuple[UpstreamSettings, ...], BeforeValidator(checks.upstreams)] = Field(
        (), description="Upstreams of the gateway, `name=url` each; tables in the TOML file say more."
    )
    client_keys_file: Path | None = Field(None, description="A file with digests of the keys that clients may use.")
    open: bool = Field(False, description="Serve everybody though the gateway adds a key of its own.")
    upstream_connect_timeout: _SomeSeconds = Field(5.0, description="For a connection to an upstream.")
    upstream_read_timeout: _SomeSeconds = Field(600.0, description="Between two chunks of an upstream's answer.")

    replica_id: Annotated[_Text, AfterValidator(checks.replica_id)] | None = Field(
        None, description="The name of this replica; without it `<host>-<process id>`."
    )
    replica_url: Annotated[_Text, AfterValidator(checks.replica_url)] | None = Field(
        None, description="Where its peers reach this replica: follow-ups are forwarded to it, once."
    )
    replica_beat: _SomeSeconds = Field(2.0, description="How often a replica says that it is alive.")
    replica_dead_after: _SomeSeconds = Field(10.0, description="How long a replica may be silent before it is dead.")
    replica_poll: _SomeSeconds = Field(0.25, description="How often an owner looks for what is asked of it.")
    replica_watch: _SomeSeconds = Field(1.0, description="How often an owner asks its app about unfinished responses.")
    replica_delegate_timeout: _SomeSeconds = Field(5.0, description="How long a cancel or delete waits for the owner.")
    replica_read_wait: _Seconds = Field(0.5, description="How long a read waits for an id that is not known yet.")
    stream_log: bool = Field(False, description="Keep the events of streams, so that any replica can resume them.")
    stream_log_events: int = Field(8192, gt=0, description="The most events that are kept of one response.")
    stream_log_bytes: _Size = Field(64 * _MIB, description="The most bytes of events that are kept of one response.")
    stream_log_ttl: _SomeSeconds = Field(3600.0, description="How long events are kept.")
    max_resource_bytes: _Size = Field(16 * _MIB, description="The largest response that is replicated.")
    history: bool = Field(
        False, description="Keep what goes in and out, to replay it where an upstream keeps no state."
    )
    max_history_bytes: _Size = Field(16 * _MIB, description="The largest history that is replayed.")
    max_history_turns: int = Field(1000, gt=0, description="The longest history that is replayed.")
    owner_lost: Literal["reject", "replay"] = Field(
        "reject", description="`replay` goes on elsewhere, from the history, when an owner is gone for good."
    )
    owner_lost_after: _SomeSeconds = Field(60.0, description="How long an upstream is unreachable before it is gone.")
    conversation_policy: Literal["reject", "branch", "last_write_wins"] = Field(
        "reject", description="What becomes of turns at the same time in one conversation that homeport holds."
    )
    conversation_lease: _SomeSeconds = Field(
        15.0, description="How long a turn that has died keeps others out of its conversation."
    )
    encryption_keys: Annotated[_Secrets, AfterValidator(checks.signing_keys)] = Field(
        (), description="Keys of stored content, `id:secret` each, at least 16 bytes a secret: the first writes."
    )
    encryption_keys_file: Path | None = Field(None, description="A file that holds HOMEPORT_ENCRYPTION_KEYS.")

    litellm_tenant: Literal["pair", "team", "user", "key"] = Field(
        "pair", description="Which part of LiteLLM's identity is the tenant; `pair` is team and user, as it binds ids."
    )
    litellm_surfaces: Annotated[_Names, AfterValidator(checks.surfaces)] = Field(
        ("chat:refuse", "passthrough:refuse", "websocket:refuse"),
        description="`refuse` or `allow` what refers to stored state where LiteLLM cannot be pinned.",
    )
    litellm_adopt: bool = Field(
        False, description="Let ids from before homeport continue if LiteLLM's encryption proves whose they are."
    )
    litellm_adopt_until: Annotated[datetime, AfterValidator(checks.instant)] | None = Field(
        None, description="When that ends, in ISO 8601 with a time zone: `2027-01-31T00:00:00Z`."
    )

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in type(self).model_fields:
                raise ValueError(unknown_name(name, type(self).model_fields))
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(_message(error)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        keywords = init_settings()
        environment: Mapping[str, Any] = read_environment(settings_cls)
        file = keywords.get("config_file", environment.get("config_file"))
        table = read_toml(settings_cls, file) if file is not None else {}
        return tuple(SettingsSource(settings_cls, values) for values in (keywords, environment, table))

    @property
    def secret_bytes(self) -> tuple[bytes, ...]:
        """``secrets`` as :class:`homeport.keys.Keyring` takes them."""
        return tuple(s.get_secret_value().encode() for s in self.secrets)

    @property
    def miss_policy(self) -> MissPolicy:
        """What may go on although it is not known: the ``forward`` and ``new`` settings."""
        return MissPolicy(
            forward_response=self.single_upstream_miss == "forward",
            new_conversation=self.unknown_conversation == "new",
            forward_item=self.unknown_item == "forward",
            forward_container=self.unknown_container == "forward",
            forward_encrypted=self.unknown_encrypted == "forward",
            replay_lost=self.owner_lost == "replay",
            history=self.history,
        )

    @property
    def litellm_allowed(self) -> frozenset[str]:
        """The surfaces of ``litellm_surfaces`` that are not refused."""
        pairs = (pair.partition(":") for pair in self.litellm_surfaces)
        return frozenset(name for name, _, policy in pairs if policy == "allow")

    @property
    def signing_keys(self) -> dict[str, bytes]:
        """``tenant_signing_keys`` by key id."""
        return dict(checks.split_signing_key(k.get_secret_value()) for k in self.tenant_signing_keys)

    @property
    def content_keys(self) -> dict[str, bytes]:
        """``encryption_keys`` by key id, the one that writes first."""
        return dict(checks.split_signing_key(k.get_secret_value()) for k in self.encryption_keys)

    @model_validator(mode="after")
    def _cross_checks(self) -> Settings:
        checks_of_all = (
            _tenancy_problem,
            _sharing_problem,
            _header_problem,
            _adoption_problem,
            _replica_problem,
            _history_problem,
        )
        for problem in (check(self) for check in checks_of_all):
            if problem is not None:
                raise ValueError(problem)
        return self


def _tenancy_problem(s: Settings) -> str | None:
    signed = s.tenant_signature_header is not None
    if signed != bool(s.tenant_signing_keys):
        return "HOMEPORT_TENANT_SIGNATURE_HEADER and HOMEPORT_TENANT_SIGNING_KEYS need each other"
    if s.tenant_signature_body and not signed:
        return "HOMEPORT_TENANT_SIGNATURE_BODY needs HOMEPORT_TENANT_SIGNATURE_HEADER"
    if s.tenant_mode != "headers":
        given = (
            "HOMEPORT_TENANT_HEADERS" if s.tenant_headers else "HOMEPORT_TENANT_SIGNATURE_HEADER" if signed else None
        )
        # Forgotten, the tenant would silently be another one.
        return None if given is None else f"{given} needs HOMEPORT_TENANT_MODE=headers"
    if not s.tenant_headers:
        return "HOMEPORT_TENANT_MODE=headers needs HOMEPORT_TENANT_HEADERS"
    if not s.secrets:
        return "HOMEPORT_TENANT_MODE=headers needs HOMEPORT_SECRETS"
    if not signed and not s.trusted_proxies:
        return "HOMEPORT_TENANT_MODE=headers needs HOMEPORT_TRUSTED_PROXIES or signatures"
    # With it, uvicorn takes the peer's address from a header that anybody can send.
    if not signed and "*" in [part.strip() for part in os.environ.get("FORWARDED_ALLOW_IPS", "").split(",")]:
        return (
            "FORWARDED_ALLOW_IPS=* lets everybody name a trusted proxy; HOMEPORT_TENANT_MODE=headers needs signatures"
        )
    return None


def _sharing_problem(s: Settings) -> str | None:
    """Policies that let one tenant reach state of another one, since they share the upstream's account."""
    if s.tenant_mode == "single" or s.shared_account_ok:
        return None
    for field in ("single_upstream_miss", "unknown_conversation", "unknown_item", "unknown_container"):
        if (chosen := getattr(s, field)) != "reject":
            return (
                f"{env_name(field)}={chosen} opens a shared account to every tenant; "
                "it needs HOMEPORT_TENANT_MODE=single or HOMEPORT_SHARED_ACCOUNT_OK=true"
            )
    return None


def _adoption_problem(s: Settings) -> str | None:
    if s.litellm_adopt and s.litellm_adopt_until is None:
        return "HOMEPORT_LITELLM_ADOPT needs HOMEPORT_LITELLM_ADOPT_UNTIL, the time at which it ends"
    if s.litellm_adopt_until is not None and not s.litellm_adopt:
        return "HOMEPORT_LITELLM_ADOPT_UNTIL needs HOMEPORT_LITELLM_ADOPT=true"
    return None


def _replica_problem(s: Settings) -> str | None:
    if s.replica_dead_after < 2 * s.replica_beat:
        return "HOMEPORT_REPLICA_DEAD_AFTER must be at least twice HOMEPORT_REPLICA_BEAT: one late beat is no death"
    if s.replica_url is not None and not s.secrets:
        return "HOMEPORT_REPLICA_URL needs HOMEPORT_SECRETS: what replicas forward to each other is signed with them"
    return None


def _history_problem(s: Settings) -> str | None:
    if s.owner_lost == "replay" and not s.history:
        return "HOMEPORT_OWNER_LOST=replay needs HOMEPORT_HISTORY=true: there would be nothing to replay"
    if s.history and s.mode == "observe":
        return "HOMEPORT_HISTORY=true needs HOMEPORT_MODE=enforce: observing changes no request"
    return None


def _header_problem(s: Settings) -> str | None:
    used: dict[str, str] = {}
    for field in ("tenant_headers", "tenant_signature_header", "pin_header", "served_by_header"):
        value = getattr(s, field)
        for header in value if isinstance(value, tuple) else (value,) if value else ():
            # Some servers do not tell a dash from an underscore.
            other = used.setdefault(header.replace("_", "-"), field)
            if other != field:
                return f"{env_name(other)} and {env_name(field)} name the same header"
    return None


def _message(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        text = problem["msg"].removeprefix("Value error, ")
        field, *place = problem["loc"] or ("",)
        where = f" ({'.'.join(map(str, place))})" if place else ""
        lines.append(f"the setting {env_name(str(field))} is not usable{where}: {text}" if field else text)
    return "; ".join(lines)


def settings_reference() -> list[tuple[str, str, str]]:
    """Environment variable, default and description of every setting, for the documentation."""
    return [
        (env_name(name), _default_text(name, field.default), field.description or "")
        for name, field in Settings.model_fields.items()
    ]


def _default_text(name: str, default: object) -> str:
    match default:
        case None:
            return ""
        case bool():
            return str(default).lower()
        case float():
            return duration_text(default)
        case int():
            return size_text(default) if name.endswith("_bytes") else str(default)
        case tuple():
            return ",".join(element or "/" for element in default)
        case _:
            return str(default)
