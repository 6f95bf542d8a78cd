"""Planes read straight from the two windows: the second pass of encode, where one is needed.

Bitmaps come from here; so do gaps and values of chunks that spill, because changes crowd one of
their units. Counts are known by then, and with them the place of every value.
"""

from typing import Final

import torch
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import DeviceChunks, DevicePlanes
from weightdelta.kernels.planes import CHUNK
from weightdelta.kernels.triton_digest import h_change_of, products, programs, row_of, stable
from weightdelta.kernels.triton_units import (
    BITS,
    GAPS,
    SPILLS,
    VALUES,
    begin_of,
    lane_grid,
    unit_lanes,
)

#: Elements that a program takes at a time, octets of a bitmap that it packs at a time and in all.
_BLOCK: Final = 256
_OCTETS: Final = 128
_PIECE: Final = 1024


@stable("units", "chunks", "misaligned")
def _direct(
    old: tensor, new: tensor, start: tensor, length: tensor, key: tensor, skip: tensor,
    run: tensor, stride: tensor, tally: tensor, sizes: tensor, ends: tensor, units: tensor,
    chunks: tensor, misaligned: tensor, gaps: tensor, values: tensor, change: tensor,
    width: tl.constexpr, lane: tl.constexpr, per_chunk: tl.constexpr, unit: tl.constexpr,
    xor: tl.constexpr, digest: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """A unit's values and digest change, and its positions into ``gaps``."""
    for piece in range(tl.program_id(0), units, tl.num_programs(0)):
        at = tl.cast(piece, tl.int32)
        c = at // per_chunk
        if (tl.load(tally + at) > 0) & (tl.load(sizes + SPILLS * chunks + c) > 0):
            n = tl.load(length + c).to(tl.int32)
            origin = tl.load(start + c)
            _, lead = lane_grid(origin, misaligned, width, lane)
            lead = lead.to(tl.int32)
            first, last = unit_lanes(at - c * per_chunk, lead, n, width, lane, per_chunk, unit)
            low = tl.maximum((first * lane - lead) // width, 0)
            high = tl.minimum((last * lane - lead) // width, n)
            in_gaps = tl.load(sizes + GAPS * chunks + c) > 0
            gap = gaps + begin_of(ends, sizes, c, chunks, GAPS)
            value = values + begin_of(ends, sizes, c, chunks, VALUES)
            done = 0
            for u in range(c * per_chunk, at):
                done += tl.load(tally + u)
            sums = tl.zeros((block,), tl.int64)
            index, row_run, row_stride = tl.load(key + c), tl.load(run + c), tl.load(stride + c)
            column, base = row_of(tl.load(skip + c), row_run, row_stride)
            seed = index + base + column
            for i in range(low, high, block):
                p = i + tl.arange(0, block)
                a = tl.load(old + origin + p, mask=p < high, other=0)
                b = tl.load(new + origin + p, mask=p < high, other=0)
                hit = (a != b).to(tl.int32)
                rank = done + tl.cumsum(hit, 0) - hit
                tl.store(value + rank, (b ^ a) if xor else (b - a), mask=hit > 0)
                tl.store(gap + rank, p.to(tl.int16), mask=(hit > 0) & in_gaps)
                done += tl.sum(hit, 0)
                if digest:
                    product = products(p, n, seed, column, row_run, row_stride)
                    sums += h_change_of(product, a, b, width)
            if digest:
                tl.atomic_add(change + c, tl.sum(sums, 0), sem="relaxed")


@stable("pieces", "chunks")
def _bits(
    old: tensor, new: tensor, start: tensor, length: tensor, sizes: tensor, ends: tensor,
    pieces: tensor, chunks: tensor, bitmap: tensor,
    per_chunk: tl.constexpr, size: tl.constexpr, octets: tl.constexpr,
) -> None:  # fmt: skip
    """Bitmaps of the chunks in that form, a piece of ``size`` octets after the other."""
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        at = tl.cast(piece, tl.int32)
        c = at // per_chunk
        if tl.load(sizes + BITS * chunks + c) > 0:
            n = tl.load(length + c).to(tl.int32)
            origin = tl.load(start + c)
            bit = bitmap + begin_of(ends, sizes, c, chunks, BITS)
            low = (at - c * per_chunk) * size
            for i in range(low, tl.minimum(low + size, (n + 7) // 8), octets):
                octet = i + tl.arange(0, octets)
                p = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
                a = tl.load(old + origin + p, mask=p < n, other=0)
                b = tl.load(new + origin + p, mask=p < n, other=0)
                packed = tl.sum((a != b).to(tl.int32) << tl.arange(0, 8)[None, :], 1)
                tl.store(bit + octet, packed.to(tl.uint8), mask=octet * 8 < n)


@stable("chunks")
def _to_gaps(
    sizes: tensor, ends: tensor, chunks: tensor, gaps: tensor, block: tl.constexpr
) -> None:
    """Positions become gaps in place, from the end on: each needs its forerunner untouched."""
    for c in range(tl.program_id(0), chunks, tl.num_programs(0)):
        k = tl.load(sizes + GAPS * chunks + c).to(tl.int32)
        if (k > 0) & (tl.load(sizes + SPILLS * chunks + c) > 0):
            gap = gaps + begin_of(ends, sizes, c, chunks, GAPS)
            for i in range(0, k, block):
                j = k - 1 - i - tl.arange(0, block)
                p = tl.load(gap + j, mask=j >= 0, other=0).to(tl.int32) & 0xFFFF
                q = tl.load(gap + j - 1, mask=j > 0, other=0).to(tl.int32) & 0xFFFF
                tl.debug_barrier()
                tl.store(gap + j, (p - tl.where(j > 0, q, -1) - 1).to(tl.int16), mask=j >= 0)
                tl.debug_barrier()


def bitmaps(
    old: torch.Tensor,
    new: torch.Tensor,
    *,
    chunks: DeviceChunks,
    bitmap: torch.Tensor,
    sizes: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Fill in the bitmaps of the chunks that ``sizes`` says have one."""
    per_chunk = CHUNK // 8 // _PIECE
    pieces = len(chunks) * per_chunk
    _bits[programs(old, pieces, each=64)](
        old, new, chunks.start, chunks.length, sizes, ends, pieces, len(chunks), bitmap,
        per_chunk=per_chunk, size=_PIECE, octets=_OCTETS, num_warps=1,
    )  # fmt: skip


def direct(
    old: torch.Tensor,
    new: torch.Tensor,
    *,
    chunks: DeviceChunks,
    planes: DevicePlanes,
    tally: torch.Tensor,
    sizes: torch.Tensor,
    ends: torch.Tensor,
    change: torch.Tensor,
    misaligned: int,
    lane: int,
    unit: int,
    xor: bool,
    digest: bool,
) -> None:
    """Fill in gaps and values of the chunks that ``sizes`` says spill, and add to ``change``."""
    count, width = len(chunks), old.element_size()
    _direct[programs(old, len(tally), each=32)](
        old, new, chunks.start, chunks.length, chunks.key, chunks.skip, chunks.run, chunks.stride,
        tally, sizes, ends, len(tally), count, misaligned,
        planes.gaps, planes.values, change,
        width=width, lane=lane, per_chunk=len(tally) // count, unit=unit, xor=xor, digest=digest,
        block=_BLOCK, num_warps=1,
    )  # fmt: skip
    if len(planes.gaps):
        _to_gaps[programs(old, count, each=32)](
            sizes, ends, count, planes.gaps, block=_BLOCK, num_warps=1
        )
