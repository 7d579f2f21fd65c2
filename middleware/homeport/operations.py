"""Which Responses, Conversations or Containers operation a request is (WIRE.md section 1), or none of them.

An alias of a path must not walk around the gate, so every reading that a router, a proxy or an HTTP client may make of
it is tried: split before or after percent-decoding, with dot segments resolved or not, decoded twice, with backslashes
for slashes, or as the URL that an app makes of it. Readings that name different state are refused; what is forwarded
stays as it was sent.

An id is opaque: what is special in a path belongs to it (``a;b``, ``a%b``, ``a\\b``) unless the API could mean
something else by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import unquote_to_bytes

from homeport.errors import Reason, Rejected, ambiguous, reject
from homeport.keys import Kind

__all__ = ["MAX_ID_BYTES", "Match", "Operation", "OperationMatcher"]

MAX_ID_BYTES = 4096
_BAD_ID = f"Invalid ID in the path: expected UTF-8 of at most {MAX_ID_BYTES} bytes without NUL characters."
_MAX_PATH = 4 * MAX_ID_BYTES  # characters, decoded: two ids, and room


class Operation(StrEnum):
    """What a request asks for. ``*_OTHER`` is anything else below an id: gated by that id like the rest."""

    CREATE = "create"
    RETRIEVE = "retrieve"
    DELETE = "delete"
    CANCEL = "cancel"
    INPUT_ITEMS = "input_items"
    COMPACT = "compact"
    INPUT_TOKENS = "input_tokens"
    RESPONSE_OTHER = "response_other"
    CONVERSATION_CREATE = "conversation_create"
    CONVERSATION_RETRIEVE = "conversation_retrieve"
    CONVERSATION_UPDATE = "conversation_update"
    CONVERSATION_DELETE = "conversation_delete"
    ITEMS_CREATE = "items_create"
    ITEMS_LIST = "items_list"
    ITEM_RETRIEVE = "item_retrieve"
    ITEM_DELETE = "item_delete"
    CONVERSATION_OTHER = "conversation_other"
    CONTAINER_CREATE = "container_create"
    CONTAINER_RETRIEVE = "container_retrieve"
    CONTAINER_DELETE = "container_delete"
    CONTAINER_OTHER = "container_other"
    STEER = "steer"
    """A WebSocket frame that adds input to a response under way; no path leads to it, nor to the next one."""
    INJECT = "inject"
    COLLECTION = "collection"
    """A bare collection, not a create: a listing would answer for all tenants of the account."""

    @property
    def path_kind(self) -> Kind | None:
        """The kind of the id in the path; None without one."""
        return _PATH_KIND.get(self)

    @property
    def by_id(self) -> bool:
        """Whether the path holds an id."""
        return self in _PATH_KIND

    @property
    def reads_body(self) -> bool:
        """Whether the body may hold selectors and is inspected."""
        return self in _READS_BODY


_PATH_KIND = {
    **dict.fromkeys(
        (
            Operation.RETRIEVE,
            Operation.DELETE,
            Operation.CANCEL,
            Operation.INPUT_ITEMS,
            Operation.RESPONSE_OTHER,
        ),
        Kind.RESPONSE,
    ),
    **dict.fromkeys(
        (
            Operation.CONVERSATION_RETRIEVE,
            Operation.CONVERSATION_UPDATE,
            Operation.CONVERSATION_DELETE,
            Operation.ITEMS_CREATE,
            Operation.ITEMS_LIST,
            Operation.ITEM_RETRIEVE,
            Operation.ITEM_DELETE,
            Operation.CONVERSATION_OTHER,
        ),
        Kind.CONVERSATION,
    ),
    **dict.fromkeys(
        (Operation.CONTAINER_RETRIEVE, Operation.CONTAINER_DELETE, Operation.CONTAINER_OTHER), Kind.CONTAINER
    ),
}

_READS_BODY = frozenset(
    {
        Operation.CREATE,
        Operation.COMPACT,
        Operation.INPUT_TOKENS,
        Operation.CONVERSATION_CREATE,
        Operation.ITEMS_CREATE,
        Operation.STEER,
        Operation.INJECT,
    }
)

# "*" stands for one opaque segment. A path of a listed shape with a method that is not listed is ..._OTHER.
_ROUTES: dict[tuple[str, ...], dict[str, Operation]] = {
    ("responses",): {"POST": Operation.CREATE},
    ("responses", "*"): {"GET": Operation.RETRIEVE, "DELETE": Operation.DELETE},
    ("responses", "*", "cancel"): {"POST": Operation.CANCEL},
    ("responses", "*", "input_items"): {"GET": Operation.INPUT_ITEMS},
    ("conversations",): {"POST": Operation.CONVERSATION_CREATE},
    ("conversations", "*"): {
        "GET": Operation.CONVERSATION_RETRIEVE,
        "POST": Operation.CONVERSATION_UPDATE,
        "DELETE": Operation.CONVERSATION_DELETE,
    },
    ("conversations", "*", "items"): {"GET": Operation.ITEMS_LIST, "POST": Operation.ITEMS_CREATE},
    ("conversations", "*", "items", "*"): {"GET": Operation.ITEM_RETRIEVE, "DELETE": Operation.ITEM_DELETE},
    ("containers",): {"POST": Operation.CONTAINER_CREATE},
    ("containers", "*"): {"GET": Operation.CONTAINER_RETRIEVE, "DELETE": Operation.CONTAINER_DELETE},
    ("containers", "*", "files"): {},
    ("containers", "*", "files", "*"): {},
    ("containers", "*", "files", "*", "content"): {},
}
# POST only: with another method these words are ids like any other.
_RESPONSE_VERBS = {"compact": Operation.COMPACT, "input_tokens": Operation.INPUT_TOKENS}
_OTHER = {
    "responses": Operation.RESPONSE_OTHER,
    "conversations": Operation.CONVERSATION_OTHER,
    "containers": Operation.CONTAINER_OTHER,
}
_OF_ITEM = (Operation.ITEM_RETRIEVE, Operation.ITEM_DELETE)
_MAX_SHAPE = max(len(shape) for shape in _ROUTES)

_ABSOLUTE = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_URL_ENDS = re.compile(r"[?#]")
_SPECIAL = re.compile(r"[%\\?#\t\r\n\0]")
_C0_OR_SPACE = "".join(map(chr, range(0x21)))


@dataclass(frozen=True, slots=True)
class Match:
    """An operation and the id in its path, percent-decoded once and otherwise as sent; and that of an item below it."""

    operation: Operation
    path_id: str | None = field(default=None, repr=False)
    item_id: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class _Reading:
    match: Match
    known: bool  # the API has a path of this shape


class OperationMatcher:
    """Finds the operation of a request below one of ``prefixes`` (``HOMEPORT_PATH_PREFIXES``; "" is none)."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = frozenset(_static(prefix) for prefix in prefixes)
        self._longest = max((len(p) for p in self._prefixes), default=-1)

    def match(self, method: str, path: str, raw_path: bytes | None, root_path: str = "") -> Match | None:
        """The operation, or None for a request that is not ours.

        ``path``, ``raw_path`` and ``root_path`` are those of the ASGI scope. Raises :class:`Rejected`:
        AMBIGUOUS_SELECTOR for a path that reads as two operations or ids, INVALID_TYPE for an id that is not UTF-8,
        holds a NUL or is longer than 4096 bytes.
        """
        # Every request of the app comes here first.
        if not _names_ours(path) and not _hides_ours(path):
            return None
        return self._match(method.upper(), path, raw_path, root_path)

    def _match(self, method: str, path: str, raw_path: bytes | None, root_path: str) -> Match | None:
        if method == "OPTIONS":
            return None
        if len(path) > _MAX_PATH:
            raise ambiguous("its path is too long")  # every reading of it takes time
        root = _static(root_path)
        # Some servers leave the query in raw_path.
        ways = [] if raw_path is None else [[_unquote(s) for s in raw_path.partition(b"?")[0].split(b"/")]]
        plain = path[:1] == "/" and path[-1:] > " " and not _SPECIAL.search(path)
        texts = [path] if plain else [path, *_rereadings(path, root_path)]
        ways += [way for text in texts if (way := text.split("/")) not in ways]

        def read(normalise: Callable[[list[str]], list[str]]) -> _Reading | None:
            reading = None
            for way in ways:
                reading = _agree(reading, self._read(method, normalise(way), root))
            return reading

        literal = reading = read(_collapse)
        if any(s[:1] == "." for way in ways for s in way):
            reading = None
            for normalise in _RESOLVED:
                reading = _agree(reading, read(normalise))
            # Unresolved, an unknown tail such as x/../y is nothing that a router would serve.
            if literal is not None and literal.known:
                reading = _agree(reading, literal)
        return None if reading is None else reading.match

    def _read(self, method: str, segments: list[str], root: tuple[str, ...]) -> _Reading | None:
        whole = self._below_prefix(method, segments)
        if root and tuple(_bare(s) for s in segments[: len(root)]) == root:
            # An app that ignores root_path routes on the whole path.
            return _agree(self._below_prefix(method, segments[len(root) :]), whole)
        return whole

    def _below_prefix(self, method: str, segments: list[str]) -> _Reading | None:
        head = tuple(_bare(s) for s in segments[: self._longest + 1])
        for depth, word in enumerate(head):
            if word in _OTHER and head[:depth] in self._prefixes:
                return _read_resource(method, word, segments[depth + 1 :])
        return None


