"""Zero-run blocks of the Triton kernels, in the interpreter: byte for byte the reference's."""

import interpreted

interpreted.require()

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from block_laws import INNERS, sparse, writes_blocks  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from weightdelta.codecs.stock import Inner  # noqa: E402
from weightdelta.errors import InputError  # noqa: E402
from weightdelta.kernels.planes import BLOCK_BYTES  # noqa: E402


@settings(max_examples=8)
@given(
    size=st.one_of(st.integers(1, 40), st.integers(1, 1500)),
    width=st.sampled_from((1, 2, 4, 8)),
    share=st.sampled_from([0, 0.004, 0.02, 0.05]),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 999),
)
def test_blocks_are_those_of_the_reference(
    size: int, width: int, share: float, inner: Inner, seed: int
) -> None:
    writes_blocks(sparse(size, width=width, share=share, seed=seed), inner)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("run", [4, 5, 15, 61, 64, 75, 257])
def test_lengths_of_literals_and_copies(run: int, inner: Inner) -> None:
    mask = np.zeros(2 * run + 40, np.uint8)
    mask[10 : 10 + run] = 1 + np.arange(run) % 255
    mask[10 + 2 * run] = 9
    writes_blocks(mask, inner)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("size", [1, 13, 18])
def test_ends_of_short_blocks(size: int, inner: Inner) -> None:
    for first in range(0, size, 7):
        mask = np.zeros(size, np.uint8)
        mask[[first, size - 1 - first // 2]] = 1, 2
        writes_blocks(mask, inner)


def test_chosen_blocks_of_a_long_mask() -> None:
    """Lists reach across blocks, and the last block is short."""
    mask = np.zeros(5 * BLOCK_BYTES // 4, np.uint16)
    mask[::1999] = 3
    writes_blocks(mask, "lz4", numbers=[0, 2])
    writes_blocks(mask, "snappy", numbers=[2])


def test_dense_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="32768 changes of 2 bytes"):
        writes_blocks(np.ones(BLOCK_BYTES // 2, np.uint16), "snappy")
