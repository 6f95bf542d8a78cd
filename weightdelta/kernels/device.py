"""What kernels on a device exchange, and the choice between them.

The counterpart of ``kernels.planes`` and ``kernels.ops`` for weights that lie in device memory.
Elements are 1-D contiguous torch tensors of bit patterns, of the dtype that :data:`INTS` gives
for their width; arithmetic on them wraps. Digests are int64 bit patterns of the uint64. Planes
have the same bits as those of ``kernels.reference``.

Work is cut into *windows*: the chunks of one or several frames whose elements lie one after the
other in one buffer. All calls are asynchronous on the current stream; only :meth:`DeviceOps.encode`
waits for the device, once, because the sizes of what it returns depend on the data.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Final, Protocol, cast

import numpy as np
import torch

from weightdelta.kernels.planes import UINTS, Chunks, Planes

#: Dtype of elements on a device, by width in bytes.
INTS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DeviceChunks:
    """The chunks of a window, on the host and on the device.

    Attributes:
        host: The same, as numpy arrays; ``start`` counts from the window's first element.
        start: int64 [chunks], and so on for each column of ``Chunks``; ``key`` as bit patterns.
    """

    host: Chunks
    start: torch.Tensor
    length: torch.Tensor
    key: torch.Tensor
    skip: torch.Tensor
    run: torch.Tensor
    stride: torch.Tensor

    def __len__(self) -> int:
        return len(self.host)

    @classmethod
    def of(cls, chunks: Chunks, *, device: torch.device | str) -> "DeviceChunks":
        """Copy the columns of ``chunks`` to ``device``, in one transfer."""
        names = [field.name for field in fields(Chunks)]
        columns = np.stack([getattr(chunks, name).view(np.int64) for name in names])
        return cls(chunks, *torch.from_numpy(columns).to(device).unbind())


@dataclass(frozen=True, slots=True)
class DevicePlanes:
    """The changes of a window, chunk after chunk: ``planes.Planes`` on a device.

    Attributes:
        counts: int32 [chunks], changes in each chunk.
        gaps: int16 bit patterns, of the chunks in gap form, one after the other.
        bitmap: uint8, of the chunks in bitmap form, one after the other.
        values: Differences or XORs, of the elements' dtype.
    """

    counts: torch.Tensor
    gaps: torch.Tensor
    bitmap: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, planes: Planes, *, device: torch.device | str) -> "DevicePlanes":
        """Copy planes to ``device`` (through pageable memory; pipelines bring their own)."""

        def up(array: np.ndarray, kind: type) -> torch.Tensor:
            return torch.from_numpy(np.array(array).view(kind)).to(device)

        width = planes.values.itemsize
        values = up(planes.values, np.dtype(f"i{width}").type).view(INTS[width])
        bitmap = up(planes.bitmap, np.uint8)
        return cls(up(planes.counts, np.int32), up(planes.gaps, np.int16), bitmap, values)

    def host(self) -> Planes:
        """Copy to numpy; waits for the device."""
        width = self.values.element_size()
        return Planes(
            counts=self.counts.cpu().numpy().view(np.uint32),
            gaps=self.gaps.cpu().numpy().view(np.uint16),
            bitmap=self.bitmap.cpu().numpy(),
            values=self.values.cpu().numpy().view(UINTS[width]),
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the chunks of a window lie in resident weights, one entry a chunk.

    Element ``p`` of a chunk is element ``q = skip + p`` of its segment, and canonical element
    ``i = first + (q // run) * stride + q % run`` of its tensor. A tensor that is resident whole
    and contiguous holds it at ``address + i * width``. Any other is described by a box: the
    canonical coordinates of ``i`` in ``extent``, less ``offset``, are those in the resident, if
    they are within ``shape``; times ``stride`` they give its place. Elements outside the box are
    not held here: they are neither compared nor stored, and have no part in digests.

    Attributes:
        address: int64 [chunks], byte address of the resident's element 0, in device memory.
        first: int64 [chunks], canonical index of the segment's element 0.
        tensor: int32 [chunks], the tensor's row in the caller's digest table.
        box: int32 [chunks], row in ``boxes``, -1 for a whole contiguous tensor; None when all are.
        boxes: int64 [residents, 4, dims]: extent, offset, shape and stride (in elements), padded
            in front with dimensions of one element.
        order: int32 [chunks], all chunks in the order in which they are best stored: memory takes
            less time for neighbours; None: as they come.
    """

    address: torch.Tensor
    first: torch.Tensor
    tensor: torch.Tensor
    box: torch.Tensor | None = None
    boxes: torch.Tensor | None = None
    order: torch.Tensor | None = None


