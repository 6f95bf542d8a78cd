"""Pools of threads that work beside a trainer or a sampler."""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def pool(count: int, name: str) -> ThreadPoolExecutor:
    """``count`` threads whose names begin with ``name``, each on one core at a time.

    A thread that begins a parallel region of OpenMP, as most of torch's operations on a CPU are,
    gets a team of threads of its own, which stays. Once there are more of them than cores, libgomp
    lets no team wait by spinning any more, not that of the trainer either: its step on a CPU took
    1.4 x as long beside a publisher that had nothing to do. Threads of a pool begin none.
    """
    return ThreadPoolExecutor(count, name, initializer=_alone)


def _alone() -> None:
    """Tell OpenMP, as torch has loaded it, that this thread works alone; no other is concerned."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.get_num_threads()  # else torch sets a number of its own with this thread's first region
    limit = _limit()
    if limit is not None:
        limit(1)


@cache
def _limit() -> Callable[[int], object] | None:
    """OpenMP's function, if its symbols are in sight; else teams stay as they are."""
    found: Callable[[int], object] | None
    found = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return found
