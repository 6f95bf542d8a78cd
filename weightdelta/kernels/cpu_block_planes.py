"""Encoded frames of raw blocks to planes, many in one call: see ``cpu_planes``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import jit, scratch
from weightdelta.kernels.cpu_planes import joined, plane
from weightdelta.kernels.cpu_sparse import _collect, _pack
from weightdelta.kernels.planes import (
    BLOCK_BYTES,
    FIRST_PIECE,
    MOST_PIECES,
    PIECE_BLOCKS,
    UINTS,
    Chunks,
    Elements,
    Planes,
    in_one_piece,
)

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Masks:
    """The blocks of many frames' masks, frame after frame.

    Attributes:
        ends: int64 [frames + 1], blocks of each frame.
        lengths: int64 [blocks], bytes of mask in each.
        limits: int64 [blocks], most bytes that it may take.
        lz4: LZ4 instead of Snappy.
    """

    ends: I64
    lengths: I64
    limits: I64
    lz4: bool


@jit
def _all_sizes(
    zstd: Any, data: Any, start: Any, sizes: Any, ends: Any, limits: Any, limit: Any, raw: Any,
    wide: Any, blocks: Any, totals: Any,
) -> Any:  # fmt: skip
    """Bytes of every block, and of all of a frame; the first unsound frame, or -1."""
    for f in range(len(start)):
        low, high = ends[f], ends[f + 1]
        if not joined(zstd, data, start[f], sizes[f, :3], high - low, limit, raw, wide):
            return f
        for b in range(low, high):
            blocks[b] = wide[b - low]
            if blocks[b] > limits[b]:
                return f
            totals[f] += blocks[b]
    return -1


@jit
def _read(zstd: Any, data: Any, at: Any, sizes: Any, blocks: Any, limit: Any, arena: Any) -> Any:
    """Take the outer stage off a frame's pieces; False when one is unsound."""
    count = min(MOST_PIECES, (len(blocks) + PIECE_BLOCKS - 1) // PIECE_BLOCKS)
    each = (len(blocks) + count - 1) // max(count, 1)
    used = np.int64(0)
    for i in range(MOST_PIECES):
        content = np.int64(0)
        for b in range(min(i * each, len(blocks)), min(i * each + each, len(blocks))):
            content += blocks[b]
        size = sizes[FIRST_PIECE + i]
        found = plane(zstd, data, at, size, content, limit, arena[used:])
        if found < 0 or (found == 0 and content > 0):
            return False
        at += size
        used += content
    return True


@jit
def _all_changes(
    zstd: Any, data: Any, start: Any, sizes: Any, ends: Any, blocks: Any, lengths: Any, lz4: Any,
    begin: Any, length: Any, bounds: Any, changed: Any, limit: Any, arena: Any, block: Any,
    elements: Any, marks: Any, index: Any, fresh: Any, counts: Any, gaps: Any, bitmap: Any,
    values: Any, used: Any,
) -> Any:  # fmt: skip
    """Planes of all frames; ``used`` is what they take of gaps, bitmap and values."""
    for f in range(len(start)):
        low, high = ends[f], ends[f + 1]
        at = start[f] + sizes[f, 0] + sizes[f, 1] + sizes[f, 2]
        part = blocks[low:high]
        if not _read(zstd, data, at, sizes[f], part, limit, arena):
            return f
        done, _, k = _collect(
            arena, part, lengths[low:high], lz4, 0, np.int64(0), block, elements, marks, index,
            fresh,
        )  # fmt: skip
        if done != high - low or k != changed[f]:
            return f
        first, last = bounds[f], bounds[f + 1]
        gap, bit, taken = _pack(
            index[:k], begin[first:last], length[first:last], counts[first:last],
            gaps[used[0] :], bitmap[used[1] :],
        )  # fmt: skip
        if taken != k:
            return f
        for i in range(k):
            values[used[2] + i] = fresh[i]
        used[0] += gap
        used[1] += bit
        used[2] += k
    return -1


def decode(
    data: U8, start: I64, sizes: I64, *, masks: Masks, chunks: Chunks, bounds: I64, changed: I64,
    width: int, zstd: tuple[int, int], limit: int, memory: Callable[[int], U8],
) -> Planes | None:  # fmt: skip
    """The changes of many frames, one after the other; None when some frame is unsound.

    Args:
        data: uint8, memory that holds the frames.
        start: int64 [frames], where each begins, not negative; its parts follow each other.
        sizes: int64 [frames, 15], bytes of each part, not negative; 0 of parts that no frame has.
        masks: Their blocks.
        chunks: Of all frames; ``start`` counts within a frame.
        bounds: int64 [frames + 1], chunks of each frame.
        changed: int64 [frames], changes that each must have.
        width: Bytes of an element.
        zstd: Addresses of ``ZSTD_decompressDCtx`` and of a context for this thread.
        limit: Largest window of a Zstd frame, unless its content itself is larger [B].
        memory: Gives that many bytes for gaps, bitmap and values, aligned for any of them.
    """
    kind, call = UINTS[width], np.array(zstd, np.uint64)
    blocks, totals = np.empty(len(masks.lengths), np.int64), np.zeros(len(start), np.int64)
    most = int(np.diff(masks.ends).max(initial=0))
    raw, wide = scratch.get("raw", most, np.uint8), scratch.get("wide", most, np.uint32)
    if _all_sizes(
        call, data, start, sizes, masks.ends, masks.limits, limit, raw, wide, blocks, totals
    ) >= 0:  # fmt: skip
        return None
    block = scratch.get("block", BLOCK_BYTES, np.uint8)
    block[:] = 0
    room = int(changed.max(initial=0)) + BLOCK_BYTES // width
    total, counts = int(changed.sum()), np.empty(len(chunks), np.uint32)
    gaps, values = scratch.get("gaps", total, np.uint16), scratch.get("values", total, kind)
    bitmap = scratch.get("bitmap", int(chunks.length.sum()) // 8 + len(chunks), np.uint8)
    used = np.zeros(3, np.int64)
    bad = _all_changes(
        call, data, start, sizes, masks.ends, blocks, masks.lengths, masks.lz4, chunks.start,
        chunks.length, bounds, changed, limit,
        scratch.get("arena", int(totals.max(initial=0)), np.uint8), block, block.view(kind),
        scratch.get("marks", BLOCK_BYTES, np.uint16), scratch.get("index", room, np.uint32),
        scratch.get("fresh", room, kind), counts, gaps, bitmap, values, used,
    )  # fmt: skip
    return None if bad >= 0 else _kept(counts, gaps, bitmap, values, used.tolist(), memory)


def _kept(
    counts: npt.NDArray[np.uint32], gaps: npt.NDArray[np.uint16], bitmap: U8, values: Elements,
    used: list[int], memory: Callable[[int], U8],
) -> Planes:  # fmt: skip
    """Planes in memory of their own."""
    found = in_one_piece(used, values.itemsize, memory)
    pairs: list[tuple[Any, Any]] = list(zip(found, (gaps, bitmap, values), strict=True))
    for (target, source), count in zip(pairs, used, strict=True):
        target[:] = source[:count]
    return Planes(counts, *found)
