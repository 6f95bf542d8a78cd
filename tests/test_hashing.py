"""Hashes of many pieces are those of the library, piece by piece."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weightdelta.hashing import SHORT, hash_each, hash_pieces

RANDOM = np.random.default_rng(7)
MEMORY = RANDOM.integers(0, 256, 1 << 18, dtype=np.uint8)
#: Around the ends of blocks and chunks, and of trees that are full, or lack one or many.
SIZES = sorted(
    {max(0, n + d) for n in (0, 64, 128, 1024, 2048, 3072, 4096, 8192, 31744) for d in (-1, 0, 1)}
)


def _expected(start: list[int], size: list[int]) -> list[bytes]:
    pieces = zip(start, size, strict=True)
    return [blake3(MEMORY[low : low + n].tobytes()).digest() for low, n in pieces]


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1 << 16), st.integers(0, 5000) | st.sampled_from(SIZES)),
        max_size=30,
    )
)
def test_any_pieces(pieces: list[tuple[int, int]]) -> None:
    start, size = [p[0] for p in pieces], [p[1] for p in pieces]
    for found in (
        hash_pieces(MEMORY, np.array(start, np.int64), np.array(size, np.int64)),
        hash_each([MEMORY[low : low + n].tobytes() for low, n in pieces]),
    ):
        assert found.shape == (len(pieces), 32)
        assert [bytes(row) for row in found] == _expected(start, size)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("size", [SHORT, SHORT + 1])
def test_short_and_long_pieces_hash_alike(size: int, count: int) -> None:
    start = [3 * i for i in range(count)]
    found = hash_pieces(MEMORY, np.array(start), np.full(count, size))
    assert [bytes(row) for row in found] == _expected(start, [size] * count)
    each = hash_each([MEMORY[low : low + size].tobytes() for low in start])
    assert np.array_equal(each, found)


def test_threads_take_turns_and_all_get_theirs() -> None:
    start, size = [0, 9, 500], [100, 1, 2000]
    with ThreadPoolExecutor(4) as pool:
        arguments = MEMORY, np.array(start), np.array(size)
        jobs = [pool.submit(hash_pieces, *arguments) for _ in range(20)]
    for job in jobs:
        assert [bytes(row) for row in job.result()] == _expected(start, size)


@pytest.mark.parametrize(
    ("start", "size"), [(-1, 4), (0, -1), (0, (1 << 18) + 1), (1 << 18, 1), (1 << 62, 1 << 62)]
)
def test_a_piece_outside_is_refused(start: int, size: int) -> None:
    with pytest.raises(ValueError, match="does not lie in"):
        hash_pieces(MEMORY, np.array([0, start]), np.array([1, size]))
