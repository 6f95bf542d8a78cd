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
"""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from weightdelta.codecs.blocks import Inner, block_lengths
from weightdelta.codecs.engine_memory import EngineBuffer
from weightdelta.codecs.nvcomp import BlockCodec, Job, check, check_blocks
from weightdelta.codecs.transcode import ALIGN
from weightdelta.device_memory import HostBuffer, on_device
from weightdelta.errors import ConfigError, Dirty, NotPrepared, StateMismatch, WeightDeltaError
from weightdelta.kernels.cpu_walk import lay_out
from weightdelta.kernels.planes import BLOCK_BYTES
from weightdelta.pieces import MaskFrame, grouped, pieces_of, room_of, whole

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

#: Mask bytes that a slot holds, unless one frame has more.
SLOT_BYTES: Final = 192 << 20
#: Threads that check and lay out blocks.
_THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class _Group:
    """Frames of one width whose masks share a slot, as the device needs them.

    Attributes:
        raw: Where their blocks lie in host memory.
        places: Begin, address and size of each piece.
        keys, tensors: Index term and digest row of each piece.
        pieces: Where they stand among the pieces of all groups.
    """

    width: int
    raw: slice
    job: Job
    places: dict[str, torch.Tensor]
    keys: torch.Tensor
    tensors: torch.Tensor
    pieces: slice


class BlockApply:
    """One update of resident weights on a CUDA device, from raw blocks; for one thread at a time.

    The caller keeps the weights alive and where they are.

    Args:
        frames: What to apply, all of one bitstream.
        inner: Their bitstream.
        tensors: Rows of the digest table.
        device: A CUDA device.
        slot_bytes: Mask bytes in each of the two slots; one frame at least.
        host: Pinned memory to reuse.

    Raises:
        DamagedObject: A block is not what its place calls for.
        ConfigError: nvCOMP or Triton is missing, or there is no GPU; the CPU path serves.
        DeviceMemory: No room for the slots.

    Attributes:
        device_bytes: Device memory taken beside the weights.
        pinned_bytes: Raw blocks held in host memory.
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
        host: HostBuffer | None = None,
    ) -> None:
        self._device, self._tensors, self._rehearsed = torch.device(device), tensors, False
        check(self._device)
        with on_device(self._device, doing="preparing raw blocks"):
            self._kernels = _kernels()
            self._up, self._decoding = _stream(self._device), _stream(self._device)
            self._codec = BlockCodec(inner, device=self._device, stream=self._decoding)
            self.engine = self._codec.engine
            groups = grouped([f for f in frames if f.blocks.sizes.any()], slot_bytes)
            self._stage(groups, host or HostBuffer(self._device))

    # --- preparation --------------------------------------------------------------------------

    def _stage(self, groups: list[list[MaskFrame]], host: HostBuffer) -> None:
        """Lay the blocks out in host memory, take the slots, and tell nvCOMP where things lie."""
        ends = np.cumsum([0, *map(room_of, groups)]).tolist()
        self.pinned_bytes, self._engine = ends[-1], None
        if not self._codec.refusal:  # an engine reads host memory itself
            self._engine = EngineBuffer(ends[-1], device=self._device.index or 0)
        self._host = torch.from_numpy(self._engine.view) if self._engine else host.get(ends[-1])
        raw = 0 if self._engine else max((b - a for a, b in pairwise(ends)), default=0)
        mask = max((sum(whole(f.blocks.size) for f in g) for g in groups), default=0)
        self._raw = [self._bytes(raw), self._bytes(raw)]
        self._masks = [self._bytes(mask), self._bytes(mask)]
        self._count = 0
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS)) as pool:
            self._groups = [
                self._group(frames, slot=i % 2, raw=slice(ends[i], ends[i + 1]), pool=pool)
                for i, frames in enumerate(groups)
            ]
        self._found, self._expected = torch.zeros(
            2, self._count, dtype=torch.int64, device=self._device
        )
        tables = [t for g in self._groups for t in (*g.places.values(), g.keys, g.tensors)]
        own = (*self._raw, *self._masks, *tables, self._found, self._expected)
        self.device_bytes = sum(t.nbytes for t in own)

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _tell(self, column: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device)

    def _fill(self, frame: MaskFrame, at: int) -> tuple[I64, I64]:
        """Check a frame's blocks and copy them to host memory from ``at`` on: offsets, sizes."""
        check_blocks(frame.blocks, where=frame.where)
        sizes = frame.blocks.sizes.astype(np.int64)
        room = -(-sizes // ALIGN) * ALIGN
        lay_out(frame.blocks.arena, frame.blocks.sizes, align=ALIGN, out=self._host.numpy()[at:])
        kept = sizes > 0
        return (at + np.cumsum(room) - room)[kept], sizes[kept]

    def _group(self, frames: list[MaskFrame], *, slot: int, raw: slice, pool: Executor) -> _Group:
        starts = np.cumsum([raw.start, *(room_of([f]) for f in frames)]).tolist()
        masks = np.cumsum([0, *(whole(f.blocks.size) for f in frames)]).tolist()
        filled = [pool.submit(self._fill, f, at) for f, at in zip(frames, starts, strict=False)]
        found, pieces = [], []
        for frame, mask in zip(frames, masks, strict=False):
            lengths = block_lengths(frame.blocks.size)
            present = np.flatnonzero(frame.blocks.sizes)
            found.append((mask + present * BLOCK_BYTES, lengths[present]))
            part = pieces_of(frame)
            pieces.append((part.begin + mask, part.address, part.size, part.key, part.tensor))
        targets, lengths = (np.concatenate(c) for c in zip(*found, strict=True))
        begin, address, size, key, tensor = (np.concatenate(c) for c in zip(*pieces, strict=True))
        laid = [one.result() for one in filled]
        offsets, sizes = (np.concatenate(c) for c in zip(*laid, strict=True))
        if not self._engine:
            offsets = offsets - raw.start
        job = self._codec.job(
            self._engine or self._raw[slot],
            offsets=offsets,
            sizes=sizes,
            target=self._masks[slot],
            targets=targets,
            lengths=lengths,
            where=f"{frames[0].where} to {frames[-1].where}",
        )
        places = {"begins": begin, "addresses": address, "sizes": size}
        self._count += len(begin)
        return _Group(
            frames[0].width,
            raw,
            job,
            {name: self._tell(column) for name, column in places.items()},
            self._tell(key.view(np.int64)),
            self._tell(tensor.astype(np.int64)),
            slice(self._count - len(begin), self._count),
        )

    def dry_run(self) -> U64:
        """Decode everything, store nothing, and tell what would change.

        Returns:
            uint64 [tensors], digest change of each.

        Raises:
            DeviceLost: The device failed.
        """
        sums = torch.zeros(self._tensors, dtype=torch.int64, device=self._device)

        def look(group: _Group, mask: torch.Tensor) -> None:
            kernels = self._kernels
            marks = self._expected[group.pieces]
            kernels.xor_pieces(mask, **group.places, marks=marks, store=False)
            change = kernels.weigh_pieces(mask, **group.places, keys=group.keys, width=group.width)
            sums.index_add_(0, group.tensors, change)

        with on_device(self._device, doing="dry run of raw blocks"):
            for _ in self._streamed(self._groups, look):
                pass
        self._rehearsed = True
        return sums.cpu().numpy().view(np.uint64)

    def close(self) -> None:
        """Give back memory that torch does not own; all work must have ended."""
        if self._engine:
            self._engine.close()

    # --- the pause ----------------------------------------------------------------------------

    def _streamed(
        self, groups: Sequence[_Group], work: Callable[[_Group, torch.Tensor], None]
    ) -> Iterator[int]:
        """Decode group after group; ``work`` runs on the current stream beside the next decode.

        Nothing here waits for the device. Yields how many groups have been handed in.
        """
        mine = torch.cuda.current_stream()
        decoded: list[torch.cuda.Event] = []
        worked: list[torch.cuda.Event] = []
        running = []
        for stream in (self._up, self._decoding):
            stream.wait_stream(mine)
        for i, group in enumerate(groups):
            self._send(group, slot=i % 2, decoded=decoded[i - 2] if i >= 2 else None)
            if i >= 2:
                self._decoding.wait_event(worked[i - 2])
            running.append(self._codec.start(group.job))
            decoded.append(self._decoding.record_event())
            mine.wait_event(decoded[i])
            work(group, group.job.target)
            worked.append(mine.record_event())
            yield i + 1
        mine.synchronize()

    def _send(self, group: _Group, *, slot: int, decoded: torch.cuda.Event | None) -> None:
        """Blocks to their slot, once what was there has been decoded."""
        if self._engine:
            return
        if decoded is not None:
            self._up.wait_event(decoded)
        with torch.cuda.stream(self._up):
            part = self._host[group.raw]
            self._raw[slot][: len(part)].copy_(part, non_blocking=True)
        self._decoding.wait_stream(self._up)

    def _take(self, groups: Sequence[_Group], *, back: bool) -> Iterator[int]:
        def work(group: _Group, mask: torch.Tensor) -> None:
            marks = self._found[group.pieces]
            self._kernels.xor_pieces(mask, **group.places, marks=marks, store=True, back=back)

        return self._streamed(groups, work)

    def apply(self) -> None:
        """Take all masks into the weights; they are the new version when this returns.

        Raises:
            StateMismatch: Weights were edited after the dry run, or a block decoded otherwise.
                Nothing was changed.
            DeviceLost: The device failed.
            Dirty: What had been changed could not be put back.
        """
        self._all_or_none(back=False)

    def undo(self) -> None:
        """Take all masks back out of the weights. Raises as :meth:`apply`."""
        self._all_or_none(back=True)

    def _all_or_none(self, *, back: bool) -> None:
        if not self._rehearsed:
            raise NotPrepared("raw blocks were not looked at; call dry_run() first")
        with on_device(self._device, doing="applying raw blocks"):
            done = 0
            try:
                for count in self._take(self._groups, back=back):
                    done = count
                if torch.equal(self._found, self._expected):
                    return
                raise StateMismatch(
                    "the weights, or the masks for them, are not what they were at prepare(). "
                    "Nothing was changed; reload a checkpoint and attach()"
                )
            except WeightDeltaError as error:
                self._restore(done, back=not back, because=error)
                raise

    def _restore(self, done: int, *, back: bool, because: WeightDeltaError) -> None:
        """XOR the same masks once more into what the first ``done`` groups changed."""
        groups = self._groups[:done]
        known = slice(0, groups[-1].pieces.stop if groups else 0)
        before = self._found[known].clone()
        try:
            for _ in self._take(groups, back=back):
                pass
            same = torch.equal(before, self._found[known])
        except WeightDeltaError as error:
            raise Dirty(f"{because}; and putting the weights back failed: {error}") from error
        if not same:
            raise Dirty(f"{because}; and the same blocks gave other masks when taken back")


def _stream(device: torch.device) -> torch.cuda.Stream:
    made: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    return made(device)


def _kernels() -> Any:
    """The Triton kernels.

    Raises:
        ConfigError: Triton is not installed.
    """
    try:
        return importlib.import_module("weightdelta.kernels.triton_masks")
    except ImportError as error:
        raise ConfigError(
            f"raw blocks on a GPU need Triton ({error}); install it (the extra `gpu`), or let the "
            "CPU decode"
        ) from error