def _read_resource(method: str, resource: str, rest: list[str]) -> _Reading:
    """What ``rest``, the segments after the collection's name, asks for."""
    if not rest:
        return _Reading(Match(_ROUTES[(resource,)].get(method, Operation.COLLECTION)), known=True)
    if (
        resource == "responses"
        and method == "POST"
        and len(rest) == 1
        and (verb := _RESPONSE_VERBS.get(_bare(rest[0])))
    ):
        return _Reading(Match(verb), known=True)
    shape = _shape(resource, rest)
    methods = _ROUTES.get(shape)
    operation = (methods or {}).get(method, _OTHER[resource])
    _check_ids(s for s, word in zip(rest, shape[1:], strict=False) if word == "*")
    item = rest[2] if operation in _OF_ITEM else None
    return _Reading(Match(operation, rest[0], item), known=methods is not None)


def _shape(resource: str, rest: list[str]) -> tuple[str, ...]:
    # Ids and words alternate.
    words = ("*" if i % 2 == 0 else _bare(s) for i, s in enumerate(rest[:_MAX_SHAPE]))
    return (resource, *words)


def _names_ours(path: str) -> bool:
    folded = path.casefold()
    return "responses" in folded or "conversations" in folded or "containers" in folded


def _hides_ours(path: str) -> bool:
    """Whether any of :func:`_rereadings` may name a collection where ``path`` does not.

    Of its steps only decoding and dropping what is unseen put letters together that did not stand together.
    """
    shown = _visible(_decoded_again(path) if "%" in path else path)
    return shown is not path and _names_ours(shown)


