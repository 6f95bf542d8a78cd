"""attach and publish on real actors: what the driver sees, on success and on every refusal."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from rayjobs import FILE, LONG, Gate, again, ended, inside, levels, live, read, until
from safetensors.torch import load_file, save_file

from ray_actors import trainer
from weightdelta.config import Config
from weightdelta.errors import (
    Busy,
    CaptureSkew,
    ConfigError,
    Fenced,
    InputError,
    LayoutMismatch,
    NotYet,
    PublicationLost,
    StateMismatch,
    StoreUnavailable,
)
from weightdelta.fence import StepFence
from weightdelta.log import Log
from weightdelta.record import OpenEntry
from weightdelta.store import Store
from weightdelta.verify import verify


def step_all(handles: list[Any]) -> None:
    ray.get([h.step.remote() for h in handles])


def hooks(_: Any) -> int:
    """Optimizer hooks of ours in a trainer's process."""
    from torch.optim import optimizer

    found = [
        *optimizer._global_optimizer_pre_hooks.values(),
        *optimizer._global_optimizer_post_hooks.values(),
    ]
    return sum(isinstance(getattr(h, "__self__", None), StepFence) for h in found)


def sessions(_: Any) -> list[str]:
    return sorted(trainer._RANKS)


def pid_of(_: Any) -> int:
    return os.getpid()


def actors() -> set[str]:
    return {a["name"] for a in ray.util.list_named_actors(all_namespaces=True)}


