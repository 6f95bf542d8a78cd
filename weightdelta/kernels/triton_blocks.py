"""Zero-run blocks on the GPU: ``reference_blocks`` defines what they hold, byte for byte.

One program writes one block. Each byte of each change has a lane, and one lane more stands for
the end of the block; scans over the lanes tell where a literal begins, whether the stretch of
zeros before a byte is a copy, and where its bytes go. Two passes: the sizes, then the bytes into
an arena of just that many. Zeros inside literals are never written: the arena starts out zero.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.errors import InputError
from weightdelta.kernels.planes import BLOCK_BYTES
from weightdelta.kernels.reference_blocks import LZ4_LAST_START, LZ4_LITERAL_TAIL, RUN
from weightdelta.kernels.triton_tokens import (
    copied,
    head,
    prefix,
    put,
    put_size,
    put_step,
)

_BLOCK = tl.constexpr(BLOCK_BYTES)
_RUN = tl.constexpr(RUN)
_LAST_START = tl.constexpr(LZ4_LAST_START)
_TAIL = tl.constexpr(LZ4_LITERAL_TAIL)

#: Lanes and warps of a program. A block goes to the smallest that has room for it; the largest
#: has room for any block that is not dense.
_SHAPES: Final = ((64, 1), (256, 2), (1024, 4), (4096, 8), (16384, 16))


@triton.jit
def _later(a: tensor, b: tensor) -> tensor:
    return tl.maximum(a, b)


@triton.jit
def _sooner(a: tensor, b: tensor) -> tensor:
    return tl.minimum(a, b)


@triton.jit
def _lane(
    offsets: tensor, values: tensor, lane: tensor, first: tensor, count: tensor, low: tensor,
    width: tl.constexpr,
) -> tensor:  # fmt: skip
    """Place in the block, and value, of a byte of the list; 0 for lanes past its ends."""
    inside = (lane >= 0) & (lane < count * width)
    entry = first + lane // width
    part = lane % width
    place = tl.load(offsets + entry, mask=inside, other=0).to(tl.int64) * width - low
    bits = tl.load(values + entry, mask=inside, other=0).to(tl.int64)
    byte = (bits >> (8 * part).to(tl.int64)) & 255
    return place.to(tl.int32) + part, tl.where(inside, byte, 0).to(tl.int32)


@triton.jit
def _is_copy(live: tensor, end: tensor, stop: tensor, size: tensor, lz4: tl.constexpr) -> tensor:
    """Whether zeros from ``end`` to ``stop`` are worth a copy, and allowed to be one."""
    found = live & (stop - end >= _RUN)
    if lz4:
        found = found & (end + 1 <= size - _LAST_START)
    return found


@triton.jit
def _stop(place: tensor, size: tensor, lz4: tl.constexpr) -> tensor:
    return tl.minimum(place, size - _TAIL) if lz4 else place


@triton.jit
def _lanes(
    offsets: tensor, values: tensor, first: tensor, count: tensor, low: tensor, size: tensor,
    lz4: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr,
) -> tensor:  # fmt: skip
    """Place, byte, last end, literal's begin, stop and copy flag of every lane; is it the last.

    What a lane needs of the one before it is computed there too, from loads one further back:
    scans include their own lane.
    """
    lane = tl.arange(0, lanes)
    earlier, byte2 = _lane(offsets, values, lane - 2, first, count, low, width)
    before, byte1 = _lane(offsets, values, lane - 1, first, count, low, width)
    place, byte = _lane(offsets, values, lane, first, count, low, width)
    last = lane == count * width
    place = tl.where(last, size, place)
    end1 = tl.associative_scan(tl.where(byte2 != 0, earlier + 1, 0), 0, _later)
    end = tl.maximum(end1, tl.where(byte1 != 0, before + 1, 0))
    stop1 = _stop(before, size, lz4)
    copy1 = _is_copy(byte1 != 0, end1, stop1, size, lz4)
    begin = tl.associative_scan(tl.where(copy1, stop1, 0), 0, _later)
    stop = _stop(place, size, lz4)
    copy = _is_copy((byte != 0) | last, end, stop, size, lz4)
    return place, byte, end, begin, stop, copy, last


@triton.jit
def _block_of(
    first: tensor, last: tensor, blocks: tensor, which: tensor, size: tensor,
) -> tensor:  # fmt: skip
    """Row in the tables, first change, changes, first byte and bytes of this program's block."""
    row = tl.load(which + tl.program_id(0))
    begin = tl.load(first + row)
    count = (tl.load(last + row) - begin).to(tl.int32)
    low = tl.load(blocks + row) * _BLOCK
    return row, begin, count, low, tl.minimum(size - low, _BLOCK).to(tl.int32)


@triton.jit
def _steps(
    end: tensor, begin: tensor, stop: tensor, copy: tensor, last: tensor, size: tensor,
    lz4: tl.constexpr,
) -> tensor:  # fmt: skip
    """Bytes of each copy with its literal; begin of the literal after it; bytes of the last."""
    literal = end + 1 - begin
    step = head(literal, lz4) + literal + copied(stop - end - 1, lz4)
    step = tl.where(copy, step, 0)
    onward = tl.where(copy, stop, begin)
    final = size - onward
    closing = head(final, lz4) + final
    if not lz4:
        closing = tl.where(final > 0, closing, 0)
    return step, onward, tl.where(last, closing, 0)


