"""Zero-run blocks and masks by the Triton kernels on a real device: whole blocks, all shapes."""

import itertools

import numpy as np
import pytest
from block_laws import (
    INNERS,
    agrees_with_the_oracle,
    leaves_pieces_of_no_size_alone,
    marks_tell,
    sparse,
    takes_in_and_back,
    weighs,
    writes_blocks,
)
from chunking import WIDTHS
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdelta.codecs.stock import Inner
from weightdelta.kernels.planes import BLOCK_BYTES

pytestmark = pytest.mark.gpu


@settings(max_examples=60)
@given(
    size=st.one_of(st.integers(1, 80), st.integers(1, 150_000)),
    width=st.sampled_from(WIDTHS),
    share=st.sampled_from([0, 0.0003, 0.003, 0.01, 0.03]),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 999),
)
def test_blocks_are_those_of_the_reference(
    size: int, width: int, share: float, inner: Inner, seed: int
) -> None:
    writes_blocks(sparse(size, width=width, share=share, seed=seed), inner, device="cuda")


@pytest.mark.parametrize("inner", INNERS)
def test_all_shapes_of_programs(inner: Inner) -> None:
    """From one change in a block to just under a sixth of it."""
    for share in (0.00002, 0.001, 0.01, 0.04, 0.15):
        mask = sparse(4 * BLOCK_BYTES // 2, width=2, share=share, seed=1)
        writes_blocks(mask, inner, device="cuda")


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("run", [*range(1, 22), 59, 60, 61, 64, 65, 75, 255, 256, 257, 5000])
def test_lengths_of_literals_and_copies(run: int, inner: Inner) -> None:
    mask = np.zeros(2 * run + 40, np.uint8)
    mask[10 : 10 + run] = 1 + np.arange(run) % 255
    mask[10 + 2 * run] = 9
    writes_blocks(mask, inner, device="cuda")


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("size", [1, 5, 12, 13, 14, 17, 18, 19, 31])
def test_every_place_of_two_changes_in_a_short_block(size: int, inner: Inner) -> None:
    for first, second in itertools.combinations_with_replacement(range(size), 2):
        mask = np.zeros(size, np.uint8)
        mask[[first, second]] = 1, 2
        writes_blocks(mask, inner, device="cuda")


@pytest.mark.parametrize("inner", INNERS)
def test_blocks_with_few_changes_and_none(inner: Inner) -> None:
    mask = np.zeros(5 * BLOCK_BYTES // 4, np.uint16)
    mask[::1999] = 3
    mask[BLOCK_BYTES // 2 + 1 : BLOCK_BYTES - 5] = 0
    writes_blocks(mask, inner, device="cuda", numbers=[0, 2])
    writes_blocks(mask, inner, device="cuda", numbers=[1])


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("width", "share"), [(1, 0.01), (2, 0.5), (4, 1), (8, 0.1)])
def test_masks_are_taken_in_and_back(width: int, share: float, shift: int) -> None:
    takes_in_and_back(width, share, shift=shift, device="cuda")


def test_marks_tell_another_mask_or_another_weight() -> None:
    marks_tell(device="cuda")


@pytest.mark.parametrize("width", WIDTHS)
def test_digest_change_is_that_of_the_reference(width: int) -> None:
    weighs(width, device="cuda")


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("width", "share"), [(1, 0.02), (2, 0.4), (4, 1), (8, 0.1)])
def test_marks_are_those_of_plain_torch(width: int, share: float, shift: int) -> None:
    agrees_with_the_oracle(width, share, shift=shift, device="cuda")


def test_a_piece_of_no_size_is_left_alone() -> None:
    leaves_pieces_of_no_size_alone(device="cuda")
