"""A short real training run, for its weights before and after single steps."""

import argparse
import inspect
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Tokens of one training example, and examples in a step.
LENGTH, ROWS = 48, 2


@dataclass
class Trainer:
    """Next-token training with fp32 master weights and AdamW, as RL trainers run it.

    Attributes:
        model: The model, in fp32.
        optimizer: AdamW without weight decay.
    """

    folder: Path
    lr: float
    model: Any = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._batches = _batches(AutoTokenizer.from_pretrained(self.folder))

    def step(self) -> float:
        """One optimizer step on fresh text; its wall time in seconds."""
        batch = next(self._batches)
        started = time.perf_counter()
        self.model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    def wire(self, cast: Callable[[torch.Tensor], np.ndarray]) -> np.ndarray:
        """All parameters, cast and joined: 1-D."""
        with torch.no_grad():
            parts = [cast(p.detach()) for p in self.model.parameters()]
        return np.concatenate([part for part in parts if part.size])


def bf16(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bf16 bits: uint16, 1-D."""
    return tensor.to(torch.bfloat16).reshape(-1).view(torch.uint16).numpy()


def fp8(tensor: torch.Tensor) -> np.ndarray:
    """A matrix's e4m3 bits under power-of-two scales of 128 x 128 blocks; nothing for vectors."""
    if tensor.dim() != 2:
        return np.empty(0, np.uint8)
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    scaled = (blocks / scale).reshape(padded.shape)[:rows, :columns]
    return scaled.to(torch.float8_e4m3fn).reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Mask:
    """Weights before and after one step."""

    name: str
    old: np.ndarray
    new: np.ndarray


def masks(trainer: Trainer, *, warm: int) -> Iterator[Mask]:
    """The cold first step, then a step after ``warm`` more, in bf16 and fp8."""
    before = trainer.wire(bf16)
    trainer.step()
    yield Mask("bf16, first step", before, trainer.wire(bf16))
    for _ in range(warm):
        trainer.step()
    before, before8 = trainer.wire(bf16), trainer.wire(fp8)
    trainer.step()
    yield Mask(f"bf16, step {warm + 2}", before, trainer.wire(bf16))
    yield Mask(f"fp8 128x128, step {warm + 2}", before8, trainer.wire(fp8))


def _batches(tokenizer: Any) -> Iterator[torch.Tensor]:
    """Rows of source text from the standard library, without end."""
    text = "\n".join(inspect.getsource(m) for m in (argparse, inspect, typing))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    while True:
        for at in range(0, len(rows) - ROWS + 1, ROWS):
            yield rows[at : at + ROWS]
