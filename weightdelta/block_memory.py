"""What updates from raw blocks share on one device: slots, host memory in turn, decoders.

Taken at first use and kept, so that a receiver that follows takes nothing anew: slots have one
size from the start, and host memory that an update no longer needs goes to the next.
"""

from typing import Final, Literal

import torch

from weightdelta.codecs.decoding import Decoder, HostDecoder, Source
from weightdelta.codecs.engine_memory import EngineBuffer
from weightdelta.codecs.nvcomp import BlockCodec
from weightdelta.codecs.stock import Inner
from weightdelta.device_memory import HostBuffer, Lanes, on_device
from weightdelta.errors import ConfigError, DeviceMemory
from weightdelta.kernels.device import MaskOps, mask_ops

#: Raw bytes in a slot by bytes of mask: no block takes more (``stock.most``), aligned.
RAW_FACTOR: Final = 1.25
#: Slots of masks, and of raw blocks.
SLOTS: Final = 2
#: Bytes of mask that a piece has at least, on average over a slot; frames of shorter rows wait as
#: lists.
PIECE_MEAN: Final = 1024
#: Bytes of a piece's entries in a slot for tables, and of its mark there.
ENTRY: Final = 48
MARK: Final = 8
#: What slots take by the bytes of mask in one of them.
SLOT_FACTOR: Final = SLOTS * (1 + RAW_FACTOR + (ENTRY + MARK) / PIECE_MEAN)
#: Buffers of each use that are kept for the next update.
LENT: Final = 2
#: Memory for an engine is taken in steps of this, so that slowly growing sizes do not take it anew.
_STEP: Final = 1 << 20


