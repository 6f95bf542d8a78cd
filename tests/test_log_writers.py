"""Several writers of one log: every schedule of two, and random ones of many."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_log import BRIEF, LAYOUT, build, fresh, raw, read, ref, take_over, version, writer

from weightdelta.errors import CommitInDoubt, Fenced, PublicationLost, WeightDeltaError
from weightdelta.log import LogWriter
from weightdelta.record import HEAD, Entry, OpenEntry, VersionEntry
from weightdelta.store import Buffer, Live

# Two writers, all schedules


class _Turns:
    """A backend whose operations run one at a time, in the order that a schedule gives."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._change = threading.Condition()
        self._turn: str | None = None
        self.waiting: set[str] = set()
        self.alive: set[str] = set()

    def _step(self, operation: Callable[[], Any]) -> Any:
        me = threading.current_thread().name
        if me not in self.alive:
            return operation()
        with self._change:
            self.waiting.add(me)
            self._change.notify_all()
            self._change.wait_for(lambda: self._turn == me)
            self._turn = None
            self.waiting.discard(me)
            return operation()

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        if name == HEAD:
            raise FileNotFoundError(name)
        data: bytes = self._step(lambda: self._inner.read(name, start=start, end=end))
        return data

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        return bool(self._step(lambda: self._inner.create(name, parts)))

    def put(self, name: str, parts: Sequence[Buffer], *, durable: bool, live: Live) -> None:
        """Dropped: the only one is the hint, which must not matter."""

    def size(self, name: str) -> int:
        return int(self._inner.size(name))

    def run(self, programs: dict[str, Callable[[], None]], choices: list[int]) -> list[int]:
        """Run to the end; the choices made: those given, then always the first."""
        made: list[int] = []
        self.alive = set(programs)
        threads = [
            threading.Thread(target=self._live, args=(name, program), name=name)
            for name, program in programs.items()
        ]
        for t in threads:
            t.start()
        with self._change:
            while True:
                self._change.wait_for(lambda: self._turn is None and self.waiting == self.alive)
                if not self.alive:
                    break
                ready = sorted(self.waiting)
                pick = choices[len(made)] if len(made) < len(choices) else 0
                # The number of alternatives rides along, for the search.
                made.append(pick + 10 * len(ready))
                self._turn = ready[pick]
                self.waiting.discard(ready[pick])
                self._change.notify_all()
        for t in threads:
            t.join()
        return made

    def _live(self, name: str, program: Callable[[], None]) -> None:
        try:
            program()
        finally:
            with self._change:
                self.alive.discard(name)
                self._change.notify_all()


def schedules(run: Callable[[list[int]], list[int]]) -> Iterator[None]:
    """Call ``run`` with every schedule there is, depth first."""
    choices: list[int] = []
    while True:
        made = run(choices)
        yield
        while made and made[-1] % 10 + 1 == made[-1] // 10:
            made.pop()
        if not made:
            return
        choices = [m % 10 for m in made[:-1]] + [made[-1] % 10 + 1]


