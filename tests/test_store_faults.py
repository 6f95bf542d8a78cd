"""Stores under races, kills, hangs and bad disks: whole or nothing, and every call returns."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_store import MUTATIONS, files, make_store, mutate, run

from weightdelta.errors import (
    MissingObject,
    StoreTimeout,
    StoreUnavailable,
)
from weightdelta.store import MAX_HANGING, Store
from weightdelta.testing.faults import FaultStore, Op, Plan


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return make_store(request.param, tmp_path)


RACE = """
import json, multiprocessing, sys
def racer(root, me, barrier, results):
    from weightdelta.store import Store
    store, won = Store(root, fsync=False), []
    for r in range(ROUNDS):
        barrier.wait()
        mine = store.create(f"log/{r}", bytes([me]) * SIZE)
        seen = store.read(f"log/{r}")
        whole = len(seen) == SIZE and seen == seen[:1] * SIZE
        won.append((mine, seen[0] if whole else -1))
    results.put((me, won))
WRITERS, ROUNDS, SIZE = 5, 60, 1 << 20
context = multiprocessing.get_context("fork")
barrier, results = context.Barrier(WRITERS), context.Queue()
racers = [context.Process(target=racer, args=(sys.argv[1], i, barrier, results))
          for i in range(WRITERS)]
[p.start() for p in racers]
outcome = dict(results.get() for _ in racers)
[p.join() for p in racers]
print(json.dumps([[outcome[i][r] for i in range(WRITERS)] for r in range(ROUNDS)]))
"""


@pytest.mark.fault
def test_racing_processes_have_one_winner_and_see_it_whole(tmp_path: Path) -> None:
    for racers in run(RACE, str(tmp_path)):
        winners = [i for i, (won, _) in enumerate(racers) if won]
        assert len(winners) == 1
        assert [seen for _, seen in racers] == winners * len(racers)
    assert files(tmp_path / ".tmp") == []


def test_racing_threads_have_one_winner(store: Store) -> None:
    threads, rounds = 8, 40
    barrier = threading.Barrier(threads)
    won: list[list[int]] = [[] for _ in range(rounds)]

    def racer(me: int) -> None:
        for r in range(rounds):
            barrier.wait()
            if store.create(f"log/{r}", bytes([me]) * 4096):
                won[r].append(me)

    racers = [threading.Thread(target=racer, args=(i,)) for i in range(threads)]
    for t in racers:
        t.start()
    for t in racers:
        t.join()
    for r, winners in enumerate(won):
        assert len(winners) == 1
        assert store.read(f"log/{r}") == bytes(winners) * 4096


class _Slow:
    """A memory file system whose look at an object lasts until someone else looks, too."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._both = threading.Barrier(2)

    def isfile(self, path: str) -> bool:
        found = bool(self._fs.isfile(path))
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.2)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_looking_and_writing_is_one_step_in_memory() -> None:
    store, won = make_store("memory", Path()), list[bool]()
    store._backend = replace(store._backend, fs=_Slow(store._backend.fs))  # type: ignore[type-var,attr-defined]
    racers = [
        threading.Thread(target=lambda: won.append(store.create("log/1", b"1"))) for _ in range(2)
    ]
    for t in racers:
        t.start()
    for t in racers:
        t.join()
    assert sorted(won) == [False, True]


@pytest.mark.parametrize("op", ["write", "hint"])
def test_no_reader_sees_half_an_object(store: Store, op: Op) -> None:
    size, stop = 1 << 20, threading.Event()
    torn: list[int] = []
    reads = 0
    mutate(store, op, b"a" * size)

    def reader() -> None:
        nonlocal reads
        while not stop.is_set():
            data = store.read("x/y")
            reads += 1
            if len(data) != size or data != data[:1] * size:
                torn.append(len(data))

    watcher = threading.Thread(target=reader)
    watcher.start()
    for i in range(60):
        mutate(store, op, (b"a" if i % 2 else b"b") * size)
    stop.set()
    watcher.join()
    assert reads > 0
    assert torn == []


