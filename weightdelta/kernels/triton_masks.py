"""XOR masks in device memory into weights that lie anywhere on it.

A mask is cut into pieces, each of which belongs to one contiguous stretch of one tensor. Weights
are read and written only where the mask is not zero, so a sparse mask costs one pass over itself.
Each piece leaves a mark: a sum over the places it changed that depends on the mask and on the
weights without it, the same whether the mask is taken in, taken back, or only looked at.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.triton_digest import KINDS, h_change

_A: Final = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_B: Final = tl.constexpr(0xD6E8FEB86659FD93 - (1 << 64))
#: Tables whose parts begin at odd places: they are read entry by entry, so nothing is gained by a
#: kernel for each alignment, and the pause must not wait for one.
_TABLES: Final = ("begins", "addresses", "sizes", "marks", "keys", "sums")
#: Lanes of a program.
_LANES: Final = 1024


@triton.jit
def _mark(place: tensor, weight: tensor, mask: tensor) -> tensor:
    """Mixes a place with what it holds; 0 where the mask is."""
    x = (weight ^ (place * _A)) * _B
    x = ((x ^ (x >> 29)) + mask) * _A
    return tl.where(mask != 0, x ^ (x >> 32), 0)


@triton.jit
def _part(
    source: tensor, target: tensor, at: tensor, count: tensor, place: tensor,
    store: tl.constexpr, back: tl.constexpr, lanes: tl.constexpr,
) -> tensor:  # fmt: skip
    """Lanes ``at`` and on of a piece; returns their marks."""
    lane = at + tl.arange(0, lanes)
    inside = lane < count
    mask = tl.load(source + lane, mask=inside, other=0, eviction_policy="evict_first")
    live = mask != 0
    old = tl.load(target + lane, mask=live, other=0)
    if store:
        tl.store(target + lane, old ^ mask, mask=live)
    before = old ^ mask if back else old
    return _mark(place + lane.to(tl.int64), before.to(tl.int64), mask.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_TABLES[:4])
def _xor_pieces(
    mask: tensor, begins: tensor, addresses: tensor, sizes: tensor, marks: tensor,
    store: tl.constexpr, back: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    piece = tl.program_id(0)
    begin = tl.load(begins + piece)
    address = tl.load(addresses + piece)
    size = tl.load(sizes + piece)
    words = size * 0
    summed = tl.zeros((lanes,), tl.int64)
    if ((begin | address) & 15) == 0:
        words = size // 8
        source = (mask + tl.multiple_of(begin, 16)).to(tl.pointer_type(tl.int64))
        target = tl.multiple_of(address, 16).to(tl.pointer_type(tl.int64))
        at = words * 0
        while at < words:
            summed += _part(source, target, at, words, begin, store, back, lanes)
            at += lanes
    done = words * 8
    source8 = mask + begin
    target8 = address.to(tl.pointer_type(tl.uint8))
    while done < size:
        summed += _part(source8, target8, done, size, begin, store, back, lanes)
        done += lanes
    tl.store(marks + piece, tl.sum(summed, 0))


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _weigh_pieces(
    mask: tensor, begins: tensor, addresses: tensor, sizes: tensor, keys: tensor, sums: tensor,
    kind: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr,
) -> None:  # fmt: skip
    piece = tl.program_id(0)
    source = (mask + tl.load(begins + piece)).to(tl.pointer_type(kind))
    target = tl.load(addresses + piece).to(tl.pointer_type(kind))
    key = tl.load(keys + piece)
    count = tl.load(sizes + piece) // width
    summed = tl.zeros((lanes,), tl.int64)
    at = count * 0
    while at < count:
        lane = at + tl.arange(0, lanes)
        bits = tl.load(source + lane, mask=lane < count, other=0)
        live = bits != 0
        if tl.max(live.to(tl.int32), 0) > 0:
            old = tl.load(target + lane, mask=live, other=0)
            term = (key + lane.to(tl.int64)).to(tl.uint64, bitcast=True)
            summed += tl.where(live, h_change(term, old, old ^ bits, width), 0)
        at += lanes
    tl.store(sums + piece, tl.sum(summed, 0))


def xor_pieces(
    mask: torch.Tensor,
    *,
    begins: torch.Tensor,
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    marks: torch.Tensor,
    store: bool,
    back: bool = False,
) -> None:
    """See ``MaskOps.xor_pieces``."""
    if len(begins):
        _xor_pieces[(len(begins),)](
            mask, begins, addresses, sizes, marks, store=store, back=back, lanes=_LANES
        )


def weigh_pieces(
    mask: torch.Tensor,
    *,
    begins: torch.Tensor,
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    keys: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """See ``MaskOps.weigh_pieces``."""
    sums = torch.zeros(len(begins), dtype=torch.int64, device=mask.device)
    if len(begins):
        kind: Any = KINDS[width]
        _weigh_pieces[(len(begins),)](
            mask, begins, addresses, sizes, keys, sums, kind=kind, width=width, lanes=_LANES
        )
    return sums
