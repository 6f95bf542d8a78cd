"""Content hashes of many pieces of memory."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

#: Bytes of a piece on average up to which threads take turns: such a piece is hashed sooner than
#: the interpreter's lock, which every call gives back, comes round among many that want it.
SHORT: Final = 64 << 10
_turn: Final = threading.Lock()


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
    view, ends = memoryview(data.data), (start + size).tolist()
    pieces = [view[low:high] for low, high in zip(start.tolist(), ends, strict=True)]
    return _hashes(pieces, int(size.sum()))


def hash_each(pieces: Sequence[bytes]) -> U8:
    """The BLAKE3 of each of ``pieces``, uint8 [pieces, 32]."""
    return _hashes(pieces, sum(map(len, pieces)))


def _hashes(pieces: Sequence[bytes | memoryview], total: int) -> U8:
    short = len(pieces) > 1 and total <= SHORT * len(pieces)
    with _turn if short else nullcontext():
        found = b"".join(blake3(piece).digest() for piece in pieces)
    return np.frombuffer(found, np.uint8).reshape(-1, 32)
