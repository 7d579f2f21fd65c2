"""No alias of a path escapes the gate, and no other path is gated: the matcher beside small models of routers.

A model says what an app, or a proxy before it, makes of a request line. Whatever any of them takes for a stateful
operation, the matcher takes for the same one with the same id, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.routing import Match as Matched
from starlette.routing import Mount, Route, Router

from homeport.errors import Rejected
from homeport.operations import Match, Operation, OperationMatcher

PREFIXES = ("", "/v1", "/openai", "/openai/v1")
matcher = OperationMatcher(PREFIXES)

# WIRE.md section 1, in the words of a router.
API = [
    ("POST", "/responses", "create"),
    ("GET", "/responses", "collection"),
    ("POST", "/responses/compact", "compact"),
    ("POST", "/responses/input_tokens", "input_tokens"),
    ("GET", "/responses/{id}", "retrieve"),
    ("DELETE", "/responses/{id}", "delete"),
    ("POST", "/responses/{id}/cancel", "cancel"),
    ("GET", "/responses/{id}/input_items", "input_items"),
    ("POST", "/conversations", "conversation_create"),
    ("GET", "/conversations", "collection"),
    ("GET", "/conversations/{id}", "conversation_retrieve"),
    ("POST", "/conversations/{id}", "conversation_update"),
    ("DELETE", "/conversations/{id}", "conversation_delete"),
    ("GET", "/conversations/{id}/items", "items_list"),
    ("POST", "/conversations/{id}/items", "items_create"),
    ("GET", "/conversations/{id}/items/{item}", "item_retrieve"),
    ("DELETE", "/conversations/{id}/items/{item}", "item_delete"),
    ("POST", "/containers", "container_create"),
    ("GET", "/containers", "collection"),
    ("GET", "/containers/{id}", "container_retrieve"),
    ("DELETE", "/containers/{id}", "container_delete"),
    ("GET", "/containers/{id}/files", "container_other"),
    ("POST", "/containers/{id}/files", "container_other"),
    ("GET", "/containers/{id}/files/{item}/content", "container_other"),
]


class Routed(NamedTuple):
    operation: str
    id: str | None


# -- models of routers


async def nowhere(request: object) -> None: ...


ROUTES = [Route(path, nowhere, methods=[method], name=name) for method, path, name in API]
STARLETTE = Router([Mount(prefix, routes=ROUTES) for prefix in PREFIXES[::-1]])


def starlette(method: str, path: str, root_path: str = "") -> Routed | None:
    """The real router, as FastAPI and LiteLLM use it, on ``path`` as it stands in the scope."""
    scope = {"type": "http", "method": method, "path": path, "root_path": root_path, "headers": []}
    for mount in STARLETTE.routes:
        matched, child = mount.matches(scope)
        if matched is not Matched.FULL:
            continue
        for route in ROUTES:
            matched, found = route.matches({**scope, **child})
            if matched is Matched.FULL:
                return Routed(route.name, found["path_params"].get("id"))
    return None


def of_segments(method: str, segments: list[str], word: Callable[[str], str] = str) -> Routed | None:
    """A router that compares segments; ``word`` is what it makes of a static one first."""
    for prefix in PREFIXES:
        depth = prefix.count("/")
        if "".join("/" + word(s) for s in segments[:depth]) != prefix:
            continue
        rest = segments[depth:]
        for asked, path, name in API:
            shape = path.split("/")[1:]
            if asked == method and len(shape) == len(rest):
                pairs = list(zip(shape, rest, strict=True))
                if all(value if name[0] == "{" else word(value) == name for name, value in pairs):
                    return Routed(name, dict(pairs).get("{id}"))
    return None


def resolved(segments: list[str]) -> list[str]:
    kept: list[str] = []
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return kept


def merged(segments: list[str]) -> list[str]:
    return [s for s in segments if s]


def split(path: str) -> list[str]:
    return path.split("/")[1:]


def without_tail(segments: list[str]) -> list[str]:
    return segments[:-1] if segments[-1:] == [""] else segments


def parameterless(segment: str) -> str:
    return segment.partition(";")[0]


Model = Callable[[str, str], "Routed | None"]

# On the request target as it came. These know what an id is: they must be met exactly.
EXACT: dict[str, Model] = {
    "starlette": lambda m, raw: starlette(m, unquote(raw)),
    "segments decoded after the split": lambda m, raw: of_segments(m, [unquote(s) for s in split(raw)]),
    "a trailing slash is nothing": lambda m, raw: of_segments(m, without_tail(split(unquote(raw)))),
    "slashes are merged": lambda m, raw: of_segments(m, merged([unquote(s) for s in split(raw)])),
    "decoded, then slashes are merged": lambda m, raw: of_segments(m, merged(split(unquote(raw)))),
    "dots are resolved": lambda m, raw: of_segments(m, resolved([unquote(s) for s in split(raw)])),
    "dots, then slashes": lambda m, raw: of_segments(m, merged(resolved(split(unquote(raw))))),
    "nginx: decoded, slashes, then dots": lambda m, raw: of_segments(m, resolved(merged(split(unquote(raw))))),
    "letter case is nothing": lambda m, raw: of_segments(m, [unquote(s) for s in split(raw)], str.lower),
    "letter case as in Unicode": lambda m, raw: of_segments(m, split(unquote(raw)), str.casefold),
    "express": lambda m, raw: of_segments(m, without_tail([unquote(s) for s in split(raw)]), str.lower),
    "words with parameters": lambda m, raw: of_segments(m, [unquote(s) for s in split(raw)], parameterless),
}


def url_path(text: str) -> str:
    """What stands in a URL that an app makes of a decoded path."""
    try:
        return urlsplit("http://h/" + text).path[1:]
    except ValueError:
        return ""  # no URL at all


def browser(text: str) -> str:
    """The path of a URL as WHATWG's parser has it, without dot segments."""
    text = text.rstrip("".join(map(chr, range(33)))).translate(dict.fromkeys(b"\t\r\n"))
    return text.partition("#")[0].partition("?")[0].replace("\\", "/")


