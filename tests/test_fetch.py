"""Reading one hop's frames: only what is wanted, ahead of the consumer, errors by name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import SmallRun, edit

from weightdelta.config import Config
from weightdelta.delta import DeltaReader
from weightdelta.errors import DamagedObject, MissingObject, StoreUnavailable, UnsupportedFormat
from weightdelta.fetch import Fetched, fetch, fetch_path
from weightdelta.layout import Layout
from weightdelta.log import Log
from weightdelta.record import data_name
from weightdelta.testing.faults import FaultStore, Plan
from weightdelta.versions import Hop, find_path


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    found = SmallRun(tmp_path)
    found.step(1)
    found.step(2)
    yield found
    found.close()


class _Reading:
    """A store that counts, and what is read through it."""

    def __init__(self, run: SmallRun) -> None:
        self.store = FaultStore(run.store)
        self.log = Log(self.store)
        self.log.refresh()
        self.reader = DeltaReader(self.store, config=Config())
        self.layout: Layout = self.reader.layout(run.writer.job.layout.digest)

    def path(self, start: int, end: int) -> list[Hop]:
        return find_path(self.log, start=start, end=end, max_chain=100)

    def data_reads(self) -> list[str]:
        return [
            n for op, n in self.store.calls if op == "read" and n[-5:].isdigit() and "data" in n
        ]


def test_frames_are_sorted_out_by_the_tensors_they_hold(
    run: SmallRun, pool: ThreadPoolExecutor
) -> None:
    reading = _Reading(run)
    (hop,) = reading.path(0, 1)
    count = len(reading.layout.tensors)
    whole = fetch(reading.reader, hop, layout=reading.layout, tensors=range(count), pool=pool)
    assert list(whole.holding(range(count)).frames) == list(whole.frames)
    assert list(whole.holding([]).frames) == []
    for tensor in range(count):
        alone = fetch(reading.reader, hop, layout=reading.layout, tensors=[tensor], pool=pool)
        assert list(whole.holding([tensor]).frames) == list(alone.frames)


def test_only_frames_that_hold_a_wanted_tensor_are_read(
    run: SmallRun, pool: ThreadPoolExecutor
) -> None:
    reading = _Reading(run)
    (hop,) = reading.path(0, 1)
    at = reading.layout.index["b"]
    some = fetch(reading.reader, hop, layout=reading.layout, tensors=[at], pool=pool)
    whole = fetch(reading.reader, hop, layout=reading.layout, tensors=range(5), pool=pool)
    assert 0 < some.nbytes < whole.nbytes
    for frame, _ in some.frames:
        assert at in {s.tensor for s in some.delta.plan.frame(frame).segments}
    assert whole.nbytes == hop.entry.payload_bytes
    none = fetch(reading.reader, hop, layout=reading.layout, tensors=[], pool=pool)
    assert list(none.frames) == []


def test_what_did_not_change_is_not_asked_for(run: SmallRun, pool: ThreadPoolExecutor) -> None:
    run.publish()
    edit(run.live["s"].reshape(1), 0)
    run.publish()
    reading = _Reading(run)
    nothing, little = reading.path(2, 4)
    none = fetch(reading.reader, nothing, layout=reading.layout, tensors=range(5), pool=pool)
    assert list(none.frames) == []
    assert reading.data_reads() == []
    found = fetch(reading.reader, little, layout=reading.layout, tensors=range(5), pool=pool)
    assert len(list(found.frames)) == 1
    assert len(reading.data_reads()) == 1


def test_a_path_is_read_in_order_and_one_hop_ahead(run: SmallRun, pool: ThreadPoolExecutor) -> None:
    run.step(3)
    reading = _Reading(run)
    path = reading.path(0, 3)
    seen: list[Fetched] = []
    with ThreadPoolExecutor(1) as ahead:
        for fetched in fetch_path(
            reading.reader, path, layout=reading.layout, tensors=range(5), pool=pool, ahead=ahead
        ):
            seen.append(fetched)
            ahead.submit(int).result()  # the single thread has asked for the hop ahead
            assert all(list(f.frames) for f in seen)
            objects = {name.split("/")[1] for name in reading.data_reads()}
            assert len(seen) <= len(objects) <= min(len(seen) + 1, 3)
    assert [f.hop for f in seen] == path
    with ThreadPoolExecutor(1) as ahead:
        empty = fetch_path(
            reading.reader, [], layout=reading.layout, tensors=[0], pool=pool, ahead=ahead
        )
        assert list(empty) == []


def test_errors_pass_through_with_the_objects_name(run: SmallRun, pool: ThreadPoolExecutor) -> None:
    reading = _Reading(run)
    (hop,) = reading.path(0, 1)
    reading.store.plan = Plan("before", ops=frozenset({"read"}), forever=True)
    with pytest.raises(StoreUnavailable, match=hop.entry.write_id):
        fetch(reading.reader, hop, layout=reading.layout, tensors=range(5), pool=pool)
    reading.store.plan = None
    coming = fetch(reading.reader, hop, layout=reading.layout, tensors=range(5), pool=pool)
    assert list(coming.frames) == list(coming.frames)
    name = data_name(hop.entry.write_id, 0)
    run.store.delete(name)
    with ThreadPoolExecutor(1) as ahead:
        coming = fetch_path(
            reading.reader,
            reading.path(0, 2),
            layout=reading.layout,
            tensors=range(5),
            pool=pool,
            ahead=ahead,
        )
        with pytest.raises(MissingObject, match=name):
            [item for fetched in coming for item in fetched.frames]


def test_no_frame_is_handed_on_before_its_hash_is_right(
    run: SmallRun, pool: ThreadPoolExecutor
) -> None:
    """Each frame by its own hash: the one that is damaged is named, whatever the bit."""
    reading = _Reading(run)
    (hop,) = reading.path(0, 1)
    whole = fetch(reading.reader, hop, layout=reading.layout, tensors=range(5), pool=pool)
    frames = list(whole.frames)
    assert len(frames) > 1
    for frame, _ in frames:
        name = whole.delta.object_of(frame)
        good = run.store.read(name)
        last = whole.delta.index.offset(frame) + whole.delta.index.length(frame) - 1
        run.store.write(name, good[:last] + bytes([good[last] ^ 1]) + good[last + 1 :])
        bad = fetch(reading.reader, hop, layout=reading.layout, tensors=range(5), pool=pool)
        for _ in range(2):  # every reader is told, not only the first
            with pytest.raises(DamagedObject, match=f"{name} frame {frame}: expected BLAKE3"):
                list(bad.frames)
        run.store.write(name, good)


def test_a_codec_of_the_future_is_refused(run: SmallRun, pool: ThreadPoolExecutor) -> None:
    reading = _Reading(run)
    (hop,) = reading.path(0, 1)
    strange = Hop(replace(hop.entry, codec="dense+lz4"), True)
    with pytest.raises(UnsupportedFormat, match=r"dense\+lz4"):
        fetch(reading.reader, strange, layout=reading.layout, tensors=[0], pool=pool)
