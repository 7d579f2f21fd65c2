"""Nothing is added without a rule: routes, fields, items, tools, codings and operations, each in one table.

The tables are compared to the installed OpenAI SDK, LiteLLM, the stand-in provider and the code itself. What fails here
is new: decide what it refers to, give it a rule in the product where it needs one, then a row below.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import brotli
import openai
import pytest
import zstandard
from openai.types import container_create_params
from openai.types.beta import beta_response_input_item_param, beta_responses_client_event_param, beta_tool_param
from openai.types.beta import response_compact_params as beta_compact_params
from openai.types.beta import response_create_params as beta_create_params
from openai.types.beta.responses import input_token_count_params as beta_token_params
from openai.types.conversations import conversation_create_params, conversation_update_params, item_create_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
    response_input_item_param,
    responses_client_event_param,
    tool_param,
)
from typing_extensions import get_type_hints, is_typeddict

from homeport import bodies, ledger
from homeport.errors import Reason, Rejected
from homeport.keys import Kind
from homeport.operations import Operation, OperationMatcher
from homeport.selectors import inspect_body
from homeport.settings import Settings
from homeport.testing.provider import create_provider

PREFIXES = Settings.model_fields["path_prefixes"].default
matcher = OperationMatcher(PREFIXES)
STATEFUL = ("responses", "conversations", "containers")
RESOURCES = Path(openai.__file__).parent / "resources"
DECIDE = "is new: give it a rule in homeport (middleware/README.md says where), then a row in this file"


def each(rule: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), rule)


def operation_of(method: str, path: str) -> Operation | None:
    """What the gate takes a route's path for, with something in place of its parameters."""
    path = re.sub(r"\{[^}]*\}", "ID", path).partition("?")[0]
    found = matcher.match(method, path, path.encode())
    return None if found is None else found.operation


# -- operations


# What an operation needs to have decided: is its id checked (path), is its body inspected (body), does a success make
# something that is owned (creates), is the answer looked into (observes), is that a response with a status (response),
# or of a conversation, whose items have no end (conversation), does a success end ownership (deletes).
OPERATIONS = {
    Operation.CREATE: {"body", "creates", "observes", "response"},
    Operation.RETRIEVE: {"path", "observes", "response"},
    Operation.DELETE: {"path", "observes", "deletes"},
    Operation.CANCEL: {"path", "observes", "response"},
    Operation.INPUT_ITEMS: {"path", "observes"},
    Operation.COMPACT: {"body", "creates", "observes", "response"},
    Operation.INPUT_TOKENS: {"body"},
    Operation.RESPONSE_OTHER: {"path"},
    Operation.CONVERSATION_CREATE: {"body", "creates", "observes"},
    Operation.CONVERSATION_RETRIEVE: {"path"},
    Operation.CONVERSATION_UPDATE: {"path"},
    Operation.CONVERSATION_DELETE: {"path", "observes", "deletes"},
    Operation.ITEMS_CREATE: {"path", "body", "observes", "conversation"},
    Operation.ITEMS_LIST: {"path", "observes", "conversation"},
    Operation.ITEM_RETRIEVE: {"path"},
    Operation.ITEM_DELETE: {"path"},
    Operation.CONVERSATION_OTHER: {"path"},
    Operation.CONTAINER_CREATE: {"creates", "observes"},
    Operation.CONTAINER_RETRIEVE: {"path"},
    Operation.CONTAINER_DELETE: {"path", "observes", "deletes"},
    Operation.CONTAINER_OTHER: {"path"},
    # No path leads to a frame: its operation is told by its type.
    Operation.STEER: {"body"},
    Operation.INJECT: {"body"},
    # Refused, unless there is one tenant only.
    Operation.COLLECTION: set(),
}


def test_every_operation_has_decided_all_there_is_to_decide() -> None:
    assert set(OPERATIONS) == set(Operation), DECIDE
    for operation, decided in OPERATIONS.items():
        code = {
            "path": operation.path_kind is not None,
            "body": operation.reads_body,
            "creates": operation in ledger._CREATES,
            "observes": operation in ledger._OBSERVED,
            "response": operation in ledger._RESPONSES,
            "conversation": operation in ledger._IN_CONVERSATION,
            "deletes": operation in ledger._DELETES,
        }
        assert {name for name, holds in code.items() if holds} == decided, operation
        assert operation.by_id is ("path" in decided)


# -- paths


