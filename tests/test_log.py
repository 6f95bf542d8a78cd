"""The log: what readers accept, and what writers may do to each other."""

import itertools
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from weightdelta.errors import (
    DamagedObject,
    Fenced,
    InputError,
    LayoutMismatch,
    MissingObject,
    NotYet,
    PublicationLost,
    StateMismatch,
    UnsupportedFormat,
)
from weightdelta.log import AHEAD, WINDOW, Log, LogWriter
from weightdelta.record import (
    HEAD,
    Entry,
    OpenEntry,
    RefEntry,
    VersionEntry,
    encode,
    entry_hash,
    log_name,
)
from weightdelta.store import Store
from weightdelta.testing.faults import FaultStore

LAYOUT = "1a" * 32
#: Long enough for a few attempts against a store that fails at once.
BRIEF = 0.0


def digest(version: int, write_id: str = "") -> str:
    """A digest for a version; the base has the same for everyone."""
    return entry_hash(f"{version} {write_id}".encode())


def fresh() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}", timeout_s=None)


def doubt(w: LogWriter) -> Entry | None:
    return w.in_doubt


def no_sleep(_: float) -> None:
    """Retry at once."""


def writer(store: Store, *, name: int = 1) -> LogWriter:
    nonce = f"{name:032x}"
    return LogWriter(Log(store), nonce=nonce, clock=lambda: 5.0, sleep=no_sleep)


def take_over(w: LogWriter, **options: Any) -> int:
    """Open at the newest version, as a publisher does."""
    w.log.refresh()
    newest = w.log.newest
    known = w.log.digest(newest) if w.log.opened else digest(0)
    return w.open(newest, parent_digest=known, layout=LAYOUT, **options)


def version(log: Log, write_id: str | None = None) -> Callable[..., VersionEntry]:
    """A maker of the version after the newest in ``log``, bound to what it is now."""
    parent, write = log.newest, write_id or uuid.uuid4().hex
    before = log.digest(parent)

    def make(seq: int, prev: str, epoch: int, nonce: str, now: float) -> VersionEntry:
        return VersionEntry(
            seq, prev, epoch, nonce, now, version=parent + 1, step=parent, parent=parent,
            parent_digest=before, digest=digest(parent + 1, write), write_id=write,
            index=digest(7), index_bytes=1, plan=digest(8), codec="sparse+zstd", values="diff",
            changed=1, elements=2, raw_bytes=4, payload_bytes=1, bound_bytes=None,
        )  # fmt: skip

    return make


def ref(name: str, number: int) -> Callable[..., RefEntry]:
    return partial(RefEntry, name=name, version=number)


def build(store: Store, *, versions: int = 2) -> LogWriter:
    """A run with an open, some versions and a ref: ``versions + 2`` entries."""
    w = writer(store)
    take_over(w)
    for _ in range(versions):
        w.append(version(w.log))
    w.append(ref("eval", versions))
    return w


def read(store: Store) -> Log:
    log = Log(store)
    log.refresh()
    return log


def put(store: Store, seq: int, data: bytes) -> None:
    store.write(log_name(seq), data)


def raw(store: Store) -> list[bytes]:
    """The log's bytes, by a listing that the code under test never does."""
    return [store.read(name) for name in store.names("log/")]


def test_a_reader_sees_what_was_written() -> None:
    store = fresh()
    assert (read(store).newest, read(store).epoch, read(store).opened) == (0, 0, None)
    w = build(store)
    log = read(store)
    assert log.entries == w.log.entries
    assert [e.seq for e in log.entries] == [0, 1, 2, 3]
    assert (log.newest, log.epoch, log.refs, log.tip) == (2, 1, {"eval": 2}, w.log.tip)
    assert list(log.versions) == [1, 2]
    assert [log.digest(v) for v in range(3)] == [digest(0), *(e.digest for e in
            log.versions.values())]  # fmt: skip
    with pytest.raises(NotYet, match="version 3 is not in the log yet; the newest is 2"):
        log.digest(3)
    assert log.refresh() == 0
    w.append(ref("eval", 1))
    assert log.refresh() == 1
    assert log.refs == {"eval": 1}


def test_a_second_writer_goes_on_where_the_first_stopped() -> None:
    store = fresh()
    build(store)
    second = writer(store, name=2)
    assert take_over(second) == 2
    assert second.append(version(second.log)).seq == 5
    log = read(store)
    assert (log.newest, log.epoch) == (3, 2)
    assert log.opened == log.entries[4]
    assert isinstance(log.opened, OpenEntry)
    assert log.opened.parent_digest == log.digest(2)


# Damage


def test_any_damage_to_any_entry_stops_the_reader_there() -> None:
    store = fresh()
    build(store)
    for seq, good in enumerate(raw(store)):
        flips = (good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good)))
        cuts = (good[:i] for i in range(len(good)))
        for bad in itertools.chain(flips, cuts, [good + b"\n", b"\0" + good, good + good]):
            put(store, seq, bad)
            log = Log(store)
            with pytest.raises(DamagedObject, match=log_name(seq)):
                log.refresh()
            assert log.next_seq == seq
        put(store, seq, good)
    assert read(store).next_seq == 4


