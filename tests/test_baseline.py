"""The baseline is a committed version, or it is unusable."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from ranks import Rank, Weights, clone, content, job_for, job_of, same, save, total, wire

from weightdelta.base import Base
from weightdelta.baseline import Baseline, rebuild, replay
from weightdelta.capture import Inventory
from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.digest import version_digest
from weightdelta.errors import (
    DamagedObject,
    InputError,
    LayoutMismatch,
    MissingObject,
    NoPath,
    StateMismatch,
)
from weightdelta.job import Job
from weightdelta.kernels import ops
from weightdelta.kernels.planes import Elements
from weightdelta.layout import Box, Layout
from weightdelta.log import Log
from weightdelta.publish import RunWriter
from weightdelta.record import data_name
from weightdelta.sharding.explicit import LocalShard
from weightdelta.store import Store


def _weights() -> Weights:
    generator = torch.Generator().manual_seed(5)
    return {
        "a.w": torch.randn(12, 10, generator=generator),
        "b.w": torch.randn(6, 4, 4, generator=generator).bfloat16(),
        "c": torch.tensor(2.0),
        "e": torch.zeros(0, 3),
        "q": torch.randint(0, 255, (40,), dtype=torch.uint8, generator=generator),
    }


def _step(live: Weights, number: int) -> None:
    live["a.w"][number % 12, ::2] += 0.5
    live["b.w"][:, number % 4, 1:3] *= -1
    live["c"] += 1
    live["q"][number::7] += 3


@dataclass
class History:
    """A published run, and the bytes of every version of it."""

    store: Store
    job: Job
    versions: list[dict[str, Elements]] = field(default_factory=list)

    def log(self) -> Log:
        """The log, read anew."""
        log = Log(self.store)
        log.refresh()
        return log

    def reader(self) -> DeltaReader:
        """A reader that has cached nothing."""
        return DeltaReader(self.store, config=self.job.config)


def _publish(job: Job, live: Weights, *, versions: int) -> History:
    history = History(Store(f"memory://baseline-{secrets.token_hex(8)}"), job)
    ranks = [Rank(job, r) for r in range(job.world_size)]
    writer = RunWriter(history.store, config=job.config, clock=lambda: 0.0, nonce="1" * 32)
    table = total(r.baseline for r in ranks)
    writer.open(job, table=table)
    history.versions.append(wire(live, job.layout))
    for number in range(1, versions + 1):
        _step(live, number)
        write_id = f"{number:032x}"
        writer.begin(write_id, step=number)
        for rank in ranks:
            writer.add(rank.deliver(write_id, live, history.store))
        outcome = writer.commit(write_id)
        for rank in ranks:
            rank.settle(outcome)
        history.versions.append(wire(live, job.layout))
    assert same(content([r.baseline for r in ranks]), history.versions[-1])
    return history


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Version 0."""
    return save(tmp_path, _weights())


def _history(base: Base, *, values: str = "diff") -> History:
    live = clone(_weights())
    config = Config.of({"values": values})
    return _publish(
        job_for(live, base, world_size=2, config=config, max_bytes=64), live, versions=3
    )


def _baselines(job: Job) -> list[Baseline]:
    return [Baseline(job.layout, job.plan, r, job.config.values) for r in range(job.world_size)]


def test_loading_fills_version_0_over_all_ranks(base: Base) -> None:
    live = clone(_weights())
    for world in (1, 3):
        job = job_for(live, base, world_size=world, max_bytes=64)
        ranks = _baselines(job)
        for rank in ranks:
            rank.load(base)
        assert same(content(ranks), wire(live, job.layout))
        assert {r.version for r in ranks} == {0}


