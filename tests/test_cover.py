"""Exact cover: boxes, rows and fingerprint all say what counting every element says."""

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdelta.cover import Columns, miscovered
from weightdelta.sharding.explicit import I64

Row = tuple[int, int, int, int, int]


def columns(rows: list[Row]) -> Columns:
    return Columns(*np.array(rows, np.int64).reshape(-1, 5).T)


def counted(segments: Columns, sizes: I64) -> int | None:
    """The first miscovered tensor, by counting."""
    held = [np.zeros(n, np.int64) for n in sizes.tolist()]
    for tensor, first, rows, run, stride in zip(*(c.tolist() for c in segments), strict=True):
        for row in range(rows):
            held[tensor][first + row * stride : first + row * stride + run] += 1
    return next((t for t, count in enumerate(held) if (count != 1).any()), None)


@st.composite
def covers(draw: st.DrawFn) -> tuple[list[Row], I64]:
    """Tensors of shape (a, b, c) cut by planes, by matrices, by strips or row by row."""
    rows: list[Row] = []
    sizes = []
    for tensor in range(draw(st.integers(1, 3))):
        a, b, c = (draw(st.integers(1, 5)) for _ in range(3))
        sizes.append(a * b * c)
        cut = draw(st.integers(0, c))
        for i in range(a):
            kind = draw(st.integers(0, 2))
            at = i * b * c
            if kind == 0:
                rows.append((tensor, at, 1, b * c, b * c))
            elif kind == 1:
                rows += _strips(tensor, at, b, c, cut)
            else:
                rows += [(tensor, at + j * c, 1, c, c) for j in range(b)]
        top = draw(st.integers(0, b - 1)) if a > 1 else 0
        if top:  # all of it again as two blocks of the longer stride, or left as it is
            rows = [r for r in rows if r[0] != tensor]
            rows.append((tensor, 0, a, top * c, b * c))
            for i in range(a):
                rows += _strips(tensor, (i * b + top) * c, b - top, c, cut)
    return rows, np.array(sizes, np.int64)


def _strips(tensor: int, at: int, b: int, c: int, cut: int) -> list[Row]:
    parts = [(tensor, at, b, cut, c), (tensor, at + cut, b, c - cut, c)]
    return [p if b > 1 else (p[0], p[1], 1, p[3], p[3]) for p in parts if p[3]]


@settings(max_examples=150)
@given(covers(), st.integers(0, 2**32), st.sampled_from(["", "drop", "twice", "move", "longer"]))
def test_every_way_agrees_with_counting(cover: tuple[list[Row], I64], at: int, damage: str) -> None:
    rows, sizes = list(cover[0]), cover[1]
    i = at % len(rows)
    tensor, first, n, run, stride = rows[i]
    if damage == "drop":
        del rows[i]
    elif damage == "twice":
        rows.append(rows[i])
    elif damage == "move":
        other = rows[(i + 1) % len(rows)]
        if other[0] == tensor and other[2:] == (n, run, stride):
            rows[i] = other
    elif damage == "longer" and n == 1 and first + run < sizes[tensor]:
        rows[i] = (tensor, first, 1, run + 1, run + 1)
    segments = columns(rows)
    expected = counted(segments, sizes)
    assert miscovered(segments, sizes=sizes) == expected
    assert miscovered(segments, sizes=sizes, most_loose=0) == expected
    if not damage:
        assert expected is None


def test_rows_that_a_few_bytes_claim_cost_nothing() -> None:
    """Found by reading: these four segments once took seconds and gigabytes to check."""
    rows = 1 << 40
    cover: list[Row] = [
        (0, 0, rows, 4, 8), (0, 4, 2, 1, 2), (0, 5, 2, 1, 2), (0, 12, rows - 1, 4, 8),
    ]  # fmt: skip
    sizes = np.array([8 * rows], np.int64)
    tracemalloc.start()
    try:
        assert miscovered(columns(cover), sizes=sizes) is None
        for i, (_, first, n, run, stride) in enumerate(cover):
            wrong = list(cover)
            wrong[i] = (0, first, n - 1, run, stride)
            assert miscovered(columns(wrong), sizes=sizes) == 0
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