KILL = """
import json, os, signal, sys
from pathlib import Path
from weightdelta.store import Store
root, op = Path(sys.argv[1]), sys.argv[2]
ours, before = b"n" * 100_000, b"o" * 100_000

def child(at, k):
    lines = 0
    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("weightdelta/store.py", "store_local.py")):
            return None
        lines += 1
        if lines == k:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    store = Store(at, timeout_s=None, fsync=False)
    sys.settrace(trace)
    getattr(store, op)("log/1", ours)
    sys.settrace(None)
    os._exit(0)

seen, k, killed = [], 0, True
while killed:
    k += 1
    at = root / str(k)
    if op == "write":
        Store(at, timeout_s=None, fsync=False).write("log/1", before)
    pid = os.fork()
    if not pid:
        child(at, k)
    killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
    names = Store(at, timeout_s=None).names()
    path = at / "log/1"
    data = path.read_bytes() if path.exists() else None
    state = {None: "nothing", ours: "ours", before: "before"}.get(data, "torn")
    again = Store(at, timeout_s=None, fsync=False)
    healed = again.create("log/1", ours) or op == "write" or again.read("log/1") == ours
    seen.append((state, names in ([], ["log/1"]), healed))
print(json.dumps(seen))
"""


@pytest.mark.fault
@pytest.mark.parametrize(("op", "old"), [("create", "nothing"), ("write", "before")])
def test_a_kill_at_any_line_leaves_all_or_nothing(tmp_path: Path, op: str, old: str) -> None:
    seen = run(KILL, str(tmp_path), op)
    assert len(seen) > 40
    states = [state for state, _, _ in seen]
    # First nothing has happened, then all of it has; no kill finds it in between.
    assert states == sorted(states, key=[old, "ours"].index)
    assert set(states) == {old, "ours"}
    assert all(listed and healed for _, listed, healed in seen)


