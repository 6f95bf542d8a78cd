"""Compiled loops over the values of many frames at once: one call instead of dozens a frame.

Short calls that each give the interpreter's lock back and take it again bring threads to a
standstill; these run for milliseconds without it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import BLOCK, jit, scratch
from weightdelta.kernels.cpu_bytes import _pack, _take_byte
from weightdelta.kernels.planes import Elements

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@jit
def _pack_all(
    values: Any, bounds: Any, top: Any, z: Any, clipped: Any, nibbles: Any, at: Any, out: Any,
    counts: Any,
) -> None:  # fmt: skip
    done = 0
    for f in range(len(counts)):
        part = values[bounds[f] : bounds[f + 1]]
        counts[f] = _pack(part, top, z, clipped, nibbles[at[f] : at[f + 1]], out[done:])
        done += counts[f]


def pack(values: Elements, *, bounds: I64) -> tuple[U8, I64, Elements, I64]:
    """Nibbles and escapes of many frames' differences.

    Args:
        values: Those of all frames.
        bounds: int64 [frames + 1], a frame's are ``bounds[i]:bounds[i + 1]``.

    Returns:
        Nibbles and the bounds of each frame's; escapes and the bounds of each frame's.
    """
    at = np.concatenate([[0], np.cumsum((np.diff(bounds) + 1) // 2)])
    nibbles = np.empty(int(at[-1]), np.uint8)
    out = np.empty(len(values) + 1, values.dtype)
    counts = np.zeros(len(bounds) - 1, np.int64)
    z = scratch.get("before", BLOCK, values.dtype)
    clipped = scratch.get("after", BLOCK, np.uint8)
    top = np.uint64(8 * values.dtype.itemsize - 1)
    _pack_all(values, bounds, top, z, clipped, nibbles, at, out, counts)
    ends = np.concatenate([[0], np.cumsum(counts)])
    return nibbles, at, out[: int(ends[-1])], ends


@jit
def _split_all(values: Any, bounds: Any, starts: Any, out: Any, used: Any) -> None:
    for f in range(len(bounds) - 1):
        part = values[bounds[f] : bounds[f + 1]]
        for i in range(starts.shape[1]):
            plane = out[starts[f, i] : starts[f, i] + len(part)]
            _take_byte(part, np.uint64(8 * i), plane)
            most = np.uint8(0)
            for j in range(len(plane)):
                most |= plane[j]
            used[f, i] = most != 0


def split(values: Elements, starts: I64, *, bounds: I64, out: U8) -> npt.NDArray[np.bool_]:
    """Byte planes of many frames' elements into ``out``; which of them are not all zero.

    Args:
        values: Elements of all frames.
        starts: int64 [frames, planes], where each plane goes; the lowest byte first.
        bounds: int64 [frames + 1], a frame's elements are ``bounds[i]:bounds[i + 1]``.
        out: uint8.
    """
    used = np.zeros(starts.shape, np.bool_)
    _split_all(values, bounds, starts, out, used)
    return used
