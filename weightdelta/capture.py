"""mask: compare live wire bytes with the baseline and keep only what changed.

``SnapshotCapture`` works with any optimizer: it reads each owned frame of the live state, cast
to the wire dtype, compares it with the baseline and returns the frame's planes. It holds one
window a thread, never a second copy of the shard.
"""

import math
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from weightdelta.baseline import Baseline
from weightdelta.digest import MASK, U64
from weightdelta.errors import LayoutMismatch
from weightdelta.fence import Token
from weightdelta.frame import Frame, Segment
from weightdelta.kernels import ops
from weightdelta.kernels.planes import UINTS, Elements, Planes
from weightdelta.layout import PLAIN_FLOATS, Box, Layout, TensorSpec
from weightdelta.sharding.dtensor import local_shard
from weightdelta.sharding.explicit import LocalShard
from weightdelta.state import State, Tensors, find_aliases, reading
from weightdelta.tensors import as_ints, dtype_name, wire_view


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank holds: its shards by canonical name, and its second names.

    Attributes:
        shards: One per canonical tensor that the rank holds a part of.
        aliases: Canonical name by second name.
    """

    shards: tuple[LocalShard, ...]
    aliases: Mapping[str, str]


def take_inventory(
    state: State, *, base: Mapping[str, TensorSpec], exclude: Iterable[str] = ()
) -> Inventory:
    """Compare a rank's state with the base checkpoint.

    Raises:
        LayoutMismatch: A tensor that base lacks and nothing excludes, or one whose shape or
            dtype differs.
        UnsupportedSharding: A placement that cannot be mapped.
    """
    with reading(state) as tensors:
        whole = state if isinstance(state, torch.nn.Module) else tensors
        return _inventory(tensors, find_aliases(whole), base=base, exclude=tuple(exclude))


def _inventory(
    tensors: Tensors,
    groups: Iterable[tuple[str, ...]],
    *,
    base: Mapping[str, TensorSpec],
    exclude: tuple[str, ...],
) -> Inventory:
    second = {
        name: next((n for n in group if n in base), "")
        for group in groups
        for name in group
        if name not in base
    }
    aliases = {name: target for name, target in second.items() if target}
    shards = []
    for name, tensor in tensors.items():
        if name in aliases or any(fnmatchcase(name, p) for p in exclude):
            continue
        shards.append(_checked(name, tensor, base))
    return Inventory(tuple(shards), aliases)


def _checked(name: str, tensor: torch.Tensor, base: Mapping[str, TensorSpec]) -> LocalShard:
    spec = base.get(name)
    if spec is None:
        raise LayoutMismatch(
            f"tensor {name!r} is in the trainer's state but not in base; leave it out with "
            f"exclude=[{name!r}] or publish against a base that has it"
        )
    shard, _ = local_shard(name, tensor, dtype=dtype_name(tensor, name=name))
    if shard.extent != spec.extent:
        raise LayoutMismatch(
            f"tensor {name!r}: expected shape {spec.extent} as in base, found {shard.extent}"
        )
    if shard.dtype != spec.dtype and not {shard.dtype, spec.dtype} <= PLAIN_FLOATS:
        raise LayoutMismatch(
            f"tensor {name!r}: expected dtype {spec.dtype} as in base, found {shard.dtype}; only "
            "plain floats are cast, quantize with a transform first"
        )
    return LocalShard(name, spec.dtype, shard.extent, shard.box)


@dataclass(frozen=True, slots=True)
class FramePlanes:
    """What changed in one frame; ``chunk_digest`` is uint64, one entry per chunk."""

    frame: int
    planes: Planes
    chunk_digest: U64

    @property
    def digest_change(self) -> int:
        """``sum h(new) - h(old)`` over the frame, modulo 2^64."""
        return int(self.chunk_digest.sum(dtype=np.uint64)) & MASK


class SnapshotCapture:
    """Compares live state with a baseline, frame by frame."""

    def __init__(self, baseline: Baseline, *, pool: ThreadPoolExecutor) -> None:
        self._baseline = baseline
        self._pool = pool
        self._local = threading.local()

    def capture(self, state: State, *, token: Token) -> list[FramePlanes]:
        """Planes of every owned frame, in frame order.

        Raises:
            CaptureDropped: An optimizer step could not wait any longer.
            LayoutMismatch: A tensor changed its shape or dtype, or went away.
        """
        with reading(state) as tensors:
            return self._capture(tensors, token)

    def _capture(self, tensors: Tensors, token: Token) -> list[FramePlanes]:
        live = _Live(tensors, self._baseline.layout)

        def one(frame: int) -> FramePlanes:
            token.check()
            return self._compare(frame, live)

        jobs = [self._pool.submit(one, frame) for frame in self._baseline.frames]
        try:
            return [job.result() for job in jobs]
        finally:
            # Nobody may read live weights once the fence and the source have been released.
            wait([job for job in jobs if not job.cancel()])

    def _compare(self, frame: int, live: "_Live") -> FramePlanes:
        spec = self._baseline.plan.frame(frame)
        new = live.view(spec)
        if new is None:
            new = self._window(spec)
            live.fill(spec, out=new)
        planes, digest = ops().encode(
            self._baseline.frames[frame],
            new,
            chunks=self._baseline.chunks(frame),
            xor=self._baseline.values == "xor",
        )
        return FramePlanes(frame, planes, digest)

    def _window(self, spec: Frame) -> Elements:
        """This thread's window: pages are touched once, not once a frame."""
        size = spec.numel * spec.width
        window = getattr(self._local, "window", None)
        if window is None or len(window) < size:
            window = self._local.window = np.empty(size, np.uint8)
        elements: Elements = window[:size].view(UINTS[spec.width])
        return elements


