"""What each exchange writes, kind by kind (DESIGN.md sections 3, 5 and 6)."""

from __future__ import annotations

import pytest

from homeport.adapter import Adapter
from homeport.entries import EntryMaker
from homeport.errors import Reason, Rejected
from homeport.facts import Observed
from homeport.keys import Keyring, Kind, Tenant
from homeport.ledger import Ledger
from homeport.operations import Operation
from homeport.records import Conflict, Entry, Progress, Record, StaleRevision, Write, decode_record
from homeport.sealing import Sealer
from homeport.selectors import Inspected, Selector
from homeport.stores.base import CapacityExceeded, StoreUnavailable
from homeport.upstreams import Upstream
from support.asgi import settings

OWNER = Upstream("a", "fa", former=("fa-old",))
SETTINGS = settings(ttl=1000, pending_ttl=10, encrypted_ttl=70, tombstone_ttl=5)
TENANT = Tenant((b"t",))


class FakeState:
    def __init__(self) -> None:
        self.writes: list[tuple[Write, float]] = []
        self.known: set = set()
        self.error: Exception | None = None

    async def commit(self, write, owner, *, timeout, then=None):
        if self.error is not None:
            raise self.error
        assert (owner.upstream, owner.fingerprint) == ("a", "fa")
        self.writes.append((write, timeout))

    def knows(self, key):
        return key in self.known


class Book:
    """A ledger, and the entries that it wrote by kind and id."""

    def __init__(
        self, operation=Operation.CREATE, *, selectors=(), settings=SETTINGS, facts=None, adapter=None, **request
    ) -> None:
        self.state = FakeState()
        self.ring = Keyring([], namespace="n", route="r")
        entries = EntryMaker(
            TENANT, keyring=self.ring, settings=settings, adapter=adapter or Adapter(), sealer=Sealer({})
        )
        request_ = Inspected(tuple(selectors), **request)
        self.ledger = Ledger(operation, request_, entries, state=self.state, settings=settings)
        self.ledger.facts = facts or {}

    def entry(self, kind: Kind, opaque_id: str) -> Entry | None:
        key = self.ring.state_key(TENANT, kind, opaque_id)
        return next((e for w, _ in reversed(self.state.writes) for e in w.entries if e.key == key), None)

    def ttl(self, kind: Kind, opaque_id: str) -> object:
        entry = self.entry(kind, opaque_id)
        return "absent" if entry is None else entry.ttl


def observed(**changes) -> Observed:
    base = {"id": "resp_1", "status": "completed", "created_at": 7, "items": ["msg_1"], "encrypted": ["blob"]}
    return Observed(**{**base, "containers": ["cntr_1"], **changes})


async def test_a_finished_response() -> None:
    book = Book()
    await book.ledger.final(observed(), OWNER)
    assert [book.ttl(*k) for k in ((Kind.RESPONSE, "resp_1"), (Kind.ITEM, "msg_1"), (Kind.CONTAINER, "cntr_1"))] == [
        1000
    ] * 3
    assert book.ttl(Kind.ENCRYPTED, "blob") == 70
    entry = book.entry(Kind.RESPONSE, "resp_1")
    assert (entry.generation, entry.progress, entry.counted, entry.made) == (7, Progress.TERMINAL, True, True)
    assert (entry.owner, entry.former, entry.tombstone_ttl) == (b"fa", (b"fa-old",), 5)
    assert decode_record(entry.record) == Record("a", "fa", "completed", ttl=1000)
    assert not book.entry(Kind.ITEM, "msg_1").counted
    assert book.entry(Kind.ITEM, "msg_1").learned  # an id that is somebody else's costs nobody a paid answer
    assert not entry.learned
    assert len(book.state.writes) == 1
    assert book.state.writes[0][1] == SETTINGS.commit_timeout


async def test_a_turn_of_a_conversation_has_no_ttl_but_its_response() -> None:
    """§5: conversations, and the items of responses in one, have no TTL."""
    for selectors, conversation in (((), "conv_1"), ((Selector(Kind.CONVERSATION, "conv_1"),), None)):
        book = Book(selectors=selectors)
        await book.ledger.final(observed(conversation=conversation), OWNER)
        assert (book.ttl(Kind.CONVERSATION, "conv_1"), book.ttl(Kind.ITEM, "msg_1")) == (None, None)
        assert book.ttl(Kind.RESPONSE, "resp_1") == 1000
        assert book.entry(Kind.CONVERSATION, "conv_1").counted
        assert not book.entry(Kind.CONVERSATION, "conv_1").made


