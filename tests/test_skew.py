"""Ranks must have captured the same training step; who cannot show it is refused."""

import numpy as np
import pytest

from weightdelta.errors import CaptureSkew
from weightdelta.publish import Receipt
from weightdelta.skew import refuse_skew

Numbers = tuple[int | None, ...]


def _receipts(steps: Numbers, marks: Numbers, counts: Numbers) -> list[Receipt]:
    return [
        Receipt(
            write_id="0" * 32,
            rank=rank,
            parent=0,
            steps=since,
            mark=mark,
            count=count,
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
        for rank, (since, mark, count) in enumerate(zip(steps, marks, counts, strict=True))
    ]


NONE: Numbers = (None, None)


@pytest.mark.parametrize(
    ("steps", "marks", "counts"),
    [
        ((1, 1), NONE, NONE),
        (NONE, NONE, NONE),  # all restarted together
        (NONE, NONE, (7, 7)),
        ((5, None), (7, 7), NONE),  # one restarted alone, and the caller knows
        ((5, None), NONE, (7, 7)),  # and its optimizer knows
        ((1, 2), (7, 7), (1, 2)),  # ranks with different numbers of optimizers
        ((1, 1), NONE, (7, 6)),  # parameters without a gradient leave the optimizer's own behind
        ((1, 1), (7, None), NONE),
    ],
)
def test_the_same_step(steps: Numbers, marks: Numbers, counts: Numbers) -> None:
    refuse_skew(_receipts(steps, marks, counts))


@pytest.mark.parametrize(
    ("steps", "marks", "counts", "message"),
    [
        ((3, 4), NONE, NONE, "rank 0: 3, rank 1: 4"),
        ((3, 4), NONE, (7, 7), "rank 0: 3, rank 1: 4"),  # another optimizer's count may hide it
        ((1, 1), (7, 6), (7, 7), "rank 0: 7, rank 1: 6"),
        ((5, None), (7, 6), NONE, "rank 0: 7, rank 1: 6"),
        ((5, None), NONE, (7, 6), "rank 0: 7, rank 1: 6"),
        (NONE, NONE, (7, 6), "rank 0: 7, rank 1: 6"),
        ((5, None), NONE, NONE, "rank 1 was restarted"),
        ((5, None), NONE, (7, None), "rank 1 was restarted"),
        ((5, None), NONE, (None, 7), "rank 1 was restarted"),
        ((None, 5, 5), (None, 7, 7), (None, None, None), "rank 0 was restarted"),
    ],
)
def test_not_the_same_step(steps: Numbers, marks: Numbers, counts: Numbers, message: str) -> None:
    with pytest.raises(CaptureSkew, match=message):
        refuse_skew(_receipts(steps, marks, counts))
