"""attach and publish under misuse, interrupts, a silent store, stuck ranks and a dead driver."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import rayjobs
import torch
from rayjobs import LONG, Gate, again, ended, inside, levels, read, until

import ray_actors.attach as driver
from ray_actors import trainer
from weightdelta.errors import Busy, Fenced, InputError, PublicationLost
from weightdelta.publish import Outcome
from weightdelta.record import HEAD

FAST_STORE = {"fsync": False, "timeout_s": 2.0}


def sessions(_: Any) -> list[str]:
    return sorted(trainer._RANKS)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


class BeforeTakeOver:
    """The trainer module, as attach sees it; runs a function when an attach is about to take over.

    By then its run is open in the log, and its ranks still hold the sessions of others.
    """

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self._left = list(functions)

    def __getattr__(self, name: str) -> Any:
        if name == "take_over" and self._left:
            self._left.pop(0)()
        return getattr(trainer, name)


def test_of_two_attaches_the_one_that_opened_last_keeps_its_sessions(
    trainers: Any, attach: Any, base: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one attaches as a whole between the older one's opening and its taking over."""
    handles = trainers("sync")
    newer: list[Any] = []
    with monkeypatch.context() as patch:
        late = BeforeTakeOver(lambda: newer.append(attach(handles)))
        patch.setattr(driver, "trainer", late)
        with pytest.raises(Fenced, match="another job has attached"):
            attach(handles)
    assert ended(newer[0].publish(step=1)) == 1
    assert levels(read(store, base)) == {0}
    assert [inside(h, sessions) for h in handles] == 2 * [[newer[0]._attachment.group]]


