"""Writers of a log against stores that fail, and against kill -9."""

import itertools
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_log import BRIEF, build, doubt, fresh, put, raw, read, ref, take_over, version, writer

from weightdelta.errors import (
    CommitInDoubt,
    DamagedObject,
    Fenced,
    PublicationLost,
    RetryError,
    StoreUnavailable,
)
from weightdelta.log import Log
from weightdelta.record import (
    Entry,
    encode,
    log_name,
)
from weightdelta.store import Store
from weightdelta.testing.faults import SURVIVABLE, Fault, FaultStore, Plan


def insist(call: Callable[[], Any]) -> Any:
    """What a caller does with errors that say: again."""
    for _ in range(20):
        try:
            return call()
        except RetryError:
            continue
    raise AssertionError("no answer after 20 attempts")


def session(store: FaultStore) -> list[Entry]:
    """A writer's life against a store that may fail; what it was told had been committed."""
    w = writer(store)
    insist(lambda: take_over(w, deadline_s=BRIEF))
    makers: list[Callable[[], Any]] = [
        lambda: version(w.log), lambda: ref("eval", 1), lambda: version(w.log)
    ]  # fmt: skip
    return [insist(partial(w.append, maker(), deadline_s=BRIEF)) for maker in makers]


@pytest.mark.parametrize("fault", SURVIVABLE)
def test_every_operation_may_fail_once(fault: Fault) -> None:
    bound = 0.03 if fault == "hang" else None
    for k in itertools.count(1):
        inner = Store(f"memory://{uuid.uuid4().hex}", timeout_s=bound)
        store = FaultStore(inner, Plan(fault, at=k))
        said = session(store)
        fired = store.fired
        store.release()
        log = read(Store(inner.url))
        # Each exactly once, in order, and nothing else: no answer was taken for a loss.
        assert log.entries[1:] == said
        assert [e.kind for e in log.entries] == ["open", "version", "ref", "version"]
        if not fired:
            assert k > 10
            return


@pytest.mark.parametrize("fault", ["before", "after", "enospc", "erofs", "eacces"])
def test_a_store_that_keeps_failing_leaves_it_in_doubt_until_it_works(fault: Fault) -> None:
    store = FaultStore(fresh())
    w = build(store)
    make = version(w.log)
    store.plan = Plan(fault, forever=True)
    for _ in range(3):
        with pytest.raises(CommitInDoubt, match=f"{log_name(4)}: sent a version entry"):
            w.append(make, deadline_s=BRIEF)
    assert doubt(w) == make(4, w.log.tip, 1, w.nonce, 5.0)
    store.plan = None
    assert w.append(make).seq == 4
    assert doubt(w) is None
    assert [e.kind for e in read(store).entries[3:]] == ["ref", "version"]


def test_in_doubt_the_same_bytes_are_sent_until_it_is_known() -> None:
    store = FaultStore(fresh())
    w = build(store)
    store.plan = Plan("before", ops=frozenset({"create"}), forever=True)
    sent: list[bytes] = []
    make = store.create

    def create(name: str, data: Any) -> bool:
        sent.append(data)
        if len(sent) == 5:
            store.plan = Plan("after", ops=frozenset({"create"}))
        return make(name, data)

    store.create = create  # type: ignore[method-assign]
    clock = itertools.count()
    w._clock = lambda: float(next(clock))
    entry = w.append(version(w.log))
    assert len(sent) == 6
    assert set(sent) == {encode(entry)} == {store.read(log_name(4))}


def test_a_hang_is_in_doubt_too_and_is_tried_again() -> None:
    inner = Store(f"memory://{uuid.uuid4().hex}", timeout_s=0.03)
    store = FaultStore(inner)
    w = build(store)
    store.plan = Plan("hang", ops=frozenset({"create"}))
    assert w.append(version(w.log)).seq == 4
    assert store.fired == 1
    store.release()


def test_what_is_in_doubt_is_settled_before_anything_else() -> None:
    store = FaultStore(fresh())
    w = build(store)
    make = version(w.log)
    store.plan = Plan("after", ops=frozenset({"create", "read"}), forever=True)
    with pytest.raises(CommitInDoubt):
        w.append(make, deadline_s=BRIEF)
    store.plan = None
    assert w.append(ref("rollout", 3)).seq == 5
    # The version had been committed; to ask for it again is to be told so.
    assert w.append(make).seq == 4
    assert w.log.newest == 3
    assert len(raw(store)) == 6


