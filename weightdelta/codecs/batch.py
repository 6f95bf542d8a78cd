"""Many frames of the sparse codec encoded or decoded by a handful of long calls.

Frame by frame, threads would spend their time on handing the interpreter's lock around. What a
batch finds unsound it does not explain: the caller decodes those frames one by one, and the
bad one says what is wrong with it. Every size is checked before anything is allocated by it.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightdelta.codecs import zstd
from weightdelta.codecs.names import Values
from weightdelta.codecs.slots import SLOTS
from weightdelta.kernels import has_compiled, ops
from weightdelta.kernels.planes import UINTS, Chunks, Elements, Planes

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_COUNTS, _GAPS, _BITMAP, _NIBBLES, _VALUES = 0, 3, 5, 6, 7


class _Unsound(Exception):
    """Some frame of the batch is not as it should be."""


class _Parts:
    """The parts of many encoded frames that lie in one piece of memory."""

    def __init__(self, data: U8, start: I64, sizes: I64) -> None:
        if len(start) and int((start + sizes.sum(axis=1)).max()) > len(data):
            raise _Unsound
        self.data = data
        self.start = start[:, None] + np.cumsum(sizes, axis=1) - sizes
        self.size = sizes

    def content(self, slots: range, content: I64) -> tuple[U8, I64]:
        """Decompress the planes of ``slots``.

        Args:
            slots: Which.
            content: int64 [frames, slots], bytes that each must give.

        Returns:
            All content, in memory that the thread's next call for these slots takes again, and
            where that of each plane starts, int64 [frames, slots]; -1 where the plane is left out.
        """
        from weightdelta.kernels import cpu_batch
        from weightdelta.kernels.compiled import scratch

        size, start = (
            self.size[:, slots.start : slots.stop],
            self.start[:, slots.start : slots.stop],
        )
        there = size > 0
        most = np.where(content > 0, content + (content >> 8) + 64, 0)
        if bool((size > most).any()):
            raise _Unsound
        length, begin, wanted = size[there], start[there], content[there]
        starts = np.full(there.shape, -1, np.int64)
        starts[there] = np.cumsum(wanted) - wanted
        limit = zstd.MAX_WINDOW
        if cpu_batch.outlines(self.data, begin, length, content=wanted, limit=limit) >= 0:
            raise _Unsound
        found = scratch.get(f"content {slots.start}", int(wanted.sum()), np.uint8)
        if not zstd.decompress_many(self.data, begin, length, sizes=wanted, out=found):
            raise _Unsound
        return found, starts


def _ends(counts: I64) -> I64:
    return np.concatenate([[0], np.cumsum(counts)])


def encode_frames(
    planes: Sequence[Planes], *, width: int, values: Values
) -> list[tuple[bytes, npt.NDArray[np.uint32]]] | None:
    """The bytes and part sizes of many frames, as ``sparse.encode_frame`` makes them.

    None when no compiled kernels are there.
    """
    if not has_compiled():
        return None
    from weightdelta.kernels import cpu_batch

    kind = UINTS[width]
    changed = [p.values.view(kind) for p in planes]
    differences = values == "diff"
    joined = np.concatenate(changed)
    bounds = _ends(np.array([len(v) for v in changed], np.int64))
    columns: list[tuple[Elements, I64, int, int]] = [
        _column([p.counts for p in planes], _COUNTS, 3),
        _column([p.gaps for p in planes], _GAPS, 2),
        _column([p.bitmap for p in planes], _BITMAP, 1),
    ]
    if differences:
        nibbles, at, escapes, ends = cpu_batch.pack(joined, bounds=bounds)
        columns += [(nibbles, at, _NIBBLES, 1), (escapes, ends, _VALUES, width)]
    else:
        columns.append((joined, bounds, _VALUES, width))
    length = np.zeros((len(planes), SLOTS), np.int64)
    for _, ends, slot, count in columns:
        length[:, slot : slot + count] = np.diff(ends)[:, None]
    start = (np.cumsum(length) - length.reshape(-1)).reshape(length.shape)
    raw = np.empty(int(length.sum()), np.uint8)
    used = np.zeros(length.shape, np.bool_)
    for array, ends, slot, count in columns:
        part = np.ascontiguousarray(start[:, slot : slot + count])
        used[:, slot : slot + count] = cpu_batch.split(array, part, bounds=ends, out=raw)
    data, found = zstd.compress_many(raw, start[used], length[used])
    sizes = np.zeros(length.shape, np.uint32)
    sizes[used] = found
    cuts = _ends(sizes.sum(axis=1, dtype=np.int64)).tolist()
    return [(data[low:high].tobytes(), sizes[i]) for i, (low, high) in enumerate(pairwise(cuts))]


def _column(arrays: Sequence[Elements], slot: int, planes: int) -> tuple[Elements, I64, int, int]:
    """Elements of all frames, their bounds, the first of their slots and how many they have."""
    sizes = np.array([len(array) for array in arrays], np.int64)
    return np.concatenate(arrays), _ends(sizes), slot, planes


def decode_frames(
    data: U8,
    start: I64,
    sizes: npt.NDArray[np.uint32],
    *,
    chunks: Chunks,
    bounds: I64,
    width: int,
    values: Values,
) -> Planes | None:
    """The changes of many frames, one after the other, as the planes of one.

    Args:
        data: uint8, memory that holds the encoded frames.
        start: int64 [frames], where each begins; its parts follow each other.
        sizes: uint32 [frames, 15], bytes of each part.
        chunks: The chunks of all frames.
        bounds: int64 [frames + 1], chunks of each frame.
        width: Bytes of an element.
        values: Whether the values are differences or XORs.

    Returns:
        The planes, or None when some frame is unsound, or no compiled kernels are there.
    """
    if not has_compiled():
        return None
    table = sizes.astype(np.int64)
    unused = [*range(_VALUES + width, SLOTS), *([_NIBBLES] if values == "xor" else [])]
    if bool(table[:, unused].any()):
        return None
    try:
        return _decode(_Parts(data, start, table), chunks, bounds, width, values)
    except _Unsound:
        return None


def _decode(parts: _Parts, chunks: Chunks, bounds: I64, width: int, values: Values) -> Planes:
    from weightdelta.kernels import cpu_batch

    lengths = np.diff(bounds)
    raw, starts = parts.content(range(3), np.repeat(lengths[:, None], 3, axis=1))
    counts = cpu_batch.join(raw, starts, bounds=bounds, width=4).view(np.uint32)
    implied = cpu_batch.implied(counts, chunks.length, bounds=bounds)
    if implied is None:
        raise _Unsound
    gap, bit, value = implied
    nibble = (value + 1) // 2 if values == "diff" else np.zeros_like(value)
    raw, starts = parts.content(range(_GAPS, _VALUES), np.stack([gap, gap, bit, nibble], axis=1))
    gaps = cpu_batch.join(raw, starts[:, :2], bounds=_ends(gap), width=2).view(np.uint16)
    bitmap = cpu_batch.join(raw, starts[:, 2:3], bounds=_ends(bit), width=1).view(np.uint8)
    if values == "xor":
        found = _plain(parts, value, width)
        if len(found) and not found.min():
            raise _Unsound
    else:
        found = _differences(parts, raw, starts[:, 3].copy(), value, width)
    planes = Planes(counts, gaps, bitmap, found)
    if ops().check(planes, chunks=chunks) >= 0:
        raise _Unsound
    return planes


def _plain(parts: _Parts, count: I64, width: int) -> Elements:
    """Byte planes of values, or of escapes, ``count`` in each frame."""
    from weightdelta.kernels import cpu_batch

    content = np.repeat(count[:, None], width, axis=1)
    raw, starts = parts.content(range(_VALUES, _VALUES + width), content)
    return cpu_batch.join(raw, starts, bounds=_ends(count), width=width)


def _differences(parts: _Parts, raw: U8, nibbles: I64, value: I64, width: int) -> Elements:
    from weightdelta.kernels import cpu_batch

    escapes = cpu_batch.escapes(raw, nibbles, values=value)
    if escapes is None:
        raise _Unsound
    escaped = _plain(parts, escapes, width)
    if len(escaped) and (escaped.min() < 15 or escaped.max() == np.iinfo(escaped.dtype).max):
        raise _Unsound
    return cpu_batch.unpack(raw, nibbles, escaped=escaped, ends=_ends(escapes), bounds=_ends(value))
