"""Where canonical elements lie in a receiver's memory.

First cut: a receiver holds whole tensors, contiguous or strided. Boxes of tensors (a sampler's
own TP or EP shards) will map through the same two methods, ``offsets`` and ``read``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from typing import Final, Literal

import numpy as np
import torch

from weightdelta.device_memory import on_device
from weightdelta.digest import MASK, U64, seed
from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.kernels import ops
from weightdelta.kernels.device import device_ops
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import Layout, TensorSpec
from weightdelta.sharing import Place, refuse_overlaps
from weightdelta.tensors import as_ints, dtype_name, storage_view

DeviceUse = Literal["auto", "always", "never"]

#: Strided tensors are copied in pieces of this for their digest [B].
COPY_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Resident:
    """One canonical tensor, patched in place.

    Attributes:
        tensor: Its place in the layout.
        name: What the model calls it: its name in the layout, or a second one.
        memory: 1-D unsigned view of the tensor's storage, first to last element; empty for one
            that device kernels patch.
        source: The tensor itself; keeps the memory alive.
        address: Where its first element lay when it was placed.
        on_device: Whether device kernels patch it.
    """

    tensor: int
    name: str
    spec: TensorSpec
    memory: Elements
    source: torch.Tensor
    address: int
    on_device: bool = False

    @cached_property
    def place(self) -> Place:
        """Where its elements lie; the same for tensors that are tied in this model."""
        return Place.of(self.source)

    @property
    def seed(self) -> int:
        """Digest seed of the tensor."""
        return seed(self.spec.name)

    def is_at(self, tensor: torch.Tensor | None) -> bool:
        """Whether ``tensor`` lies just where this one was placed."""
        if tensor is self.source:  # asked for every tensor in every pause
            return not self.spec.numel or tensor.data_ptr() == self.address
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
        if self.on_device:
            return self._digest_on_device()
        values = self.memory
        if not self.source.is_contiguous():
            copy = as_ints(self.source.detach()).contiguous().reshape(-1).numpy()
            values = copy.view(UINTS[self.spec.width])
        size = max(self.spec.numel, 1)
        return ops().digest(values, key=self.seed, skip=0, run=size, stride=size)

    def _digest_on_device(self) -> int:
        """The same by device kernels; strided tensors a bounded number of rows at a time."""
        ints = as_ints(self.source.detach())
        size = max(self.spec.numel, 1)
        step = max(len(ints), 1) if ints.dim() else 1
        if not ints.is_contiguous():
            step = max(COPY_BYTES // max(ints[0].nbytes, 1), 1)
        kernels, total, skip = device_ops(ints.device), 0, 0
        with on_device(ints.device, doing="digest"):
            for rows in torch.split(ints, step) if ints.dim() else (ints,):
                values = rows.contiguous().reshape(-1)
                if len(values):
                    part = kernels.digest(values, key=self.seed, skip=skip, run=size, stride=size)
                    total += int(part)
                skip += len(values)
        return total & MASK

    def values_at(self, index: U64) -> Elements:
        """Elements at canonical indices, copied to the host."""
        ints = as_ints(self.source.detach())
        span = 1 + sum((n - 1) * s for n, s in zip(ints.shape, ints.stride(), strict=True))
        flat = torch.as_strided(ints, (span,), (1,), ints.storage_offset())
        at = torch.from_numpy(self.offsets(index).astype(np.int64)).to(ints.device)
        found: Elements = flat[at].cpu().numpy().view(UINTS[self.spec.width])
        return found


def place(
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: Layout,
    aliases: Iterable[tuple[str, ...]] = (),
    exclude: Iterable[str] = (),
    partial: bool = False,
    use: DeviceUse = "auto",
) -> list[Resident]:
    """Map a receiver's tensors to the layout, in layout order.

    Args:
        tensors: Live tensors by name.
        layout: The run's canonical tensors.
        aliases: Groups of names that are one tensor.
        exclude: Patterns of names to leave alone.
        partial: Accept a receiver that holds only some of the tensors.
        use: Which tensors device kernels patch: those on a GPU, all, or none.

    Raises:
        LayoutMismatch: A tensor is missing, extra, of another shape or dtype, or shares a part
            of another one's memory.
    """
    second = {n for group in aliases if any(g in layout.index for g in group) for n in group}
    patterns = tuple(exclude)
    found: dict[int, Resident] = {}
    for name, tensor in tensors.items():
        at = layout.index.get(layout.alias_of.get(name, name))
        if at is None and name not in second:
            _refuse_extra(name, patterns)
        elif at is not None and at not in found:
            found[at] = _resident(at, layout.tensors[at], name, tensor, use)
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
    refuse_overlaps({resident.name: resident.source for resident in found.values()})
    return [found[i] for i in sorted(found)]


def _refuse_extra(name: str, patterns: tuple[str, ...]) -> None:
    if not any(fnmatchcase(name, p) for p in patterns):
        raise LayoutMismatch(
            f"tensor {name!r} is in this model but not published; leave it out with "
            f"exclude=[{escape(name)!r}]"
        )


def _resident(
    at: int, spec: TensorSpec, name: str, tensor: torch.Tensor, use: DeviceUse
) -> Resident:
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
    patched = use == "always" or (use == "auto" and tensor.is_cuda)
    memory = np.empty(0, UINTS[spec.width]) if patched else storage_view(tensor, name=name)
    return Resident(at, name, spec, memory, tensor, tensor.data_ptr(), patched)


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
