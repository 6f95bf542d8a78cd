"""decode on a device, the other way: frames that wait for the pause as raw blocks.

A frame can, if its codec has blocks, all tensors that it holds a part of lie whole, contiguous and
unshared on the device, and its mask and the table of its pieces fit a slot. What cannot is left to
lists.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weightdelta.apply_blocks import BlockApply
from weightdelta.block_memory import BlockMemory
from weightdelta.chunk_table import ChunkTable
from weightdelta.codecs.blocks import INNER, Inner, read_blocks
from weightdelta.delta import Item
from weightdelta.digest import U64
from weightdelta.errors import DeviceMemory
from weightdelta.fetch import Fetched
from weightdelta.kernels.planes import BLOCK_BYTES
from weightdelta.pieces import MaskFrame, whole
from weightdelta.placement import Resident
from weightdelta.sharding.explicit import I64
from weightdelta.site import Site


class BlockStager:
    """Stages a hop's raw blocks for the residents of one device.

    Args:
        site: The device and its residents.
        pool: Threads that take Zstd off and check blocks.

    Attributes:
        staged: One update for each bitstream.
    """

    def __init__(self, site: Site, *, pool: Executor) -> None:
        self._site, self._pool = site, pool
        self.staged: list[BlockApply] = []
        self._address = _addresses(list(site.residents.values()), len(site.layout.tensors))

    def take(self, fetched: Fetched, table: ChunkTable) -> Fetched:
        """Stage what can wait as raw blocks; returns what cannot.

        Raises:
            DamagedObject: A frame cannot be what the index names, or a block is unsound.
        """
        memory = self._site.blocks
        left = list(fetched.frames)
        for inner in ("snappy", "lz4") if memory else ():
            able = [item for item in left if self._can(fetched, item[0], table, inner)]
            if memory and able and self._stage(self._read(fetched, able, table, inner), memory):
                done = {frame for frame, _ in able}
                left = [item for item in left if item[0] not in done]
        return replace(fetched, frames=fetched.frames.only({frame for frame, _ in left}))

    def sums(self) -> U64:
        """Digest change of each tensor by what was staged: the dry run. Raises DeviceLost."""
        found = np.zeros(len(self._site.layout.tensors), np.uint64)
        for update in self.staged:
            found += update.dry_run()
        return found

    def _can(self, fetched: Fetched, frame: int, table: ChunkTable, inner: Inner) -> bool:
        delta, memory = fetched.delta, self._site.blocks
        if memory is None or INNER.get(delta.index.codec_of(frame)) != inner:
            return False
        held = table.tensor[int(table.bounds[frame]) : int(table.bounds[frame + 1])]
        size = int(delta.plan.numel[frame]) * int(table.width[frame])
        if whole(size) > memory.slot_bytes or not (self._address[held] > 0).all():
            return False
        return self._rows(table, frame) + whole(size) // BLOCK_BYTES <= memory.pieces

    @staticmethod
    def _rows(table: ChunkTable, frame: int) -> int:
        """Pieces that chunks and rows cut a frame into, at most."""
        chunks = table.frame(frame)
        rows = np.where(chunks.stride == chunks.run, 0, -(-chunks.length // chunks.run))
        return int(rows.sum()) + 2 * len(chunks)

    def _read(
        self, fetched: Fetched, items: Sequence[Item], table: ChunkTable, inner: Inner
    ) -> list[MaskFrame]:
        """Take the outer stage off, on all threads."""

        def one(item: Item) -> MaskFrame:
            frame, data = item
            delta, width = fetched.delta, int(table.width[frame])
            cut = slice(int(table.bounds[frame]), int(table.bounds[frame + 1]))
            blocks = read_blocks(
                data,
                delta.index.sizes_of(frame),
                inner=inner,
                size=int(delta.plan.numel[frame]) * width,
                where=delta.where(frame),
            )
            return MaskFrame(
                blocks,
                width,
                table.frame(frame),
                self._address[table.tensor[cut]],
                table.first[cut],
                table.tensor[cut].astype(np.int32),
                delta.where(frame),
                int(delta.index.changed[frame]),
            )

        return list(self._pool.map(one, items))

    def _stage(self, frames: Sequence[MaskFrame], memory: BlockMemory) -> bool:
        """Whether there was memory for it; lists need less at a time."""
        try:
            update = BlockApply(
                frames,
                inner=frames[0].blocks.inner,
                tensors=len(self._site.layout.tensors),
                device=self._site.device,
                memory=memory,
                pool=self._pool,
            )
        except DeviceMemory:
            return False
        self.staged.append(update)
        return True


def _addresses(residents: Sequence[Resident], tensors: int) -> I64:
    """int64 [tensors], where each lies that a mask can be taken into as it is; 0 for others."""
    shared = Counter(r.place for r in residents if r.spec.numel)
    found: npt.NDArray[np.int64] = np.zeros(tensors, np.int64)
    for r in residents:
        plain = r.source.is_contiguous() and not r.address % r.spec.width
        if plain and r.spec.numel and shared[r.place] == 1:
            found[r.tensor] = r.address
    return found