class _Live:
    """Live tensors seen through the frames that a rank owns."""

    def __init__(self, tensors: Tensors, layout: Layout) -> None:
        self._tensors = tensors
        self._layout = layout
        self._shards: dict[int, tuple[Box, torch.Tensor]] = {}

    def _shard(self, tensor: int) -> tuple[Box, torch.Tensor]:
        if tensor not in self._shards:
            spec = self._layout.tensors[tensor]
            if spec.name not in self._tensors:
                raise LayoutMismatch(
                    f"tensor {spec.name!r} was in the state at attach, now it is not"
                )
            live = self._tensors[spec.name]
            shard, local = local_shard(spec.name, live, dtype=dtype_name(live, name=spec.name))
            if shard.extent != spec.extent:
                raise LayoutMismatch(
                    f"tensor {spec.name!r}: expected shape {spec.extent} as at attach, "
                    f"found {shard.extent}"
                )
            if shard.dtype != spec.dtype and not {shard.dtype, spec.dtype} <= PLAIN_FLOATS:
                raise LayoutMismatch(
                    f"tensor {spec.name!r}: expected dtype {spec.dtype}, found {shard.dtype}"
                )
            self._shards[tensor] = (shard.box, local)
        return self._shards[tensor]

    def view(self, frame: Frame) -> Elements | None:
        """The frame's elements without a copy, where they lie in one piece in wire dtype."""
        if len(frame.segments) != 1 or frame.segments[0].rows != 1:
            return None
        segment = frame.segments[0]
        box, local = self._shard(segment.tensor)
        spec = self._layout.tensors[segment.tensor]
        if not local.is_contiguous() or local.device.type != "cpu":
            return None
        if dtype_name(local, name=spec.name) != spec.dtype:
            return None
        start, _ = _within(segment, spec, box)
        flat = as_ints(local).reshape(-1)[start : start + segment.run]
        elements: Elements = flat.numpy().view(UINTS[spec.width])
        return elements

    def fill(self, frame: Frame, *, out: Elements) -> None:
        """Copy a frame's live elements into ``out``, cast to the wire dtype."""
        raw = out.view(np.uint8)
        at = 0
        for segment in frame.segments:
            end = at + segment.numel * frame.width
            self._fill(segment, raw[at:end])
            at = end

    def _fill(self, segment: Segment, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        box, local = self._shard(segment.tensor)
        spec = self._layout.tensors[segment.tensor]
        start, step = _within(segment, spec, box)
        equal = dtype_name(local, name=spec.name) == spec.dtype
        # Equal dtypes move as integers, so that no bit pattern is ever normalized.
        local = as_ints(local) if equal else local
        rows, first = _leading(local, start, start + (segment.rows - 1) * step + segment.run)
        source = torch.as_strided(
            rows, (segment.rows, segment.run), (step, 1), rows.storage_offset() + first
        )
        if equal:
            target = (
                torch.from_numpy(raw.view(UINTS[spec.width]).view(f"i{spec.width}"))
                if spec.width > 1
                else torch.from_numpy(raw)
            )
            target.view(segment.rows, segment.run).copy_(source)
        else:
            wire_view(raw, dtype=spec.dtype).view(segment.rows, segment.run).copy_(source)


def _within(segment: Segment, spec: TensorSpec, box: Box) -> tuple[int, int]:
    """A segment's first element and row step in a C-ordered local tensor of shape ``box``."""
    start = _local(segment.first, spec, box)
    # A segment is a box of its tensor, so it lies inside if and only if its two corners do.
    _local(segment.first + (segment.rows - 1) * segment.stride + segment.run - 1, spec, box)
    if segment.rows == 1:
        return start, segment.run
    return start, _local(segment.first + segment.stride, spec, box) - start


def _local(index: int, spec: TensorSpec, box: Box) -> int:
    place, rest = 0, index
    for size, offset, shape, length in zip(
        *(reversed(t) for t in (spec.extent, box.offset, box.shape)),
        _strides(box.shape),
        strict=True,
    ):
        rest, coordinate = divmod(rest, size)
        if not offset <= coordinate < offset + shape:
            raise LayoutMismatch(
                f"tensor {spec.name!r}: expected element {index} on this rank as at attach, found "
                f"a shard of {box.shape} at {box.offset}; attach again after resharding"
            )
        place += (coordinate - offset) * length
    return place


def _strides(shape: tuple[int, ...]) -> list[int]:
    """C-order strides, innermost first."""
    return [math.prod(shape[len(shape) - i :]) for i in range(len(shape))]


def _leading(local: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, int]:
    """Contiguous rows of ``local`` that hold elements ``[start, end)``, and where they start."""
    if local.is_contiguous():
        return local, start
    inner = math.prod(local.shape[1:])
    low, high = start // inner, -(-end // inner)
    return local[low:high].contiguous(), start - low * inner