# What these do to a path they do to ids as well, so theirs is compared after that.
REREADING: dict[str, Callable[[str], str]] = {
    "decodes again": unquote,
    "decodes twice again, and backslashes": lambda text: unquote(text).replace("\\", "/"),
    "backslash": lambda text: text.replace("\\", "/"),
    "makes a URL of it": url_path,
    "parses it as a browser": browser,
    "a C string": lambda text: text.partition("\0")[0],
}


def meets(found: Match | None, expected: Routed | None, reread: Callable[[str], str] = str) -> bool:
    if expected is None:
        return True
    if found is None or found.operation != Operation(expected.operation):
        return False
    if found.path_id is None:
        return expected.id is None
    # At the end of a path, and before its end.
    return expected.id in (found.path_id, reread(found.path_id), reread(f"{found.path_id}/x").removesuffix("/x"))


REFUSED = object()


def matched(method: str, raw: str, root_path: str = "") -> Match | object | None:
    """What the matcher says of a request as uvicorn hands it on."""
    path = root_path + unquote(raw)
    try:
        return matcher.match(method, path, (root_path + raw).encode(), root_path)
    except Rejected:
        return REFUSED


# -- requests


# A loaded machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def spelled(draw: st.DrawFn, word: str) -> str:
    """A static word as nobody writes it."""
    letters = []
    for letter in word:
        match draw(st.sampled_from(["", "", "", "", "", "", "upper", "once", "twice"])):
            case "upper":
                letters.append(letter.upper())
            case "once":
                letters.append(f"%{ord(letter):02x}")
            case "twice":
                letters.append(f"%25{ord(letter):02X}")
            case _:
                letters.append(letter)
    after = draw(st.sampled_from(["", "", "", "", "", ";", ";a=b", "%3Bx", "%3F", "%23", "%00", "%20", "%0A", "%5C"]))
    return "".join(letters) + after


OPAQUE = st.one_of(
    st.sampled_from(
        ["mine", "victim", "..", ".", "a%b", "%2e%2e", "a;b", "a\\b", "a/b", "", "cancel", "items", "ü", "responses"]
    ),
    st.text(st.sampled_from("ab./%2fF5cC;\\?#é \t"), max_size=8),
)
BETWEEN = st.sampled_from(
    ["/"] * 12 + ["//", "/./", "/x/../", "/%2e/", "/x/%2E%2E/", "%2F", "%2f", "%252F", "\\", "%5C", "/;/", "/x/..;a/", "%5C..%5C"]
)  # fmt: skip


@st.composite
def request_lines(draw: st.DrawFn) -> tuple[str, str]:
    """An operation of the API, in a spelling that some router may take for it, or almost."""
    method, path, _ = draw(st.sampled_from(API))
    prefix = draw(st.sampled_from(PREFIXES))
    raw = draw(BETWEEN) if draw(st.booleans()) else "/"
    parts = (prefix + path).split("/")[1:]
    for index, part in enumerate(parts):
        if part[0] == "{":
            quoted = quote(draw(OPAQUE), safe="!$&'()*+,;=:@")
            raw += quoted if draw(st.integers(0, 4)) else quote(quoted, safe="")
        else:
            raw += part if draw(st.booleans()) else draw(spelled(part))
        if index < len(parts) - 1:
            raw += draw(BETWEEN)
    raw += draw(st.sampled_from([""] * 6 + ["/", "//", "/.", "/..", "/../mine", "%2F", ";x", "%3Fx"]))
    return method, raw if raw.startswith("/") else "/" + raw


