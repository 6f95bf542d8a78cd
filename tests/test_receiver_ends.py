"""What an error, an interrupt or a second pass leaves behind: nothing that could go wrong later."""

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, Self

import pytest
import raw_laws
from raw_laws import a_run, config
from small_runs import SmallRun, all_bits

import weightdelta.block_memory as block_memory_module
import weightdelta.decode_batch as decode_module
import weightdelta.delta as delta_module
from weightdelta.codecs import blocks
from weightdelta.config import Config
from weightdelta.decode import Staged
from weightdelta.decode_batch import Decoded
from weightdelta.device_lists import SLOTS, Part, StagedLists
from weightdelta.device_memory import HostBuffer, Lanes
from weightdelta.errors import DamagedObject, NotPrepared, WeightDeltaError
from weightdelta.fold import Changes
from weightdelta.log import Log
from weightdelta.receiver import Receiver
from weightdelta.site import Site
from weightdelta.versions import find_path

Follow = Callable[..., Receiver]


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTDELTA_DEVICE_KERNELS", "torch_ops")


class Interrupt(BaseException):
    """As Ctrl-C: caught by nobody."""


# -- order of work in lanes: what a GPU would be free to do ------------------------------------

Clock = dict[str, int]


class Clocked:
    """A lane that only keeps a vector clock."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tick(self) -> Clock:
        """One more piece of work; its clock."""
        self.clock = {**self.clock, self.name: self.clock.get(self.name, 0) + 1}
        return self.clock

    def mark(self, **_: Any) -> Clock:
        """What is done by now."""
        return self.clock

    def after(self, mark: Clock) -> None:
        """Go on once that is done."""
        self.clock = {n: max(self.clock.get(n, 0), mark.get(n, 0)) for n in {*self.clock, *mark}}

    def after_caller(self) -> None:
        """Nobody else works here."""

    def wait(self) -> None:
        """Tells a device nothing."""


class Watched:
    """Notes which piece of a pause's work uses which slot."""

    def __init__(self, lists: StagedLists, monkeypatch: pytest.MonkeyPatch) -> None:
        low, pause, link, decoding = (Clocked(n) for n in ("low", "pause", "link", "decoding"))
        site: Any = lists.site
        site.lanes = Lanes(low, pause, link, decoding)  # type: ignore[arg-type]
        site.pause, site.link = pause, link
        self.copies: list[tuple[int, Clock]] = []
        self.reads: list[tuple[int, Clock]] = []
        send, scatter = lists._send, lists._scatter

        def sent(part: Any, free: Any, **more: Any) -> Any:
            found = send(part, free, **more)
            self.copies.append((len(free) % SLOTS, link.tick()))
            return found

        def scattered(part: Any, found: Any, **more: Any) -> None:
            scatter(part, found, **more)
            if part.streamed:
                self.reads.append((self.copies[-1][0], pause.tick()))

        monkeypatch.setattr(lists, "_send", sent)
        monkeypatch.setattr(lists, "_scatter", scattered)


