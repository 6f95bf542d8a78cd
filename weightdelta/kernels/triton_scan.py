"""The memory-bound pass of encode: which elements differ, in order, unit after unit."""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import DeviceChunks
from weightdelta.kernels.planes import CHUNK
from weightdelta.kernels.triton_digest import KINDS, stable
from weightdelta.kernels.triton_units import lane_grid, unit_lanes

#: Raw bytes of a unit of each window.
_UNIT: Final = 32768
#: Lanes that each of a warp's 32 threads compares at a time, by width: what was fastest on an H200.
_COLUMNS: Final = {1: 4, 2: 8, 4: 4, 8: 4}
#: What holds a changed element's position, old and new value, by width; wider elements keep a
#: position and a pair of values.
RECORDS: Final = {1: torch.int32, 2: torch.int64}
#: Room for changed elements in a unit's row of scratch, as a fraction of its elements, ...
_SHARE: Final = 2
#: ... unless all rows together would take more bytes than this.
_SCRATCH: Final = 192 << 20


@triton.jit
def _part(lanes: tensor, slot: tensor, width: tl.constexpr, lane: tl.constexpr) -> tensor:
    """Element number ``slot`` of each lane, zero-extended if a lane has several."""
    part = lanes
    if lane > width:
        part = (lanes >> (8 * width * slot)) & ((1 << (8 * width)) - 1)
    return part


