"""Ranks must have captured the same training step; who cannot show it is refused."""

import numpy as np
import pytest

from weightdelta.errors import CaptureSkew
from weightdelta.publish import Receipt, refuse_skew


def _receipts(steps: tuple[int | None, ...], marks: tuple[int | None, ...]) -> list[Receipt]:
    return [
        Receipt(
            write_id="0" * 32,
            rank=rank,
            parent=0,
            steps=count,
            mark=mark,
            codecs=np.zeros(0, np.uint8),
            sizes=np.zeros((0, 15), np.uint32),
            hashes=np.zeros((0, 16), np.uint8),
            digest_change=np.zeros(0, np.uint64),
            changed=np.zeros(0, np.uint32),
            tensor_digest=np.zeros(0, np.uint64),
            histogram=None,
            capture_s=0.0,
            encode_s=0.0,
            upload_s=0.0,
        )
        for rank, (count, mark) in enumerate(zip(steps, marks, strict=True))
    ]


@pytest.mark.parametrize(
    ("steps", "marks"),
    [
        ((1, 1), (None, None)),
        ((None, None), (None, None)),  # all restarted together
        ((5, None), (7, 7)),  # one restarted alone, and its optimizer or the caller knows
        ((1, 2), (7, 7)),  # ranks with different numbers of optimizers
    ],
)
def test_the_same_step(steps: tuple[int | None, ...], marks: tuple[int | None, ...]) -> None:
    refuse_skew(_receipts(steps, marks))


@pytest.mark.parametrize(
    ("steps", "marks", "message"),
    [
        ((3, 4), (None, None), "rank 0: 3, rank 1: 4"),
        ((1, 1), (7, 6), "rank 0: 7, rank 1: 6"),
        ((5, None), (7, 6), "rank 0: 7, rank 1: 6"),
        ((5, None), (None, None), "rank 1 was restarted"),
        ((None, 5, 5), (None, 7, 7), "rank 0 was restarted"),
    ],
)
def test_not_the_same_step(
    steps: tuple[int | None, ...], marks: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(CaptureSkew, match=message):
        refuse_skew(_receipts(steps, marks))
