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


def start_ray(device: str) -> None:
    """A private Ray on this host: no dashboard, no token file, no statistics sent."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"  # a dozen processes share a few cores
    gpus = 1 if device == "cuda" else 0
    ray.init(
        num_cpus=4,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="warning",
    )


def start_trainers(ranks: int, *, folder: Path, lr: float, device: str, bf16: bool) -> list[Any]:
    """``ranks`` FSDP2 ranks over gloo, or NCCL on a GPU, which meet through a file."""
    rendezvous = tempfile.mktemp(prefix="weightdelta-")  # noqa: S306  created by the ranks
    remote = TrainerActor.options(num_cpus=0.25, num_gpus=_share(device))
    common = {"rendezvous": rendezvous, "folder": str(folder), "device": device, "bf16": bf16}
    return [remote.remote(rank=rank, world_size=ranks, lr=lr, **common) for rank in range(ranks)]


def start_sampler(kind: str, *, folder: Path, seed: int, device: str, bf16: bool) -> Any:
    """One sampler, which starts to generate at once from the base checkpoint."""
    prompts, group = SHAPES[kind]
    return SamplerActor.options(num_cpus=0.25, num_gpus=_share(device)).remote(
        kind=kind,
        folder=str(folder),
        seed=seed,
        prompts=prompts,
        group=group,
        device=device,
        bf16=bf16,
    )


def _share(device: str) -> float:
    """What an actor takes of the GPU that all of them share."""
    return 0.1 if device == "cuda" else 0.0


def collect(samplers: list[Any], *, ranks: int) -> Batch:
    """One fresh batch of each sampler, joined; rows that ``ranks`` does not divide are left out."""
    parts = ray.get([s.rollouts.remote() for s in samplers])
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    rows = len(joined["tokens"]) // ranks * ranks
    return {key: value[:rows] for key, value in joined.items()}
