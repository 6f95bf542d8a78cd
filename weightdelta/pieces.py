"""Where the masks of frames lie in resident weights, and how frames share a slot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightdelta.codecs.blocks import Blocks
from weightdelta.codecs.transcode import ALIGN
from weightdelta.kernels import has_compiled
from weightdelta.kernels.planes import BLOCK_BYTES, Chunks

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MaskFrame:
    """A frame's mask as raw blocks, and where its chunks lie in resident weights.

    Attributes:
        blocks: The mask.
        width: Bytes of an element.
        chunks: The frame's chunks.
        address: int64 [chunks], byte address of element 0 of the chunk's tensor, which is resident
            whole and contiguous.
        first: int64 [chunks], canonical index of the segment's element 0.
        tensor: int32 [chunks], the tensor's row in the caller's digest table.
        where: What messages call the frame.
        changed: Elements that differ, for reports.
    """

    blocks: Blocks
    width: int
    chunks: Chunks
    address: I64
    first: I64
    tensor: I32
    where: str
    changed: int = 0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Contiguous stretches of masks, none longer than a block, one array entry each.

    Attributes:
        begin: int64, first byte in the mask.
        address: int64, byte address of its first element in the weights.
        size: int32, bytes.
        key: uint64, the digest's index term of its first element.
        tensor: int32, row in the digest table.
    """

    begin: I64
    address: I64
    size: I32
    key: U64
    tensor: I32


def _run_cuts(chunks: Chunks) -> Iterator[I64]:
    """Where rows of boxes end within chunks, in elements of the frame."""
    q = chunks.skip + chunks.length
    for c in np.flatnonzero((chunks.stride != chunks.run) & (q > chunks.run)).tolist():
        run, skip = int(chunks.run[c]), int(chunks.skip[c])
        inner = np.arange((skip // run + 1) * run, skip + int(chunks.length[c]), run)
        yield inner - skip + chunks.start[c]


def _cut(chunks: Chunks, kept: npt.NDArray[np.bool_], block: int) -> tuple[I64, ...]:
    """What ``kernels.cpu_pieces.cut`` gives, in numpy."""
    total = int(chunks.length.sum())
    blocks = np.arange(0, total, block)
    at = np.unique(np.concatenate([chunks.start, blocks, *_run_cuts(chunks)]))
    at = at[at < total]  # an empty segment may begin at the end
    size = np.diff(at, append=total)
    wanted = kept[at // block]
    at, size = at[wanted], size[wanted]
    c = np.searchsorted(chunks.start, at, side="right") - 1
    q = chunks.skip[c] + at - chunks.start[c]
    return at, size, c, q // chunks.run[c] * chunks.stride[c] + q % chunks.run[c]


def pieces_of(frame: MaskFrame) -> Pieces:
    """The pieces of a frame's blocks that are not all zero."""
    chunks, width = frame.chunks, frame.width
    kept, block = frame.blocks.sizes > 0, BLOCK_BYTES // width
    if has_compiled():
        from weightdelta.kernels.cpu_pieces import cut

        at, size, c, index = cut(chunks, kept=kept, block=block)
    else:
        at, size, c, index = _cut(chunks, kept, block)
    return Pieces(
        at * width,
        frame.address[c] + (frame.first[c] + index) * width,
        (size * width).astype(np.int32),
        chunks.key[c] + index.astype(np.uint64),
        frame.tensor[c],
    )


def grouped(
    frames: Sequence[MaskFrame], slot_bytes: int, *, pieces: Sequence[int] = (), most: int = 0
) -> list[list[MaskFrame]]:
    """Consecutive frames of one width, as many as a slot holds, and at most ``most`` pieces."""
    groups: list[list[MaskFrame]] = []
    room = left = 0
    for frame, count in zip(frames, pieces or [0] * len(frames), strict=True):
        need = whole(frame.blocks.size)
        new = not groups or groups[-1][0].width != frame.width
        if new or need > room or count > left:
            groups.append([])
            room, left = max(slot_bytes, need), max(most, count)
        groups[-1].append(frame)
        room, left = room - need, left - count
    return groups


def whole(size: int) -> int:
    """Bytes that a mask takes in a slot: the next one begins at a block's boundary."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def room_of(frames: Sequence[MaskFrame]) -> int:
    """Bytes that the blocks of frames take, each at a multiple of ``ALIGN``."""
    return sum(int((-(-f.blocks.sizes.astype(np.int64) // ALIGN) * ALIGN).sum()) for f in frames)