@pytest.mark.parametrize("lost", [None, "old", "new"])
def test_every_schedule_of_an_old_and_a_new_writer(
    lost: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one publishes twice while the new one takes over and publishes."""
    # One look past the end instead of two: the second finds holes, and makes ten times as many
    # schedules.
    monkeypatch.setattr("weightdelta.log.AHEAD", 1)

    def once(choices: list[int]) -> list[int]:
        store = fresh()
        old, new = build(store, versions=1), writer(store, name=2)
        new.log.refresh()
        turns = _Turns(store._backend)
        store._backend = turns  # type: ignore[assignment]  # lists and deletes nothing
        said: dict[str, list[Entry]] = {"new": [], "old": []}
        ended: dict[str, type[WeightDeltaError]] = {}

        def program(name: str, w: LogWriter, opens: bool, versions: int) -> None:
            try:
                while opens and not w.epoch:
                    with contextlib.suppress(PublicationLost):
                        newest = w.log.newest
                        w.open(newest, parent_digest=w.log.digest(newest), layout=LAYOUT)
                for _ in range(versions):
                    said[name].append(w.append(version(w.log)))
            except WeightDeltaError as e:
                ended[name] = type(e)

        if lost:
            _lose_first_answer(turns, lost)
        made = turns.run(
            {
                "new": partial(program, "new", new, True, 1),
                "old": partial(program, "old", old, False, 2),
            },
            choices,
        )
        log = read(store)
        opened = next(e.seq for e in log.entries[1:] if isinstance(e, OpenEntry))
        for name, entries in said.items():
            assert all(log.entries[e.seq] == e for e in entries), name
        assert len(log.entries) == 4 + len(said["old"]) + len(said["new"])
        assert all(e.seq < opened for e in said["old"])
        # Who was not told of a commit was told why, and of the right thing.
        assert (len(said["old"]) == 2) == ("old" not in ended)
        assert ended.get("old", Fenced) is Fenced
        assert "new" not in ended
        outcomes.add((len(said["old"]), len(said["new"])))
        return made

    outcomes: set[tuple[int, int]] = set()
    count = sum(1 for _ in schedules(once))
    assert count > 20
    # Versions told to the old one and to the new, which opens before, between or after them.
    assert outcomes == {(0, 1), (1, 1), (2, 1)}


def _lose_first_answer(turns: _Turns, name: str) -> None:
    """The first create of that thread happens, and its answer is lost."""
    real, left = turns.create, [name]

    def create(object_name: str, parts: Sequence[Buffer]) -> bool:
        won = real(object_name, parts)
        if threading.current_thread().name in left:
            left.clear()
            raise OSError("answer lost")
        return won

    turns.create = create  # type: ignore[method-assign,assignment]


# Many writers, random schedules, requests that take effect late


class _Late:
    """A backend that can lose requests, lose answers and deliver requests later."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.mode = "good"
        self.under_way: list[tuple[str, tuple[Buffer, ...]]] = []

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        if self.mode == "late":
            self.under_way.append((name, tuple(parts)))
        won = self.mode in ("good", "after") and bool(self._inner.create(name, parts))
        if self.mode != "good":
            raise OSError("injected")
        return won

    def deliver(self, which: int) -> None:
        self._inner.create(*self.under_way.pop(which % len(self.under_way)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ManyWriters(RuleBasedStateMachine):
    """Whatever happens, the log stays whole and nobody was told anything untrue."""

    @initialize()
    def start(self) -> None:  # noqa: D102
        self.store = fresh()
        self.late = _Late(self.store._backend)
        self.store._backend = self.late
        self.writers: list[LogWriter] = []
        self.wanted: dict[LogWriter, Callable[..., VersionEntry]] = {}
        self.committed: dict[int, VersionEntry] = {}
        self.stopped: set[LogWriter] = set()

    modes = st.sampled_from(["good", "good", "before", "after", "late"])

    @rule(mode=modes)
    def new_writer(self, mode: str) -> None:  # noqa: D102
        if len(self.writers) < 5:
            self.writers.append(writer(self.store, name=len(self.writers) + 1))
            self._try(self.writers[-1], mode, lambda w: take_over(w, deadline_s=BRIEF))

    @rule(who=st.integers(0, 4), mode=modes)
    def reopen(self, who: int, mode: str) -> None:  # noqa: D102
        w = self._pick(who)
        if w and not w.epoch:
            self._try(w, mode, lambda w: take_over(w, deadline_s=BRIEF))

    @rule(who=st.integers(0, 4), mode=modes)
    def publish(self, who: int, mode: str) -> None:  # noqa: D102
        w = self._pick(who)
        if w and w.epoch:
            make = self.wanted.setdefault(w, version(w.log))
            self._try(w, mode, lambda w: self._commit(w, make))

    @rule(who=st.integers(0, 4), mode=modes)
    def tag(self, who: int, mode: str) -> None:  # noqa: D102
        w = self._pick(who)
        if w and w.epoch:
            make = ref("eval", w.log.newest)
            self._try(w, mode, lambda w: w.append(make, deadline_s=BRIEF))

    @rule(which=st.integers(0, 99))
    def something_arrives(self, which: int) -> None:  # noqa: D102
        if self.late.under_way:
            self.late.deliver(which)

    @invariant()
    def the_log_is_whole(self) -> None:  # noqa: D102
        log = read(self.store)
        for number, entry in self.committed.items():
            assert log.versions[number] == entry
        epochs = [e.epoch for e in log.entries]
        assert epochs == sorted(epochs)
        assert len({v.write_id for v in log.versions.values()}) == log.newest

    def _pick(self, who: int) -> LogWriter | None:
        return self.writers[who % len(self.writers)] if self.writers else None

    def _commit(self, w: LogWriter, make: Callable[..., VersionEntry]) -> None:
        entry = w.append(make, deadline_s=BRIEF)
        assert isinstance(entry, VersionEntry)
        self.committed[entry.version] = entry
        del self.wanted[w]

    def _try(self, w: LogWriter, mode: str, act: Callable[[LogWriter], Any]) -> None:
        before = len(raw(self.store))
        self.late.mode = mode
        try:
            act(w)
            assert w not in self.stopped
        except Fenced:
            self.stopped.add(w)
        except PublicationLost:
            self.wanted.pop(w, None)
        except CommitInDoubt:
            assert w.in_doubt is not None
        finally:
            self.late.mode = "good"
        if w in self.stopped:
            assert len(raw(self.store)) == before


TestManyWriters = ManyWriters.TestCase
TestManyWriters.settings = settings(stateful_step_count=30)
