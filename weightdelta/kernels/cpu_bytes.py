"""Compiled kernels that turn values into byte planes and nibbles, and back.

``reference`` defines what each function does.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import BLOCK, ONE, ZERO, jit, scratch
from weightdelta.kernels.planes import UINTS, Elements

U8 = npt.NDArray[np.uint8]

_ESCAPE: Final = np.uint64(15)


@jit
def _zigzag(values: Any, top: Any, z: Any, nibbles: Any) -> Any:
    """Find z and clipped z of each value; returns how many do not fit in a nibble."""
    count = 0
    for i in range(len(values)):
        bits = np.uint64(values[i])
        z[i] = ((bits << ONE) ^ (ZERO - ((bits >> top) & ONE))) - ONE
        nibbles[i] = min(z[i], _ESCAPE)
        count += z[i] >= _ESCAPE
    return count


@jit
def _pair(nibbles: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = nibbles[2 * i] | (nibbles[2 * i + 1] << 4)


@jit
def _pack(values: Any, top: Any, z: Any, nibbles: Any, out: Any, escapes: Any) -> Any:
    """Pack block by block; returns the number of escapes."""
    done = 0
    for lo in range(0, len(values), BLOCK):
        hi = min(lo + BLOCK, len(values))
        count = _zigzag(values[lo:hi], top, z, nibbles)
        if (hi - lo) % 2:
            nibbles[hi - lo] = 0
        _pair(nibbles, out[lo // 2 : (hi + 1) // 2])
        if count:
            for i in range(hi - lo):
                escapes[done] = z[i]
                done += nibbles[i] == 15
    return done


def pack_nibbles(values: Elements) -> tuple[U8, Elements]:
    """See ``reference.pack_nibbles``."""
    out = np.empty((len(values) + 1) // 2, np.uint8)
    escapes = scratch.get("values", len(values) + 1, values.dtype)
    z = scratch.get("before", BLOCK, values.dtype)
    nibbles = scratch.get("after", BLOCK, np.uint8)
    top = 8 * values.dtype.itemsize - 1
    count = _pack(values, np.uint64(top), z, nibbles, out, escapes)
    return out, escapes[:count].copy()


@jit
def _count_escapes(nibbles: Any) -> Any:
    total = np.int64(0)
    for lo in range(0, len(nibbles), BLOCK):
        part = nibbles[lo : lo + BLOCK]
        count = np.uint32(0)
        for i in range(len(part)):
            count += np.uint32((part[i] & 15) == 15) + np.uint32(part[i] >= 240)
        total += np.int64(count)
    return total


def count_escapes(nibbles: U8, *, count: int) -> int:
    """See ``reference.count_escapes``."""
    if count % 2 and nibbles[count // 2] >> 4:
        return -1
    return int(_count_escapes(nibbles))


@jit
def _unzigzag(z: Any) -> Any:
    """The difference of a uint64 ``z``: 2m + 1 is m + 1, and 2m is -m - 1."""
    odd = z & ONE
    return ((z >> ONE) ^ (odd - ONE)) + odd


@jit
def _unpack(nibbles: Any, escapes: Any, small: Any, out: Any) -> None:
    """Values of nibbles; ``small`` has room for those that no escape stands for."""
    for i in range(16):
        small[i] = _unzigzag(np.uint64(i))
    for i in range(len(out) // 2):
        out[2 * i] = small[nibbles[i] & 15]
        out[2 * i + 1] = small[nibbles[i] >> 4]
    if len(out) % 2:
        out[len(out) - 1] = small[nibbles[len(out) // 2] & 15]
    if len(escapes):
        done = 0
        for i in range(len(out)):
            if (nibbles[i // 2] >> (4 * (i & 1))) & 15 == 15:
                out[i] = _unzigzag(np.uint64(escapes[done]))
                done += 1


def unpack_nibbles(nibbles: U8, escapes: Elements, *, count: int) -> Elements:
    """See ``reference.unpack_nibbles``."""
    out = np.empty(count, escapes.dtype)
    _unpack(nibbles, escapes, scratch.get("small", 16, escapes.dtype), out)
    return out


@jit
def _take_byte(values: Any, shift: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = np.uint64(values[i]) >> shift


@jit
def _put_byte(plane: Any, shift: Any, fresh: Any, out: Any) -> None:
    if fresh:
        for i in range(len(plane)):
            out[i] = np.uint64(plane[i]) << shift
    else:
        for i in range(len(plane)):
            out[i] |= np.uint64(plane[i]) << shift


def split(values: Elements) -> list[U8]:
    """See ``reference.split``."""
    planes = [np.empty(len(values), np.uint8) for _ in range(values.dtype.itemsize)]
    for i, plane in enumerate(planes):
        _take_byte(values, np.uint64(8 * i), plane)
    return planes


def join(planes: Sequence[U8 | None], *, width: int, count: int) -> Elements:
    """See ``reference.join``."""
    fresh = planes[0] is not None
    out: Elements = (np.empty if fresh else np.zeros)(count, UINTS[width])
    for i, plane in enumerate(planes):
        if plane is not None:
            _put_byte(plane, np.uint64(8 * i), fresh and i == 0, out)
    return out
