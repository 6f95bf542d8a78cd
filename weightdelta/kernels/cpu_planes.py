"""Encoded frames of the sparse codec to planes, many in one call, frame by frame in cache.

Nothing is trusted: every size is held against what it must be before a byte is touched, and what
is found unsound ends the call with that frame's number.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weightdelta.kernels.compiled import ZERO, jit, scratch
from weightdelta.kernels.cpu_bytes import _count_escapes, _put_byte, _unpack
from weightdelta.kernels.cpu_ops import _check, _work
from weightdelta.kernels.planes import GAP_FACTOR, UINTS, Planes, in_one_piece

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

#: First part of each kind; see ``codecs.slots``.
_COUNTS, _GAPS, _BITMAP, _NIBBLES, _VALUES = 0, 3, 5, 6, 7
_SIZE: Final = ir.IntType(64)


def _call(_: Any, f: Any, context: Any, out: Any, room: Any, data: Any, size: Any) -> Any:
    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        kind = ir.FunctionType(_SIZE, [_SIZE] * 5)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.uint64(f, context, out, room, data, size), generate


#: ``ZSTD_decompressDCtx`` or ``ZSTD_compress2`` by its address; all arguments are uint64,
#: addresses among them.
call_zstd: Final[Any] = intrinsic(_call)


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
def plane(zstd: Any, data: Any, at: Any, size: Any, content: Any, limit: Any, out: Any) -> Any:
    """Decompress a plane: 1, or 0 when it is left out, or -1 when it is unsound."""
    if size == 0:
        return 0
    if content == 0 or size > content + (content >> 8) + 64 or at + size > len(data):
        return -1
    end = at + size
    begin = _past_header(data, at, end, content, limit)
    if begin < 0 or _past_blocks(data, begin, end - 4) != end - 4:  # four bytes of checksum
        return -1
    source = np.uint64(data.ctypes.data) + np.uint64(at)
    target = np.uint64(out.ctypes.data)
    found = call_zstd(zstd[0], zstd[1], target, np.uint64(content), source, np.uint64(size))
    return 1 if found == np.uint64(content) else -1  # errors are numbers near 2^64


@jit
def joined(
    zstd: Any, data: Any, at: Any, sizes: Any, count: Any, limit: Any, raw: Any, out: Any
) -> Any:
    """Elements from as many byte planes as there are ``sizes``; False when one is unsound."""
    for i in range(count):
        out[i] = 0
    for s in range(len(sizes)):
        found = plane(zstd, data, at, sizes[s], count, limit, raw)
        if found < 0:
            return False
        if found:
            _put_byte(raw[:count], np.uint64(8 * s), False, out[:count])
        at += sizes[s]
    return True


@jit
def _all_counts(
    zstd: Any, data: Any, start: Any, sizes: Any, length: Any, bounds: Any, limit: Any,
    raw: Any, counts: Any, implied: Any,
) -> Any:  # fmt: skip
    """Changes of every chunk; ``implied`` is what gaps, bitmaps and values take in each frame."""
    for f in range(len(start)):
        low, high = bounds[f], bounds[f + 1]
        part = counts[low:high]
        if not joined(zstd, data, start[f], sizes[f, :3], high - low, limit, raw, part):
            return f
        for c in range(low, high):
            k, n = np.int64(counts[c]), length[c]
            if k > n:
                return f
            implied[2, f] += k
            if k < n and GAP_FACTOR * k < n:
                implied[0, f] += k
            elif k < n:
                implied[1, f] += (n + 7) // 8
    return -1


@jit
def _differences(
    zstd: Any, data: Any, at: Any, sizes: Any, limit: Any, raw: Any, nibbles: Any, escaped: Any,
    small: Any, out: Any,
) -> Any:  # fmt: skip
    """Values from nibbles (the first of ``sizes``) and escapes (the others)."""
    octets = (len(out) + 1) // 2
    found = plane(zstd, data, at, sizes[0], octets, limit, nibbles)
    if found < 0:
        return False
    if found == 0:
        for i in range(octets):
            nibbles[i] = 0
    packed = nibbles[:octets]
    if len(out) % 2 and packed[octets - 1] >> 4:
        return False
    count = _count_escapes(packed)
    if not joined(zstd, data, at + sizes[0], sizes[1:], count, limit, raw, escaped):
        return False
    largest = ~ZERO >> np.uint64(64 - 8 * out.itemsize)  # zigzag makes no such value
    for i in range(count):
        if escaped[i] < 15 or np.uint64(escaped[i]) == largest:
            return False
    _unpack(packed, escaped[:count], small, out)
    return True


@jit
def _sound(
    zstd: Any, data: Any, at: Any, sizes: Any, limit: Any, xor: Any, raw: Any, nibbles: Any,
    escaped: Any, small: Any, out: Any,
) -> Any:  # fmt: skip
    """Decode the values of one frame; ``sizes`` are those from the nibbles on."""
    if not xor:
        return _differences(zstd, data, at, sizes, limit, raw, nibbles, escaped, small, out)
    if not joined(zstd, data, at, sizes[1:], len(out), limit, raw, out):
        return False
    zeros = 0
    for i in range(len(out)):
        zeros += out[i] == 0
    return zeros == 0


@jit
def _all_planes(
    zstd: Any, data: Any, start: Any, sizes: Any, length: Any, bounds: Any, ends: Any, limit: Any,
    xor: Any, raw: Any, nibbles: Any, escaped: Any, small: Any, mask: Any, mask8: Any,
    counts: Any, gaps: Any, bitmap: Any, values: Any,
) -> Any:  # fmt: skip
    """Everything but the counts; ``ends`` says where a frame's part of each output ends."""
    width = values.itemsize
    for f in range(len(start)):
        gap = gaps[ends[0, f] : ends[0, f + 1]]
        bit = bitmap[ends[1, f] : ends[1, f + 1]]
        value = values[ends[2, f] : ends[2, f + 1]]
        at = start[f]
        for s in range(3):
            at += sizes[f, s]
        if not joined(zstd, data, at, sizes[f, 3:5], len(gap), limit, raw, gap):
            return f
        at += sizes[f, 3] + sizes[f, 4]
        if not joined(zstd, data, at, sizes[f, 5:6], len(bit), limit, raw, bit):
            return f
        at += sizes[f, 5]
        rest = sizes[f, 6 : 7 + width]
        if not _sound(zstd, data, at, rest, limit, xor, raw, nibbles, escaped, small, value):
            return f
        low, high = bounds[f], bounds[f + 1]
        if _check(counts[low:high], gap, bit, length[low:high], mask, mask8) >= 0:
            return f
    return -1


