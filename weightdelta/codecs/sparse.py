"""The sparse codec: a frame's changes as byte planes, each its own Zstd frame.

A frame has fifteen slots, in the order of :data:`PLANES`. A plane that is empty or all zero is
left out and has size 0. What a plane's raw size must be follows from the frame's chunks, from
the counts, and (for escaped values) from the nibbles, so a decoder holds every size against
that before it allocates. Nothing of a damaged frame reaches a kernel that writes.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from weightdelta.codecs.names import Values as Values
from weightdelta.codecs.slots import SLOTS, SlotReader, damaged, outer
from weightdelta.kernels import ops
from weightdelta.kernels.planes import GAP_FACTOR, UINTS, Chunks, Elements, Planes

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]

#: Names of a frame's slots, in order.
PLANES: Final = (
    "counts 0", "counts 1", "counts 2", "gaps low", "gaps high", "bitmap", "nibbles",
    *(f"values {i}" for i in range(8)),
)  # fmt: skip

_COUNTS: Final = 0
_GAPS: Final = 3
_BITMAP: Final = 5
_NIBBLES: Final = 6
_VALUES: Final = 7
#: Smallest z that needs an escape.
_ESCAPE: Final = 15


def _pack_values(values: Elements, kind: Values) -> list[U8]:
    """Slots from the nibbles on."""
    if kind == "xor":
        return [np.empty(0, np.uint8), *ops().split(values)]
    nibbles, escapes = ops().pack_nibbles(values)
    return [nibbles, *ops().split(escapes)]


def encode_frame(planes: Planes, *, width: int, values: Values) -> tuple[bytes, U32]:
    """The bytes of one frame.

    Args:
        planes: Changes of the frame; nonzero values of ``width`` bytes.
        width: Bytes of an element.
        values: Whether the values are differences or XORs.

    Returns:
        The present planes one after another, and the 15 sizes, uint32. Nothing changed gives
        no bytes and sizes of 0.
    """
    sizes = np.zeros(SLOTS, np.uint32)
    if not planes.changed:
        return b"", sizes
    raw = [
        *ops().split(planes.counts)[:3],
        *ops().split(planes.gaps),
        planes.bitmap,
        *_pack_values(planes.values.view(UINTS[width]), values),
    ]
    encoded = [outer(plane) for plane in raw]
    sizes[: len(encoded)] = [len(part) for part in encoded]
    return b"".join(encoded), sizes


def _read_counts(reader: SlotReader, chunks: Chunks) -> U32:
    counts = reader.joined(_COUNTS, width=4, count=len(chunks), planes=3).view(np.uint32)
    over = np.flatnonzero(counts > chunks.length)
    if len(over):
        c = int(over[0])
        raise damaged(
            reader.where,
            f"chunk {c} counts {int(counts[c])} changes of {int(chunks.length[c])} elements",
        )
    return counts


def _implied(counts: U32, chunks: Chunks) -> tuple[int, int, int]:
    """Gaps, bitmap bytes and values that the counts call for."""
    k, n = counts.astype(np.int64), chunks.length
    sparse = GAP_FACTOR * k < n
    bits = ~sparse & (k < n)
    return int(k[sparse].sum()), int(((n[bits] + 7) // 8).sum()), int(k.sum())


def _read_differences(reader: SlotReader, width: int, count: int) -> Elements:
    size = (count + 1) // 2
    nibbles = reader.plane(_NIBBLES, size)
    nibbles = np.zeros(size, np.uint8) if nibbles is None else nibbles
    escaped = ops().count_escapes(nibbles, count=count)
    if escaped < 0:
        raise damaged(reader.where, "the unused half of the last nibble byte is not zero")
    escapes = reader.joined(_VALUES, width=width, count=escaped, planes=width)
    if escaped and (escapes.min() < _ESCAPE or escapes.max() == np.iinfo(escapes.dtype).max):
        raise damaged(reader.where, "an escaped value is out of range")
    return ops().unpack_nibbles(nibbles, escapes, count=count)


def _read_values(reader: SlotReader, width: int, values: Values, count: int) -> Elements:
    unused = range(_VALUES + width, SLOTS)
    reader.unused((*unused, _NIBBLES) if values == "xor" else unused)
    if values == "diff":
        return _read_differences(reader, width, count)
    found = reader.joined(_VALUES, width=width, count=count, planes=width)
    if count and not found.min():
        raise damaged(reader.where, "a changed element has an XOR of zero")
    return found


def decode_frame(
    data: bytes | memoryview,
    sizes: npt.ArrayLike,
    *,
    chunks: Chunks,
    width: int,
    values: Values,
    where: str,
) -> Planes:
    """The changes in one encoded frame, sound enough for any kernel.

    Args:
        data: The frame's bytes.
        sizes: Its 15 plane sizes.
        chunks: The frame's chunks.
        width: Bytes of an element.
        values: Whether the values are differences or XORs.
        where: What is being read, for the message.

    Raises:
        DamagedObject: Sizes, planes or counts do not fit each other or the chunks. Memory is
            bounded by the chunks' lengths, whatever the bytes say.
    """
    reader = SlotReader.of(data, sizes, names=PLANES, where=where)
    counts = _read_counts(reader, chunks)
    gap, bit, changed = _implied(counts, chunks)
    gaps = reader.joined(_GAPS, width=2, count=gap, planes=2).view(np.uint16)
    bitmap = reader.joined(_BITMAP, width=1, count=bit, planes=1).view(np.uint8)
    found = _read_values(reader, width, values, changed)
    planes = Planes(counts, gaps, bitmap, found)
    bad = ops().check(planes, chunks=chunks)
    if bad >= 0:
        raise damaged(where, f"the positions of chunk {bad} do not fit its length and count")
    return planes