@triton.jit
def _changes(x: tensor, width: tl.constexpr, lane: tl.constexpr) -> tensor:
    """How many elements of each lane are not zero, int32."""
    each = tl.zeros(x.shape, tl.int32)
    for s in tl.static_range(lane // width):
        each += (_part(x, s, width, lane) != 0).to(tl.int32)
    return each


@triton.jit
def _first(x: tensor, width: tl.constexpr, lane: tl.constexpr) -> tensor:
    """Which element of each lane is the first that is not zero."""
    slot = tl.zeros(x.shape, tl.int32)
    for s in tl.static_range(1, lane // width):
        slot += ((x & ((1 << (8 * width * s)) - 1)) == 0).to(tl.int32)
    return slot


@triton.jit
def _within(x: tensor, j: tensor, lead: tensor, size: tensor, wide: tl.constexpr) -> tensor:
    """Zero the bytes of 64-bit lanes that lie before or after the chunk's ``size`` bytes."""
    if wide:
        low = tl.minimum(tl.maximum(lead - 8 * j, 0), 8) * 8
        high = tl.minimum(tl.maximum(lead + size - 8 * j, 0), 8) * 8
        ones = tl.full(x.shape, -1, tl.int64)
        above = tl.where(low < 64, ones << tl.minimum(low, 63).to(tl.int64), 0)
        beyond = tl.where(high < 64, ones << tl.minimum(high, 63).to(tl.int64), 0)
        x = x & above & ~beyond
    return x


@triton.jit
def _summed(words: tensor) -> tensor:
    """Sum of int64 words whose halves do not overflow; a sum of 32 bits is one instruction."""
    low = tl.sum(words.to(tl.int32), 0).to(tl.int64)
    return low | (tl.sum((words >> 32).to(tl.int32), 0).to(tl.int64) << 32)


@triton.jit
def _rank(each: tensor, columns: tl.constexpr) -> tuple[tensor, tensor]:
    """Sum of what stands before each of ``each`` [32, columns], column after column; and of all.

    No entry is above 8, and there are eight columns at most: so a row fits in the bytes of one
    word, whose scan over 32 threads serves all columns. What stands before a row in its column is
    248 at most; carries of the row itself go when it is taken off. Sums of whole columns need 16
    bits: even and odd columns have a word each.
    """
    column = tl.arange(0, columns)[None, :]
    shift = (8 * column).to(tl.int64)
    packed = tl.sum(each.to(tl.int64) << shift, 1)
    before = tl.cumsum(packed, 0) - packed
    even = _summed(packed & 0x00FF00FF00FF00FF)
    both = even + _summed((packed >> 8) & 0x00FF00FF00FF00FF)
    earlier = both * 0x0001000100010000
    pair = 16 * (column // 2).to(tl.int64)
    start = (earlier >> pair) + tl.where(column % 2 > 0, even >> pair, 0)
    rank = (before[:, None] >> shift) & 255
    return (rank + (start & 0xFFFF)).to(tl.int32), ((earlier + both) >> 48).to(tl.int32) & 0xFFFF


@triton.jit
def put_record(
    records: tensor, pairs: tensor, at: tensor, position: tensor, old: tensor, new: tensor,
    mask: tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """Note a changed element as entry ``at``: one store where it fits in 64 bits."""
    if width == 1:
        word = position.to(tl.int32) | (old.to(tl.int32) & 255) << 16
        tl.store(records + at, word | (new.to(tl.int32) & 255) << 24, mask=mask)
    elif width == 2:
        low = position | (old.to(tl.int32) & 65535) << 16
        word = (low.to(tl.int64) & 0xFFFFFFFF) | (new.to(tl.int64) & 65535) << 32
        tl.store(records + at, word, mask=mask)
    else:
        tl.store(records + at, position.to(tl.int16), mask=mask)
        tl.store(pairs + 2 * at, old, mask=mask)
        tl.store(pairs + 2 * at + 1, new, mask=mask)


@triton.jit
def record_at(
    records: tensor, pairs: tensor, at: tensor, mask: tensor, width: tl.constexpr
) -> tuple[tensor, tensor, tensor]:
    """Position (int32), old and new value of entry ``at``, as ``put_record`` noted them."""
    word = tl.load(records + at, mask=mask, other=0)
    position = word.to(tl.int32) & 0xFFFF
    if width == 1:
        old, new = ((word >> 16) & 255).to(tl.uint8), ((word >> 24) & 255).to(tl.uint8)
    elif width == 2:
        old, new = (word >> 16).to(tl.int16), (word >> 32).to(tl.int16)
    else:
        old = tl.load(pairs + 2 * at, mask=mask, other=0)
        new = tl.load(pairs + 2 * at + 1, mask=mask, other=0)
    return position, old, new


@triton.jit
def _note(
    records: tensor, pairs: tensor, rank: tensor, place: tensor, a: tensor, x: tensor,
    each: tensor, width: tl.constexpr, lane: tl.constexpr,
) -> None:  # fmt: skip
    """Note the elements of ``a`` where ``x`` is not zero, those of lane i from ``rank[i]`` on.

    One of each lane at a time: few lanes have a second. Unrolled over the elements of a lane it
    would take so many registers that too few programs fit.
    """
    for _ in range(tl.max(tl.max(each, 1), 0)):
        slot = _first(x, width, lane)
        mine, before = _part(x, slot, width, lane), _part(a, slot, width, lane)
        put_record(records, pairs, rank, place + slot, before, before ^ mine, mine != 0, width)
        if lane > width:
            x ^= mine << (8 * width * slot)
        rank += 1


@stable("misaligned", "capacity")
def _scan(
    old: tensor, new: tensor, start: tensor, length: tensor, misaligned: tensor,
    tally: tensor, records: tensor, pairs: tensor, capacity: tensor,
    kind: tl.constexpr, width: tl.constexpr, lane: tl.constexpr, per_chunk: tl.constexpr,
    unit: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    old = (old - misaligned).to(tl.pointer_type(kind))
    new = (new - misaligned).to(tl.pointer_type(kind))
    # In this order of dimensions Triton gives all of it one layout: a row is a thread.
    lanes = tl.arange(0, 32)[:, None] + 32 * tl.arange(0, columns)[None, :]
    at = tl.program_id(0)
    c = at // per_chunk
    n = tl.load(length + c).to(tl.int32)
    grid, lead = lane_grid(tl.load(start + c), misaligned, width, lane)
    lead = lead.to(tl.int32)
    first, last = unit_lanes(at - c * per_chunk, lead, n, width, lane, per_chunk, unit)
    row = at.to(tl.int64) * capacity
    found = 0
    for t in range(first, last, 32 * columns):
        j = t + lanes
        a = tl.load(old + grid + j, mask=j < last, other=0, eviction_policy="evict_first")
        b = tl.load(new + grid + j, mask=j < last, other=0, eviction_policy="evict_first")
        x = a ^ b
        if tl.max((tl.reduce_or(x, 1) != 0).to(tl.int32), 0) > 0:
            if (t == 0) | (t + 32 * columns >= last):
                x = _within(x, j, lead, n * width, lane > width)
            each = _changes(x, width, lane)
            rank, total = _rank(each, columns)
            if found + total <= capacity:  # else the chunk spills, and nobody reads the row
                place = (j * lane - lead) // width
                _note(records + row, pairs + 2 * row, rank + found, place, a, x, each, width, lane)
            found += total
    tl.store(tally + at, found)


@dataclass(frozen=True, slots=True)
class Units:
    """Constants and scratch of one call.

    Attributes:
        tally: int32 [units], changed elements of each.
        records, pairs: Rows of ``capacity`` entries a unit, as ``put_record`` fills them.
    """

    width: int
    lane: int
    per_chunk: int
    misaligned: int
    capacity: int
    tally: torch.Tensor
    records: torch.Tensor
    pairs: torch.Tensor

    @property
    def lanes(self) -> int:
        """Lanes of a unit."""
        return _UNIT // self.lane

    @classmethod
    def of(cls, old: torch.Tensor, new: torch.Tensor, *, chunks: int) -> "Units":
        """Scratch for two windows that lie as these do."""
        width = old.element_size()
        shift = old.data_ptr() % 8
        lane = 8 if shift == new.data_ptr() % 8 else width
        per_chunk = CHUNK * width // _UNIT
        units = chunks * per_chunk
        kind, pair = RECORDS.get(width, torch.int16), 0 if width in RECORDS else 2
        most = _SCRATCH // max(1, units * (kind.itemsize + pair * width))
        capacity = max(16, min(_UNIT // width // _SHARE, most // 16 * 16))

        def room(kind: torch.dtype, count: int) -> torch.Tensor:
            return torch.empty(count, dtype=kind, device=old.device)

        rows = units * capacity
        scratch = room(torch.int32, units), room(kind, rows), room(old.dtype, pair * rows)
        shift = shift if lane > width else 0
        return cls(width, lane, per_chunk, shift, capacity, *scratch)


def scan(old: torch.Tensor, new: torch.Tensor, chunks: DeviceChunks, units: Units) -> None:
    """Count what differs in every unit, and list it in ``units``; asynchronous."""
    # A program a unit: the device hands them out as processors get free, which takes a tenth
    # less time than programs that take every n-th unit.
    _scan[(len(units.tally),)](
        old.view(torch.uint8), new.view(torch.uint8), chunks.start, chunks.length,
        units.misaligned, units.tally, units.records, units.pairs, units.capacity,
        kind=KINDS[units.lane], width=units.width, lane=units.lane, per_chunk=units.per_chunk,
        unit=units.lanes, columns=_COLUMNS[units.width], num_warps=1,
    )  # fmt: skip
