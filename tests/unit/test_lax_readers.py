"""No JSON reader of any language sees a selector that homeport did not (DESIGN.md section 3).

Bodies are generated with selectors in all known places, in all the spellings that somebody may take for them. What
homeport accepts is read by small oracles, each lax in another way, and their selectors must be among homeport's.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.bodies import decode_body
from homeport.errors import Rejected
from homeport.frames import inspect_frame
from homeport.operations import Operation
from homeport.selectors import inspect_body
from support.codings import POLYGLOT, raw_deflate

Found = set[tuple[str, str]]


class Pairs(list):
    """An object with every key that was written."""


# -- the oracles


def _same(text: str) -> str:
    return text


def _camel(text: str) -> str:
    """protobuf's JSON takes previousResponseId and previous_response_id for one field."""
    return re.sub(r"_(.)", lambda found: found[1].upper(), text)


def _simple_case(text: str) -> str:
    """Letters one by one through upper case, as Java's equalsIgnoreCase and Go's EqualFold do."""
    return "".join(c.upper().lower() if len(c.upper()) == 1 else c for c in text)


def _words(text: str) -> str:
    return re.sub(r"[\s_.-]+", "", text).lower()


def _until_nul(text: str) -> str:
    return text.split("\0")[0]


@dataclass(frozen=True)
class Reader:
    """How one kind of software reads a body: ``key`` is what it makes of keys, ``value`` of names in values."""

    key: Callable[[str], str] = _same
    value: Callable[[str], str] = _same
    last_wins: bool = True
    merges: bool = False  # extra_body, as openai's SDK does

    def parse(self, data: bytes) -> Any:
        text = data.decode(json.detect_encoding(data), "surrogateescape").lstrip("\ufeff \t\r\n")
        try:
            return json.JSONDecoder(object_pairs_hook=Pairs, strict=False).raw_decode(text)[0]
        except (ValueError, RecursionError):
            return None

    def get(self, found: Any, name: str) -> Any:
        if not isinstance(found, Pairs):
            return None
        values = [v for k, v in found if self.key(k) == self.key(name)]
        return values[-1 if self.last_wins else 0] if values else None

    def text(self, value: Any) -> Any:
        return self.value(value) if isinstance(value, str) else value

    def selectors(self, data: bytes, operation: Operation) -> Found:
        """The hard references, in the plainest reading of WIRE.md section 1.2."""
        top = self.parse(data)
        if self.merges and isinstance(extra := self.get(top, "extra_body"), Pairs):
            top = Pairs([*top, *extra])
        if operation in (Operation.CONVERSATION_CREATE, Operation.ITEMS_CREATE):
            return set(self.items(self.get(top, "items")))
        conversation = self.get(top, "conversation")
        if isinstance(conversation, Pairs):
            conversation = self.get(conversation, "id")
        return {
            *_named("response", self.get(top, "previous_response_id")),
            *_named("conversation", conversation),
            *self.items(self.get(top, "input")),
            *self.containers(self.get(top, "tools")),
        }

    def items(self, value: Any) -> Iterator[tuple[str, str]]:
        for item in self.objects(value):
            if self.points(item):
                yield from _named("item", self.get(item, "id"))
            yield from self.containers(self.get(item, "tools"))

    def points(self, item: Pairs) -> bool:
        def absent(name: str) -> bool:
            return not self.text(self.get(item, name))

        kind = self.text(self.get(item, "type"))
        contents = {
            "reasoning": "encrypted_content",
            "compaction": "encrypted_content",
            "image_generation_call": "result",
        }
        content = next((c for k, c in contents.items() if kind == self.value(k)), None)
        return (
            kind == self.value("item_reference")
            or (not kind and absent("role"))
            or (content is not None and absent(content))
        )

    def containers(self, value: Any) -> Iterator[tuple[str, str]]:
        for tool in self.objects(value):
            environment = self.get(tool, "environment")
            for holder, name in ((tool, "container"), (tool, "container_id"), (environment, "container_id")):
                inner = self.get(holder, name)
                yield from _named("container", self.get(inner, "id") if isinstance(inner, Pairs) else inner)
            yield from self.containers(self.get(tool, "tools"))

    def objects(self, value: Any) -> Iterator[Pairs]:
        if isinstance(value, Pairs):
            yield value
        elif isinstance(value, list):
            for element in value:
                yield from self.objects(element)


def _named(kind: str, value: Any) -> Found:
    """A value of another type is a reference as well: to somebody it is its text."""
    return set() if value is None or value == "" else {(kind, value if isinstance(value, str) else repr(value))}


