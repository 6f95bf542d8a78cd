"""No version holds half a step, whatever kind of actor trains; and no step waits for long.

Each test arranges the one interleaving that would tear a version, and runs it once more with the
fence taken away, to see it torn.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from rayjobs import LONG, MOMENT, Gate, inside, levels, read, until

from ray_actors import trainer
from weightdelta.errors import CaptureDropped, UnfencedWriter

CONCURRENT = pytest.mark.parametrize("kind", ["threaded", "asyncio"])
HOOKED = pytest.mark.parametrize("hooked", [True, False], ids=["fence", "control"])


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Gate]:
    made = Gate.at(tmp_path / "first")
    yield made
    made.open()


def unhook(_: Any) -> None:
    """Take the fence away, in the trainer's process."""
    for rank in trainer._RANKS.values():
        rank.session.fence.close()


def delay(_: Any) -> float:
    """Longest time that a step has waited [s]."""
    return max(rank.session.fence.delay_s for rank in trainer._RANKS.values())


def test_sync_actor_captures_between_its_calls(
    trainers: Any, attach: Any, base: Path, gate: Gate, store: str
) -> None:
    """publish() returns while the step before it stands half way; the one after comes too late."""
    handle = trainers("sync")[0]
    group = attach([handle])
    before = handle.step.remote(gate)
    gate.wait()
    publication = group.publish(step=1)
    after = handle.step.remote()
    assert not publication.done()
    gate.open()
    assert publication.wait(LONG).step == 1
    assert ray.get([before, after]) == [1, 2]
    assert levels(read(store, base)) == {1}


@CONCURRENT
@HOOKED
def test_capture_waits_for_a_step_that_stands_half_way(
    trainers: Any, attach: Any, base: Path, gate: Gate, store: str, kind: str, hooked: bool
) -> None:
    handle = trainers(kind)[0]
    group = attach([handle], config={"max_step_delay_s": LONG})
    if not hooked:
        inside(handle, unhook)
    step = handle.step.remote(gate)
    gate.wait()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(group.publish)
        if hooked:
            with pytest.raises(TimeoutError):
                publishing.result(MOMENT)
            gate.open()
        publishing.result(LONG).wait(LONG)
    gate.open()
    ray.get(step)
    assert levels(read(store, base)) == ({1} if hooked else {0, 1})


@CONCURRENT
@HOOKED
def test_step_waits_for_a_capture_that_stands_half_way(
    trainers: Any,
    attach: Any,
    base: Path,
    gate: Gate,
    first: Gate,
    store: str,
    kind: str,
    hooked: bool,
) -> None:
    """The caller did not wait for the step's result, as it must; and no version is torn."""
    handle = trainers(kind)[0]
    # "a" and "z" in frames of their own: the first is being compared when the second is looked up.
    group = attach([handle], config={"max_step_delay_s": LONG, "frame_bytes": 64 * 1024})
    if not hooked:
        inside(handle, unhook)
    ray.get(handle.step.remote())
    ray.get(handle.hook.remote(at_read=gate))
    step = handle.step.remote(None, first)
    first.wait()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(group.publish)
        gate.wait()  # "a" has been read, "z" has not
        first.open()
        if hooked:
            time.sleep(MOMENT)
            assert not first.left()
        else:
            until(first.left)
        assert not publishing.done()  # it returns once captured
        gate.open()
        publishing.result(LONG).wait(LONG)
    assert ray.get(step) == 2
    assert levels(read(store, base)) == ({1} if hooked else {1, 2})


@CONCURRENT
def test_step_goes_on_after_its_bound_and_the_next_publication_covers_the_span(
    trainers: Any, attach: Any, base: Path, gate: Gate, first: Gate, store: str, kind: str
) -> None:
    handle = trainers(kind)[0]
    bound = 0.2
    group = attach([handle], config={"max_step_delay_s": bound})
    ray.get(handle.hook.remote(at_read=gate))
    step = handle.step.remote(None, first)
    first.wait()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(group.publish)
        gate.wait()
        first.open()
        until(first.left)  # the capture cannot end before the gate opens: only the bound helps
        gate.open()
        with pytest.raises(CaptureDropped):
            publishing.result(LONG)
    assert ray.get(step) == 1
    assert inside(handle, delay) >= bound
    stats = group.publish().wait(LONG)
    assert (stats.version, levels(read(store, base))) == (1, {1})


def test_capture_gives_up_on_a_step_that_outlasts_the_bound(
    trainers: Any, attach: Any, base: Path, gate: Gate, store: str
) -> None:
    handle = trainers("threaded")[0]
    group = attach([handle], config={"max_step_delay_s": 0.1})
    step = handle.step.remote(gate)
    gate.wait()
    with pytest.raises(CaptureDropped, match="after the step's result"):
        group.publish()
    gate.open()
    ray.get(step)
    group.publish().wait(LONG)
    assert levels(read(store, base)) == {1}


def _with_shadow(self: Any) -> Any:
    """Weights that another writer than the optimizer sets: a copy."""
    tensors = self.live()
    return {**tensors, "z": tensors["z"].clone()}


def _held(self: Any) -> Any:
    @contextmanager
    def held() -> Iterator[None]:
        self.held = getattr(self, "held", 0) + 1
        yield

    return held()


@CONCURRENT
def test_unfenced_writer_needs_a_guard(
    trainers: Any, attach: Any, base: Path, store: str, kind: str
) -> None:
    handle = trainers(kind)[0]
    with pytest.raises(UnfencedWriter, match=r"'z'.*guard="):
        attach([handle], state=_with_shadow)
    group = attach([handle], state=_with_shadow, guard=_held)
    before = inside(handle, lambda self: getattr(self, "held", 0))
    group.publish().wait(LONG)
    assert inside(handle, lambda self: self.held) == before + 1
    assert levels(read(store, base)) == {0}


def test_unfenced_writer_is_no_matter_on_a_sync_actor(trainers: Any, attach: Any) -> None:
    assert attach([trainers("sync")[0]], state=_with_shadow).publish().wait(LONG).version == 1
