"""Snappy and LZ4 raw blocks on NVIDIA GPUs, by nvCOMP: the only door to it.

nvCOMP's RAW bitstreams are the plain blocks of ``codecs.blocks``: cramjam, pyarrow and our own
zero-run blocks are decoded here, and what is encoded here is decoded there. Decompression runs
on the device's decompression engine where it has one, else on its multiprocessors.

nvCOMP tells nothing of a damaged block: the rest of its place stays as it was, neighbours are
overwritten, or the process loses its GPU (seen with 6.0 on an H200). So all blocks are walked on
the CPU before a device sees them (``blocks.check_blocks``), and ``apply_blocks`` compares what the
pause decodes with what a dry run did.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from weightdelta.codecs import stock
from weightdelta.codecs.decoding import I64, Source
from weightdelta.codecs.decoding import Job as Job
from weightdelta.codecs.stock import Inner
from weightdelta.codecs.transcode import ALIGN
from weightdelta.errors import ConfigError, DeviceLost
from weightdelta.kernels.planes import BLOCK_BYTES

#: nvCOMP's names of the bitstreams.
_NAMES: Final = {"snappy": "Snappy", "lz4": "LZ4"}
_INSTALL: Final = (
    "install nvidia-nvcomp-cu12 or nvidia-nvcomp-cu13 (the extra `gpu`), or let the CPU decode: "
    "it reads the same blocks"
)
#: A probe's content: long enough for a copy.
_PROBE: Final = 4096


@cache
def _library() -> Any:
    """The nvCOMP module.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from nvidia import nvcomp
    except ImportError as error:
        raise ConfigError(f"nvCOMP cannot be imported ({error}); {_INSTALL}") from error
    return nvcomp


def _new(inner: Inner, *, device: torch.device, stream: int, hardware: bool) -> Any:
    """A codec of nvCOMP's for one bitstream, on one stream.

    Raises:
        ConfigError: nvCOMP is missing, or finds no GPU.
    """
    library = _library()
    backend = "HARDWARE" if hardware else "CUDA"
    try:
        return library.Codec(
            algorithm=_NAMES[inner],
            device_id=device.index or 0,
            cuda_stream=stream,
            uncomp_chunk_size=BLOCK_BYTES,
            bitstream_kind=library.BitstreamKind.RAW,
            decompress_backend=getattr(
                library.DecompressBackend, f"NVCOMP_DECOMPRESS_BACKEND_{backend}"
            ),
        )
    except RuntimeError as error:
        raise ConfigError(f"nvCOMP finds no GPU to work on ({error}); {_INSTALL}") from error


def check(device: torch.device | str = "cuda") -> None:
    """Return only if blocks can be encoded and decoded on ``device``.

    Raises:
        ConfigError: It is no CUDA device, or nvCOMP is missing or finds no GPU.
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise ConfigError(f"nvCOMP works on CUDA devices, not on {where}; {_INSTALL}")
    _new("snappy", device=where, stream=0, hardware=False)


@cache
def hardware_refusal(inner: Inner, device: torch.device) -> str:
    """Why blocks are not decoded by a decompression engine on ``device``; "" when they are.

    A codec for the engine can be made on any GPU and fails when it decodes, so a small block is
    tried, once a process.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        content = torch.arange(_PROBE, device=device, dtype=torch.int32).view(torch.uint8)
        block = stock.compress(content.cpu().numpy(), inner=inner)
        source = torch.from_numpy(block.copy()).to(device)
        target = torch.zeros_like(content)
        codec = _new(inner, device=device, stream=stream.cuda_stream, hardware=True)
        try:
            _decode(codec, source, [0], [len(block)], target, [0], [len(content)])
            stream.synchronize()
        except RuntimeError as error:
            return f"no decompression engine for {inner} ({error})"
        if not torch.equal(content, target):
            return f"the decompression engine gives wrong bytes for a {inner} block"
    return ""


