"""Starting the actors of the job on one machine, and moving batches between them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray

from demo_rl.loss import Batch
from demo_rl.sampler import SamplerActor
from demo_rl.trainer import TrainerActor

#: Texts a sampler makes at once, as prompts x samples a prompt.
SHAPES = {"smollm2": (4, 4), "tiny": (8, 8)}
#: Learning rates at which each model visibly learns within a few steps.
RATES = {"smollm2": 2e-5, "tiny": 3e-5}


def start_ray() -> None:
    """A private Ray on this host: no dashboard, no token file, no statistics sent."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"  # a dozen processes share a few cores
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")


def start_trainers(ranks: int, *, folder: Path, lr: float) -> list[Any]:
    """``ranks`` FSDP2 ranks over gloo, which meet through a file."""
    rendezvous = tempfile.mktemp(prefix="weightdelta-")  # noqa: S306  created by the ranks
    remote = TrainerActor.options(num_cpus=0.25)
    return [
        remote.remote(rank=rank, world_size=ranks, rendezvous=rendezvous, folder=str(folder), lr=lr)
        for rank in range(ranks)
    ]


def start_sampler(kind: str, *, folder: Path, seed: int) -> Any:
    """One sampler, which starts to generate at once from the base checkpoint."""
    prompts, group = SHAPES[kind]
    return SamplerActor.options(num_cpus=0.25).remote(
        kind=kind, folder=str(folder), seed=seed, prompts=prompts, group=group
    )


def collect(samplers: list[Any], *, ranks: int) -> Batch:
    """One fresh batch of each sampler, joined; rows that ``ranks`` does not divide are left out."""
    parts = ray.get([s.rollouts.remote() for s in samplers])
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    rows = len(joined["tokens"]) // ranks * ranks
    return {key: value[:rows] for key, value in joined.items()}
