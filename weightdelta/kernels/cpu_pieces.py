"""Where masks are cut into pieces that lie in one stretch of weights, compiled."""

from typing import Any

import numpy as np
import numpy.typing as npt

from weightdelta.kernels.compiled import jit
from weightdelta.kernels.planes import Chunks

I64 = npt.NDArray[np.int64]


@jit
def _cut(
    start: Any, length: Any, skip: Any, run: Any, stride: Any, kept: Any, block: Any, fill: Any,
    at: Any, size: Any, chunk: Any, index: Any,
) -> Any:  # fmt: skip
    """Count the pieces, and note them if ``fill``."""
    found = 0
    for c in range(len(start)):
        rows = stride[c] != run[c]
        row = skip[c] // run[c]
        column, p = skip[c] - row * run[c], 0
        while p < length[c]:
            here = start[c] + p
            end = min(length[c], (here // block + 1) * block - start[c])
            if rows:
                end = min(end, p + run[c] - column)
            if kept[here // block]:
                if fill:
                    at[found], size[found], chunk[found] = here, end - p, c
                    index[found] = row * stride[c] + column
                found += 1
            column += end - p
            if rows and column == run[c]:
                row, column = row + 1, 0
            p = end
    return found


def cut(chunks: Chunks, *, kept: npt.NDArray[np.bool_], block: int) -> tuple[I64, I64, I64, I64]:
    """Stretches of elements that lie in one chunk, one row and one block, in order.

    Args:
        chunks: Of one frame; together they are all of it.
        kept: Whether pieces of a block are wanted, one entry a block.
        block: Elements of a block.

    Returns:
        First element, elements, chunk, and index in the chunk's tensor from the segment's first
        element on, int64 each.
    """
    columns = (chunks.start, chunks.length, chunks.skip, chunks.run, chunks.stride)
    none = np.empty(0, np.int64)
    count = _cut(*columns, kept, block, False, none, none, none, none)
    at, size, chunk, index = (np.empty(count, np.int64) for _ in range(4))
    _cut(*columns, kept, block, True, at, size, chunk, index)
    return at, size, chunk, index
