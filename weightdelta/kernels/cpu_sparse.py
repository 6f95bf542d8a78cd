"""Raw blocks straight to what changed: the cost follows the tokens, not the mask.

A run of zeros, which is one token or a few, takes no longer than its tokens. ``codecs.blocks``
decodes whole masks where this finds a block unsound, and says what is wrong with it.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import jit, scratch
from weightdelta.kernels.cpu_walk import walk
from weightdelta.kernels.planes import BLOCK_BYTES, GAP_FACTOR, UINTS, Chunks, Elements, Planes

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

#: Elements that 32 bits tell apart.
_MOST: Final = 1 << 32


@jit
def _collect(
    data: Any, sizes: Any, lengths: Any, lz4: Any, first: Any, at: Any,
    block: Any, elements: Any, marks: Any, index: Any, values: Any,
) -> Any:  # fmt: skip
    """Changes of the blocks from ``first`` on, while there is room for a whole one.

    Returns:
        The block to go on with, or -1 for an unsound one; where it begins; changes found.
    """
    width = len(block) // len(elements)
    found = np.int64(0)
    for b in range(first, len(sizes)):
        if len(index) - found < len(elements):
            return np.int64(b), at, found
        end = at + sizes[b]
        if end > at:
            held = walk(data, at, end, lengths[b], lz4, True, block, marks)
            if held <= 0:  # damaged, or zeros that belong left out
                return np.int64(-1), at, found
            last = np.int64(-1)
            for i in range(held):
                e = np.int64(marks[i]) // width
                if e != last:
                    index[found] = b * len(elements) + e
                    values[found] = elements[e]
                    found += 1
                    last = e
            for i in range(held):
                block[marks[i]] = 0
        at = end
    return np.int64(len(sizes)), at, found


@jit
def _pack(index: Any, start: Any, length: Any, counts: Any, gaps: Any, bitmap: Any) -> Any:
    """Counts, gaps and bitmaps of changes at ``index``; the sizes of the last two, and changes."""
    at = gap = bit = np.int64(0)
    for c in range(len(start)):
        low, n = start[c], length[c]
        k = np.int64(0)
        if at < len(index) and index[at] < low:  # between two chunks
            return gap, bit, np.int64(-1)
        while at + k < len(index) and index[at + k] < low + n:
            k += 1
        counts[c] = k
        if 0 < k < n:
            if GAP_FACTOR * k < n:
                last = low - 1
                for i in range(k):
                    gaps[gap + i] = index[at + i] - last - 1
                    last = np.int64(index[at + i])
                gap += k
            else:
                size = (n + 7) // 8
                bitmap[bit : bit + size] = 0
                for i in range(k):
                    p = index[at + i] - low
                    bitmap[bit + p // 8] |= np.uint8(1 << (p % 8))
                bit += size
        at += k
    return gap, bit, at


def changes_of(
    arena: U8, sizes: U32, *, lengths: I64, lz4: bool, width: int, most: int
) -> tuple[U32, Elements] | None:
    """Elements of a mask in raw blocks that are not zero.

    Args:
        arena: Blocks one after another.
        sizes: uint32, bytes of each; 0 for one that is all zero.
        lengths: int64, bytes of content that each must give, ``BLOCK_BYTES`` at most.
        lz4: LZ4 instead of Snappy.
        width: Bytes of an element.
        most: Changes from which on a mask is the better form; a block's worth more may be found.

    Returns:
        Where they are, uint32, ascending, and what they are; None when a block is unsound or
        lies outside, or when they are too many.
    """
    wide = sizes.astype(np.int64)
    if wide.sum() > len(arena) or lengths.sum() // width >= _MOST:
        return None
    block = scratch.get("block", BLOCK_BYTES, np.uint8)
    block[:] = 0
    elements = block.view(UINTS[width])
    marks = scratch.get("marks", BLOCK_BYTES, np.uint16)
    room = min(len(arena), most) + len(elements)
    parts: list[tuple[U32, Elements]] = []
    b = at = total = 0
    while b < len(sizes):
        index, values = np.empty(room, np.uint32), np.empty(room, UINTS[width])
        b, at, found = _collect(
            arena, wide, lengths, lz4, b, at, block, elements, marks, index, values
        )
        total += int(found)
        if b < 0 or total > most:
            return None
        parts.append((index[:found], values[:found].copy()))
    if len(parts) == 1:
        return parts[0]
    none = np.empty(0, np.uint32), np.empty(0, UINTS[width])
    wheres, whats = zip(none, *parts, strict=True)
    return np.concatenate(wheres), np.concatenate(whats)


def planes_of(index: U32, values: Elements, *, chunks: Chunks) -> Planes | None:
    """The planes of changes at ``index``, ascending; None when some lie outside of all chunks."""
    total = int(chunks.length.sum())
    counts = np.empty(len(chunks), np.uint32)
    gaps = np.empty(len(index), np.uint16)
    bitmap = scratch.get("bitmap", total // 8 + len(chunks), np.uint8)
    gap, bit, taken = _pack(index, chunks.start, chunks.length, counts, gaps, bitmap)
    if taken != len(index):
        return None
    return Planes(counts, gaps[:gap], bitmap[:bit].copy(), values)
