"""Committed objects are read in few requests and believed only when their hashes agree."""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from ranks import Rank, clone, job_for, save, total

from weightdelta import delta as delta_module
from weightdelta.config import Config, Limits
from weightdelta.delta import Delta, DeltaReader, Span, canonical, canonical_index, locate, spans
from weightdelta.errors import DamagedObject, MissingObject, UnsupportedFormat
from weightdelta.frame import Segment
from weightdelta.job import Job
from weightdelta.layout import Layout, TensorSpec
from weightdelta.publish import RunWriter
from weightdelta.record import (
    VersionEntry,
    data_name,
    index_name,
    layout_name,
    plan_name,
    table_name,
)
from weightdelta.store import Store

ID = "ab" * 16


@dataclass(frozen=True)
class Run:
    """One committed delta over several ranks and tiny frames."""

    store: Store
    job: Job
    entry: VersionEntry
    table: str

    def reader(self, config: Config | None = None) -> DeltaReader:
        """A reader that has cached nothing."""
        return DeltaReader(self.store, config=config or self.job.config)

    def delta(self) -> Delta:
        """The delta, read anew."""
        return self.reader().delta(self.entry, layout=self.job.layout)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Rank 0 and 1 each own frames; some of them did not change."""
    old = {"w": torch.randn(16, 8), "b": torch.zeros(8, dtype=torch.bfloat16)}
    base = save(tmp_path, old)
    live = clone(old)
    job = job_for(live, base, world_size=2, max_bytes=64)
    live["w"][0] += 1
    live["w"][5:, 3] *= 2
    live["b"][2] = 1
    store = Store(f"memory://delta-{secrets.token_hex(8)}")
    ranks = [Rank(job, r) for r in range(2)]
    writer = RunWriter(store, config=job.config, clock=lambda: 0.0, nonce="1" * 32)
    writer.open(job, table=total(r.baseline for r in ranks))
    writer.begin(ID, step=None)
    for rank in ranks:
        writer.add(rank.deliver(ID, live, store))
    writer.commit(ID).result()
    return Run(store, job, writer.log.versions[1], writer.log.digest(0))


class Layed:
    """A delta of frames with given owners and lengths, for planning requests."""

    def __init__(self, frames: Sequence[tuple[int, int]]) -> None:
        self.index = self.plan = self.entry = self
        self.write_id = ID
        self.owner, self.lengths = np.array(frames, np.int64).reshape(-1, 2).T
        before = np.cumsum(self.lengths) - self.lengths
        leader = [int(np.flatnonzero(self.owner == o)[0]) for o in self.owner.tolist()]
        self.offsets = before - before[leader]

    def length(self, frame: int) -> int:
        """As given."""
        return int(self.lengths[frame])

    def offset(self, frame: int) -> int:
        """All frames of the owner before this one."""
        return int(self.offsets[frame])

    def object_of(self, frame: int) -> str:
        """One object an owner."""
        return data_name(ID, int(self.owner[frame]))


def _plan(frames: Sequence[tuple[int, int]], wanted: Sequence[int]) -> list[Span]:
    delta: Any = Layed(frames)
    return spans(delta, wanted)


def test_neighbours_of_one_object_share_a_request() -> None:
    frames = [(0, 10), (0, 0), (0, 20), (1, 5), (1, 7)]
    assert _plan(frames, range(5)) == [
        Span(data_name(ID, 0), 0, 30, (0, 2)),
        Span(data_name(ID, 1), 0, 12, (3, 4)),
    ]


def test_small_holes_are_fetched_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "GAP", 10)
    for hole, requests in ((10, 1), (11, 2)):
        assert len(_plan([(0, 5), (0, hole), (0, 5)], [0, 2])) == requests


def test_a_request_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "SPAN", 10)
    found = _plan([(0, 4), (0, 6), (0, 1), (0, 50), (0, 1)], range(5))
    assert [s.frames for s in found] == [(0, 1), (2,), (3,), (4,)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=12), st.data())
def test_requests_cover_every_changed_frame_once(
    frames: list[tuple[int, int]], data: st.DataObject
) -> None:
    frames = sorted(frames, key=lambda f: f[0])
    wanted = sorted(data.draw(st.sets(st.integers(0, max(0, len(frames) - 1)))) if frames else [])
    found = _plan(frames, wanted)
    assert [f for s in found for f in s.frames] == [f for f in wanted if frames[f][1]]
    delta = Layed(frames)
    for span in found:
        for frame in span.frames:
            assert span.name == delta.object_of(frame)
            assert span.start <= delta.offset(frame)
            assert delta.offset(frame) + delta.length(frame) <= span.end


@pytest.mark.parametrize("threads", [0, 2])
def test_frames_come_back_verified_and_in_order(run: Run, threads: int) -> None:
    delta = run.delta()
    if threads:
        with ThreadPoolExecutor(threads) as pool:
            coming = run.reader().arriving(delta, range(len(delta.plan)), pool=pool)
            found = [item for _, job in coming for item in job.result().items()]
    else:
        found = list(run.reader().frames(delta, range(len(delta.plan))))
    changed = np.flatnonzero(delta.index.changed).tolist()
    assert [frame for frame, _ in found] == changed
    assert 1 < len(changed) < len(delta.plan)
    for frame, data in found:
        assert delta.decode(frame, data).changed == delta.index.changed[frame]


@pytest.mark.parametrize("step", [-1, 1])
def test_a_frame_has_the_changes_that_the_index_says(run: Run, step: int) -> None:
    """Tasks are cut by that number."""
    delta = run.delta()
    frame = int(np.flatnonzero(delta.index.changed > 1)[0])
    ((_, data),) = run.reader().frames(delta, [frame])
    changed = delta.index.changed.copy()
    changed[frame] = int(changed[frame]) + step
    other = replace(delta, index=replace(delta.index, changed=changed))
    assert delta.decode(frame, data).changed == delta.index.changed[frame]
    with pytest.raises(DamagedObject, match=f"expected {changed[frame]} changed elements"):
        other.decode(frame, data)


def test_a_frame_is_believed_only_by_its_hash(run: Run) -> None:
    """Its planes have checksums of their own, which are no reason to decode it."""
    delta = run.delta()
    frame = int(np.flatnonzero(delta.index.changed)[1])
    hashes = delta.index.hashes.copy()
    hashes[frame, 15] ^= 1
    other = replace(delta, index=replace(delta.index, hashes=hashes))
    with pytest.raises(DamagedObject, match=f"frame {frame}: expected BLAKE3"):
        list(run.reader().frames(other, range(len(delta.plan))))


def test_canonical_changes_are_those_of_the_tensors(run: Run) -> None:
    delta = run.delta()
    found: dict[str, list[int]] = {}
    for frame, data in run.reader().frames(delta, range(len(delta.plan))):
        for segment, index, values in canonical(delta, frame, data):
            assert len(index) == len(values)
            name = delta.layout.tensors[segment.tensor].name
            found.setdefault(name, []).extend(index.tolist())
    expected = {*range(8), *(row * 8 + 3 for row in range(5, 16))}
    assert {n: sorted(i) for n, i in found.items()} == {"w": sorted(expected), "b": [2]}


@given(
    st.integers(0, 20), st.integers(1, 4), st.integers(1, 5), st.integers(0, 4), st.integers(0, 60)
)
def test_locate_is_the_inverse_of_canonical_index(
    first: int, rows: int, run: int, gap: int, other: int
) -> None:
    segment = Segment(0, first, rows, run, run + gap)
    local = np.arange(rows * run, dtype=np.uint64)
    index = canonical_index(local, segment)
    hit, place = locate(index, segment)
    assert hit.all()
    assert place.tolist() == local.tolist()
    (inside,), _ = locate(np.array([other], np.uint64), segment)
    assert inside == (other in index.tolist())


def _names(run: Run) -> dict[str, str]:
    return {
        "layout": layout_name(run.job.layout.digest),
        "plan": plan_name(run.entry.plan),
        "table": table_name(run.table),
        "index": index_name(ID),
        "data 0": data_name(ID, 0),
        "data 1": data_name(ID, 1),
    }


def _read_all(run: Run, config: Config | None = None) -> None:
    reader = run.reader(config)
    layout = reader.layout(run.job.layout.digest)
    reader.table(run.table, layout=layout)
    delta = reader.delta(run.entry, layout=layout)
    for frame, data in reader.frames(delta, range(len(delta.plan))):
        delta.decode(frame, data)


def _put(run: Run, name: str, data: bytes) -> None:
    run.store.delete(name)
    run.store.write(name, data)


@pytest.mark.fault
@pytest.mark.parametrize("which", ["layout", "plan", "table", "index", "data 0", "data 1"])
def test_every_damage_is_found_by_name(run: Run, which: str) -> None:
    name = _names(run)[which]
    good = run.store.read(name)
    _read_all(run)
    places = range(0, len(good), max(1, len(good) // 40))
    damaged = [good[:-1], good[: len(good) // 2], b""]
    damaged += [good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :] for at in places]
    if not which.startswith("data"):  # a range request does not see what follows
        damaged.append(good + b"\0")
    for bad in damaged:
        _put(run, name, bad)
        with pytest.raises(DamagedObject, match=name):
            _read_all(run)
    run.store.delete(name)
    with pytest.raises(MissingObject, match=name):
        _read_all(run)
    _put(run, name, good)
    _read_all(run)


@pytest.mark.fault
def test_objects_that_were_swapped_are_found(run: Run) -> None:
    names = _names(run)
    good = {n: run.store.read(n) for n in names.values()}
    for a in names.values():
        for b in names.values():
            if good[a] != good[b]:
                _put(run, a, good[b])
                with pytest.raises(DamagedObject, match=a):
                    _read_all(run)
        _put(run, a, good[a])
    _read_all(run)


def test_an_index_of_another_version_is_refused(run: Run) -> None:
    entry = replace(run.entry, version=2, parent=1)
    with pytest.raises(DamagedObject, match="1 -> 2, found 0 -> 1"):
        run.reader().delta(entry, layout=run.job.layout)


def test_an_index_of_another_size_is_refused(run: Run) -> None:
    entry = replace(run.entry, index_bytes=run.entry.index_bytes + 1)
    with pytest.raises(DamagedObject, match=index_name(ID)):
        run.reader().delta(entry, layout=run.job.layout)


@pytest.mark.parametrize("limit", ["max_index_bytes", "max_layout_bytes"])
def test_a_reader_takes_no_more_than_its_limits(run: Run, limit: str) -> None:
    config = Config(limits=Limits(**{limit: 16}))
    with pytest.raises(DamagedObject, match="16 bytes"):
        _read_all(run, config)


def test_a_newer_plan_or_index_is_not_called_damage(run: Run) -> None:
    for prefix in (b"WDPLAN99", b"WDINDEX9"):
        entry = run.entry
        name = plan_name(entry.plan) if b"PLAN" in prefix else index_name(ID)
        data = prefix + run.store.read(name)[8:]
        digest = blake3(data).hexdigest()
        if b"PLAN" in prefix:
            run.store.write(plan_name(digest), data)
            entry = replace(entry, plan=digest)
        else:
            _put(run, name, data)
            entry = replace(entry, index=digest)
        with pytest.raises(UnsupportedFormat):
            run.reader().delta(entry, layout=run.job.layout)


def test_a_plan_serves_no_other_layout_even_from_the_cache(run: Run) -> None:
    reader, layout = run.reader(), run.job.layout
    reader.delta(run.entry, layout=layout)
    other = Layout.of([*layout.tensors[1:], TensorSpec("zz", "U8", (1,))])
    with pytest.raises(DamagedObject, match="the plan is for layout"):
        reader.delta(run.entry, layout=other)


def test_of_an_index_no_more_is_read_than_its_entry_says(run: Run) -> None:
    _put(run, index_name(ID), run.store.read(index_name(ID)) + bytes(1000))
    with pytest.raises(DamagedObject, match=f"{run.entry.index_bytes} bytes"):
        run.reader().delta(run.entry, layout=run.job.layout)
