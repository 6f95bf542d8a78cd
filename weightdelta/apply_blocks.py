"""apply, from raw blocks: decode masks into one slot while the other is taken into the weights.

The path for ``snappy+zstd`` and ``lz4+zstd``, and for decompression engines: Zstd has been taken
off on the CPU while serving; what is left are raw blocks in pinned host memory. In the pause they
travel to the device a group of frames at a time, are decoded by nvCOMP into one of two slots, and
a kernel takes each mask into the weights while the next one is being decoded.

A mask, unlike a list of absolute values, says nothing about the weights it belongs to. So a dry
run decodes everything once, sums what it would change of the state digest, and keeps a mark of
every piece of mask with the weights under it. The pause makes the marks anew: a block that
decodes otherwise than it did, or weights edited in between, are found before the update counts,
and the masks are taken back.

Marks are also what makes it safe to go on after an interruption. A XOR taken twice is none, so
where it is not known how far the last pass came, each piece's mark is made both ways: it says
whether the piece is old, new or neither, and only those that are not yet where they belong are
taken in.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from weightdelta import threads
from weightdelta.block_groups import Group, Layout, table_room
from weightdelta.block_memory import PIECE_MEAN, SLOTS, BlockMemory, Host, Use, source_of
from weightdelta.codecs.blocks import Inner
from weightdelta.device_memory import Lane, Mark, on_device
from weightdelta.errors import Dirty, NotPrepared, StateMismatch
from weightdelta.pieces import MaskFrame as MaskFrame
from weightdelta.pieces import pieces_of, room_of, whole

U64 = npt.NDArray[np.uint64]

#: Mask bytes that a slot holds, unless one frame has more.
SLOT_BYTES: Final = 192 << 20
#: Threads that check and lay out blocks, unless the caller brings some.
_THREADS: Final = 16


class BlockApply:
    """One update of resident weights on one device, from raw blocks; for one thread at a time.

    The caller keeps the weights alive and where they are.

    Args:
        frames: What to apply, all of one bitstream; no mask is larger than a slot.
        inner: Their bitstream.
        tensors: Rows of the digest table.
        device: Where the weights lie.
        slot_bytes: Mask bytes in each of the two slots; one frame at least.
        memory: Slots, decoders and host memory to share, instead of slots of its own.
        pool: Threads that check and lay out blocks.

    Raises:
        DamagedObject: A block is not what its place calls for.
        ConfigError: nvCOMP or Triton is missing for a GPU; the CPU path serves.
        DeviceMemory: No room for the slots.

    Attributes:
        pinned_bytes: Host memory that raw blocks and the entries of their pieces take.
        changed: Elements that differ.
        frames: How many there are.
        engine: What decodes.
    """

    def __init__(
        self,
        frames: Sequence[MaskFrame],
        *,
        inner: Inner,
        tensors: int,
        device: torch.device | str,
        slot_bytes: int = SLOT_BYTES,
        memory: BlockMemory | None = None,
        pool: Executor | None = None,
    ) -> None:
        kept = [f for f in frames if f.blocks.sizes.any()]
        self._device, self._tensors = torch.device(device), tensors
        self._memory = memory or _own(kept, slot_bytes, self._device)
        self._decoder = self._memory.decoder(inner)
        self.engine = self._decoder.engine
        self.frames, self.changed = len(kept), sum(f.changed for f in kept)
        #: Whether the new values are in the weights; None: perhaps some.
        self._held: bool | None = False
        self._careful = self._rehearsed = False
        self._running: list[Any] = []
        self._lent: list[Callable[[], Any]] = []
        with on_device(self._device, doing="preparing raw blocks"):
            self._memory.lanes.wait()  # nothing reads host memory any more that will be filled
            with nullcontext(pool) if pool else _threads() as threads:
                try:
                    self._stage(kept, threads)
                except BaseException:
                    self.clear()  # an error that is kept would keep what was lent
                    raise

    def _stage(self, frames: Sequence[MaskFrame], pool: Executor) -> None:
        """Lay the blocks out in host memory, and say where things go."""
        layout = Layout(self._memory, decoder=self._decoder, pool=pool)
        plan = layout.plan(frames)
        lent = self._lend("blocks" if self._decoder.refusal else "engine")
        self._host = lent.get(room_of(frames))
        self._tables = self._lend("tables").get(table_room(plan))
        source = source_of(lent, self._host)
        self._groups = list(
            layout.groups(plan, source=source, host=self._host, tables=self._tables)
        )
        self.pinned_bytes = len(self._host) + len(self._tables)
        with self._memory.lanes.low:
            #: Sum of the marks that a pass found in each group.
            self._found = torch.zeros(len(plan), dtype=torch.int64, device=self._device)
            self._wrong = torch.zeros(1, dtype=torch.int64, device=self._device)
        pinned = self._device.type == "cuda"
        self._answer = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)

    def _lend(self, use: Use) -> Host:
        """Memory that goes back with :meth:`clear`, or when nobody holds this any more."""
        lent = self._memory.lend(use)
        give = weakref.finalize(self, self._memory.give, use, lent)
        give.atexit = False
        self._lent.append(give)
        return lent

    @property
    def own_bytes(self) -> int:
        """Device memory that is not shared."""
        return self._found.nbytes + self._wrong.nbytes

    @property
    def device_bytes(self) -> int:
        """Device memory taken beside the weights, the slots included."""
        return self.own_bytes + self._memory.nbytes

    def dry_run(self) -> U64:
        """Decode everything, store nothing, and tell what would change; at low priority.

        Returns:
            uint64 [tensors], digest change of each.

        Raises:
            DeviceLost: The device failed.
        """
        low, kernels = self._memory.lanes.low, self._memory.kernels

        def look(_: int, group: Group, slot: torch.Tensor) -> None:
            # Marks first: an edit in between is then seen by the sums, an edit before by both.
            mask, at = group.job.target, group.columns(slot)
            kernels.xor_pieces(mask, **at.places, marks=at.expected, store=False, back=False)
            change = kernels.weigh_pieces(mask, **at.places, keys=at.keys, width=group.width)
            sums.index_add_(0, at.tensors, change)
            kept = group.columns(self._tables[group.table :]).expected
            kept.copy_(at.expected, non_blocking=True)

        with on_device(self._device, doing="dry run of raw blocks"):
            low.after_caller()
            with low:
                sums = torch.zeros(self._tensors, dtype=torch.int64, device=self._device)
            self._each(look, lane=low, whole_tables=True)
            self._rehearse()
            self._end(self._memory.lanes.pause)
        self._held, self._rehearsed = False, True
        return sums.cpu().numpy().view(np.uint64)

    def _rehearse(self) -> None:
        """Compile, load and allocate what a pause needs, on one piece of no size nowhere."""
        low, pause = self._memory.lanes.low, self._memory.lanes.pause
        if self._groups:
            with low:  # all of it: what another stream fills would not be there yet
                begin, address, marks = torch.zeros(
                    3, 1, dtype=torch.int64, device=self._device
                ).unbind()
                size = torch.zeros(1, dtype=torch.int32, device=self._device)
                places = {"begins": begin, "addresses": address, "sizes": size}
                for store, back in ((False, True), (True, False), (True, True)):
                    self._memory.kernels.xor_pieces(
                        self._memory.masks[0], **places, marks=marks, store=store, back=back
                    )
        pause.after(low.mark())
        with pause:
            self._found[:1] = self._found.sum()
            self._wrong += (self._found != self._found).sum()
            self._answer.copy_(self._wrong, non_blocking=True)

    def clear(self) -> None:
        """Give memory back; all work must have ended."""
        self._groups = []
        self._found = torch.zeros(0, dtype=torch.int64)
        self._rehearsed, self.pinned_bytes, self.changed, self.frames = False, 0, 0, 0
        self._host = self._tables = torch.zeros(0, dtype=torch.uint8)
        for give in self._lent:
            give()

    def close(self) -> None:
        """Give back the slots, too, where nobody shares them."""
        self.clear()
        self._memory.release()

    # --- the pause ----------------------------------------------------------------------------

    def begin(self, *, back: bool) -> None:
        """Start taking all masks in (``back``: out again); ``finish`` has to follow.

        Nothing here waits for the device.

        Raises:
            DeviceLost: A launch failed; the weights belong to no version.
            NotPrepared: There was no dry run.
        """
        if not self._rehearsed:
            raise NotPrepared("raw blocks were not looked at; call dry_run() first")
        self._careful, self._held = self._held is not back, None
        pause = self._memory.lanes.pause
        with on_device(self._device, doing="apply"):
            pause.after_caller()
            self._store(back=back)
            with pause:
                self._answer.copy_(self._wrong, non_blocking=True)

    def finish(self, *, back: bool) -> None:
        """Wait until all masks are taken in (``back``: out).

        Raises:
            StateMismatch: Weights were edited after the dry run, or a block decoded otherwise.
                What had been stored was put back.
            DeviceLost: The device failed; the weights belong to no version.
            Dirty: What had been stored could not be put back.
        """
        with on_device(self._device, doing="apply"):
            self._end(self._memory.lanes.pause)
        wrong = int(self._answer[0])
        if not wrong:
            self._held = not back
            return
        restored = (
            "They were left as they are, and all others put back"
            if self._careful
            else "What had been stored was put back. Nothing was changed"
        )
        self.put_back(back=back)
        raise StateMismatch(
            f"weights on {self._device}: expected those that the prepared masks are for, found "
            f"others ({wrong} pieces of at most 64 KiB); they were edited after prepare(), or a "
            f"block decoded otherwise. {restored}; reload a checkpoint and attach()"
        )

    def put_back(self, *, back: bool) -> None:
        """Undo a ``begin(back=back)`` that has returned, finished or not.

        Raises:
            DeviceLost: The device failed.
            Dirty: The same blocks gave other masks this time.
        """
        pause = self._memory.lanes.pause
        with on_device(self._device, doing="apply"):
            with pause:
                before = self._found.clone()
            self._store(back=not back)
            self._end(pause)
            with pause:
                same = self._careful or torch.equal(before, self._found)
        if not same:
            raise Dirty(
                f"weights on {self._device} were edited, or a block decoded otherwise, and the "
                "same blocks gave other masks when taken back; reload a checkpoint and attach()"
            )
        self._held = None if self._careful else back

    def apply(self) -> None:
        """Take all masks into the weights; they are the new version when this returns.

        Raises as :meth:`begin` and :meth:`finish`.
        """
        self.begin(back=False)
        self.finish(back=False)

    def undo(self) -> None:
        """Take all masks back out of the weights. Raises as :meth:`apply`."""
        self.begin(back=True)
        self.finish(back=True)

    def _store(self, *, back: bool) -> None:
        pause = self._memory.lanes.pause
        with pause:
            self._wrong.zero_()
        self._each(partial(self._settle if self._careful else self._take, back=back), lane=pause)

    def _take(self, i: int, group: Group, slot: torch.Tensor, *, back: bool) -> None:
        """Take one mask in, whatever is there; the marks tell."""
        at, marks = group.columns(slot), group.marks(slot)
        self._memory.kernels.xor_pieces(
            group.job.target, **at.places, marks=marks, store=True, back=back
        )
        self._wrong += (marks != at.expected).sum()
        self._found[i] = marks.sum()

    def _settle(self, _: int, group: Group, slot: torch.Tensor, *, back: bool) -> None:
        """Take in those pieces that are known to need it; count those that are neither."""
        kernels, mask, at = self._memory.kernels, group.job.target, group.columns(slot)
        old, new = torch.empty_like(at.expected), group.marks(slot)
        kernels.xor_pieces(mask, **at.places, marks=old, store=False, back=False)
        kernels.xor_pieces(mask, **at.places, marks=new, store=False, back=True)
        is_old, is_new = old == at.expected, new == at.expected
        # Both hold where the mask is zero, and it does not matter then.
        due = is_new & ~is_old if back else is_old & ~is_new
        self._wrong += (~(is_old | is_new)).sum()
        places = {**at.places, "sizes": at.sizes * due}
        kernels.xor_pieces(mask, **places, marks=old, store=True, back=False)

    def _each(
        self,
        work: Callable[[int, Group, torch.Tensor], None],
        *,
        lane: Lane,
        whole_tables: bool = False,
    ) -> None:
        """Copy and decode group after group; ``work`` runs in ``lane`` beside the next decode.

        It is given the group's number, the group, and the slot that its tables are in. Nothing
        here waits for the device.
        """
        decoding, decoded, worked = self._memory.lanes.decoding, list[Mark](), list[Mark]()
        # After what an interrupted pass may have left running in the same slots.
        self._memory.lanes.line_up(lane)
        for i, group in enumerate(self._groups):
            before = (decoded[i - SLOTS], worked[i - SLOTS]) if i >= SLOTS else ()
            self._send(i, group, before, group.table_bytes if whole_tables else group.short)
            if before:
                decoding.after(worked[i - SLOTS])
            self._running.append(self._decoder.start(group.job))
            decoded.append(decoding.mark())
            lane.after(decoded[i])
            with lane:
                work(i, group, self._memory.tables[i % SLOTS])
            worked.append(lane.mark())

    def _send(self, i: int, group: Group, before: Sequence[Mark], table: int) -> None:
        """Blocks and tables to their slots, once what was there is no longer needed."""
        memory, link = self._memory, self._memory.lanes.link
        for mark in before[:1]:
            link.after(mark)
        if self._decoder.refusal:  # an engine reads host memory itself
            with link:
                part = self._host[group.raw]
                memory.raws[i % SLOTS][: len(part)].copy_(part, non_blocking=True)
        for mark in before[1:]:
            link.after(mark)
        with link:
            part = self._tables[group.table : group.table + table]
            memory.tables[i % SLOTS][: len(part)].copy_(part, non_blocking=True)
        memory.lanes.decoding.after(link.mark())

    def _end(self, lane: Lane) -> None:
        """Wait for a pass; its lane comes last."""
        lane.wait()
        self._running.clear()


def _threads() -> ThreadPoolExecutor:
    return threads.pool(min(os.cpu_count() or 1, _THREADS), "weightdelta-blocks")


def _own(frames: Sequence[MaskFrame], slot_bytes: int, device: torch.device) -> BlockMemory:
    """Slots of no more than all masks, and of one frame at least."""
    sizes = [whole(f.blocks.size) for f in frames]
    slot = max([min(sum(sizes), slot_bytes), *sizes])
    pieces = max([slot // PIECE_MEAN, *(len(pieces_of(f).begin) for f in frames)])
    return BlockMemory(device, slot_bytes=slot, pieces=pieces)
