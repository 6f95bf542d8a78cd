"""Many frames of the sparse codec encoded or decoded by a handful of long calls.

Frame by frame, threads would spend their time on handing the interpreter's lock around. What a
batch finds unsound it does not explain: the caller decodes those frames one by one, and the
bad one says what is wrong with it. Every size is checked before anything is allocated by it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightdelta.codecs import zstd, zstd_native
from weightdelta.codecs.names import Values
from weightdelta.codecs.slots import SLOTS
from weightdelta.kernels import has_compiled
from weightdelta.kernels.planes import UINTS, Chunks, Elements, Planes

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_COUNTS, _GAPS, _BITMAP, _NIBBLES, _VALUES = 0, 3, 5, 6, 7


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
    memory: Callable[[int], U8] = lambda nbytes: np.empty(nbytes, np.uint8),
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
        memory: Gives that many bytes for all planes but the counts.

    Returns:
        The planes, or None when some frame is unsound, or no compiled kernels are there, or Zstd
        cannot be called from them.
    """
    native = zstd_native.decompressor() if has_compiled() else None
    if native is None:
        return None
    from weightdelta.kernels import cpu_planes

    table = sizes.astype(np.int64)
    unused = [*range(_VALUES + width, SLOTS), *([_NIBBLES] if values == "xor" else [])]
    ends = start + table.sum(axis=1)
    if bool(table[:, unused].any()) or int(ends.max(initial=0)) > len(data):
        return None
    return cpu_planes.decode(
        data,
        start,
        table,
        length=chunks.length,
        bounds=bounds,
        width=width,
        xor=values == "xor",
        zstd=native,
        limit=zstd.MAX_WINDOW,
        memory=memory,
    )
