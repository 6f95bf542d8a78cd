"""The device contract in plain torch gives the reference's bits."""

from typing import Any

import numpy as np
import pytest
import torch
from chunking import WIDTHS, Case, cases, change, count_of, random_elements, segments
from hypothesis import given

from weightdelta.kernels import reference, torch_ops
from weightdelta.kernels.device import INTS, ChunkLists, DeviceChunks, DevicePlanes, Placed
from weightdelta.kernels.planes import CHUNK, Chunks, Elements

FIELDS = ("counts", "gaps", "bitmap", "values")


def up(elements: Elements) -> torch.Tensor:
    """A copy of elements as the device contract takes them."""
    width = elements.itemsize
    copy = torch.from_numpy(elements.view(f"i{width}").copy())
    return copy.view(torch.uint8) if width == 1 else copy


def down(tensor: torch.Tensor) -> Elements:
    """Back to unsigned numpy elements."""
    found: Elements = tensor.numpy().view(f"u{tensor.element_size()}")
    return found


def unsigned(sums: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return sums.numpy().view(np.uint64)


def agree(old: Elements, new: Elements, *, chunks: Chunks, xor: bool) -> None:
    """Encode, decode, stage and store as the reference does."""
    planes, sums = reference.encode(old, new, chunks=chunks, xor=xor)
    device = DeviceChunks.of(chunks, device="cpu")
    found, found_sums = torch_ops.encode(up(old), up(new), chunks=device, xor=xor)
    for name in FIELDS:
        one, other = getattr(planes, name), getattr(found.host(), name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other), name
    assert np.array_equal(unsigned(found_sums), sums)
    target = up(old)
    again = torch_ops.decode_into(target, found, chunks=device, xor=xor)
    assert np.array_equal(unsigned(again), sums)
    assert np.array_equal(down(target), new)


@given(case=cases(most=200, segment_count=4))
def test_any_window(case: Case) -> None:
    agree(case.old, case.new, chunks=case.chunks, xor=case.xor)


@pytest.mark.parametrize("width", WIDTHS)
def test_whole_chunks_with_changes_at_their_ends(width: int) -> None:
    chunks = segments([CHUNK + 9, CHUNK])
    old = random_elements(count_of(chunks), width=width, seed=1)
    ends = np.array([0, CHUNK - 1, CHUNK, CHUNK + 8, 2 * CHUNK + 8])
    agree(old, change(old, ends, seed=2), chunks=chunks, xor=False)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("skip", [0, 5, 70])
def test_digest(width: int, skip: int) -> None:
    values = random_elements(333, width=width, seed=skip)
    arguments = {"key": 2**64 - 3, "skip": skip, "run": 31, "stride": 97}
    found = torch_ops.digest(up(values), **arguments)
    assert int(unsigned(found)[0]) == reference.digest(values, **arguments)


def test_dense_xor_in_place() -> None:
    a, b = (up(random_elements(99, width=2, seed=s)) for s in (1, 2))
    expected = a ^ b
    torch_ops.dense_xor(a, b, a)
    assert torch.equal(a, expected)


# -- residents ---------------------------------------------------------------------------------


def _strided(values: torch.Tensor, rows: int) -> torch.Tensor:
    """The same elements in C order, stored column by column with room in between."""
    room = torch.zeros(len(values) // rows, rows + 1, dtype=values.dtype)
    view = room[:, :rows].t()
    view.copy_(values.view(rows, -1))
    return view


def _placed(resident: torch.Tensor, chunks: Chunks) -> Placed:
    count = len(chunks)
    if resident.is_contiguous():
        box, boxes = None, None
    else:
        shape = list(resident.shape)
        boxes = torch.tensor([[shape, [0] * len(shape), shape, list(resident.stride())]])
        box = torch.zeros(count, dtype=torch.int32)
    return Placed(
        address=torch.full((count,), resident.data_ptr()),
        first=torch.zeros(count, dtype=torch.int64),
        tensor=torch.zeros(count, dtype=torch.int32),
        box=box,
        boxes=boxes,
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("xor", [False, True])
def test_stage_and_scatter(width: int, strided: bool, xor: bool) -> None:
    rows, size = 6, 6 * 50
    chunks = segments([size], run=size, stride=size)
    old = random_elements(size, width=width, seed=3)
    new = change(old, np.arange(1, size, 9), seed=4)
    planes, sums = reference.encode(old, new, chunks=chunks, xor=xor)
    resident = _strided(up(old), rows) if strided else up(old)
    device, placed = DeviceChunks.of(chunks, device="cpu"), _placed(resident, chunks)
    lists, found = torch_ops.stage(
        DevicePlanes.of(planes, device="cpu"), chunks=device, placed=placed, width=width, xor=xor
    )
    assert np.array_equal(unsigned(found), sums)
    assert np.array_equal(down(resident.reshape(-1).contiguous()), old), "a dry run stores nothing"
    wrong, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    arguments: dict[str, Any] = {"chunks": device, "placed": placed, "width": width, "wrong": wrong}
    for _ in range(2):  # storing twice is harmless
        torch_ops.scatter(lists, sums=total, **arguments)
        assert np.array_equal(down(resident.reshape(-1).contiguous()), new)
        assert np.array_equal(unsigned(total), sums)
        total.zero_()
    torch_ops.scatter(lists, back=True, **arguments)
    assert np.array_equal(down(resident.reshape(-1).contiguous()), old)
    assert int(wrong) == 0


def test_what_holds_neither_value_is_counted_and_left_alone() -> None:
    chunks = segments([40])
    old, new = (random_elements(40, width=2, seed=s) for s in (1, 2))
    planes, sums = reference.encode(old, new, chunks=chunks, xor=False)
    resident = up(old)
    device, placed = DeviceChunks.of(chunks, device="cpu"), _placed(resident, chunks)
    lists, _ = torch_ops.stage(
        DevicePlanes.of(planes, device="cpu"), chunks=device, placed=placed, width=2, xor=False
    )
    resident[7] = edited = int(up(new)[7]) ^ 0x40
    wrong = torch.zeros(1, dtype=torch.int32)
    arguments: dict[str, Any] = {"chunks": device, "placed": placed, "width": 2, "wrong": wrong}
    torch_ops.scatter(lists, **arguments)
    assert (int(wrong), int(resident[7])) == (1, edited)
    assert int((down(resident) != new).sum()) == 1
    blind = ChunkLists(lists.counts, lists.begin, lists.position, None, lists.new)
    total = torch.zeros(1, dtype=torch.int64)
    torch_ops.scatter(blind, sums=total, **arguments)
    assert np.array_equal(down(resident), new)
    assert int(wrong) == 1
    assert not np.array_equal(unsigned(total), sums), "the sum tells what was found"


def test_a_box_leaves_what_lies_outside_alone() -> None:
    size = 60
    chunks = segments([size], run=size, stride=size)
    old, new = (random_elements(size, width=4, seed=s) for s in (5, 6))
    planes, _ = reference.encode(old, new, chunks=chunks, xor=True)
    whole = up(old).view(6, 10)
    part = whole[2:5, 3:7].contiguous()
    placed = Placed(
        address=torch.tensor([part.data_ptr()]),
        first=torch.zeros(1, dtype=torch.int64),
        tensor=torch.zeros(1, dtype=torch.int32),
        box=torch.zeros(1, dtype=torch.int32),
        boxes=torch.tensor([[[6, 10], [2, 3], [3, 4], [4, 1]]]),
    )
    device = DeviceChunks.of(chunks, device="cpu")
    lists, change_ = torch_ops.stage(
        DevicePlanes.of(planes, device="cpu"), chunks=device, placed=placed, width=4, xor=True
    )
    wrong, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    torch_ops.scatter(lists, chunks=device, placed=placed, width=4, wrong=wrong, sums=total)
    assert torch.equal(part, up(new).view(6, 10)[2:5, 3:7])
    assert torch.equal(total, change_)
    assert int(wrong) == 0
    assert part.dtype == INTS[4]
