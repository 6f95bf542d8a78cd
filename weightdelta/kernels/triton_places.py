"""Where elements of a chunk lie in resident weights, for Triton kernels."""

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import Placed
from weightdelta.kernels.triton_digest import canonical


@triton.jit
def _boxed(index: tensor, table: tensor, dims: tl.constexpr) -> tensor:
    """Element offsets in a resident of canonical indices, and which of them it holds."""
    rest = index
    offset = index * 0
    held = index >= 0
    for back in tl.static_range(dims):
        d = dims - 1 - back
        extent = tl.load(table + d)
        coordinate = rest % extent - tl.load(table + dims + d)
        rest = rest // extent
        held = held & (coordinate >= 0) & (coordinate < tl.load(table + 2 * dims + d))
        offset += coordinate * tl.load(table + 3 * dims + d)
    return offset, held


@triton.jit
def places(
    p: tensor, limit: tensor, c: tensor, skip: tensor, run: tensor, stride: tensor,
    address: tensor, first: tensor,
    box: tensor, boxes: tensor, kind: tl.constexpr, width: tl.constexpr, dims: tl.constexpr,
) -> tensor:  # fmt: skip
    """Pointers to elements ``p`` of chunk ``c``, and which of them are held; ``dims`` 0: all."""
    index = canonical(p, limit, skip, run, stride)
    origin, start = tl.load(address + c), tl.load(first + c)
    return pointers(p, index, c, origin, start, box, boxes, kind, width, dims)


@triton.jit
def pointers(
    p: tensor, index: tensor, c: tensor, address: tensor, first: tensor,
    box: tensor, boxes: tensor, kind: tl.constexpr, width: tl.constexpr, dims: tl.constexpr,
) -> tensor:  # fmt: skip
    """``places`` of elements whose canonical indices are known, with what the chunk has loaded."""
    index += first
    held = p >= 0
    offset = index
    if dims > 0:
        row = tl.load(box + c)
        if row >= 0:
            offset, held = _boxed(index, boxes + row.to(tl.int64) * 4 * dims, dims)
    byte = address + offset * width
    return byte.to(tl.pointer_type(kind)), held


def tables(placed: Placed) -> tuple[torch.Tensor, torch.Tensor, int]:
    """``box``, ``boxes`` and the number of dimensions; 0 when all residents are plain."""
    if placed.box is None or placed.boxes is None:
        return placed.tensor, placed.first, 0
    return placed.box, placed.boxes, int(placed.boxes.shape[2])
