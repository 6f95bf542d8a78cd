"""Triton's kernels on a real device: whole chunks, every density, huge windows, a CUDA graph."""

import numpy as np
import pytest
import torch
from chunking import WIDTHS, Case, cases, change, count_of, random_elements, segments
from device_laws import (
    applies,
    boxed,
    encodes,
    finds_foreign_values,
    got,
    put,
    same_planes,
    unsigned,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.kernels import cpu_ops, triton_ops
from weightdelta.kernels.device import DeviceChunks, DeviceOps, DevicePlanes, device_ops
from weightdelta.kernels.planes import CHUNK, Chunks, Elements

pytestmark = pytest.mark.gpu

DENSITIES = [0.0, 0.0003, 0.01, 0.08, 0.13, 0.16, 0.18, 0.5, 1.0]


@pytest.fixture(scope="module")
def ops() -> DeviceOps:
    found = device_ops("cuda")
    assert found.__name__ == "weightdelta.kernels.triton_ops"
    return found


def pair(count: int, *, width: int, density: float, seed: int = 3) -> tuple[Elements, Elements]:
    old = random_elements(count, width=width, seed=seed)
    where = np.flatnonzero(np.random.default_rng(seed).random(count) < density)
    return old, change(old, where, seed=seed)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", DENSITIES)
def test_every_density(ops: DeviceOps, width: int, density: float) -> None:
    chunks = segments([CHUNK + 33, 7, 0, 3 * CHUNK, 641, CHUNK - 1])
    old, new = pair(count_of(chunks), width=width, density=density)
    for xor in (False, True):
        encodes(ops, old, new, chunks=chunks, xor=xor, device="cuda", kernels=cpu_ops)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.001, 0.1, 0.4])
def test_every_alignment(ops: DeviceOps, width: int, density: float) -> None:
    chunks = segments([CHUNK + 5, 2 * CHUNK + 1, 13, 3000])
    old, new = pair(count_of(chunks), width=width, density=density)
    for left in range(0, 16, width):
        for right in {left, 0, 16 - width}:
            shifts = left, right
            encodes(ops, old, new, chunks=chunks, device="cuda", shifts=shifts, kernels=cpu_ops)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("crowd", [3000, 9000, 10900])
def test_crowded_changes_spill(ops: DeviceOps, width: int, crowd: int) -> None:
    """In gap form, but all in one place: more than a unit's row of scratch holds."""
    chunks = segments([2 * CHUNK, 3 * CHUNK])
    old = random_elements(5 * CHUNK, width=width, seed=1)
    low = np.array([17, CHUNK + 30001, 4 * CHUNK + 50001])[:, None]
    new = change(old, (low + np.arange(crowd)).reshape(-1), seed=2)
    encodes(ops, old, new, chunks=chunks, device="cuda", kernels=cpu_ops)