def test_an_older_attach_that_takes_over_late_leaves_the_newer_ones_sessions(
    trainers: Any, attach: Any, base: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs are open when the older one takes over, then the newer one does."""
    handles = trainers("sync")
    opened = threading.Event()
    with ThreadPoolExecutor(2) as pool, monkeypatch.context() as patch:
        second: list[Future[Any]] = []

        def older() -> None:
            second.append(pool.submit(attach, handles))
            assert opened.wait(LONG)

        def newer() -> None:
            opened.set()
            first.result(LONG)

        patch.setattr(driver, "trainer", BeforeTakeOver(older, newer))
        first = pool.submit(attach, handles)
        old, new = first.result(LONG), second[0].result(LONG)
    assert isinstance(ended(old.publish()), Fenced)
    assert ended(new.publish(step=1)) == 1
    assert levels(read(store, base)) == {0}


def test_a_rank_that_restarted_during_the_attach_is_named(
    trainers: Any, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = trainers("sync")

    def restart() -> None:
        before = ray.get(handles[1].pid.remote())
        ray.kill(handles[1], no_restart=False)
        until(lambda: again(handles[1].pid.remote) != before)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "trainer", BeforeTakeOver(restart))
        with pytest.raises(PublicationLost, match="restarted meanwhile, attach again"):
            attach(handles)
    assert ended(attach(handles).publish()) == 1


def test_one_store_spelled_in_three_ways_is_one_store(
    trainers: Any, attach: Any, store: str, tmp_path: Path
) -> None:
    handles = trainers("sync")
    (tmp_path / "link").symlink_to(tmp_path)
    spelled = [store, f"file://{store}", store + "/", str(tmp_path / "link" / "store")]
    groups = [attach(handles, store=s) for s in spelled]
    assert [inside(h, sessions) for h in handles] == 2 * [[groups[-1]._attachment.group]]
    assert all(isinstance(ended(g.publish()), Fenced) for g in groups[:-1])
    assert ended(groups[-1].publish()) == 1


def test_an_interrupt_after_the_captures_were_sent_does_not_block_the_next(
    trainers: Any, attach: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = trainers("sync")
    group = attach(handles, config={"max_step_delay_s": LONG})
    ray.get(handles[0].hook.remote(at_live=gate))
    with monkeypatch.context() as patch:
        patch.setattr(group, "_follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.publish(step=1)
    gate.wait()
    following = group.publish(step=1)  # stands in line behind the capture that was given up
    gate.open()
    assert ended(following) == 1


def moody_mark(self: Any) -> int:
    if self.count == 99:
        raise ValueError("no mark now")
    return int(self.count)


def test_a_rank_reports_itself_what_fails_before_its_capture(
    trainers: Any, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may be interrupted at any point, and must not be the only one to tell."""
    handles = trainers("sync")
    group = attach(handles, mark=moody_mark)
    unseen: Future[Outcome] = Future()
    unseen.set_result(Outcome("", error=PublicationLost("nobody looked")))
    ray.get([h.put.remote(99) for h in handles])
    with monkeypatch.context() as patch:
        patch.setattr(group, "_follow", lambda *_: unseen)
        group.publish()
    ray.get([h.put.remote(1) for h in handles])

    def committed() -> int | None:
        try:
            return group.publish().wait(LONG).version
        except Busy:
            return None

    assert until(committed) == 1


def test_a_silent_store_does_not_hold_up_a_call_that_skips(
    trainers: Any, attach: Any, gate: Gate, store: str
) -> None:
    handles = trainers("sync")
    group = attach(handles, config={"on_busy": "skip", "store": FAST_STORE})
    assert ended(group.publish(step=1)) == 1
    until(lambda: group._last.done())
    ray.get(handles[0].hook.remote(at_live=gate))
    under_way = group.publish(step=2)
    gate.wait()
    head = Path(store) / HEAD
    head.unlink()
    os.mkfifo(head)  # whoever opens it to read waits
    try:
        skipped = group.publish(step=3).wait(LONG)
    finally:
        head.unlink()
    assert (skipped.committed, skipped.version, skipped.step) == (False, 1, 3)
    gate.open()
    assert ended(under_way) == 2


def test_an_actor_that_is_given_twice_is_refused_by_its_positions(
    trainers: Any, attach: Any
) -> None:
    a, b = trainers("sync")
    with pytest.raises(InputError, match=r"different actor.*at positions 0 and 2; pass each"):
        attach([a, b, a])
    assert inside(a, sessions) == []


def test_close_does_not_wait_for_a_rank_that_is_stuck(
    trainers: Any, attach: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = trainers("sync")
    group = attach(handles)
    step = handles[0].step.remote(gate)
    gate.wait()
    monkeypatch.setattr(driver, "DETACH_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(group.close).result(LONG)
        finally:
            gate.open()
    ray.get(step)
    assert [inside(h, sessions) for h in handles] == [[], []]  # its call stood in line


def test_publish_on_concurrent_actors_ends_with_its_bound_when_a_capture_is_stuck(
    trainers: Any, attach: Any, base: Path, gate: Gate, store: str
) -> None:
    handles = trainers("threaded")
    config = {"publish_timeout_s": 2.0, "max_step_delay_s": LONG}
    group = attach(handles, config=config)
    ray.get(handles[0].hook.remote(at_live=gate))
    with ThreadPoolExecutor(1) as pool:
        try:
            with pytest.raises(PublicationLost, match=r"no capture by ranks \[0\] within 2.0 s"):
                pool.submit(group.publish).result(LONG)
        finally:
            gate.open()
    assert group.publish().wait(LONG).version == 1
    assert levels(read(store, base)) == {0}


def test_a_step_that_is_no_integer_of_64_bits_is_refused_at_once(
    trainers: Any, attach: Any
) -> None:
    group = attach(trainers("sync"))
    refused: list[tuple[Any, str]] = [
        (True, "found bool True"),
        (2.0, "found float 2.0"),
        (torch.tensor(True), "found Tensor"),
        ("7", "found str '7'"),
        (torch.tensor([1.0, 2.0]), "found Tensor"),
        (-1, "found -1"),
        (2**63, f"found {2**63}"),
        (10**5000, "found a number of 16610 bits"),
    ]
    for step, message in refused:
        with pytest.raises(InputError, match=message):
            group.publish(step=step)
    steps = [group.publish(step=s).wait(LONG).step for s in (np.int64(3), torch.tensor(4))]
    assert steps == [3, 4]
    assert [type(s) for s in steps] == [int, int]
    assert group.publish(step=2**63 - 1).wait(LONG).step == 2**63 - 1


DRIVER = """
import os, signal, sys
import ray, rayjobs
import weightdelta as wd
address, store, base, *names = sys.argv[1:]
ray.init(address=address, namespace="orphans", log_to_driver=False, logging_level="ERROR")
config = wd.Config.of({**rayjobs.SETTINGS, "heartbeat_s": 1.0})
handles = [ray.get_actor(name) for name in names]
group = wd.attach(handles, store=store, base=base, state=rayjobs.live, config=config)
assert group.publish().wait(60).version == 1
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def detached(cluster: None, base: Path) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (starts Ray)
    """Trainers by name that outlive the drivers that attach to them."""
    options = {"lifetime": "detached", "namespace": "orphans"}
    names = [f"{kind}-{os.getpid()}" for kind in ("sync", "threaded")]
    made = {n: rayjobs.start(n.split("-")[0], base, ranks=1, name=n, **options)[0] for n in names}
    ray.get([h.pid.remote() for h in made.values()])
    yield made
    for handle in made.values():
        ray.kill(handle)


def test_ranks_end_the_session_of_a_driver_that_was_killed(
    detached: dict[str, Any], base: Path, store: str
) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, address, store, str(base), *detached],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for handle in detached.values():
        until(lambda handle=handle: inside(handle, sessions) == [])
        until(
            lambda handle=handle: not [n for n in ray.get(handle.threads.remote()) if "beat" in n]
        )
