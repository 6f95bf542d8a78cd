"""Frames' raw blocks laid out in host memory, in groups whose masks share a slot."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightdelta.block_memory import ENTRY, SLOTS, BlockMemory
from weightdelta.codecs.blocks import block_lengths, check_blocks
from weightdelta.codecs.decoding import Decoder, Job, Source
from weightdelta.codecs.transcode import ALIGN
from weightdelta.kernels.cpu_walk import lay_out
from weightdelta.kernels.planes import BLOCK_BYTES
from weightdelta.pieces import MaskFrame, Pieces, grouped, pieces_of, room_of, whole

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Entries of a group's pieces, as views of one piece of memory, host or device.

    Attributes:
        expected: int64, the mark of each piece, known after a dry run.
        begins, addresses: int64, first byte in the mask and in the weights.
        sizes: int32, bytes.
        keys, tensors: int64, index term and digest row; only a dry run needs them.
    """

    expected: torch.Tensor
    begins: torch.Tensor
    addresses: torch.Tensor
    sizes: torch.Tensor
    keys: torch.Tensor
    tensors: torch.Tensor

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """What mask kernels are given of them."""
        return {"begins": self.begins, "addresses": self.addresses, "sizes": self.sizes}


@dataclass(frozen=True, slots=True)
class Group:
    """Frames of one width whose masks share a slot, as the device needs them.

    Attributes:
        raw: Where their blocks lie in host memory.
        pieces: How many they have.
        table: Where the pieces' entries begin in host memory.
    """

    width: int
    raw: slice
    job: Job
    pieces: int
    table: int

    @property
    def short(self) -> int:
        """Bytes of the entries that a pause needs; they come first."""
        return 24 * self.pieces + -(-4 * self.pieces // 8) * 8

    @property
    def table_bytes(self) -> int:
        """Bytes of all entries."""
        return self.short + 16 * self.pieces

    def columns(self, memory: torch.Tensor) -> Columns:
        """The entries in ``memory``, uint8 from where they begin on."""
        n, end = self.pieces, self.short

        def part(low: int, size: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
            return memory[low : low + size].view(kind)

        return Columns(
            part(0, 8 * n),
            part(8 * n, 8 * n),
            part(16 * n, 8 * n),
            part(24 * n, 4 * n, torch.int32),
            part(end, 8 * n),
            part(end + 8 * n, 8 * n),
        )

    def marks(self, slot: torch.Tensor) -> torch.Tensor:
        """int64 [pieces], what is left for marks in a slot for tables."""
        return slot[len(slot) - 8 * self.pieces :].view(torch.int64)


class Layout:
    """Lays the blocks of frames out in host memory and says where they go.

    Args:
        memory: Slots.
        decoder: What will decode them.
        pool: Threads that do it.
    """

    def __init__(self, memory: BlockMemory, *, decoder: Decoder, pool: Executor) -> None:
        self._memory, self._decoder, self._pool = memory, decoder, pool

    def plan(self, frames: Sequence[MaskFrame]) -> list[tuple[list[MaskFrame], list[Pieces]]]:
        """Groups of frames, and their pieces."""
        found = list(self._pool.map(pieces_of, frames))
        counts, memory = [len(p.begin) for p in found], self._memory
        parts = grouped(frames, memory.slot_bytes, pieces=counts, most=memory.pieces)
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        return [(part, found[a:b]) for part, (a, b) in zip(parts, pairwise(ends), strict=True)]

    def groups(
        self,
        plan: Sequence[tuple[list[MaskFrame], list[Pieces]]],
        *,
        source: Source,
        host: torch.Tensor,
        tables: torch.Tensor,
    ) -> Iterator[Group]:
        """The groups, in order.

        Args:
            plan: From :meth:`plan`.
            source: What the decoder reads ``host`` through.
            host: uint8, for blocks.
            tables: uint8, for the entries of pieces.

        Raises:
            DamagedObject: A block is not what its place calls for.
        """
        ends = np.cumsum([0, *(room_of(frames) for frames, _ in plan)]).tolist()
        at = 0
        for i, ((frames, parts), low, high) in enumerate(zip(plan, ends, ends[1:], strict=False)):
            job = self._job(frames, i % SLOTS, slice(low, high), source, host)
            count = sum(len(p.begin) for p in parts)
            found = Group(frames[0].width, slice(low, high), job, count, at)
            _tell(found.columns(tables[at:]), frames, parts)
            at += found.table_bytes
            yield found

    def _job(
        self,
        frames: Sequence[MaskFrame],
        slot: int,
        raw: slice,
        source: Source,
        host: torch.Tensor,
    ) -> Job:
        out, masks = host.numpy(), _mask_begins(frames)
        starts = np.cumsum([raw.start, *(room_of([f]) for f in frames)]).tolist()
        filled = [
            self._pool.submit(_fill, f, out, at) for f, at in zip(frames, starts, strict=False)
        ]
        wait(filled)  # also those after a damaged one: the memory goes to the next update
        offsets, sizes = _joined([one.result() for one in filled])
        targets, lengths = _joined([_targets(f, at) for f, at in zip(frames, masks, strict=True)])
        by_engine = not self._decoder.refusal
        return self._decoder.job(
            source if by_engine else self._memory.raws[slot],
            offsets=offsets if by_engine else offsets - raw.start,
            sizes=sizes,
            target=self._memory.masks[slot],
            targets=targets,
            lengths=lengths,
            where=f"{frames[0].where} to {frames[-1].where}",
        )


def table_room(plan: Sequence[tuple[list[MaskFrame], list[Pieces]]]) -> int:
    """Bytes of host memory that the entries of all pieces take at most."""
    return sum(ENTRY * len(p.begin) for _, parts in plan for p in parts)


def _fill(frame: MaskFrame, out: npt.NDArray[np.uint8], at: int) -> tuple[I64, I64]:
    """Check a frame's blocks and copy them to ``out`` from ``at`` on: offsets, sizes."""
    check_blocks(frame.blocks, where=frame.where)
    sizes = frame.blocks.sizes.astype(np.int64)
    room = -(-sizes // ALIGN) * ALIGN
    lay_out(frame.blocks.arena, frame.blocks.sizes, align=ALIGN, out=out[at:])
    kept = sizes > 0
    return (at + np.cumsum(room) - room)[kept], sizes[kept]


def _tell(columns: Columns, frames: Sequence[MaskFrame], parts: Sequence[Pieces]) -> None:
    """Write the entries of all pieces of a group to host memory."""
    begins = _mask_begins(frames)
    rows = [
        (p.begin + mask, p.address, p.size, p.key.view(np.int64), p.tensor.astype(np.int64))
        for p, mask in zip(parts, begins, strict=True)
    ]
    targets = (columns.begins, columns.addresses, columns.sizes, columns.keys, columns.tensors)
    for target, found in zip(targets, _joined(rows), strict=True):
        target.numpy()[:] = found


def _mask_begins(frames: Sequence[MaskFrame]) -> list[int]:
    """Where each mask begins in its slot."""
    ends: list[int] = np.cumsum([0, *(whole(f.blocks.size) for f in frames)]).tolist()
    return ends[:-1]


def _targets(frame: MaskFrame, mask: int) -> tuple[I64, I64]:
    """Where a frame's present blocks go in its slot, and their bytes of mask."""
    present = np.flatnonzero(frame.blocks.sizes)
    return mask + present * BLOCK_BYTES, block_lengths(frame.blocks.size)[present]


def _joined(columns: Sequence[tuple[npt.NDArray[Any], ...]]) -> list[npt.NDArray[Any]]:
    return [np.concatenate(column) for column in zip(*columns, strict=True)]
