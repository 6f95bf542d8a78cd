"""Raw blocks at fixed places in memory, decoded to fixed places: what any decoder of them offers.

``codecs.nvcomp`` decodes on a GPU. :class:`HostDecoder` is the CPU's decoder behind the same two
calls, for weights that lie in host memory.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weightdelta.codecs import stock
from weightdelta.codecs.engine_memory import EngineBuffer
from weightdelta.codecs.stock import Inner
from weightdelta.errors import DamagedObject, DeviceLost

I64 = npt.NDArray[np.int64]
#: Memory that a decoder reads.
Source = torch.Tensor | EngineBuffer


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks at fixed places in memory, ready to be decoded to fixed places.

    Attributes:
        source: uint8, where they lie: memory of the device, or what an engine reads.
        target: uint8, where they go.
        offsets, sizes: int64, of each block in ``source``.
        targets, lengths: int64, of what each gives in ``target``.
        where: What is being read, for messages.
        arguments: The decoder's own form of it.
    """

    source: Source
    target: torch.Tensor
    offsets: I64
    sizes: I64
    targets: I64
    lengths: I64
    where: str
    arguments: tuple[Any, ...]


class Decoder(Protocol):
    """Decodes one bitstream on one device; for one thread at a time.

    Attributes:
        refusal: Why no decompression engine is used; "" when one is.
    """

    refusal: str

    @property
    def engine(self) -> str:
        """What decodes, for reports."""
        ...

    def job(
        self,
        source: Source,
        *,
        offsets: I64,
        sizes: I64,
        target: torch.Tensor,
        targets: I64,
        lengths: I64,
        where: str,
    ) -> Job:
        """Prepare to decode blocks, any number of times, without waiting for the device then."""
        ...

    def start(self, job: Job) -> Any:
        """Decode sound blocks in the decoder's lane.

        Returns:
            What must be kept until the lane is done.

        Raises:
            DeviceLost: The decoder or the device failed.
        """
        ...


class HostDecoder:
    """Blocks in host memory, decoded on the CPU at once."""

    refusal = "the weights lie in host memory"

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    @property
    def engine(self) -> str:
        """What decodes, for reports."""
        return f"CPU: {self.refusal}"

    def job(
        self,
        source: Source,
        *,
        offsets: I64,
        sizes: I64,
        target: torch.Tensor,
        targets: I64,
        lengths: I64,
        where: str,
    ) -> Job:
        """See ``Decoder.job``."""
        return Job(source, target, offsets, sizes, targets, lengths, where, ())

    def start(self, job: Job) -> None:
        """See ``Decoder.start``."""
        source, target = np.asarray(job.source), job.target.numpy()
        columns = (job.offsets, job.sizes, job.targets, job.lengths)
        for at, size, to, length in zip(*(c.tolist() for c in columns), strict=True):
            block, out = source[at : at + size], target[to : to + length]
            try:
                stock.decompress(block, out=out, inner=self._inner, where=job.where)
            except DamagedObject as error:  # it was sound when it was staged
                raise DeviceLost(
                    f"{error}; it was sound before, so this host's memory is not to be trusted: "
                    "restart this process and load the weights anew"
                ) from error