def addresses(chunks: DeviceChunks, placed: Placed, *, width: torch.Tensor | int) -> torch.Tensor:
    """Byte address of each chunk's first element in a contiguous resident, else one near it.

    Args:
        chunks: The chunks.
        placed: Where they lie.
        width: Bytes of an element, or int64 [chunks].

    Returns:
        int64 [chunks].
    """
    rows = chunks.skip // chunks.run
    index = placed.first + chunks.skip + rows * (chunks.stride - chunks.run)
    return placed.address + index * width


@dataclass(frozen=True, slots=True)
class ChunkLists:
    """Staged changes as absolute values: what the pause stores, without any prefix sum.

    Attributes:
        counts: int32 [chunks], changes in each chunk.
        begin: int64 [chunks], where a chunk's changes begin in the lists below.
        position: int16 bit patterns [changes], position within the chunk, ascending.
        old: Values that must be there now; None where lists travel through the link in the pause
            (two bytes less an element): then nothing is compared, and the digest change decides.
        new: Values to store.
    """

    counts: torch.Tensor
    begin: torch.Tensor
    position: torch.Tensor
    old: torch.Tensor | None
    new: torch.Tensor


class DeviceOps(Protocol):
    """What every kernel module for a device offers."""

    def encode(
        self, old: torch.Tensor, new: torch.Tensor, *, chunks: DeviceChunks, xor: bool
    ) -> tuple[DevicePlanes, torch.Tensor]:
        """What changed from ``old`` to ``new``, and each chunk's digest change.

        Waits for the current stream once. ``old`` and ``new`` are read only.

        Returns:
            The planes, and int64 [chunks].
        """
        ...

    def scratch(self, chunks: int, *, width: int) -> int:
        """Device memory that ``encode`` takes for itself while it lasts, beside the planes [B]."""
        ...

    def decode_into(
        self, target: torch.Tensor, planes: DevicePlanes, *, chunks: DeviceChunks, xor: bool
    ) -> torch.Tensor:
        """Apply sound planes to the window ``target`` in place; int64 [chunks] digest changes."""
        ...

    def stage(
        self,
        planes: DevicePlanes,
        *,
        chunks: DeviceChunks,
        placed: Placed,
        width: int,
        xor: bool,
        negate: bool = False,
    ) -> tuple[ChunkLists, torch.Tensor]:
        """What sound planes would make of the residents, which are read but not written.

        Args:
            planes: Changes of the window.
            chunks: Where its chunks lie in their segments; ``start`` is not looked at.
            placed: Where they lie in memory.
            width: Bytes of an element.
            xor: Whether values are XORs.
            negate: Differences lead from the newer version to the older: subtract them.

        Returns:
            Old and new values of every change, and int64 [chunks] digest changes.
        """
        ...

    def scatter(
        self,
        lists: ChunkLists,
        *,
        chunks: DeviceChunks,
        placed: Placed,
        width: int,
        wrong: torch.Tensor,
        back: bool = False,
        sums: torch.Tensor | None = None,
    ) -> None:
        """Store the new values where the old ones (or already the new ones) are.

        Where a resident holds neither, nothing is stored and ``wrong`` counts one. It allocates
        nothing and never waits, so a CUDA graph can hold it.

        Args:
            lists: What :meth:`stage` made.
            chunks: As there.
            placed: As there.
            width: Bytes of an element.
            wrong: int32 [1], added to.
            back: Old and new change places: undo. Needs ``lists.old``.
            sums: int64 [chunks]; when given, ``sum h(stored) - h(expected)`` is added to each
                chunk's entry, or ``sum h(stored) - h(found)`` when ``lists.old`` is None.
        """
        ...

    def digest(
        self, values: torch.Tensor, *, key: int, skip: int, run: int, stride: int
    ) -> torch.Tensor:
        """Sum of h over part of a segment (see ``reference.digest``): int64 [1]."""
        ...

    def dense_xor(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """``out = a ^ b`` over buffers of equal size and dtype; ``out`` may be ``a`` or ``b``."""
        ...


class MaskOps(Protocol):
    """What a module that takes XOR masks into weights offers.

    A mask lies in device memory and is cut into *pieces*, each of which belongs to one contiguous
    stretch of one tensor. Each piece leaves a *mark*: a 64-bit sum over the places it changes of
    place, mask and the weight without the mask; it is the same whether the mask is taken in,
    taken back or only looked at. Calls are asynchronous on the current stream.
    """

    def xor_pieces(
        self,
        mask: torch.Tensor,
        *,
        begins: torch.Tensor,
        addresses: torch.Tensor,
        sizes: torch.Tensor,
        marks: torch.Tensor,
        store: bool,
        back: bool = False,
    ) -> None:
        """XOR a mask into weights, piece by piece.

        Args:
            mask: uint8, at a multiple of 16 bytes.
            begins: int64 [pieces], first byte of each piece in ``mask``.
            addresses: int64 [pieces], where it goes in device memory [B].
            sizes: int32 [pieces], bytes; a piece of size 0 is left alone.
            marks: int64 [pieces], filled with each piece's mark.
            store: Whether to store; else only the marks are made.
            back: The mask has been taken in already: take it back.
        """
        ...

    def weigh_pieces(
        self,
        mask: torch.Tensor,
        *,
        begins: torch.Tensor,
        addresses: torch.Tensor,
        sizes: torch.Tensor,
        keys: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """What the XOR would change of the state digest: int64 [pieces]; nothing is stored.

        Args:
            mask: As for :meth:`xor_pieces`, and so on.
            begins: As there.
            addresses: As there.
            sizes: As there.
            keys: int64 bit patterns [pieces], the digest's index term of each first element.
            width: Bytes of an element.
        """
        ...


#: Environment variable that overrides the choice of :func:`device_ops` and :func:`mask_ops`.
VARIABLE: Final = "WEIGHTDELTA_DEVICE_KERNELS"

_MODULES: Final[Sequence[str]] = ("torch_ops", "triton_ops")


@cache
def load_device(name: str) -> DeviceOps:
    """The kernel module "torch_ops" (any device, slow) or "triton_ops".

    Raises:
        ImportError: Triton is not installed.
    """
    if name not in _MODULES:
        raise ValueError(f"unknown device kernels {name!r}; expected one of {', '.join(_MODULES)}")
    return cast(DeviceOps, importlib.import_module(f"weightdelta.kernels.{name}"))


def mask_ops(device: torch.device | str) -> MaskOps:
    """The mask kernels for ``device``, chosen as :func:`device_ops` does.

    Raises:
        ImportError: Triton is not installed; plain torch would be too slow for a pause on a GPU.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    fast = torch.device(device).type == "cuda" or interpreted
    wanted = os.environ.get(VARIABLE) or ("triton_ops" if fast else "torch_ops")
    name = {"torch_ops": "torch_masks", "triton_ops": "triton_masks"}[wanted]
    return cast(MaskOps, importlib.import_module(f"weightdelta.kernels.{name}"))


def device_ops(device: torch.device | str) -> DeviceOps:
    """The kernels for ``device``: Triton's for CUDA where Triton imports, else plain torch.

    Triton's interpreter (``TRITON_INTERPRET=1``) runs its kernels on the CPU, for tests.
    ``WEIGHTDELTA_DEVICE_KERNELS=torch_ops`` or ``=triton_ops`` overrides the choice.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        return load_device(wanted)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.device(device).type == "cuda" or interpreted:
        try:
            return load_device("triton_ops")
        except ImportError:
            return load_device("torch_ops")
    return load_device("torch_ops")