def _digests(expected: dict[str, Elements], layout: Layout) -> list[int]:
    from weightdelta.digest import seed

    return [
        ops().digest(v, key=seed(t.name), skip=0, run=max(1, t.numel), stride=max(1, t.numel))
        for t in layout.tensors
        for v in [expected[t.name]]
    ]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_digests_of_all_ranks_add_up_to_the_tensors(base: Base, world: int) -> None:
    live = clone(_weights())
    job = job_for(live, base, world_size=world, max_bytes=64)
    ranks = _baselines(job)
    for rank in ranks:
        rank.load(base)
    table = total(ranks)
    assert table.tolist() == _digests(wire(live, job.layout), job.layout)


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_advancing_leads_to_the_live_bytes(base: Base, values: str) -> None:
    live = clone(_weights())
    config = Config.of({"values": values})
    rank = Rank(job_for(live, base, config=config, max_bytes=64))
    for number in range(1, 4):
        _step(live, number)
        frames = rank.encode(live)
        assert not any(f.done for f in frames)
        rank.baseline.advance(frames, version=number)
        assert all(f.done for f in frames)
        assert same(content([rank.baseline]), wire(live, rank.job.layout))
        assert (rank.baseline.version, rank.baseline.usable) == (number, True)


def test_an_interrupted_advance_goes_on_where_it_stopped(base: Base) -> None:
    live = clone(_weights())
    rank = Rank(job_for(live, base, max_bytes=64))
    _step(live, 1)
    frames = rank.encode(live)
    changed = [f for f in frames if f.changed]
    whole, changed[2].data = changed[2].data, changed[2].data[:-1]
    with pytest.raises(DamagedObject, match=f"frame {changed[2].frame} kept"):
        rank.baseline.advance(frames, version=1)
    assert [f.done for f in changed[:3]] == [True, True, False]
    assert (rank.baseline.version, rank.baseline.usable) == (0, False)
    changed[2].data = whole
    rank.baseline.advance(frames, version=1)
    assert same(content([rank.baseline]), wire(live, rank.job.layout))
    assert (rank.baseline.version, rank.baseline.usable) == (1, True)


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_bytes_that_were_edited_are_found_and_end_the_baseline(base: Base, values: str) -> None:
    live = clone(_weights())
    rank = Rank(job_for(live, base, config=Config.of({"values": values}), max_bytes=64))
    _step(live, 1)
    frames = rank.encode(live)
    hit = next(f for f in frames if f.changed)
    rank.baseline.frames[hit.frame] ^= 1  # at least one changed element among them
    with pytest.raises(StateMismatch, match=f"frame {hit.frame} of rank 0"):
        rank.baseline.advance(frames, version=1)
    assert (rank.baseline.version, rank.baseline.usable) == (0, False)


def test_a_wrong_published_change_ends_the_baseline(base: Base) -> None:
    live = clone(_weights())
    rank = Rank(job_for(live, base))
    _step(live, 1)
    frames = rank.encode(live)
    frames[0].digest_change ^= 1 << 63
    with pytest.raises(StateMismatch, match="digest change"):
        rank.baseline.advance(frames, version=1)
    assert not rank.baseline.usable


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_replaying_with_the_same_plan_gives_every_version(base: Base, values: str) -> None:
    history = _history(base, values=values)
    ranks = _baselines(history.job)
    for version, expected in enumerate(history.versions):
        for rank in ranks:
            rebuild(
                rank,
                base=base,
                log=history.log(),
                reader=history.reader(),
                versions=range(1, version + 1),
            )
        assert same(content(ranks), expected)
        table = total(ranks)
        assert version_digest(table) == history.log().digest(version)
        assert {(r.version, r.usable) for r in ranks} == {(version, True)}


