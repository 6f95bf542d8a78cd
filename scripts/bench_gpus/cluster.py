"""Ray on this host, and which actor takes which GPU; what Ray made of it is checked."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bench_gpus.limits import Budget
from bench_gpus.link import HOST, keep_quiet, meeting_place
from bench_gpus.sampler import Sampler
from bench_gpus.trainer import Trainer

#: Ray's own objects: frames on their way to the publisher, and the job [B].
OBJECTS = 2 << 30


@dataclass(frozen=True)
class Plan:
    """Which GPU each actor takes, and who is in the broadcast group.

    Attributes:
        trainers: GPU of each trainer rank.
        samplers: GPU of each sampler.
    """

    gpus: int
    trainers: tuple[int, ...]
    samplers: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """A communicator holds a GPU once, and there samplers go first."""
        return tuple(r for r, gpu in enumerate(self.trainers) if gpu not in self.samplers)

    @property
    def link_size(self) -> int:
        """Members of the broadcast group."""
        return len(self.members) + len(self.samplers)

    @property
    def shared(self) -> tuple[int, ...]:
        """GPUs that a trainer rank and a sampler share."""
        return tuple(sorted(set(self.trainers) & set(self.samplers)))


def plan_gpus(gpus: int, *, trainers: int | None = None, samplers: int | None = None) -> Plan:
    """Trainers from the first GPU on, samplers on others, or shared from the last one back.

    Two GPUs are two trainer ranks with a sampler beside the second; more are halved.
    """
    if gpus < 2:
        raise SystemExit(f"expected 2 GPUs at least, found {gpus}")
    ranks = trainers or max(gpus // 2, 2)
    followers = samplers or max(gpus - ranks, 1)
    if not 1 <= ranks <= gpus or not 1 <= followers < gpus:
        raise SystemExit(
            f"expected 1 to {gpus} trainers and 1 to {gpus - 1} samplers on {gpus} GPUs, found "
            f"{ranks} and {followers}: NCCL takes a GPU once, and rank 0 sends from its own"
        )
    free = ranks + followers <= gpus
    places = [ranks + i if free else gpus - 1 - i for i in range(followers)]
    return Plan(gpus, tuple(range(ranks)), tuple(places))


def check_places(plan: Plan, trainers: Sequence[str], samplers: Sequence[str]) -> None:
    """Refuse actors that do not lie where they were planned.

    Args:
        plan: What was asked for.
        trainers: Identity of each trainer rank's device.
        samplers: The same of the samplers.
    """
    found: dict[int, set[str]] = {}
    planned = (*plan.trainers, *plan.samplers)
    for gpu, device in zip(planned, (*trainers, *samplers), strict=True):
        found.setdefault(gpu, set()).add(device)
    distinct = {device for devices in found.values() for device in devices}
    if len(distinct) != len(found) or any(len(devices) > 1 for devices in found.values()):
        raise SystemExit(f"actors are not where they were planned, {plan}: found {found}")


def start_ray(plan: Plan, *, device: str, threads: int, masked: bool) -> None:
    """A private Ray on this host: no dashboard, no token file, no statistics sent.

    Actors see all GPUs and take the planned one, as under torchrun. ``masked`` lets Ray show each
    its own alone; NCCL then imports its peers' memory slowly
    (https://github.com/NVIDIA/nccl/issues/1749) and was reported to hang
    (https://github.com/ray-project/ray/issues/61073).
    """
    os.environ.update(
        {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            # A machine whose memory grows as it is used looks full to Ray from the start.
            "RAY_memory_monitor_refresh_ms": "0",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": str(threads),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0" if masked else "1",
        }
    )
    keep_quiet()
    ray.init(
        address="local",
        num_cpus=max(plan.gpus, os.cpu_count() or 1),
        num_gpus=plan.gpus if device == "cuda" else 0,
        object_store_memory=OBJECTS if device == "cuda" else OBJECTS // 8,
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        _node_ip_address=HOST,
    )


class Cluster:
    """Trainers and samplers where the plan wants them.

    Attributes:
        trainers: Handles in rank order.
        samplers: Handles.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str,
        masked: bool,
        shape: str,
        bucket: int,
        seconds: float,
        budget: Budget,
    ) -> None:
        self.plan, self._budget = plan, budget
        self._device, self._masked = device, masked
        meeting, self._store = meeting_place(seconds)
        unit = "GPU" if device == "cuda" else "CPU"
        self._group = placement_group([{unit: 1.0}] * plan.gpus, strategy="STRICT_PACK")
        budget.get(self._group.ready())
        common = {"shape": shape, "bucket": bucket}
        self.trainers = self._start(
            Trainer,
            [
                (gpu, {"rank": rank, "world_size": len(plan.trainers), "meeting": meeting})
                for rank, gpu in enumerate(plan.trainers)
            ],
            common,
        )
        found: list[tuple[int, dict[str, Any]]] = [(g, {"meeting": meeting}) for g in plan.samplers]
        self.samplers = self._start(Sampler, found, common)
        places = budget.get([a.where.remote() for a in (*self.trainers, *self.samplers)])
        if device == "cuda":
            check_places(plan, places[: len(self.trainers)], places[len(self.trainers) :])
        self.places: list[str] = places

    def _name(self, gpu: int) -> str:
        """What torch calls a planned GPU inside an actor that is placed there."""
        if self._device == "cpu":
            return "cpu"
        return f"cuda:{0 if self._masked else gpu}"

    def _start(
        self, kind: type, places: Sequence[tuple[int, dict[str, Any]]], common: dict[str, Any]
    ) -> list[Any]:
        """Actors of a kind, each in the bundle of its GPU; two share one."""
        share: dict[str, Any] = {"num_cpus": 0}
        share["num_gpus" if self._device == "cuda" else "num_cpus"] = 0.5
        return [
            ray.remote(kind)
            .options(
                **share,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=gpu
                ),
            )
            .remote(device=self._name(gpu), **options, **common)
            for gpu, options in places
        ]

    def join(self) -> None:
        """Form the broadcast group: trainers that are members, then all samplers."""
        size, members = self.plan.link_size, self.plan.members
        ranks = [members.index(r) if r in members else None for r in range(len(self.trainers))]
        calls = [t.join.remote(r, size) for t, r in zip(self.trainers, ranks, strict=True)]
        calls += [s.join.remote(len(members) + i, size) for i, s in enumerate(self.samplers)]
        self._budget.get(calls)

    def all_trainers(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """References to a call on every trainer rank."""
        return [getattr(t, method).remote(*args, **options) for t in self.trainers]

    def all_samplers(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """References to a call on every sampler."""
        return [getattr(s, method).remote(*args, **options) for s in self.samplers]