COLLECTIONS = {
    "responses": "gated",
    "conversations": "gated",
    "containers": "gated",
    **dict.fromkeys(
        ["audio", "completions", "content_provenance_checks", "decisions", "embeddings", "images", "live", "models"],
        "keeps nothing that a response could refer to",
    ),
    **dict.fromkeys(
        ["files", "uploads", "vector_stores", "skills", "batches", "evals", "chat", "videos", "fine_tuning", "vaults"],
        "not tracked: passed through, README says so",
    ),
    **dict.fromkeys(["moderations", "realtime", "v1"], "keeps nothing that a response could refer to"),
    **dict.fromkeys(["agents", "assistants", "threads", "chatkit"], "an API of its own, with state of its own"),
    **dict.fromkeys(
        ["organization", "projects", "safety", "webhook_endpoints", "webhook_event_types"], "administration"
    ),
}


def test_every_collection_of_the_sdk_is_known() -> None:
    found = set()
    for file in RESOURCES.rglob("*.py"):
        found |= {path.split("/")[1].partition("?")[0] for path in re.findall(r'"(/[^"\s]+)"', file.read_text())}
    assert found <= set(COLLECTIONS), f"{sorted(found - set(COLLECTIONS))} {DECIDE}"
    assert {name for name, rule in COLLECTIONS.items() if rule == "gated"} == set(STATEFUL)


def calls(file: Path) -> Iterator[tuple[str, str]]:
    """Method and path of every request that a resource of the SDK makes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and re.match(b"/[a-z]", node.value):
            yield "POST", node.value.decode()  # a socket's
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr not in ("_get_api_list", "_get", "_post", "_put", "_patch", "_delete"):
            continue
        path = node.args[0].args[0] if isinstance(node.args[0], ast.Call) else node.args[0]
        assert isinstance(path, ast.Constant), f"{file.name}:{node.lineno} makes its path in a way unknown here"
        asked = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        listed = asked.get("method", "get") if node.func.attr == "_get_api_list" else node.func.attr[1:]
        yield str(listed).upper(), path.value


SDK_CALLS = sorted(
    {
        call
        for folder in ("responses", "conversations", "containers", "beta/responses")
        for file in (RESOURCES / folder).rglob("*.py")
        for call in calls(file)
    }
)
# Gated by what stands before them, or refused: nothing that homeport need tell apart.
BY_ID_ONLY = {
    ("GET", "/containers"): Operation.COLLECTION,
    ("GET", "/containers/{container_id}/files"): Operation.CONTAINER_OTHER,
    ("POST", "/containers/{container_id}/files"): Operation.CONTAINER_OTHER,
    ("GET", "/containers/{container_id}/files/{file_id}"): Operation.CONTAINER_OTHER,
    ("DELETE", "/containers/{container_id}/files/{file_id}"): Operation.CONTAINER_OTHER,
    ("GET", "/containers/{container_id}/files/{file_id}/content"): Operation.CONTAINER_OTHER,
}
CATCH_ALL = (
    Operation.COLLECTION,
    Operation.RESPONSE_OTHER,
    Operation.CONVERSATION_OTHER,
    Operation.CONTAINER_OTHER,
)


def test_the_sdk_was_read() -> None:
    assert len(SDK_CALLS) >= 30
    assert ("POST", "/responses/{response_id}/cancel?beta=true") in SDK_CALLS
    assert ("GET", "/conversations/{conversation_id}/items/{item_id}") in SDK_CALLS


@pytest.mark.parametrize(("method", "path"), SDK_CALLS)
def test_every_request_of_the_sdk_has_a_rule_below_every_prefix(method: str, path: str) -> None:
    operation = operation_of(method, path)
    assert operation in OPERATIONS, f"{method} {path} {DECIDE}"
    assert {operation_of(method, prefix + path) for prefix in PREFIXES} == {operation}
    expected = BY_ID_ONLY.get((method, path))
    if expected is not None:
        assert operation is expected
    else:
        assert operation not in CATCH_ALL, f"{method} {path} {DECIDE}: its body is not inspected, its answer not seen"


def test_every_route_of_the_stand_in_provider_is_gated() -> None:
    control = {"/_log", "/_faults", "/_ids", "/models"}
    for route in create_provider("p").routes:
        path = route.path.removeprefix("/openai").removeprefix("/v1")
        for method in getattr(route, "methods", None) or {"POST"}:
            assert (operation_of(method, route.path) is None) is (path in control), f"{method} {route.path} {DECIDE}"


LITELLM_ROUTE = re.compile(r'@\w*(?:router|app)\.(\w+)\(\s*f?"([^"]*)"')
NOT_STATE = {"/model/metrics/slow_responses": "a figure of the proxy's own"}


def test_every_route_of_litellm_that_names_state_is_gated() -> None:
    """Read from its source: importing it takes longer than all of this. Pass-through is another matter: its hook's."""
    [package] = find_spec("litellm").submodule_search_locations
    found = set()
    for file in Path(package, "proxy").rglob("*.py"):
        text = file.read_text()
        if any(name in text for name in STATEFUL):
            found |= {(m[1], m[2]) for m in LITELLM_ROUTE.finditer(text) if any(name in m[2] for name in STATEFUL)}
    for endpoint in json.loads(Path(package, "containers", "endpoints.json").read_text())["endpoints"]:
        found.add((endpoint["method"], endpoint["path"]))
        found.add((endpoint["method"], "/v1" + endpoint["path"]))
    assert len(found) >= 30
    assert ("post", "/openai/v1/responses") in found
    for method, path in sorted(found):
        gated = operation_of("POST" if method == "websocket" else method.upper(), path) is not None
        assert gated is (path not in NOT_STATE), f"{method} {path} {DECIDE}"


