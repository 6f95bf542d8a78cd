"""What all ranks of a training job agree on before anything is captured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from weightdelta.base import Base
from weightdelta.config import Config
from weightdelta.errors import LayoutMismatch
from weightdelta.frame import FramePlan
from weightdelta.layout import Layout, TensorSpec
from weightdelta.ownership import assign, collect

if TYPE_CHECKING:  # a coordinator needs no torch
    from weightdelta.capture import Inventory


@dataclass(frozen=True, slots=True)
class Job:
    """The static facts of one attached job; the same on every rank.

    Attributes:
        layout: Canonical tensors, as in base.
        plan: How the owned boxes are cut into frames.
        world_size: Number of trainer ranks.
        base: Path of the base checkpoint.
        config: Settings.
    """

    layout: Layout
    plan: FramePlan
    world_size: int
    base: Base
    config: Config

    @property
    def elements(self) -> dict[int, int]:
        """Elements of the model by width in bytes."""
        found: dict[int, int] = {}
        for tensor in self.layout.tensors:
            found[tensor.width] = found.get(tensor.width, 0) + tensor.numel
        return found

    def owned_bytes(self) -> list[int]:
        """Raw bytes that each rank owns."""
        sums = np.zeros(self.world_size, np.int64)
        for rank in range(self.world_size):
            sums[rank] = sum(self.plan.frame(f).nbytes for f in self.plan.owned(rank))
        return [int(n) for n in sums]


def base_specs(base: Base, *, exclude: Iterable[str] = ()) -> dict[str, TensorSpec]:
    """The base checkpoint's tensors by name, without those that ``exclude`` patterns match."""
    patterns = tuple(exclude)
    return {
        spec.name: spec
        for spec in base.specs
        if not any(fnmatchcase(spec.name, p) for p in patterns)
    }


def plan_job(
    inventories: Sequence["Inventory"],
    *,
    base: Base,
    config: Config,
    exclude: Iterable[str] = (),
) -> Job:
    """Agree on layout, ownership and frames; a pure function of what the ranks reported.

    Raises:
        LayoutMismatch: A tensor of base is on no rank, or ranks disagree on a second name.
        OwnershipError: The shards leave a gap or overlap.
    """
    specs = base_specs(base, exclude=exclude)
    held = {shard.name for inventory in inventories for shard in inventory.shards}
    missing = sorted(set(specs) - held)
    if missing:
        raise LayoutMismatch(
            f"tensor {missing[0]!r} is in base but on none of the {len(inventories)} ranks "
            f"({len(missing)} missing in all); leave it out with exclude= if it is not trained"
        )
    layout = Layout.of(specs.values(), aliases=_aliases(inventories))
    found = collect([i.shards for i in inventories], layout=layout)
    owners = assign(found, layout=layout, world_size=len(inventories))
    plan = FramePlan.build(
        owners,
        layout=layout,
        max_bytes=config.frame_bytes,
        groups=[config.codec_group(t.name) for t in layout.tensors],
    )
    return Job(layout, plan, len(inventories), base, config)


def _aliases(inventories: Sequence["Inventory"]) -> Mapping[str, str]:
    merged: dict[str, str] = {}
    for rank, inventory in enumerate(inventories):
        for alias, target in inventory.aliases.items():
            if merged.setdefault(alias, target) != target:
                raise LayoutMismatch(
                    f"rank {rank}: {alias!r} is a second name of {target!r}, elsewhere of "
                    f"{merged[alias]!r}"
                )
    return merged