class EngineHost:
    """Host memory that a decompression engine reads, kept and grown for reuse: not run here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index or 0
        self._held: EngineBuffer | None = None

    def get(self, size: int) -> torch.Tensor:
        """uint8, ``size`` bytes of unknown content, until the next call."""
        if self._held is None or len(self._held.view) < size:
            self.close()
            self._held = EngineBuffer(-(-size // _STEP) * _STEP, device=self._device)
        return torch.from_numpy(self._held.view)[:size]

    @property
    def source(self) -> EngineBuffer | None:
        """What a decoder is given."""
        return self._held

    def close(self) -> None:
        """Give it back; all work that reads it must have ended."""
        held, self._held = self._held, None
        if held:
            held.close()


Host = HostBuffer | EngineHost
#: What lent memory is for: sizes differ, and each keeps its own.
Use = Literal["blocks", "engine", "tables"]


class BlockMemory:
    """Decoders, slots and host memory of one device; for one thread at a time.

    Args:
        device: Where the weights lie.
        slot_bytes: Mask bytes in each of two slots, a multiple of ``BLOCK_BYTES``.
        lanes: The device's; its own by default.
        pieces: Pieces in a slot at most; as many as ``PIECE_MEAN`` says by default.

    Raises:
        ConfigError: The device is no CPU and nvCOMP or Triton is missing, or finds no GPU.

    Attributes:
        kernels: What takes masks into weights.
        pieces: Pieces in a slot at most.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        slot_bytes: int,
        lanes: Lanes | None = None,
        pieces: int | None = None,
    ) -> None:
        self.device, self.slot_bytes = device, slot_bytes
        self.pieces = slot_bytes // PIECE_MEAN if pieces is None else pieces
        with on_device(device, doing="looking for a decoder of raw blocks"):
            self.lanes = lanes or Lanes.of(device)
            self._decoders = {inner: self._decoder(inner) for inner in ("snappy", "lz4")}
            self.kernels = _kernels(device)
        self._masks: list[torch.Tensor] = []
        self._raws: list[torch.Tensor] = []
        self._tables: list[torch.Tensor] = []
        self._free: dict[Use, list[Host]] = {"blocks": [], "engine": [], "tables": []}

    def _decoder(self, inner: Inner) -> Decoder:
        if self.device.type == "cpu":
            return HostDecoder(inner)
        stream = self.lanes.decoding.stream
        codec = BlockCodec(inner, device=self.device, stream=stream)
        if codec.refusal or not (refusal := _memory_refusal(self.device)):
            return codec
        return BlockCodec(inner, device=self.device, stream=stream, refusal=refusal)

    def decoder(self, inner: Inner) -> Decoder:
        """What decodes a bitstream here."""
        return self._decoders[inner]

    @property
    def nbytes(self) -> int:
        """Device memory of the slots."""
        return sum(slot.nbytes for slot in (*self._masks, *self._raws, *self._tables))

    @property
    def masks(self) -> list[torch.Tensor]:
        """uint8, two slots of ``slot_bytes``.

        Raises:
            DeviceMemory: There is no room for all slots.
        """
        if not self._masks:
            self._take()
        return self._masks

    @property
    def raws(self) -> list[torch.Tensor]:
        """uint8, two slots for the blocks of a mask each. Raises as :attr:`masks`."""
        if not self._masks:
            self._take()
        return self._raws

    @property
    def tables(self) -> list[torch.Tensor]:
        """uint8, two slots for entries of pieces, and their marks. Raises as :attr:`masks`."""
        if not self._masks:
            self._take()
        return self._tables

    def _take(self) -> None:
        """All slots or none; an engine reads host memory itself."""
        needed = any(decoder.refusal for decoder in self._decoders.values())
        with on_device(self.device, doing="prepare raw blocks"), self.lanes.low:
            masks = [self._slot(self.slot_bytes) for _ in range(SLOTS)]
            raws = [self._slot(int(self.slot_bytes * RAW_FACTOR)) for _ in range(SLOTS * needed)]
            tables = [self._slot(self.pieces * (ENTRY + MARK)) for _ in range(SLOTS)]
        self._masks, self._raws, self._tables = masks, raws, tables

    def _slot(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def lend(self, use: Use) -> Host:
        """Host memory that nobody else uses until it is given back."""
        if free := self._free[use]:
            return free.pop()
        return EngineHost(self.device) if use == "engine" else HostBuffer(self.device)

    def give(self, use: Use, host: Host) -> None:
        """Take lent memory back; a delta and the way back need no more than is kept."""
        if len(self._free[use]) < LENT:
            self._free[use].append(host)
        elif isinstance(host, EngineHost):
            host.close()

    def release(self) -> None:
        """Give back all that is not lent; the next update takes it anew.

        Raises:
            DeviceLost: The device failed.
        """
        self._masks, self._raws, self._tables = [], [], []
        engines = [host for host in self._free["engine"] if isinstance(host, EngineHost)]
        self._free = {"blocks": [], "engine": [], "tables": []}
        if engines:  # torch waits for its own memory; this is not torch's
            with on_device(self.device, doing="release"):
                self.lanes.wait()
        for host in engines:
            host.close()


def source_of(host: Host, memory: torch.Tensor) -> Source:
    """What a decoder reads ``memory`` of ``host`` through."""
    return (host.source or memory) if isinstance(host, EngineHost) else memory


def _memory_refusal(device: torch.device) -> str:
    """Why the decompression engine of ``device`` cannot read host memory; "" when it can."""
    try:
        with EngineBuffer(1, device=device.index or 0) as probe:
            return "" if probe.capable else "the decompression engine does not take host memory"
    except (ConfigError, DeviceMemory) as error:
        return f"no host memory for the decompression engine ({error})"


def _kernels(device: torch.device) -> MaskOps:
    """Raises ConfigError where Triton is needed and not installed."""
    try:
        return mask_ops(device)
    except ImportError as error:
        raise ConfigError(
            f"raw blocks on a GPU need Triton ({error}); install it (the extra `gpu`), or let the "
            "CPU decode"
        ) from error
