"""Encoded frames to raw Snappy or LZ4 blocks, on a receiver's CPU while it serves.

What goes over the network need not be what a GPU's decompression engine reads: a run published
as ``sparse+zstd`` with ``values: xor`` becomes the very blocks that ``snappy+zstd`` or
``lz4+zstd`` would have carried, and a zero-run block costs less than a memcpy of its mask.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from weightdelta.codecs.blocks import Blocks, Inner, block_lengths, pack
from weightdelta.codecs.names import Codec, Values
from weightdelta.codecs.registry import decode_frame
from weightdelta.errors import InputError
from weightdelta.kernels.planes import BLOCK_BYTES, Chunks

I64 = npt.NDArray[np.int64]

#: Alignment of blocks in device memory that every decoder accepts [B].
ALIGN: Final = 16


class Staged(NamedTuple):
    """Blocks laid out for a batched device decoder.

    Attributes:
        buffer: uint8, all blocks, each at a multiple of the alignment.
        offsets, sizes: int64, where each block lies in ``buffer`` and its bytes.
        targets, lengths: int64, where each goes in the mask and how many bytes it gives. What
            no block covers is zero.
    """

    buffer: npt.NDArray[np.uint8]
    offsets: I64
    sizes: I64
    targets: I64
    lengths: I64


def transcode(
    data: bytes | memoryview,
    sizes: npt.ArrayLike,
    *,
    codec: Codec,
    inner: Inner,
    chunks: Chunks,
    width: int,
    values: Values,
    where: str,
) -> Blocks:
    """The raw blocks of a frame's XOR mask, whatever codec it came in.

    Args:
        data: The frame's bytes, verified.
        sizes: The sizes of its 15 parts.
        codec: How it was encoded.
        inner: Bitstream of the blocks to make.
        chunks: The frame's chunks.
        width: Bytes of an element.
        values: Form of the values; differences have no mask without the old weights.
        where: What is being read, for the message.

    Raises:
        InputError: The values are differences.
        DamagedObject: The frame is damaged.
    """
    if values != "xor":
        raise InputError(
            f"{where}: differences cannot become blocks of the XOR mask without the old weights; "
            "publish with `values: xor`"
        )
    planes = decode_frame(
        data, sizes, codec=codec, chunks=chunks, width=width, values=values, where=where
    )
    return pack(planes, inner=inner, chunks=chunks, width=width)


def staged(blocks: Blocks, *, align: int = ALIGN) -> Staged:
    """Lay blocks out as batched decoders take them: one buffer, offsets and sizes."""
    present = np.flatnonzero(blocks.sizes)
    sizes = blocks.sizes[present].astype(np.int64)
    room = -(-sizes // align) * align
    offsets = np.cumsum(room) - room
    buffer = np.zeros(int(room.sum()), np.uint8)
    at = 0
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        buffer[offset : offset + size] = blocks.arena[at : at + size]
        at += size
    lengths = block_lengths(blocks.size)[present]
    return Staged(buffer, offsets, sizes, present * BLOCK_BYTES, lengths)
