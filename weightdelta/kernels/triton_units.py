"""How encode cuts chunks into units, and where each chunk's planes begin."""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import DeviceChunks
from weightdelta.kernels.planes import GAP_FACTOR
from weightdelta.kernels.triton_digest import stable

_FACTOR: Final = tl.constexpr(GAP_FACTOR)

#: Rows of ``sizes``: what a chunk takes of each plane, and whether it spills.
GAPS: Final = tl.constexpr(0)
BITS: Final = tl.constexpr(1)
VALUES: Final = tl.constexpr(2)
SPILLS: Final = tl.constexpr(3)
_ROWS: Final = 4

_BLOCK: Final = 256


@triton.jit
def lane_grid(start: tensor, misaligned: tensor, width: tl.constexpr, lane: tl.constexpr) -> tensor:
    """First lane of a chunk, counted from the window's 8-byte boundary, and its lead.

    Lanes of 8 bytes are aligned; the lead is how many bytes of the first lie before the chunk.
    Lanes of one element have no lead.
    """
    at = start
    lead = start * 0
    if lane > width:
        octet = start * width + misaligned
        at = octet // 8
        lead = octet - at * 8
    return at, lead


@triton.jit
def unit_lanes(
    u: tensor, lead: tensor, length: tensor,
    width: tl.constexpr, lane: tl.constexpr, per_chunk: tl.constexpr, unit: tl.constexpr,
) -> tensor:  # fmt: skip
    """Lanes [first, last) of unit ``u`` of a chunk; the last unit also takes what a lead adds."""
    lanes = (lead + length * width + lane - 1) // lane
    first = u * unit
    last = tl.minimum(first + unit, lanes)
    if u == per_chunk - 1:
        last = lanes
    return first, tl.maximum(last, first)


@stable("chunks", "capacity")
def _forms(
    tally: tensor, length: tensor, counts: tensor, sizes: tensor, chunks: tensor, capacity: tensor,
    per_chunk: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    c = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = c < chunks
    k = tl.zeros((block,), tl.int64)
    most = tl.zeros((block,), tl.int64)
    for u in range(per_chunk):
        found = tl.load(tally + c * per_chunk + u, mask=inside, other=0).to(tl.int64)
        k += found
        most = tl.maximum(most, found)
    n = tl.load(length + c, mask=inside, other=0)
    gaps = (k > 0) & (k * _FACTOR < n)
    bits = (k > 0) & (k < n) & (k * _FACTOR >= n)
    spills = most > capacity
    tl.store(counts + c, k.to(tl.int32), mask=inside)
    tl.store(sizes + GAPS * chunks + c, tl.where(gaps, k, 0), mask=inside)
    tl.store(sizes + BITS * chunks + c, tl.where(bits, (n + 7) // 8, 0), mask=inside)
    tl.store(sizes + VALUES * chunks + c, k, mask=inside)
    tl.store(sizes + SPILLS * chunks + c, spills.to(tl.int64), mask=inside)


@triton.jit
def begin_of(ends: tensor, sizes: tensor, c: tensor, chunks: tensor, row: tl.constexpr) -> tensor:
    """Where chunk ``c`` begins in the plane of ``row``; ``ends`` runs on from row to row."""
    begin = tl.load(ends + row * chunks + c) - tl.load(sizes + row * chunks + c)
    if row > 0:
        begin -= tl.load(ends + row * chunks - 1)
    return begin


def forms(
    tally: torch.Tensor, chunks: DeviceChunks, *, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, plane sizes and their running sums, from the changes of each unit.

    Args:
        tally: int32 [chunks * units of a chunk].
        chunks: Where they lie.
        capacity: Changes of a unit from which on its chunk spills.

    Returns:
        Counts int32 [chunks]; sizes int64 [4, chunks] (gaps, bitmap bytes, values, spills); and
        int64 [4 * chunks], the inclusive sum of sizes from row to row.
    """
    count = len(chunks)
    counts = torch.empty(count, dtype=torch.int32, device=tally.device)
    sizes = torch.empty((_ROWS, count), dtype=torch.int64, device=tally.device)
    if count:
        _forms[(triton.cdiv(count, _BLOCK),)](
            tally, chunks.length, counts, sizes, count, capacity,
            per_chunk=len(tally) // count, block=_BLOCK, num_warps=4,
        )  # fmt: skip
    return counts, sizes, torch.cumsum(sizes.view(-1), 0)


@dataclass(frozen=True, slots=True)
class Totals:
    """What ``forms`` adds up to, on its way to the host."""

    sums: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, ends: torch.Tensor) -> "Totals":
        """Send the last sum of each row; asynchronous."""
        last = ends.view(_ROWS, -1)[:, -1:].reshape(-1)
        if not ends.is_cuda:
            return cls(last, None)
        sums = torch.empty(last.shape, dtype=last.dtype, pin_memory=True)
        sums.copy_(last, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return cls(sums, done)

    def wait(self) -> tuple[int, int, int, int]:
        """Gaps, bytes of bitmaps, values, and chunks that spill."""
        if self.done is not None:
            self.done.synchronize()
        if not len(self.sums):
            return 0, 0, 0, 0
        gaps, bits, values, spills = self.sums.tolist()
        return gaps, bits - gaps, values - bits, spills - values
