"""Objects that are written while their parts are still being made."""

import errno
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.errors import MissingObject, StoreTimeout, StoreUnavailable
from weightdelta.store import Store
from weightdelta.store_backend import GivenUp, Transient
from weightdelta.store_feed import Feed
from weightdelta.store_fsspec import WHOLE, is_big
from weightdelta.testing.faults import FaultStore, Plan

PARTS = st.lists(st.binary(max_size=9), max_size=6)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}-feed"
    return Store(url, fsync=False)


def test_a_reader_follows_parts_as_they_come() -> None:
    feed, seen = Feed(), list[bytes]()
    heard = threading.Semaphore(0)

    def follow() -> None:
        for part in feed:
            seen.append(bytes(part))
            heard.release()

    reader = threading.Thread(target=follow)
    reader.start()
    for part in (b"a", b"b"):
        feed.add(part)
        assert heard.acquire(timeout=10), "it is read before the next one is there"
    assert feed.ended_at == math.inf
    feed.end()
    reader.join(10)
    assert not reader.is_alive()
    assert seen == [b"a", b"b"] == list(feed), "and can be read again"


def test_whoever_reads_what_was_given_up_is_told() -> None:
    feed, told = Feed(), list[BaseException]()

    def follow() -> None:
        try:
            list(feed)
        except GivenUp as e:
            told.append(e)

    feed.add(b"a")
    reader = threading.Thread(target=follow)
    reader.start()
    feed.give_up()
    reader.join(10)
    assert [type(e) for e in told] == [GivenUp]
    assert not feed.is_wanted()


@given(parts=PARTS)
def test_what_is_big_is_known_without_losing_a_part(parts: list[bytes]) -> None:
    big, whole = is_big(iter(parts))
    assert (big, list(whole)) == (False, parts)
    heavy = [*parts, bytes(WHOLE), b"x", *parts]
    big, whole = is_big(iter(heavy))
    assert big
    assert b"".join(whole) == b"".join(heavy)


def test_an_object_appears_whole_or_not_at_all(store: Store) -> None:
    upload = store.begin("data/x")
    for part in (b"one ", memoryview(b"two "), bytearray(b"three")):
        upload.add(part)
        with pytest.raises(MissingObject):
            store.read("data/x")
    upload.finish()
    assert store.read("data/x") == b"one two three"


def test_what_is_abandoned_leaves_nothing(store: Store) -> None:
    before = set(threading.enumerate())
    upload = store.begin("data/x")
    upload.add(b"one")
    late = set(threading.enumerate()) - before
    upload.abandon()
    for thread in late:
        thread.join(10)
        assert not thread.is_alive()
    assert [n for n in store.names() if n.startswith("data")] == []


def test_a_request_that_fails_in_passing_is_repeated_from_the_start(store: Store) -> None:
    faulty = FaultStore(store, Plan("after"), timeout_s=30)
    upload = faulty.begin("data/x")
    upload.add(b"one")
    upload.add(b"two")
    with pytest.raises(StoreUnavailable, match="answer lost"):
        upload.finish()
    assert store.read("data/x") == b"onetwo", "it was written all the same"


@pytest.mark.parametrize("timeout_s", [0.2, None])
def test_the_bound_counts_from_the_last_part(store: Store, timeout_s: float | None) -> None:
    slow = Store(store.url, timeout_s=timeout_s, fsync=False)
    upload = slow.begin("data/x")
    upload.add(b"one")
    threading.Event().wait(0.5)  # encoding takes its time
    upload.add(b"two")
    upload.finish()
    assert store.read("data/x") == b"onetwo"


def test_a_failure_in_passing_is_repeated_however_long_the_parts_took(store: Store) -> None:
    """The bound, and with it the time for another try, counts from the last part."""
    slow = Store(store.url, timeout_s=5.0, fsync=False)
    inner, calls = slow._backend, list[int]()

    class Flaky:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def put(self, name: str, parts: Any, **more: Any) -> None:
            data = [bytes(part) for part in parts]
            calls.append(len(data))
            if len(calls) == 1:
                raise Transient(errno.ECONNRESET, "reset once")
            inner.put(name, data, **more)

    slow._backend = Flaky()  # type: ignore[assignment]
    slow.timeout_s = 1.0
    upload = slow.begin("data/x")
    upload.add(b"one")
    threading.Event().wait(1.2)
    upload.add(b"two")
    upload.finish()
    assert store.read("data/x") == b"onetwo"
    assert calls == [2, 2]


def test_a_store_that_hangs_is_left_behind(store: Store) -> None:
    faulty = FaultStore(store, Plan("hang"), timeout_s=0.05)
    before = set(threading.enumerate())
    buffer = bytearray(b"good")
    upload = faulty.begin("data/x")
    upload.add(buffer)
    with pytest.raises(StoreTimeout, match="data/x took over"):
        upload.finish()
    buffer[:] = b"evil"
    faulty.release()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    with pytest.raises(MissingObject):
        store.read("data/x")


def test_an_error_is_told_at_the_end(store: Store) -> None:
    upload = FaultStore(store, Plan("enospc")).begin("data/x")
    upload.add(b"one")
    with pytest.raises(StoreUnavailable) as caught:
        upload.finish()
    assert caught.value.errno == errno.ENOSPC
