"""The memory-bound pass of encode: which elements differ, in order, unit after unit."""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import DeviceChunks
from weightdelta.kernels.planes import CHUNK
from weightdelta.kernels.triton_digest import KINDS, programs, stable
from weightdelta.kernels.triton_units import lane_grid, unit_lanes

#: Raw bytes of a unit of each window.
_UNIT: Final = 32768
#: Lanes that a warp compares at a time: eight for each of its threads.
_TILE: Final = 256
#: Lanes in a program's buffer from which on it is emptied; it has room for a tile more.
_FLUSH: Final = 128
#: Lanes that are taken apart at a time.
_STEP: Final = 32
#: Programs a processor: twice what Hopper keeps resident of this kernel, so that a processor that
#: is done early takes another.
_EACH: Final = 56
#: Room for changed elements in a unit's row of scratch, as a fraction of its elements, ...
_SHARE: Final = 2
#: ... unless all rows together would take more bytes than this.
_SCRATCH: Final = 192 << 20


@triton.jit
def _both(pairs: tensor, index: tensor) -> tensor:
    """Pointers to the two neighbours that make up each pair: one access of twice the width."""
    return tl.expand_dims(pairs + 2 * index, -1) + tl.arange(0, 2)


@triton.jit
def _part(lanes: tensor, slot: tl.constexpr, width: tl.constexpr, lane: tl.constexpr) -> tensor:
    """Element number ``slot`` of each lane."""
    part = lanes
    if lane > width:
        part = (lanes >> (8 * width * slot)) & ((1 << (8 * width)) - 1)
    return part


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
def _take_apart(
    buffer_at: tensor, buffer: tensor, held: tensor, found: tensor, base: tensor,
    position: tensor, pairs: tensor, capacity: tensor,
    width: tl.constexpr, lane: tl.constexpr, step: tl.constexpr,
) -> tensor:  # fmt: skip
    """Elements of the ``held`` lanes in the buffer, to a row of scratch; returns how many.

    ``base`` is the position of the unit's first lane in the chunk, in bytes (before the chunk
    where there is a lead); ``found`` elements are in the row already.
    """
    for i in range(0, held, step):
        e = i + tl.arange(0, step)
        inside = e < held
        j = tl.load(buffer_at + e, mask=inside, other=0).to(tl.int32) & 0xFFFF
        old = tl.load(buffer + 2 * e, mask=inside, other=0)
        new = tl.load(buffer + 2 * e + 1, mask=inside, other=0)
        each = tl.zeros((step,), tl.int32)
        for s in tl.static_range(lane // width):
            each += (_part(old ^ new, s, width, lane) != 0).to(tl.int32)
        rank = tl.cumsum(each, 0) - each + found
        first = (base + j * lane) // width
        for s in tl.static_range(lane // width):
            hit = _part(old ^ new, s, width, lane) != 0
            keep = hit & (rank < capacity)
            tl.store(position + rank, (first + s).to(tl.int16), mask=keep)
            pair = tl.join(_part(old, s, width, lane), _part(new, s, width, lane))
            tl.store(_both(pairs, rank), pair, mask=keep[:, None])
            rank += hit.to(tl.int32)
        found += tl.sum(each, 0)
    return found


@triton.jit
def _rank(mark: tensor) -> tensor:
    """How many marks [32, 8] (int32, 0 or 1) stand before each, column after column.

    The eight columns are counted in the eight bytes of one word, so that one scan over 32 threads
    serves them all; a product then sums the bytes of earlier columns (224 at most).
    """
    shift = 8 * tl.arange(0, 8)[None, :].to(tl.int64)
    packed = tl.sum(mark.to(tl.int64) << shift, 1)
    before = tl.cumsum(packed, 0) - packed
    # No byte of a sum over 32 threads overflows; sums of 32 bits take one instruction.
    low = tl.sum(packed.to(tl.int32), 0).to(tl.int64)
    high = tl.sum((packed >> 32).to(tl.int32), 0).to(tl.int64)
    columns = (low | (high << 32)) * 0x0101010101010100
    return (((before[:, None] >> shift) & 255) + ((columns >> shift) & 255)).to(tl.int32)


@stable("units", "misaligned", "capacity")
def _scan(
    old: tensor, new: tensor, start: tensor, length: tensor, units: tensor, misaligned: tensor,
    buffer_at: tensor, buffer: tensor,
    tally: tensor, position: tensor, pairs: tensor, capacity: tensor,
    kind: tl.constexpr, width: tl.constexpr, lane: tl.constexpr, per_chunk: tl.constexpr,
    unit: tl.constexpr, tile: tl.constexpr, flush: tl.constexpr, step: tl.constexpr,
) -> None:  # fmt: skip
    own = tl.program_id(0).to(tl.int64) * (flush + tile)
    buffer_at += own
    buffer = tl.multiple_of(buffer, 16) + own * 2
    pairs = tl.multiple_of(pairs, 16)
    old = (old - misaligned).to(tl.pointer_type(kind))
    new = (new - misaligned).to(tl.pointer_type(kind))
    # In this order of dimensions Triton gives loads and stores one layout: a row is a thread.
    lanes = tl.arange(0, 32)[:, None] + 32 * tl.arange(0, 8)[None, :]
    for piece in range(tl.program_id(0), units, tl.num_programs(0)):
        at = tl.cast(piece, tl.int32)
        c = at // per_chunk
        n = tl.load(length + c).to(tl.int32)
        grid, lead = lane_grid(tl.load(start + c), misaligned, width, lane)
        lead = lead.to(tl.int32)
        first, last = unit_lanes(at - c * per_chunk, lead, n, width, lane, per_chunk, unit)
        row = at.to(tl.int64) * capacity
        found = 0
        held = 0
        for t in range(first, last, tile):
            j = t + lanes
            a = tl.load(old + grid + j, mask=j < last, other=0, eviction_policy="evict_first")
            b = tl.load(new + grid + j, mask=j < last, other=0, eviction_policy="evict_first")
            x = a ^ b
            hit = tl.sum(tl.sum((x != 0).to(tl.int32), 1), 0)
            if hit > 0:
                if (t == 0) | (t + tile >= last):
                    x = _within(x, j, lead, n * width, lane > width)
                    hit = tl.sum(tl.sum((x != 0).to(tl.int32), 1), 0)
                mark = (x != 0).to(tl.int32)
                rank = _rank(mark) + held
                tl.store(buffer_at + rank, (j - first).to(tl.int16), mask=mark > 0)
                tl.store(_both(buffer, rank), tl.join(a, a ^ x), mask=(mark > 0)[:, :, None])
                held += hit
            if (held >= flush) | ((t + tile >= last) & (held > 0)):
                tl.debug_barrier()
                found = _take_apart(
                    buffer_at, buffer, held, found, first * lane - lead,
                    position + row, pairs + row * 2, capacity, width, lane, step,
                )  # fmt: skip
                tl.debug_barrier()
                held = 0
        tl.store(tally + at, found)


@dataclass(frozen=True, slots=True)
class Units:
    """Constants and scratch of one call."""

    width: int
    lane: int
    per_chunk: int
    misaligned: int
    capacity: int
    tally: torch.Tensor
    position: torch.Tensor
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
        most = _SCRATCH // max(1, units * (2 + 2 * width))
        capacity = max(16, min(_UNIT // width // _SHARE, most // 16 * 16))

        def room(kind: torch.dtype, count: int) -> torch.Tensor:
            return torch.empty(count, dtype=kind, device=old.device)

        rows = units * capacity
        scratch = room(torch.int32, units), room(torch.int16, rows), room(old.dtype, 2 * rows)
        shift = shift if lane > width else 0
        return cls(width, lane, per_chunk, shift, capacity, *scratch)


def scan(old: torch.Tensor, new: torch.Tensor, chunks: DeviceChunks, units: Units) -> None:
    """Count what differs in every unit, and list it in ``units``; asynchronous."""
    count = len(units.tally)
    grid = programs(old, count, each=_EACH)
    room = grid[0] * (_FLUSH + _TILE)
    kind = torch.int64 if units.lane == 8 else old.dtype
    buffer_at = torch.empty(room, dtype=torch.int16, device=old.device)
    buffer = torch.empty(2 * room, dtype=kind, device=old.device)
    _scan[grid](
        old.view(torch.uint8), new.view(torch.uint8), chunks.start, chunks.length, count,
        units.misaligned, buffer_at, buffer,
        units.tally, units.position, units.pairs, units.capacity,
        kind=KINDS[units.lane], width=units.width, lane=units.lane, per_chunk=units.per_chunk,
        unit=units.lanes, tile=_TILE, flush=_FLUSH, step=_STEP, num_warps=1,
    )  # fmt: skip