async def test_a_pending_response() -> None:
    book = Book()
    await book.ledger.pending(observed(status="in_progress"), OWNER)
    await book.ledger.pending(observed(status="in_progress"), OWNER)
    assert len(book.state.writes) == 1
    entry = book.entry(Kind.RESPONSE, "resp_1")
    assert (entry.ttl, entry.progress) == (10, Progress.PENDING)
    assert decode_record(entry.record).ttl == 0  # no read prolongs it
    assert book.ttl(Kind.ITEM, "msg_1") == "absent"


@pytest.mark.parametrize("said_by", ["request", "response"])
async def test_a_background_response_is_owned_in_full_from_the_start(said_by) -> None:
    book = Book(background=said_by == "request")
    await book.ledger.pending(observed(status="queued", background=said_by == "response"), OWNER)
    entry = book.entry(Kind.RESPONSE, "resp_1")
    assert (entry.ttl, entry.progress) == (1000, Progress.QUEUED)


@pytest.mark.parametrize(
    ("request_store", "response_store", "kept"),
    [
        (None, None, True),
        (True, None, True),
        (False, None, False),
        (False, True, True),
        (True, False, False),
        (None, False, False),
    ],
)
async def test_what_the_provider_says_of_store_counts(request_store, response_store, kept) -> None:
    """FEATURES 33, 34."""
    book = Book(store=request_store)
    await book.ledger.pending(observed(status="in_progress"), OWNER)
    await book.ledger.final(observed(store=response_store, conversation="conv_1"), OWNER)
    write = book.state.writes[-1][0]
    kinds = {e.kind for e in write.entries}
    if kept:
        assert kinds == {Kind.RESPONSE, Kind.CONVERSATION, Kind.ITEM, Kind.CONTAINER, Kind.ENCRYPTED}
        assert write.forget == ()
    else:
        assert kinds == {Kind.CONVERSATION, Kind.ENCRYPTED}
        # What was pending, if anything was, goes with its claim.
        assert len(write.forget) == (2 if request_store is not False else 0)


@pytest.mark.parametrize(
    ("operation", "kind", "ttl", "counted"),
    [
        (Operation.CONVERSATION_CREATE, Kind.CONVERSATION, None, True),
        (Operation.CONTAINER_CREATE, Kind.CONTAINER, 1000, False),
    ],
)
async def test_created_resources(operation, kind, ttl, counted) -> None:
    book = Book(operation)
    await book.ledger.final(observed(), OWNER)
    entry = book.entry(kind, "resp_1")
    assert (entry.ttl, entry.counted, entry.made) == (ttl, counted, True)
    assert len(book.state.writes[0][0].entries) == 1
    assert (book.ledger.will_record, book.ledger.will_count) == (True, counted)


IN_PATH = Selector(Kind.RESPONSE, "resp_1", in_path=True)


def reading(operation, record=Record("a", "fa", "queued"), selector=IN_PATH, **kwargs) -> Book:  # noqa: B008
    return Book(operation, selectors=[selector], facts={selector: record}, **kwargs)


async def test_a_poll_records_a_later_status_and_its_items_in_passing() -> None:
    book = reading(Operation.RETRIEVE)
    await book.ledger.seen(observed(), None)
    entry = book.entry(Kind.RESPONSE, "resp_1")
    assert (entry.progress, entry.made, entry.owner) == (Progress.TERMINAL, False, b"fa")
    assert book.entry(Kind.ITEM, "msg_1").learned
    assert book.state.writes[0][1] <= 1.0  # best effort: nobody is held for it


async def test_a_poll_without_news_writes_nothing() -> None:
    book = reading(Operation.RETRIEVE, Record("a", "fa", "completed"))
    await book.ledger.seen(observed(), None)
    assert book.state.writes == []


