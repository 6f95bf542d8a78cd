"""The pause, in one Triton kernel: staged values to their places in resident weights.

Positions are explicit, so an entry needs no other: the chunk gives the address of its first
element, the entry what to add. What bounds it is the traffic of the 32-byte sectors that are
touched, one read and one write of each.
"""

from typing import Final

import torch
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import ChunkLists, DeviceChunks, Placed
from weightdelta.kernels.triton_digest import KINDS, h_change, on, stable, terms
from weightdelta.kernels.triton_places import places, tables

#: Changes that a program stores at a time, and its warps, when chunks have few changes and when
#: they have more. A program takes one chunk: blocks that come and go keep more loads in flight
#: than a loop over chunks does.
_SHAPES: Final = ((512, 8), (1024, 32))


@stable("chunks")
def _scatter(
    counts: tensor, begin: tensor, position: tensor, expected: tensor, stored: tensor,
    length: tensor, key: tensor, skip: tensor, run: tensor, stride: tensor, chunks: tensor,
    address: tensor, first: tensor, box: tensor, boxes: tensor, wrong: tensor, sums: tensor,
    kind: tl.constexpr, width: tl.constexpr, dims: tl.constexpr, compare: tl.constexpr,
    digest: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    for piece in range(tl.program_id(0), chunks, tl.num_programs(0)):
        c = tl.cast(piece, tl.int32)
        k = tl.load(counts + c)
        if k > 0:
            own = tl.load(begin + c)
            n = tl.load(length + c).to(tl.int32)
            seg_skip = tl.load(skip + c)
            seg_run = tl.load(run + c)
            seg_stride = tl.load(stride + c)
            change = tl.zeros((block,), tl.int64)
            bad = tl.zeros((block,), tl.int32)
            for i in range(0, k, block):
                j = i + tl.arange(0, block)
                inside = j < k
                p = tl.load(position + own + j, mask=inside, other=0).to(tl.int32) & 0xFFFF
                new = tl.load(stored + own + j, mask=inside, other=0)
                place, held = places(
                    p, n, c, seg_skip, seg_run, seg_stride, address, first, box, boxes,
                    kind, width, dims,
                )  # fmt: skip
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
                    term = terms(p, n, tl.load(key + c), seg_skip, seg_run, seg_stride)
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
            chunks.length, chunks.key, chunks.skip, chunks.run, chunks.stride, len(chunks),
            placed.address, placed.first, box, boxes, wrong, chunks.key if sums is None else sums,
            kind=KINDS[width], width=width, dims=dims, compare=lists.old is not None,
            digest=sums is not None, block=block, num_warps=warps,
        )  # fmt: skip
