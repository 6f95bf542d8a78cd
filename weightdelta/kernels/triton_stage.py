"""Planes become changes in Triton: into a window on the device, or into lists of absolute values.

One program walks through a chunk: a prefix sum over gaps or over bits of the bitmap gives the
positions, and what is at the place decides old and new value and the digest change. Unsound
planes cannot make it write outside the chunk; they are refused on the host (``ops().check``), and
their digest is wrong.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import INTS, ChunkLists, DeviceChunks, DevicePlanes, Placed
from weightdelta.kernels.triton_digest import KINDS, h_change, on, programs, stable, terms
from weightdelta.kernels.triton_places import places, tables
from weightdelta.kernels.triton_units import BITS, GAPS, VALUES, begin_of, forms

#: Changes, or elements of a bitmap, that a program takes at a time.
_BLOCK: Final = 128
_EACH: Final = 32


@triton.jit
def _changed(
    p: tensor, rank: tensor, inside: tensor, n: tensor, place: tensor, held: tensor,
    key: tensor, skip: tensor, run: tensor, stride: tensor, values: tensor, position: tensor,
    before: tensor,
    after: tensor, width: tl.constexpr, xor: tl.constexpr, negate: tl.constexpr,
    listed: tl.constexpr,
) -> tensor:  # fmt: skip
    """Change elements ``p`` by values number ``rank``; returns the digest changes."""
    value = tl.load(values + rank, mask=inside, other=0)
    here = inside & held
    old = tl.load(place, mask=here, other=0)
    if xor:
        new = old ^ value
    elif negate:
        new = old - value
    else:
        new = old + value
    if listed:
        new = tl.where(here, new, old)
        tl.store(position + rank, p.to(tl.int16), mask=inside)
        tl.store(before + rank, old, mask=inside)
        tl.store(after + rank, new, mask=inside)
    else:
        tl.store(place, new, mask=here)
    return tl.where(here, h_change(terms(p, n, key, skip, run, stride), old, new, width), 0)


@stable("chunks", "total")
def _unfold(
    counts: tensor, sizes: tensor, ends: tensor, gaps: tensor, bitmap: tensor, values: tensor,
    start: tensor, length: tensor, key: tensor, skip: tensor, run: tensor, stride: tensor,
    chunks: tensor,
    target: tensor, address: tensor, first: tensor, box: tensor, boxes: tensor,
    begin: tensor, position: tensor, before: tensor, after: tensor, change: tensor, total: tl.int64,
    kind: tl.constexpr, width: tl.constexpr, dims: tl.constexpr, xor: tl.constexpr,
    negate: tl.constexpr, listed: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    for piece in range(tl.program_id(0), chunks, tl.num_programs(0)):
        c = tl.cast(piece, tl.int32)
        k = tl.load(counts + c)
        value0 = begin_of(ends, sizes, c, chunks, VALUES)
        if listed:
            tl.store(begin + c, value0)
        sums = tl.zeros((block,), tl.int64)
        if k > 0:
            n = tl.load(length + c).to(tl.int32)
            seg_key = tl.load(key + c)
            seg_skip = tl.load(skip + c)
            seg_run = tl.load(run + c)
            seg_stride = tl.load(stride + c)
            in_gaps = tl.load(sizes + GAPS * chunks + c) > 0
            in_bits = tl.load(sizes + BITS * chunks + c) > 0
            gap = gaps + begin_of(ends, sizes, c, chunks, GAPS)
            bit = bitmap + begin_of(ends, sizes, c, chunks, BITS)
            steps = k
            if in_bits:
                steps = n
            done = 0
            last = -1
            for i in range(0, steps, block):
                j = i + tl.arange(0, block)
                p = j
                rank = j
                inside = j < k
                if in_gaps:
                    ahead = tl.load(gap + j, mask=inside, other=0).to(tl.int32) & 0xFFFF
                    ahead = tl.where(inside, ahead + 1, 0)
                    p = last + tl.cumsum(ahead, 0)
                    last += tl.sum(ahead, 0)
                if in_bits:
                    octet = tl.load(bit + j // 8, mask=j < n, other=0).to(tl.int32)
                    set = (octet >> (j % 8)) & (j < n).to(tl.int32)
                    rank = done + tl.cumsum(set, 0) - set
                    done += tl.sum(set, 0)
                    inside = (set > 0) & (rank < k)
                inside = inside & (p < n)
                if listed:
                    place, held = places(
                        p, n, c, seg_skip, seg_run, seg_stride, address, first, box, boxes,
                        kind, width, dims,
                    )  # fmt: skip
                else:
                    place = target + tl.load(start + c) + p
                    held = p >= 0
                sums += _changed(
                    p, value0 + rank, inside & (value0 + rank < total), n, place, held,
                    seg_key, seg_skip, seg_run, seg_stride, values, position, before, after,
                    width, xor, negate, listed,
                )  # fmt: skip
        tl.store(change + c, tl.sum(sums, 0))


def _launch(
    planes: DevicePlanes,
    chunks: DeviceChunks,
    *,
    target: torch.Tensor,
    placed: Placed | None,
    lists: ChunkLists | None,
    xor: bool,
    negate: bool,
) -> torch.Tensor:
    """Run ``_unfold`` on ``target``, or on what is ``placed`` into ``lists``."""
    change = torch.empty(len(chunks), dtype=torch.int64, device=planes.counts.device)
    if not len(chunks):
        return change
    _, sizes, ends = forms(planes.counts, chunks, capacity=0)
    spare = change  # stands for arguments that the kernel does not touch
    box, boxes, dims = tables(placed) if placed else (spare, spare, 0)
    old = lists.old if lists and lists.old is not None else planes.values
    _unfold[programs(change, len(chunks), each=_EACH)](
        planes.counts, sizes, ends, planes.gaps, planes.bitmap, planes.values,
        chunks.start, chunks.length, chunks.key, chunks.skip, chunks.run, chunks.stride,
        len(chunks), target, placed.address if placed else spare,
        placed.first if placed else spare, box, boxes,
        lists.begin if lists else spare, lists.position if lists else planes.gaps,
        old, lists.new if lists else planes.values, change, len(planes.values),
        kind=KINDS[planes.values.element_size()], width=planes.values.element_size(), dims=dims,
        xor=xor, negate=negate, listed=lists is not None, block=_BLOCK, num_warps=1,
    )  # fmt: skip
    return change


def decode_into(
    target: torch.Tensor, planes: DevicePlanes, *, chunks: DeviceChunks, xor: bool
) -> torch.Tensor:
    """See ``DeviceOps.decode_into``."""
    with on(target):
        return _launch(
            planes, chunks, target=target, placed=None, lists=None, xor=xor, negate=False
        )


def stage(
    planes: DevicePlanes,
    *,
    chunks: DeviceChunks,
    placed: Placed,
    width: int,
    xor: bool,
    negate: bool = False,
) -> tuple[ChunkLists, torch.Tensor]:
    """See ``DeviceOps.stage``."""
    values = planes.values.view(INTS[width])
    lists = ChunkLists(
        counts=planes.counts,
        begin=torch.empty(len(chunks), dtype=torch.int64, device=values.device),
        position=torch.empty(len(values), dtype=torch.int16, device=values.device),
        old=torch.empty_like(values),
        new=torch.empty_like(values),
    )
    with on(values):
        change = _launch(
            planes, chunks, target=values, placed=placed, lists=lists, xor=xor, negate=negate
        )
    return lists, change
