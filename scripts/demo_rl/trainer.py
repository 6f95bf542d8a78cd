"""One trainer rank: a plain Ray actor with FSDP2, fp32 master weights, policy-gradient steps."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from demo_rl.loss import Batch, policy_loss


def build(folder: str, device: str, world_size: int, *, bf16: bool) -> Any:
    """Load a checkpoint into fp32 and shard it: each layer, then the rest.

    Computation runs in bf16 where the machine is fast at it; gradients are reduced in fp32.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    mesh = init_device_mesh(device, (world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    for layer in model.model.layers:
        # Layers stay gathered between forward and backward: one all-gather less a step.
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@ray.remote
class TrainerActor:
    """A rank that knows nothing of weightdelta; `attach` finds ``self.model`` from outside."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        folder: str,
        lr: float,
        device: str,
        bf16: bool,
    ) -> None:
        torch.set_num_threads(1)  # ranks share the machine's cores
        store = dist.FileStore(rendezvous, world_size)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        self.rank, self.world_size, self.device = rank, world_size, device
        self.model = build(folder, device, world_size, bf16=bf16)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, weight_decay=0.0, foreach=False
        )
        self.steps = 0

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on this rank's slice of ``batch``.

        Args:
            batch: The whole batch, the same on every rank; its rows divide by ``world_size``.
        """
        started = time.perf_counter()
        mine = {k: torch.from_numpy(v[self.rank :: self.world_size]) for k, v in batch.items()}
        part = {k: v.to(self.device) for k, v in mine.items()}
        loss = policy_loss(self.model, part)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {
            "step": self.steps,
            "loss": loss.item(),
            "seconds": time.perf_counter() - started,
        }

    def full_gather(self) -> dict[str, npt.NDArray[np.uint16]]:
        """Every weight as bf16 bits, gathered to rank 0 by torch alone; empty on other ranks.

        This is the independent truth that samplers are compared with: nothing in it comes from
        weightdelta. Tied weights are gathered once and given under each of their names.
        """
        truth = {name: t.cpu().view(torch.uint16).numpy() for name, t in self._gathered().items()}
        tied = self.model.all_tied_weights_keys
        truth |= {name: truth[source] for name, source in tied.items()}
        return truth if self.rank == 0 else {}

    def save_checkpoint(self, folder: str) -> None:
        """Write the model as Transformers itself would, in bf16, on rank 0."""
        whole = self._gathered()
        if self.rank == 0:
            self.model.save_pretrained(folder, state_dict=whole)

    def _gathered(self) -> dict[str, torch.Tensor]:
        tied, whole = self.model.all_tied_weights_keys, {}
        for name, tensor in self.model.state_dict().items():
            if name not in tied:
                wire = tensor.detach().to(torch.bfloat16)
                whole[name] = wire.full_tensor() if isinstance(wire, DTensor) else wire
        return whole
