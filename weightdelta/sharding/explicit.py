"""Boxes as data: what one rank holds, and the arithmetic of many boxes at once.

Arrays of boxes (``Boxes``) have one row a box and D columns, where D is the largest number of
dimensions in the layout (at least 1). Tensors with fewer dimensions are aligned to the right:
the missing leading dimensions have offset 0 and size 1. So C order, and with it every canonical
index, is the same with and without them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Final

import numpy as np
import numpy.typing as npt

from weightdelta.errors import LayoutMismatch
from weightdelta.layout import Box, Layout

I64 = npt.NDArray[np.int64]

#: Bound on elements (and grid points) of all tensors together, so that keys fit in int64.
MOST_ELEMENTS: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one rank holds of one tensor.

    Attributes:
        name: The tensor's canonical name, or an alias of it.
        dtype: Its safetensors dtype.
        extent: Shape of the global tensor, in elements.
        box: The part held, in elements; it may be empty.
    """

    name: str
    dtype: str
    extent: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Boxes:
    """Many boxes: ``tensor`` int64 [n], ``offset`` and ``shape`` int64 [n, D]."""

    tensor: I64
    offset: I64
    shape: I64

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, tensor: I64, boxes: Sequence[Box], *, ndim: int) -> "Boxes":
        """Columns of ``boxes``, of at most ``ndim`` dimensions each."""
        zeros, ones = _pads(0, ndim), _pads(1, ndim)
        offset = _table((zeros[len(b.offset)] + b.offset for b in boxes), len(boxes), ndim)
        shape = _table((ones[len(b.shape)] + b.shape for b in boxes), len(boxes), ndim)
        return cls(tensor, offset, shape)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Boxes":
        """The boxes at ``rows`` (positions or a mask)."""
        return Boxes(self.tensor[rows], self.offset[rows], self.shape[rows])

    @property
    def numel(self) -> I64:
        """int64 [n], elements in each box."""
        numel: I64 = np.prod(self.shape, axis=1, dtype=np.int64)
        return numel

    def first(self, *, extent: I64) -> I64:
        """int64 [n], canonical index of each box's first element; ``extent`` is [tensors, D]."""
        first: I64 = np.sum(self.offset * strides(extent)[self.tensor], axis=1, dtype=np.int64)
        return first


def _pads(value: int, ndim: int) -> list[tuple[int, ...]]:
    return [(value,) * (ndim - n) for n in range(ndim + 1)]


def _table(rows: Iterable[tuple[int, ...]], count: int, ndim: int) -> I64:
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=count * ndim)
    return flat.reshape(count, ndim)


def extents(layout: Layout) -> I64:
    """int64 [tensors, D]: every tensor's extent in elements, aligned to the right.

    Raises:
        LayoutMismatch: The tensors together have about 2^60 elements or more.
    """
    sizes = [t.extent for t in layout.tensors]
    ndim = max(1, max(map(len, sizes), default=0))
    points = sum(math.prod(n + 1 for n in size) for size in sizes)
    if points >= MOST_ELEMENTS:
        raise LayoutMismatch(f"layout: {points} elements in all; fewer than 2^60 are supported")
    ones = _pads(1, ndim)
    return _table((ones[len(s)] + s for s in sizes), len(sizes), ndim)


def strides(extent: I64) -> I64:
    """int64 [tensors, D]: elements between neighbours along each dimension, in C order."""
    inner = np.ones_like(extent)
    inner[:, :-1] = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
    return inner


