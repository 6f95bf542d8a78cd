"""Whether raw Snappy and LZ4 blocks are sound: walked token by token, nothing decoded.

A GPU's decoder trusts its input: it reads and writes outside its buffers for some damaged
blocks. Those that it is given have been walked here first. A sound block gives exactly the bytes
that its place calls for, and no copy reaches before its beginning.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import jit

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@jit
def _little(data: Any, at: Any, count: Any) -> Any:
    """An integer of ``count`` bytes, little-endian."""
    found = np.int64(0)
    for i in range(count):
        found |= np.int64(data[at + i]) << (8 * i)
    return found


@jit
def _snappy_size(data: Any, at: Any, end: Any) -> Any:
    """What a Snappy block says of its size, and where its tokens begin; -1 if nothing."""
    size = np.int64(0)
    for i in range(5):
        if at + i >= end:
            break
        size |= np.int64(data[at + i] & 127) << (7 * i)
        if data[at + i] < 128:
            return size, at + i + 1
    return np.int64(-1), at


@jit
def _snappy(data: Any, at: Any, end: Any, length: Any) -> Any:
    size, at = _snappy_size(data, at, end)
    done = np.int64(0)
    if size != length:
        return False
    while at < end:
        token = np.int64(data[at])
        at += 1
        kind = token & 3
        offset = np.int64(0)
        if kind == 0:
            count = (token >> 2) + 1
            more = count - 60
            if more > 0:
                if at + more > end:
                    return False
                count = _little(data, at, more) + 1
                at += more
            at += count
        else:
            more = np.int64(1) if kind == 1 else np.int64(2) if kind == 2 else np.int64(4)
            if at + more > end:
                return False
            count = (token >> 2) + 1
            offset = _little(data, at, more)
            if kind == 1:
                count = ((token >> 2) & 7) + 4
                offset |= token >> 5 << 8
            at += more
            if offset < 1 or offset > done:
                return False
        done += count
        if at > end or done > length:
            return False
    return done == length


@jit
def _lz4_length(data: Any, at: Any, end: Any, count: Any) -> Any:
    """A length that goes on after its nibble, and where it ends; past ``end`` if cut off."""
    if count < 15:
        return count, at
    while at < end:
        byte = np.int64(data[at])
        at += 1
        count += byte
        if byte < 255:
            return count, at
    return count, end + 1


@jit
def _lz4(data: Any, at: Any, end: Any, length: Any) -> Any:
    done = np.int64(0)
    while at < end:
        token = np.int64(data[at])
        count, at = _lz4_length(data, at + 1, end, token >> 4)
        at += count
        done += count
        if at > end or done > length:
            return False
        if at == end:  # the last sequence is a literal alone
            return done == length
        if at + 2 > end:
            return False
        offset = _little(data, at, 2)
        count, at = _lz4_length(data, at + 2, end, token & 15)
        if at > end or offset < 1 or offset > done:
            return False
        done += count + 4
    return False


@jit
def _unsound(data: Any, sizes: Any, lengths: Any, lz4: Any) -> Any:
    at = np.int64(0)
    for b in range(len(sizes)):
        end = at + sizes[b]
        if end > at:
            sound = _lz4(data, at, end, lengths[b]) if lz4 else _snappy(data, at, end, lengths[b])
            if not sound:
                return b
        at = end
    return -1


def unsound(arena: U8, sizes: npt.NDArray[np.uint32], *, lengths: I64, lz4: bool) -> int:
    """The first block that does not give what its place calls for, or -1.

    Args:
        arena: Blocks one after another.
        sizes: uint32, bytes of each; 0 for one that is left out.
        lengths: int64, bytes of content that each must give.
        lz4: LZ4 instead of Snappy.
    """
    return int(_unsound(arena, sizes.astype(np.int64), lengths, lz4))


@jit
def _lay_out(data: Any, sizes: Any, align: Any, out: Any) -> Any:
    at = done = np.int64(0)
    for b in range(len(sizes)):
        out[at : at + sizes[b]] = data[done : done + sizes[b]]
        done += sizes[b]
        at += (sizes[b] + align - 1) // align * align
    return at


def lay_out(arena: U8, sizes: npt.NDArray[np.uint32], *, align: int, out: U8) -> int:
    """Copy blocks to ``out``, each to a multiple of ``align``; returns where the last one's ends.

    What lies between them is left as it is. Other threads run meanwhile.
    """
    return int(_lay_out(arena, sizes.astype(np.int64), align, out))
