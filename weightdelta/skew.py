"""Whether all ranks captured after the same training step; a mixture never becomes a version."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from weightdelta.errors import CaptureSkew


class Captured(Protocol):
    """What a receipt says of the moment of its capture; see ``publish.Receipt``."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def steps(self) -> int | None: ...  # noqa: D102
    @property
    def mark(self) -> int | None: ...  # noqa: D102
    @property
    def count(self) -> int | None: ...  # noqa: D102


def refuse_skew(receipts: Sequence[Captured]) -> None:
    """Check that every rank captured after the same training step.

    The caller's own marks are compared where every rank has one, else the optimizer steps since
    the last version. A rank that lost that count has to show by its optimizer's own that it is
    where the others are; only then is that one compared, since parameters without a gradient
    may leave it behind.

    Raises:
        CaptureSkew: Two ranks took a different number of steps since the last version.
    """
    if all(r.mark is not None for r in receipts):
        _refuse_different({r.rank: r.mark for r in receipts}, "mark")
        return
    _refuse_different({r.rank: r.steps for r in receipts}, "steps")
    lost = [r.rank for r in receipts if r.steps is None]
    if not lost:
        return
    counts = {r.rank: r.count for r in receipts}
    _refuse_different(counts, "optimizer's count")
    alone = len(lost) < len(receipts)
    if alone and (counts[lost[0]] is None or all(counts[r] is None for r in set(counts) - {*lost})):
        raise CaptureSkew(
            f"rank {lost[0]} was restarted or missed an outcome, and nothing tells which step its "
            "weights are at; restore it with its optimizer's state, pass mark=, or attach again"
        )


def _refuse_different(found: Mapping[int, int | None], what: str) -> None:
    known = {rank: value for rank, value in sorted(found.items()) if value is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"rank {rank}: {value}" for rank, value in known.items())
        raise CaptureSkew(
            f"expected all ranks at the same step, found ({what}) {listed}; call publish() only "
            "after every rank's step has returned, and pass mark= where ranks do not step alike"
        )