def test_swapped_entries_are_found() -> None:
    store = fresh()
    build(store)
    good = raw(store)
    for i, j in itertools.combinations(range(len(good)), 2):
        put(store, i, good[j])
        put(store, j, good[i])
        with pytest.raises(DamagedObject, match=f"{log_name(i)}: expected log entry {i}"):
            read(store)
        put(store, i, good[i])
        put(store, j, good[j])


def test_an_entry_of_another_run_is_found() -> None:
    store, other = fresh(), fresh()
    build(store)
    build(other)
    for seq, entry in enumerate(raw(other)[1:3], start=1):
        mine = store.read(log_name(seq))
        put(store, seq, entry)
        with pytest.raises(DamagedObject, match=r"follows an entry that hashes to|parent_digest"):
            read(store)
        put(store, seq, mine)


def test_a_missing_entry_is_found_when_head_points_past_it() -> None:
    store = fresh()
    build(store, versions=80)
    for seq in (0, 1, 40, 79, 80):
        good = store.read(log_name(seq))
        store.delete(log_name(seq))
        with pytest.raises(MissingObject, match=f"{log_name(seq)} is gone"):
            read(store)
        put(store, seq, good)
    assert read(store).newest == 80


def test_a_missing_entry_is_found_without_head_when_later_ones_are_in_sight() -> None:
    store = fresh()
    build(store, versions=20)
    store.delete(HEAD)
    store.delete(log_name(9))
    with pytest.raises(MissingObject, match=f"{log_name(9)} is gone, though"):
        read(store)


@pytest.mark.parametrize(
    "hint", [b"", b"-1", b"99", b"9" * 20, b"9" * 4000, b"x", b"\xff", b"0", b"2\n", b"3", b"1.0"]
)
def test_a_wrong_hint_changes_nothing(hint: bytes) -> None:
    store = fresh()
    w = build(store)
    store.hint(HEAD, hint)
    assert read(store).entries == w.log.entries


@pytest.mark.parametrize(
    ("at", "changes", "complaint"),
    [
        (1, {"epoch": 2}, "expected epoch 1, found 2"),
        (1, {"nonce": "0" * 32}, "expected nonce 0.*1, found 0*"),
        (1, {"version": 2}, "expected version 1, found 2"),
        (1, {"parent": 1}, "expected parent 0, found 1"),
        (1, {"parent_digest": "0" * 64}, "expected parent_digest"),
        (1, {"prev": "0" * 64}, "follows an entry that hashes to 0*, but"),
        (3, {"version": 3}, "names version 3 of 2"),
        (4, {"epoch": 3}, "expected epoch 2, found 3"),
        (4, {"parent": 1}, "expected parent 2, found 1"),
        (4, {"layout": "0" * 64}, "expected layout"),
        (4, {"parent_digest": "0" * 64}, "expected parent_digest"),
    ],
    ids=str,
)
def test_a_well_formed_lie_is_found(at: int, changes: dict[str, Any], complaint: str) -> None:
    store = fresh()
    build(store)
    second = writer(store, name=2)
    take_over(second)
    lie: Entry = replace(second.log.entries[at], **changes)
    put(store, at, encode(lie))
    with pytest.raises(DamagedObject, match=f"{log_name(at)}: {complaint}"):
        read(store)


def test_a_log_starts_with_an_open() -> None:
    store = fresh()
    put(store, 0, encode(RefEntry(0, "", 1, "0" * 32, 0.0, name="x", version=0)))
    with pytest.raises(DamagedObject, match="expected an open entry, found ref"):
        read(store)


def test_an_entry_from_the_future_says_so() -> None:
    store = fresh()
    w = build(store)
    line = encode(w.log.entries[3]).splitlines()[0].replace(b'"format":1', b'"format":2')
    put(store, 3, line + b"\n" + entry_hash(line).encode() + b"\n")
    with pytest.raises(UnsupportedFormat, match=log_name(3)):
        read(store)


# Reading much


class _Crowd:
    """A backend whose first reads of entries wait until ``size`` of them wait together."""

    def __init__(self, inner: Any, *, size: int) -> None:
        self._inner = inner
        self._size = size
        self._lock = threading.Lock()
        self._together = threading.Event()
        self._waiting = 0
        self.reads = 0

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        with self._lock:
            self.reads += 1
            self._waiting += name.startswith("log/")
            if self._waiting == self._size:
                self._together.set()
        if name.startswith("log/") and not self._together.wait(20):
            raise OSError("read one by one")
        data: bytes = self._inner.read(name, start=start, end=end)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_five_thousand_entries_are_read_once_each_and_together() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    w = build(Store(url, timeout_s=None), versions=0)
    for i in range(4998):
        w.append(ref(f"r{i % 10}", 0))
    store = Store(url)
    crowd = _Crowd(store._backend, size=8)
    store._backend = crowd
    log = read(store)
    assert log.entries == w.log.entries
    # The hint, each entry once, and one look past the end.
    assert crowd.reads == 1 + 5000 + AHEAD
    log.refresh()
    assert crowd.reads == 1 + 5000 + AHEAD + 2, "then the hint, and one entry"


