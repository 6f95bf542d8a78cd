"""The state digest in Triton: its mixer, index terms, the full pass; and the dense XOR.

All of it is ``kernels.reference`` bit for bit. Hashes are uint64 (shifts must be logical); sums
leave as int64 bit patterns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.digest import C1, C2, M1, M2, MASK

_C1: Final = tl.constexpr(C1)
_C2: Final = tl.constexpr(C2)
_M1: Final = tl.constexpr(M1)
_M2: Final = tl.constexpr(M2)
#: Chunk-relative positions are below this (``planes.CHUNK``).
_SPAN: Final = tl.constexpr(65536)

#: Triton's names of ``device.INTS``.
KINDS: Final = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

#: Elements that a program of the digest reads at a time.
_BLOCK: Final = 1024
#: 64-bit lanes of a program of the dense XOR.
_LANES: Final = 1024


def on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the device of ``tensor`` the current one, where kernels launch."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def stable(*integers: str) -> Any:
    """``triton.jit`` for a kernel that compiles once for each element width.

    Plain ``triton.jit`` compiles anew when an address or one of these numbers turns out odd or
    one; the second delta must not wait for a compiler, least of all in a pause.
    """

    def decorate(kernel: Callable[..., None]) -> Any:
        kinds = {name: kind for name, kind in kernel.__annotations__.items() if name != "return"}
        free = [name for name, kind in kinds.items() if kind is not tl.constexpr]
        return triton.jit(kernel, do_not_specialize=integers, do_not_specialize_on_alignment=free)

    return decorate


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 stands for the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs(tensor: torch.Tensor, work: int, *, each: int) -> tuple[int]:
    """Grid of a kernel that strides over ``work`` pieces with ``each`` programs a processor."""
    return (max(1, min(work, each * processors(tensor.device))),)


@triton.jit
def _mixed(x: tensor) -> tensor:
    x = (x ^ (x >> 30)) * _M1
    x = (x ^ (x >> 27)) * _M2
    return x ^ (x >> 31)


@triton.jit
def h(term: tensor, bits: tensor) -> tensor:
    """``mix64(term * C1 xor bits * C2)``, uint64; ``bits`` zero-extended."""
    return _mixed((term * _C1) ^ (bits * _C2))


@triton.jit
def widened(bits: tensor, width: tl.constexpr) -> tensor:
    """Elements of ``width`` bytes as uint64, zero-extended whatever their sign."""
    wide = bits.to(tl.int64)
    if width < 8:
        wide = wide & ((1 << (8 * width)) - 1)
    return wide.to(tl.uint64, bitcast=True)


@triton.jit
def h_change(term: tensor, old: tensor, new: tensor, width: tl.constexpr) -> tensor:
    """``h(new) - h(old)`` as int64 bit patterns; 0 for equal values."""
    return h_change_of(term * _C1, old, new, width)


@triton.jit
def h_change_of(product: tensor, old: tensor, new: tensor, width: tl.constexpr) -> tensor:
    """``h_change`` for the product of a term and ``C1``; see ``products``."""
    change = _mixed(product ^ (widened(new, width) * _C2))
    change -= _mixed(product ^ (widened(old, width) * _C2))
    return change.to(tl.int64, bitcast=True)


@triton.jit
def row_of(skip: tensor, run: tensor, stride: tensor) -> tuple[tensor, tensor]:
    """Column at which a stretch begins in its row, and the canonical index of the row's first.

    It takes a division of 64 bits: a loop over one stretch has it outside.
    """
    row = skip // run
    return skip - row * run, row * stride


@triton.jit
def in_row(
    p: tensor, limit: tensor, column: tensor, base: tensor, run: tensor, stride: tensor
) -> tensor:
    """Canonical indices of a stretch's elements ``p``, int64, from what ``row_of`` gives.

    ``p`` is an int32 block below ``limit`` <= 65536. Divides by 32-bit numbers, and only where
    the stretch crosses the end of a row: a longer row than the stretch is crossed at most once.
    """
    index = base + column + p.to(tl.int64)
    if column + limit > run:
        index += _rows(p, column, run) * (stride - run)
    return index


@triton.jit
def _rows(p: tensor, column: tensor, run: tensor) -> tensor:
    """How many ends of rows lie before elements ``p`` of a stretch, int64."""
    t = column + p.to(tl.int64)
    short = tl.minimum(run, _SPAN).to(tl.uint32)
    few = (t.to(tl.uint32) // short).to(tl.int64)
    return tl.where(run > _SPAN, (t >= run).to(tl.int64), few)


@triton.jit
def products(
    p: tensor, limit: tensor, seed: tensor, column: tensor, run: tensor, stride: tensor
) -> tensor:
    """``C1`` times the index terms of a stretch's elements ``p``, uint64; see ``in_row``.

    ``seed`` is the term of the stretch's first. A product with a position of 32 bits is half as
    long as one with its term.
    """
    found = seed.to(tl.uint64, bitcast=True) * _C1
    found += p.to(tl.uint32, bitcast=True).to(tl.uint64) * _C1
    if column + limit > run:
        skipped = _rows(p, column, run) * (stride - run)
        found += skipped.to(tl.uint64, bitcast=True) * _C1
    return found


@triton.jit
def canonical(p: tensor, limit: tensor, skip: tensor, run: tensor, stride: tensor) -> tensor:
    """``(q // run) * stride + q % run`` for ``q = skip + p``; see ``in_row``."""
    column, base = row_of(skip, run, stride)
    return in_row(p, limit, column, base, run, stride)


@triton.jit
def terms(
    p: tensor,
    limit: tensor,
    key: tensor,
    skip: tensor,
    run: tensor,
    stride: tensor,
) -> tensor:
    """Index terms of the digest: ``key`` (int64 bits) plus the canonical index, uint64."""
    return (key + canonical(p, limit, skip, run, stride)).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=("total", "key", "skip", "run", "stride"))