@settings(PATIENT, max_examples=400)
@given(request_lines())
@example(("GET", "/v1/responses/mine/%252e%252e/victim"))
@example(("POST", "/v1/responses%3F/mine/cancel"))
@example(("POST", "/v1/re%09sponses"))
@example(("GET", "/containers/../file%2573"))
@example(("GET", "/responses%0A/%20"))
@example(("GET", "/openai%00%5C..%5Cresponses/%3F"))
@example(("GET", "/responses/%20%09/"))
def test_no_router_sees_another_operation_or_id_than_the_gate(line: tuple[str, str]) -> None:
    method, raw = line
    found = matched(method, raw)
    if found is REFUSED:
        return
    for name, model in EXACT.items():
        expected = model(method, raw)
        assert meets(found, expected), f"{name} takes {method} {raw!r} for {expected}, the matcher for {found}"
    for name, reread in REREADING.items():
        for path in (reread(unquote(raw)), "/" + "/".join(resolved(merged(split(reread(unquote(raw))))))):
            expected = starlette(method, path)
            assert meets(found, expected, reread), f"{name} takes {raw!r} for {expected}, the matcher for {found}"


@settings(PATIENT, max_examples=100)
@given(request_lines(), st.sampled_from(["/api", "/v1", "/openai", "/conversations", "/responses", "/t/x", "/api/"]))
@example(("POST", "/responses"), "/conversations")
def test_mounted_elsewhere(line: tuple[str, str], root_path: str) -> None:
    """Below a mount, or behind a proxy that takes a prefix away; an app may route on the rest or on all of the path."""
    method, raw = line
    root_path = root_path.rstrip("/")
    found = matched(method, raw, root_path)
    if found is REFUSED:
        return
    path = root_path + unquote(raw)
    for expected in (starlette(method, path, root_path), starlette(method, path)):
        assert meets(found, expected), f"routed as {expected}"
    assert meets(matched(method, raw), starlette(method, unquote(raw))), "some servers leave root_path out of the path"


@settings(PATIENT, max_examples=100)
@given(request_lines(), st.sampled_from(["?beta=true", "?a=/../x", "?include%5B%5D=x", "?x=/v1/responses/other"]))
def test_queries_change_nothing(line: tuple[str, str], query: str) -> None:
    """Wherever the server leaves them."""
    method, raw = line
    try:
        found: object = matcher.match(method, unquote(raw), (raw + query).encode())
    except Rejected:
        found = REFUSED
    assert found == matched(method, raw)


WORDS = [
    "v1", "v2", "openai", "responses", "conversations", "containers", "responses-old", "xresponses", "responses.js",
    "my_conversations", "chat", "completions", "files", "static", "r", "", "deployments", "input_items", "%72esponses",
]  # fmt: skip


@settings(PATIENT, max_examples=200)
@given(st.sampled_from(["GET", "POST", "DELETE"]), st.lists(st.sampled_from(WORDS), max_size=6))
def test_a_path_that_no_router_takes_for_ours_is_not_gated(method: str, words: list[str]) -> None:
    raw = "/" + "/".join(words)
    segments = merged(split(unquote(raw)))
    depth = next((i for i, s in enumerate(segments) if s in ("responses", "conversations", "containers")), None)
    ours = depth is not None and "".join(f"/{s}" for s in segments[:depth]) in PREFIXES
    assert (matched(method, raw) is not None) is ours


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses-old",
        "/v1/responses.json",
        "/static/responses.js",
        "/v1/files/responses",
        "/v1/files/file_responses/content",
        "/v1/embeddings?x=/v1/responses",
        "/docs/responses/create",
        "/v1/responsesx/r",
        "/v1/models/containers%2Fx",
        "/v1/files/100%25/responses",
        "/v1/%25responses",
        "/v1/vector_stores/a%3F/v1/responses",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT"])
def test_other_paths_pass_untouched(method: str, path: str) -> None:
    assert matched(method, path) is None


@pytest.mark.parametrize("method", ["HEAD", "PUT", "PATCH", "TRACE", "PROPFIND", "get", "hEAD"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_method_on_an_id_is_gated_by_that_id(method: str, prefix: str) -> None:
    """Routers answer HEAD for GET, and apps know methods that the API does not have."""
    for collection in ("responses", "conversations", "containers"):
        found = matched(method, f"{prefix}/{collection}/victim")
        assert isinstance(found, Match)
        assert found.path_id == "victim"
        assert isinstance(matched(method, f"{prefix}/{collection}"), Match)
