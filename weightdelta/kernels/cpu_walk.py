"""Raw Snappy and LZ4 blocks, walked token by token: whether they are sound, what is not zero.

A GPU's decoder trusts its input: it reads and writes outside its buffers for some damaged
blocks. Those that it is given have been walked here first. A sound block gives exactly the bytes
that its place calls for, no copy reaches before its beginning, and it ends as its format demands.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import jit

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

#: How an LZ4 block ends, by its format: so many bytes are literals, and the last match starts at
#: least so far from the end. Decoders that read ahead rely on it, and refuse others.
_LITERALS: Final = 5
_FAR: Final = 12
#: Bytes that follow the tag of a long Snappy literal, whatever its length takes: likewise.
_LONG: Final = 4


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
def _literal(data: Any, at: Any, count: Any, out: Any, done: Any, marks: Any, held: Any) -> Any:
    """Bytes as they are; ``marks`` notes those that are not zero. Returns how many it has."""
    for i in range(count):
        if data[at + i]:
            out[done + i] = data[at + i]
            marks[held] = done + i
            held += 1
    return held


@jit
def _copied(out: Any, done: Any, offset: Any, count: Any, marks: Any, held: Any) -> Any:
    """Bytes from ``offset`` before on; where those are zero nothing has to be done."""
    if offset == 1 and out[done - 1] == 0:
        return held
    for i in range(count):
        byte = out[done - offset + i]
        if byte:
            out[done + i] = byte
            marks[held] = done + i
            held += 1
    return held


@jit
def _snappy(data: Any, at: Any, end: Any, length: Any, fill: Any, out: Any, marks: Any) -> Any:
    """Walk a block; with ``fill`` decode it into zeros. Bytes that are not zero, or -1."""
    size, at = _snappy_size(data, at, end)
    done = held = np.int64(0)
    if size != length:
        return np.int64(-1)
    while at < end:
        token = np.int64(data[at])
        at += 1
        kind = token & 3
        if kind == 0:
            count = (token >> 2) + 1
            more = count - 60
            if more > 0:
                if at + _LONG > end:
                    return np.int64(-1)
                count = _little(data, at, more) + 1
                at += more
            if at + count > end or done + count > length:
                return np.int64(-1)
            if fill:
                held = _literal(data, at, count, out, done, marks, held)
            at += count
        else:
            more = np.int64(1) if kind == 1 else np.int64(2) if kind == 2 else np.int64(4)
            if at + more > end:
                return np.int64(-1)
            count = (token >> 2) + 1
            offset = _little(data, at, more)
            if kind == 1:
                count = ((token >> 2) & 7) + 4
                offset |= token >> 5 << 8
            at += more
            if offset < 1 or offset > done or done + count > length:
                return np.int64(-1)
            if fill:
                held = _copied(out, done, offset, count, marks, held)
        done += count
    return held if done == length else np.int64(-1)


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
def _lz4(data: Any, at: Any, end: Any, length: Any, fill: Any, out: Any, marks: Any) -> Any:
    """As ``_snappy``."""
    done = held = np.int64(0)
    while at < end:
        token = np.int64(data[at])
        count, at = _lz4_length(data, at + 1, end, token >> 4)
        if at + count > end or done + count > length:
            return np.int64(-1)
        if fill:
            held = _literal(data, at, count, out, done, marks, held)
        at += count
        done += count
        if at == end:  # the last sequence is a literal alone
            return held if done == length else np.int64(-1)
        if at + 2 + 1 + _LITERALS > end or done + _FAR > length:
            return np.int64(-1)
        offset = _little(data, at, 2)
        count, at = _lz4_length(data, at + 2, end, token & 15)
        count += 4
        if at > end or offset < 1 or offset > done or done + count + _LITERALS > length:
            return np.int64(-1)
        if fill:
            held = _copied(out, done, offset, count, marks, held)
        done += count
    return np.int64(-1)


@jit
def walk(
    data: Any, at: Any, end: Any, length: Any, lz4: Any, fill: Any, out: Any, marks: Any
) -> Any:  # fmt: skip
    """Walk one block of either bitstream.

    Returns:
        Bytes of content that are not zero, as ``marks`` has them (0 without ``fill``); -1 when
        the block does not give exactly ``length`` bytes. ``out`` then holds what was decoded.
    """
    if lz4:
        return _lz4(data, at, end, length, fill, out, marks)
    return _snappy(data, at, end, length, fill, out, marks)


@jit
def _unsound(data: Any, sizes: Any, lengths: Any, lz4: Any, out: Any, marks: Any) -> Any:
    at = np.int64(0)
    for b in range(len(sizes)):
        end = at + sizes[b]
        if end > at and walk(data, at, end, lengths[b], lz4, False, out, marks) < 0:
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
    nothing = np.empty(0, np.uint8), np.empty(0, np.uint16)
    return int(_unsound(arena, sizes.astype(np.int64), lengths, lz4, *nothing))


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
