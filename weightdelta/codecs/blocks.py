"""Codecs on the XOR mask: raw Snappy or LZ4 blocks under Zstd, plain Zstd, or the mask itself.

A frame's mask is cut into blocks of 64 KiB. All-zero blocks are left out; the others are plain
raw blocks that any decoder reads: cramjam and pyarrow on a CPU, nvCOMP (RAW) on a GPU, a
hardware decompression engine. A block in which fewer than a sixth of the elements changed is
written straight from the list of changes as a zero-run block (``kernels.reference_blocks``), any
other by the stock encoder. Up to eight independent Zstd frames make the outer stage.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from weightdelta.codecs import stock, zstd
from weightdelta.codecs.names import Codec
from weightdelta.codecs.slots import SLOTS, SlotReader, damaged, outer
from weightdelta.codecs.stock import Inner as Inner
from weightdelta.kernels import has_compiled, ops
from weightdelta.kernels.planes import (
    BLOCK_BYTES,
    FIRST_PIECE,
    GAP_FACTOR,
    MOST_PIECES,
    PIECE_BLOCKS,
    UINTS,
    Chunks,
    Elements,
    Planes,
)

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

#: Bitstream of the codecs that have blocks.
INNER: Final[Mapping[Codec, Inner]] = {"snappy+zstd": "snappy", "lz4+zstd": "lz4"}
#: Names of a frame's slots, in order; those called "unused" are always absent.
PARTS: Final = (
    "block sizes 0", "block sizes 1", "block sizes 2", *["unused"] * 4,
    *(f"piece {i}" for i in range(8)),
)  # fmt: skip

_SIZES: Final = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """A frame's XOR mask as raw blocks, before any outer stage.

    Attributes:
        inner: Their bitstream.
        size: Bytes of the mask.
        sizes: uint32, bytes of each 64 KiB block in ``arena``; 0 for one that is all zero.
        arena: uint8, the blocks that are not, one after another.
    """

    inner: Inner
    size: int
    sizes: U32
    arena: U8


def block_lengths(size: int) -> I64:
    """Bytes of mask in each block of a mask of ``size`` bytes: int64."""
    starts = np.arange(0, size, BLOCK_BYTES, dtype=np.int64)
    return np.minimum(size - starts, BLOCK_BYTES)


def pieces(blocks: int) -> list[range]:
    """Which blocks each piece of the outer stage holds."""
    count = min(MOST_PIECES, -(-blocks // PIECE_BLOCKS))
    each = -(-blocks // max(count, 1))
    return [range(i * each, min(i * each + each, blocks)) for i in range(count)]


class _Masks(threading.local):
    """A thread's mask, reused: fresh pages would cost more than decoding into them."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    def get(self, size: int) -> U8:
        """``size`` bytes of unknown content, good until the next request."""
        if len(self._held) < size:
            self._held = np.empty(size, np.uint8)
        return self._held[:size]


_masks = _Masks()


def _mask_size(chunks: Chunks, width: int) -> int:
    return int(chunks.length.sum()) * width


def _paint(mask: Elements, offsets: U32, values: Elements) -> U8:
    """A mask from its changes, in memory of unknown content."""
    mask.fill(0)
    mask[offsets] = values
    return mask.view(np.uint8)


# --- encode -----------------------------------------------------------------------------------


