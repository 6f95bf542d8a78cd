"""Replicas: ranks that hold the same box must hold the same bytes.

Only one holder of a box publishes it. If the copies have drifted apart, samplers would follow
one of several models, so that is looked for once, at attach, and is fatal.
"""

from collections.abc import Mapping, Sequence

import torch
from blake3 import blake3

from weightdelta.capture import Inventory
from weightdelta.errors import ReplicaDivergence
from weightdelta.layout import Box, Layout
from weightdelta.sharding.dtensor import local_shard
from weightdelta.state import State, Tensors, reading
from weightdelta.tensors import TORCH, as_ints, dtype_name

#: BLAKE3 of a shard's wire bytes, by tensor name and box.
Hashes = Mapping[tuple[str, Box], bytes]


def shared_boxes(inventories: Sequence[Inventory]) -> frozenset[tuple[str, Box]]:
    """Boxes that several ranks hold, empty ones left out."""
    seen: set[tuple[str, Box]] = set()
    shared: set[tuple[str, Box]] = set()
    for inventory in inventories:
        keys = {(shard.name, shard.box) for shard in inventory.shards if shard.box.numel}
        shared |= seen & keys
        seen |= keys
    return frozenset(shared)


def hash_shards(state: State, *, shared: frozenset[tuple[str, Box]], layout: Layout) -> Hashes:
    """Hashes of a rank's shards that others hold too, in wire dtype."""
    if not shared:
        return {}
    with reading(state) as tensors:
        return _hash(tensors, shared, layout)


def refuse_divergence(hashes: Sequence[Hashes]) -> None:
    """Check that every copy of a box is the same.

    Args:
        hashes: One mapping per rank.

    Raises:
        ReplicaDivergence: Two ranks differ; the message names tensor and ranks.
    """
    first: dict[tuple[str, Box], tuple[int, bytes]] = {}
    for rank, found in enumerate(hashes):
        for key, value in found.items():
            holder, expected = first.setdefault(key, (rank, value))
            if value != expected:
                name, box = key
                raise ReplicaDivergence(
                    f"tensor {name!r}, offset {box.offset}, shape {box.shape}: ranks {holder} and "
                    f"{rank} hold it both, and differ; samplers could follow only one of them. "
                    "Synchronize the replicas, then attach again"
                )


def _hash(
    tensors: Tensors, shared: frozenset[tuple[str, Box]], layout: Layout
) -> dict[tuple[str, Box], bytes]:
    found = {}
    for name in {name for name, _ in shared} & set(tensors):
        live = tensors[name]
        shard, local = local_shard(name, live, dtype=dtype_name(live, name=name))
        if (name, shard.box) in shared:
            dtype = layout.tensors[layout.index[name]].dtype
            found[name, shard.box] = blake3(_wire(local, dtype)).digest()
    return found


def _wire(local: torch.Tensor, dtype: str) -> memoryview:
    """A shard's wire bytes in C order."""
    cast = local.detach().to(TORCH[dtype]).cpu().contiguous()
    return memoryview(as_ints(cast).reshape(-1).numpy().data).cast("B")
