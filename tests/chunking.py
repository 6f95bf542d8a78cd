"""Frames for the kernel and codec tests: chunks of segments, and weights before and after."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from weightdelta.kernels.planes import CHUNK, UINTS, Chunks, Elements

WIDTHS = (1, 2, 4, 8)
SEED = 0xFEDC_BA98_7654_3210


def segments(
    sizes: Iterable[int], *, run: int | None = None, stride: int | None = None, key: int = SEED
) -> Chunks:
    """Chunks of one frame that holds a segment of each size, all of one run and stride."""
    columns: list[list[int]] = [[], [], [], [], [], []]
    start = 0
    for number, size in enumerate(sizes):
        row = run or max(size, 1)
        for skip in range(0, size, CHUNK) or (0,):
            length = min(CHUNK, size - skip)
            entry = (start, length, (key + 7 * number) % 2**64, skip, row, stride or row)
            for column, value in zip(columns, entry, strict=True):
                column.append(value)
            start += length
    first, length_, keys, *rest = columns
    return Chunks(
        np.array(first, np.int64),
        np.array(length_, np.int64),
        np.array(keys, np.uint64),
        *(np.array(column, np.int64) for column in rest),
    )


def count_of(chunks: Chunks) -> int:
    """Elements of the frame."""
    return int(chunks.length.sum())


def random_elements(count: int, *, width: int, seed: int) -> Elements:
    """Uniform random bit patterns."""
    octets = np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)
    return octets.view(UINTS[width])


def change(old: Elements, where: npt.NDArray[Any], *, seed: int, small: bool = False) -> Elements:
    """A copy of ``old`` with other values at ``where``: any, or ``small`` differences."""
    random = np.random.default_rng(seed)
    bits = 4 if small or old.itemsize == 1 else 8 * old.itemsize - 1
    step = random.integers(1, 2**bits, len(where), dtype=np.uint64).astype(old.dtype)
    new = old.copy()
    new[where] += np.where(random.random(len(where)) < 0.5, step, -step)
    return new


@dataclass(frozen=True)
class Case:
    """A frame before and after."""

    chunks: Chunks
    old: Elements
    new: Elements
    xor: bool


@st.composite
def cases(draw: st.DrawFn, *, most: int, segment_count: int = 6, run: int = 50) -> Case:
    """Any frame: segments of up to ``most`` elements, rows, width, density and form of values."""
    sizes = draw(st.lists(st.integers(0, most), max_size=segment_count))
    row, extra = draw(st.integers(1, run)), draw(st.integers(0, 50))
    key, seed = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 999))
    chunks = segments(sizes, run=row, stride=row + extra, key=key)
    old = random_elements(count_of(chunks), width=draw(st.sampled_from(WIDTHS)), seed=seed)
    where = np.flatnonzero(np.random.default_rng(seed).random(len(old)) < draw(st.floats(0, 1)))
    return Case(chunks, old, change(old, where, seed=seed), draw(st.booleans()))
