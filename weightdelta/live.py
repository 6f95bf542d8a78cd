"""Live tensors of a trainer, seen through the frames that its rank owns."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from weightdelta.digest import MASK, U64
from weightdelta.errors import LayoutMismatch
from weightdelta.frame import Frame, Segment
from weightdelta.kernels.planes import UINTS, Elements, Planes
from weightdelta.layout import Box, Layout, TensorSpec, castable
from weightdelta.sharding.dtensor import local_shard
from weightdelta.state import Tensors
from weightdelta.tensors import INTS, TORCH, as_ints, dtype_name, is_dtensor, storage_of


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


class Live:
    """The tensors of one capture, each looked up and checked once.

    Raises:
        LayoutMismatch: A second name has become a tensor with values of its own.
    """

    def __init__(self, tensors: Tensors, layout: Layout) -> None:
        self._tensors = tensors
        self._layout = layout
        self._shards: dict[int, tuple[Box, torch.Tensor]] = {}
        self._travelling: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
        for alias, target in layout.aliases:
            if alias in tensors and target in tensors:
                _require_tied(alias, tensors[alias], target, tensors[target])

    def shard(self, tensor: int) -> tuple[Box, torch.Tensor]:
        """The box of a tensor that this rank holds, and its elements.

        Raises:
            LayoutMismatch: The tensor went away, changed its shape or dtype, or cannot be read.
        """
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
            if not castable(shard.dtype, to=spec.dtype):
                raise LayoutMismatch(
                    f"tensor {spec.name!r}: expected dtype {spec.dtype}, found {shard.dtype}"
                )
            _require_memory(spec.name, local)
            self._shards[tensor] = (shard.box, local.detach())
        return self._shards[tensor]

    @property
    def storages(self) -> frozenset[int]:
        """Addresses of the memory that published tensors are views of, by name or alias.

        Without 0, which is where every empty shard lies, of other models too.
        """
        return frozenset(
            storage_of(tensor)
            for name, tensor in self._tensors.items()
            if self._layout.alias_of.get(name, name) in self._layout.index
            and tensor.layout == torch.strided
            and tensor.device.type != "meta"
        ) - {0}

    def device(self, tensors: Iterable[int]) -> torch.device:
        """Where a frame of these tensors is compared: the device of the first that is on one."""
        places = (self.shard(tensor)[1].device for tensor in tensors)
        return next((place for place in places if place.type != "cpu"), torch.device("cpu"))

    def view(self, frame: Frame) -> Elements | None:
        """The frame's elements without a copy, where they lie in one piece in wire dtype."""
        if len(frame.segments) != 1 or frame.segments[0].rows != 1:
            return None
        segment = frame.segments[0]
        box, local = self.shard(segment.tensor)
        spec = self._layout.tensors[segment.tensor]
        if not local.is_contiguous() or local.device.type != "cpu":
            return None
        if dtype_name(local, name=spec.name) != spec.dtype:
            return None
        start, _ = _within(segment, spec, box)
        flat = as_ints(local).reshape(-1)[start : start + segment.run]
        elements: Elements = flat.numpy().view(UINTS[spec.width])
        return elements

    def fill(self, frame: Frame, *, out: torch.Tensor) -> None:
        """Copy a frame's live elements into ``out``, cast to the wire dtype.

        Args:
            frame: Whose elements.
            out: uint8, contiguous, ``frame.nbytes`` long, on any device; one that is not a
                tensor's own takes part in a copy between devices.
        """
        self.fill_all([frame], [0], out=out)

    def fill_all(
        self, frames: Sequence[Frame], starts: Sequence[int], *, out: torch.Tensor
    ) -> None:
        """``fill`` for many frames, in one call to torch.

        Args:
            frames: Whose elements.
            starts: Where each goes in ``out`` [B], a multiple of its width.
            out: uint8, contiguous.
        """
        typed: dict[torch.dtype, torch.Tensor] = {}
        targets, sources = [], []
        for frame, start in zip(frames, starts, strict=True):
            at = start // frame.width
            for segment in frame.segments:
                source, kind = self._source(segment)
                if kind not in typed:
                    typed[kind] = out.view(kind)
                # One call to torch each: their Python is what a device waits for.
                target = torch.as_strided(
                    typed[kind],
                    (segment.rows, segment.run),
                    (segment.run, 1),
                    typed[kind].storage_offset() + at,
                )
                targets.append(target)
                sources.append(source)
                at += segment.numel
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _source(self, segment: Segment) -> tuple[torch.Tensor, torch.dtype]:
        """A segment's live elements, rows by run, and the dtype in which they travel."""
        box, _ = self.shard(segment.tensor)
        local, kind = self._travels(segment.tensor)
        start, step = _within(segment, self._layout.tensors[segment.tensor], box)
        rows, first = _leading(local, start, start + (segment.rows - 1) * step + segment.run)
        source = torch.as_strided(
            rows, (segment.rows, segment.run), (step, 1), rows.storage_offset() + first
        )
        return source, kind

    def _travels(self, tensor: int) -> tuple[torch.Tensor, torch.dtype]:
        """This rank's elements of a tensor as they are copied, and the dtype they arrive in."""
        if tensor not in self._travelling:
            local, spec = self.shard(tensor)[1], self._layout.tensors[tensor]
            # Equal dtypes move as integers, so that no bit pattern is ever normalized.
            equal = local.dtype == TORCH[spec.dtype]
            kind = INTS[spec.width] if equal else TORCH[spec.dtype]
            self._travelling[tensor] = as_ints(local) if equal else local, kind
        return self._travelling[tensor]


def _require_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose bytes cannot be read where they lie."""
    found = _unreadable(tensor)
    if found:
        raise LayoutMismatch(
            f"tensor {name!r}: expected a dense tensor with its values in memory, found {found}"
        )


def _unreadable(tensor: torch.Tensor) -> str | None:
    if tensor.layout != torch.strided:
        return f"the layout {tensor.layout}; publish its to_dense()"
    if tensor.device.type == "meta":
        return "one on the meta device, without values; materialize it first"
    if tensor.is_neg():
        return "a view with the negative bit; publish its resolve_neg()"
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.numel() and tensor.untyped_storage().nbytes() < end:
        return "its storage freed (resharded or offloaded?); bring it back in prepare()"
    return None


def _require_tied(alias: str, tensor: torch.Tensor, target: str, held: torch.Tensor) -> None:
    """Samplers give both names the same values, so they have to be the same here."""
    one, other = _local_part(tensor), _local_part(held)
    _require_memory(alias, one)
    _require_memory(target, other)
    if not _is_same(one, other):
        raise LayoutMismatch(
            f"tensor {alias!r}: expected a second name of {target!r} as at attach, found values "
            "of its own, which would not be published; tie the two again, or attach again with a "
            "base that has both"
        )


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    # Some modules' state_dict() copies each name; then equal values are all that can be asked.
    return torch.equal(as_ints(one), as_ints(other))


@lru_cache(maxsize=1 << 18)
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