# -- fields of requests


SELECTOR = "read: a reference to stored state, or what holds some"
FLAG = "read: what becomes of the answer"
PLAIN = "no state"
UNTRACKED = "not tracked: passed through, DESIGN.md section 3"
OWN = "checked where frames are read"

REQUEST_FIELDS = {
    **dict.fromkeys(["previous_response_id", "conversation", "input", "items", "tools"], SELECTOR),
    **dict.fromkeys(["model", "stream", "store", "background"], FLAG),
    **dict.fromkeys(["response_id", "stream_id", "type"], OWN),
    "prompt": UNTRACKED,
    "skills": UNTRACKED,
    "file_ids": UNTRACKED,
    # Holds comparison_response_id, see below.
    "prompt_cache_options": SELECTOR,
    **each(
        PLAIN,
        """access_programs background_options betas context_management expires_after generate image include instructions
        max_output_tokens max_tool_calls memory_limit metadata moderation multi_agent name network_policy
        parallel_tool_calls personality prompt_cache_key prompt_cache_retention reasoning safety_identifier service_tier
        stream_options temperature text tool_choice top_logprobs top_p truncation user""",
    ),
}
# Deeper inside, whatever looks like the name of something that is kept.
REFERENCES = {
    "id": SELECTOR,  # of items as ITEM_TYPES says, of a conversation; of a prompt it is not tracked
    "encrypted_content": SELECTOR,
    "container": SELECTOR,
    "container_id": SELECTOR,
    "environment": SELECTOR,
    "comparison_response_id": SELECTOR,
    **dict.fromkeys(["file_id", "file_ids", "vector_store_ids", "skill_id", "skills", "connector_id"], UNTRACKED),
    "tunnel_id": UNTRACKED,
    # What must stand in the same context: whoever is asked looks nowhere else.
    **dict.fromkeys(["call_id", "caller_id", "approval_request_id"], PLAIN),
    "continuation_id": PLAIN,  # "a customer-provided opaque identifier used to prioritize": adds no history
    "fingerprint": PLAIN,  # of a program: round-tripped with its text
    **dict.fromkeys(["token", "key", "keys", "prompt_cache_breakpoint", "reasoning_tokens"], PLAIN),
    **dict.fromkeys(["input_tokens", "output_tokens", "total_tokens", "domain_secrets", "context"], PLAIN),
}
LOOKS_KEPT = re.compile(
    r"(^|_)(id|ids|ref|refs|reference|references|handle|tokens?|cursor|after|before|session|thread|state|checkpoint|parent"
    r"|keys?|context|secrets?|skills?|environment|fingerprint|continuation|snapshot|memory)(_|$)"
    r"|encrypted|container|conversation|response|previous|cache_break"
)
LOOKS_ONLY = {"response_format", "memory_limit", "expires_after", "search_context_size", "context_management"} | {
    "context_compression", "env", "include_obfuscation"
}  # fmt: skip

REQUESTS = [
    response_create_params.ResponseCreateParams,
    response_compact_params.ResponseCompactParams,
    input_token_count_params.InputTokenCountParams,
    responses_client_event_param.ResponsesClientEventParam,
    conversation_create_params.ConversationCreateParams,
    conversation_update_params.ConversationUpdateParams,
    item_create_params.ItemCreateParams,
    container_create_params.ContainerCreateParams,
    beta_create_params.ResponseCreateParams,
    beta_compact_params.ResponseCompactParams,
    beta_token_params.InputTokenCountParams,
    beta_responses_client_event_param.BetaResponsesClientEventParam,
]
ITEM_UNIONS = [
    response_input_item_param.ResponseInputItemParam,
    beta_response_input_item_param.BetaResponseInputItemParam,
]
TOOL_UNIONS = [tool_param.ToolParam, beta_tool_param.BetaToolParam]


