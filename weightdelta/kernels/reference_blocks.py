"""Zero-run blocks in plain Python: the definition that the compiled emitters match byte for byte.

A block is a stretch of a XOR mask, nearly all zeros. It is written without any search for
matches: stretches of zeros become copies from one byte back, everything else literals. What
comes out is a plain raw Snappy or LZ4 block that any decoder reads.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.planes import BLOCK_BYTES, Elements

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

#: Zeros in a row that are worth a copy: the first ends the literal, the others repeat it.
RUN: Final = 5
#: LZ4's rules for the end of a block: no match starts in its last 12 bytes, and its last 5 bytes
#: are literals.
LZ4_LAST_START: Final = 12
LZ4_LITERAL_TAIL: Final = 5


def _steps(block: U8, *, last_start: int, tail: int) -> Iterator[tuple[bytes, int]]:
    """Literals, each with the number of zeros to copy after it; no copy may reach ``tail``."""
    begin = end = 0  # the pending literal, and one past its last nonzero byte
    size = len(block)
    for after in [*np.flatnonzero(block).tolist(), size]:
        stop = min(after, size - tail)
        if after - end >= RUN and stop - end >= RUN and end + 1 <= size - last_start:
            yield block[begin : end + 1].tobytes(), stop - end - 1
            begin = stop
        end = after + 1
    yield block[begin:].tobytes(), 0


def _snappy_literal(content: bytes) -> bytes:
    n = len(content) - 1
    if n < 60:
        return bytes([n << 2]) + content
    if n < 256:
        return bytes([60 << 2, n]) + content
    return bytes([61 << 2, n & 255, n >> 8]) + content


def _snappy_zeros(count: int) -> bytes:
    """Copies with an offset of 1: whole ones of 64 bytes, then one for the rest."""
    whole, rest = divmod(count, 64)
    found = bytes([63 << 2 | 2, 1, 0]) * whole
    if 4 <= rest <= 11:
        return found + bytes([(rest - 4) << 2 | 1, 1])
    return found + (bytes([(rest - 1) << 2 | 2, 1, 0]) if rest else b"")


def snappy_block(block: U8) -> bytes:
    """One raw Snappy block of a mask's bytes."""
    size, head = len(block), b""
    while size >= 128:
        head += bytes([size & 127 | 128])
        size >>= 7
    parts = [head, bytes([size])]
    for content, zeros in _steps(block, last_start=0, tail=0):
        parts.append((_snappy_literal(content) if content else b"") + _snappy_zeros(zeros))
    return b"".join(parts)


def _lz4_extra(count: int) -> bytes:
    """What a length's nibble of 15 leaves over."""
    return b"\xff" * ((count - 15) // 255) + bytes([(count - 15) % 255]) if count >= 15 else b""


def lz4_block(block: U8) -> bytes:
    """One raw LZ4 block of a mask's bytes."""
    parts = []
    for content, zeros in _steps(block, last_start=LZ4_LAST_START, tail=LZ4_LITERAL_TAIL):
        match = zeros - 4 if zeros else 0
        token = bytes([min(len(content), 15) << 4 | min(match, 15)])
        copy = b"\x01\x00" + _lz4_extra(match) if zeros else b""
        parts.append(token + _lz4_extra(len(content)) + content + copy)
    return b"".join(parts)


def zero_runs(
    offsets: U32, values: Elements, *, blocks: I64, size: int, lz4: bool
) -> tuple[U8, U32]:
    """Zero-run blocks of a XOR mask, straight from the list of its changes.

    Args:
        offsets: uint32, element offset of each change in the frame, ascending.
        values: XOR of each change, of the element's width.
        blocks: int64, numbers of the 64 KiB blocks of the mask to write.
        size: Bytes of the whole mask; the last block ends there.
        lz4: LZ4 instead of Snappy.

    Returns:
        The blocks one after another, uint8, and the bytes of each, uint32.
    """
    width = values.dtype.itemsize
    done = []
    for number in blocks.tolist():
        low, high = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, size)
        first, last = np.searchsorted(offsets, [low // width, -(-high // width)])
        block = np.zeros((high - low) // width, values.dtype)
        block[offsets[first:last] - np.uint32(low // width)] = values[first:last]
        done.append((lz4_block if lz4 else snappy_block)(block.view(np.uint8)))
    arena = np.frombuffer(b"".join(done), np.uint8)
    return arena, np.array([len(part) for part in done], np.uint32)
