"""The pause, in one Triton kernel: staged values to their places in resident weights.

Positions are explicit, so an entry needs no other: the chunk gives the address of its first
element, the entry what to add. What bounds it is the traffic of the 32-byte sectors that are
touched, one read and one write of each; memory takes less time for sectors that are neighbours, so
chunks go in the order in which they lie there.
"""

from typing import Final

import torch
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import ChunkLists, DeviceChunks, Placed
from weightdelta.kernels.triton_digest import KINDS, h_change, in_row, on, row_of, stable
from weightdelta.kernels.triton_places import pointers, tables

#: Changes that a program stores at a time, and its warps, when chunks have few changes and when
#: they have more. A program takes one chunk: blocks that come and go keep more loads in flight
#: than a loop over chunks does.
_SHAPES: Final = ((512, 8), (1024, 32))


@stable()
def _scatter(
    counts: tensor, begin: tensor, position: tensor, expected: tensor, stored: tensor,
    length: tensor, key: tensor, skip: tensor, run: tensor, stride: tensor,
    address: tensor, first: tensor, box: tensor, boxes: tensor, order: tensor, wrong: tensor,
    sums: tensor,
    kind: tl.constexpr, width: tl.constexpr, dims: tl.constexpr, ordered: tl.constexpr,
    compare: tl.constexpr, digest: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    c = tl.program_id(0)
    if ordered:
        c = tl.load(order + c)
    # All of it before the first of them is looked at: one wait instead of two.
    k, own, n = tl.load(counts + c), tl.load(begin + c), tl.load(length + c).to(tl.int32)
    seg_skip, seg_run, seg_stride = tl.load(skip + c), tl.load(run + c), tl.load(stride + c)
    origin, start = tl.load(address + c), tl.load(first + c)
    seed = tl.load(key + c) if digest else start
    if k > 0:
        column, row = row_of(seg_skip, seg_run, seg_stride)
        change = tl.zeros((block,), tl.int64)
        bad = tl.zeros((block,), tl.int32)
        for i in range(0, k, block):
            j = i + tl.arange(0, block)
            inside = j < k
            p = tl.load(position + own + j, mask=inside, other=0).to(tl.int32) & 0xFFFF
            new = tl.load(stored + own + j, mask=inside, other=0)
            index = in_row(p, n, column, row, seg_run, seg_stride)
            place, held = pointers(p, index, c, origin, start, box, boxes, kind, width, dims)
            inside = inside & held & (p < n)
            old = new
            good = inside
            if compare:
                # A sector stays until it is stored to, and is of no use to anybody after that.
                found = tl.load(place, mask=inside, other=0, eviction_policy="evict_last")
                old = tl.load(expected + own + j, mask=inside, other=0)
                good = inside & ((found == old) | (found == new))
                bad += (inside & ~good).to(tl.int32)
            elif digest:
                found = tl.load(place, mask=inside, other=0)
                old = found
            if digest:
                term = (seed + index).to(tl.uint64, bitcast=True)
                change += tl.where(good, h_change(term, old, new, width), 0)
            if digest and not compare:
                # A store beside the load of its sector, still under way, takes the memory
                # system seven times as long; this one has to wait for what is there.
                good = good & (found != new)
            if compare:
                tl.store(place, new, mask=good, eviction_policy="evict_first")
            else:
                tl.store(place, new, mask=good)
        if compare:
            worse = tl.sum(bad, 0)
            if worse > 0:
                tl.atomic_add(wrong, worse, sem="relaxed")
        if digest:
            tl.store(sums + c, tl.load(sums + c) + tl.sum(change, 0))


def scatter(
    lists: ChunkLists,
    *,
    chunks: DeviceChunks,
    placed: Placed,
    width: int,
    wrong: torch.Tensor,
    back: bool = False,
    sums: torch.Tensor | None = None,
) -> None:
    """See ``DeviceOps.scatter``."""
    if back and lists.old is None:
        raise ValueError("these lists hold no old values: they cannot lead back")
    if not len(chunks):
        return
    old = lists.new if lists.old is None else lists.old
    expected, stored = (lists.new, old) if back else (old, lists.new)
    box, boxes, dims = tables(placed)
    block, warps = _SHAPES[len(stored) > _SHAPES[0][0] * len(chunks)]
    with on(stored):
        _scatter[(len(chunks),)](
            lists.counts, lists.begin, lists.position, expected, stored,
            chunks.length, chunks.key, chunks.skip, chunks.run, chunks.stride,
            placed.address, placed.first, box, boxes,
            lists.counts if placed.order is None else placed.order,
            wrong, chunks.key if sums is None else sums,
            kind=KINDS[width], width=width, dims=dims, ordered=placed.order is not None,
            compare=lists.old is not None, digest=sums is not None, block=block, num_warps=warps,
        )  # fmt: skip
