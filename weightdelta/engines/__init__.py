"""Adapters to what runs the weights, and what a receiver needs of one."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Engine(Protocol):
    """An inference engine whose weights are patched in place."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Live weights by canonical name, tied ones included."""
        ...

    def aliases(self) -> list[tuple[str, ...]]:
        """Groups of names that are one tensor."""
        ...

    def paused(self) -> AbstractContextManager[Any]:
        """A context in which no token is computed."""
        ...