@triton.jit
def _sizes_kernel(
    offsets: tensor, values: tensor, first: tensor, last: tensor, blocks: tensor, which: tensor,
    sizes: tensor,
    total: tensor, lz4: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    row, at, count, low, size = _block_of(first, last, blocks, which, total)
    _, _, end, begin, stop, copy, is_last = _lanes(
        offsets, values, at, count, low, size, lz4, width, lanes
    )
    step, _, closing = _steps(end, begin, stop, copy, is_last, size, lz4)
    tl.store(sizes + row, prefix(size, lz4) + tl.sum(step + closing, 0))


@triton.jit
def _literal_ends(
    offsets: tensor, values: tensor, first: tensor, count: tensor, low: tensor, size: tensor,
    place: tensor,
    byte: tensor, end: tensor, lz4: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr,
) -> tensor:  # fmt: skip
    """One past the last nonzero byte of the literal that each lane's byte stands in."""
    lane = tl.arange(0, lanes) + 1
    ahead, byte1 = _lane(offsets, values, lane, first, count, low, width)
    last = lane == count * width
    ahead = tl.where(last, size, ahead)
    end = tl.maximum(end, tl.where(byte != 0, place + 1, 0))
    copy = _is_copy((byte1 != 0) | last, end, _stop(ahead, size, lz4), size, lz4)
    return tl.associative_scan(tl.where(copy, end, size - 1), 0, _sooner, reverse=True)


@triton.jit
def _bytes_kernel(
    offsets: tensor, values: tensor, first: tensor, last: tensor, blocks: tensor, which: tensor,
    starts: tensor,
    arena: tensor, total: tensor, lz4: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    row, at, count, low, size = _block_of(first, last, blocks, which, total)
    place, byte, end, begin, stop, copy, is_last = _lanes(
        offsets, values, at, count, low, size, lz4, width, lanes
    )
    step, onward, closing = _steps(end, begin, stop, copy, is_last, size, lz4)
    done = tl.cumsum(step, 0) + prefix(size, lz4)
    out = arena + tl.load(starts + row)
    put_size(out, size, lz4)
    put_step(out, done - step, end + 1 - begin, stop - end - 1, copy, lz4)
    put_step(out, done, size - onward, place * 0, is_last & (closing > 0), lz4)
    ends = _literal_ends(offsets, values, at, count, low, size, place, byte, end, lz4, width, lanes)
    target = done + head(ends + 1 - onward, lz4) + place - onward
    put(out, target, byte, (byte != 0) & ~is_last)


def _launch(
    kernel: tl.tensor,
    table: dict[tuple[int, int], torch.Tensor],
    *args: tl.tensor,
    **names: tl.tensor,
) -> None:
    for (lanes, warps), which in table.items():
        kernel[(len(which),)](*args[:5], which, *args[5:], lanes=lanes, num_warps=warps, **names)


def _shaped(counts: torch.Tensor, *, width: int) -> dict[tuple[int, int], torch.Tensor]:
    """Rows of blocks by the shape of the program that writes them."""
    need = counts * width + 1
    bounds = torch.tensor([lanes for lanes, _ in _SHAPES], device=counts.device)
    shape = torch.searchsorted(bounds, need).cpu()
    if len(shape) and int(shape.max()) == len(_SHAPES):
        row = int(torch.argmax(need))
        raise InputError(
            f"entry {row} of the blocks has {int(counts[row])} changes of {width} bytes, more than "
            "a zero-run block takes; encode dense blocks with a stock encoder"
        )
    found = {at: torch.nonzero(shape == at).reshape(-1) for at in set(shape.tolist())}
    return {_SHAPES[at]: rows.to(counts.device) for at, rows in sorted(found.items())}


def zero_runs(
    offsets: torch.Tensor, values: torch.Tensor, *, blocks: torch.Tensor, size: int, lz4: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-run blocks of a XOR mask on a device, as ``reference_blocks.zero_runs`` has them.

    Args:
        offsets: int32 or int64, element offset of each change in the mask, ascending.
        values: XOR of each change: uint8, int16, int32 or int64.
        blocks: int64, numbers of the 64 KiB blocks of the mask to write; none of them dense.
        size: Bytes of the whole mask; the last block ends there.
        lz4: LZ4 instead of Snappy.

    Returns:
        The blocks one after another, uint8, and the bytes of each, int32, on the same device.

    Raises:
        InputError: A block has too many changes.
    """
    width = values.element_size()
    low = blocks * BLOCK_BYTES
    high = torch.clamp(low + BLOCK_BYTES, max=size)
    first = torch.searchsorted(offsets, (low // width).to(offsets.dtype))
    last = torch.searchsorted(offsets, (high // width).to(offsets.dtype))
    table = _shaped(last - first, width=width)
    sizes = torch.zeros(len(blocks), dtype=torch.int32, device=offsets.device)
    names = {"lz4": lz4, "width": width}
    _launch(_sizes_kernel, table, offsets, values, first, last, blocks, sizes, size, **names)
    ends = torch.cumsum(sizes, 0, dtype=torch.int64)
    room = int(ends[-1]) if len(ends) else 0
    arena = torch.zeros(room, dtype=torch.uint8, device=offsets.device)
    starts = ends - sizes
    _launch(
        _bytes_kernel, table, offsets, values, first, last, blocks, starts, arena, size, **names
    )
    return arena, sizes
