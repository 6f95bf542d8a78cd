"""A frame's mask as raw blocks, encoded on the GPU from the list of its changes.

What ``blocks.pack`` does on a CPU: the same rule says which blocks are written as zero-run
blocks, byte for byte the same ones; the others take nvCOMP's encoder instead of cramjam's, so
their bytes differ and their content does not.
"""

import numpy as np
import numpy.typing as npt
import torch

from weightdelta.codecs.blocks import Blocks, block_lengths
from weightdelta.codecs.nvcomp import BlockCodec
from weightdelta.kernels.planes import BLOCK_BYTES, GAP_FACTOR
from weightdelta.kernels.triton_blocks import zero_runs

U8 = npt.NDArray[np.uint8]


def pack(offsets: torch.Tensor, values: torch.Tensor, *, size: int, codec: BlockCodec) -> Blocks:
    """Changes of a frame as raw blocks of its XOR mask; waits for the device.

    Args:
        offsets: int32, element offset of each change in the frame, ascending, on a CUDA device.
        values: XOR of each change: uint8, int16, int32 or int64.
        size: Bytes of the mask.
        codec: Encoder of dense blocks; its bitstream is that of all.

    Raises:
        DeviceLost: nvCOMP failed.
    """
    width = values.element_size()
    lengths = block_lengths(size)
    each = BLOCK_BYTES // width
    starts = torch.arange(len(lengths) + 1, device=offsets.device, dtype=offsets.dtype) * each
    first = torch.searchsorted(offsets, starts)
    changed = first.diff().cpu().numpy()
    few = GAP_FACTOR * changed * width < lengths
    sparse, dense = np.flatnonzero(few & (changed > 0)), np.flatnonzero(~few)
    numbers = torch.from_numpy(sparse).to(offsets.device)
    arena, found = zero_runs(offsets, values, blocks=numbers, size=size, lz4=codec.inner == "lz4")
    sizes = np.zeros(len(lengths), np.uint32)
    sizes[sparse] = found.cpu().numpy()
    ours = arena.cpu().numpy()
    if not len(dense):
        return Blocks(codec.inner, size, sizes, ours)
    mask = _painted(offsets, values, dense=dense, each=each)
    theirs, taken = codec.encode(mask.view(torch.uint8)[: int(lengths[dense].sum())])
    parts = _cut(ours, sparse, sizes[sparse]) | _cut(theirs.cpu().numpy(), dense, taken)
    sizes[dense] = taken
    return Blocks(codec.inner, size, sizes, np.concatenate([parts[b] for b in sorted(parts)]))


def _painted(
    offsets: torch.Tensor, values: torch.Tensor, *, dense: npt.NDArray[np.int64], each: int
) -> torch.Tensor:
    """The mask of dense blocks, one after the other; only the last may be short."""
    numbers = torch.from_numpy(dense).to(offsets.device)
    block = offsets.long() // each
    row = torch.searchsorted(numbers, block).clamp_(max=len(dense) - 1)
    mine = numbers[row] == block
    mask = torch.zeros(len(dense) * each, dtype=values.dtype, device=values.device)
    mask[(row * each + offsets.long() % each)[mine]] = values[mine]
    return mask


def _cut(
    arena: U8, numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.integer]
) -> dict[int, U8]:
    """Blocks by their numbers."""
    ends = np.cumsum(sizes, dtype=np.int64)[:-1]
    return dict(zip(numbers.tolist(), np.split(arena, ends), strict=False))
