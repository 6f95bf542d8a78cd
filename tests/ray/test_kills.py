"""Whoever is killed, wherever: at most that publication is lost, and no version is wrong.

A publication is stopped at a named point by a gate in the trainer, or by a fault in the store
of the publisher or coordinator actor; then a process is killed. What must hold every time: all
agree on how it ended, the next publication succeeds, every version in the log holds the weights
that were published as it, bit for bit, and the log has no publication twice.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import rayjobs
import torch
from rayjobs import FILE, LONG, Gate, again, ended, inside, levels, read, until
from safetensors.torch import save_file

import weightdelta as wd
from ray_actors import trainer
from weightdelta.config import Config
from weightdelta.errors import CaptureSkew, PublicationLost
from weightdelta.log import Log
from weightdelta.store import Store
from weightdelta.testing.faults import Fault, FaultStore, Op, Plan
from weightdelta.verify import verify

pytestmark = pytest.mark.fault

CONFIG = {"heartbeat_s": 5.0, "busy_wait_s": LONG, "max_step_delay_s": LONG}


def kill(handle: Any, pid: int) -> None:  # noqa: ARG001 (either way is tried)
    os.kill(pid, signal.SIGKILL)


def ray_kill(handle: Any, pid: int) -> None:
    """Ray only asks for it; what the test does next must not be quicker."""
    ray.kill(handle, no_restart=False)
    until(lambda: not runs(pid))


def runs(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


KILLS = pytest.mark.parametrize("by", [kill, ray_kill], ids=["sigkill", "ray.kill"])


def break_log(self: Any, fault: Fault) -> None:
    """In the coordinator: the next entry of the log goes wrong."""
    plan = Plan(fault, ops=frozenset({"create"}))
    self.writer.log.store = FaultStore(self.writer.log.store, plan)


def break_uploads(self: Any, fault: Fault) -> None:
    """In a publisher: the next object goes wrong, or all of them hang."""
    plan = Plan(fault, forever=fault == "hang", ops=frozenset({"write"}))
    self.store = FaultStore(self.store, plan)


def met(self: Any, op: Op, end: str) -> bool:
    """Whether an operation on an object whose name has this end has been asked for."""
    store = self.writer.log.store if hasattr(self, "writer") else self.store
    return any(found == op and name.endswith(end) for found, name in store.calls)


def pid_of(_: Any) -> int:
    return os.getpid()


def baselines(_: Any) -> list[int]:
    """Versions of the baselines in a trainer's process."""
    return [rank.session.version for rank in trainer._RANKS.values()]


class Run:
    """A group of two sync ranks, and what it has published."""

    def __init__(self, group: wd.TrainerGroup, handles: list[Any], base: Path, store: str) -> None:
        self.group = group
        self.handles = handles
        self.base = base
        self.store = store
        self.level = 0
        self.held: dict[int, int] = {}

    @property
    def publisher(self) -> Any:
        """The one publisher actor."""
        return next(iter(self.group.publishers.values()))

    def step(self) -> None:
        """Another state on all ranks, also on one that has just been restarted."""
        self.level += 1
        for handle in self.handles:
            again(lambda handle=handle: handle.put.remote(self.level))

    def begin(self) -> wd.Publication:
        """Publish another state."""
        self.step()
        return self.group.publish(step=self.level)

    def ends(self, publication: wd.Publication, *, committed: bool | None = None) -> None:
        """Take down how a publication ended."""
        found = ended(publication)
        if isinstance(found, int):
            self.held[found] = self.level
        if committed is not None:
            assert isinstance(found, int if committed else PublicationLost), found

    def check(self) -> None:
        """The next publication succeeds, and all there is holds."""
        self.ends(self.begin(), committed=True)
        newest = max(self.held)
        for handle in self.handles:
            until(lambda handle=handle: inside(handle, baselines) == [newest])
        log = Log(Store(self.store))
        log.refresh()
        assert list(log.versions) == sorted(self.held)
        assert {v: e.step for v, e in log.versions.items()} == self.held
        assert len({e.write_id for e in log.versions.values()}) == len(self.held)
        findings = verify(Store(self.store), config=Config(), deep=True, base=self.base)
        assert findings.ok, findings.problems
        assert levels(read(self.store, self.base)) == {self.level}
        assert levels(read(self.store, self.base, newest - 1)) == {self.held.get(newest - 1, 0)}


