"""Many frames encoded or decoded by one or two long calls.

Frame by frame, threads would spend their time on handing the interpreter's lock around. What a
batch finds unsound it does not explain: the caller decodes those frames one by one, and the
bad one says what is wrong with it. Every size is checked before anything is allocated by it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightdelta.codecs import zstd, zstd_native
from weightdelta.codecs.blocks import block_lengths
from weightdelta.codecs.names import Values
from weightdelta.codecs.slots import SLOTS
from weightdelta.codecs.stock import Inner, most
from weightdelta.kernels import has_compiled
from weightdelta.kernels.planes import GAP_FACTOR, Chunks, Planes

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

#: First parts of a frame: nibbles, then values or escapes; see ``slots``.
_NIBBLES, _VALUES = 6, 7


def encode_frames(
    planes: Sequence[Planes], *, width: int, values: Values
) -> list[tuple[bytes, npt.NDArray[np.uint32]]] | None:
    """The bytes and part sizes of many frames, as ``sparse.encode_frame`` makes them.

    None when no compiled kernels are there, or Zstd cannot be called from them.
    """
    native = zstd_native.compressor() if has_compiled() else None
    if native is None:
        return None
    from weightdelta.kernels import cpu_batch

    found = cpu_batch.encode(planes, width=width, xor=values == "xor", zstd=native)
    if found is None:
        return None
    data, sizes = found
    cuts = [0, *np.cumsum(sizes.sum(axis=1, dtype=np.int64)).tolist()]
    return [(data[low:high].tobytes(), sizes[i]) for i, (low, high) in enumerate(pairwise(cuts))]


def decode_frames(
    data: U8,
    start: I64,
    sizes: npt.NDArray[np.uint32],
    *,
    chunks: Chunks,
    bounds: I64,
    width: int,
    values: Values,
    changed: I64 | None = None,
    memory: Callable[[int], U8] = lambda nbytes: np.empty(nbytes, np.uint8),
) -> Planes | None:
    """The changes of many frames, one after the other, as the planes of one.

    Args:
        data: uint8, memory that holds the encoded frames.
        start: int64 [frames], where each begins; its parts follow each other.
        sizes: uint32 [frames, 15], bytes of each part.
        chunks: The chunks of all frames.
        bounds: int64 [frames + 1], chunks of each frame.
        width: Bytes of an element.
        values: Whether the values are differences or XORs.
        changed: int64 [frames], changes that each must have; None where nothing says.
        memory: Gives that many bytes for all planes but the counts.

    Returns:
        The planes, or None when some frame is unsound, or no compiled kernels are there, or Zstd
        cannot be called from them.
    """
    native = zstd_native.decompressor() if has_compiled() else None
    if native is None:
        return None
    from weightdelta.kernels import cpu_planes

    table = sizes.astype(np.int64)
    unused = [*range(_VALUES + width, SLOTS), *([_NIBBLES] if values == "xor" else [])]
    ends = start + table.sum(axis=1)
    if bool(table[:, unused].any()) or int(ends.max(initial=0)) > len(data):
        return None
    return cpu_planes.decode(
        data,
        start,
        table,
        length=chunks.length,
        bounds=bounds,
        width=width,
        xor=values == "xor",
        changed=changed,
        zstd=native,
        limit=zstd.MAX_WINDOW,
        memory=memory,
    )


def decode_block_frames(
    data: U8,
    start: I64,
    sizes: npt.NDArray[np.uint32],
    *,
    inner: Inner,
    chunks: Chunks,
    bounds: I64,
    width: int,
    changed: I64,
    memory: Callable[[int], U8],
) -> Planes | None:
    """``decode_frames`` for frames of Snappy or LZ4 blocks, in which less than a sixth has changed.

    ``inner`` is the bitstream of the blocks, ``changed`` (int64 [frames]) the changes that each
    must have; all else is as there.
    """
    native = zstd_native.decompressor() if has_compiled() else None
    table, numel = sizes.astype(np.int64), np.add.reduceat(chunks.length, bounds[:-1])
    ends = start + table.sum(axis=1)
    outside = bool(table[:, 3:7].any()) or int(ends.max(initial=0)) > len(data)
    if native is None or outside or bool((GAP_FACTOR * changed > numel).any()):
        return None
    from weightdelta.kernels import cpu_block_planes

    lengths = [block_lengths(size) for size in (numel * width).tolist()]
    joined = np.concatenate(lengths)
    return cpu_block_planes.decode(
        data,
        start,
        table,
        masks=cpu_block_planes.Masks(
            np.concatenate([[0], np.cumsum([len(part) for part in lengths])]),
            joined,
            most(joined, inner=inner),
            inner == "lz4",
        ),
        chunks=chunks,
        bounds=bounds,
        changed=changed,
        width=width,
        zstd=native,
        limit=zstd.MAX_WINDOW,
        memory=memory,
    )
