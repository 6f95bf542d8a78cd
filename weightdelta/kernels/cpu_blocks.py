"""Compiled emitters of zero-run blocks; ``reference_blocks`` defines what they write.

The cost follows the changes, not the mask: the list is walked once, and a stretch of zeros is a
few bytes however long it is. A literal is written behind one byte of room for its head and moved
only if it grows too long for that.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import ZERO, jit, scratch
from weightdelta.kernels.planes import BLOCK_BYTES, Elements
from weightdelta.kernels.reference_blocks import LZ4_LAST_START, LZ4_LITERAL_TAIL, RUN

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

_BYTE = np.uint64(255)
_EIGHT = np.uint64(8)


@jit
def _shift(out: Any, begin: Any, end: Any, by: Any) -> None:
    for i in range(end - 1, begin - 1, -1):
        out[i + by] = out[i]


@jit
def _snappy_literal(out: Any, head: Any, at: Any) -> Any:
    """Write the head of a literal whose bytes stand after one byte of room; returns its end."""
    n = at - head - 2
    if n < 0:
        return head
    if n < 60:
        out[head] = n << 2
        return at
    more = 1 if n < 256 else 2
    _shift(out, head + 1, at, more)
    out[head] = (59 + more) << 2
    out[head + 1] = n & 255
    if more == 2:
        out[head + 2] = n >> 8
    return at + more


@jit
def _snappy_zeros(out: Any, at: Any, count: Any) -> Any:
    while count >= 64:
        out[at] = 63 << 2 | 2
        out[at + 1] = 1
        out[at + 2] = 0
        at += 3
        count -= 64
    if 4 <= count <= 11:
        out[at] = (count - 4) << 2 | 1
        out[at + 1] = 1
        at += 2
    elif count:
        out[at] = (count - 1) << 2 | 2
        out[at + 1] = 1
        out[at + 2] = 0
        at += 3
    return at


@jit
def _lz4_extra(out: Any, at: Any, count: Any) -> Any:
    """What a length's nibble of 15 leaves over; returns the end."""
    count -= 15
    while count >= 255:
        out[at] = 255
        at += 1
        count -= 255
    out[at] = count
    return at + 1


@jit
def _lz4_step(out: Any, head: Any, at: Any, zeros: Any) -> Any:
    """Finish a sequence whose literals stand after one byte of room; returns its end."""
    count = at - head - 1
    match = zeros - 4 if zeros else 0
    out[head] = min(count, 15) << 4 | min(match, 15)
    if count >= 15:
        more = (count - 15) // 255 + 1
        _shift(out, head + 1, at, more)
        _lz4_extra(out, head + 1, count)
        at += more
    if zeros:
        out[at] = 1
        out[at + 1] = 0
        at += 2
        if match >= 15:
            at = _lz4_extra(out, at, match)
    return at


@jit
def _step(out: Any, head: Any, at: Any, zeros: Any, lz4: Any) -> Any:
    """End a literal and copy ``zeros`` after it."""
    if lz4:
        return _lz4_step(out, head, at, zeros)
    return _snappy_zeros(out, _snappy_literal(out, head, at), zeros)


@jit
def _size_head(out: Any, at: Any, size: Any) -> Any:
    while size >= 128:
        out[at] = size & 127 | 128
        size >>= 7
        at += 1
    out[at] = size
    return at + 1


@jit
def _pass_zeros(
    out: Any, head: Any, at: Any, end: Any, after: Any, size: Any, rules: Any, lz4: Any
) -> Any:
    """Write the zeros from ``end`` to ``after``; returns where the literal begins and ends."""
    stop = min(after, size - rules[1])
    if stop - end >= RUN and end + 1 <= size - rules[0]:
        out[at] = 0
        head = _step(out, head, at + 1, stop - end - 1, lz4)
        at = head + 1
        end = stop
    for _ in range(after - end):
        out[at] = 0
        at += 1
    return head, at


@jit
def _block(
    offsets: Any, values: Any, first: Any, last: Any, low: Any, size: Any, lz4: Any, out: Any,
    at: Any,
) -> Any:  # fmt: skip
    """One block from its changes, written from ``out[at]`` on; returns its end."""
    rules = (LZ4_LAST_START, LZ4_LITERAL_TAIL) if lz4 else (0, 0)
    head = at if lz4 else _size_head(out, at, size)
    at = head + 1
    end = np.int64(0)
    for i in range(first, last):
        bits = np.uint64(values[i])
        place = np.int64(offsets[i]) * values.itemsize - low
        while bits != ZERO:
            byte = bits & _BYTE
            if byte != ZERO:
                head, at = _pass_zeros(out, head, at, end, place, size, rules, lz4)
                out[at] = byte
                at += 1
                end = place + 1
            bits >>= _EIGHT
            place += 1
    head, at = _pass_zeros(out, head, at, end, size, size, rules, lz4)
    return _lz4_step(out, head, at, 0) if lz4 else _snappy_literal(out, head, at)


@jit
def _zero_runs(
    offsets: Any, values: Any, blocks: Any, first: Any, last: Any, size: Any, lz4: Any, out: Any,
    sizes: Any,
) -> Any:  # fmt: skip
    done = np.int64(0)
    for i in range(len(blocks)):
        low = blocks[i] * BLOCK_BYTES
        length = min(np.int64(BLOCK_BYTES), size - low)
        end = _block(offsets, values, first[i], last[i], low, length, lz4, out, done)
        sizes[i] = end - done
        done = end
    return done


def _room(blocks: int, changes: int, width: int) -> int:
    """Most bytes that so many blocks with so many changes between them may take.

    A changed byte takes at most twelve: up to four zeros before it, itself, the zero after it,
    and the heads of a literal and a copy. Long stretches of zeros add Snappy's three for every
    64; and no block takes more than a sixth on top of its content.
    """
    worst = BLOCK_BYTES + BLOCK_BYTES // 6 + 32
    return min(blocks * (BLOCK_BYTES * 3 // 64 + 64) + 12 * width * changes, blocks * worst)


def zero_runs(
    offsets: U32, values: Elements, *, blocks: I64, size: int, lz4: bool
) -> tuple[U8, U32]:
    """See ``reference_blocks.zero_runs``."""
    width = values.dtype.itemsize
    low = blocks * BLOCK_BYTES
    high = np.minimum(low + BLOCK_BYTES, size)
    # Keys of the list's own type: any other would have the whole list converted.
    first = np.searchsorted(offsets, (low // width).astype(np.uint32))
    last = np.searchsorted(offsets, (high // width).astype(np.uint32))
    out = scratch.get("zero runs", _room(len(blocks), int((last - first).sum()), width), np.uint8)
    sizes = np.empty(len(blocks), np.uint32)
    done = _zero_runs(offsets, values, blocks, first, last, size, lz4, out, sizes)
    return out[:done].copy(), sizes