@pytest.mark.parametrize("op", ["write", "create"])
def test_bytes_are_durable_before_the_name_and_the_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: Op
) -> None:
    done: list[str] = []
    root = tmp_path / "run"

    def spy(name: str, label: Any) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            done.append(label(args[0]))
            return result

        monkeypatch.setattr(os, name, call)

    def where(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return "sync temporary" if path.parent.name == ".tmp" else f"sync {path.name}"

    spy("fsync", where)
    spy("link", lambda _: "named")
    spy("replace", lambda _: "named")
    mutate(Store(root), op, b"1")
    assert done == ["sync temporary", "sync run", f"sync {tmp_path.name}", "named", "sync x"]


def test_a_lost_create_is_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier attempt may have linked and then failed to sync the folder."""
    store, synced = Store(tmp_path), list[str]()
    store.create("log/1", b"1")
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    assert not store.create("log/1", b"1")
    assert synced[-1] == str(tmp_path / "log")


@pytest.mark.parametrize("op", MUTATIONS)
def test_a_lost_answer_is_an_error_and_reading_back_tells(store: Store, op: Op) -> None:
    faulty = FaultStore(store, Plan("after", ops=frozenset({op})))
    with pytest.raises(StoreUnavailable, match="x/y: injected: answer lost") as caught:
        mutate(faulty, op, b"ours")
    assert caught.value.errno == errno.ECONNRESET
    assert store.read("x/y") == b"ours"
    assert store.create("x/y", b"ours") is False


@pytest.mark.parametrize("op", [*MUTATIONS, "read", "size", "names", "delete"])
def test_a_hanging_operation_is_given_up_by_name(store: Store, op: Op) -> None:
    store.write("x/y", b"0")
    faulty = FaultStore(store, Plan("hang", ops=frozenset({op})), timeout_s=0.05)
    call = getattr(faulty, op)
    arguments = ("x/",) if op == "names" else ("x/y", b"late") if op in MUTATIONS else ("x/y",)
    with pytest.raises(StoreTimeout, match=r"x.* took over 0.05 s"):
        call(*arguments)
    assert faulty.read("x/y") == b"0"
    faulty.release()


def test_a_hanging_read_among_many_is_named(store: Store) -> None:
    names = [f"n/{i}" for i in range(600)]
    for name in names:
        store.write(name, b"1")
    stuck = FaultStore(store, Plan("hang", ops=frozenset({"read"})), timeout_s=0.1)
    with pytest.raises(StoreTimeout) as caught:
        list(stuck.read_all(names, limit=1))
    assert stuck.calls[0][1] in str(caught.value)
    stuck.release()


def test_what_hangs_does_not_pile_up(store: Store) -> None:
    store.write("x/y", b"0")
    before = set(threading.enumerate())
    faulty = FaultStore(store, Plan("hang", forever=True), timeout_s=0.001)
    for _ in range(MAX_HANGING):
        with pytest.raises(StoreTimeout, match="took over"):
            faulty.read("x/y")
    with pytest.raises(StoreTimeout, match=f"{MAX_HANGING} earlier operations still hang"):
        faulty.read("x/y")
    assert len(faulty.calls) == MAX_HANGING
    faulty.release()
    for t in set(threading.enumerate()) - before:
        t.join(5)
    faulty.timeout_s = 10
    assert faulty.read("x/y") == b"0"


def test_a_write_that_was_given_up_cannot_store_reused_buffers(store: Store) -> None:
    faulty = FaultStore(store, Plan("hang", ops=frozenset({"write"})), timeout_s=0.05)
    buffer = bytearray(b"good")
    before = set(threading.enumerate())
    with pytest.raises(StoreTimeout):
        faulty.write("x/y", buffer)
    late = set(threading.enumerate()) - before
    store.write("x/y", b"good")
    buffer[:] = b"evil"
    faulty.release()
    for t in late:
        t.join(10)
    assert store.read("x/y") == b"good"


@pytest.mark.parametrize("fault", ["enospc", "erofs", "eacces"])
@pytest.mark.parametrize("op", MUTATIONS)
def test_a_refusal_is_typed_and_names_the_object(store: Store, op: Op, fault: Any) -> None:
    faulty = FaultStore(store, Plan(fault, forever=True))
    code = {"enospc": errno.ENOSPC, "erofs": errno.EROFS, "eacces": errno.EACCES}[fault]
    with pytest.raises(StoreUnavailable, match=rf"{store.url}.* x/y: .*{os.strerror(code)}") as e:
        mutate(faulty, op, b"1")
    assert e.value.errno == code
    with pytest.raises(MissingObject):
        store.read("x/y")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    at, tool = tmp_path / "disk", shutil.which("mount")
    at.mkdir()
    command = [tool or "", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(at)]
    if not tool or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield at
    subprocess.run([shutil.which("umount") or "", "-l", str(at)], check=True)


@pytest.mark.fault
def test_a_full_disk_keeps_what_it_has_and_recovers(small_disk: Path) -> None:
    store = Store(small_disk)
    store.write("x/y", b"old")
    store.write("ballast", bytes(700_000))
    for put in (store.write, store.hint, store.create):
        with pytest.raises(StoreUnavailable, match="x/y: No space left on device") as caught:
            put("x/y", bytes(600_000))
        assert caught.value.errno == errno.ENOSPC
    assert store.read("x/y") == b"old"
    assert files(small_disk) == ["ballast", "x/y"]
    store.delete("ballast")
    store.write("x/y", bytes(600_000))
    assert store.size("x/y") == 600_000


@pytest.mark.fault
def test_a_read_only_disk_can_be_read(small_disk: Path) -> None:
    store = Store(small_disk)
    store.create("x/y", b"old")
    mount = shutil.which("mount") or ""
    subprocess.run([mount, "-o", "remount,ro", str(small_disk)], check=True)
    write, delete = partial(store.write, "x/y", b"new"), partial(store.delete, "x/y")
    calls: tuple[Callable[[], None], ...] = (write, delete, store.probe)
    for call in calls:
        with pytest.raises(StoreUnavailable, match="Read-only file system") as caught:
            call()
        assert caught.value.errno == errno.EROFS
    assert store.read("x/y") == b"old"


def test_a_file_in_the_way_is_an_error_and_no_loss(store: Store) -> None:
    store.write("log", b"a file")
    with pytest.raises(StoreUnavailable, match="create log/1"):
        store.create("log/1", b"1")