def test_versions_tags_and_nothing_left_after_close(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("sync")
    group = attach(handles)
    for step in (1, 2):
        step_all(handles)
        stats = group.publish(step=step).wait(LONG)
        assert (stats.version, stats.step, stats.committed) == (step, step, True)
        assert (stats.changed, stats.elements) == (40129, 40129)
    nothing = group.publish(step=2).wait(LONG)
    assert (nothing.version, nothing.changed, nothing.payload_bytes) == (3, 0, 0)
    assert [levels(read(store, base, v)) for v in (1, 2, 3)] == [{1}, {2}, {2}]
    assert group.tag("eval", version=1) == 1
    assert group.tag("rollout") == 3
    with pytest.raises(NotYet, match="version 9"):
        group.tag("eval", version=9)
    log = Log(Store(store))
    log.refresh()
    assert log.refs == {"eval": 1, "rollout": 3}
    assert sum(group.job.owned_bytes()) == 2 * 40129
    assert all(inside(h, hooks) == 2 for h in handles)
    group.close()
    for handle in handles:
        assert inside(handle, hooks) == 0
        assert inside(handle, sessions) == []
        left = ray.get(handle.threads.remote())
        assert not [name for name in left if "beat" in name], left
    assert not [name for name in actors() if group._attachment.group in name]
    with pytest.raises(InputError, match="attach again"):
        group.publish()


def test_one_publication_may_have_another_codec(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("sync")
    group = attach(handles, config={"values": "xor"})
    for step, codec in enumerate((None, "lz4+zstd", "none"), 1):
        step_all(handles)
        assert group.publish(step=step, codec=codec).wait(LONG).version == step
    with pytest.raises(ConfigError, match="codec 'lzma'"):
        group.publish(codec="lzma")
    assert [levels(read(store, base, v)) for v in (1, 2, 3)] == [{1}, {2}, {3}]
    log = Log(Store(store))
    log.refresh()
    assert [e.codec for e in log.versions.values()] == ["sparse+zstd", "lz4+zstd", "none"]


def test_ranks_at_different_steps_commit_nothing(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("sync")
    group = attach(handles)
    step_all(handles)
    ray.get(handles[1].step.remote())
    lost = ended(group.publish())
    assert isinstance(lost, CaptureSkew)
    assert "rank 0: 1, rank 1: 2" in str(lost)
    ray.get(handles[0].step.remote())
    assert ended(group.publish()) == 1
    assert levels(read(store, base)) == {2}
    # The count goes on from the commit.
    ray.get(handles[0].step.remote())
    assert isinstance(ended(group.publish()), CaptureSkew)
    assert verify(Store(store), config=Config(), deep=True, base=base).versions == 1


def test_marks_replace_the_count_of_steps(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("sync")
    group = attach(handles, mark=lambda self: self.count)
    ray.get(handles[1].put.remote(1))  # no optimizer step, yet another mark
    lost = ended(group.publish())
    assert isinstance(lost, CaptureSkew)
    assert "(mark) rank 0: 0, rank 1: 1" in str(lost)
    ray.get(handles[0].step.remote())  # as if rank 1 had no optimizer of its own
    assert ended(group.publish()) == 1
    assert levels(read(store, base)) == {1}


@pytest.mark.parametrize("kind", ["sync", "threaded"])
def test_busy_skips_and_the_next_publication_covers_the_span(
    trainers: Any, attach: Any, base: Path, gate: Gate, store: str, kind: str
) -> None:
    handles = trainers(kind)
    group = attach(handles, config={"on_busy": "skip", "max_step_delay_s": LONG})
    ray.get(handles[0].hook.remote(at_live=gate))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(group.publish, step=1)
        gate.wait()
        if kind == "sync":  # on concurrent actors publish() itself is still running
            skipped = group.publish(step=2).wait(LONG)
            assert (skipped.committed, skipped.version, skipped.step) == (False, 0, 2)
        gate.open()
        assert first.result(LONG).wait(LONG).version == 1
    step_all(handles)
    assert group.publish(step=3).wait(LONG).version == 2
    assert levels(read(store, base)) == {1}


def test_busy_is_an_error_where_asked_for(trainers: Any, attach: Any, gate: Gate) -> None:
    handles = trainers("sync")
    group = attach(handles, config={"on_busy": "error"})
    ray.get(handles[1].hook.remote(at_live=gate))
    first = group.publish()
    with pytest.raises(Busy, match="still running"):
        group.publish()
    gate.open()
    assert ended(first) == 1
    assert ended(group.publish()) == 2


def test_busy_waits_its_bound_then_skips(trainers: Any, attach: Any, gate: Gate) -> None:
    handles = trainers("sync")
    group = attach(handles, config={"on_busy": "wait", "busy_wait_s": 0.1})
    ray.get(handles[0].hook.remote(at_live=gate))
    first = group.publish()
    assert not group.publish().wait(LONG).committed
    gate.open()
    assert ended(first) == 1


def test_many_threads_of_the_driver_publish_at_once(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("threaded")
    group = attach(handles, config={"busy_wait_s": LONG, "max_step_delay_s": LONG})
    step_all(handles)
    with ThreadPoolExecutor(4) as pool:
        publications = list(pool.map(lambda n: group.publish(step=n), range(4)))
    stats = [p.wait(LONG) for p in publications]
    assert sorted(s.version for s in stats) == [1, 2, 3, 4]
    assert all(s.committed for s in stats)
    assert levels(read(store, base)) == {1}


def test_layout_mismatch_reaches_the_driver_by_name_and_leaves_nothing(
    trainers: Any, attach: Any, tmp_path: Path
) -> None:
    handles = trainers("sync")
    before = actors()
    other = tmp_path / "other"
    other.mkdir()
    shapes = {"a": (64,), "m": (400, 101), "s": (), "z": (64,)}
    save_file(
        {n: torch.zeros(s).bfloat16() for n, s in shapes.items()}, str(other / "m.safetensors")
    )
    with pytest.raises(LayoutMismatch, match=r"'m'.*\(400, 101\).*\(400, 100\)"):
        attach(handles, base=other)
    with pytest.raises(LayoutMismatch, match="'extra'"):
        attach(handles, state=lambda self: {**self.live(), "extra": torch.zeros(1)})
    with pytest.raises(LayoutMismatch, match="'z'"):
        attach(handles, state=lambda self: {n: t for n, t in self.live().items() if n != "z"})
    assert actors() == before
    assert [inside(h, hooks) for h in handles] == [0, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainers": []}, "found an empty list"),
        ({"trainers": ["rank 0", 1]}, "found int, str"),
        ({"trainers": "one"}, "found ActorHandle"),
        ({"state": None}, "actors of class Trainer need state="),
        ({"state": lambda self: self.no_such_model}, "state= raised AttributeError"),
    ],
)
def test_what_cannot_be_attached_is_named_and_nothing_is_left(
    trainers: Any, attach: Any, given: dict[str, Any], message: str
) -> None:
    handles = trainers("sync")
    before = actors()
    found = given.pop("trainers", handles)
    with pytest.raises(InputError, match=message):
        attach(handles[0] if found == "one" else found, **given)
    assert [inside(h, hooks) for h in handles] == [0, 0]
    until(lambda: actors() == before)


def test_an_interrupt_between_begin_and_capture_does_not_block_the_next(
    trainers: Any, attach: Any, store: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = trainers("sync")
    group = attach(handles)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(group, "_capture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.publish(step=1)
    step_all(handles)
    assert group.publish(step=1).wait(LONG).version == 1
    assert levels(read(store, base)) == {1}


def test_unusable_store_is_a_typed_error_and_leaves_nothing(
    trainers: Any, attach: Any, tmp_path: Path
) -> None:
    handles = trainers("sync")
    before = actors()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="file"):
        attach(handles, store=str(tmp_path / "file" / "store"))
    assert [inside(h, hooks) for h in handles] == [0, 0]
    until(lambda: actors() == before)


def test_store_of_another_base_is_refused_after_the_ranks_have_started(
    trainers: Any, attach: Any, base: Path, tmp_path: Path
) -> None:
    """The last check of attach; by then every rank has hooks and threads."""
    handles = trainers("sync")
    first = attach(handles)
    assert ended(first.publish()) == 1
    first.close()
    before = actors()
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(str(base / FILE))
    save_file({n: t + 1 for n, t in tensors.items()}, str(other / FILE))
    with pytest.raises(StateMismatch, match="other base bytes"):
        attach(handles, base=other)
    assert [inside(h, hooks) for h in handles] == [0, 0]
    assert [inside(h, sessions) for h in handles] == [[], []]
    until(lambda: actors() == before)


def _explode() -> None:
    raise ArithmeticError("the state is being reshuffled")


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_exception_in_state_is_reported_and_later_publications_work(
    trainers: Any, attach: Any, base: Path, store: str, kind: str
) -> None:
    handles = trainers(kind)
    group = attach(handles)
    step_all(handles)
    ray.get(handles[1].hook.remote(on_live=_explode))
    with pytest.raises(PublicationLost, match=r"ArithmeticError.*reshuffled"):
        group.publish().wait(LONG)
    assert ended(group.publish()) == 1
    assert levels(read(store, base)) == {1}


def test_state_that_changed_its_layout_is_refused_by_name(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("sync")
    group = attach(handles, state=_resizable)
    inside(handles[0], lambda self: setattr(self, "cut", True))
    inside(handles[1], lambda self: setattr(self, "cut", True))
    try:
        with pytest.raises(LayoutMismatch, match="'m'"):
            group.publish().wait(LONG)
    finally:
        for handle in handles:
            inside(handle, lambda self: setattr(self, "cut", False))
    assert ended(group.publish()) == 1
    assert levels(read(store, base)) == {0}


def _resizable(self: Any) -> Any:
    tensors = live(self)
    return {**tensors, "m": tensors["m"][:3]} if getattr(self, "cut", False) else tensors


def test_a_tensor_that_has_appeared_is_refused_by_name(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    """Nobody would publish it."""
    handles = trainers("sync")
    group = attach(handles, state=_growing)
    inside(handles[1], lambda self: setattr(self, "more", True))
    try:
        with pytest.raises(LayoutMismatch, match="'lora'"):
            group.publish().wait(LONG)
    finally:
        inside(handles[1], lambda self: setattr(self, "more", False))
    assert ended(group.publish()) == 1
    assert levels(read(store, base)) == {0}


def _growing(self: Any) -> Any:
    tensors = live(self)
    return {**tensors, "lora": torch.zeros(3)} if getattr(self, "more", False) else tensors


def test_an_attach_that_fails_does_no_harm_to_the_one_before(
    trainers: Any, attach: Any, base: Path, store: str, tmp_path: Path
) -> None:
    handles = trainers("sync")
    group = attach(handles)
    step_all(handles)
    assert ended(group.publish()) == 1
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(str(base / FILE))
    save_file({n: t + 1 for n, t in tensors.items()}, str(other / FILE))
    with pytest.raises(StateMismatch):
        attach(handles, base=other)  # refused when every rank has started already
    step_all(handles)
    assert ended(group.publish()) == 2
    assert levels(read(store, base)) == {2}


def test_the_older_of_two_attachments_is_fenced(
    trainers: Any, attach: Any, base: Path, store: str
) -> None:
    handles = trainers("sync")
    old = attach(handles)
    step_all(handles)
    assert ended(old.publish()) == 1
    new = attach(handles)
    step_all(handles)
    lost = ended(old.publish())
    assert isinstance(lost, Fenced)
    assert ended(new.publish()) == 2
    assert isinstance(ended(old.publish()), Fenced)
    with pytest.raises(Fenced):
        old.tag("eval")
    # A coordinator that restarts finds that it has been replaced.
    before = inside(old.coordinator, pid_of)
    ray.kill(old.coordinator, no_restart=False)
    until(lambda: again(lambda: old.coordinator.__ray_call__.remote(pid_of)) != before)
    with pytest.raises(Fenced):
        old.publish()
    step_all(handles)
    assert ended(new.publish()) == 3
    assert levels(read(store, base)) == {3}
    assert [len(inside(h, sessions)) for h in handles] == [1, 1]  # the old ones are gone
    log = Log(Store(store))
    log.refresh()
    assert sum(isinstance(e, OpenEntry) for e in log.entries) == 2
    assert verify(Store(store), config=Config(), deep=True, base=base).ok
