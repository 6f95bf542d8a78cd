"""An FSDP2 trainer on gloo whose shards are as awkward as they come."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ray_actors.trainer import TrainerRank

WORLD = 4
FILE = "model.safetensors"
#: On four ranks: 10 rows are 3 3 3 1, 6 are 2 2 2 0, 3 leave one rank empty, 1 leaves three.
WORDS, WIDTH, HIDDEN = 10, 6, 3


class Model(nn.Module):
    """Tied embedding and head, sizes that four does not divide, and a 0-d buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        hidden = self.down(torch.relu(self.up(self.embed(tokens)))) * self.scale
        logits: torch.Tensor = self.head(hidden)
        return logits


def save_base(folder: Path) -> Path:
    """The model's first weights: parameters in bf16, the tied one once, the buffer in fp32."""
    torch.manual_seed(1)
    state = Model().state_dict()
    del state["head.weight"]
    wire = {n: t if n == "count" else t.bfloat16() for n, t in state.items()}
    save_file(wire, str(folder / FILE))
    return folder


class ShardedTrainer(TrainerRank):
    """A rank; ``attach`` finds ``self.model`` without being told."""

    def __init__(self, rank: int, *, address: str, folder: str) -> None:
        super().__init__(rank, world_size=WORLD, address=address)
        torch.set_num_threads(1)
        model = Model()
        weights = {n: t.float() for n, t in load_file(str(Path(folder) / FILE)).items()}
        model.load_state_dict({**weights, "head.weight": weights["embed.weight"]})
        fully_shard(model)
        self.model: nn.Module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(self, seed: int) -> None:
        """One step on tokens of this rank's own."""
        generator = torch.Generator().manual_seed(WORLD * seed + self.rank)
        tokens = torch.randint(WORDS, (4, 5), generator=generator)
        logits = self.model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        count: Any = self.model.count
        count += 1

    def sizes(self) -> list[int]:
        """Elements of each shard on this rank."""
        return [p.to_local().numel() for p in self.model.parameters() if isinstance(p, DTensor)]

    def gathered(self) -> dict[str, npt.NDArray[np.uint8]]:
        """All weights as bytes, gathered by torch alone, under every name."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            wire = whole if name == "count" else whole.bfloat16()
            found[name] = wire.detach().reshape(-1).view(torch.uint8).numpy().copy()
        return found
