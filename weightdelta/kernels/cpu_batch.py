"""Planes to encoded frames of the sparse codec, many in one call."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import BLOCK, jit, scratch
from weightdelta.kernels.cpu_bytes import _pack, _take_byte
from weightdelta.kernels.cpu_planes import call_zstd
from weightdelta.kernels.planes import SLOTS, UINTS, Elements, Planes

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

#: Most bytes that Zstd adds to a part of any size, beside 1/256 of it.
_EXTRA: Final = 64
_FAILED: Final = np.uint64(1 << 63)  # Zstd's errors are numbers near 2^64


@jit
def _stored(zstd: Any, plane: Any, out: Any, at: Any) -> Any:
    """Compress a plane to ``out[at:]``: its size, 0 when it is empty or all zero; -1: no room."""
    used = np.uint8(0)
    for i in range(len(plane)):
        used |= plane[i]
    if used == 0:
        return 0
    found = call_zstd(
        zstd[0], zstd[1], np.uint64(out.ctypes.data) + np.uint64(at), np.uint64(len(out) - at),
        np.uint64(plane.ctypes.data), np.uint64(len(plane)),
    )  # fmt: skip
    return -1 if found >= _FAILED else np.int64(found)


@jit
def _split(zstd: Any, values: Any, count: Any, raw: Any, out: Any, at: Any, sizes: Any) -> Any:
    """Store ``count`` byte planes of ``values``, the lowest first; where they end, or -1."""
    plane = raw[: len(values)]
    for i in range(count):
        _take_byte(values, np.uint64(8 * i), plane)
        size = _stored(zstd, plane, out, at)
        if size < 0:
            return -1
        sizes[i] = size
        at += size
    return at


@jit
def _all_frames(
    zstd: Any, counts: Any, gaps: Any, bitmap: Any, values: Any, ends: Any, xor: Any, raw: Any,
    nibbles: Any, escapes: Any, z: Any, clipped: Any, out: Any, sizes: Any,
) -> Any:  # fmt: skip
    """Encode frame after frame; where the last one ends in ``out``, or -1."""
    width, at = values.itemsize, 0
    top = np.uint64(8 * width - 1)
    for f in range(len(sizes)):
        size = sizes[f]
        count = counts[ends[0, f] : ends[0, f + 1]]
        gap = gaps[ends[1, f] : ends[1, f + 1]]
        bit = bitmap[ends[2, f] : ends[2, f + 1]]
        value = values[ends[3, f] : ends[3, f + 1]]
        at = _split(zstd, count, 3, raw, out, at, size[:3])
        at = _split(zstd, gap, 2, raw, out, at, size[3:5]) if at >= 0 else at
        at = _split(zstd, bit, 1, raw, out, at, size[5:6]) if at >= 0 else at
        if xor:
            at = _split(zstd, value, width, raw, out, at, size[7:]) if at >= 0 else at
        elif at >= 0:
            packed = nibbles[: (len(value) + 1) // 2]
            found = _pack(value, top, z, clipped, packed, escapes)
            at = _split(zstd, packed, 1, raw, out, at, size[6:7])
            at = _split(zstd, escapes[:found], width, raw, out, at, size[7:]) if at >= 0 else at
        if at < 0:
            return -1
    return at


def _joined(arrays: Sequence[Elements]) -> tuple[Elements, I64]:
    """Elements of all frames, and where those of each end, from 0 on."""
    ends = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=ends[1:])
    return np.concatenate(arrays), ends


def encode(
    planes: Sequence[Planes], *, width: int, xor: bool, zstd: tuple[int, int]
) -> tuple[U8, U32] | None:
    """Many frames, one behind the other.

    Args:
        planes: Those of each frame.
        width: Bytes of an element.
        xor: Whether values are XORs, else differences.
        zstd: Addresses of ``ZSTD_compress2`` and of a context for this thread.

    Returns:
        All bytes, in memory that this thread's next call takes again, and uint32 [frames, 15],
        the bytes of each part; None when Zstd failed.
    """
    kind = UINTS[width]
    counts, gaps, bitmap, values = (
        _joined(column)
        for column in (
            [p.counts for p in planes],
            [p.gaps for p in planes],
            [p.bitmap for p in planes],
            [p.values.view(kind) for p in planes],
        )
    )
    ends = np.stack([column[1] for column in (counts, gaps, bitmap, values)])
    lengths = np.diff(ends, axis=1)
    content = int((lengths.sum(axis=1) * [3, 2, 1, 1 + width]).sum())
    out = scratch.get("out", content + (content >> 8) + _EXTRA * SLOTS * len(planes), np.uint8)
    most = int(lengths[3].max(initial=0))
    sizes = np.zeros((len(planes), SLOTS), np.uint32)
    end = _all_frames(
        np.array(zstd, np.uint64), counts[0], gaps[0], bitmap[0], values[0], ends, xor,
        scratch.get("raw", int(lengths.max(initial=0)), np.uint8),
        scratch.get("nibbles", (most + 1) // 2, np.uint8),
        scratch.get("escapes", most + 1, kind), scratch.get("before", BLOCK, kind),
        scratch.get("after", BLOCK, np.uint8), out, sizes,
    )  # fmt: skip
    return (out[:end], sizes) if end >= 0 else None
