"""The live weights of a model: how they are read, and which names are one tensor."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightdelta.errors import InputError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state that has to be made ready before it is read.

    Attributes:
        tensors: Returns the live tensors by name; called anew at each capture.
        prepare: Called before, for example to finish a parameter synchronization or to wake
            offloaded weights.
        release: Called after, also when the capture failed.
    """

    tensors: Callable[[], Tensors]
    prepare: Callable[[], None] | None = None
    release: Callable[[], None] | None = None


State = torch.nn.Module | Tensors | StateSource


def read_state(state: State) -> Tensors:
    """The live tensors of a state. Modules are read through ``state_dict()`` only.

    Raises:
        InputError: It is none of the three kinds, or holds something that is no tensor.
    """
    if isinstance(state, StateSource):
        return _checked(state.tensors())
    if isinstance(state, torch.nn.Module):
        # Never named_parameters(): FSDP2's root may hold stale unsharded ones after a forward.
        return _checked(state.state_dict())
    return _checked(state)


def _checked(tensors: Any) -> Tensors:
    if not isinstance(tensors, Mapping):
        raise InputError(
            "state: expected a module, a mapping of tensors or a StateSource, found "
            f"{type(tensors).__name__}"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"state: {name!r} is no tensor but a {type(tensor).__name__}")
    found: Tensors = tensors
    return found


@contextmanager
def reading(state: State) -> Iterator[Tensors]:
    """The live tensors, between a source's ``prepare`` and ``release``."""
    if not isinstance(state, StateSource):
        yield read_state(state)
        return
    if state.prepare:
        state.prepare()
    try:
        yield _checked(state.tensors())
    finally:
        if state.release:
            state.release()


def find_aliases(state: State) -> list[tuple[str, ...]]:
    """Groups of names that are one tensor, such as tied embeddings."""
    groups: dict[Any, list[str]] = {}
    if isinstance(state, torch.nn.Module):
        for name, parameter in state.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
    else:
        for name, tensor in read_state(state).items():
            groups.setdefault(_identity(tensor), []).append(name)
    return [tuple(sorted(g)) for g in groups.values() if len(g) > 1]


def _identity(tensor: torch.Tensor) -> Any:
    if tensor.numel() == 0 or not tensor.data_ptr():
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