def objects(kind: Any) -> Iterator[Any]:
    """The kinds of objects in a union or an array."""
    if is_typeddict(kind):
        yield kind
    else:
        for part in get_args(kind):
            yield from objects(part)


HINTS: dict[Any, dict[str, Any]] = {}


def learn(kind: Any) -> None:
    for found in objects(kind):
        if found not in HINTS:
            HINTS[found] = get_type_hints(found)
            for part in HINTS[found].values():
                learn(part)


for request in REQUESTS:
    learn(request)


def literals(kind: Any) -> set[str]:
    if isinstance(kind, str):
        return {kind}
    return {text for part in get_args(kind) for text in literals(part)}


def types_of(unions: list[Any]) -> set[str]:
    return {t for union in unions for kind in objects(union) for t in literals(HINTS[kind].get("type", str))}


def test_every_field_of_a_request_is_classified() -> None:
    fields = {name for request in REQUESTS for kind in objects(request) for name in HINTS[kind]}
    assert fields == set(REQUEST_FIELDS), f"{sorted(fields ^ set(REQUEST_FIELDS))} {DECIDE}"


def test_whatever_looks_like_a_reference_inside_is_classified() -> None:
    inner = {name for kind, hints in HINTS.items() for name in hints} - set(REQUEST_FIELDS)
    looking = {name for name in inner if LOOKS_KEPT.search(name)} - LOOKS_ONLY
    assert looking <= set(REFERENCES), f"{sorted(looking - set(REFERENCES))} {DECIDE}"
    assert set(REFERENCES) <= {name for hints in HINTS.values() for name in hints}, "no longer in the SDK"


INLINE = "its content is inline: an id is the client's own"
POINTER = "refers to a stored item"
# The member without which an item is a mere pointer.
ITEM_TYPES = {
    "item_reference": POINTER,
    "reasoning": "encrypted_content",
    "compaction": "encrypted_content",
    "image_generation_call": "result",
    **each(
        INLINE,
        """additional_tools agent_message apply_patch_call apply_patch_call_output code_interpreter_call
        compaction_trigger computer_call computer_call_output configuration_update custom_tool_call
        custom_tool_call_output file_search_call function_call function_call_output local_shell_call
        local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools message
        multi_agent_call multi_agent_call_output program program_output shell_call shell_call_output tool_search_call
        tool_search_output web_search_call""",
    ),
}
TOOL_TYPES = {
    "code_interpreter": "container",
    "shell": "environment",
    "namespace": "tools",
    **dict.fromkeys(["file_search", "mcp"], UNTRACKED),
    **each(
        PLAIN,
        """apply_patch computer computer_use_preview custom function image_generation local_shell
        programmatic_tool_calling tool_search web_search web_search_2025_08_26 web_search_preview
        web_search_preview_2025_03_11""",
    ),
}


def found_in(body: dict[str, Any], operation: Operation = Operation.CREATE) -> set[tuple[Kind, str]]:
    return {(s.kind, s.id) for s in inspect_body(operation, json.dumps(body).encode(), max_selectors=9).selectors}


def test_every_item_is_classified_and_read_so() -> None:
    assert types_of(ITEM_UNIONS) == set(ITEM_TYPES), f"{types_of(ITEM_UNIONS) ^ set(ITEM_TYPES)} {DECIDE}"
    for kind, rule in ITEM_TYPES.items():
        role = {"role": "user"} if kind == "message" else {}
        bare = found_in({"input": [{"type": kind, "id": "x", **role}]})
        assert bare == (set() if rule == INLINE else {(Kind.ITEM, "x")}), kind
        if rule not in (INLINE, POINTER):
            assert (Kind.ITEM, "x") not in found_in({"input": [{"type": kind, "id": "x", rule: "content"}]}), kind


def test_every_tool_is_classified_and_read_so() -> None:
    assert types_of(TOOL_UNIONS) == set(TOOL_TYPES), f"{types_of(TOOL_UNIONS) ^ set(TOOL_TYPES)} {DECIDE}"
    holders = {kind for kind, rule in TOOL_TYPES.items() if rule not in (PLAIN, UNTRACKED)}
    for union in TOOL_UNIONS:
        for kind in objects(union):
            if {"container", "container_id", "tools"} & set(HINTS[kind]):
                assert literals(HINTS[kind]["type"]) <= holders, f"{kind.__name__} {DECIDE}"