READERS = {
    "last wins": Reader(),
    "first wins": Reader(last_wins=False),
    "go": Reader(_simple_case),
    "java": Reader(_simple_case, _simple_case, last_wins=False),
    "protobuf": Reader(_camel, _camel),
    "words": Reader(_words, _words),
    "c": Reader(_until_nul, _until_nul),
    "trimming": Reader(str.strip, str.strip, last_wins=False),
    "openai": Reader(merges=True),
}


# -- the bodies

_NAMED_HERE = ("x1", "x2", "x3")
_TYPES = ("item_reference", "reasoning", "compaction", "image_generation_call", "message", "new", "", None)
_WRONG = (
    "5",
    "true",
    "[]",
    "{}",
    '["x1"]',
    '{"id":"x1"}',
    '[["id","x1"]]',
    "NaN",
    '"\\ud800"',
    '"x1\\u0000"',
    "1" * 500,
)
_MARKS: list[Callable[[bytes], bytes]] = [
    lambda b: b"\xef\xbb\xbf" + b,
    lambda b: b + b'{"previous_response_id":"x3"}',
    lambda b: b + b"\0",
    lambda b: b'{"previous_response_id":"x3"}' + b,
    lambda b: b.replace(b"}", b",}"),
    lambda b: b.decode().encode("utf-16"),
    lambda b: b.decode().encode("utf-16-le"),
    lambda b: b.decode().encode("utf-32-be"),
]


class Writer:
    """Writes one body. ``wild`` is how probable it is that a thing is not written as it should be."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.wild = random.choice((0.0, 0.02, 0.05, 0.2))

    def odd(self) -> bool:
        return self.random.random() < self.wild

    def spelling(self, name: str) -> str:
        if not self.odd():
            return json.dumps(name)
        written = self.random.choice(
            (
                name.upper(),
                name.title(),
                _camel(name),
                name.replace("_", "-"),
                f" {name}\t",
                f"{name}\0x",
                name.replace("s", "\u017f").replace("k", "\u212a"),
                name.replace("i", "\u0131"),
                None,
            )
        )
        return f'"{"".join(f"{chr(92)}u{ord(c):04x}" for c in name)}"' if written is None else json.dumps(written)

    def value(self, *usual: object) -> str:
        return self.random.choice(_WRONG) if self.odd() else json.dumps(self.random.choice(usual))

    def object(self, **members: Callable[[], str]) -> str:
        names = [n for n in members if self.random.random() < 0.4]
        if names and self.odd():
            names.append(self.random.choice(names))
        self.random.shuffle(names)
        space = self.random.choice(("", " ", "\n"))
        return "{" + ",".join(f"{self.spelling(n)}{space}:{members[n]()}" for n in names) + "}"

    def array(self, element: Callable[[], str]) -> str:
        elements = [element() for _ in range(self.random.randrange(3))]
        if self.odd():
            return elements[0] if elements else self.random.choice(_WRONG)
        return "[" + ",".join(elements) + "]"

    def id(self) -> str:
        return self.value(*_NAMED_HERE, *_NAMED_HERE, None, "")

    def holder(self) -> str:
        return self.id() if self.random.random() < 0.5 else self.object(id=self.id, type=lambda: self.value("auto"))

    def type(self) -> str:
        name = self.random.choice(_TYPES)
        return self.spelling(name) if name and not self.odd() else self.value(name)

    def full(self) -> str:
        return self.value("\0", "\0x", " ") if self.odd() else self.value("text", "text", None, "")

    def tool(self, depth: int = 0) -> str:
        return self.object(
            type=lambda: self.value("shell", "code_interpreter"),
            container=self.holder,
            container_id=self.id,
            environment=lambda: self.object(type=lambda: self.value("container_reference"), container_id=self.id),
            tools=lambda: self.array(lambda: self.tool(depth + 1)) if depth < 2 else "null",
        )

    def item(self) -> str:
        return self.object(
            type=self.type,
            id=self.id,
            role=self.full,
            encrypted_content=self.full,
            result=self.full,
            content=lambda: self.value("hi"),
            tools=lambda: self.array(self.tool),
        )

    def items(self) -> str:
        return self.value("hi") if self.random.random() < 0.2 else self.array(self.item)

    def continuing(self) -> dict[str, Callable[[], str]]:
        one = self.random.choice(("previous_response_id", "conversation"))
        both = ("previous_response_id", "conversation") if self.odd() else (one,)
        return {
            **{name: self.id if name == "previous_response_id" else self.holder for name in both},
            "input": self.items,
            "items": self.items,
            "tools": lambda: self.array(self.tool),
        }

    def decoy(self) -> str:
        return self.object(**self.continuing())

    def body(self) -> bytes:
        extra = {"extra_body": self.decoy} if self.odd() else {}
        top = self.object(
            **self.continuing(),
            **extra,
            model=lambda: self.value("m"),
            stream=lambda: self.value(True),
            store=lambda: self.value(False),
            metadata=self.decoy,
            response=self.decoy,
            text=lambda: self.value("{}", '","previous_response_id":"x1'),
        ).encode()
        return self.random.choice(_MARKS)(top) if self.odd() else top


_OPERATIONS = [Operation.CREATE] * 4 + [Operation.COMPACT, Operation.ITEMS_CREATE]


def seen(operation: Operation, body: bytes) -> Found | None:
    """The hard selectors that homeport sees; None if it refuses the body."""
    try:
        return {(s.kind.value, s.id) for s in inspect_body(operation, body, max_selectors=256).selectors if s.hard}
    except Rejected:
        return None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_reader_sees_a_selector_that_homeport_did_not(seed: int) -> None:
    writer = Writer(Random(seed))
    for _ in range(60):
        body, operation = writer.body(), writer.random.choice(_OPERATIONS)
        ours = seen(operation, body)
        if ours is not None:
            for name, reader in READERS.items():
                assert reader.selectors(body, operation) <= ours, (name, body)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_no_server_sees_a_selector_in_a_message_that_homeport_did_not(seed: int) -> None:
    """A WebSocket's creates are bodies with a type in front (WIRE.md section 1.3)."""
    writer = Writer(Random(seed))
    for _ in range(60):
        body = writer.body()
        message = body.replace(b"{", b'{"type":"response.create",', 1) if body[1:].strip() else body
        try:
            frame = inspect_frame(message, max_selectors=1 << 10)
        except Rejected:
            continue
        ours = {(s.kind.value, s.id) for s in frame.request.selectors}
        for name, reader in READERS.items():
            assert reader.selectors(body, Operation.CREATE) <= ours, (name, message)


