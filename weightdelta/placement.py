"""Where canonical elements lie in a receiver's memory.

First cut: a receiver holds whole tensors, contiguous or strided. Boxes of tensors (a sampler's
own TP or EP shards) will map through the same two methods, ``offsets`` and ``read``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import numpy as np
import torch

from weightdelta.digest import U64, seed
from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.kernels import ops
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import Layout, TensorSpec
from weightdelta.tensors import as_ints, dtype_name, storage_view


@dataclass(frozen=True)
class Resident:
    """One canonical tensor in host memory, patched in place.

    Attributes:
        tensor: Its place in the layout.
        name: What the model calls it: its name in the layout, or a second one.
        memory: 1-D unsigned view of the tensor's storage, first to last element.
        source: The tensor itself; keeps the memory alive.
        address: Where its first element lay when it was placed.
    """

    tensor: int
    name: str
    spec: TensorSpec
    memory: Elements
    source: torch.Tensor
    address: int

    @property
    def seed(self) -> int:
        """Digest seed of the tensor."""
        return seed(self.spec.name)

    def is_at(self, tensor: torch.Tensor | None) -> bool:
        """Whether ``tensor`` lies just where this one was placed."""
        if tensor is None or tensor.shape != self.source.shape:
            return False
        same = tensor.data_ptr() == self.address and tensor.stride() == self.source.stride()
        return not self.spec.numel or (same and tensor.dtype == self.source.dtype)

    def offsets(self, index: U64) -> U64:
        """Places in ``memory`` of canonical element indices (uint64, sorted or not)."""
        if self.source.is_contiguous():
            return index
        found = np.zeros_like(index)
        rest = index
        for size, stride in zip(
            reversed(self.spec.extent), reversed(self.source.stride()), strict=True
        ):
            rest, coordinate = np.divmod(rest, np.uint64(size))
            found += coordinate * np.uint64(stride)
        return found

    def digest(self) -> int:
        """Digest of the whole tensor as it is now."""
        values = self.memory
        if not self.source.is_contiguous():
            copy = as_ints(self.source.detach()).contiguous().reshape(-1).numpy()
            values = copy.view(UINTS[self.spec.width])
        size = max(self.spec.numel, 1)
        return ops().digest(values, key=self.seed, skip=0, run=size, stride=size)


def place(
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: Layout,
    aliases: Iterable[tuple[str, ...]] = (),
    exclude: Iterable[str] = (),
    partial: bool = False,
) -> list[Resident]:
    """Map a receiver's tensors to the layout, in layout order.

    Args:
        tensors: Live tensors by name.
        layout: The run's canonical tensors.
        aliases: Groups of names that are one tensor.
        exclude: Patterns of names to leave alone.
        partial: Accept a receiver that holds only some of the tensors.

    Raises:
        LayoutMismatch: A tensor is missing, extra, or of another shape or dtype.
    """
    second = {n for group in aliases if any(g in layout.index for g in group) for n in group}
    patterns = tuple(exclude)
    found: dict[int, Resident] = {}
    for name, tensor in tensors.items():
        at = layout.index.get(layout.alias_of.get(name, name))
        if at is None and name not in second:
            _refuse_extra(name, patterns)
        elif at is not None and at not in found:
            found[at] = _resident(at, layout.tensors[at], name, tensor)
        elif at is not None and not found[at].is_at(tensor):
            raise LayoutMismatch(
                f"tensors {found[at].name!r} and {name!r} are one tensor in the trainer but two in "
                "this model; tie them, or one of them would stay behind"
            )
    if len(found) < len(layout.tensors) and not partial:
        missing = [t.name for i, t in enumerate(layout.tensors) if i not in found]
        raise LayoutMismatch(
            f"tensor {missing[0]!r} is published but not in this model ({len(missing)} missing "
            "in all); pass partial=True if this receiver holds only a part"
        )
    return [found[i] for i in sorted(found)]


def _refuse_extra(name: str, patterns: tuple[str, ...]) -> None:
    if not any(fnmatchcase(name, p) for p in patterns):
        raise LayoutMismatch(
            f"tensor {name!r} is in this model but not published; leave it out with "
            f"exclude=[{name!r}]"
        )


def _resident(at: int, spec: TensorSpec, name: str, tensor: torch.Tensor) -> Resident:
    dtype = dtype_name(tensor, name=name)
    if dtype != spec.dtype:
        raise LayoutMismatch(f"tensor {name!r}: expected dtype {spec.dtype}, found {dtype}")
    if tuple(tensor.shape) != spec.extent:
        raise LayoutMismatch(
            f"tensor {name!r}: expected shape {spec.extent}, found {tuple(tensor.shape)}"
        )
    if tensor.layout != torch.strided or type(tensor).__torch_dispatch__ is not _PLAIN:
        raise InputError(f"tensor {name!r}: expected a plain dense tensor, found {type(tensor)}")
    if _overlaps(tensor) or tensor.is_conj() or tensor.is_neg():
        raise InputError(
            f"tensor {name!r}: expected memory of its own for every element, found a lazy or "
            f"expanded view (strides {tensor.stride()}); replace it by a copy"
        )
    memory = storage_view(tensor, name=name)
    return Resident(at, name, spec, memory, tensor, tensor.data_ptr())


#: What tensors without a dispatcher of their own have: not DTensor, not a quantized subclass.
_PLAIN: Final = torch.Tensor.__torch_dispatch__


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: some stride is less than what lies within it."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False