def decode(
    data: U8, start: I64, sizes: I64, *, length: I64, bounds: I64, width: int, xor: bool,
    changed: I64 | None, zstd: tuple[int, int], limit: int, memory: Callable[[int], U8],
) -> Planes | None:  # fmt: skip
    """The changes of many frames, one after the other; None when some frame is unsound.

    Args:
        data: uint8, memory that holds the frames.
        start: int64 [frames], where each begins, not negative; its parts follow each other.
        sizes: int64 [frames, 15], bytes of each part, not negative; those of parts that such a
            frame has not are 0.
        length: int64 [chunks], elements of the chunks of all frames.
        bounds: int64 [frames + 1], chunks of each frame.
        width: Bytes of an element.
        xor: Whether values are XORs, else differences.
        changed: int64 [frames], changes that each must have; None where nothing says.
        zstd: Addresses of ``ZSTD_decompressDCtx`` and of a context for this thread.
        limit: Largest window of a Zstd frame, unless its content itself is larger [B].
        memory: Gives that many bytes for gaps, bitmap and values, aligned for any of them.
    """
    kind = UINTS[width]
    call = np.array(zstd, np.uint64)
    counts, implied = np.empty(len(length), np.uint32), np.zeros((3, len(start)), np.int64)
    raw = scratch.get("raw", int(np.diff(bounds).max(initial=0)), np.uint8)
    if _all_counts(call, data, start, sizes, length, bounds, limit, raw, counts, implied) >= 0:
        return None
    if changed is not None and bool((implied[2] != changed).any()):
        return None
    ends = np.zeros((3, len(start) + 1), np.int64)
    np.cumsum(implied, axis=1, out=ends[:, 1:])
    gaps, bitmap, values = in_one_piece(ends[:, -1].tolist(), width, memory)
    most = int(implied[2].max(initial=0))
    raw = scratch.get("raw", max(most, int(implied[1].max(initial=0))), np.uint8)
    nibbles = scratch.get("nibbles", (most + 1) // 2, np.uint8)
    escaped, small = scratch.get("escaped", most, kind), scratch.get("small", 16, kind)
    mask, mask8 = _work(np.uint8)[:2]
    bad = _all_planes(
        call, data, start, sizes, length, bounds, ends, limit, xor, raw, nibbles, escaped, small,
        mask, mask8, counts, gaps, bitmap, values,
    )  # fmt: skip
    return Planes(counts, gaps, bitmap, values) if bad < 0 else None
