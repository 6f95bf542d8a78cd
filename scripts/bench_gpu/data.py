"""Weights before and after on a GPU, and change lists at the size of a rank, made there."""

from typing import Final

import numpy as np
import torch

from weightdelta.kernels.device import INTS, DevicePlanes
from weightdelta.kernels.planes import CHUNK, Chunks

#: Rows and columns of the matrices of the model that the bench stands in for, and of their tiles:
#: 16 MiB of bf16.
MATRIX: Final = 8192
TILE: Final = (4096, 2048)
_SLICE: Final = 1 << 28


def random_window(nbytes: int, *, width: int) -> torch.Tensor:
    """Random bits."""
    lanes = torch.empty(nbytes // 8, dtype=torch.int64, device="cuda")
    lanes.random_(-(2**63), 2**63 - 1)
    return lanes.view(INTS[width])


def changed(old: torch.Tensor, *, density: float, seed: int) -> torch.Tensor:
    """A copy of which each element differs by one, up or down, with probability ``density``."""
    random = torch.Generator("cuda").manual_seed(seed)
    new = old.clone()
    for part in new.split(_SLICE):
        draw = torch.rand(len(part), generator=random, device="cuda")
        part += (draw < density / 2).to(part.dtype)
        part -= (draw > 1 - density / 2).to(part.dtype)
    return new


def flat_chunks(count: int, *, frame: int) -> Chunks:
    """Chunks of frames of ``frame`` contiguous elements each, all of one tensor."""
    start = np.arange(0, count, CHUNK)
    skip = start % frame
    wide = np.full(len(start), 2**40)
    key = (start - skip + 12345).astype(np.uint64)
    return Chunks(start, np.minimum(CHUNK, count - start), key, skip, wide, wide)


def tiled_chunks(matrices: int) -> tuple[Chunks, np.ndarray]:
    """Chunks of all tiles of square matrices, and the canonical index of each tile's first."""
    rows, columns = TILE
    per_tile = rows * columns // CHUNK
    grid = [(r, c) for r in range(0, MATRIX, rows) for c in range(0, MATRIX, columns)]
    firsts = np.array([r * MATRIX + c for r, c in grid])
    first = np.tile(np.repeat(firsts, per_tile), matrices)
    count = len(first)
    matrix = np.repeat(np.arange(matrices), len(grid) * per_tile)
    key = (first + 7919 * matrix).astype(np.uint64)
    skip = np.tile(np.arange(per_tile) * CHUNK, count // per_tile)
    start = np.arange(count) * CHUNK
    length = np.full(count, CHUNK)
    return Chunks(start, length, key, skip, np.full(count, columns), np.full(count, MATRIX)), first


def random_planes(chunks: int, *, each: int, seed: int) -> DevicePlanes:
    """Planes of full chunks in gap form with about ``each`` differences of one, bf16.

    Positions are drawn without replacement; counts vary like those of independent changes.
    """
    random = torch.Generator("cuda").manual_seed(seed)
    most = each + 4 * int(each**0.5) + 2
    counts, gaps = [], []
    for low in range(0, chunks, 1 << 17):
        some = min(1 << 17, chunks - low)
        count = torch.poisson(
            torch.full((some,), float(each), device="cuda"), generator=random
        ).clamp(1, most)
        shape = (some, most)
        places = torch.randint(
            0, CHUNK - most, shape, dtype=torch.int32, device="cuda", generator=random
        )
        lane = torch.arange(most, dtype=torch.int32, device="cuda")
        kept = lane < count[:, None]
        places.masked_fill_(~kept, CHUNK)
        places = places.sort(1).values + lane
        before = torch.cat([torch.full_like(places[:, :1], -1), places[:, :-1]], 1)
        gaps.append((places - before - 1)[kept].to(torch.int16))
        counts.append(count.to(torch.int32))
    gap = torch.cat(gaps)
    values = torch.randint(0, 2, (len(gap),), dtype=torch.int16, device="cuda", generator=random)
    none = torch.empty(0, dtype=torch.uint8, device="cuda")
    return DevicePlanes(torch.cat(counts), gap, none, values * 2 - 1)
