"""Content hashes of many pieces of memory: in one long call where they are short."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightdelta.kernels import has_compiled

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

#: Bytes of a piece on average up to which one call for all is faster: the library fills more of
#: a vector with a long piece, but every call of it hands the interpreter's lock around.
SHORT: Final = 64 << 10


def hash_pieces(data: U8, start: I64, size: I64) -> U8:
    """The BLAKE3 of pieces of ``data``.

    Args:
        data: uint8, contiguous.
        start: int64, where each begins.
        size: int64, bytes of each.

    Returns:
        uint8 [pieces, 32].

    Raises:
        ValueError: A piece does not lie in ``data``.
    """
    if len(start) and bool(((start < 0) | (size < 0) | (size > len(data) - start)).any()):
        raise ValueError(f"some piece does not lie in the {len(data)} bytes given")
    if len(start) > 1 and int(size.sum()) <= SHORT * len(start) and has_compiled():
        from weightdelta.kernels.cpu_blake3 import hash_many

        return hash_many(data, start, size)
    view = memoryview(data.data)
    bounds = zip(start.tolist(), (start + size).tolist(), strict=True)
    found = b"".join(blake3(view[low:high]).digest() for low, high in bounds)
    return np.frombuffer(found, np.uint8).reshape(-1, 32)


def hash_each(pieces: Sequence[bytes]) -> U8:
    """The BLAKE3 of each of ``pieces``, uint8 [pieces, 32]."""
    size = np.array([len(piece) for piece in pieces], np.int64)
    if len(pieces) > 1 and int(size.sum()) <= SHORT * len(pieces):
        joined = np.frombuffer(b"".join(pieces), np.uint8)
        return hash_pieces(joined, np.cumsum(size) - size, size)
    found = b"".join(blake3(piece).digest() for piece in pieces)
    return np.frombuffer(found, np.uint8).reshape(-1, 32)
