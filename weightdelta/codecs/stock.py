"""Stock Snappy and LZ4, raw blocks of known size, by cramjam: the only door to it."""

from typing import Any, Final, Literal, TypeVar

import cramjam
import numpy as np
import numpy.typing as npt

from weightdelta.codecs.slots import damaged

Inner = Literal["snappy", "lz4"]
U8 = npt.NDArray[np.uint8]
#: One length, or int64 many.
Length = TypeVar("Length", int, npt.NDArray[np.int64])

# cramjam's stubs know no numpy arrays; its functions take anything with a buffer.
_snappy: Final[Any] = cramjam.snappy
_lz4: Final[Any] = cramjam.lz4


def most(length: Length, *, inner: Inner) -> Length:
    """Most bytes that a block of ``length`` bytes of content may take; or each of many."""
    return length + (length // 6 + 32 if inner == "snappy" else length // 255 + 16)


def compress(block: U8, *, inner: Inner) -> U8:
    """One raw block of ``block``."""
    if inner == "snappy":
        found = _snappy.compress_raw(block)
    else:
        found = _lz4.compress_block(block, store_size=False)
    return np.frombuffer(found, np.uint8)


def decompress(block: U8, *, out: U8, inner: Inner, where: str) -> None:
    """Decode one raw block into exactly ``out``; the decoders write nowhere else.

    Raises:
        DamagedObject: Not such a block, or not one of this size.
    """
    try:
        if inner == "snappy":
            done = _snappy.decompress_raw_into(block, out)
        else:
            done = _lz4.decompress_block_into(block, out, output_len=len(out))
    except cramjam.DecompressionError as error:
        raise damaged(where, f"damaged {inner} block ({error})") from error
    if done != len(out):
        raise damaged(where, f"expected {len(out)} bytes of mask, found {done}")