@pytest.fixture(scope="module")
def run(
    cluster: None,  # noqa: ARG001 (starts Ray)
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    """One attachment for all kills of this file: each has to survive all those before it."""
    store = str(tmp_path_factory.mktemp("kills") / "store")
    # With retries, as some jobs ask for: a capture must not be repeated all the same.
    handles = rayjobs.start("sync", base, ranks=2, max_restarts=-1, max_task_retries=-1)
    config = wd.Config.of({**rayjobs.SETTINGS, **CONFIG})
    group = wd.attach(
        handles, state=rayjobs.live, store=store, base=base, config=config, mark=rayjobs.mark
    )
    yield Run(group, handles, base, store)
    group.close()
    for handle in handles:
        ray.kill(handle)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate.at(tmp_path / "gate")
    yield made
    made.open()


@contextmanager
def hanging(actor: Any, breaks: Callable[[Any, Fault], None]) -> Iterator[Callable[..., None]]:
    """An operation of the actor's store hangs within the block; call it to await that."""
    inside(actor, breaks, "hang")
    try:
        yield lambda op, end="": until(lambda: inside(actor, met, op, end))
    finally:
        again(lambda: actor.__ray_call__.remote(let_go))


def let_go(self: Any) -> None:
    """Release, unless this is a new process with a whole store."""
    store = self.writer.log.store if hasattr(self, "writer") else self.store
    if isinstance(store, FaultStore):
        store.release()


@KILLS
def test_coordinator_before_the_captures(
    run: Run, gate: Gate, by: Callable[[Any, int], None]
) -> None:
    pid = inside(run.group.coordinator, pid_of)
    run.step()
    ray.get(run.handles[0].hook.remote(at_live=gate))
    publication = run.group.publish(step=run.level)
    gate.wait()
    by(run.group.coordinator, pid)
    gate.open()
    run.ends(publication, committed=False)
    run.check()


def test_coordinator_after_the_captures_before_a_receipt(run: Run) -> None:
    pid = inside(run.group.coordinator, pid_of)
    with hanging(run.publisher, break_uploads) as reached:
        publication = run.begin()
        reached("write")
        os.kill(pid, signal.SIGKILL)
    run.ends(publication, committed=False)
    run.check()


def test_coordinator_between_the_receipts_and_the_commit(run: Run) -> None:
    inside(run.group.coordinator, break_log, "kill")
    run.ends(run.begin(), committed=False)
    run.check()


def test_coordinator_after_the_commit_before_its_answer(run: Run) -> None:
    """Only the log knows; the next coordinator finds it there and tells everybody."""
    inside(run.group.coordinator, break_log, "kill-after")
    run.ends(run.begin(), committed=True)
    run.check()


def test_coordinator_for_good(run: Run) -> None:
    """Ray is told not to restart it; the driver starts another, which takes over."""
    before = run.group.coordinator
    publication = run.begin()
    ray.kill(before)
    run.ends(publication)
    run.check()
    assert run.group.coordinator is not before


def test_coordinator_for_good_after_the_commit_before_its_answer(run: Run) -> None:
    """Nobody is left to tell the ranks; they catch up when the next publication begins."""
    before = run.group.coordinator
    newest = max(run.held)
    inside(before, break_log, "kill-after")
    publication = run.begin()
    log = Log(Store(run.store))
    until(lambda: log.refresh() and log.newest > newest)
    ray.kill(before)  # while Ray is about to restart it
    run.ends(publication, committed=True)  # the next coordinator found it in the log
    run.check()


def test_coordinator_between_two_publications(run: Run) -> None:
    os.kill(inside(run.group.coordinator, pid_of), signal.SIGKILL)
    run.ends(run.begin(), committed=True)
    run.check()


@pytest.mark.parametrize("fault", ["kill", "kill-after"])
def test_publisher_before_and_after_its_upload(run: Run, fault: Fault) -> None:
    """An upload may be repeated, so nothing is lost at all."""
    inside(run.publisher, break_uploads, fault)
    run.ends(run.begin(), committed=True)
    run.check()


def test_publisher_fails_with_an_error_of_no_type_of_ours(run: Run) -> None:
    """It is named at once, not taken for a rank that fell silent; and the next one is whole."""
    inside(run.publisher, break_memory)
    publication = run.begin()
    with pytest.raises(PublicationLost, match=r"failed with MemoryError: no room"):
        publication.wait(LONG)
    inside(run.publisher, mend_memory)
    run.check()


def break_memory(self: Any) -> None:
    """In a publisher: nothing can be begun."""

    class Full:
        def begin(self, name: str) -> None:
            raise MemoryError(f"no room for {name}")

    self.whole, self.store = self.store, Full()


def mend_memory(self: Any) -> None:
    """In a publisher: all is well again."""
    self.store = self.whole


def test_rank_within_its_capture(run: Run) -> None:
    run.step()
    ray.get(run.handles[1].hook.remote(on_live=die))
    run.ends(run.group.publish(step=run.level), committed=False)
    run.check()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@KILLS
def test_rank_after_its_capture_before_its_receipt(
    run: Run, by: Callable[[Any, int], None]
) -> None:
    """Only its heartbeat can tell: the driver has its word that it captured."""
    handle = run.handles[0]
    pid = ray.get(handle.pid.remote())
    with hanging(run.publisher, break_uploads) as reached:
        publication = run.begin()
        reached("write", "/00000")
        ray.get(handle.pid.remote())  # its capture has returned
        by(handle, pid)
    run.ends(publication, committed=False)
    run.check()


def test_rank_between_its_receipt_and_the_commit(run: Run) -> None:
    """The commit needs it no more."""
    handle = run.handles[0]
    pid = ray.get(handle.pid.remote())
    with hanging(run.group.coordinator, break_log) as reached:
        publication = run.begin()
        reached("create")
        os.kill(pid, signal.SIGKILL)
    run.ends(publication, committed=True)
    run.check()


def test_rank_after_the_commit_before_its_baseline_moves(run: Run) -> None:
    handle = run.handles[1]
    pid = ray.get(handle.pid.remote())
    try:
        with hanging(run.group.coordinator, break_log) as reached:
            publication = run.begin()
            reached("create")
            os.kill(pid, signal.SIGSTOP)  # it will not see the outcome
        run.ends(publication, committed=True)
    finally:
        os.kill(pid, signal.SIGKILL)
    run.check()


def test_publisher_for_good(run: Run) -> None:
    """Last in this file: from here on the ranks upload themselves."""
    ray.kill(run.publisher)
    run.ends(run.begin(), committed=True)
    run.check()


@pytest.mark.parametrize("kind", ["threaded", "asyncio"])
def test_rank_of_another_kind_is_attached_again(
    trainers: Any, attach: Any, base: Path, tmp_path: Path, kind: str
) -> None:
    handles = trainers(kind)[:1]
    group = attach(handles, config=CONFIG, mark=rayjobs.mark)
    run = Run(group, handles, base, str(tmp_path / "store"))
    run.ends(run.begin(), committed=True)
    os.kill(ray.get(handles[0].pid.remote()), signal.SIGKILL)
    run.step()
    run.check()


def test_restarted_rank_that_cannot_show_its_step_is_refused(
    trainers: Any, attach: Any, base: Path, tmp_path: Path
) -> None:
    """Its weights may be those of any step: a mixture must never become a version."""
    handles = trainers("sync")[:2]
    group = attach(handles, config=CONFIG)
    run = Run(group, handles, base, str(tmp_path / "store"))
    run.ends(run.begin(), committed=True)
    os.kill(ray.get(handles[1].pid.remote()), signal.SIGKILL)
    until(lambda: again(handles[1].pid.remote))
    for _ in range(2):
        with pytest.raises(CaptureSkew, match="rank 1 was restarted"):
            group.publish().wait(LONG)
    assert levels(read(run.store, base)) == {1}
    run.step()
    again_attached = attach(handles, config=CONFIG)
    assert again_attached.publish().wait(LONG).version == 2
    assert levels(read(run.store, base)) == {2}


def test_coordinator_of_a_large_model_restarts(
    cluster: None,  # noqa: ARG001 (starts Ray)
    tmp_path: Path,
) -> None:
    """Its arguments are too large to travel with the call, so somebody has to keep them."""
    count = 3000
    folder = tmp_path / "wide"
    folder.mkdir()
    save_file({f"w{i:05}": torch.full((2,), 1.0).bfloat16() for i in range(count)}, folder / FILE)
    handle = rayjobs.start("sync", folder, ranks=1)[0]
    group = wd.attach(
        [handle],
        state=rayjobs.live,
        store=str(tmp_path / "wide-store"),
        base=folder,
        config=wd.Config.of({**rayjobs.SETTINGS, **CONFIG}),
        mark=rayjobs.mark,
    )
    assert group.publish().wait(LONG).version == 1
    for version, no_restart in ((2, False), (3, True), (4, True)):
        ray.kill(group.coordinator, no_restart=no_restart)
        ray.get(handle.put.remote(version))
        until(lambda: not ended_early(group))
        assert group.publish().wait(LONG).version == version
    group.close()
    ray.kill(handle)


def ended_early(group: wd.TrainerGroup) -> bool:
    """Whether the coordinator is still being restarted."""
    try:
        group.tag("probe")
    except PublicationLost:
        return True
    return False
