"""What kernels exchange: where a frame's chunks lie, and the planes of its changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Elements in a chunk; the last chunk of a segment may be shorter.
CHUNK: Final = 65536
#: A chunk with k changes of n elements is coded as gaps when GAP_FACTOR * k < n.
GAP_FACTOR: Final = 6
#: Bytes of a XOR mask in a block; the last block of a frame may be shorter. A whole number of
#: elements of any width.
BLOCK_BYTES: Final = 65536
#: Parts that an encoded frame may have; a part of size 0 is absent.
SLOTS: Final = 15
#: Part in which the first piece of a frame's blocks lies, and how many there are at most.
FIRST_PIECE: Final = 7
MOST_PIECES: Final = 8
#: Blocks in a piece, unless a frame has more than fit in eight.
PIECE_BLOCKS: Final = 64

Elements = npt.NDArray[np.unsignedinteger[Any]]

UINTS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


#: Planes that share memory start at multiples of this [B].
_ALIGN: Final = 64


def in_one_piece(
    count: Sequence[int], width: int, memory: Callable[[int], npt.NDArray[np.uint8]]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8], Elements]:
    """Room for gaps, bitmap and values, ``count`` of each, in one piece of memory.

    Args:
        count: How many.
        width: Bytes of a value.
        memory: Gives that many bytes, aligned for any element.
    """
    sizes = 2 * count[0], count[1], width * count[2]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
    whole = memory(starts[-1])
    gaps, bitmap, values = (whole[s : s + n] for s, n in zip(starts, sizes, strict=False))
    return gaps.view(np.uint16), bitmap, values.view(UINTS[width])


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one frame, one array entry each.

    A chunk covers elements ``[start, start + length)`` of the frame's buffer. Its element ``p``
    is element ``q = skip + p`` of its segment, whose canonical index in the tensor is
    ``first + (q // run) * stride + q % run``. ``key`` is ``seed_t + first`` modulo 2^64, so the
    digest's index term is ``key + (q // run) * stride + q % run``.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    skip: npt.NDArray[np.int64]
    run: npt.NDArray[np.int64]
    stride: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Planes:
    """The changes of one frame, chunk after chunk, ascending within a chunk.

    Attributes:
        counts: uint32, changes in each chunk.
        gaps: uint16, of chunks in gap form: unchanged elements since the previous change (or
            since the start of the chunk).
        bitmap: uint8, of chunks in bitmap form: ceil(length / 8) bytes each, lowest bit first.
        values: one unsigned integer of the element's width per change: ``new - old`` modulo
            2^(8 * width), or ``new xor old``.
    """

    counts: npt.NDArray[np.uint32]
    gaps: npt.NDArray[np.uint16]
    bitmap: npt.NDArray[np.uint8]
    values: Elements

    @property
    def changed(self) -> int:
        """Number of changed elements."""
        return len(self.values)

    def split(self, length: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64]) -> "list[Planes]":
        """The planes of runs of chunks, which share memory with these.

        Args:
            length: int64, elements of each chunk.
            bounds: int64 [runs + 1]; run i is chunks ``bounds[i]:bounds[i + 1]``.
        """
        k = self.counts.astype(np.int64)
        sparse, part = GAP_FACTOR * k < length, k < length
        sizes = (np.where(sparse & part, k, 0), np.where(~sparse & part, (length + 7) // 8, 0), k)
        gap, bit, value = (np.concatenate([[0], np.cumsum(s)])[bounds].tolist() for s in sizes)
        at = bounds.tolist()
        return [
            Planes(
                self.counts[at[i] : at[i + 1]],
                self.gaps[gap[i] : gap[i + 1]],
                self.bitmap[bit[i] : bit[i + 1]],
                self.values[value[i] : value[i + 1]],
            )
            for i in range(len(at) - 1)
        ]
