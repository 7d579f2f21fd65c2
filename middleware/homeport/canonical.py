"""A history as one input: what was said before, in the order in which it was said, for an upstream that does not know.

Pure, and linear in the size of the history. What travels is in ``homeport.portability``; it keeps its bytes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from homeport.facts import strict
from homeport.items import MINTED, Item, as_array, elements, is_minted, objects, read_items
from homeport.members import invalid_type, kind_of
from homeport.pairing import Sent, paired
from homeport.portability import Ids, Travel, rule_of
from homeport.rewriting import spliced
from homeport.strictjson import Invalid
from homeport.turns import Turn

__all__ = [
    "Composition",
    "Kept",
    "Unportable",
    "compose",
    "ids_of",
    "input_items",
    "items_by_id",
    "output_items",
    "with_ids",
]

_ENCRYPTED = "encrypted content"
_CONTAINER = "a container of a hosted tool"
_FORMAT = "an item of a type that the upstream would not see"
_REFERENCE = "a reference to an item that is not kept"
_TOO_MANY = "more items than are sent again"

_MAX_ITEMS = 50_000  # each takes some microseconds, however small it is


class Unportable(Exception):
    """A history cannot go where it would have to; ``what`` is in its way, in words for a client, without ids."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True, slots=True)
class Composition:
    """``input`` is the whole input, a JSON array. ``given`` is what the request itself adds to the history.

    ``dropped`` says how many items of which type were left out, as only their maker can read them.
    """

    input: bytes = field(repr=False)
    given: bytes = field(repr=False)
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Kept:
    """An item that others may refer to, and the fingerprint of the upstream whose turn it is in."""

    item: bytes = field(repr=False)
    fingerprint: str


def input_items(raw: msgspec.Raw | bytes | None) -> bytes:
    """The ``input`` of a request as a JSON array of items: a text is one message of the user, nothing is no item.

    Raises :class:`homeport.errors.Rejected` with INVALID_TYPE for anything else.
    """
    text = b"" if raw is None else bytes(raw)
    if text in (b"", b"null", b'""'):
        return b"[]"
    if text[:1] == b'"':
        return b'[{"type":"message","role":"user","content":[{"type":"input_text","text":' + text + b"}]}]"
    if text[:1] == b"[":
        return text
    raise invalid_type("input", "an array", kind_of(msgspec.Raw(text)))


class _Response(msgspec.Struct):
    output: msgspec.Raw = msgspec.Raw()


_responses = msgspec.json.Decoder(_Response)


def output_items(view: bytes | memoryview) -> bytes | None:
    """The ``output`` of a response object as a JSON array of items, strict JSON; None if there is none to be read."""
    found = _output(view)
    if found is None and (plain := strict(view)) is not None:
        found = _output(plain)
    return found


def _output(view: bytes | memoryview) -> bytes | None:
    try:
        output = bytes(_responses.decode(view).output)
        output.decode()  # what is skipped may be broken
        found = elements(output)
    except (ValueError, RecursionError):
        return None
    if any(bytes(memoryview(raw)[:1]) not in (b"{", b"n") for raw in found):
        return None  # some client may read it as content
    items = objects(output)
    return output if len(items) == len(found) else as_array(items)


def with_ids(items: bytes) -> bytes:
    """The JSON array ``items``, each with an id, so that it can be listed and referred to: random where it has none.

    Raises :class:`homeport.strictjson.Invalid`.
    """
    found = []
    for item in read_items(items):
        if item.id is not None or item.kind == "item_reference":  # with an id, what has no type is a reference
            found.append(item.raw)
            continue
        new = f"{rule_of(item.kind).prefix}_{MINTED}{secrets.token_hex(16)}"
        found.append(spliced(memoryview(item.raw), {"id": msgspec.json.encode(new)}))
    return as_array(found)


def ids_of(items: bytes) -> list[str]:
    """The ids in the JSON array ``items``. Raises :class:`homeport.strictjson.Invalid`."""
    return [item.id for item in read_items(items) if item.id is not None and not item.pointer]


def items_by_id(turns: Sequence[Turn], ids: Collection[str]) -> Mapping[str, Kept]:
    """The items in ``turns`` with one of ``ids``, no mere pointers. Raises :class:`homeport.strictjson.Invalid`."""
    return {
        item.id: Kept(bytes(item.raw), turn.fingerprint)
        for turn in turns
        for array in (turn.given, turn.output)
        for item in read_items(array)
        if item.id is not None and item.id in ids and not item.pointer
    }


