"""The device kernels in plain torch: any device, slow, readable; the oracle of the fast ones.

``kernels.device`` says what each function does and ``kernels.reference`` what comes out. Chunk
follows chunk, so there are many small operations: use it to check, or where Triton is missing.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from weightdelta.digest import C1, C2, M1, M2, MASK
from weightdelta.kernels.device import INTS, ChunkLists, DeviceChunks, DevicePlanes, Placed
from weightdelta.kernels.planes import CHUNK, GAP_FACTOR

_BITS: Final = (1, 2, 4, 8, 16, 32, 64, 128)


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _right(x, 30)) * signed(M1)
    x = (x ^ _right(x, 27)) * signed(M2)
    return x ^ _right(x, 31)


def _wide(bits: torch.Tensor) -> torch.Tensor:
    """Bit patterns zero-extended to int64."""
    width = bits.element_size()
    return bits.to(torch.int64) & ((1 << (8 * width)) - 1) if width < 8 else bits


def h(term: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Hash of elements at index terms, both int64 and bit patterns (see ``digest``)."""
    return _mix64((term * signed(C1)) ^ (_wide(bits) * signed(C2)))


def _change(term: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (h(term, new) - h(term, old)).sum()


def _ascending(position: torch.Tensor, chunks: DeviceChunks, c: int) -> torch.Tensor:
    """``(q // run) * stride + q % run`` of positions in a chunk: what their indices add."""
    host = chunks.host
    q = position + int(host.skip[c])
    run = int(host.run[c])
    return (q // run) * int(host.stride[c]) + q % run


def _term(position: torch.Tensor, chunks: DeviceChunks, c: int) -> torch.Tensor:
    return _ascending(position, chunks, c) + signed(int(chunks.host.key[c]))


def _packed(where: torch.Tensor, n: int) -> torch.Tensor:
    """A bitmap of ``n`` bits, the lowest first."""
    flags = torch.zeros(-(-n // 8) * 8, dtype=torch.uint8, device=where.device)
    flags[where] = 1
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=where.device)
    return (flags.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpacked(bitmap: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bitmap.device)
    return torch.nonzero((bitmap.view(-1, 1) & weights).reshape(-1)).reshape(-1)


def _joined(parts: list[torch.Tensor], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([like.new_empty(0, dtype=dtype), *(part.to(dtype) for part in parts)])


def scratch(chunks: int, *, width: int) -> int:
    """See ``DeviceOps.scratch``: a chunk's mask of differences, one at a time."""
    return CHUNK if chunks and width else 0


def encode(
    old: torch.Tensor, new: torch.Tensor, *, chunks: DeviceChunks, xor: bool
) -> tuple[DevicePlanes, torch.Tensor]:
    """See ``DeviceOps.encode``."""
    counts: list[int] = []
    gaps, bitmap, kept = [], [], []
    change = torch.zeros(len(chunks), dtype=torch.int64, device=old.device)
    bounds = zip(chunks.host.start.tolist(), chunks.host.length.tolist(), strict=True)
    for c, (low, n) in enumerate(bounds):
        before, after = old[low : low + n], new[low : low + n]
        where = torch.nonzero(before != after).reshape(-1)
        counts.append(k := len(where))
        if GAP_FACTOR * k < n and k < n:
            gaps.append(torch.diff(where, prepend=where.new_full((1,), -1)) - 1)
        elif k < n:
            bitmap.append(_packed(where, n))
        before, after = before[where], after[where]
        kept.append(before ^ after if xor else after - before)
        change[c] = _change(_term(where, chunks, c), before, after)
    planes = DevicePlanes(
        torch.tensor(counts, dtype=torch.int32, device=old.device),
        _joined(gaps, old, torch.int16),
        _joined(bitmap, old, torch.uint8),
        _joined(kept, old, old.dtype),
    )
    return planes, change


def _positions(
    planes: DevicePlanes, chunks: DeviceChunks
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Positions and values of each chunk's changes."""
    gap = bit = done = 0
    lengths = chunks.host.length.tolist()
    for k, n in zip(planes.counts.tolist(), lengths, strict=True):
        if k == n:
            where = torch.arange(n, device=planes.values.device)
        elif GAP_FACTOR * k < n:
            steps = (planes.gaps[gap : gap + k].to(torch.int64) & 0xFFFF) + 1
            where = torch.cumsum(steps, 0) - 1
            gap += k
        else:
            where = _unpacked(planes.bitmap[bit : bit + -(-n // 8)])
            bit += -(-n // 8)
        yield where, planes.values[done : done + k]
        done += k


def _moved(old: torch.Tensor, values: torch.Tensor, *, xor: bool, negate: bool) -> torch.Tensor:
    if xor:
        return old ^ values
    return old - values if negate else old + values


def decode_into(
    target: torch.Tensor, planes: DevicePlanes, *, chunks: DeviceChunks, xor: bool
) -> torch.Tensor:
    """See ``DeviceOps.decode_into``."""
    change = torch.zeros(len(chunks), dtype=torch.int64, device=target.device)
    for c, (where, values) in enumerate(_positions(planes, chunks)):
        part = target[int(chunks.host.start[c]) :]
        old = part[where]
        part[where] = new = _moved(old, values, xor=xor, negate=False)
        change[c] = _change(_term(where, chunks, c), old, new)
    return change


class _Memory:
    """Elements at an address, for torch to look at without owning them."""

    def __init__(self, address: int, count: int, *, width: int) -> None:
        kind = "|u1" if width == 1 else f"<i{width}"
        self._interface: dict[str, Any] = {
            "shape": (count,), "typestr": kind, "data": (address, False), "version": 3,
        }  # fmt: skip

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface


def seen(address: int, count: int, *, width: int, device: torch.device) -> torch.Tensor:
    """``count`` elements of ``width`` bytes at an address, which the caller keeps alive."""
    memory = _Memory(address, count, width=width)
    if device.type == "cpu":
        return torch.from_numpy(np.asarray(memory))
    return torch.as_tensor(memory, device=device)


def _resident(
    where: torch.Tensor, chunks: DeviceChunks, placed: Placed, c: int, *, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chunk's resident memory, the place there of each position, and which are held."""
    index = _ascending(where, chunks, c) + placed.first[c]
    held = torch.ones_like(index, dtype=torch.bool)
    row = -1 if placed.box is None else int(placed.box[c])
    place = index
    if row >= 0 and placed.boxes is not None:
        rest, place = index, torch.zeros_like(index)
        for extent, offset, shape, stride in reversed(placed.boxes[row].T.tolist()):
            coordinate, rest = rest % extent - offset, rest // extent
            held &= (coordinate >= 0) & (coordinate < shape)
            place = place + coordinate * stride
        place = torch.where(held, place, 0)
    if not bool(held.any()):  # nothing of it is here, so its address may be anything
        return where.new_zeros(1, dtype=INTS[width]), place, held
    count = int(place.max()) + 1
    address = int(placed.address[c])
    return seen(address, count, width=width, device=index.device), place, held


def stage(
    planes: DevicePlanes,
    *,
    chunks: DeviceChunks,
    placed: Placed,
    width: int,
    xor: bool,
    negate: bool = False,
) -> tuple[ChunkLists, torch.Tensor]:
    """See ``DeviceOps.stage``."""
    device = planes.values.device
    change = torch.zeros(len(chunks), dtype=torch.int64, device=device)
    positions, olds, news = [], [], []
    for c, (where, values) in enumerate(_positions(planes, chunks)):
        memory, place, held = _resident(where, chunks, placed, c, width=width)
        old = torch.where(held, memory[place], 0) if len(where) else values
        new = _moved(old, values, xor=xor, negate=negate)
        term = _term(where, chunks, c)
        change[c] = torch.where(held, h(term, new) - h(term, old), 0).sum()
        positions.append(where)
        olds.append(old)
        news.append(new)
    counts = planes.counts.to(torch.int64)
    lists = ChunkLists(
        planes.counts,
        torch.cumsum(counts, 0) - counts,
        _joined(positions, planes.values, torch.int16),
        _joined(olds, planes.values, INTS[width]),
        _joined(news, planes.values, INTS[width]),
    )
    return lists, change


def scatter(
    lists: ChunkLists,
    *,
    chunks: DeviceChunks,
    placed: Placed,
    width: int,
    wrong: torch.Tensor,
    back: bool = False,
    sums: torch.Tensor | None = None,
) -> None:
    """See ``DeviceOps.scatter``."""
    bounds = zip(lists.begin.tolist(), lists.counts.tolist(), strict=True)
    for c, (low, k) in enumerate(bounds):
        if not k:
            continue
        part = slice(low, low + k)
        where = lists.position[part].to(torch.int64) & 0xFFFF
        memory, place, held = _resident(where, chunks, placed, c, width=width)
        where, place = where[held], place[held]
        found, new = memory[place], lists.new[part][held]
        old = found if lists.old is None else lists.old[part][held]
        if back:
            old, new = new, old
        fits = (found == old) | (found == new)
        wrong += (~fits).sum().to(torch.int32)
        memory[place[fits]] = new[fits]
        if sums is not None:
            term = _term(where, chunks, c)
            sums[c] += _change(term[fits], old[fits], new[fits])


def digest(values: torch.Tensor, *, key: int, skip: int, run: int, stride: int) -> torch.Tensor:
    """See ``DeviceOps.digest``."""
    q = torch.arange(skip, skip + len(values), device=values.device)
    term = (q // run) * stride + q % run + signed(key)
    return h(term, values).sum().reshape(1)


def dense_xor(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """See ``DeviceOps.dense_xor``."""
    torch.bitwise_xor(a, b, out=out)
