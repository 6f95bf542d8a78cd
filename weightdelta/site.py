"""What one device holds of a receiver's weights, and where every chunk of a plan lies there."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from weightdelta.block_memory import SLOT_FACTOR, BlockMemory
from weightdelta.chunk_table import ChunkTable, part
from weightdelta.config import DeviceConfig
from weightdelta.device_memory import HostBuffer, Lanes, on_device
from weightdelta.errors import ConfigError, DeviceLost
from weightdelta.kernels.device import DeviceChunks, Placed, addresses, device_ops
from weightdelta.kernels.planes import BLOCK_BYTES
from weightdelta.layout import Layout
from weightdelta.lent_memory import LentMemory
from weightdelta.placement import Resident
from weightdelta.sharding.explicit import I64

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

#: Tables kept: of the run's plan, of a plan before it, and of whole tensors.
_TABLES: Final = 3
#: Share of the staging memory that slots of raw blocks may take.
_BLOCKS: Final = 0.75
#: Slots that streamed lists pass through.
SLOTS: Final = 2


@dataclass(frozen=True, slots=True)
class PlacedWindow:
    """The chunks of consecutive frames of one element width.

    Attributes:
        tensor: int64 [chunks], on the host, the tensor that each is of.
    """

    chunks: DeviceChunks
    placed: Placed
    width: int
    tensor: I64


@dataclass(frozen=True, slots=True)
class SiteTable:
    """A table of chunks on the host and on the device, with their places.

    Attributes:
        begin: int64 [chunks], where each begins: ``kernels.device.addresses``.
    """

    host: ChunkTable
    chunks: DeviceChunks
    placed: Placed
    begin: torch.Tensor

    def window(self, first: int, last: int) -> PlacedWindow:
        """The chunks of frames ``first`` to ``last``, both included; asynchronous."""
        low, high = int(self.host.bounds[first]), int(self.host.bounds[last + 1])
        cut = slice(low, high)
        on, at = self.chunks, self.placed
        chunks = DeviceChunks(
            part(self.host.chunks, low, high),
            on.start[cut],
            on.length[cut],
            on.key[cut],
            on.skip[cut],
            on.run[cut],
            on.stride[cut],
        )
        placed = Placed(
            at.address[cut],
            at.first[cut],
            at.tensor[cut],
            None if at.box is None else at.box[cut],
            at.boxes,
            torch.argsort(self.begin[cut]).to(torch.int32),
        )
        return PlacedWindow(chunks, placed, int(self.host.width[first]), self.host.tensor[cut])


class Site:
    """The residents of one device, and what preparations there share.

    Attributes:
        lanes: What works here; ``low``, ``pause`` and ``link`` are three of them.
        landing: Pinned memory that planes pass through, ...
        lent: ... unless they have been decoded into some.
        slots: Device memory that streamed lists pass through in a pause.
        blocks: What raw blocks pass through; None where everything waits as lists.

    Raises:
        ConfigError: Raw blocks are asked for, and nothing here decodes them.
    """

    def __init__(
        self,
        residents: Sequence[Resident],
        *,
        device: torch.device,
        layout: Layout,
        config: DeviceConfig,
    ) -> None:
        self.device = device
        self.residents = {r.tensor: r for r in residents}
        self.layout = layout
        self.config = config
        self.ops = device_ops(device)
        self.lanes = Lanes.of(device)
        self.low, self.pause, self.link = self.lanes.low, self.lanes.pause, self.lanes.link
        self.landing = [HostBuffer(device) for _ in range(2)]
        self.lent = LentMemory(device)
        self.slots: list[torch.Tensor] = []
        self._tables: dict[object, SiteTable] = {}
        self.blocks: BlockMemory | None = None
        if config.blocks == "raw":
            self.blocks = self._block_memory()
        # Whole tensors in this order keep equal widths together.
        self.order = sorted(self.residents, key=lambda t: (layout.tensors[t].width, t))

    def table(self, key: object, host: ChunkTable) -> SiteTable:
        """A table's counterpart here, made once for each ``key``."""
        if key not in self._tables:
            with on_device(self.device, doing="prepare"), self.low:
                while len(self._tables) >= _TABLES:
                    del self._tables[next(iter(self._tables))]
                chunks = DeviceChunks.of(host.chunks, device=self.device)
                placed = self._place(host)
                width = np.repeat(host.width, np.diff(host.bounds)).astype(np.int64)
                widths = torch.from_numpy(width).to(self.device)
                begin = addresses(chunks, placed, width=widths)
                self._tables[key] = SiteTable(host, chunks, placed, begin)
                self.low.wait()
        return self._tables[key]

    def host_table(self, key: object) -> ChunkTable | None:
        """The host's part of a table that was made before."""
        found = self._tables.get(key)
        return found.host if found else None

    def reserve(self, size: int) -> None:
        """Have two slots of at least ``size`` bytes."""
        if not self.slots or len(self.slots[0]) < size:
            self.slots = []
            with self.low:
                self.slots = [
                    torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)
                ]

    def settle(self) -> None:
        """Return once nothing is under way here; a device that failed does nothing any more."""
        with suppress(DeviceLost), on_device(self.device, doing="waiting for the device"):
            self.lanes.wait()

    def release(self) -> None:
        """Give back what preparations share; the next one takes it anew."""
        self.settle()
        self.slots = []
        if self.blocks:
            self.blocks.release()
        self.landing = [HostBuffer(self.device) for _ in range(2)]
        self.lent = LentMemory(self.device)
        self._tables.clear()

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots."""
        return sum(len(slot) for slot in self.slots)

    def _block_memory(self) -> BlockMemory:
        try:
            return BlockMemory(self.device, slot_bytes=self._block_slot(), lanes=self.lanes)
        except ConfigError as error:
            raise ConfigError(
                f"device.blocks is 'raw', and nothing decodes them on {self.device}: {error}; "
                "or set device.blocks to 'lists'"
            ) from error

    def _block_slot(self) -> int:
        """Mask bytes in a slot: fixed, so that an update and the way back share them."""
        allowed = int(self.config.staging_bytes * _BLOCKS / SLOT_FACTOR) // BLOCK_BYTES
        wanted = -(-sum(r.source.nbytes for r in self.residents.values()) // BLOCK_BYTES)
        return min(allowed, wanted) * BLOCK_BYTES

    def _place(self, host: ChunkTable) -> Placed:
        count = len(self.layout.tensors)
        address, box = np.zeros(count, np.int64), np.zeros(count, np.int32)
        rows = [self._nowhere()]
        for tensor, resident in self.residents.items():
            address[tensor], box[tensor] = resident.address, -1
            if not resident.source.is_contiguous():
                box[tensor] = len(rows)
                rows.append(_box(resident))
        boxed = bool((box[host.tensor] >= 0).any())

        def up(column: Ints) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(column)).to(self.device)

        return Placed(
            up(address[host.tensor]),
            up(host.first),
            up(host.tensor.astype(np.int32)),
            up(box[host.tensor]) if boxed else None,
            up(_stacked(rows)) if boxed else None,
        )

    @staticmethod
    def _nowhere() -> list[list[int]]:
        """The box of a tensor that is not here: it holds nothing."""
        return [[1 << 60], [0], [0], [0]]


def _box(resident: Resident) -> list[list[int]]:
    """Extent, offset, shape and stride of a whole tensor with strides of its own."""
    shape = list(resident.spec.extent)
    return [shape, [0] * len(shape), shape, list(resident.source.stride())]


def _stacked(rows: Sequence[list[list[int]]]) -> Ints:
    """int64 [rows, 4, dims], padded in front with dimensions of one element."""
    dims = max(len(row[0]) for row in rows)
    fill = (1, 0, 1, 0)
    return np.array(
        [
            [[pad] * (dims - len(axis)) + axis for pad, axis in zip(fill, row, strict=True)]
            for row in rows
        ],
        np.int64,
    )