@pytest.mark.parametrize("other", ["open", "version"])
def test_a_slot_in_doubt_that_another_takes_is_lost(other: str) -> None:
    store = FaultStore(fresh())
    old = build(store)
    make = version(old.log)
    store.plan = Plan("before", ops=frozenset({"create"}), forever=True)
    with pytest.raises(CommitInDoubt):
        old.append(make, deadline_s=BRIEF)
    store.plan = None
    if other == "open":
        take_over(writer(store, name=2))
    else:  # the same writer's earlier life, whose request was still under way
        rival = replace(make(4, old.log.tip, 1, old.nonce, 6.0), write_id="e" * 32)
        put(store, 4, encode(rival))
    with pytest.raises(Fenced if other == "open" else PublicationLost):
        old.append(make)
    assert doubt(old) is None
    assert b"e" * 32 in raw(store)[-1] or other == "open"


def test_an_open_in_doubt_is_taken_up_again() -> None:
    store = FaultStore(fresh())
    build(store)
    second = writer(store, name=2)
    store.plan = Plan("after", ops=frozenset({"create"}), forever=True)
    second.log.refresh()
    store._bad.plan = Plan("before", ops=frozenset({"create"}), forever=True)
    with pytest.raises(CommitInDoubt, match="sent a open entry"):
        take_over(second, deadline_s=BRIEF)
    store.plan = None
    assert take_over(second) == 2
    assert take_over(second) == 2
    assert len(raw(store)) == 5


def test_a_damaged_slot_is_neither_ours_nor_passed() -> None:
    store = fresh()
    w = build(store)
    put(store, 4, b"torn")
    for _ in range(2):
        with pytest.raises(DamagedObject, match=log_name(4)):
            w.append(version(w.log))
    assert len(raw(store)) == 5


def test_a_failing_hint_does_no_harm() -> None:
    store = FaultStore(fresh(), Plan("before", ops=frozenset({"hint"}), forever=True))
    build(store)
    assert store.fired == 4
    assert read(store).next_seq == 4


def test_a_store_that_fails_is_no_end_of_the_log() -> None:
    store = FaultStore(fresh())
    build(store)
    for k in itertools.count(1):
        store.plan = Plan("before", at=k)
        log = Log(store)
        try:
            log.refresh()
        except StoreUnavailable:
            assert log.refresh() == 4 - log.next_seq or log.next_seq == 4
            continue
        assert not store.fired
        return


KILL = """
import itertools, json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_log import build, read, ref, take_over, version, writer
from weightdelta.store import Store
from weightdelta.testing.faults import FaultStore, Plan

def child(at, plan):
    store = FaultStore(Store(at, timeout_s=None, fsync=False), plan)
    w = writer(store)
    with open(at / "said", "ab", buffering=0) as said:
        take_over(w)
        for i in range(3):
            entry = w.append(version(w.log))
            said.write(f"{entry.version} {entry.write_id}\\n".encode())
            w.append(ref("rollout", entry.version))
    os._exit(0)

seen = []
for fault in ("kill", "kill-after"):
    for k in itertools.count(1):
        at = Path(sys.argv[1], fault, str(k))
        at.mkdir(parents=True)
        pid = os.fork()
        if not pid:
            child(at, Plan(fault, at=k))
        killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        store = Store(at, timeout_s=None, fsync=False)
        said = dict(line.split() for line in (at / "said").read_text().splitlines())
        heir = writer(store, name=2)
        epoch = take_over(heir)
        heir.append(version(heir.log))
        log = read(store)
        kept = all(log.versions[int(v)].write_id == w for v, w in said.items())
        extra = log.newest - 1 - len(said)
        seen.append([kept, extra, epoch, killed])
        if not killed:
            break
print(json.dumps(seen))
"""


@pytest.mark.fault
def test_a_killed_writer_loses_nothing_that_it_was_told(tmp_path: Path) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(tmp_path), str(here)],
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert sum(killed for *_, killed in seen) > 30
    for kept, extra, epoch, _ in seen:
        assert kept
        # Killed between the commit and the answer: one version more than anyone was told.
        assert extra in (0, 1)
        assert epoch in (1, 2)