def cut_range(shape: tuple[int, ...], *, low: int, high: int) -> Iterator[Box]:
    """The fewest boxes that make up elements [low, high) of a block in C order, ascending."""
    if low >= high:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    head, tail = -(-low // inner), high // inner
    if head > tail:
        yield from _within(shape, head - 1, low, high)
        return
    yield from _within(shape, head - 1, low, head * inner)
    if head < tail:
        rest = shape[1:]
        yield Box((head, *(0 for _ in rest)), (tail - head, *rest))
    yield from _within(shape, tail, tail * inner, high)


def _within(shape: tuple[int, ...], row: int, low: int, high: int) -> Iterator[Box]:
    """Elements [low, high), all of them in one row."""
    base = row * math.prod(shape[1:])
    for box in cut_range(shape[1:], low=low - base, high=high - base):
        yield Box((row, *box.offset), (1, *box.shape))


def first_miscovered(boxes: Boxes, *, extent: I64) -> int | None:
    """The first tensor that the boxes do not cover exactly once, or None.

    Boxes must lie within their tensors and be free of empty ones. The test is exact. How often
    a point is covered is a function on the grid, and it is known from its mixed differences:
    each box adds +-1 at its corners. The boxes cover a tensor once if and only if their corners
    cancel to those of the whole tensor. Dimensions that no box cuts are left out.
    """
    tensors = len(extent)
    count = np.bincount(boxes.tensor, minlength=tensors)
    split = np.zeros((tensors, extent.shape[1]), dtype=np.bool_)
    partial = boxes.shape != extent[boxes.tensor]
    for d in range(extent.shape[1]):
        split[boxes.tensor[partial[:, d]], d] = True
    dims = split.sum(axis=1)
    expected = np.prod(extent, axis=1, dtype=np.int64) > 0
    bad = np.flatnonzero((count != expected) & ((dims == 0) | ~expected))
    found = [int(bad[0])] if len(bad) else []
    for p in set(dims[dims > 0].tolist()):
        wrong = _first_uncancelled(boxes, np.flatnonzero(dims == p), split, extent)
        found += [] if wrong is None else [wrong]
    return min(found, default=None)


def _first_uncancelled(
    boxes: Boxes, tensors: npt.NDArray[np.intp], split: npt.NDArray[np.bool_], extent: I64
) -> int | None:
    """As ``first_miscovered``, for ``tensors`` cut along equally many dimensions."""
    p = int(split[tensors[0]].sum())
    dims = np.argsort(~split[tensors], axis=1, kind="stable")[:, :p]
    size = np.take_along_axis(extent[tensors], dims, axis=1)
    weight = strides(size + 1)
    ends = np.cumsum(np.prod(size + 1, axis=1, dtype=np.int64))
    base = np.concatenate([[0], ends[:-1]])
    mine = boxes.take(split[boxes.tensor].sum(axis=1) == p)
    row = np.searchsorted(tensors, mine.tensor)
    low = np.take_along_axis(mine.offset, dims[row], axis=1)
    high = low + np.take_along_axis(mine.shape, dims[row], axis=1)
    plus, minus = _corners(low, high, base[row], weight[row])
    minus_whole, plus_whole = _corners(np.zeros_like(size), size, base, weight)
    left = np.sort(np.concatenate([*plus, *plus_whole]))
    right = np.sort(np.concatenate([*minus, *minus_whole]))
    differ = np.flatnonzero(left != right)
    if not len(differ):
        return None
    key = min(left[differ[0]], right[differ[0]])
    return int(tensors[np.searchsorted(ends, key, side="right")])


def _corners(low: I64, high: I64, base: I64, weight: I64) -> tuple[list[I64], list[I64]]:
    """Grid keys of the corners with an even and with an odd number of upper sides."""
    sides: tuple[list[I64], list[I64]] = ([], [])
    for upper in product((False, True), repeat=low.shape[1]):
        key = base.copy()
        for d, is_upper in enumerate(upper):
            key += (high if is_upper else low)[:, d] * weight[:, d]
        sides[sum(upper) % 2].append(key)
    return sides


def tiles(offset: I64, shape: I64, most: int) -> tuple[I64, I64]:
    """Tiles of at most ``most`` elements: offsets and shapes, [tiles, D] each."""
    sizes = shape.tolist()
    parts = _parts(sizes, most)
    edges = [
        np.arange(n + 1, dtype=np.int64) * size // n for n, size in zip(parts, sizes, strict=True)
    ]
    low = np.stack(np.meshgrid(*(e[:-1] for e in edges), indexing="ij"), axis=-1)
    high = np.stack(np.meshgrid(*(e[1:] for e in edges), indexing="ij"), axis=-1)
    low, high = low.reshape(-1, len(sizes)), high.reshape(-1, len(sizes))
    return offset + low, high - low


def _parts(sizes: Sequence[int], most: int) -> list[int]:
    """Into how many about equal parts to cut each dimension.

    The last one is cut into a power of two that makes tiles of a matrix about square; then
    leading dimensions are cut as coarsely as ``most`` permits.
    """
    columns = _column_blocks(sizes, most)
    blocks = [*sizes[:-1], -(-sizes[-1] // columns)]
    parts = [1] * len(sizes)
    inner = int(np.prod(blocks, dtype=object))
    for d, n in enumerate(blocks):
        inner //= n
        parts[d] = -(-n // max(1, most // inner))
        if inner <= most:
            break
    # Parts of parts: equal blocks of ceil(size / columns) cut further stay within most.
    parts[-1] *= columns
    return parts


def _column_blocks(sizes: Sequence[int], most: int) -> int:
    rows = sizes[-2] if len(sizes) > 1 else 1
    columns = sizes[-1]
    if rows == 1 or rows * columns <= most:
        return 1
    blocks = 1
    while columns * columns >= 2 * most * blocks * blocks and columns % (2 * blocks) == 0:
        blocks *= 2
    return blocks


def slices(offset: I64, shape: I64) -> tuple[I64, I64]:
    """A box cut into single indices of its outermost dimension longer than 1."""
    d = int(np.flatnonzero(shape > 1)[0])
    offsets = np.repeat(offset[None], shape[d], axis=0)
    offsets[:, d] += np.arange(shape[d])
    shapes = np.repeat(shape[None], shape[d], axis=0)
    shapes[:, d] = 1
    return offsets, shapes


def levels(boxes: Boxes, extent: I64) -> tuple[I64, I64, I64, npt.NDArray[np.bool_]]:
    """Rows, run, stride of each box, and whether it needs more than these two levels.

    From the innermost dimension outwards, a dimension joins the level below when it continues
    it without a hole. A single row has the stride ``run``.
    """
    step = strides(extent)[boxes.tensor]
    rows, run = np.ones(len(boxes), dtype=np.int64), np.ones(len(boxes), dtype=np.int64)
    stride = np.zeros(len(boxes), dtype=np.int64)
    deep = np.zeros(len(boxes), dtype=np.bool_)
    for d in reversed(range(extent.shape[1])):
        n, s = boxes.shape[:, d], step[:, d]
        longer = (n > 1) & (rows > 1)
        joins = (n > 1) & (rows == 1) & (s == run)
        opens = (n > 1) & (rows == 1) & (s != run)
        extends = longer & (s == rows * stride)
        deep |= longer & ~extends
        stride[opens] = s[opens]
        run[joins] *= n[joins]
        rows[opens | extends] *= n[opens | extends]
    return rows, run, np.where(rows == 1, run, stride), deep


def on_grid(tensor: I64, low: I64, size: I64, grid: I64) -> Boxes:
    """Runs as boxes of a matrix with ``grid`` columns: a head, whole rows and a tail."""
    high = low + size
    head = np.minimum(high, -(-low // grid) * grid)
    tail = np.maximum(head, high // grid * grid)
    one, none = np.ones_like(low), np.zeros_like(low)
    boxes = Boxes(
        np.concatenate([tensor] * 3),
        _pairs([low // grid, head // grid, tail // grid], [low % grid, none, none]),
        _pairs([one, (tail - head) // grid, one], [head - low, grid, high - tail]),
    )
    return boxes.take(boxes.numel > 0)


def _pairs(rows: list[I64], columns: list[I64]) -> I64:
    return np.stack([np.concatenate(rows), np.concatenate(columns)], axis=1)