@given(case=cases(most=70_000, run=80_000), shift=st.integers(0, 15))
def test_any_frame(ops: DeviceOps, case: Case, shift: int) -> None:
    at = shift // case.old.itemsize * case.old.itemsize
    encodes(
        ops,
        case.old,
        case.new,
        chunks=case.chunks,
        xor=case.xor,
        device="cuda",
        shifts=(at, at),
        kernels=cpu_ops,
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [0.0017, 0.08, 0.3, 1.0])
def test_apply_to_whole_residents(ops: DeviceOps, width: int, density: float) -> None:
    chunks = segments([3 * CHUNK + 77, 1, 9000], run=2**40, stride=2**40)
    old, new = pair(count_of(chunks), width=width, density=density)
    first = chunks.start - chunks.skip
    residents = whole(old, chunks=chunks, first=first, device="cuda")
    order = np.arange(len(old))
    lists = applies(ops, old, new, chunks=chunks, order=order, residents=residents, device="cuda")
    residents.memory.copy_(put(old, device="cuda"))
    finds_foreign_values(ops, lists, chunks=chunks, residents=residents, device="cuda")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_apply_to_boxes(ops: DeviceOps, width: int, order: tuple[int, ...]) -> None:
    shape, low, high = (40, 70, 129), (3, 0, 11), (33, 70, 128)
    rows, run = 40 * 70, 129
    old, new = pair(rows * run, width=width, density=0.05)
    chunks = segments([rows // 2 * run, rows // 2 * run], run=run, stride=2 * run, key=99)
    second = chunks.start >= rows // 2 * run
    chunks.key[:] = 99 + second.astype(np.uint64) * np.uint64(run)
    index = np.arange(rows * run).reshape(rows, run)
    window = np.concatenate([index[0::2].reshape(-1), index[1::2].reshape(-1)])
    residents = boxed(
        old, shape=shape, low=low, high=high, order=order, chunks=chunks, first=second * run,
        device="cuda",
    )  # fmt: skip
    applies(ops, old, new, chunks=chunks, order=window, residents=residents, device="cuda")


@pytest.mark.parametrize("density", [0.002, 0.3])
def test_two_windows_in_flight(density: float) -> None:
    """The second is begun before the first is finished; neither knows of the other."""
    chunks = segments([5 * CHUNK + 9])
    there = DeviceChunks.of(chunks, device="cuda")
    pairs = [pair(5 * CHUNK + 9, width=2, density=density, seed=s) for s in (1, 2)]
    windows = [[put(e, device="cuda") for e in both] for both in pairs]
    begun = [triton_ops.begin_encode(old, new, chunks=there) for old, new in windows]
    for encoding, (old, new) in zip(begun, pairs, strict=True):
        planes, sums = encoding.finish(xor=False)
        wanted, change_ = cpu_ops.encode(old, new, chunks=chunks, xor=False)
        same_planes(planes.host(), wanted)
        assert np.array_equal(unsigned(sums), change_)


def test_past_two_to_the_31_elements(ops: DeviceOps) -> None:
    """Offsets need 64 bits in encode, decode and the digest."""
    size = 2**31 + 3 * CHUNK + 11
    chunks = segments([size], run=2**40, stride=2**40)
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    new = old.clone()
    where = torch.tensor([0, 5, 2**31 - 1, 2**31, 2**31 + CHUNK + 3, size - 1], device="cuda")
    new[where] += 3
    there = DeviceChunks.of(chunks, device="cuda")
    planes, change_ = ops.encode(old, new, chunks=there, xor=False)
    host = planes.host()
    tail = slice(len(chunks) - 5, len(chunks))
    part = Chunks(*(getattr(chunks, n)[tail].copy() for n in Chunks.__slots__))
    low = int(part.start[0])
    part.start[:] -= low
    wanted, sums = cpu_ops.encode(
        old[low:].cpu().numpy(), new[low:].cpu().numpy(), chunks=part, xor=False
    )
    assert host.changed == 6
    assert np.array_equal(host.counts[tail], wanted.counts)
    assert np.array_equal(host.gaps[-4:], wanted.gaps)
    assert np.array_equal(unsigned(change_)[tail], sums)
    whole_change = ops.digest(new, key=int(chunks.key[0]), skip=0, run=2**40, stride=2**40)
    whole_change -= ops.digest(old, key=int(chunks.key[0]), skip=0, run=2**40, stride=2**40)
    assert whole_change.item() == change_.sum().item()
    ops.decode_into(old, planes, chunks=there, xor=False)
    assert torch.equal(old, new)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("skip", "run", "stride"),
    [(7, 2**41, 2**41), (3, 7, 19), (70000, 70001, 70100), (5, 999, 1000)],
)
def test_full_digest(ops: DeviceOps, width: int, skip: int, run: int, stride: int) -> None:
    values = random_elements(1_200_003, width=width, seed=1)
    arguments = {"key": 2**64 - 5, "skip": skip, "run": run, "stride": stride}
    for shift in (0, width):
        found = ops.digest(put(values, device="cuda", shift=shift % 16), **arguments)
        assert unsigned(found).tolist() == [cpu_ops.digest(values, **arguments)]


@pytest.mark.parametrize("shift", [0, 2])
def test_dense_xor(ops: DeviceOps, shift: int) -> None:
    a, b = (random_elements(1_000_003, width=2, seed=s) for s in (1, 2))
    out = put(a, device="cuda", shift=shift)
    ops.dense_xor(out, put(b, device="cuda", shift=shift), out)
    assert np.array_equal(got(out), a ^ b)


def test_scatter_in_a_cuda_graph(ops: DeviceOps) -> None:
    chunks = segments([5 * CHUNK], run=2**40, stride=2**40)
    old, new = pair(5 * CHUNK, width=2, density=0.01)
    planes, _ = cpu_ops.encode(old, new, chunks=chunks, xor=False)
    residents = whole(old, chunks=chunks, first=chunks.start * 0, device="cuda")
    there = DeviceChunks.of(chunks, device="cuda")
    place = {"chunks": there, "placed": residents.placed, "width": 2}
    up = DevicePlanes.of(planes, device="cuda")
    lists, _ = ops.stage(up, xor=False, **place)
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    ops.scatter(lists, wrong=wrong, **place)
    residents.memory.copy_(put(old, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.scatter(lists, wrong=wrong, **place)
    assert np.array_equal(got(residents.memory), old)
    graph.replay()
    assert np.array_equal(got(residents.memory), new)
    assert wrong.item() == 0