@pytest.mark.parametrize("hint", [None, b"", b"x", b"0", b"1", b"2", b"99"])
def test_a_hole_is_found_whatever_became_of_the_hint(hint: bytes | None) -> None:
    """Else a reader would take the entries before it for the whole log."""
    for hole in range(6):
        store = fresh()
        build(store, versions=6)
        store.delete(log_name(hole))
        store.delete(HEAD) if hint is None else store.hint(HEAD, hint)
        with pytest.raises(MissingObject, match=log_name(hole)):
            read(store)


def test_reading_forward_without_a_hint_asks_little_too_much() -> None:
    store = fresh()
    w = build(store, versions=200)
    store.delete(HEAD)
    counting = FaultStore(store)
    log = read(counting)
    assert log.entries == w.log.entries
    assert len(counting.calls) <= 202 + WINDOW + 2
    before = len(counting.calls)
    log.refresh()
    assert len(counting.calls) == before + 1 + AHEAD


# Writing


def test_only_an_opened_writer_appends() -> None:
    w = writer(fresh())
    with pytest.raises(InputError, match="call open"):
        w.append(ref("x", 0))


def test_an_open_must_fit_what_is_there() -> None:
    store = fresh()
    build(store)
    second = writer(store, name=2)
    with pytest.raises(PublicationLost, match="cannot open at version 1: the newest is 2"):
        second.open(1, parent_digest=digest(1), layout=LAYOUT)
    with pytest.raises(StateMismatch, match="version 2 has digest"):
        second.open(2, parent_digest=digest(9), layout=LAYOUT)
    with pytest.raises(LayoutMismatch, match="needs a new run"):
        second.open(2, parent_digest=second.log.digest(2), layout="0" * 64)
    with pytest.raises(PublicationLost):
        writer(fresh()).open(3, parent_digest=digest(3), layout=LAYOUT)
    assert len(raw(store)) == 4


def test_what_does_not_follow_is_refused_before_it_is_sent() -> None:
    store = fresh()
    w = build(store)
    good = version(w.log)

    def changed(**changes: Any) -> Callable[..., Entry]:
        return lambda *slot: replace(good(*slot), **changes)

    for make in (changed(version=4), changed(parent_digest=digest(5)), changed(epoch=9),
                 changed(seq=9), changed(prev="0" * 64), changed(nonce="f" * 32)):  # fmt: skip
        with pytest.raises(InputError):
            w.append(make)
    with pytest.raises(NotYet, match="ref 'x': version 3"):
        w.append(ref("x", 3))
    assert len(raw(store)) == 4
    assert w.append(good).seq == 4


def test_a_version_is_never_renumbered() -> None:
    store = fresh()
    w = build(store)
    stale = version(w.log)
    w.append(version(w.log))
    with pytest.raises(PublicationLost, match="version 3: computed against version 2, but the"):
        w.append(stale)
    assert read(store).newest == 3


def test_a_fenced_writer_commits_nothing_ever_again() -> None:
    store = fresh()
    old = build(store)
    new = writer(store, name=2)
    take_over(new)
    for make in (version(old.log), ref("x", 1), version(old.log)):
        with pytest.raises(Fenced, match="opened the run with epoch 2"):
            old.append(make)
    with pytest.raises(Fenced):
        old.open(2, parent_digest=old.log.digest(2), layout=LAYOUT)
    new.append(version(new.log))
    assert [e.epoch for e in read(store).entries] == [1, 1, 1, 1, 2, 2]


def test_of_two_that_open_at_once_one_is_fenced() -> None:
    store = fresh()
    first, second = writer(store), writer(store, name=2)
    make = first.log.store.create
    opened: list[int] = []

    def create(name: str, data: Any) -> bool:
        if not opened:
            opened.append(0)
            opened[0] = take_over(second)
        return make(name, data)

    first.log.store.create = create  # type: ignore[method-assign]
    with pytest.raises(Fenced, match="epoch 1"):
        take_over(first)
    assert opened == [1]
    assert second.append(version(second.log)).epoch == 1


def test_a_reader_of_the_same_log_may_be_faster_than_its_writer() -> None:
    store = fresh()
    w = build(store)
    make = store.create

    def create(name: str, data: Any) -> bool:
        won = make(name, data)
        w.log.refresh()
        return won

    store.create = create  # type: ignore[method-assign]
    assert w.append(version(w.log)) == read(store).entries[4]
    assert w.log.next_seq == 5


class _ReadsFirst:
    """A lock whose holder finds that a reader of the same log has just read on."""

    def __init__(self, log: Log) -> None:
        self._log, self._lock = log, log.lock

    def __enter__(self) -> None:
        self._log.lock = self._lock
        self._log.refresh()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_fence_that_a_reader_of_the_same_log_saw_first_holds() -> None:
    store = fresh()
    old = build(store)
    make = version(old.log)
    take_over(writer(store, name=2))
    old.log.lock = _ReadsFirst(old.log)  # type: ignore[assignment]
    with pytest.raises(Fenced):
        old.append(make)
    assert len(raw(store)) == 5
