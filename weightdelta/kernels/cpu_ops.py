"""The kernels compiled by numba, one core each, without the interpreter's lock.

``reference`` defines what each function does; this module gives the same bits. How it gets to
memory speed:

* A compare yields 64 change bits at once (``_changed64``: one vector compare on AVX-512, a few
  on anything else), so unchanged stretches cost only their reads.
* Bits become positions with a fixed number of stores a word and no branch on how many are set.
* Positions, gathered values and digest terms pass through small scratch arrays that stay in
  the core's cache, so that each step is a loop that vectorises.
* Scratch belongs to the thread and is reused: fresh pages cost more than the work itself.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightdelta.digest import MASK, U64
from weightdelta.kernels.compiled import (
    C1_64,
    C2_64,
    ONE,
    ZERO,
    changed64,
    copy,
    gather,
    hash_change,
    jit,
    lowest,
    mix,
    popcount,
    scratch,
)
from weightdelta.kernels.cpu_blocks import zero_runs
from weightdelta.kernels.cpu_bytes import count_escapes, join, pack_nibbles, split, unpack_nibbles
from weightdelta.kernels.cpu_staged import dry_run, merge, scatter
from weightdelta.kernels.planes import CHUNK, GAP_FACTOR, Chunks, Elements, Planes

__all__ = [
    "check", "count_escapes", "decode_into", "digest", "dry_run", "encode", "expand", "join",
    "merge", "pack_nibbles", "scatter", "split", "unpack_nibbles", "zero_runs",
]  # fmt: skip

#: Positions are written in groups of this many, so scratch has this much room at its end.
_GROUP: Final = 4


# --- digest -----------------------------------------------------------------------------------


@jit
def _hash_run(values: Any, base: Any) -> Any:
    total = ZERO
    term = base * C1_64
    for i in range(len(values)):
        total += mix(term ^ (np.uint64(values[i]) * C2_64))
        term += C1_64
    return total


@jit
def _fill_terms(position: Any, key: Any, skip: Any, run: Any, stride: Any, term: Any) -> None:
    """Index terms of ascending positions; divides only where a new row begins."""
    row = skip // run
    column = skip % run
    base = key + np.uint64(row * stride + column)
    if column + np.int64(position[len(position) - 1]) < run:
        for i in range(len(position)):
            term[i] = base + np.uint64(position[i])
        return
    end = run - column
    for i in range(len(position)):
        if np.int64(position[i]) >= end:
            ahead = (column + np.int64(position[i])) // run
            base = key + np.uint64((row + ahead) * stride + column - ahead * run)
            end = (ahead + 1) * run - column
        term[i] = base + np.uint64(position[i])


@jit
def _digest(values: Any, key: Any, skip: Any, run: Any, stride: Any) -> Any:
    total = ZERO
    at = 0
    while at < len(values):
        row = (skip + at) // run
        column = (skip + at) % run
        upto = min(len(values), at + run - column)
        total += _hash_run(values[at:upto], key + np.uint64(row * stride + column))
        at = upto
    return total


def digest(values: Elements, *, key: int, skip: int, run: int, stride: int) -> int:
    """See ``reference.digest``."""
    return int(_digest(values, np.uint64(key & MASK), skip, run, stride))


# --- encode -----------------------------------------------------------------------------------


@jit
def _scan(old: Any, new: Any, mask: Any) -> Any:
    """Change bits of a chunk into ``mask``; returns how many are set."""
    count = ZERO
    whole = len(old) // 64
    for i in range(whole):
        bits = changed64(old, new, i * 64)
        mask[i] = bits
        count += popcount(bits)
    if whole * 64 < len(old):
        bits = ZERO
        for j in range(whole * 64, len(old)):
            bits |= np.uint64(old[j] != new[j]) << np.uint64(j - whole * 64)
        mask[whole] = bits
        count += popcount(bits)
    return np.int64(count)


@jit
def _extract(mask: Any, position: Any) -> Any:
    """Positions of the set bits, ascending; ``position`` has room for a group more."""
    done = np.int64(0)
    for i in range(len(mask)):
        bits = mask[i]
        if bits == ZERO:
            continue
        base = np.uint64(i * 64)
        after = done + np.int64(popcount(bits))
        while True:
            group = position[done : done + _GROUP]
            for j in range(_GROUP):
                group[j] = base + lowest(bits)
                bits &= bits - ONE
            done += _GROUP
            if done >= after:
                break
        done = after
    return done


@jit
def _fill_gaps(position: Any, gaps: Any) -> None:
    gaps[0] = position[0]
    for i in range(1, len(position)):
        gaps[i] = position[i] - position[i - 1] - 1


@jit
def _fill_values(before: Any, after: Any, xor: Any, values: Any) -> None:
    if xor:
        for i in range(len(before)):
            values[i] = before[i] ^ after[i]
    else:
        for i in range(len(before)):
            values[i] = after[i] - before[i]


@jit
def _encode(
    old: Any, new: Any, start: Any, length: Any, key: Any, skip: Any, run: Any, stride: Any,
    xor: Any, mask: Any, mask8: Any, position: Any, term: Any, before: Any, after: Any,
    counts: Any, change: Any, gaps: Any, bitmap: Any, values: Any,
) -> Any:  # fmt: skip
    gap = bit = value = np.int64(0)
    for c in range(len(start)):
        lo, n = start[c], length[c]
        a, b = old[lo : lo + n], new[lo : lo + n]
        k = _scan(a, b, mask)
        counts[c] = k
        change[c] = ZERO
        if k == 0:
            continue
        _extract(mask[: (n + 63) // 64], position)
        where, olds, news = position[:k], before[:k], after[:k]
        if GAP_FACTOR * k < n and k < n:
            _fill_gaps(where, gaps[gap : gap + k])
            gap += k
        elif k < n:
            size = (n + 7) // 8
            copy(mask8[:size], bitmap[bit : bit + size])
            bit += size
        gather(a, where, olds)
        gather(b, where, news)
        _fill_values(olds, news, xor, values[value : value + k])
        value += k
        _fill_terms(where, key[c], skip[c], run[c], stride[c], term)
        change[c] = hash_change(term[:k], olds, news)
    return gap, bit, value


def _work(dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], ...]:
    mask = scratch.get("mask", CHUNK // 64, np.uint64)
    return (
        mask,
        mask.view(np.uint8),
        scratch.get("position", CHUNK + _GROUP, np.uint32),
        scratch.get("term", CHUNK, np.uint64),
        scratch.get("before", CHUNK, dtype),
        scratch.get("after", CHUNK, dtype),
    )


def _columns(chunks: Chunks) -> tuple[npt.NDArray[Any], ...]:
    return chunks.start, chunks.length, chunks.key, chunks.skip, chunks.run, chunks.stride


def encode(old: Elements, new: Elements, *, chunks: Chunks, xor: bool) -> tuple[Planes, U64]:
    """See ``reference.encode``."""
    counts, change = np.empty(len(chunks), np.uint32), np.empty(len(chunks), np.uint64)
    gaps = scratch.get("gaps", len(old) // GAP_FACTOR + 1, np.uint16)
    bitmap = scratch.get("bitmap", len(old) // 8 + len(chunks), np.uint8)
    values = scratch.get("values", len(old), old.dtype)
    gap, bit, value = _encode(
        old, new, *_columns(chunks), xor, *_work(old.dtype), counts, change, gaps, bitmap, values
    )
    planes = Planes(counts, gaps[:gap].copy(), bitmap[:bit].copy(), values[:value].copy())
    return planes, change


# --- decode -----------------------------------------------------------------------------------


@jit
def _sum_gaps(gaps: Any, position: Any) -> None:
    at = np.int64(-1)
    for i in range(len(gaps)):
        at += np.int64(gaps[i]) + 1
        position[i] = at


@jit
def _load_mask(bitmap: Any, mask: Any, mask8: Any) -> Any:
    """Copy a chunk's bitmap into whole words; returns the words in use."""
    words = (len(bitmap) + 7) // 8
    mask[words - 1] = ZERO
    copy(bitmap, mask8)
    return words


