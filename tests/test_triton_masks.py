"""Masks into weights, in Triton's interpreter; numpy is the reference."""

import interpreted

interpreted.require()

import pytest  # noqa: E402
from block_laws import marks_tell, takes_in_and_back, weighs  # noqa: E402
from chunking import WIDTHS  # noqa: E402


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("width", "share"), [(1, 0.01), (2, 0.5), (4, 1), (8, 0.1)])
def test_masks_are_taken_in_and_back(width: int, share: float, shift: int) -> None:
    takes_in_and_back(width, share, shift=shift)


def test_marks_tell_another_mask_or_another_weight() -> None:
    marks_tell()


@pytest.mark.parametrize("width", WIDTHS)
def test_digest_change_is_that_of_the_reference(width: int) -> None:
    weighs(width)
