"""What every kernel module for a device obeys, held against ``kernels.reference`` bit for bit.

The same laws run in Triton's interpreter, in plain torch and on a GPU.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from weightdelta.kernels import cpu_ops, reference
from weightdelta.kernels.device import (
    INTS,
    ChunkLists,
    DeviceChunks,
    DeviceOps,
    DevicePlanes,
    Placed,
    addresses,
)
from weightdelta.kernels.planes import UINTS, Chunks, Elements, Planes

FIELDS = ("counts", "gaps", "bitmap", "values")


def put(elements: Elements, *, device: str = "cpu", shift: int = 0) -> torch.Tensor:
    """A copy on ``device``, ``shift`` bytes past an address that 16 divides."""
    room = torch.empty(elements.nbytes + 32, dtype=torch.uint8, device=device)
    begin = -room.data_ptr() % 16 + shift
    part = room[begin : begin + elements.nbytes]
    part.copy_(torch.from_numpy(np.array(elements).view(np.uint8)))
    return part.view(INTS[elements.itemsize])


def got(values: torch.Tensor) -> Elements:
    """Elements of a device as numpy."""
    found: Elements = values.cpu().numpy().view(UINTS[values.element_size()])
    return found


def unsigned(sums: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Digests of a device as numpy."""
    return sums.cpu().numpy().view(np.uint64)


def same_planes(found: Planes, wanted: Planes) -> None:
    for name in FIELDS:
        left, right = getattr(found, name), getattr(wanted, name)
        assert left.dtype == right.dtype, name
        assert np.array_equal(left, right), name


def encodes(
    ops: DeviceOps,
    old: Elements,
    new: Elements,
    *,
    chunks: Chunks,
    xor: bool = False,
    device: str = "cpu",
    shifts: tuple[int, int] = (0, 0),
    kernels: Any = reference,
) -> None:
    """Planes and digests of encode are the reference's; decode leads from old to new."""
    planes, sums = kernels.encode(old, new, chunks=chunks, xor=xor)
    there = DeviceChunks.of(chunks, device=device)
    before, after = (
        put(old, device=device, shift=shifts[0]),
        put(new, device=device, shift=shifts[1]),
    )
    found, change = ops.encode(before, after, chunks=there, xor=xor)
    same_planes(found.host(), planes)
    assert np.array_equal(unsigned(change), sums)
    assert np.array_equal(got(after), new)
    decoded = ops.decode_into(before, found, chunks=there, xor=xor)
    assert np.array_equal(got(before), new)
    assert np.array_equal(unsigned(decoded), sums)


@dataclass
class Residents:
    """A tensor's resident part, and its chunks as a window, placed on it.

    Attributes:
        memory: What surrounds and holds the part: 1-D elements.
        view: The part as a tensor, over ``memory``.
        held: int64, canonical index of each element of ``view`` in C order.
    """

    memory: torch.Tensor
    view: torch.Tensor
    held: np.ndarray[Any, np.dtype[np.int64]]
    placed: Placed


def whole(elements: Elements, *, chunks: Chunks, first: Elements, device: str) -> Residents:
    """A contiguous resident; ``first`` is the canonical index of each chunk's segment."""
    memory = put(elements, device=device)
    count = len(chunks)
    placed = Placed(
        torch.full((count,), memory.data_ptr(), device=device),
        torch.from_numpy(np.array(first, np.int64)).to(device),
        torch.zeros(count, dtype=torch.int32, device=device),
    )
    return Residents(memory, memory, np.arange(len(elements)), placed)


def boxed(
    elements: Elements,
    *,
    shape: tuple[int, ...],
    low: tuple[int, ...],
    high: tuple[int, ...],
    order: tuple[int, ...],
    chunks: Chunks,
    first: Elements,
    device: str,
) -> Residents:
    """The box ``low`` to ``high`` of a tensor, its dimensions stored in ``order``."""
    part = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    index = np.arange(len(elements)).reshape(shape)[part]
    stored = np.ascontiguousarray(index.transpose(order))
    memory = put(elements[stored.reshape(-1)], device=device)
    view = memory.view(stored.shape).permute(*np.argsort(order).tolist())
    table = np.array([shape, low, index.shape, view.stride()], np.int64)
    count = len(chunks)
    placed = Placed(
        torch.full((count,), memory.data_ptr(), device=device),
        torch.from_numpy(np.array(first, np.int64)).to(device),
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.from_numpy(table)[None].to(device),
    )
    return Residents(memory, view, index.reshape(-1), placed)