def _batch(buffer: Source, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    return _library().as_arrays(buffer, list(offsets), list(sizes))


def _decode(
    codec: Any,
    source: torch.Tensor,
    offsets: Sequence[int],
    sizes: Sequence[int],
    target: torch.Tensor,
    targets: Sequence[int],
    lengths: Sequence[int],
) -> Any:
    return codec.decode(
        _batch(source, offsets, sizes),
        out=_batch(target, targets, lengths),
        decompression_config=codec.decompression_config(codec.compression_config(list(lengths))),
    )


class BlockCodec:
    """One bitstream on one device and stream; for one thread at a time.

    Args:
        inner: "snappy" or "lz4".
        device: A CUDA device.
        stream: Where it works; the current stream by default.
        refusal: Why not to use a decompression engine; found out by default.

    Raises:
        ConfigError: nvCOMP is missing, or finds no GPU.

    Attributes:
        refusal: Why no decompression engine is used; "" when one is.
    """

    def __init__(
        self,
        inner: Inner,
        *,
        device: torch.device | str,
        stream: torch.cuda.Stream | None = None,
        refusal: str | None = None,
    ) -> None:
        self.inner, self.device = inner, torch.device(device)
        check(self.device)
        self.refusal = hardware_refusal(inner, self.device) if refusal is None else refusal
        self._stream = stream or torch.cuda.current_stream(self.device)
        self._codec = _new(
            inner,
            device=self.device,
            stream=self._stream.cuda_stream,
            hardware=not self.refusal,
        )

    @property
    def engine(self) -> str:
        """What decodes, for reports."""
        return "decompression engine" if not self.refusal else f"multiprocessors: {self.refusal}"

    def encode(self, mask: torch.Tensor) -> tuple[torch.Tensor, I64]:
        """Cut a mask into blocks of 64 KiB and encode each with nvCOMP's encoder.

        Args:
            mask: uint8 on the device, at a multiple of 16 bytes.

        Returns:
            The blocks one after another, uint8 on the device, and the bytes of each.

        Raises:
            DeviceLost: nvCOMP or the device failed.
        """
        lengths = [min(BLOCK_BYTES, len(mask) - at) for at in range(0, len(mask), BLOCK_BYTES)]
        if not lengths:
            return mask[:0], np.empty(0, np.int64)
        each = -(-self._most(mask[: lengths[0]]) // ALIGN) * ALIGN
        places = [each * i for i in range(len(lengths))]
        room = torch.empty(each * len(lengths), dtype=torch.uint8, device=self.device)
        found = self.encode_into(mask, lengths, out=room, places=places, each=each)
        return _packed(room, np.array(places), found), found

    def _most(self, block: torch.Tensor) -> int:
        return int(self._codec.get_max_comp_buffer_size(_library().as_array(block)))

    def encode_into(
        self,
        mask: torch.Tensor,
        lengths: Sequence[int],
        *,
        out: torch.Tensor,
        places: Sequence[int],
        each: int,
    ) -> I64:
        """Encode blocks of ``mask`` to ``places`` in ``out``, ``each`` bytes of room for one.

        Returns:
            int64, bytes of each block; waits for the device.

        Raises:
            DeviceLost: nvCOMP or the device failed.
        """
        starts = [BLOCK_BYTES * i for i in range(len(lengths))]
        try:
            done = self._codec.encode(
                _batch(mask, starts, lengths),
                out=_batch(out, places, [each] * len(places)),
                compression_config=self._codec.compression_config(list(lengths)),
            )
            return np.array(done.buffer_sizes, np.int64)
        except RuntimeError as error:
            raise DeviceLost(
                f"nvCOMP could not encode {len(lengths)} {self.inner} blocks on {self.device} "
                f"({error}); use the CPU encoder"
            ) from error

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
        arguments = (
            _batch(source, offsets.tolist(), sizes.tolist()),
            _batch(target, targets.tolist(), lengths.tolist()),
            self._codec.decompression_config(self._codec.compression_config(lengths.tolist())),
        )
        return Job(source, target, offsets, sizes, targets, lengths, where, arguments)

    def start(self, job: Job) -> Any:
        """Decode sound blocks on the codec's stream; returns at once.

        Returns:
            What must be kept until the stream is done.

        Raises:
            DeviceLost: nvCOMP or the device failed.
        """
        source, target, config = job.arguments
        try:
            return self._codec.decode(source, out=target, decompression_config=config)
        except RuntimeError as error:
            raise DeviceLost(
                f"{job.where}: nvCOMP could not decode {len(job.sizes)} {self.inner} blocks on "
                f"{self.device} ({error}); restart this process and load the weights anew"
            ) from error

    def decode(self, job: Job) -> None:
        """Decode sound blocks and wait.

        Raises:
            DeviceLost: nvCOMP or the device failed.
        """
        running = self.start(job)
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise DeviceLost(
                f"{job.where}: {self.device} failed in decoding ({error}); restart this process "
                "and load the weights anew"
            ) from error
        del running


def _packed(room: torch.Tensor, places: I64, sizes: I64) -> torch.Tensor:
    """Blocks without the room between them."""
    ends = np.cumsum(sizes)
    shift = torch.from_numpy(places - (ends - sizes)).to(room.device)
    counts = torch.from_numpy(sizes).to(room.device)
    index = torch.arange(int(ends[-1]), device=room.device)
    return room[index + torch.repeat_interleave(shift, counts)]