@pytest.mark.parametrize("second", ["put_back", "begin"])
def test_a_second_pass_of_streamed_lists_waits_for_the_slots_of_the_first(
    tmp_path: Path, follow: Follow, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mismatch elsewhere, or an interrupt, the first may still read them."""
    run = a_run(tmp_path, "lz4", shares=(0.3,))
    receiver = follow(run.model(), store=run.store, config=config(blocks="lists", staging=64 << 10))
    prepared = receiver.prepare()
    prepared.wait()
    lists = prepared._future.result().staged.devices[0]._lists
    assert sum(part.streamed for part in lists._parts) > 2 * SLOTS
    watched = Watched(lists, monkeypatch)
    lists.begin(back=False)
    copies, reads = len(watched.copies), list(watched.reads)
    getattr(lists, second)(back=False)
    for slot, clock in watched.copies[copies:]:
        for other, read in reads:
            assert other != slot or clock.get("pause", 0) >= read["pause"]
    run.close()


def test_nothing_is_read_or_freed_while_an_interrupted_pause_still_runs(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt, attach(), release() and close() wait for the lanes before all else."""
    events: list[str] = []
    settle, digests = Site.settle, Receiver._digests

    def settled(self: Site) -> None:
        events.append("settle")
        settle(self)

    def read(self: Receiver) -> Any:
        events.append("digests")
        return digests(self)

    run = a_run(tmp_path, "lz4", shares=(0.3,))
    receiver = follow(run.model(), store=run.store, config=config())
    receiver.prepare().wait()
    monkeypatch.setattr(Site, "settle", settled)
    monkeypatch.setattr(Receiver, "_digests", read)
    with raw_laws.failing(receiver, at=1, share=0.5, error=Interrupt), pytest.raises(Interrupt):
        receiver.apply()
    assert events == ["settle"]
    receiver.apply()
    assert events == ["settle"], "an apply that ends well has waited already"
    receiver.attach()
    assert events.index("settle", 1) < events.index("digests")
    for end in (receiver.release, receiver.close):
        events.clear()
        end()
        assert "settle" in events
    run.close()


# -- the end of a move -------------------------------------------------------------------------


@contextmanager
def interrupted(function: Any, *, line: int) -> Iterator[None]:
    """Raise ``Interrupt`` before a line of ``function`` that is so many lines after its ``def``."""
    code = function.__code__
    wanted = code.co_firstlineno + line

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return trace if event == "call" else None
        if event == "line" and frame.f_lineno == wanted:
            sys.settrace(None)
            raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _lines(function: Any) -> list[int]:
    code = function.__code__
    found = {number for _, _, number in code.co_lines() if number} - {code.co_firstlineno}
    return sorted(number - code.co_firstlineno for number in found)


@pytest.mark.parametrize("blocks_as", ["raw", "lists"])
@pytest.mark.parametrize("line", _lines(Receiver._arrive))
def test_an_interrupt_at_the_end_of_a_move_loses_nothing(
    tmp_path: Path, follow: Follow, line: int, blocks_as: str
) -> None:
    """Wherever it hits, apply() again finishes, and the way back leads back."""
    run = a_run(tmp_path, "lz4", shares=(0.01, 0.01))
    model = run.model()
    receiver = follow(model, store=run.store, config=config(blocks=blocks_as))
    raw_laws.go(receiver, 1, raw=blocks_as == "raw")
    receiver.prepare(version=2).wait()
    for move, there in ((receiver.apply, 2), (receiver.rollback, 1)):
        try:
            with interrupted(Receiver._arrive, line=line):
                move()
        except Interrupt:
            if receiver.state != "CLEAN":
                receiver.apply()
        assert (receiver.state, receiver.version) == ("CLEAN", there)
        assert all_bits(model) == run.versions[there]
        assert receiver.scrub() == there
    raw_laws.go(receiver, 2, raw=blocks_as == "raw")
    assert all_bits(model) == run.versions[2]
    run.close()


def test_what_was_given_back_cannot_be_stored(tmp_path: Path, follow: Follow) -> None:
    run = a_run(tmp_path, "lz4", shares=(0.01,))
    receiver = follow(run.model(), store=run.store, config=config())
    prepared = receiver.prepare()
    prepared.wait()
    staged = prepared._future.result().staged
    staged.clear()
    with ThreadPoolExecutor(1) as pool, pytest.raises(NotPrepared, match="given back"):
        staged.store(pool=pool, workers=1, back=False)
    run.close()


# -- failed preparations -----------------------------------------------------------------------


def test_failed_preparations_keep_no_host_memory(
    tmp_path: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while their errors are kept: at real size these buffers are gigabytes, pinned."""
    made: list[HostBuffer] = []

    def buffer(device: Any) -> HostBuffer:
        made.append(HostBuffer(device))
        return made[-1]

    run = a_run(tmp_path, "lz4", shares=(0.01,))
    pack = blocks.pack

    def damaged(*args: Any, **more: Any) -> Any:
        found = pack(*args, **more)
        arena = found.arena.copy()
        arena[-30:] = 255
        return blocks.Blocks(found.inner, found.size, found.sizes, arena)

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "pack", damaged)
        with suppress(DamagedObject):  # committed; then the trainer's own baseline meets it
            run.step(7, share=0.01)
    monkeypatch.setattr(block_memory_module, "HostBuffer", buffer)
    receiver = follow(run.model(), store=run.store, config=config())
    raw_laws.go(receiver, 1)
    before, errors = len(made), []
    for _ in range(10):
        with pytest.raises(DamagedObject) as caught:
            receiver.prepare(version=2).wait()
        errors.append(caught.value)
    assert len(made) <= before + 2, "every preparation takes what the last one gave back"
    free = raw_laws.memory_of(receiver)._free
    assert all(len(kept) <= block_memory_module.LENT for kept in free.values())
    run.close()


@pytest.mark.parametrize("where", ["fetch", "decode"])
def test_a_failed_preparation_drops_its_requests(
    tmp_path: Path, follow: Follow, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next preparation does not wait for what nobody wants any more."""
    monkeypatch.setattr(delta_module, "SPAN", 3000)
    monkeypatch.setattr(delta_module, "GAP", 1)
    run = a_run(tmp_path, "snappy", shares=(0.3, 0.3, 0.3), max_bytes=5000)
    model = run.model()
    one = {"threads": 1, "store": {"threads": 1}}
    receiver = follow(model, store=run.store, config=config(blocks="lists", **one))

    def broken(*_: Any) -> Any:
        raise DamagedObject("as a test wants it")

    with monkeypatch.context() as patch:
        if where == "fetch":
            patch.setattr(delta_module.DeltaReader, "_span", broken)
        else:
            patch.setattr(decode_module, "_decode", broken)
        with pytest.raises(WeightDeltaError, match="as a test wants it"):
            receiver.prepare(version=3).wait()
        receiver._background.submit(int).result()
        receiver._fetchers.submit(int).result()
        assert receiver._fetchers._work_queue.qsize() == 0
    raw_laws.go(receiver, 3, raw=False)
    assert all_bits(model) == run.versions[3]
    run.close()


def test_times_of_a_path_are_not_counted_twice(run: SmallRun, follow: Follow) -> None:
    """Hops arrive beside each other."""
    stats = follow(run.model()).prepare(version=3).wait()
    assert stats.hops == 3
    assert 0 < stats.fetch_s <= stats.prepare_s
    log = Log(run.store)
    log.refresh()
    path = find_path(log, start=0, end=3, max_chain=9)
    assert stats.fetched_bytes == sum(hop.entry.payload_bytes for hop in path)


def test_an_interrupted_release_leaves_threads_that_work(
    run: SmallRun, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run.model()
    receiver = follow(model)

    def stopped(*_: Any, **__: Any) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", stopped)
        with pytest.raises(Interrupt):
            receiver.release()
    receiver.prepare(version=3).wait()
    receiver.apply()
    assert all_bits(model) == run.versions[3]


# -- preparations that end badly ---------------------------------------------------------------


class Stubborn:
    """An engine that does not stand still when it is asked to."""

    def __init__(self, model: Any) -> None:
        self.model, self.stubborn = model, False

    def tensors(self) -> Any:
        """The weights."""
        return dict(self.model)

    def aliases(self) -> dict[str, str]:
        """None are tied."""
        return {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Fails while ``stubborn``."""
        if self.stubborn:
            raise RuntimeError("does not stand still")
        yield


def test_a_preparation_dropped_by_a_failed_rollback_is_an_error_of_ours(
    run: SmallRun, follow: Follow
) -> None:
    engine = Stubborn(run.model())
    receiver = follow(engine)
    receiver.prepare(version=1).wait()
    receiver.apply()
    gate = Event()
    busy = [receiver._background.submit(gate.wait) for _ in range(2)]
    prepared = receiver.prepare(version=2)
    engine.stubborn = True
    with pytest.raises(RuntimeError, match="stand still"):
        receiver.rollback()
    engine.stubborn = False
    gate.set()
    assert all(job.result() for job in busy)
    for end in (prepared.wait, receiver.apply):
        with pytest.raises(NotPrepared, match="dropped before it started"):
            end()
    receiver.prepare(version=3).wait()
    receiver.apply()
    assert all_bits(engine.model) == run.versions[3]


@pytest.mark.parametrize("use", ["always", "never"])
def test_a_kept_error_keeps_nothing_of_what_was_staged(
    run: SmallRun, follow: Follow, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither lists, nor folded hops, nor decoded frames: on a device they are its memory."""
    kinds = (Staged, Part, Decoded, Changes)
    receiver = follow(run.model(), config=Config.of({"device": {"use": use}}))

    def wrong(*_: Any) -> None:
        raise DamagedObject("as a test wants it")

    monkeypatch.setattr(Receiver, "_check_digest", wrong)
    prepared = receiver.prepare(version=3)
    with pytest.raises(DamagedObject, match="as a test wants it") as caught:
        prepared.wait()
    gc.collect()
    left = {type(o).__name__ for o in gc.get_objects() if type(o) in kinds}
    assert not left
    assert caught.value.__traceback__ is not None
    assert not prepared._future.cancelled()
