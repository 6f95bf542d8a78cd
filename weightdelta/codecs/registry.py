"""Frames to bytes and back under any codec, by its name."""

import numpy as np
import numpy.typing as npt

from weightdelta.codecs import blocks, sparse
from weightdelta.codecs.names import DEFAULT, Codec, Values, takes
from weightdelta.codecs.slots import damaged
from weightdelta.errors import InputError
from weightdelta.kernels.planes import Chunks, Planes


def encode_frame(
    planes: Planes, *, codec: Codec, chunks: Chunks, width: int, values: Values
) -> tuple[bytes, npt.NDArray[np.uint32]]:
    """The bytes of one frame, and the sizes of its 15 parts, uint32.

    Args:
        planes: Changes of the frame; nonzero values of ``width`` bytes.
        codec: How they become bytes.
        chunks: The frame's chunks.
        width: Bytes of an element.
        values: Whether the values are differences or XORs.

    Raises:
        InputError: The codec codes the XOR mask, and the values are differences.
    """
    if not takes(codec, values):
        raise InputError(f"codec {codec!r} codes the XOR mask: set `values: xor`")
    if codec == DEFAULT:
        return sparse.encode_frame(planes, width=width, values=values)
    return blocks.encode_frame(planes, codec=codec, chunks=chunks, width=width)


def decode_frame(
    data: bytes | memoryview,
    sizes: npt.ArrayLike,
    *,
    codec: Codec,
    chunks: Chunks,
    width: int,
    values: Values,
    where: str,
) -> Planes:
    """The changes in one encoded frame, sound enough for any kernel.

    Args:
        data: The frame's bytes.
        sizes: The sizes of its 15 parts.
        codec: How it was encoded.
        chunks: The frame's chunks.
        width: Bytes of an element.
        values: Whether the values are differences or XORs.
        where: What is being read, for the message.

    Raises:
        DamagedObject: Sizes, parts and chunks do not fit each other. Memory is bounded by the
            frame's raw bytes, whatever the bytes say.
    """
    if not takes(codec, values):
        raise damaged(where, f"codec {codec!r} needs values 'xor', found {values!r}")
    if codec == DEFAULT:
        return sparse.decode_frame(
            data, sizes, chunks=chunks, width=width, values=values, where=where
        )
    return blocks.decode_frame(data, sizes, codec=codec, chunks=chunks, width=width, where=where)
