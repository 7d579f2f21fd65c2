"""What travels when a history is sent to an upstream that does not know it: one table, by type of item. Pure.

Whatever its type, an item with encrypted content or in a container goes to nobody but its maker (WIRE.md section 1.2),
and an item of a type that is not listed goes as it is. Files and images travel by reference: an upstream refuses the
id of a file that it does not have. Input schemas are those of the openai SDK 3.57, ``ResponseInputItemParam``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from homeport.strictjson import MAX_NAME, fold

__all__ = ["RULES", "Ids", "Rule", "Travel", "kind_of_item", "rule_of"]


class Travel(Enum):
    """Where an item of a turn goes."""

    ANYWHERE = auto()
    HOME = auto()
    """To who made it. It is left out, and counted, where it is another upstream: the rest says the same."""
    MEMORY = auto()
    """As HOME in an output; in an input nothing else says the same, so that goes nowhere but to its maker."""
    ONCE = auto()
    """It was an order: with its request it is done."""


class Ids(Enum):
    """What becomes of the id of an item in an output."""

    DROPPED = auto()
    """The schema lets it be absent, and an upstream would look for what it does not have."""
    NEW = auto()
    """The schema demands one, but it means nothing."""
    KEPT = auto()
    """The schema demands it, and others may refer to it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``prefix`` begins the ids that homeport mints for such items. ``status``: an upstream takes that of an output."""

    prefix: str
    travels: Travel
    ids: Ids
    why: str
    status: bool = True


def _inline(prefix: str, why: str, *, ids: Ids = Ids.KEPT, status: bool = True) -> Rule:
    return Rule(prefix, Travel.ANYWHERE, ids, why, status)


def _call(prefix: str, why: str, *, status: bool = False) -> Rule:
    return Rule(prefix, Travel.ANYWHERE, Ids.DROPPED, why, status)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "message": _inline(
            "msg",
            "Its content is in it. Strict readers (vLLM: openai/codex#12669) want an id and a status beside an "
            "output_text. The id an upstream gave it would be looked for with the reasoning it belonged to ('was "
            "provided without its required reasoning item', NousResearch/hermes-agent#102282), or be there twice "
            "(earendil-works/pi#5149); of clients' own ids there are many (WIRE.md section 0).",
            ids=Ids.NEW,
        ),
        "function_call": _call("fc", "Bound to its result by call_id; id and status are optional."),
        "function_call_output": _call("fco", "The client's result; id and status are optional."),
        "custom_tool_call": _call("ctc", "As function_call; its schema has no status."),
        "custom_tool_call_output": _call("ctco", "As function_call_output; its schema has no status."),
        "shell_call": _call("sh", "Run by the client unless its environment is a container; id, status are optional."),
        "shell_call_output": _call("sho", "As function_call_output."),
        "apply_patch_call": _call("apc", "As function_call, but its status is required.", status=True),
        "apply_patch_call_output": _call("apco", "As function_call_output, but its status is required.", status=True),
        "tool_search_call": _call("tsc", "As function_call."),
        "tool_search_output": _call("tso", "The tools that were found, in full; id and status are optional."),
        "local_shell_call": _inline("lsh", "Its result refers to it by its id, which is required."),
        "local_shell_call_output": _inline("lsho", "Its id is that of its call."),
        "computer_call": _inline("cu", "Bound to its screenshot by call_id; id and status are required."),
        "computer_call_output": _call("cuo", "A screenshot, inline or a file of the client's.", status=True),
        "reasoning": Rule(
            "rs",
            Travel.HOME,
            Ids.KEPT,
            "Encrypted content is read by the account that made it (WIRE.md section 1.2). Text in clear is refused by "
            "OpenAI ('content: array too long. Expected an array with maximum length 0', "
            "musistudio/claude-code-router#1783), but wanted by who wrote it. Without either it is a pointer. What was "
            "answered is in other items, so it can be left out.",
        ),
        "compaction": Rule(
            "cmp",
            Travel.MEMORY,
            Ids.KEPT,
            "Encrypted for the account that made it (WIRE.md section 1.2). In an output it stands for what is in the "
            "history anyway; in an input for what the client has thrown away.",
        ),
        "compaction_trigger": Rule(
            "ct",
            Travel.ONCE,
            Ids.DROPPED,
            "Has what is in front of it compacted, and must be the last of an input (openai SDK, CompactionTrigger).",
        ),
        "image_generation_call": _inline("ig", "The image is in its result; without it, it is a pointer."),
        "web_search_call": _inline("ws", "The query, without results; id and status are required."),
        "file_search_call": _inline("fs", "Queries, and results if they were asked for; id and status are required."),
        "code_interpreter_call": _inline(
            "ci", "It ran in a container, which others cannot enter (WIRE.md section 1.2)."
        ),
        "mcp_call": _inline("mcp", "Arguments and output are in it; id is required."),
        "mcp_list_tools": _inline("mcpl", "The tools are in it; id is required."),
        "mcp_approval_request": _inline("mcpr", "The answer refers to it by its id."),
        "mcp_approval_response": _inline("mcpa", "The client's; refers to the request, which is in front of it."),
        "additional_tools": _inline("at", "Tools from here on; some may run in a container."),
        "configuration_update": _inline("cfg", "The client's, from here on (openai SDK 3.57)."),
        "program": _inline("prg", "Its fingerprint must come back as it is (WIRE.md section 1.2)."),
        "program_output": _inline("prgo", "Bound to its program by call_id."),
        "agent_message": _inline("am", "In clear or encrypted: the parts of its content say so (openai SDK, beta)."),
    }
)

_UNKNOWN = _inline("item", "What it is, is for the upstreams to know.")
_FOLDED = {fold(name): name for name in (*RULES, "item_reference")}


def rule_of(kind: str) -> Rule:
    """The rule for items of type ``kind``, which :func:`kind_of_item` has given."""
    return RULES.get(kind, _UNKNOWN)


def kind_of_item(text: str | None) -> str:
    """The type that ``text`` stands for, in whatever spelling some reader may take; empty if there is none."""
    if not text or text in RULES:
        return text or ""
    if len(text) > MAX_NAME:
        return text
    folded = fold(text)
    return _FOLDED.get(folded, text) if folded else ""