def held_now(residents: Residents) -> Elements:
    """The resident part in C order."""
    return got(residents.view.contiguous().reshape(-1))


def applies(
    ops: DeviceOps,
    old: Elements,
    new: Elements,
    *,
    chunks: Chunks,
    order: Elements,
    residents: Residents,
    xor: bool = False,
    device: str = "cpu",
) -> ChunkLists:
    """Stage, scatter, scatter again and back again, on a resident part of a tensor.

    Args:
        ops: The kernels.
        old: The whole tensor before, in canonical order.
        new: The whole tensor after.
        chunks: Chunks of the window.
        order: Canonical index of each element of the window.
        residents: What is held.
        xor: Whether values are XORs.
        device: Where.
    """
    planes, _ = cpu_ops.encode(old[order], new[order], chunks=chunks, xor=xor)
    inside = np.zeros(len(old), bool)
    inside[residents.held] = True
    kept = np.where(inside, new, old)
    _, sums = cpu_ops.encode(old[order], kept[order], chunks=chunks, xor=xor)
    there, width = DeviceChunks.of(chunks, device=device), old.itemsize
    place: dict[str, Any] = {"chunks": there, "placed": residents.placed, "width": width}
    lies = addresses(**place)
    if residents.placed.box is None:
        lowest = residents.memory.data_ptr() + order[chunks.start] * width
        assert np.array_equal(lies.cpu().numpy(), lowest)
    back = torch.argsort(lies, descending=True).to(torch.int32)
    ordered = {**place, "placed": replace(residents.placed, order=back)}
    up = DevicePlanes.of(planes, device=device)
    lists, change = ops.stage(up, xor=xor, **place)
    assert np.array_equal(unsigned(change), sums)
    assert np.array_equal(held_now(residents), old[residents.held])
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    added = torch.zeros(len(chunks), dtype=torch.int64, device=device)
    ops.scatter(lists, wrong=wrong, sums=added, **ordered)
    assert np.array_equal(held_now(residents), new[residents.held])
    assert np.array_equal(unsigned(added), sums)
    ops.scatter(lists, wrong=wrong, **place)
    assert np.array_equal(held_now(residents), new[residents.held])
    reverse, change = ops.stage(up, xor=xor, negate=True, **place)
    assert np.array_equal(unsigned(-change), sums)
    assert torch.equal(reverse.new, lists.old)
    ops.scatter(lists, wrong=wrong, back=True, **place)
    assert np.array_equal(held_now(residents), old[residents.held])
    blind = ChunkLists(lists.counts, lists.begin, lists.position, None, lists.new)
    added.zero_()
    ops.scatter(blind, wrong=wrong, sums=added, **place)
    assert np.array_equal(held_now(residents), new[residents.held])
    assert np.array_equal(unsigned(added), sums)
    ops.scatter(lists, wrong=wrong, back=True, **ordered)
    assert wrong.item() == 0
    return lists


def finds_foreign_values(
    ops: DeviceOps, lists: ChunkLists, *, chunks: Chunks, residents: Residents, device: str = "cpu"
) -> None:
    """Elements that hold neither old nor new are counted and left alone; the others change.

    ``residents`` is whole, holds the old values, and its window is in canonical order.
    """
    where = np.repeat(chunks.start, lists.counts.cpu().numpy())
    where += lists.position.cpu().numpy().view(np.uint16)
    assert lists.old is not None
    old, new, held = got(lists.old), got(lists.new), held_now(residents)
    assert np.array_equal(held[where], old)
    some = np.arange(0, len(where), max(1, len(where) // 5))
    other = new[some] + old.dtype.type(1)
    other += (other == old[some]).astype(old.dtype)
    spoilt, wanted = held.copy(), held.copy()
    spoilt[where[some]] = other
    wanted[where] = new
    wanted[where[some]] = other
    residents.memory.copy_(put(spoilt, device=device))
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    there = DeviceChunks.of(chunks, device=device)
    ops.scatter(lists, chunks=there, placed=residents.placed, width=held.itemsize, wrong=wrong)
    assert wrong.item() == len(some)
    assert np.array_equal(held_now(residents), wanted)
