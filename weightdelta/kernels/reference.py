"""The kernels in plain numpy: the definition that every faster kernel matches bit for bit.

Everything is modulo 2^64 or modulo the element's width. Functions take and return the arrays
that ``planes`` describes and check nothing unless they say so.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.digest import C1, C2, M1, M2, MASK, U64
from weightdelta.kernels.planes import GAP_FACTOR, UINTS, Chunks, Elements, Planes
from weightdelta.kernels.reference_blocks import zero_runs as zero_runs

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

#: Nibble that says "this value is in the escape list".
ESCAPE: Final = 15
#: Entries that ``scatter`` compares before it stores any of them.
BLOCK: Final = 4096


def mix64(x: U64) -> U64:
    """The bijective mixer of the state digest, element by element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(M2)
    return x ^ (x >> np.uint64(31))


def _h(term: U64, bits: Elements) -> U64:
    return mix64((term * np.uint64(C1)) ^ (bits.astype(np.uint64) * np.uint64(C2)))


def _sum(hashes: U64) -> int:
    return int(hashes.sum(dtype=np.uint64))


def _terms(q: I64, *, key: int, run: int, stride: int) -> U64:
    index = (q // run) * stride + q % run
    return index.astype(np.uint64) + np.uint64(key & MASK)


def _change(term: U64, old: Elements, new: Elements) -> int:
    return (_sum(_h(term, new)) - _sum(_h(term, old))) & MASK


def _chunk_terms(position: I64, chunks: Chunks, c: int) -> U64:
    q = position + int(chunks.skip[c])
    return _terms(q, key=int(chunks.key[c]), run=int(chunks.run[c]), stride=int(chunks.stride[c]))


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)


def encode(old: Elements, new: Elements, *, chunks: Chunks, xor: bool) -> tuple[Planes, U64]:
    """What changed from ``old`` to ``new``.

    Args:
        old: The frame's elements before, 1-D, contiguous, unsigned.
        new: The same elements after.
        chunks: Where the frame's chunks lie.
        xor: Values are ``new ^ old`` instead of ``new - old``.

    Returns:
        The changes, and per chunk the digest change ``sum h(new) - h(old)``, uint64.
    """
    values = new ^ old if xor else new - old
    counts, change = np.zeros(len(chunks), np.uint32), np.zeros(len(chunks), np.uint64)
    gaps, bitmap, kept = [], [], []
    for c in range(len(chunks)):
        part = slice(int(chunks.start[c]), int(chunks.start[c] + chunks.length[c]))
        where = np.flatnonzero(values[part])
        k, n = len(where), int(chunks.length[c])
        counts[c] = k
        if 0 < k < n and GAP_FACTOR * k < n:
            gaps.append(np.diff(where, prepend=-1) - 1)
        elif 0 < k < n:
            bitmap.append(np.packbits(values[part] != 0, bitorder="little"))
        kept.append(values[part][where])
        change[c] = _change(_chunk_terms(where, chunks, c), old[part][where], new[part][where])
    planes = Planes(
        counts,
        _joined(gaps, np.uint16),
        _joined(bitmap, np.uint8),
        _joined(kept, old.dtype),
    )
    return planes, change


def _positions(planes: Planes, chunks: Chunks) -> Iterator[I64]:
    gap, bit = 0, 0
    for c in range(len(chunks)):
        k, n = int(planes.counts[c]), int(chunks.length[c])
        if k == n:
            yield np.arange(n, dtype=np.int64)
        elif GAP_FACTOR * k < n:
            yield np.cumsum(planes.gaps[gap : gap + k].astype(np.int64) + 1) - 1
            gap += k
        else:
            packed = planes.bitmap[bit : bit + (n + 7) // 8]
            yield np.flatnonzero(np.unpackbits(packed, bitorder="little"))
            bit += len(packed)


def decode_into(target: Elements, planes: Planes, *, chunks: Chunks, xor: bool) -> U64:
    """Add (or XOR) the changes into ``target`` in place.

    Args:
        target: The frame's elements, 1-D, contiguous, unsigned, writable.
        planes: Changes that :func:`check` accepts, of the same width.
        chunks: Where the frame's chunks lie.
        xor: Whether values are XORs.

    Returns:
        Digest change of each chunk, uint64.
    """
    change = np.zeros(len(chunks), np.uint64)
    done = 0
    for c, where in enumerate(_positions(planes, chunks)):
        values = planes.values[done : done + len(where)]
        done += len(where)
        part = target[int(chunks.start[c]) :]
        old = part[where]
        part[where] = old ^ values if xor else old + values
        change[c] = _change(_chunk_terms(where, chunks, c), old, part[where])
    return change


def expand(planes: Planes, *, chunks: Chunks) -> npt.NDArray[np.uint32]:
    """Element offset in the frame's buffer of each change, in order, uint32."""
    parts = [p + chunks.start[c] for c, p in enumerate(_positions(planes, chunks))]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.uint32)


def check(planes: Planes, *, chunks: Chunks) -> int:
    """Find a chunk whose gaps or bitmap do not fit its length and count.

    Counts must not exceed the lengths, and the planes must have the sizes that counts imply.

    Returns:
        The first such chunk, or -1 when all are sound.
    """
    for c, where in enumerate(_positions(planes, chunks)):
        fits = not len(where) or where[-1] < chunks.length[c]
        if len(where) != planes.counts[c] or not fits:
            return c
    return -1


