"""One FSDP2 trainer rank: a plain Ray actor that knows nothing of weightdelta."""

import gc
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from bench_gpus.link import Link, Meeting
from bench_gpus.model import SHAPES, fill, wire, without_memory
from bench_gpus.packed import Lanes, plan_buckets, send

#: Of the optimizer: what RL uses for models of this size.
RATE = 1e-6
SEED = 17


def identity(device: torch.device) -> str:
    """What tells the device of a process from all others of the host."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{socket.gethostname()}/{os.getpid()}"


def use(device: str) -> torch.device:
    """Make a device the process's current one, where NCCL and kernels without a choice go."""
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trainer:
    """A rank with fp32 master weights, gathered and computed in bf16.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        meeting: Where the ranks meet.
        shape: Name of the model's shape.
        device: Where this rank computes, as torch names it.
        bucket: Bytes that a broadcast packs together.
    """

    def __init__(
        self, rank: int, *, world_size: int, meeting: Meeting, shape: str, device: str, bucket: int
    ) -> None:
        self.device = use(device)
        self.rank, self.shape, self.meeting = rank, SHAPES[shape], meeting
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=meeting.store("trainers"),
            rank=rank,
            world_size=world_size,
            timeout=meeting.limit,
        )
        self.model = sharded(self.shape, self.device, world_size)
        self.buckets = plan_buckets(wire(self.shape), limit=bucket)
        self.lanes: dict[int, Lanes] = {}
        self.link: Link | None = None
        self.reset()

    def where(self) -> str:
        """Identity of this rank's device."""
        return identity(self.device)

    def join(self, rank: int | None, size: int) -> None:
        """Become a member of the broadcast group, or stay outside with rank None."""
        if rank is not None:
            self.link = Link(self.meeting, rank=rank, size=size, device=self.device)
            self.link.meet()

    def reset(self) -> None:
        """Back to the base weights, and to an optimizer that has made no step."""
        self.model.zero_grad(set_to_none=True)
        fill(self.model, seed=SEED, rank=self.rank)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True
        )
        gc.collect()  # baselines of an attachment that was closed
        settle(self.device)

    def step(self, number: int, tokens: tuple[int, int]) -> tuple[float, float]:
        """One optimizer step on random tokens; when it began and ended, in Unix time [s].

        Args:
            number: Seeds the tokens, differently on every rank.
            tokens: Sequences and their length.
        """
        began = time.time()
        source = torch.Generator().manual_seed(1_000 * number + self.rank)
        batch = torch.randint(self.shape.words, (tokens[0], tokens[1] + 1), generator=source)
        batch = batch.to(self.device)
        logits = self.model(batch[:, :-1])
        loss: Any = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        settle(self.device)
        return began, time.time()

    def save_base(self, folder: str) -> None:
        """Write the weights in the wire dtype, a file a bucket, the buckets shared by the ranks."""
        gather = self._gatherer()
        with ThreadPoolExecutor(2) as pool:
            jobs = []
            for number, bucket in enumerate(self.buckets):
                whole = {slot.name: gather(slot.name) for slot in bucket}
                if number % dist.get_world_size() == self.rank:
                    file = Path(folder) / f"model-{number:05d}.safetensors"
                    jobs.append(pool.submit(_save, whole, file))
            for job in jobs:
                job.result(self.meeting.seconds)

    def broadcast(self, *, gathers: bool, sends: bool, buffers: int) -> tuple[float, float]:
        """Take part in a transfer of all weights; when it began and ended, in Unix time [s]."""
        if buffers not in self.lanes:
            self.lanes[buffers] = Lanes(self.buckets, device=self.device, count=buffers)
        link = self.link if sends else None
        self._meet(link)
        began = time.time()
        if gathers or link:
            send(
                self.buckets,
                lanes=self.lanes[buffers],
                gather=self._gatherer() if gathers else None,
                link=link,
            )
        settle(self.device)
        return began, time.time()

    def forget_lanes(self) -> None:
        """Give the buffers of transfers back."""
        self.lanes.clear()

    def memory(self) -> int:
        """Most device memory that torch held in this process [B]."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _meet(self, link: Link | None) -> None:
        """Nobody starts before everybody is here: the members first, then all trainer ranks."""
        if link is not None:
            link.meet()
        one = torch.ones(1, device=self.device)
        dist.all_reduce(one)
        settle(self.device)

    def _gatherer(self) -> Any:
        state = self.model.state_dict()

        @torch.no_grad()
        def gather(name: str) -> torch.Tensor:
            wire = state[name].detach().to(torch.bfloat16)  # half the bytes of a gather in fp32
            found: torch.Tensor = wire.full_tensor() if isinstance(wire, DTensor) else wire
            return found

        return gather


def sharded(shape: Any, device: torch.device, world_size: int) -> torch.nn.Module:
    """The model on this rank, without values: each layer sharded by itself, then the rest."""
    model = without_memory(shape)
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers: Sequence[Any] = list(model.layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to_empty(device=device)


def _save(whole: dict[str, torch.Tensor], file: Path) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in whole.items()}, str(file))
