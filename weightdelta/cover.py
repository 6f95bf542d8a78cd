"""Whether segments hold every element of every tensor exactly once.

Segments are taken as boxes of a matrix, for which the test is exact and fast. Where a tensor
mixes strides there is no one matrix; its longer strides are then taken row by row, and once
that would be many rows, a fingerprint decides: work and memory follow the number of segments,
never the number of rows that a few bytes can claim.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightdelta.sharding.explicit import I64, Boxes, first_miscovered, on_grid

#: The most rows of mixed strides that are looked at one by one.
MOST_LOOSE_ROWS: Final = 1 << 16
_PRIME: Final = (1 << 127) - 1


class Columns(NamedTuple):
    """Segments as int64 columns; each lies within its tensor, its rows within a grid of it."""

    tensor: I64
    first: I64
    rows: I64
    run: I64
    stride: I64

    def take(self, mask: npt.NDArray[np.bool_]) -> "Columns":
        """The segments under a mask."""
        return Columns(*(column[mask] for column in self))


def miscovered(segments: Columns, *, sizes: I64, most_loose: int = MOST_LOOSE_ROWS) -> int | None:
    """The first tensor that the segments do not cover exactly once, or None.

    Args:
        segments: All segments.
        sizes: int64 [tensors], elements of each tensor; fewer than 2^60 in all.
        most_loose: The most rows of mixed strides that are looked at one by one.
    """
    several = segments.rows > 1
    # Each tensor is seen as a matrix whose rows are its least stride.
    grid = np.maximum(sizes, 1)
    np.minimum.at(grid, segments.tensor[several], segments.stride[several])
    loose = several & (segments.stride != grid[segments.tensor])
    mixed = np.zeros(len(sizes), np.bool_)
    if int(segments.rows[loose].sum()) > most_loose:
        mixed[segments.tensor[loose]] = True
    apart = mixed[segments.tensor]
    found = _first_uneven(segments.take(apart), sizes)
    rest = np.where(mixed, 0, sizes)
    boxes = _boxes(segments.take(~apart), loose[~apart], grid)
    extent = np.stack([np.where(rest > 0, rest // grid, 0), grid], axis=1)
    both = (found, first_miscovered(boxes, extent=extent))
    return min((tensor for tensor in both if tensor is not None), default=None)


def _boxes(segments: Columns, loose: npt.NDArray[np.bool_], grid: I64) -> Boxes:
    """Segments as boxes: single runs that span rows become up to three."""
    tensor, low, size = _runs(segments, loose)
    boxes = on_grid(tensor, low, size, grid[tensor])
    wide = segments.take((segments.rows > 1) & ~loose)
    row, column = np.divmod(wide.first, wide.stride)
    return Boxes(
        np.concatenate([boxes.tensor, wide.tensor]),
        np.concatenate([boxes.offset, np.stack([row, column], axis=1)]),
        np.concatenate([boxes.shape, np.stack([wide.rows, wide.run], axis=1)]),
    )


def _runs(segments: Columns, loose: npt.NDArray[np.bool_]) -> tuple[I64, I64, I64]:
    """Tensor, first element and length of every single run and of every row of ``loose``."""
    single = np.flatnonzero(segments.rows == 1)
    several = np.flatnonzero(loose)
    rows = segments.rows[several]
    segment = np.repeat(several, rows)
    row = np.arange(len(segment)) - np.repeat(np.cumsum(rows) - rows, rows)
    low = segments.first[segment] + row * segments.stride[segment]
    both = np.concatenate([single, segment])
    first = np.concatenate([segments.first[single], low])
    return segments.tensor[both], first, segments.run[both]


def _first_uneven(segments: Columns, sizes: I64) -> int | None:
    """The first of the segments' tensors that they do not cover exactly once, or None.

    A cover is the polynomial in which x^e counts how often element e is held; it must be
    1 + x + .. + x^(n - 1). Both sides are compared at one point modulo a prime: they agree by
    chance with a probability below 2^-67. The point follows from the segments themselves, so
    nobody can choose segments to fit it.
    """
    if not len(segments.tensor):
        return None
    seed = blake3(b"".join(column.astype("<i8").tobytes() for column in segments)).digest()
    powers = _Powers(int.from_bytes(seed, "little") % _PRIME)
    total: dict[int, int] = {}
    for tensor, first, rows, run, stride in zip(*(c.tolist() for c in segments), strict=True):
        part = pow(powers.x, first, _PRIME) * powers.series(stride, rows) * powers.series(1, run)
        total[tensor] = (total.get(tensor, 0) + part) % _PRIME
    uneven = (t for t in sorted(total) if total[t] != powers.series(1, int(sizes[t])))
    return next(uneven, None)


class _Powers:
    """Sums of powers of one number modulo the prime."""

    def __init__(self, x: int) -> None:
        self.x = x
        self._known: dict[tuple[int, int], int] = {}

    def series(self, step: int, count: int) -> int:
        """``sum of x^(step * i) for i < count``."""
        key = (step, count)
        if key not in self._known:
            y = pow(self.x, step, _PRIME)
            top = pow(y, count, _PRIME) - 1
            self._known[key] = count if y == 1 else top * pow(y - 1, -1, _PRIME) % _PRIME
        return self._known[key]
