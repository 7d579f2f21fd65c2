"""The ownership rules of DESIGN.md section 5, as one pure function; stores are held to them by the contract suite."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from homeport.keys import Digests, Keyring, Kind, StateKey, Tenant
from homeport.records import (
    Conflict,
    Entry,
    Progress,
    Record,
    Row,
    RowState,
    StaleRevision,
    UnreadableRecord,
    Write,
    decode_record,
    encode_record,
    progress_of,
)
from homeport.settling import Insert, Remove, Replace, settle

KEY = StateKey(b"k" * 32)
TENANT = Digests(b"t" * 32)


def entry(**changes) -> Entry:
    base = Entry(KEY, Kind.RESPONSE, b"owner-a", b"record", ttl=100.0, tombstone_ttl=50.0)
    return replace(base, **changes)


def write(*entries: Entry, write_id: bytes = b"w1", exchange: bytes = b"x1", forget=()) -> Write:
    return Write(write_id, exchange, TENANT, entries, forget)


def row(**changes) -> Row:
    base = Row(KEY.current, b"owner-a", RowState.LIVE, 3, 0, Progress.TERMINAL, b"x0", b"w0", b"record", 80.0)
    return replace(base, **changes)


def settled(stored: Row | None, new: Entry, **kwargs):
    changes = settle({stored.digest: stored} if stored else {}, write(new, **kwargs))
    assert len(changes) <= 1
    return changes[0] if changes else None


def test_a_new_key_is_inserted() -> None:
    assert settled(None, entry()) == Insert(entry())


def test_first_owner_wins() -> None:
    with pytest.raises(Conflict):
        settled(row(), entry(owner=b"owner-b"))


def test_a_former_name_of_the_owner_is_the_owner() -> None:
    change = settled(row(), entry(owner=b"owner-a2", former=(b"owner-a",), kind=Kind.CONVERSATION))
    assert isinstance(change, Replace)


def test_the_same_write_and_the_same_facts_change_nothing() -> None:
    assert settled(row(write_id=b"w1", owner=b"owner-b"), entry()) is None
    assert settled(row(), entry()) is None


@pytest.mark.parametrize("stored", [Progress.PENDING, Progress.QUEUED, Progress.IN_PROGRESS])
def test_status_moves_forwards(stored) -> None:
    change = settled(row(progress=stored), entry(progress=Progress.TERMINAL))
    assert isinstance(change, Replace)
    assert (change.revision, change.ttl) == (4, 100.0)


@pytest.mark.parametrize("late", [Progress.PENDING, Progress.QUEUED, Progress.IN_PROGRESS, Progress.TERMINAL])
def test_a_terminal_status_stands(late) -> None:
    assert settled(row(record=b"cancelled"), entry(progress=late, record=b"completed")) is None


def test_status_never_moves_backwards() -> None:
    assert settled(row(progress=Progress.IN_PROGRESS), entry(progress=Progress.QUEUED)) is None


def test_what_is_kept_of_a_response_follows_its_status() -> None:
    kept = {"kind": Kind.RESOURCE}
    late = entry(**kept, progress=Progress.TERMINAL, record=b"completed")
    assert settled(row(record=b"cancelled"), late) is None
    assert settled(row(progress=Progress.IN_PROGRESS), entry(**kept, progress=Progress.QUEUED)) is None
    assert isinstance(settled(row(progress=Progress.IN_PROGRESS), late), Replace)
    more = entry(**kept, progress=Progress.IN_PROGRESS, record=b"more output")
    assert isinstance(settled(row(progress=Progress.IN_PROGRESS), more), Replace)
    assert settled(row(state=RowState.DELETED), late) is None


def test_the_input_of_a_response_as_the_app_lists_it_stands_against_what_was_sent() -> None:
    listed = entry(kind=Kind.INPUT, record=b"listed")
    assert isinstance(settled(row(progress=Progress.PENDING), listed), Replace)
    sent = entry(kind=Kind.INPUT, record=b"sent", progress=Progress.PENDING)
    assert settled(row(record=b"listed", remaining=100.0), sent) is None


def test_a_newer_generation_of_the_same_owner_starts_again() -> None:
    change = settled(row(generation=5), entry(generation=6, progress=Progress.PENDING, made=True))
    assert isinstance(change, Replace)


def test_a_late_end_of_an_older_generation_is_ignored() -> None:
    assert settled(row(generation=6, progress=Progress.PENDING), entry(generation=5)) is None


def test_an_exchange_may_move_what_it_left_pending_itself() -> None:
    """§6: a proxy may fall back in mid-stream; the last report before the terminal wins."""
    stored = row(exchange=b"x1", progress=Progress.PENDING)
    change = settled(stored, entry(owner=b"owner-b"))
    assert isinstance(change, Replace)
    again = settled(replace(stored, progress=Progress.IN_PROGRESS), entry(owner=b"b", progress=Progress.PENDING))
    assert isinstance(again, Replace)  # the last report counts, however far the first one had come
    with pytest.raises(Conflict):
        settled(replace(stored, exchange=b"x0"), entry(owner=b"owner-b"))
    with pytest.raises(Conflict):
        settled(replace(stored, progress=Progress.TERMINAL), entry(owner=b"owner-b"))


def test_c8_a_conversation_counts_its_turns() -> None:
    """CASES C8."""
    change = settled(row(remaining=None), entry(kind=Kind.CONVERSATION, ttl=None))
    assert isinstance(change, Replace)
    assert (change.revision, change.ttl) == (4, None)


def test_c2_a_stale_revision_fails() -> None:
    """CASES C2."""
    with pytest.raises(StaleRevision):
        settled(row(), entry(kind=Kind.CONVERSATION, expected_revision=2))
    with pytest.raises(StaleRevision):
        settled(None, entry(kind=Kind.CONVERSATION, expected_revision=2))
    with pytest.raises(StaleRevision):
        settled(row(state=RowState.EXPIRED), entry(kind=Kind.CONVERSATION, expected_revision=2))
    assert isinstance(settled(row(), entry(kind=Kind.CONVERSATION, expected_revision=3)), Replace)


@pytest.mark.parametrize(("stored", "new", "expected"), [(80.0, 100.0, 100.0), (80.0, None, None)])
def test_an_alias_lives_as_long_as_its_longest_reason(stored, new, expected) -> None:
    change = settled(row(remaining=stored), entry(kind=Kind.ITEM, ttl=new))
    assert isinstance(change, Replace)
    assert change.ttl == expected
    assert settled(row(remaining=None), entry(kind=Kind.ITEM, ttl=100.0)) is None


def test_an_expired_row_may_be_owned_anew() -> None:
    assert isinstance(settled(row(state=RowState.EXPIRED), entry(owner=b"owner-b")), Replace)


def test_a_late_commit_does_not_bring_back_what_was_deleted() -> None:
    deleted = row(state=RowState.DELETED, exchange=b"x1", generation=5)
    assert settled(deleted, entry(generation=5)) is None
    assert settled(replace(deleted, generation=0), entry()) is None
    assert isinstance(settled(deleted, entry(generation=6, made=True)), Replace)
    assert settled(deleted, entry(generation=6)) is None  # seen in passing: a list, a poll
    unknown = row(state=RowState.DELETED)
    assert settled(unknown, entry()) is None
    assert isinstance(settled(unknown, entry(made=True)), Replace)
    conversation = entry(kind=Kind.CONVERSATION, ttl=None)
    assert settled(unknown, conversation) is None  # a turn that ran while its conversation was deleted


CLAIM = StateKey(b"c" * 32)


def claimed(**changes) -> Entry:
    claim = Entry(CLAIM, Kind.CLAIM, b"tenant-a", b"", ttl=100.0, tombstone_ttl=50.0)
    return entry(claim=claim, **changes)


def test_an_id_that_another_tenant_has_claimed_is_a_conflict() -> None:
    other = row(digest=CLAIM.current, owner=b"tenant-b")
    with pytest.raises(Conflict):
        settle({CLAIM.current: other}, write(claimed()))
    assert settle({}, write(claimed())) == [Insert(claimed()), Insert(claimed().claim)]


def test_what_was_learned_in_passing_is_left_out_where_it_conflicts() -> None:
    other = row(digest=CLAIM.current, owner=b"tenant-b")
    free = entry(key=StateKey(b"f" * 32), kind=Kind.ITEM)
    taken = claimed(kind=Kind.ITEM, learned=True)
    assert settle({CLAIM.current: other}, write(taken, free)) == [Insert(free)]
    assert settle({KEY.current: row(owner=b"owner-b")}, write(entry(kind=Kind.ITEM, learned=True), free)) == [
        Insert(free)
    ]


def test_forget_removes_only_what_the_exchange_left_pending() -> None:
    def forgotten(stored: Row) -> list[object]:
        return settle({stored.digest: stored}, write(forget=(KEY,)))

    assert forgotten(row(exchange=b"x1", progress=Progress.PENDING)) == [Remove(KEY.current)]
    assert forgotten(row(exchange=b"x1")) == []
    assert forgotten(row(exchange=b"x0", progress=Progress.PENDING)) == []


def test_an_owner_written_under_an_older_secret_still_owns() -> None:
    key = StateKey(b"n" * 32, (KEY.current,))
    with pytest.raises(Conflict):
        settle({KEY.current: row()}, write(entry(key=key, owner=b"owner-b")))
    assert settle({KEY.current: row()}, write(entry(key=key))) == []


CHAT = StateKey(b"h" * 32)
BEFORE = StateKey(b"b" * 32, (b"B" * 32,))


def stood_on(new: Entry, *stored: Row) -> bytes | None:
    """What the row of ``new`` stands on when it has been written."""
    (change,) = settle({r.digest: r for r in stored}, write(new))
    assert not isinstance(change, Remove)
    return change.parent


def chat(**changes) -> Row:
    return row(**{"digest": CHAT.current, "parent": b"last" * 8, **changes})


def test_a_row_stands_on_its_parent_wherever_that_is() -> None:
    new = entry(kind=Kind.TURN, parent=BEFORE)
    assert stood_on(new) == BEFORE.current
    assert stood_on(new, row(digest=BEFORE.older[0])) == BEFORE.older[0]
    tomb = row(digest=BEFORE.current, state=RowState.DELETED)
    assert stood_on(new, tomb, row(digest=BEFORE.older[0])) == BEFORE.older[0]
    assert stood_on(entry(kind=Kind.TURN)) is None


def test_what_is_appended_stands_on_the_last_one() -> None:
    new = entry(kind=Kind.TURN, parent=BEFORE, after=CHAT)
    assert stood_on(new, chat()) == b"last" * 8
    for head in (chat(parent=None), chat(state=RowState.DELETED), chat(state=RowState.EXPIRED)):
        assert stood_on(new, head) == BEFORE.current
    older = StateKey(b"H" * 32, (CHAT.current,))
    assert stood_on(entry(kind=Kind.TURN, after=older), chat()) == b"last" * 8


def test_both_a_turn_and_its_conversation_are_seen_as_they_were_before_the_write() -> None:
    turn = entry(kind=Kind.TURN, after=CHAT)
    head = entry(key=CHAT, kind=Kind.CONVERSATION, ttl=None, parent=KEY)
    for order in ((turn, head), (head, turn)):
        changes = settle({CHAT.current: chat()}, write(*order))
        parents = {c.entry.key: c.parent for c in changes if not isinstance(c, Remove)}
        assert parents == {KEY: b"last" * 8, CHAT: KEY.current}


def test_what_goes_on_keeps_its_parent_unless_another_is_given() -> None:
    begun = row(progress=Progress.QUEUED, generation=5, parent=b"p" * 32)
    assert stood_on(entry(kind=Kind.TURN, generation=5), begun) == b"p" * 32
    assert stood_on(entry(kind=Kind.TURN, generation=5, parent=BEFORE), begun) == BEFORE.current
    # Its conversation has gone on, to itself perhaps.
    appended = entry(kind=Kind.TURN, generation=5, parent=BEFORE, after=CHAT)
    assert stood_on(appended, begun, chat(parent=KEY.current)) == b"p" * 32
    assert stood_on(appended, replace(begun, parent=None), chat(parent=KEY.current)) is None


@pytest.mark.parametrize("changes", [{"state": RowState.EXPIRED}, {"state": RowState.DELETED}, {"generation": 5}])
def test_what_was_there_before_hands_down_no_parent(changes) -> None:
    old = row(parent=b"p" * 32, **changes)
    assert stood_on(entry(kind=Kind.TURN, generation=6, made=True), old) is None
    assert stood_on(entry(kind=Kind.TURN, generation=6, made=True, after=CHAT), old, chat()) == b"last" * 8


def test_what_must_be_read_to_know_the_parent() -> None:
    assert write(entry(parent=StateKey(b"p" * 32))).digests == {KEY.current}, "there is one place where it can be"
    assert write(entry(parent=BEFORE, after=CHAT)).digests == {KEY.current, *BEFORE.all, CHAT.current}
    released = Write(b"w1", b"x1", TENANT, (), release=(BEFORE,))
    assert released.digests == set(BEFORE.all)


def test_an_item_of_a_turn_is_deleted_if_nobody_else_did_meanwhile() -> None:
    edited = entry(kind=Kind.TURN, record=b"edited", ttl=20.0, expected_revision=3)
    change = settled(row(generation=5, parent=b"p" * 32), edited)
    assert isinstance(change, Replace)
    assert (change.revision, change.ttl, change.parent) == (4, 80.0, b"p" * 32)
    assert change.entry.generation == 5
    with pytest.raises(StaleRevision):
        settled(row(revision=4), edited)
    with pytest.raises(Conflict):
        settled(row(owner=b"owner-b"), edited)
    assert settled(row(), replace(edited, expected_revision=None)) is None
    assert settled(None, replace(edited, only_known=True)) is None
    assert settled(row(state=RowState.EXPIRED), replace(edited, only_known=True)) is None
    ended = replace(edited, progress=Progress.QUEUED)
    assert settled(row(), ended) is None, "what has ended is not edited by who saw it before its end"


def test_an_id_that_an_upstream_uses_again_is_nobody_s_turn() -> None:
    turn = entry(kind=Kind.TURN, sole=True, made=True, record=b"new", parent=BEFORE)
    twin = row(parent=b"p" * 32)
    assert settled(twin, turn) == Remove(KEY.current)
    with pytest.raises(Conflict):
        settled(twin, entry(sole=True))
    own = settled(replace(twin, exchange=b"x1", progress=Progress.QUEUED), turn)
    assert isinstance(own, Replace)
    for dead in (RowState.EXPIRED, RowState.DELETED):  # what stood on it would stand on this
        assert settled(replace(twin, state=dead), turn) is None


def test_a_lease_is_its_exchange_s_while_it_lasts() -> None:
    lease = entry(kind=Kind.LEASE, owner=b"x1", record=b"", ttl=10.0, tombstone_ttl=0.0, progress=Progress.PENDING)
    held = row(owner=b"x1", exchange=b"x1", progress=Progress.PENDING, remaining=4.0)
    prolonged = settled(held, lease)
    assert isinstance(prolonged, Replace)
    assert prolonged.ttl == 10.0
    theirs = replace(held, owner=b"x2", exchange=b"x2")
    with pytest.raises(Conflict):
        settled(theirs, lease)
    assert isinstance(settled(replace(theirs, state=RowState.EXPIRED), lease), Replace)
    for stored, expected in ((held, [Remove(KEY.current)]), (theirs, [])):
        assert settle({KEY.current: stored}, Write(b"w1", b"x1", TENANT, (), release=(KEY,))) == expected


def test_a_lease_that_was_lost_keeps_nothing_else_from_being_let_go() -> None:
    mine = row(digest=CHAT.current, exchange=b"x1", progress=Progress.PENDING)
    theirs = row(exchange=b"x2")
    let_go = Write(b"w1", b"x1", TENANT, (), forget=(CHAT,), release=(KEY,))
    assert settle({r.digest: r for r in (mine, theirs)}, let_go) == [Remove(CHAT.current)]
    swapped = Write(b"w1", b"x1", TENANT, (), forget=(KEY,), release=(CHAT,))
    assert settle({r.digest: r for r in (mine, theirs)}, swapped) == [Remove(CHAT.current)]


@pytest.mark.parametrize(
    ("status", "expected"),
    [("queued", 1), ("in_progress", 2), ("completed", 3), ("cancelled", 3), (None, 3), ("brand_new", 3)],
)
def test_progress(status, expected) -> None:
    assert progress_of(status) == expected


def test_records_are_versioned() -> None:
    record = Record("a", "f", "completed", background=True)
    data = encode_record(record)
    assert decode_record(data) == record
    for damaged in (b"", b"\x02" + data[1:], data[:-1], b"\x01\xc1"):
        with pytest.raises(UnreadableRecord):
            decode_record(damaged)


def test_keys_differ_in_every_part() -> None:
    """§1: (namespace, route, tenant, kind, id), length-prefixed so that parts cannot flow into each other."""

    def key(namespace="n", route="r", fields=(b"t",), kind=Kind.RESPONSE, opaque_id="i", secret=b"s" * 16) -> bytes:
        ring = Keyring([secret], namespace=namespace, route=route)
        return ring.state_key(Tenant(fields), kind, opaque_id).current

    variants = [
        key(),
        key(namespace="n2"),
        key(route="r2"),
        key(fields=(b"t2",)),
        key(kind=Kind.CONVERSATION),
        key(opaque_id="i2"),
        key(opaque_id="I"),
        key(secret=b"z" * 16),
        key(namespace="nr", route=""),
        key(fields=(b"t", b"")),
        key(fields=(b"", b"t")),
        key(fields=(b"ti",), opaque_id=""),
    ]
    assert len(set(variants)) == len(variants)


def test_all_secrets_read_and_the_first_writes() -> None:
    def ring(*secrets: bytes) -> Keyring:
        return Keyring(secrets, namespace="n", route="r")

    tenant = Tenant((b"t",))
    before, rotated = ring(b"old" * 8), ring(b"new" * 8, b"old" * 8)
    old = before.state_key(tenant, Kind.RESPONSE, "i")
    new = rotated.state_key(tenant, Kind.RESPONSE, "i")
    assert new.older == (old.current,)
    assert new.current != old.current
    assert before.check_values()[0] in rotated.check_values()


def test_a_tenant_has_one_digest_on_all_routes() -> None:
    one, two = (Keyring([], namespace="n", route=r) for r in ("r1", "r2"))
    assert one.tenant(Tenant((b"t",))) == two.tenant(Tenant((b"t",)))
    assert b"t" not in (repr(Tenant((b"secret-t",))) + str(Tenant((b"secret-t",)))).encode().replace(b"Tenant", b"")
