"""Encoded frames, digests by tensor, and the entropy bound against counting by hand."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from ranks import POOL, Rank, Weights, clone, content, job_for, save, wire

from weightdelta.codecs import sparse
from weightdelta.config import Config
from weightdelta.encode import Encoding, Histogram, bound_bytes, encode, histogram, tensor_digests

WIDTHS = (1, 2, 4, 8)


def _entropy_bits(items: Sequence[object]) -> float:
    """Shannon: the sum over all items of the log of their frequency's inverse."""
    counts = Counter(items)
    return sum(n * math.log2(len(items) / n) for n in counts.values())


def _brute(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Bytes: per width, which elements changed, and the XOR values of those that did."""
    total = 0.0
    for width in WIDTHS:
        masks = [
            int(a) ^ int(b)
            for name in old
            if old[name].itemsize == width
            for a, b in zip(old[name].tolist(), new[name].tolist(), strict=True)
        ]
        if masks:
            total += _entropy_bits([m != 0 for m in masks])
            total += _entropy_bits([m for m in masks if m])
    return total / 8


def _weights(draw: Callable[..., Any]) -> tuple[Weights, Weights]:
    """Weights of every width before and after; few distinct values, so that entropy is low."""
    old, new = {}, {}
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        size = draw(st.integers(0, 40))
        random = np.random.default_rng(draw(st.integers(0, 1000)))
        before = torch.from_numpy(random.integers(0, 4, size)).to(dtype)
        step = torch.from_numpy(random.integers(0, 3, size) * random.integers(0, 2, size))
        name = str(dtype)
        old[name], new[name] = before, before + step.to(dtype)
    return old, new


@given(data=st.data())
def test_the_bound_is_the_entropy_counted_by_hand(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the form of the values and however many ranks share the work."""
    old, new = _weights(data.draw)
    base = save(tmp_path_factory.mktemp("bound"), old)
    world = data.draw(st.integers(1, 3))
    config = Config.of({"values": data.draw(st.sampled_from(["diff", "xor"]))})
    job = job_for(new, base, world_size=world, config=config, max_bytes=32)
    ranks = [Rank(job, r) for r in range(world)]
    found = [histogram(r.capture(new), baseline=r.baseline) for r in ranks]
    expected = _brute(wire(old, job.layout), wire(new, job.layout))
    assert bound_bytes(found, elements=job.elements) == pytest.approx(expected, abs=0.5001)


def test_histograms_of_ranks_are_merged_not_added() -> None:
    """Two ranks with the same value know less together than two distinct values would say."""

    def one(*pairs: tuple[int, int]) -> Histogram:
        values, counts = zip(*pairs, strict=True)
        return {2: (np.array(values, np.uint64), np.array(counts, np.int64))}

    same = bound_bytes([one((7, 64)), one((7, 64))], elements={2: 128})
    other = bound_bytes([one((7, 64)), one((9, 64))], elements={2: 128})
    assert (same, other) == (0, 16)


def test_nothing_changed_has_no_bound() -> None:
    assert bound_bytes([{}, {}], elements={2: 1000, 4: 0}) == 0
    assert bound_bytes([], elements={}) == 0


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_the_histogram_counts_xor_values(values: str, tmp_path: Path) -> None:
    old = {"a": torch.zeros(6, dtype=torch.int16), "b": torch.zeros(5, dtype=torch.int32)}
    new = clone(old)
    new["a"][:4] = torch.tensor([1, 3, 3, -1], dtype=torch.int16)
    new["b"][1] = 9
    rank = Rank(job_for(new, save(tmp_path, old), config=Config.of({"values": values})))
    found = histogram(rank.capture(new), baseline=rank.baseline)
    table = {w: dict(zip(v.tolist(), n.tolist(), strict=True)) for w, (v, n) in found.items()}
    assert table == {2: {1: 1, 3: 2, 0xFFFF: 1}, 4: {9: 1}}


@given(data=st.data())
def test_digest_changes_of_frames_add_up_to_those_of_tensors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Frames pack several tensors and tensors span several frames and ranks."""
    old, new = _weights(data.draw)
    base = save(tmp_path_factory.mktemp("digests"), old)
    world, max_bytes = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 64, 4096]))
    job = job_for(new, base, world_size=world, max_bytes=max_bytes)
    before = after = change = np.zeros(len(job.layout.tensors), np.uint64)
    for number in range(world):
        rank = Rank(job, number)
        planes = rank.capture(new)
        mine = tensor_digests(planes, baseline=rank.baseline)
        whole = sum(p.digest_change for p in planes) % 2**64
        assert int(mine.sum(dtype=np.uint64)) == whole
        before = before + rank.baseline.digests()
        rank.baseline.advance(rank.encode(new), version=1)
        after, change = after + rank.baseline.digests(), change + mine
    assert (before + change).tolist() == after.tolist()


def test_a_long_segment_counts_every_chunk_for_its_tensor(tmp_path: Path) -> None:
    old = {"a": torch.zeros(70_000, dtype=torch.uint8), "b": torch.zeros(9, dtype=torch.uint8)}
    new = clone(old)
    new["a"][69_999], new["b"][0] = 1, 1
    rank = Rank(job_for(new, save(tmp_path, old)))
    before = rank.baseline.digests()
    change = tensor_digests(rank.capture(new), baseline=rank.baseline)
    rank.baseline.advance(rank.encode(new), version=1)
    assert (before + change).tolist() == rank.baseline.digests().tolist()
    assert all(change)


@pytest.mark.parametrize("values", ["diff", "xor"])
def test_frames_are_hashed_sized_and_in_order(values: str, tmp_path: Path) -> None:
    old = {"a": torch.zeros(64, dtype=torch.int16), "b": torch.zeros(5)}
    new = clone(old)
    new["a"][3:9] -= 2
    config = Config.of({"values": values})
    rank = Rank(job_for(new, save(tmp_path, old), config=config, max_bytes=32))
    planes = rank.capture(new)
    frames = encode(planes, baseline=rank.baseline, pool=POOL, config=config)
    assert [f.frame for f in frames] == list(rank.baseline.plan.owned(0))
    assert sum(f.changed for f in frames) == 6
    for frame, item in zip(frames, planes, strict=True):
        assert frame.digest == blake3(frame.data).digest(length=16)
        assert frame.sizes.sum() == len(frame.data)
        assert (frame.changed == 0) == (frame.data == b"")
        again = sparse.decode_frame(
            frame.data,
            frame.sizes,
            chunks=rank.baseline.chunks(frame.frame),
            width=rank.baseline.plan.frame(frame.frame).width,
            values=config.values,
            where="test",
        )
        assert again.values.tolist() == item.planes.values.tolist()
    rank.baseline.advance(frames, version=1)
    assert content([rank.baseline])["a"].tolist() == wire(new, rank.job.layout)["a"].tolist()


def test_nobody_waits_for_frames_that_a_pool_will_not_encode(tmp_path: Path) -> None:
    """A session that closes drops what has not begun."""
    live = {"w": torch.arange(64, dtype=torch.bfloat16)}
    rank = Rank(job_for(live, save(tmp_path, clone({"w": live["w"] * 0}))))
    planes = rank.capture(live)
    gate, pool = threading.Event(), ThreadPoolExecutor(1)
    pool.submit(gate.wait, 60)
    encoding = Encoding(baseline=rank.baseline, pool=pool, config=rank.job.config)
    (coming,) = encoding.coming(planes)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        coming.result(10)
    gate.set()
