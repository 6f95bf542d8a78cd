"""DTensor placements (FSDP2, HSDP, tensor parallel) as boxes, by arithmetic alone.

Sizes, the rank's mesh coordinate and the placements decide which box a rank holds; nothing is
communicated. A dimension cut ``n`` ways is cut as ``torch.chunk`` does: parts of
``ceil(size / n)``, the last ones shorter or empty. Mesh dimensions apply from left to right,
each to what the ones before it left.
"""

from typing import TYPE_CHECKING

import torch

from weightdelta.errors import UnsupportedSharding
from weightdelta.layout import Box
from weightdelta.sharding.explicit import LocalShard
from weightdelta.tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def local_shard(name: str, tensor: torch.Tensor, *, dtype: str) -> tuple[LocalShard, torch.Tensor]:
    """What this rank holds of ``tensor``, and the local tensor with exactly that box's shape.

    A plain tensor is held whole. The local tensor shares memory with ``tensor`` and may be
    non-contiguous or empty; a rank outside the DTensor's mesh holds an empty box.

    Args:
        name: The tensor's canonical name or alias.
        tensor: A plain tensor or a DTensor.
        dtype: Its safetensors dtype.

    Raises:
        UnsupportedSharding: A placement other than ``Shard`` and ``Replicate``, or a local
            tensor whose shape is not the one that its placements imply.
    """
    extent = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return LocalShard(name, dtype, extent, Box.whole(extent)), tensor.detach()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    with torch.no_grad():
        local = tensor.to_local()
    if coordinate is None:
        box = Box((0,) * len(extent), (0,) * len(extent))
        nothing = torch.empty(box.shape, dtype=local.dtype, device=local.device)
        return LocalShard(name, dtype, extent, box), nothing
    box = placed_box(
        name,
        extent,
        mesh=tuple(mesh.shape),
        coordinate=tuple(coordinate),
        placements=tuple(tensor.placements),
    )
    if tuple(local.shape) != box.shape:
        raise UnsupportedSharding(
            f"tensor {name!r}: placements {tensor.placements} imply a local shape of "
            f"{box.shape}, found {tuple(local.shape)}; describe it with explicit boxes"
        )
    return LocalShard(name, dtype, extent, box), local


def placed_box(
    name: str,
    extent: tuple[int, ...],
    *,
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: "tuple[Placement, ...]",
) -> Box:
    """The box at ``coordinate`` of a mesh of shape ``mesh``.

    Raises:
        UnsupportedSharding: A placement other than ``Shard`` and ``Replicate``.
    """
    from torch.distributed.tensor import Replicate, Shard

    offset, shape = [0] * len(extent), list(extent)
    for ways, at, placement in zip(mesh, coordinate, placements, strict=True):
        if type(placement) is Replicate:
            continue
        # Exact types: subclasses such as _StridedShard lay elements out differently.
        if type(placement) is not Shard or not -len(extent) <= placement.dim < len(extent):
            raise UnsupportedSharding(
                f"tensor {name!r}: placement {placement!r} is not supported for a shape of "
                f"{extent}; expected Shard(dim) or Replicate(), or use explicit boxes"
            )
        part = -(-shape[placement.dim] // ways)
        start = min(at * part, shape[placement.dim])
        offset[placement.dim] += start
        shape[placement.dim] = min(part, shape[placement.dim] - start)
    return Box(tuple(offset), tuple(shape))