def digest(values: Elements, *, key: int, skip: int, run: int, stride: int) -> int:
    """Sum of h over ``values``: elements ``skip`` and on of a segment with ``run`` and ``stride``.

    Args:
        values: 1-D, contiguous, unsigned.
        key: The tensor's seed plus the segment's first canonical index, modulo 2^64.
        skip: Elements of the segment that precede ``values``.
        run: Elements of a row of the segment.
        stride: Canonical distance from row to row.
    """
    q = np.arange(skip, skip + len(values), dtype=np.int64)
    return _sum(_h(_terms(q, key=key, run=run, stride=stride), values))


def dry_run(
    resident: Elements,
    index: Elements,
    values: Elements,
    *,
    seed: int,
    offsets: Elements,
    xor: bool,
) -> tuple[Elements, Elements, int]:
    """What changes would make of ``resident``, without storing anything.

    Args:
        resident: Elements held, 1-D, unsigned.
        index: Canonical index of each change, uint32 or uint64.
        values: Difference or XOR of each change, of the resident's width.
        seed: The tensor's digest seed.
        offsets: Where in ``resident`` each change lies, same dtype as ``index``.
        xor: Whether values are XORs.

    Returns:
        Old values, new values, and ``sum h(new) - h(old)`` modulo 2^64.
    """
    old = resident[offsets]
    new = old ^ values if xor else old + values
    return old, new, _change(index.astype(np.uint64) + np.uint64(seed & MASK), old, new)


def scatter(resident: Elements, offsets: Elements, *, expect: Elements, new: Elements) -> int:
    """Store ``new`` at ``offsets`` provided that each place holds ``expect`` (or ``new``).

    Works in blocks of 4096 entries: a block is compared whole before any of it is stored. On a
    mismatch all earlier blocks get ``expect`` back. Offsets are distinct.

    Returns:
        -1, or the position of the first entry that matched neither.
    """
    for lo in range(0, len(offsets), BLOCK):
        part = slice(lo, lo + BLOCK)
        held = resident[offsets[part]]
        wrong = np.flatnonzero((held != expect[part]) & (held != new[part]))
        if len(wrong):
            resident[offsets[:lo]] = expect[:lo]
            return lo + int(wrong[0])
        resident[offsets[part]] = new[part]
    return -1


def merge(
    index: Elements,
    old: Elements,
    new: Elements,
    *,
    index2: Elements,
    old2: Elements,
    new2: Elements,
) -> tuple[Elements, Elements, Elements]:
    """Two ascending change lists, the first applied before the second, as one list.

    Where both hold an index, old comes from the first and new from the second; entries that
    end where they began are dropped. Dtypes are those of the first list.
    """
    both = np.union1d(index, index2)
    before, after = np.empty(len(both), old.dtype), np.empty(len(both), old.dtype)
    at, at2 = np.searchsorted(both, index), np.searchsorted(both, index2)
    before[at2], before[at] = old2, old
    after[at], after[at2] = new, new2
    kept = before != after
    return both[kept].astype(index.dtype), before[kept], after[kept]


def _nibbles(values: Elements) -> Elements:
    one, top = values.dtype.type(1), values.dtype.type(8 * values.dtype.itemsize - 1)
    zigzag = (values << one) ^ (values.dtype.type(0) - (values >> top))
    return zigzag - one


def pack_nibbles(values: Elements) -> tuple[U8, Elements]:
    """Nonzero differences as zigzag nibbles, two a byte, first in the low half.

    ``z = zigzag(signed value) - 1``; the nibble is z, or 15 when z does not fit below that.

    Returns:
        Nibbles, uint8, the last odd half zero; and z of each value whose nibble is 15.
    """
    z = _nibbles(values)
    nibbles = np.minimum(z, z.dtype.type(ESCAPE)).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    return nibbles[0::2] | (nibbles[1::2] << np.uint8(4)), z[z >= ESCAPE]


def _unpacked(nibbles: U8, count: int) -> U8:
    halves = np.stack([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=1)
    return halves.reshape(-1)[:count]


def count_escapes(nibbles: U8, *, count: int) -> int:
    """How many of the first ``count`` nibbles are 15; -1 when the unused last half is not 0."""
    if count % 2 and nibbles[count // 2] >> 4:
        return -1
    return int(np.count_nonzero(_unpacked(nibbles, count) == ESCAPE))


def unpack_nibbles(nibbles: U8, escapes: Elements, *, count: int) -> Elements:
    """The ``count`` differences that :func:`pack_nibbles` packed, of the dtype of ``escapes``."""
    kind = escapes.dtype.type
    halves = _unpacked(nibbles, count)
    z = halves.astype(escapes.dtype)
    z[halves == ESCAPE] = escapes
    zigzag = z + kind(1)
    return (zigzag >> kind(1)) ^ (kind(0) - (zigzag & kind(1)))


def split(values: Elements) -> list[U8]:
    """Byte planes of ``values``, the lowest byte first."""
    octets = values.view(np.uint8).reshape(-1, values.dtype.itemsize)
    return [np.ascontiguousarray(octets[:, i]) for i in range(values.dtype.itemsize)]


def join(planes: Sequence[U8 | None], *, width: int, count: int) -> Elements:
    """Inverse of :func:`split`; None stands for a plane of zeros."""
    octets = np.zeros((count, width), np.uint8)
    for i, plane in enumerate(planes):
        if plane is not None:
            octets[:, i] = plane
    return octets.reshape(-1).view(UINTS[width])