def _split(job: Job, dim: int, world: int) -> list[Inventory]:
    """Every tensor cut along ``dim``, where it has one, into about equal boxes."""
    shards: list[list[LocalShard]] = [[] for _ in range(world)]
    for t in job.layout.tensors:
        if len(t.extent) <= dim:
            shards[world - 1].append(LocalShard(t.name, t.dtype, t.extent, Box.whole(t.extent)))
            continue
        for rank in range(world):
            low, high = (t.extent[dim] * i // world for i in (rank, rank + 1))
            offset = tuple(low if d == dim else 0 for d in range(len(t.extent)))
            shape = tuple(high - low if d == dim else n for d, n in enumerate(t.extent))
            shards[rank].append(LocalShard(t.name, t.dtype, t.extent, Box(offset, shape)))
    return [Inventory(tuple(s), {}) for s in shards]


@pytest.mark.parametrize("values", ["diff", "xor"])
@pytest.mark.parametrize(("dim", "world"), [(0, 1), (0, 3), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("max_bytes", [24, 4096])
def test_replaying_after_a_change_of_sharding_gives_every_version(
    base: Base, values: str, dim: int, world: int, max_bytes: int
) -> None:
    """The run was written by two replicas; it is read by shards along any dimension."""
    history = _history(base, values=values)
    # This reader's own choice of values must not matter: the entry says how they are coded.
    config = Config.of({"values": "xor" if values == "diff" else "diff"})
    job = job_of(_split(history.job, dim, world), base, config=config, max_bytes=max_bytes)
    assert job.plan.digest != history.job.plan.digest
    ranks = _baselines(job)
    for rank in ranks:
        rank.load(base)
    log, reader = history.log(), history.reader()
    for version in (1, 2, 3):
        for rank in ranks:
            replay(rank, log=log, reader=reader, versions=[version])
        assert same(content(ranks), history.versions[version])


def _replay(history: History, rank: Baseline, versions: Sequence[int]) -> None:
    replay(rank, log=history.log(), reader=history.reader(), versions=versions)


def test_a_delta_from_another_version_is_refused(base: Base) -> None:
    history = _history(base)
    rank = _baselines(history.job)[0]
    rank.load(base)
    with pytest.raises(NoPath, match=r"at version 0; the delta leads from 1"):
        _replay(history, rank, [2])
    assert not rank.usable


def test_replaying_over_edited_bytes_is_found(base: Base) -> None:
    history = _history(base)
    ranks = _baselines(history.job)
    for rank in ranks:
        rank.load(base)
        for elements in rank.frames.values():
            elements ^= elements.dtype.type(1)  # whatever the delta touches was touched before
    for rank in ranks:
        with pytest.raises(StateMismatch, match=r"version 1, frame .* other base bytes"):
            _replay(history, rank, [1])
        assert (rank.version, rank.usable) == (0, False)


@pytest.mark.fault
def test_a_replay_that_broke_off_is_repaired_by_a_rebuild(base: Base) -> None:
    history = _history(base)
    rank = _baselines(history.job)[0]
    rank.load(base)
    name = data_name(f"{2:032x}", 0)
    data = history.store.read(name)
    history.store.delete(name)
    with pytest.raises(MissingObject, match=name):
        _replay(history, rank, [1, 2, 3])
    assert (rank.version, rank.usable) == (1, False)
    history.store.write(name, data)
    rebuild(rank, base=base, log=history.log(), reader=history.reader(), versions=range(1, 4))
    assert (rank.version, rank.usable) == (3, True)
    other = _baselines(history.job)[1]
    rebuild(other, base=base, log=history.log(), reader=history.reader(), versions=range(1, 4))
    assert same(content([rank, other]), history.versions[3])


def test_a_rebuild_that_cannot_load_leaves_nothing_usable(base: Base, tmp_path: Path) -> None:
    history = _history(base)
    rank = _baselines(history.job)[0]
    rebuild(rank, base=base, log=history.log(), reader=history.reader(), versions=[1, 2])
    gone = Base(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="elsewhere"):
        rebuild(rank, base=gone, log=history.log(), reader=history.reader(), versions=[1, 2])
    assert not rank.usable


def test_a_log_of_another_model_is_refused(base: Base, tmp_path: Path) -> None:
    history = _history(base)
    (tmp_path / "other").mkdir()
    live = {"w": torch.zeros(3)}
    job = job_for(live, save(tmp_path / "other", live))
    (rank,) = _baselines(job)
    with pytest.raises(LayoutMismatch, match="use another store"):
        rebuild(rank, base=job.base, log=history.log(), reader=history.reader(), versions=[1])
    assert not rank.usable
