"""apply: store staged values in place, all or none.

Values are absolute, so storing them twice is harmless. Each tensor's resident values are
compared with the staged old ones right before they are replaced; a difference means that
somebody else wrote to the weights, and everything stored so far is put back.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, wait
from itertools import pairwise

import numpy as np

from weightdelta.decode import Staged
from weightdelta.errors import StateMismatch
from weightdelta.kernels import ops
from weightdelta.pages import make_writable


def store_values(
    staged: Sequence[Staged], *, pool: Executor, workers: int = 1, back: bool = False
) -> None:
    """Store the new values of every tensor, or with ``back`` the old ones.

    Nothing is being stored any more when this returns or raises, interrupts included.

    Raises:
        StateMismatch: A tensor holds neither the old nor the new value somewhere; what had
            been stored was put back.
    """
    results = _store_all(staged, pool, workers, back=back)
    bad = next((i for i, at in enumerate(results) if at >= 0), None)
    if bad is None:
        return
    for item, at in zip(staged, results, strict=True):
        if at < 0:
            _scatter(item, back=not back)
    item = staged[bad]
    element = int(item.index[results[bad]])
    raise StateMismatch(
        f"tensor {item.resident.spec.name!r}, element {element}: expected the value of the "
        "prepared version, found another; the weights were edited after prepare(). Nothing was "
        "changed; reload a checkpoint and attach()"
    )


def _store_all(staged: Sequence[Staged], pool: Executor, workers: int, *, back: bool) -> list[int]:
    """One task a worker: a model may have ten thousand small tensors."""
    jobs = [
        pool.submit(lambda part: [_scatter(item, back=back) for item in part], staged[low:high])
        for low, high in pairwise(_cuts([len(item.index) for item in staged], workers))
    ]
    try:
        return [at for job in jobs for at in job.result()]
    finally:
        wait(jobs)


def _cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Bounds of about equally heavy runs of items."""
    ends = np.cumsum([0, *sizes])
    targets = np.linspace(0, ends[-1], parts + 1)[1:-1]
    return [0, *np.searchsorted(ends, targets).tolist(), len(sizes)]


def rehearse(staged: Sequence[Staged]) -> None:
    """Do ahead of the pause what can be: kernel, offsets, page faults; store nothing."""
    for item in staged:
        make_writable(item.resident.memory, item.places)
        ops().scatter(item.resident.memory, item.places[:0], expect=item.old[:0], new=item.new[:0])


def _scatter(item: Staged, *, back: bool) -> int:
    expect, new = (item.new, item.old) if back else (item.old, item.new)
    return ops().scatter(item.resident.memory, item.places, expect=expect, new=new)