def pack(planes: Planes, *, inner: Inner, chunks: Chunks, width: int) -> Blocks:
    """A frame's changes as raw blocks of its XOR mask.

    Args:
        planes: Changes of the frame, values XORs of ``width`` bytes.
        inner: Bitstream of the blocks.
        chunks: The frame's chunks.
        width: Bytes of an element.
    """
    size = _mask_size(chunks, width)
    lengths = block_lengths(size)
    offsets, values = ops().expand(planes, chunks=chunks), planes.values.view(UINTS[width])
    starts = np.arange(len(lengths), dtype=np.uint32) * np.uint32(BLOCK_BYTES // width)
    first = np.searchsorted(offsets, starts)
    changed = np.diff(first, append=len(offsets))
    few = GAP_FACTOR * changed * width < lengths
    sparse, dense = np.flatnonzero(few & (changed > 0)), np.flatnonzero(~few)
    arena, found = ops().zero_runs(offsets, values, blocks=sparse, size=size, lz4=inner == "lz4")
    sizes = np.zeros(len(lengths), np.uint32)
    sizes[sparse] = found
    if not len(dense):
        return Blocks(inner, size, sizes, arena)
    parts = dict(zip(sparse.tolist(), np.split(arena, np.cumsum(found)[:-1]), strict=False))
    for b in dense.tolist():
        window = _masks.get(int(lengths[b])).view(UINTS[width])
        mine = slice(int(first[b]), int(first[b] + changed[b]))
        places = offsets[mine] - np.uint32(b * (BLOCK_BYTES // width))
        parts[b] = stock.compress(_paint(window, places, values[mine]), inner=inner)
        sizes[b] = len(parts[b])
    return Blocks(inner, size, sizes, np.concatenate([parts[b] for b in sorted(parts)]))


def wrap(blocks: Blocks) -> Iterator[bytes]:
    """The parts of an encoded frame of these blocks, whoever encoded them: the outer stage."""
    yield from (outer(plane) for plane in ops().split(blocks.sizes)[:3])
    yield from [b""] * (FIRST_PIECE - 3)
    ends = np.concatenate([[0], np.cumsum(blocks.sizes, dtype=np.int64)])
    for piece in pieces(len(blocks.sizes)):
        part = blocks.arena[ends[piece.start] : ends[piece.stop]]
        yield zstd.compress(part.data) if len(part) else b""


def _mask_parts(mask: U8, *, compressed: bool) -> Iterator[bytes]:
    yield from [b""] * FIRST_PIECE
    for piece in pieces(len(block_lengths(len(mask)))):
        part = mask[piece.start * BLOCK_BYTES : piece.stop * BLOCK_BYTES]
        if compressed:
            yield outer(part)
        else:
            yield part.tobytes() if part.any() else b""


def encode_frame(planes: Planes, *, codec: Codec, chunks: Chunks, width: int) -> tuple[bytes, U32]:
    """The bytes of one frame under a codec on the XOR mask, and its 15 part sizes, uint32."""
    sizes = np.zeros(SLOTS, np.uint32)
    if not planes.changed:
        return b"", sizes
    inner = INNER.get(codec)
    if inner:
        parts = list(wrap(pack(planes, inner=inner, chunks=chunks, width=width)))
    else:
        mask = _masks.get(_mask_size(chunks, width)).view(UINTS[width])
        offsets = ops().expand(planes, chunks=chunks)
        whole = _paint(mask, offsets, planes.values.view(UINTS[width]))
        parts = list(_mask_parts(whole, compressed=codec == "zstd"))
    sizes[: len(parts)] = [len(part) for part in parts]
    return b"".join(parts), sizes


# --- decode -----------------------------------------------------------------------------------


def _read_sizes(reader: SlotReader, lengths: I64, inner: Inner) -> U32:
    """The block table, each size possible for its block."""
    sizes = reader.joined(_SIZES, width=4, count=len(lengths), planes=3).view(np.uint32)
    over = np.flatnonzero(sizes > stock.most(lengths, inner=inner))
    if len(over):
        b = int(over[0])
        raise damaged(
            reader.where, f"block {b} takes {int(sizes[b])} bytes for {int(lengths[b])} of mask"
        )
    return sizes


def read_blocks(
    data: bytes | memoryview, sizes: npt.ArrayLike, *, inner: Inner, size: int, where: str
) -> Blocks:
    """The raw blocks of an encoded frame, its outer stage taken off; blocks are not decoded.

    Args:
        data: The frame's bytes.
        sizes: Its 15 part sizes.
        inner: Bitstream of the blocks.
        size: Bytes of the frame's mask.
        where: What is being read, for the message.

    Raises:
        DamagedObject: Parts and sizes do not fit each other or the mask.
    """
    reader = SlotReader.of(data, sizes, names=PARTS, where=where)
    lengths = block_lengths(size)
    found = _read_sizes(reader, lengths, inner)
    cut = pieces(len(lengths))
    reader.unused([*range(3, FIRST_PIECE), *range(FIRST_PIECE + len(cut), SLOTS)])
    parts = [
        _required(reader, FIRST_PIECE + i, int(found[piece.start : piece.stop].sum()))
        for i, piece in enumerate(cut)
    ]
    return Blocks(inner, size, found, np.concatenate([np.empty(0, np.uint8), *parts]))


def _required(reader: SlotReader, slot: int, size: int) -> U8:
    part = reader.plane(slot, size)
    if part is None and size:
        raise damaged(reader.where, f"{PARTS[slot]!r} of {size} bytes is missing")
    return np.empty(0, np.uint8) if part is None else part


def unpack(blocks: Blocks, *, out: U8, where: str) -> None:
    """Decode all blocks into ``out``, the whole mask.

    Raises:
        DamagedObject: A block is not what its place in the mask calls for.
    """
    at = 0
    for b, size in enumerate(blocks.sizes.tolist()):
        part = out[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]
        if size:
            name = f"{where}, block {b}"
            stock.decompress(blocks.arena[at : at + size], out=part, inner=blocks.inner, where=name)
            if not part.any():
                raise damaged(name, "all zero, which should have been left out")
        else:
            part.fill(0)
        at += size


def _read_mask(reader: SlotReader, out: U8, *, compressed: bool) -> None:
    cut = pieces(len(block_lengths(len(out))))
    reader.unused([*range(FIRST_PIECE), *range(FIRST_PIECE + len(cut), SLOTS)])
    for i, piece in enumerate(cut):
        part = out[piece.start * BLOCK_BYTES : piece.stop * BLOCK_BYTES]
        content = (
            reader.plane(FIRST_PIECE + i, len(part))
            if compressed
            else np.frombuffer(reader.raw(FIRST_PIECE + i), np.uint8)
        )
        if content is None or not len(content):
            part.fill(0)
            continue
        if len(content) != len(part):
            raise damaged(
                reader.where,
                f"{PARTS[FIRST_PIECE + i]!r}: expected {len(part)} bytes, found {len(content)}",
            )
        part[:] = content
        if not part.any():
            raise damaged(reader.where, f"{PARTS[FIRST_PIECE + i]!r}: zeros that belong left out")


def decode_frame(
    data: bytes | memoryview,
    sizes: npt.ArrayLike,
    *,
    codec: Codec,
    chunks: Chunks,
    width: int,
    where: str,
) -> Planes:
    """The changes in one encoded frame of a codec on the XOR mask.

    Raises:
        DamagedObject: Parts, sizes or blocks do not fit each other or the mask. Memory is
            bounded by the frame's raw bytes, whatever the bytes say.
    """
    inner, size = INNER.get(codec), _mask_size(chunks, width)
    blocks = inner and read_blocks(data, sizes, inner=inner, size=size, where=where)
    if blocks and (planes := _sparse(blocks, chunks, width)):
        return planes
    if blocks and has_compiled():
        check_blocks(blocks, where=where)  # stock decoders let some unsound blocks pass
    mask = _masks.get(size)
    if blocks:
        unpack(blocks, out=mask, where=where)
    else:
        reader = SlotReader.of(data, sizes, names=PARTS, where=where)
        _read_mask(reader, mask, compressed=codec == "zstd")
    elements = mask.view(UINTS[width])
    # What differs from zero; fresh zeros that are only read share one page of memory.
    zeros = np.zeros(len(elements), elements.dtype)
    return ops().encode(zeros, elements, chunks=chunks, xor=True)[0]


def check_blocks(blocks: Blocks, *, where: str) -> None:
    """Return only if any decoder can decode ``blocks`` without harm, each to its place's size.

    Raises:
        DamagedObject: A block is damaged; it is named.
    """
    from weightdelta.kernels.cpu_walk import unsound

    lengths = block_lengths(blocks.size)
    found = unsound(blocks.arena, blocks.sizes, lengths=lengths, lz4=blocks.inner == "lz4")
    if found >= 0:
        raise damaged(
            f"{where}, block {found}",
            f"damaged {blocks.inner} block, or not one of {int(lengths[found])} bytes of mask",
        )


def _sparse(blocks: Blocks, chunks: Chunks, width: int) -> Planes | None:
    """The changes without the mask; None without compiled kernels, or for an unsound block."""
    if not has_compiled():
        return None
    from weightdelta.kernels import cpu_sparse

    found = cpu_sparse.changes_of(
        blocks.arena,
        blocks.sizes,
        lengths=block_lengths(blocks.size),
        lz4=blocks.inner == "lz4",
        width=width,
        most=blocks.size // width // GAP_FACTOR,
    )
    return None if found is None else cpu_sparse.planes_of(*found, chunks=chunks)
