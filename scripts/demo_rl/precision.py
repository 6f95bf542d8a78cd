"""In which number format a machine computes at speed."""

import time
from types import MethodType
from typing import Any

import torch


def is_bf16_fast(device: str) -> bool:
    """Whether bf16 matrix products take about as long as fp32 ones.

    A GPU and a CPU with AVX-512 BF16 or AMX do; on a CPU without, they take fifty times as long.
    Measured, since no flag says it for every CPU.
    """
    return device != "cpu" or _product_s(torch.bfloat16) < 4 * _product_s(torch.float32)


def _product_s(dtype: torch.dtype) -> float:
    """Seconds of a matrix product, the best of three."""
    ones, found = torch.ones(256, 256, dtype=dtype), []
    for _ in range(3):
        started = time.perf_counter()
        torch.mm(ones, ones)
        found.append(time.perf_counter() - started)
    return min(found)


def widen(model: torch.nn.Module) -> None:
    """Let every linear layer compute in fp32; its weights stay in the dtype they have."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = MethodType(forward, layer)