def _agree(first: _Reading | None, second: _Reading | None) -> _Reading | None:
    """The one reading of two, ``first`` where ``second`` is a path that the API does not have."""
    if first is None or second is None:
        return first or second
    if not second.known:
        return first
    one, other = first.match, second.match
    # Who reads an id more than once misreads it wherever it stands: the id is still the one that was sent.
    if one == other or (one.operation is other.operation and other.path_id in _rereadings(one.path_id or "")):
        return _Reading(one, known=True)
    raise ambiguous("its path has several meanings")


def _rereadings(path: str, root_path: str = "") -> list[str]:
    """What else a decoded ``path`` may become: each step taken or not, in the order in which proxies and apps do it.

    h11 hands the absolute form of a target on as it is (RFC 9112 section 3.2.2). A proxy that routes on the decoded
    path may decode it again. URL parsers take a backslash for a slash, drop tabs and line ends, and what stands at the
    end and cannot be seen (WHATWG URL section 4.4). A decoded "?" or "#" ends the path of a URL that is made of it, a
    NUL a C string.
    """
    texts = [path]
    for step in (
        lambda text: _ABSOLUTE.sub("", text.removeprefix(root_path)) if "://" in text else text,
        lambda text: _decoded_again(text) if "%" in text else text,
        lambda text: text.replace("\\", "/"),
        _visible,
        lambda text: text.rstrip(_C0_OR_SPACE),
        lambda text: _URL_ENDS.split(text, maxsplit=1)[0],
        lambda text: text.partition("\0")[0],
    ):
        texts = list(dict.fromkeys((*texts, *map(step, texts))))
    return texts[1:]


def _check_ids(ids: Iterable[str]) -> None:
    for opaque in ids:
        try:
            size = len(opaque.encode())
        except UnicodeEncodeError:  # a surrogate stands for a byte that is not UTF-8
            raise Rejected(reject(Reason.INVALID_TYPE, message=_BAD_ID)) from None
        if size > MAX_ID_BYTES or "\0" in opaque:
            raise Rejected(reject(Reason.INVALID_TYPE, message=_BAD_ID))


def _unquote(segment: bytes) -> str:
    return unquote_to_bytes(segment).decode("utf-8", "surrogateescape")


def _decoded_again(text: str) -> str:
    return _unquote(text.encode("utf-8", "surrogatepass"))


def _visible(text: str) -> str:
    return text.replace("\t", "").replace("\r", "").replace("\n", "")


def _bare(segment: str) -> str:
    """A static segment as compared: without ``;parameters``, in one letter case."""
    return segment.partition(";")[0].casefold()


def _static(path: str) -> tuple[str, ...]:
    return tuple(_bare(s) for s in path.split("/") if s)


def _collapse(segments: list[str]) -> list[str]:
    return [s for s in segments if s]


def _resolve(segments: list[str], name: Callable[[str], str]) -> list[str]:
    kept: list[str] = []
    for segment in segments:
        match name(segment):
            case ".":
                pass
            case "..":
                del kept[-1:]
            case _:
                kept.append(segment)
    return kept


# RFC 3986 section 5.2.4 counts an empty segment, a//.. is a/, and knows no parameters; others differ in either.
_RESOLVED: tuple[Callable[[list[str]], list[str]], ...] = (
    lambda segments: _resolve(_collapse(segments), _bare),
    lambda segments: _collapse(_resolve(segments, _bare)),
    lambda segments: _resolve(_collapse(segments), str),
    lambda segments: _collapse(_resolve(segments, str)),
)
