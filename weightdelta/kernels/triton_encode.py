"""Compare and compact in Triton: two windows become planes.

The work is cut into *units*, a few to a chunk. One warp reads a unit's old and new bytes as
aligned 64-bit *lanes*, tile after tile:

1. ``scan`` XORs a tile and leaves it at once when nothing differs. Otherwise it ranks the changed
   elements within the warp and stores each once, as a record of position, old and new value, to
   the unit's row of scratch.
2. ``forms`` and one prefix sum over the chunks say where everything belongs.
3. ``_pack`` turns records into gaps, values and digest changes. Its cost follows what
   changed. ``bitmaps`` reads chunks in that form once more.
4. Chunks that had more changes in some unit than its row has room for *spill*: ``direct`` reads
   their bytes once more and needs no scratch at any density.

Where the two windows lie differently within 8 bytes, a lane is one element.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language import tensor

from weightdelta.kernels.device import DeviceChunks, DevicePlanes
from weightdelta.kernels.triton_digest import h_change_of, on, products, row_of, stable
from weightdelta.kernels.triton_direct import bitmaps, direct
from weightdelta.kernels.triton_scan import Units, record_at, scan
from weightdelta.kernels.triton_units import GAPS, SPILLS, VALUES, Totals, begin_of, forms

#: Changes that a program of ``_pack`` takes at a time: of all of a chunk's units together where
#: chunks have few, else of one unit. More of them take registers, so fewer programs run at once.
_BLOCK: Final = 128


@triton.jit
def _before(
    tally: tensor, records: tensor, u: tensor, capacity: tensor, per_chunk: tl.constexpr
) -> tuple[tensor, tensor]:
    """Of units ``u`` of a chunk: changes in those before, and where the last of them is, or -1."""
    other = tl.arange(0, per_chunk)[None, :]
    found = tl.load(tally + other)
    earlier = (other < u) & (found > 0)
    base = tl.sum(tl.where(earlier, found, 0), 1)[:, None]
    last = tl.max(tl.where(earlier, other * capacity + found - 1, -1), 1)[:, None]
    position = tl.load(records + last, mask=last >= 0, other=0).to(tl.int32) & 0xFFFF
    return base, tl.where(last >= 0, position, -1)


@stable("chunks", "capacity")
def _pack(
    tally: tensor, records: tensor, pairs: tensor, counts: tensor, sizes: tensor, ends: tensor,
    length: tensor, key: tensor, skip: tensor, run: tensor, stride: tensor, chunks: tensor,
    capacity: tensor,
    gaps: tensor, values: tensor, change: tensor,
    width: tl.constexpr, xor: tl.constexpr, digest: tl.constexpr, per_chunk: tl.constexpr,
    units: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    parts: tl.constexpr = per_chunk // units
    c = tl.program_id(0) // parts
    sums = tl.zeros((units, block), tl.int64)
    # All of it before the first of them is looked at: few waits instead of many.
    some = (tl.load(counts + c) > 0) & (tl.load(sizes + SPILLS * chunks + c) == 0)
    in_gaps = tl.load(sizes + GAPS * chunks + c) > 0
    gap = gaps + begin_of(ends, sizes, c, chunks, GAPS)
    value = values + begin_of(ends, sizes, c, chunks, VALUES)
    n, origin, first = tl.load(length + c), tl.load(key + c), tl.load(skip + c)
    row_run, row_stride = tl.load(run + c), tl.load(stride + c)
    u = tl.program_id(0) % parts * units + tl.arange(0, units)[:, None]
    k = tl.load(tally + c * per_chunk + u)
    if some:
        row = c.to(tl.int64) * per_chunk * capacity
        records += row
        pairs += 2 * row
        base, previous = _before(tally + c * per_chunk, records, u, capacity, per_chunk)
        column, start = row_of(first, row_run, row_stride)
        seed = origin + start + column
        for i in range(0, tl.max(k), block):
            j = i + tl.arange(0, block)[None, :]
            inside = j < k
            at = u * capacity + j
            p, old, new = record_at(records, pairs, at, inside, width)
            q = tl.load(records + at - 1, mask=inside & (j > 0), other=0).to(tl.int32) & 0xFFFF
            q = tl.where(j > 0, q, previous)
            tl.store(gap + (base + j), (p - q - 1).to(tl.int16), mask=inside & in_gaps)
            tl.store(value + (base + j), (new ^ old) if xor else (new - old), mask=inside)
            if digest:
                # Beyond the last both values are 0, which changes nothing.
                product = products(p, n, seed, column, row_run, row_stride)
                sums += h_change_of(product, old, new, width)
    total = tl.sum(tl.sum(sums, 1), 0)
    if parts == 1:
        tl.store(change + c, total)
    elif digest:
        tl.atomic_add(change + c, total, sem="relaxed")


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encode in flight: compared, but its planes not packed yet.

    A pipeline begins the next window before it finishes this one, so that the device has work
    while the host waits for the sizes. ``old`` and ``new`` must not change until then.
    """

    old: torch.Tensor
    new: torch.Tensor
    chunks: DeviceChunks
    units: Units
    counts: torch.Tensor
    sizes: torch.Tensor
    ends: torch.Tensor
    totals: Totals

    def finish(self, *, xor: bool, digest: bool = True) -> tuple[DevicePlanes, torch.Tensor]:
        """Wait for the sizes, then pack; without ``digest`` the digest changes are zeros."""
        gaps, bits, values, spills = self.totals.wait()
        device = self.old.device
        change = torch.zeros(len(self.chunks), dtype=torch.int64, device=device)
        planes = DevicePlanes(
            self.counts,
            torch.empty(gaps, dtype=torch.int16, device=device),
            torch.empty(bits, dtype=torch.uint8, device=device),
            torch.empty(values, dtype=self.old.dtype, device=device),
        )
        with on(self.old):
            if len(self.chunks):
                self._pack(planes, change, xor=xor, digest=digest)
            if bits:
                bitmaps(
                    self.old, self.new, chunks=self.chunks, bitmap=planes.bitmap,
                    sizes=self.sizes, ends=self.ends,
                )  # fmt: skip
            if spills:
                direct(
                    self.old, self.new, chunks=self.chunks, planes=planes, tally=self.units.tally,
                    sizes=self.sizes, ends=self.ends, change=change,
                    misaligned=self.units.misaligned, lane=self.units.lane, unit=self.units.lanes,
                    xor=xor, digest=digest,
                )  # fmt: skip
        return planes, change

    def _pack(self, planes: DevicePlanes, change: torch.Tensor, *, xor: bool, digest: bool) -> None:
        units, chunks = self.units, self.chunks
        whole = len(planes.values) <= 2 * _BLOCK * len(chunks)
        count = units.per_chunk if whole else 1
        _pack[(len(chunks) * units.per_chunk // count,)](
            units.tally, units.records, units.pairs, self.counts, self.sizes, self.ends,
            chunks.length, chunks.key, chunks.skip, chunks.run, chunks.stride,
            len(chunks), units.capacity, planes.gaps, planes.values, change,
            width=units.width, xor=xor, digest=digest, per_chunk=units.per_chunk, units=count,
            block=max(_BLOCK // count, 8), num_warps=1,
        )  # fmt: skip


def begin_encode(old: torch.Tensor, new: torch.Tensor, *, chunks: DeviceChunks) -> Encoding:
    """Compare two windows; asynchronous. ``Encoding.finish`` gives what ``encode`` gives."""
    with on(old):
        units = Units.of(old, new, chunks=len(chunks))
        if len(units.tally):
            scan(old, new, chunks, units)
        counts, sizes, ends = forms(units.tally, chunks, capacity=units.capacity)
        return Encoding(old, new, chunks, units, counts, sizes, ends, Totals.of(ends))


def encode(
    old: torch.Tensor, new: torch.Tensor, *, chunks: DeviceChunks, xor: bool
) -> tuple[DevicePlanes, torch.Tensor]:
    """See ``DeviceOps.encode``."""
    return begin_encode(old, new, chunks=chunks).finish(xor=xor)