def _digest(
    values: tensor, total: tl.int64, out: tensor, key: tl.int64, skip: tl.int64, run: tl.int64,
    stride: tl.int64, width: tl.constexpr, full: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, block)
    summed = tl.zeros((block,), tl.uint64)
    for piece in range(tl.program_id(0), tl.cdiv(total, block), tl.num_programs(0)):
        at = tl.cast(piece, tl.int64) * block
        # Only loads without a mask are sure to be wide.
        inside = (at + lane < total) | full
        if full:
            bits = tl.load(values + at + lane, eviction_policy="evict_first")
        else:
            bits = tl.load(values + at + lane, mask=inside, other=0)
        hashes = h(terms(lane, block, key, skip + at, run, stride), widened(bits, width))
        summed += tl.where(inside, hashes, 0)
    tl.atomic_add(out, tl.sum(summed.to(tl.int64, bitcast=True), 0), sem="relaxed")


def digest(values: torch.Tensor, *, key: int, skip: int, run: int, stride: int) -> torch.Tensor:
    """See ``DeviceOps.digest``."""
    out = torch.zeros(1, dtype=torch.int64, device=values.device)
    signed = (key & MASK) - ((key & (1 << 63)) << 1)
    with on(values):
        for part, before in _bulk(values, _BLOCK):
            total = len(part)
            _digest[programs(values, triton.cdiv(total, _BLOCK), each=16)](
                part, total, out, signed, skip + before, run, stride,
                width=values.element_size(), full=total % _BLOCK == 0, block=_BLOCK, num_warps=4,
            )  # fmt: skip
    return out


def _bulk(values: torch.Tensor, block: int) -> list[tuple[torch.Tensor, int]]:
    """Whole blocks and the rest, each with the elements before it; empty ones left out."""
    whole = len(values) // block * block
    return [(part, at) for part, at in ((values[:whole], 0), (values[whole:], whole)) if len(part)]


@triton.jit(do_not_specialize=("total",))
def _xor(
    a: tensor, b: tensor, out: tensor, total: tl.int64, full: tl.constexpr, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if full:
        left = tl.load(a + at, eviction_policy="evict_first")
        right = tl.load(b + at, eviction_policy="evict_first")
        tl.store(out + at, left ^ right)
    else:
        left = tl.load(a + at, mask=at < total)
        tl.store(out + at, left ^ tl.load(b + at, mask=at < total), mask=at < total)


def dense_xor(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """See ``DeviceOps.dense_xor``."""
    octets = [t.view(torch.uint8) for t in (a, b, out)]
    step = 1 if any(t.data_ptr() % 16 for t in octets) else 8 * _LANES
    whole = len(octets[0]) // step * step
    with on(a):
        if whole:
            kind = torch.uint8 if step == 1 else torch.int64
            _xored([t[:whole].view(kind) for t in octets])
        if whole < len(octets[0]):
            _xored([t[whole:] for t in octets])


def _xored(lanes: list[torch.Tensor]) -> None:
    total = len(lanes[0])
    grid = (triton.cdiv(total, _LANES),)
    _xor[grid](*lanes, total, full=total % _LANES == 0, block=_LANES, num_warps=4)
