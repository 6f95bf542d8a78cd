"""Masks into weights, in Triton's interpreter; numpy is the reference."""

import interpreted

interpreted.require()

import pytest  # noqa: E402
from block_laws import (  # noqa: E402
    agrees_with_the_oracle,
    leaves_pieces_of_no_size_alone,
    marks_tell,
    takes_in_and_back,
    weighs,
)
from chunking import WIDTHS  # noqa: E402
from mask_cases import Case, Failing, Interrupted  # noqa: E402

from weightdelta.kernels import triton_masks  # noqa: E402
from weightdelta.kernels.device import VARIABLE  # noqa: E402
from weightdelta.kernels.planes import BLOCK_BYTES  # noqa: E402


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("width", "share"), [(1, 0.01), (2, 0.5), (4, 1), (8, 0.1)])
def test_masks_are_taken_in_and_back(width: int, share: float, shift: int) -> None:
    takes_in_and_back(width, share, shift=shift)


def test_marks_tell_another_mask_or_another_weight() -> None:
    marks_tell()


@pytest.mark.parametrize("width", WIDTHS)
def test_digest_change_is_that_of_the_reference(width: int) -> None:
    weighs(width)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("width", "share"), [(1, 0.02), (2, 0.4), (4, 1), (8, 0.1)])
def test_marks_are_those_of_plain_torch(width: int, share: float, shift: int) -> None:
    agrees_with_the_oracle(width, share, shift=shift)


def test_a_piece_of_no_size_is_left_alone() -> None:
    leaves_pieces_of_no_size_alone()


def test_an_update_goes_there_and_back_and_on_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that a pause launches."""
    monkeypatch.setenv(VARIABLE, "triton_ops")
    case = Case("lz4", device="cpu", sizes=((9_001, 2), (2_000, 1), (700, 8), (500, 4)))
    update = case.update("lz4", slot_bytes=BLOCK_BYTES)
    assert update._memory.kernels is triton_masks
    assert update.dry_run().tolist() == case.digests()
    update.apply()
    assert case.holds(case.new)
    update._memory.kernels = Failing(triton_masks, at=2, share=1.0)
    with pytest.raises(Interrupted):
        update.undo()
    update._memory.kernels = triton_masks
    update.undo()
    assert case.holds(case.old)
