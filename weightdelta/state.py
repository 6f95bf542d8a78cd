"""The live weights of a model: how they are read, and which names are one tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Final

import torch

from weightdelta.errors import InputError, LayoutMismatch
from weightdelta.layout import Layout

#: How the names end under which a module's ``state_dict`` holds what ``get_extra_state`` returns.
EXTRA_STATE: Final = "_extra_state"

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

    A module's extra state is left out where it is no tensor.

    Raises:
        InputError: It is none of the three kinds, or holds something that is no tensor.
    """
    found = _read(state)
    odd = {name for name, item in found.items() if not isinstance(item, torch.Tensor)}
    return {n: t for n, t in found.items() if n not in odd} if odd else found


def _read(state: State) -> Mapping[str, Any]:
    if isinstance(state, StateSource):
        return _checked(state.tensors())
    if isinstance(state, torch.nn.Module):
        # Never named_parameters(): FSDP2's root may hold stale unsharded ones after a forward.
        return _checked(state.state_dict(), extra=EXTRA_STATE)
    return _checked(state)


def _checked(tensors: Any, *, extra: str | None = None) -> Mapping[str, Any]:
    """Only tensors by name, and anything by names that end in ``extra``."""
    if not isinstance(tensors, Mapping):
        raise InputError(
            "state: expected a module, a mapping of tensors or a StateSource, found "
            f"{type(tensors).__name__}"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise InputError(
                f"state: expected names of tensors, found the {type(name).__name__} {name!r:.80}; "
                "give each tensor its name in base"
            )
        if not isinstance(tensor, torch.Tensor) and not (extra and name.endswith(extra)):
            raise InputError(f"state: {name!r} is no tensor but a {type(tensor).__name__}")
    found: Mapping[str, Any] = tensors
    return found


@contextmanager
def reading(state: State) -> Iterator[Tensors]:
    """The live tensors, between a source's ``prepare`` and ``release``.

    A module's extra state that is no tensor is among them: whoever compares names with a
    checkpoint has to come across it, since no sampler will ever get it.
    """
    if not isinstance(state, StateSource):
        yield _read(state)
        return
    if state.prepare:
        state.prepare()
    try:
        yield _checked(state.tensors())
    finally:
        if state.release:
            state.release()


def watched(state: State, *, check: Callable[[Tensors], None]) -> StateSource:
    """The same state, whose tensors are given to ``check`` each time they are read."""

    def tensors() -> Tensors:
        found = read_state(state)
        check(found)
        return found

    if isinstance(state, StateSource):
        return StateSource(tensors, state.prepare, state.release)
    return StateSource(tensors)


def refuse_unknown(tensors: Tensors, *, layout: Layout, exclude: Sequence[str]) -> None:
    """Check that no tensor has appeared since the layout was agreed on: nobody publishes it.

    Raises:
        LayoutMismatch: A name that is none of the layout's and that nothing excludes.
    """
    for name in tensors:
        if name in layout.index or name in layout.alias_of:
            continue
        if not any(fnmatchcase(name, pattern) for pattern in exclude):
            raise LayoutMismatch(
                f"tensor {name!r}: expected the names of the state at attach, found this new one, "
                f"which would not be published; attach again with exclude=[{escape(name)!r}] or "
                "with a base that has it"
            )


def as_attached(state: State, *, layout: Layout, exclude: Sequence[str]) -> StateSource:
    """The same state, which is refused when it is read with a name that attach did not see."""
    return watched(state, check=lambda found: refuse_unknown(found, layout=layout, exclude=exclude))


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