def compose(
    turns: Sequence[Turn],
    given: bytes,
    *,
    referred: Mapping[str, Kept],
    target: Collection[str],
    takes: Collection[str] | None = None,
) -> Composition:
    """The input that says all of ``turns``, the oldest first, and then ``given``, the JSON array of new items.

    ``target`` are the fingerprints of the upstream that it is for, none for any; ``takes`` are the types of items that
    it takes, None for all. ``referred`` are the items that pointers mean, by id, as far as they are in no turn. Raises
    :class:`Unportable`, also for what cannot be read, as it is nested too deep for one, and for more than 50,000 items.

    What a pointer means is put in its place, unless it stands in front of it already: a repetition is refused
    (``Duplicate item found with id``). The output of a turn whose encrypted reasoning goes home goes as it came: its
    items are bound to each other by their ids.
    """
    composer = _Composer(referred, target, takes)
    try:
        for turn in turns:
            composer.add(turn)
        before = len(composer.items)
        composer.add_new(given)
    except Invalid:
        raise Unportable("an item that cannot be read") from None
    new = as_array(item.raw for item in composer.items[before:])
    return Composition(as_array(item.raw for item in paired(composer.items)), new, composer.dropped)


class _Composer:
    def __init__(self, referred: Mapping[str, Kept], target: Collection[str], takes: Collection[str] | None) -> None:
        self.items: list[Sent] = []
        self.dropped: dict[str, int] = {}
        self._referred = referred
        self._target = target
        self._takes = takes
        self._count = 0
        self._there: set[str] = set()  # ids of items that are in the history so far, whether they travel or not

    def add(self, turn: Turn) -> None:
        if turn.too_large or not turn.complete:
            raise Unportable("a turn that is not kept")
        home = self._is_home(turn.fingerprint)
        for item in self._read(turn.given):
            if item.pointer:
                self._resolve(item)
            elif self._travels(item, home=home, output=False):
                self._append(item, _without_minted(item))
            self._note(item)
        output = self._read(turn.output)
        bound = home and any(item.kind == "reasoning" and item.encrypted for item in output)
        for item in output:
            if self._travels(item, home=home, output=True):
                self._append(item, _without_minted(item) if bound else self._renamed(item))
            self._note(item)

    def add_new(self, given: bytes) -> None:
        """The items of the request: who can read them is the business of those who chose where it goes."""
        for item in self._read(given):
            if item.pointer:
                self._resolve(item)
            else:
                self._append(item, _without_minted(item))
            self._note(item)

    def _read(self, array: bytes) -> list[Item]:
        raws = objects(array)
        self._count += len(raws)
        if self._count > _MAX_ITEMS:
            raise Unportable(_TOO_MANY)
        return [Item(raw) for raw in raws]

    def _is_home(self, fingerprint: str) -> bool:
        return fingerprint in self._target

    def _note(self, item: Item) -> None:
        if item.id is not None:
            self._there.add(item.id)

    def _append(self, item: Item, raw: msgspec.Raw | bytes) -> None:
        self.items.append(Sent(raw, item.call_id, item.result, item.from_outside))

    def _drop(self, item: Item) -> None:
        self.dropped[item.kind] = self.dropped.get(item.kind, 0) + 1

    def _resolve(self, pointer: Item) -> None:
        if pointer.id in self._there:
            return
        kept = self._referred.get(pointer.id or "")
        if kept is not None:
            item = Item(kept.item)
            # Nothing else says what a compaction does, as its turn is not here.
            if self._travels(item, home=self._is_home(kept.fingerprint), output=False):
                self._append(item, self._renamed(item))
        elif pointer.kind == "reasoning":
            self._drop(pointer)
        else:
            raise Unportable(_REFERENCE)

    def _travels(self, item: Item, *, home: bool, output: bool) -> bool:
        travels = rule_of(item.kind).travels
        if travels is Travel.ONCE:
            return False
        taken = self._takes is None or item.kind in self._takes
        optional = travels is Travel.HOME or (travels is Travel.MEMORY and output)
        if optional and (item.pointer or not home or not taken):
            self._drop(item)
            return False
        if item.pointer:  # an image: there is none, or it was not shown
            if item.status != "failed":
                raise Unportable(_REFERENCE)
            self._drop(item)
            return False
        if not taken:
            raise Unportable(_FORMAT)
        if not home and item.encrypted:
            raise Unportable(_ENCRYPTED)
        if not home and item.in_container:
            raise Unportable(_CONTAINER)
        return True

    def _renamed(self, item: Item) -> msgspec.Raw | bytes:
        """An item of an output as an input: without the ids that an upstream gave it, as far as its schema allows."""
        rule = rule_of(item.kind)
        if item.from_outside or rule.ids is Ids.KEPT:
            return _without_minted(item)
        changes: dict[str, bytes | None] = {}
        if rule.ids is Ids.NEW:
            # The same each time, as some proxies cache by request; another one at each place.
            digest = hashlib.sha256(b"%d:" % len(self.items) + memoryview(item.raw)).hexdigest()
            changes["id"] = msgspec.json.encode(f"{rule.prefix}_{MINTED}{digest[:32]}")
            if item.status is None:
                changes["status"] = b'"completed"'
        else:
            changes["id"] = None
            if not rule.status:
                changes["status"] = None
        return spliced(memoryview(item.raw), changes)


def _without_minted(item: Item) -> msgspec.Raw | bytes:
    """An item as it was before homeport gave it an id; a model's message keeps one, as strict readers want it."""
    if not is_minted(item.id) or item.role == "assistant":
        return item.raw
    return spliced(memoryview(item.raw), {"id": None})
