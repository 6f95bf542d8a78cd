"""The memory-bound pass of encode: which elements differ, in order, unit after unit."""

from dataclasses import dataclass
from typing import Any, Final

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
#: Changed elements in a column of a tile, on average, above which the first of each lane is noted
#: column by column, and what that adds to the ranks of the others.
_DENSE: Final = tl.constexpr(5)
_ONES: Final = tl.constexpr(0x0001000100010001)
#: What holds a changed element's position, old and new value, by width; wider elements keep a
#: position and a pair of values.
RECORDS: Final = {1: torch.int32, 2: torch.int64}
#: Room for changed elements in a unit's row of scratch, in sixteenths of its elements: all rows
#: take three quarters of a window's bytes, ...
_SHARE: Final = 3
#: ... unless that is more than this [B].
_SCRATCH: Final = 384 << 20


@triton.jit
def _flags(x: tensor, width: tl.constexpr, lane: tl.constexpr) -> tensor:
    """A bit for each element of a lane that is not zero, int32."""
    bits = (x != 0).to(tl.int32)
    if lane > width:
        ones: tl.constexpr = ((1 << 64) - 1) // ((1 << (8 * width)) - 1)
        low: tl.constexpr = ones * ((1 << (8 * width - 1)) - 1)
        top = ((x & low) + low) | x  # the top bit of each element
        bits = tl.zeros(x.shape, tl.int32)
        for s in tl.static_range(lane // width):
            bits |= ((top >> (8 * width * (s + 1) - 1 - s)) & (1 << s)).to(tl.int32)
    return bits


@triton.jit
def _halves(x: tensor) -> tensor:
    """The top bit of each half of 32 bits says whether the half is not zero, uint32."""
    word = x.to(tl.uint32)
    return ((word & 0x7FFF7FFF) + 0x7FFF7FFF) | word


@triton.jit
def _todo(x: tensor, width: tl.constexpr, lane: tl.constexpr, columns: tl.constexpr) -> tensor:
    """Which of a thread's elements are not zero: 32 // columns bits a column, int32."""
    column = tl.arange(0, columns)[None, :]
    if (width == 2) & (lane == 8):
        # Bits of elements 0 and 1 are 16 apart at first, and so are those of 2 and 3.
        apart = ((_halves(x) >> 15) & 0x00010001) | ((_halves(x >> 32) >> 13) & 0x00040004)
        apart = apart << (4 * (column & 3))
        low = tl.sum(tl.where(column < 4, apart, 0), 1)
        high = tl.sum(tl.where(column < 4, 0, apart), 1)
        low = (low | (low >> 15)) & 0xFFFF
        high = (high << 16) | ((high << 1) & 0xFFFF0000)
        todo = (low | high).to(tl.int32, bitcast=True)
    else:
        todo = tl.sum(_flags(x, width, lane) << (32 // columns * column), 1)
    return todo


@triton.jit
def _counts(todo: tensor, columns: tl.constexpr) -> tensor:
    """How many of its bits a thread has in each column, int64: 8 fields of 8 bits, or 4 of 16.

    Columns 0, 2, 4 and 6 are in the low half, the others in the high half.
    """
    found = todo - ((todo >> 1) & 0x55555555)
    found = (found & 0x33333333) + ((found >> 2) & 0x33333333)
    if columns == 4:
        found = (found + (found >> 4)) & 0x0F0F0F0F
        even, odd = found & 0x00FF00FF, (found >> 8) & 0x00FF00FF
    else:
        even, odd = found & 0x0F0F0F0F, (found >> 4) & 0x0F0F0F0F
    return even.to(tl.int64) | odd.to(tl.int64) << 32


@triton.jit
def _lowest(bits: tensor) -> tensor:
    """Which bit of each power of two is set: the exponent that it has as a float."""
    exact = bits.to(tl.uint32, bitcast=True).to(tl.float32)
    return (exact.to(tl.int32, bitcast=True) >> 23) - 127


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
    low = tl.sum(words.to(tl.uint32), 0).to(tl.int64)
    return low | (tl.sum((words >> 32).to(tl.uint32), 0).to(tl.int64) << 32)


@triton.jit
def _most(counts: tensor, columns: tl.constexpr) -> tensor:
    """Bits of the thread that has most."""
    both = (counts + (counts >> 32)).to(tl.int32)
    both += both >> 16
    if columns == 8:
        both += both >> 8
    return tl.max(both & 63, 0)


@triton.jit
def _ranks(counts: tensor, columns: tl.constexpr) -> tuple[tensor, tensor, tensor]:
    """What stands before a thread's bits in each column, column after column; and all bits.

    Returns:
        Two words of four ranks, for ``_rank``: of columns 0, 4, 1, 5 and 2, 6, 3, 7; or of columns
        0, 2, 1, 3 and nothing; and the sum.
    """
    ones: tl.constexpr = 0x00FF00FF00FF00FF
    before = tl.cumsum(counts, 0) - counts  # at most 31 * 4 in 8 bits
    all = _summed(counts)
    first, second, total = before, before, all
    if columns == 8:
        first, second = before & ones, (before >> 8) & ones
        total = (all & ones) + ((all >> 8) & ones)
    # Both halves of 32 bits hold a column of each half of the columns.
    summed = (total + (total >> 32)) & 0xFFFFFFFF
    start = (summed << 16) & 0xFFFFFFFF
    even = start
    odd = start + (all & 0x00FF00FF if columns == 8 else all & 0xFFFFFFFF)
    first += even | odd << 32
    if columns == 8:
        even = odd + ((all >> 32) & 0x00FF00FF)
        odd = even + ((all >> 8) & 0x00FF00FF)
        second += even | odd << 32
    return first, second, ((summed & 0xFFFF) + (summed >> 16)).to(tl.int32)


@triton.jit
def _rank(first: tensor, second: tensor, column: tensor, columns: tl.constexpr) -> tensor:
    """A thread's rank in ``column``, of those that ``_ranks`` gives."""
    if columns == 8:
        first = tl.where(column & 2 > 0, second, first)
        half = column >> 2
    else:
        half = column >> 1
    shift = 32 * (column & 1) + 16 * half
    return (first >> shift.to(tl.int64)).to(tl.int32) & 0xFFFF


@triton.jit
def _known_rank(
    first: tensor, second: tensor, column: tl.constexpr, columns: tl.constexpr
) -> tensor:
    """``_rank`` for a column that is known when it compiles."""
    ranks = second if columns == 8 and column & 2 else first
    half: tl.constexpr = column >> (2 if columns == 8 else 1)
    return (ranks >> (32 * (column & 1) + 16 * half)).to(tl.int32) & 0xFFFF


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
def _picked(lanes: tensor, column: tensor, columns: tl.constexpr) -> tensor:
    """Each thread's lane in its ``column``."""
    if columns == 8:
        even, odd = tl.split(tl.reshape(lanes, (32, 4, 2)))
        lanes = tl.where((column & 1)[:, None] > 0, odd, even)
        column = column >> 1
    even, odd = tl.split(tl.reshape(lanes, (32, 2, 2)))
    lanes = tl.where((column & 1)[:, None] > 0, odd, even)
    even, odd = tl.split(lanes)
    return tl.where(column & 2 > 0, odd, even)


@triton.jit
def _four(lanes: tensor) -> tuple[tensor, tensor, tensor, tensor]:
    """A tile's four columns: each thread has a lane of each."""
    even, odd = tl.split(tl.reshape(lanes, (32, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _columns(lanes: tensor, columns: tl.constexpr) -> Any:
    """A tile's columns, four or eight."""
    if columns == 4:
        found = _four(lanes)
    else:
        even, odd = tl.split(tl.reshape(lanes, (32, 4, 2)))
        c0, c2, c4, c6 = _four(even)
        c1, c3, c5, c7 = _four(odd)
        found = c0, c1, c2, c3, c4, c5, c6, c7
    return found


@triton.jit
def _note_firsts(
    records: tensor, pairs: tensor, a: tensor, b: tensor, place: tensor, todo: tensor,
    first: tensor, second: tensor,
    width: tl.constexpr, count: tl.constexpr, columns: tl.constexpr,
) -> tensor:  # fmt: skip
    """Note the first changed element of every lane; ``todo`` without them. See ``_note``.

    Where many have changed, most threads have one in a column, and that column is known.
    """
    bits: tl.constexpr = 32 // columns
    olds, news = _columns(a, columns), _columns(b, columns)
    at = place + tl.arange(0, 32) * count
    for column in tl.static_range(columns):
        some = (todo >> (bits * column)) & ((1 << bits) - 1)
        there = some != 0
        one = some & -some
        slot = (one >> 1) - (one >> 3)  # of 1, 2, 4 and 8
        if count > 4:
            slot = tl.where(there, _lowest(one), 0)
        left, right = olds[column], news[column]
        if count > 1:
            shift = (8 * width * slot).to(tl.int64)
            left, right = left >> shift, right >> shift
        if width < 8:
            left, right = left.to(tl.int32), right.to(tl.int32)
        rank = _known_rank(first, second, column, columns)
        position = at + 32 * column * count + slot
        put_record(records, pairs, rank, position, left, right, there, width)
        todo ^= one << (bits * column)
    return todo


@triton.jit
def _note(
    records: tensor, pairs: tensor, a: tensor, b: tensor, place: tensor, todo: tensor,
    most: tensor, first: tensor, second: tensor,
    width: tl.constexpr, count: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Note a tile's changed elements, one of each thread at a time.

    Few have changed, so a thread looks for them in its bits, instead of going through all that it
    holds. ``a`` and ``b`` are old and new lanes, of ``count`` elements each, the first of them at
    ``place`` in the chunk; ``todo`` has 32 // columns bits of each column, ``most`` of them in some
    thread; ``first`` and ``second`` are the ranks that ``_ranks`` gives.
    """
    log: tl.constexpr = 3 if columns == 4 else 2
    thread = tl.arange(0, 32)
    column, nth = tl.full((32,), -1, tl.int32), tl.zeros((32,), tl.int32)
    for _ in range(most):
        there = todo != 0
        one = todo & -todo
        bit = tl.where(there, _lowest(one), 0)
        nth = tl.where(bit >> log == column, nth + 1, 0)
        column = bit >> log
        slot = bit & ((1 << log) - 1)
        left, right = _picked(a, column, columns), _picked(b, column, columns)
        if count > 1:
            left = left >> (8 * width * slot).to(tl.int64)
            right = right >> (8 * width * slot).to(tl.int64)
        if width < 8:
            left, right = left.to(tl.int32), right.to(tl.int32)
        at = (32 * column + thread) * count + slot
        rank = _rank(first, second, column, columns) + nth
        put_record(records, pairs, rank, place + at, left, right, there, width)
        todo ^= one


@stable("misaligned", "capacity")
def _scan(
    old: tensor, new: tensor, start: tensor, length: tensor, misaligned: tensor,
    tally: tensor, records: tensor, pairs: tensor, capacity: tensor,
    kind: tl.constexpr, width: tl.constexpr, lane: tl.constexpr,
    per_chunk: tl.constexpr, unit: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    old = (old - misaligned).to(tl.pointer_type(kind))
    new = (new - misaligned).to(tl.pointer_type(kind))
    count: tl.constexpr = lane // width
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
        if t + 32 * columns <= last:
            a = tl.load(old + grid + j)
            b = tl.load(new + grid + j)
        else:
            a = tl.load(old + grid + j, mask=j < last, other=0)
            b = tl.load(new + grid + j, mask=j < last, other=0)
        x = a ^ b
        if tl.max((tl.reduce_or(x, 1) != 0).to(tl.int32), 0) > 0:
            if (t == 0) | (t + 32 * columns >= last):
                x = _within(x, j, lead, n * width, lane > width)
            todo = _todo(x, width, lane, columns)
            counts = _counts(todo, columns)
            first_ranks, second_ranks, total = _ranks(counts, columns)
            if found + total <= capacity:  # else the chunk spills, and nobody reads the row
                place = (t * lane - lead) // width
                if total > _DENSE * columns:
                    todo = _note_firsts(
                        records + row + found, pairs + 2 * (row + found), a, b, place, todo,
                        first_ranks, second_ranks, width, count, columns,
                    )  # fmt: skip
                    counts = _counts(todo, columns)
                    first_ranks += _ONES
                    second_ranks += _ONES
                _note(
                    records + row + found, pairs + 2 * (row + found),
                    a, b, place, todo, _most(counts, columns),
                    first_ranks, second_ranks, width, count, columns,
                )  # fmt: skip
            found += total
    tl.store(tally + at, found)


def _rows(chunks: int, width: int) -> tuple[int, int, int]:
    """Units of so many chunks, entries in each one's row of scratch, and bytes of an entry."""
    units = chunks * (CHUNK * width // _UNIT)
    entry = RECORDS[width].itemsize if width in RECORDS else torch.int16.itemsize + 2 * width
    most = _SCRATCH // max(1, units * entry)
    return units, max(16, min(_UNIT // width * _SHARE // 16, most // 16 * 16)), entry


def scratch(chunks: int, *, width: int) -> int:
    """See ``DeviceOps.scratch``."""
    units, capacity, entry = _rows(chunks, width)
    return units * (torch.int32.itemsize + capacity * entry)


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
        units, capacity, _ = _rows(chunks, width)
        kind, pair = RECORDS.get(width, torch.int16), 0 if width in RECORDS else 2

        def room(kind: torch.dtype, count: int) -> torch.Tensor:
            return torch.empty(count, dtype=kind, device=old.device)

        rows = units * capacity
        found = room(torch.int32, units), room(kind, rows), room(old.dtype, pair * rows)
        shift = shift if lane > width else 0
        return cls(width, lane, CHUNK * width // _UNIT, shift, capacity, *found)


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