@pytest.mark.parametrize(
    ("operation", "selector", "ttl"),
    [
        (Operation.INPUT_ITEMS, IN_PATH, 1000),
        (Operation.ITEMS_LIST, Selector(Kind.CONVERSATION, "conv_1", in_path=True), None),
        (Operation.ITEMS_CREATE, Selector(Kind.CONVERSATION, "conv_1", in_path=True), None),
    ],
)
async def test_lists_of_input_give_items_only_and_only_new_ones(operation, selector, ttl) -> None:
    book = reading(operation, selector=selector)
    await book.ledger.seen(observed(id=None, items=["msg_1", "msg_2"]), None)
    ((write, _),) = book.state.writes
    assert {e.kind for e in write.entries} == {Kind.ITEM}
    assert all(e.learned and e.ttl == ttl for e in write.entries)
    known = reading(operation, selector=selector)
    known.state.known = {known.ring.state_key(TENANT, Kind.ITEM, i) for i in ("msg_1", "msg_2")}
    await known.ledger.seen(observed(id=None, items=["msg_1", "msg_2"]), None)
    assert known.state.writes == []


@pytest.mark.parametrize("fact", [Reason.MISSING, Reason.EXPIRED])
async def test_nothing_is_learned_about_what_is_not_owned(fact) -> None:
    book = reading(Operation.RETRIEVE, fact)
    await book.ledger.seen(observed(), None)
    body = Book(Operation.RETRIEVE, facts={Selector(Kind.RESPONSE, "other"): Record("a", "fa")})
    await body.ledger.seen(observed(), None)
    assert book.state.writes == body.state.writes == []


async def test_a_huge_answer_is_recorded_up_to_a_bound() -> None:
    book = Book()
    await book.ledger.final(observed(items=[f"msg_{i}" for i in range(5000)]), OWNER)
    assert len(book.state.writes[0][0].entries) < 1100
    assert book.entry(Kind.ITEM, "msg_4999") is not None


async def test_claims() -> None:
    book = Book()
    await book.ledger.final(observed(), OWNER)
    tenant = book.ring.tenant(TENANT)
    for kind, opaque_id in ((Kind.RESPONSE, "resp_1"), (Kind.ITEM, "msg_1"), (Kind.CONTAINER, "cntr_1")):
        entry = book.entry(kind, opaque_id)
        former = book.ring.claim_key("fa-old", kind, opaque_id)
        assert entry.claim.key.current == book.ring.claim_key("fa", kind, opaque_id).current
        assert entry.claim.key.older == former.all  # a place keeps its claims when its fingerprint changes
        assert (entry.claim.owner, entry.claim.ttl, entry.claim.counted) == (tenant.current, entry.ttl, False)
    assert book.entry(Kind.ENCRYPTED, "blob").claim is None
    for unclaimed in (
        Book(settings=settings(tenant_mode="single")),
        Book(settings=settings(shared_account_ok=True)),
    ):
        await unclaimed.ledger.final(observed(), OWNER)
        assert all(e.claim is None for w, _ in unclaimed.state.writes for e in w.entries)
    stateless = Book()
    await stateless.ledger.final(observed(), Upstream("a", "fa", stateful=False))
    assert all(e.claim is None for w, _ in stateless.state.writes for e in w.entries)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Conflict(), Reason.OWNER_CONFLICT),
        (StaleRevision(), Reason.COMMIT_FAILED),
        (StoreUnavailable("x"), Reason.COMMIT_FAILED),
        (CapacityExceeded("x"), Reason.COMMIT_FAILED),
    ],
)
async def test_failures_of_a_commit(error, reason) -> None:
    book = Book()
    book.state.error = error
    with pytest.raises(Rejected) as caught:
        await book.ledger.final(observed(), OWNER)
    assert caught.value.rejection.reason is reason
    poll = reading(Operation.RETRIEVE)
    poll.state.error = error
    await poll.ledger.seen(observed(), None)  # best effort


async def test_nothing_to_write_is_no_write() -> None:
    book = Book(store=False)
    await book.ledger.pending(observed(), OWNER)
    await book.ledger.final(observed(encrypted=[]), OWNER)
    assert book.state.writes == []


async def test_a_claim_does_not_end_before_a_record_that_use_prolongs() -> None:
    book = Book(settings=settings(refresh_on_read=True))
    await book.ledger.final(observed(), OWNER)
    assert book.entry(Kind.RESPONSE, "resp_1").claim.ttl is None
    assert book.ttl(Kind.RESPONSE, "resp_1") is not None