def test_the_generated_bodies_are_worth_their_time() -> None:
    """Many are accepted with selectors, and many are refused."""
    outcomes = [seen(Operation.CREATE, Writer(Random(seed)).body()) for seed in range(500)]
    assert sum(1 for found in outcomes if found) > 100
    assert outcomes.count(None) > 100


def test_the_oracles_see_what_they_should() -> None:
    assert READERS["last wins"].selectors(POLYGLOT, Operation.CREATE) == {("response", "resp_victim")}
    assert seen(Operation.CREATE, brotli.decompress(POLYGLOT)) == set()
    for name, body in {
        "first wins": '{"previous_response_id":"x1","previous_response_id":"x2"}',
        "go": '{"previou\u017f_Response_ID":"x1"}',
        "protobuf": '{"previousResponseId":"x1"}',
        "words": '{"previous.response-id":"x1"}',
        "c": '{"previous_response_id\\u0000":"x1"}',
        "trimming": '{" previous_response_id\\n":"x1"}',
        "openai": '{"extra_body":{"previous_response_id":"x1"}}',
    }.items():
        for written in (body.encode(), body.encode("utf-16"), body.encode() + b"}"):
            assert READERS[name].selectors(written, Operation.CREATE) == {("response", "x1")}


_PACKERS: dict[str, Callable[[bytes], bytes]] = {"deflate": raw_deflate, "br": lambda b: brotli.compress(b, quality=1)}


@pytest.mark.parametrize("name", _PACKERS)
def test_a_reader_that_ignores_the_coding_sees_nothing_at_all(name: str) -> None:
    for seed in range(300):
        body = Writer(Random(seed)).body()
        for coded in (_PACKERS[name](body), body, POLYGLOT):
            try:
                decode_body(coded, [name.encode()], limit=1 << 20)
            except Rejected:
                continue
            for reader in READERS.values():
                assert reader.selectors(coded, Operation.CREATE) == set()


def test_a_coded_body_that_is_json_as_well_is_ambiguous_in_any_layer() -> None:
    for coded, names in ((POLYGLOT, b"br"), (zlib.compress(POLYGLOT), b"br, deflate")):
        with pytest.raises(Rejected) as caught:
            decode_body(coded, [names], limit=1 << 20)
        assert caught.value.rejection.code == "ambiguous_selector"
