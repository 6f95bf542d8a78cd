"""decode on a device: fetched frames become staged lists in device memory, while it serves.

Frames lose their outer stage on the CPU; their planes go down through pinned memory, and the
device works out what they would make of the resident weights, at low priority, storing nothing.
A path of several deltas is folded into one on the CPU first. Where the settings ask for it, frames
of a single delta that can wait as raw blocks do (``stage_blocks``).
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Final

import numpy as np
import torch

from weightdelta.chunk_table import ChunkTable
from weightdelta.decode_batch import Decoded, decode_all
from weightdelta.device_lists import Part, StagedLists
from weightdelta.device_memory import Mark, on_device, padded
from weightdelta.device_staged import DeviceStaged
from weightdelta.digest import MASK, U64
from weightdelta.errors import DeviceMemory, StateMismatch
from weightdelta.fetch import Fetched
from weightdelta.fold import Folds, as_planes
from weightdelta.kernels.device import INTS, ChunkLists, DevicePlanes
from weightdelta.kernels.planes import Planes
from weightdelta.site import PlacedWindow, Site, SiteTable
from weightdelta.stage_blocks import BlockStager

#: Planes that go down at once at most, unless those of a single frame are more [B].
BATCH_BYTES: Final = 64 << 20


class DeviceStager:
    """Stages the deltas of a path for the residents of one device.

    Args:
        site: The device and its residents.
        pool: Threads that decode.
        hops: Deltas in the path.
        older: Lists of the way back, which give way to these.

    Attributes:
        stage_s: Time spent on handing planes to the device and waiting for it.
    """

    def __init__(
        self, site: Site, *, pool: Executor, hops: int, older: DeviceStaged | None = None
    ) -> None:
        self._site = site
        self._pool = pool
        self._single = hops == 1
        self._older = older
        self._allow()
        self._expected: dict[int, int] = dict.fromkeys(site.residents, 0)
        self._parts: list[Part] = []
        self._marks: list[Mark | None] = [None, None]
        self._flying: list[list[Planes]] = [[], []]
        self._batches = 0
        self.stage_s = 0.0
        self._blocks = BlockStager(site, pool=pool) if site.blocks and self._single else None
        with on_device(site.device, doing="prepare"):
            # What an interruption left running may still use memory that was given back.
            site.lanes.line_up(site.low)
        self._folds = Folds(site.residents, pool=pool)

    def add(self, fetched: Fetched) -> None:
        """Take one hop in; hops come in path order.

        Raises:
            DamagedObject: A frame cannot be what the index names.
            DeviceMemory: Device memory has no room for the planes of one frame.
        """
        fetched = fetched.holding(self._site.residents)
        digests = fetched.delta.index.tensor_digest
        for tensor in self._expected:
            change = int(digests[tensor])
            self._expected[tensor] += change if fetched.hop.forward else -change
        plan, layout = fetched.delta.plan, self._site.layout
        host = self._site.host_table(plan.digest) or ChunkTable.of_plan(plan, layout=layout)
        if self._blocks:
            fetched = self._stage_blocks(self._blocks, fetched, host)
        lent = self._site.lent if self._single else None
        decoded = decode_all(fetched, host, pool=self._pool, lent=lent)
        if not self._single:
            self._folds.add(fetched, decoded, host)
            return
        decoded = self._folds.watch(fetched, decoded, host)
        table = self._site.table(plan.digest, host)
        xor = fetched.delta.entry.values == "xor"
        self._stage_all(table, decoded, xor=xor, negate=not fetched.hop.forward)

    def _stage_blocks(self, blocks: BlockStager, fetched: Fetched, host: ChunkTable) -> Fetched:
        """Stage raw blocks first; lists have the budget that is left. Returns their frames."""
        list(fetched.frames)  # not the device's time
        started = time.monotonic()
        left = blocks.take(fetched, host)
        self.stage_s += time.monotonic() - started
        self._allow()
        return left

    def _allow(self) -> None:
        """Set the budget of lists: what the slots of raw blocks leave."""
        slots = self._site.blocks.nbytes if self._site.blocks else 0
        self._budget = max(self._site.config.staging_bytes - slots, 0)
        self._batch = max(min(BATCH_BYTES, self._budget // 8), 1 << 16)

    def clear(self) -> None:
        """Give all memory back: nothing will come of it."""
        self._site.settle()
        self._parts, self._flying = [], [[], []]
        for update in self._blocks.staged if self._blocks else ():
            update.clear()

    def finish(self) -> DeviceStaged:
        """Everything staged, once its digests have been checked.

        Raises:
            StateMismatch: A tensor's digest would not change as the deltas say.
            LayoutMismatch: Two tensors that lie in the same memory change differently.
        """
        if not self._single:
            self._stage_folded()
        started = time.monotonic()
        with on_device(self._site.device, doing="prepare"):
            self._check(self._sums())
        self._flying = [[], []]  # the sums came after their copies
        self._folds.refuse_untied()
        with on_device(self._site.device, doing="prepare"):
            lists = StagedLists(self._site, self._parts, careful=self._folds.tied)
        lists.rehearse()
        self.stage_s += time.monotonic() - started
        return DeviceStaged(self._site, lists, self._blocks.staged if self._blocks else ())

    def _sums(self) -> U64:
        """Digest change of each tensor, from those of all chunks."""
        table = np.zeros(len(self._site.layout.tensors), np.uint64)
        if self._blocks:
            table += self._blocks.sums()
        if self._parts:
            with self._site.low:
                changes = torch.cat([part.change for part in self._parts]).cpu()
            tensors = np.concatenate([part.window.tensor for part in self._parts])
            np.add.at(table, tensors, changes.numpy().view(np.uint64))
        return table

    def _check(self, found: U64) -> None:
        for tensor, expected in self._expected.items():
            if int(found[tensor]) != expected & MASK:
                name = self._site.residents[tensor].spec.name
                raise StateMismatch(
                    f"tensor {name!r}: expected its digest to change by {expected & MASK:#018x}, "
                    f"found {int(found[tensor]):#018x}; its weights are not the version this "
                    "receiver was at. Nothing was changed; reload a checkpoint and attach()"
                )

    def _stage_folded(self) -> None:
        """Stage what the whole path amounts to, tensor by tensor."""
        order, layout = self._site.order, self._site.layout
        host = self._site.host_table("tensors") or ChunkTable.of_tensors(order, layout=layout)
        table = self._site.table("tensors", host)
        for xor in (False, True):
            decoded = (
                Decoded((i,), as_planes(found, numel=layout.tensors[tensor].numel))
                for i, tensor in enumerate(order)
                if (found := self._folds.of(tensor, xor=xor))
            )
            self._stage_all(table, decoded, xor=xor, negate=False)

    # -- batches -------------------------------------------------------------------------------

    def _stage_all(
        self, table: SiteTable, decoded: Iterator[Decoded], *, xor: bool, negate: bool
    ) -> None:
        width = table.host.width
        batch: list[Decoded] = []
        room = self._batch
        for item in decoded:
            room -= item.nbytes
            if batch and (room < 0 or width[item.frames[0]] != width[batch[0].frames[0]]):
                self._stage(table, batch, xor=xor, negate=negate)
                batch, room = [], self._batch - item.nbytes
            batch.append(item)
        if batch:
            self._stage(table, batch, xor=xor, negate=negate)

    def _stage(
        self, table: SiteTable, batch: Sequence[Decoded], *, xor: bool, negate: bool
    ) -> None:
        if self._fits(table, batch, xor=xor, negate=negate):
            return
        # Not in the handler: the error would keep what was allocated alive.
        torch.cuda.empty_cache()
        frames = [one for item in batch for one in item.split(table.host)]
        middle = max(len(frames) // 2, 1)
        for half in (frames[:middle], frames[middle:]):
            if half:
                self._stage(table, half, xor=xor, negate=negate)

    def _fits(self, table: SiteTable, batch: Sequence[Decoded], *, xor: bool, negate: bool) -> bool:
        """Stage a batch if there is room for it; else make what room there is.

        Raises:
            DeviceMemory: It is a single frame, and there was none to make.
        """
        started = time.monotonic()
        try:
            with on_device(self._site.device, doing="prepare"):
                self._stage_batch(table, batch, xor=xor, negate=negate)
            self.stage_s += time.monotonic() - started
        except DeviceMemory:
            if not self._spill() and sum(len(item.frames) for item in batch) == 1:
                raise
            return False
        return True

    def _stage_batch(
        self, table: SiteTable, batch: Sequence[Decoded], *, xor: bool, negate: bool
    ) -> None:
        with self._site.low:
            window = table.window(batch[0].frames[0], batch[-1].frames[-1])
        planes = self._send(table, window, batch)
        with self._site.low:
            lists, change = self._site.ops.stage(
                planes,
                chunks=window.chunks,
                placed=window.placed,
                width=window.width,
                xor=xor,
                negate=negate,
            )
        self._keep(window, lists, change)

    def _send(
        self, table: SiteTable, window: PlacedWindow, batch: Sequence[Decoded]
    ) -> DevicePlanes:
        """Planes of a batch in device memory, through pinned memory, behind each other."""
        turn = self._batches % 2
        self._batches += 1
        if (mark := self._marks[turn]) is not None:
            mark.wait()  # the copies from this buffer and from these planes, two batches ago
        found = self._flying[turn] = [item.planes for item in batch]
        columns: tuple[list[np.ndarray[Any, Any]], ...] = (
            [_counts(table, window, batch)],
            [p.gaps for p in found],
            [p.bitmap for p in found],
            [p.values for p in found],
        )
        sizes = [sum(a.nbytes for a in column) for column in columns]
        starts = np.cumsum([0, *(padded(size) for size in sizes)]).tolist()
        lent = all(item.lent for item in batch)
        host = self._site.landing[turn].get(starts[1] if lent else starts[-1])
        for start, size, column in zip(starts, sizes, columns[: 1 if lent else None], strict=False):
            _laid(column, out=host[start : start + size])
        with self._site.low:
            # Counts stay with the lists that will be made; the rest goes once they are.
            memory = [
                torch.empty(size, dtype=torch.uint8, device=self._site.device)
                for size in (starts[1], starts[-1] - starts[1])
            ]
            memory[0].copy_(host[: starts[1]], non_blocking=True)
            if lent:
                for start, column in zip(starts[1:], columns[1:], strict=False):
                    _sent(column, out=memory[1][start - starts[1] :])
            else:
                memory[1].copy_(host[starts[1] :], non_blocking=True)
            self._marks[turn] = self._site.low.mark()
        gaps, bitmap, values = (
            memory[1][start - starts[1] : start - starts[1] + size]
            for start, size in zip(starts[1:], sizes[1:], strict=False)
        )
        return DevicePlanes(
            memory[0][: sizes[0]].view(torch.int32),
            gaps.view(torch.int16),
            bitmap,
            values.view(INTS[window.width]),
        )

    def _keep(self, window: PlacedWindow, lists: ChunkLists, change: torch.Tensor) -> None:
        """Keep a part in device memory while the budget lasts, else in pinned memory."""
        old = lists.new if lists.old is None else lists.old
        part = Part(window, lists, old, change, len(lists.new))
        self._parts.append(part)
        if self._wanted > self._budget and self._older:
            self._older.spill()
        if self._wanted > self._budget:
            part.spill(self._site.low)

    @property
    def _wanted(self) -> int:
        """Device memory in use, with slots for streamed parts and a batch on its way [B]."""
        kept = sum(part.nbytes for part in self._parts if not part.streamed)
        held = self._older.list_bytes if self._older else 0
        return kept + held + max(self._site.slot_bytes, 4 * self._batch) + self._batch

    def _spill(self) -> bool:
        """Make what room there is in device memory; whether there was anything to move."""
        kept = [part for part in self._parts if not part.streamed]
        self._budget = 0
        with on_device(self._site.device, doing="prepare"):
            if self._older:
                self._older.spill()
            for part in kept:
                part.spill(self._site.low)
            self._site.low.wait()
        return bool(kept)


def _laid(arrays: Sequence[np.ndarray[Any, Any]], *, out: torch.Tensor) -> None:
    """Arrays one behind the other.

    numpy takes the interpreter's lock back after each of them, which waits for threads that
    decode; torch does after all. It warns of arrays that cannot be written to.
    """
    octets = [a.view(np.uint8) for a in arrays if a.nbytes]
    if not octets:
        return
    if all(a.flags.writeable for a in octets):
        torch.cat([torch.from_numpy(a) for a in octets], out=out)
    else:
        np.concatenate(octets, out=out.numpy())


def _sent(arrays: Sequence[np.ndarray[Any, Any]], *, out: torch.Tensor) -> None:
    """Start the copies of arrays, one behind the other, from where they lie."""
    at = 0
    for array in arrays:
        if array.nbytes:
            target = out[at : at + array.nbytes]
            target.copy_(torch.from_numpy(array.view(np.uint8)), non_blocking=True)
            at += array.nbytes


def _counts(
    table: SiteTable, window: PlacedWindow, batch: Sequence[Decoded]
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Changes in every chunk of a window; frames without any are in no batch."""
    counts = np.zeros(len(window.chunks), np.uint32)
    bounds = table.host.bounds
    low = int(bounds[batch[0].frames[0]])
    for item in batch:
        whole = item.frames[-1] - item.frames[0] + 1 == len(item.frames)
        for one in (item,) if whole else item.split(table.host):
            at = int(bounds[one.frames[0]]) - low
            counts[at : at + len(one.planes.counts)] = one.planes.counts
    return counts