@jit
def _locate(k: Any, n: Any, gaps: Any, bitmap: Any, mask: Any, mask8: Any, position: Any) -> Any:
    """Positions of a chunk's k changes; returns the gaps and the bitmap bytes consumed."""
    if k == n:
        for i in range(n):
            position[i] = i
    elif GAP_FACTOR * k < n:
        _sum_gaps(gaps[:k], position)
        return k, 0
    else:
        words = _load_mask(bitmap[: (n + 7) // 8], mask, mask8)
        _extract(mask[:words], position)
        return 0, (n + 7) // 8
    return 0, 0


@jit
def _apply(part: Any, position: Any, values: Any, xor: Any, before: Any, after: Any) -> None:
    for i in range(len(position)):
        before[i] = part[position[i]]
    if xor:
        for i in range(len(position)):
            after[i] = before[i] ^ values[i]
    else:
        for i in range(len(position)):
            after[i] = before[i] + values[i]
    for i in range(len(position)):
        part[position[i]] = after[i]


@jit
def _decode(
    target: Any, counts: Any, gaps: Any, bitmap: Any, values: Any,
    start: Any, length: Any, key: Any, skip: Any, run: Any, stride: Any,
    xor: Any, mask: Any, mask8: Any, position: Any, term: Any, before: Any, after: Any,
    change: Any,
) -> None:  # fmt: skip
    gap = bit = value = np.int64(0)
    for c in range(len(start)):
        k, n = np.int64(counts[c]), length[c]
        change[c] = ZERO
        if k == 0:
            continue
        more_gaps, more_bits = _locate(k, n, gaps[gap:], bitmap[bit:], mask, mask8, position)
        gap += more_gaps
        bit += more_bits
        where, olds, news = position[:k], before[:k], after[:k]
        part = target[start[c] : start[c] + n]
        _apply(part, where, values[value : value + k], xor, olds, news)
        value += k
        _fill_terms(where, key[c], skip[c], run[c], stride[c], term)
        change[c] = hash_change(term[:k], olds, news)


def decode_into(target: Elements, planes: Planes, *, chunks: Chunks, xor: bool) -> U64:
    """See ``reference.decode_into``."""
    change = np.empty(len(chunks), np.uint64)
    _decode(
        target, planes.counts, planes.gaps, planes.bitmap, planes.values, *_columns(chunks),
        xor, *_work(target.dtype), change,
    )  # fmt: skip
    return change


@jit
def _expand(
    counts: Any, gaps: Any, bitmap: Any, start: Any, length: Any, mask: Any, mask8: Any,
    position: Any, out: Any,
) -> None:  # fmt: skip
    gap = bit = done = np.int64(0)
    for c in range(len(start)):
        k = np.int64(counts[c])
        if k == 0:
            continue
        more_gaps, more_bits = _locate(
            k, length[c], gaps[gap:], bitmap[bit:], mask, mask8, position
        )
        gap += more_gaps
        bit += more_bits
        part = out[done : done + k]
        for i in range(k):
            part[i] = start[c] + position[i]
        done += k


def expand(planes: Planes, *, chunks: Chunks) -> npt.NDArray[np.uint32]:
    """See ``reference.expand``."""
    out = np.empty(planes.changed, np.uint32)
    mask, mask8, position = _work(np.uint8)[:3]
    _expand(
        planes.counts, planes.gaps, planes.bitmap, chunks.start, chunks.length,
        mask, mask8, position, out,
    )  # fmt: skip
    return out


@jit
def _sound_gaps(gaps: Any, n: Any) -> Any:
    total = np.int64(len(gaps))
    for i in range(len(gaps)):
        total += gaps[i]
    return total <= n


@jit
def _sound_bits(bitmap: Any, k: Any, n: Any, mask: Any, mask8: Any) -> Any:
    words = _load_mask(bitmap, mask, mask8)
    found = ZERO
    for i in range(words):
        found += popcount(mask[i])
    spare = len(bitmap) * 8 - n
    return np.int64(found) == k and (bitmap[len(bitmap) - 1] >> (8 - spare)) == 0


@jit
def _check(counts: Any, gaps: Any, bitmap: Any, length: Any, mask: Any, mask8: Any) -> Any:
    gap = bit = np.int64(0)
    for c in range(len(length)):
        k, n = np.int64(counts[c]), length[c]
        if k == n or k == 0:
            continue
        if GAP_FACTOR * k < n:
            if not _sound_gaps(gaps[gap : gap + k], n):
                return c
            gap += k
        else:
            size = (n + 7) // 8
            if not _sound_bits(bitmap[bit : bit + size], k, n, mask, mask8):
                return c
            bit += size
    return -1


def check(planes: Planes, *, chunks: Chunks) -> int:
    """See ``reference.check``."""
    mask, mask8 = _work(np.uint8)[:2]
    return int(_check(planes.counts, planes.gaps, planes.bitmap, chunks.length, mask, mask8))