STATE: list[tuple[str, dict[str, Any], tuple[Kind, str]]] = [
    ("previous_response_id", {"previous_response_id": "x"}, (Kind.RESPONSE, "x")),
    ("conversation", {"conversation": "x"}, (Kind.CONVERSATION, "x")),
    ("id of a conversation", {"conversation": {"id": "x"}}, (Kind.CONVERSATION, "x")),
    ("input", {"input": [{"id": "x"}]}, (Kind.ITEM, "x")),
    ("tools", {"tools": [{"type": "code_interpreter", "container": "x"}]}, (Kind.CONTAINER, "x")),
    (
        "environment",
        {"tools": [{"type": "shell", "environment": {"type": "container_reference", "container_id": "x"}}]},
        (Kind.CONTAINER, "x"),
    ),
    (
        "tools of a namespace",
        {"tools": [{"type": "namespace", "tools": [{"type": "code_interpreter", "container": "x"}]}]},
        (Kind.CONTAINER, "x"),
    ),
    (
        "tools of an item",
        {"input": [{"type": "additional_tools", "tools": [{"type": "code_interpreter", "container": "x"}]}]},
        (Kind.CONTAINER, "x"),
    ),
    ("container_id", {"input": [{"type": "code_interpreter_call", "container_id": "x"}]}, (Kind.CONTAINER, "x")),
    (
        "environment of an item",
        {"input": [{"type": "shell_call", "environment": {"type": "container_reference", "container_id": "x"}}]},
        (Kind.CONTAINER, "x"),
    ),
    ("encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, (Kind.ENCRYPTED, "x")),
]


@pytest.mark.parametrize("operation", [Operation.CREATE, Operation.COMPACT, Operation.INPUT_TOKENS])
@pytest.mark.parametrize(("name", "body", "expected"), STATE, ids=[name for name, *_ in STATE])
def test_what_is_called_a_selector_is_one(
    name: str, body: dict[str, Any], expected: tuple[Kind, str], operation: Operation
) -> None:
    assert found_in(body, operation) == {expected}


@pytest.mark.parametrize("operation", [Operation.CONVERSATION_CREATE, Operation.ITEMS_CREATE])
def test_items_of_conversations_are_read(operation: Operation) -> None:
    assert found_in({"items": [{"id": "x"}]}, operation) == {(Kind.ITEM, "x")}


def test_the_response_that_a_prompt_cache_is_compared_to_is_a_selector() -> None:
    assert found_in({"prompt_cache_options": {"comparison_response_id": "x"}}) == {(Kind.RESPONSE, "x")}


# -- codings


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


ENCODERS = {
    "gzip": [gzip.compress],
    "x-gzip": [gzip.compress],
    "deflate": [zlib.compress, raw_deflate],
    "br": [brotli.compress],
    "zstd": [zstandard.ZstdCompressor().compress],
}
BODY = b'{"previous_response_id":"victim"}'


def test_every_coding_has_a_sample() -> None:
    assert set(ENCODERS) == set(bodies._LAYERS), DECIDE


@pytest.mark.parametrize("name", ENCODERS)
def test_every_spelling_of_a_coding_is_decoded(name: str) -> None:
    spellings = [
        name,
        name.upper(),
        name.title(),
        f" {name}\t",
        f"{name},",
        f",{name} ,",
        f"identity, {name}",
        f"{name},identity",
    ]
    for encode in ENCODERS[name]:
        for spelling in spellings:
            decoded = bodies.decode_body(encode(BODY), [spelling.encode()], limit=1000)
            assert decoded == BODY, spelling
        twice = gzip.compress(encode(BODY))
        for values in ([f"{name}, gzip".encode()], [name.encode(), b"GZIP"]):
            assert bodies.decode_body(twice, values, limit=1000) == BODY


@pytest.mark.parametrize(
    "name",
    [
        "compress", "x-compress", "x-deflate", "x-br", "brotli", "x-zstd", "zstandard", "snappy", "lz4", "exi", "dcb", "dcz",
        "aes128gcm", "pack200-gzip", "aws-chunked", "utf-8", "gzip;q=1", '"gzip"', "gzip deflate", "*", "\xff",
    ],
)  # fmt: skip
def test_any_other_coding_is_refused(name: str) -> None:
    """IANA's registry, and what else is sent: no body passes that was not read."""
    with pytest.raises(Rejected) as caught:
        bodies.decode_body(BODY, [name.encode("latin-1")], limit=1000)
    assert caught.value.rejection.reason is Reason.UNSUPPORTED_ENCODING
