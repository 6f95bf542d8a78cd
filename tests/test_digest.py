"""The state digest: its definition, and the laws that let anyone add up parts of it."""

import itertools

import numpy as np
import pytest
from chunking import WIDTHS, change, random_elements, segments
from hypothesis import given
from hypothesis import strategies as st

from weightdelta import digest
from weightdelta.digest import C1, C2, M1, M2, MASK
from weightdelta.kernels import Ops, cpu_ops, reference

BOTH = (reference, cpu_ops)

#: (key, index term, bits, h): quoted in FORMAT.md.
VECTORS = (
    (0, 0, 0, 0x0000000000000000),
    (0, 0, 1, 0xB55A8FA067537A73),
    (0, 1, 0, 0xE220A8397B1DCDAF),
    (1, 2, 0x3F80, 0xB5C039FF65C44017),
    (MASK, 5, MASK, 0x481EAFB605187249),
)


def h(term: int, bits: int) -> int:
    """The definition, in Python integers."""
    x = ((term * C1) ^ (bits * C2)) & MASK
    x = ((x ^ (x >> 30)) * M1) & MASK
    x = ((x ^ (x >> 27)) * M2) & MASK
    return x ^ (x >> 31)


def whole(kernels: Ops, values: np.ndarray, *, key: int, skip: int = 0) -> int:
    """Digest of a contiguous stretch."""
    return kernels.digest(values, key=key, skip=skip, run=2**40, stride=2**40)


@pytest.mark.parametrize(("key", "index", "bits", "expected"), VECTORS)
@pytest.mark.parametrize("kernels", BOTH)
def test_fixed_vectors(kernels: Ops, key: int, index: int, bits: int, expected: int) -> None:
    one = np.array([bits], np.uint64)
    assert whole(kernels, one, key=key, skip=index) == h(key + index, bits) == expected


@given(
    values=st.lists(st.integers(0, 2**16 - 1), max_size=40),
    key=st.integers(0, MASK),
    cut=st.integers(0, 40),
)
def test_parts_add_up_in_any_order(values: list[int], key: int, cut: int) -> None:
    array = np.array(values, np.uint16)
    total = sum(h(key + i, v) for i, v in enumerate(values)) & MASK
    for kernels in BOTH:
        assert whole(kernels, array, key=key) == total
        low = whole(kernels, array[:cut], key=key)
        high = whole(kernels, array[cut:], key=key, skip=min(cut, len(values)))
        assert (high + low) & MASK == total
        moved = whole(kernels, array[cut:], key=(key + min(cut, len(values))) & MASK)
        assert moved == high


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernels", BOTH)
def test_a_delta_carries_the_difference_of_the_digests(kernels: Ops, width: int) -> None:
    old = random_elements(70_001, width=width, seed=1)
    key = digest.seed("model.layers.0.weight")
    for density in (0.001, 0.3, 1.0):
        where = np.flatnonzero(np.random.default_rng(2).random(len(old)) < density)
        new = change(old, where, seed=3)
        for xor in (False, True):
            chunks = segments([len(old)], key=key)
            _, sums = kernels.encode(old, new, chunks=chunks, xor=xor)
            carried = sum(sums.tolist())
            after, before = whole(kernels, new, key=key), whole(kernels, old, key=key)
            assert (after - before) & MASK == carried & MASK


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernels", BOTH)
def test_column_slices_add_up_to_the_whole_tensor(kernels: Ops, width: int) -> None:
    rows, columns, key = 37, 53, digest.seed("w")
    tensor = random_elements(rows * columns, width=width, seed=5).reshape(rows, columns)
    total = whole(kernels, tensor.reshape(-1), key=key)
    for cuts in ((0, 53), (0, 1, 53), (0, 20, 21, 52, 53)):
        parts = sum(
            kernels.digest(
                np.ascontiguousarray(tensor[:, lo:hi]).reshape(-1),
                key=(key + lo) & MASK,
                skip=0,
                run=hi - lo,
                stride=columns,
            )
            for lo, hi in itertools.pairwise(cuts)
        )
        assert parts & MASK == total


def test_a_delta_of_column_slices_carries_the_whole_difference() -> None:
    rows, columns, key = 300, 400, digest.seed("w")
    old = random_elements(rows * columns, width=2, seed=6)
    new = change(old, np.arange(0, len(old), 13), seed=7)
    carried = 0
    for lo, hi in ((0, 150), (150, 400)):
        parts = [
            np.ascontiguousarray(side.reshape(rows, columns)[:, lo:hi]).reshape(-1)
            for side in (old, new)
        ]
        chunks = segments([rows * (hi - lo)], run=hi - lo, stride=columns, key=(key + lo) & MASK)
        carried += sum(cpu_ops.encode(*parts, chunks=chunks, xor=False)[1].tolist())
    before, after = (whole(cpu_ops, side, key=key) for side in (old, new))
    assert carried & MASK == (after - before) & MASK


def test_place_and_value_both_count() -> None:
    values = np.arange(100, dtype=np.uint16)
    swapped = values.copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert whole(cpu_ops, values, key=1) != whole(cpu_ops, swapped, key=1)
    assert whole(cpu_ops, values, key=1) != whole(cpu_ops, values, key=2)


def test_seeds_and_the_version_digest() -> None:
    assert digest.seed("a") != digest.seed("b")
    assert 0 <= digest.seed("") <= MASK
    table = np.array([1, 2, 3], np.uint64)
    assert digest.version_digest(table) == digest.version_digest(table.astype(">u8"))
    assert digest.version_digest(table) != digest.version_digest(table[::-1].copy())
