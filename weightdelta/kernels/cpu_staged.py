"""Compiled kernels on lists of changes: dry run, transactional store, merge.

``reference`` defines what each function does.
"""

from typing import Any

import numpy as np

from weightdelta.digest import MASK
from weightdelta.kernels.compiled import BLOCK, ZERO, gather, hash_change, jit, scratch
from weightdelta.kernels.planes import Elements


@jit
def _dry_run(
    resident: Any, index: Any, offsets: Any, values: Any, seed: Any, xor: Any, term: Any,
    old: Any, new: Any,
) -> Any:  # fmt: skip
    total = ZERO
    for lo in range(0, len(index), BLOCK):
        hi = min(lo + BLOCK, len(index))
        olds, news, terms, where = old[lo:hi], new[lo:hi], term[: hi - lo], index[lo:hi]
        gather(resident, offsets[lo:hi], olds)
        if xor:
            for i in range(hi - lo):
                news[i] = olds[i] ^ values[lo + i]
        else:
            for i in range(hi - lo):
                news[i] = olds[i] + values[lo + i]
        for i in range(hi - lo):
            terms[i] = seed + np.uint64(where[i])
        total += hash_change(terms, olds, news)
    return total


def dry_run(
    resident: Elements,
    index: Elements,
    values: Elements,
    *,
    seed: int,
    offsets: Elements,
    xor: bool,
) -> tuple[Elements, Elements, int]:
    """See ``reference.dry_run``."""
    old, new = np.empty_like(values), np.empty_like(values)
    term = scratch.get("term", BLOCK, np.uint64)
    key = np.uint64(seed & MASK)
    change = _dry_run(resident, index, offsets, values, key, xor, term, old, new)
    return old, new, int(change)


@jit
def _wrong(held: Any, expect: Any, new: Any) -> Any:
    """First entry of a block that is neither, or -1."""
    bad = False
    for i in range(len(held)):
        bad |= (held[i] != expect[i]) & (held[i] != new[i])
    if bad:
        for i in range(len(held)):
            if held[i] != expect[i] and held[i] != new[i]:
                return i
    return -1


@jit
def _store(resident: Any, offsets: Any, values: Any) -> None:
    for i in range(len(offsets)):
        resident[offsets[i]] = values[i]


@jit
def _scatter(resident: Any, offsets: Any, expect: Any, new: Any, held: Any) -> Any:
    for lo in range(0, len(offsets), BLOCK):
        hi = min(lo + BLOCK, len(offsets))
        where = offsets[lo:hi]
        gather(resident, where, held)
        bad = _wrong(held[: hi - lo], expect[lo:hi], new[lo:hi])
        if bad >= 0:
            _store(resident, offsets[:lo], expect)
            return lo + bad
        _store(resident, where, new[lo:hi])
    return -1


def scatter(resident: Elements, offsets: Elements, *, expect: Elements, new: Elements) -> int:
    """See ``reference.scatter``."""
    held = scratch.get("before", BLOCK, resident.dtype)
    return int(_scatter(resident, offsets, expect, new, held))


@jit
def _merge(
    index: Any, old: Any, new: Any, index2: Any, old2: Any, new2: Any,
    out: Any, before: Any, after: Any,
) -> Any:  # fmt: skip
    i, j, k = 0, 0, 0
    while i < len(index) or j < len(index2):
        first = j == len(index2) or (i < len(index) and index[i] <= index2[j])
        second = i == len(index) or (j < len(index2) and index2[j] <= index[i])
        out[k] = index[i] if first else index2[j]
        before[k] = old[i] if first else old2[j]
        after[k] = new2[j] if second else new[i]
        k += before[k] != after[k]
        i += first
        j += second
    return k


def merge(
    index: Elements,
    old: Elements,
    new: Elements,
    *,
    index2: Elements,
    old2: Elements,
    new2: Elements,
) -> tuple[Elements, Elements, Elements]:
    """See ``reference.merge``."""
    most = len(index) + len(index2)
    out = scratch.get("values", most, index.dtype)
    before = scratch.get("merge-old", most, old.dtype)
    after = scratch.get("merge-new", most, old.dtype)
    k = _merge(index, old, new, index2, old2, new2, out, before, after)
    return out[:k].copy(), before[:k].copy(), after[:k].copy()
