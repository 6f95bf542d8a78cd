"""Compiled loops over many encoded frames at once: one call instead of dozens a frame.

Short calls that each give the interpreter's lock back and take it again bring threads to a
standstill; these run for milliseconds without it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import BLOCK, jit, scratch
from weightdelta.kernels.cpu_bytes import _count_escapes, _pack, _put_byte, _take_byte, _unpack
from weightdelta.kernels.planes import GAP_FACTOR, UINTS, Elements

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@jit
def _past_header(data: Any, at: Any, end: Any, content: Any, limit: Any) -> Any:
    """Where the header of a frame ends; -1 when it is not one of ours."""
    if end - at < 6:
        return -1
    magic = data[at : at + 4]
    if magic[0] != 0x28 or magic[1] != 0xB5 or magic[2] != 0x2F or magic[3] != 0xFD:
        return -1
    form = np.int64(data[at + 4])
    single, field = (form >> 5) & 1, form >> 6
    at += 5
    if form & 0b1111 != 0b0100 or (field == 0 and not single):
        return -1
    if not single:
        base = np.int64(1) << (10 + (np.int64(data[at]) >> 3))
        if base + (base >> 3) * (np.int64(data[at]) & 7) > max(content, limit):
            return -1
        at += 1
    if end - at < 1 << field:
        return -1
    found = np.int64(256 if field == 1 else 0)
    for j in range(1 << field):
        found += np.int64(data[at + j]) << (8 * j)
    return at + (1 << field) if found == content else -1


@jit
def _past_blocks(data: Any, at: Any, end: Any) -> Any:
    """Where the blocks of a frame end; -1 when that is not before ``end``."""
    last = False
    while not last:
        if end - at < 3:
            return -1
        head = np.int64(data[at]) | np.int64(data[at + 1]) << 8 | np.int64(data[at + 2]) << 16
        last, kind, size = head & 1 == 1, (head >> 1) & 3, head >> 3
        at += 3 + (1 if kind == 1 else size)
    return at if at <= end else -1


@jit
def _outlines(data: Any, start: Any, size: Any, content: Any, limit: Any) -> Any:
    for i in range(len(start)):
        end = start[i] + size[i]
        at = _past_header(data, start[i], end, content[i], limit)
        if at < 0 or _past_blocks(data, at, end - 4) != end - 4:  # four bytes of checksum
            return i
    return -1


def outlines(data: U8, start: I64, size: I64, *, content: I64, limit: int) -> int:
    """The first of many Zstd frames that has not a header like ours or another length, or -1.

    The library says nothing of bytes behind a frame when it decompresses many at once.

    Args:
        data: Where they lie, at ``start``, ``size`` bytes each.
        start: int64.
        size: int64.
        content: int64, the size of content that each must declare.
        limit: Largest window, unless the content itself is larger [B].
    """
    return int(_outlines(data, start, size, content, limit))


@jit
def _join(raw: Any, starts: Any, bounds: Any, out: Any) -> None:
    for f in range(len(starts)):
        part = out[bounds[f] : bounds[f + 1]]
        part[:] = 0
        for i in range(starts.shape[1]):
            at = starts[f, i]
            if at >= 0 and len(part):
                _put_byte(raw[at : at + len(part)], np.uint64(8 * i), False, part)


def join(raw: U8, starts: I64, *, bounds: I64, width: int) -> Elements:
    """Elements of many frames from their byte planes in ``raw``; one that is at -1 is zero.

    Args:
        raw: All planes.
        starts: int64 [frames, planes].
        bounds: int64 [frames + 1], where each frame's elements go.
        width: Bytes of an element.
    """
    out: Elements = np.empty(int(bounds[-1]), UINTS[width])
    _join(raw, starts, bounds, out)
    return out


@jit
def _implied(counts: Any, length: Any, bounds: Any, out: Any) -> Any:
    for f in range(len(bounds) - 1):
        for c in range(bounds[f], bounds[f + 1]):
            k, n = np.int64(counts[c]), length[c]
            if k > n:
                return c
            out[2, f] += k
            if k < n and GAP_FACTOR * k < n:
                out[0, f] += k
            elif k < n:
                out[1, f] += (n + 7) // 8
    return -1


def implied(counts: npt.NDArray[np.uint32], length: I64, *, bounds: I64) -> I64 | None:
    """Gaps, bitmap bytes and values of each frame, int64 [3, frames]; None for bad counts."""
    out = np.zeros((3, len(bounds) - 1), np.int64)
    return out if _implied(counts, length, bounds, out) < 0 else None


@jit
def _escapes(raw: Any, starts: Any, values: Any, out: Any) -> Any:
    for f in range(len(starts)):
        if starts[f] >= 0:
            part = raw[starts[f] : starts[f] + (values[f] + 1) // 2]
            if values[f] % 2 and part[len(part) - 1] >> 4:
                return f
            out[f] = _count_escapes(part)
    return -1


def escapes(raw: U8, starts: I64, *, values: I64) -> I64 | None:
    """Escapes among the nibbles of each frame, int64; None for bad padding.

    ``values`` counts the nibbles; those of a frame at -1 are all zero.
    """
    out = np.zeros(len(starts), np.int64)
    return out if _escapes(raw, starts, values, out) < 0 else None


@jit
def _unpack_all(
    raw: Any, starts: Any, zeros: Any, escaped: Any, ends: Any, bounds: Any, small: Any, out: Any
) -> None:
    for f in range(len(starts)):
        part = out[bounds[f] : bounds[f + 1]]
        size = (len(part) + 1) // 2
        nibbles = raw[starts[f] : starts[f] + size] if starts[f] >= 0 else zeros[:size]
        _unpack(nibbles, escaped[ends[f] : ends[f + 1]], small, part)


def unpack(raw: U8, starts: I64, *, escaped: Elements, ends: I64, bounds: I64) -> Elements:
    """Differences of many frames from nibbles and escapes.

    Args:
        raw: All nibbles, a frame's at ``starts`` (-1: all zero).
        starts: int64 [frames].
        escaped: Escapes of all frames, a frame's in ``ends[i]:ends[i + 1]``.
        ends: int64 [frames + 1].
        bounds: int64 [frames + 1], where each frame's values go.
    """
    out = np.empty(int(bounds[-1]), escaped.dtype)
    most = int(np.diff(bounds).max(initial=0))
    zeros = np.zeros((most + 1) // 2 if bool((starts < 0).any()) else 0, np.uint8)
    small = scratch.get("small", 16, escaped.dtype)
    _unpack_all(raw, starts, zeros, escaped, ends, bounds, small, out)
    return out


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
