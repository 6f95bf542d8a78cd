"""Optimizer steps of a process, counted for each optimizer: which of them moved published weights.

A trainer may hold optimizers that are no business of a publication, such as a critic's. Only
those that hold a published tensor count, unless none does: then the published weights are
written by means that torch does not show (master copies), and all count.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from weightdelta.tensors import storage_of


@dataclass(eq=False, slots=True)
class Count:
    """Steps of one optimizer that ended; ``holds``: it held a published tensor when last seen."""

    optimizer: Callable[[], Optimizer | None]
    steps: int = 0
    holds: bool = False


#: How far every optimizer was at some moment.
Steps = Mapping[Count, int]


def _nobody() -> None:
    """Stands for the optimizers that are gone."""


class StepCounter:
    """Counts the steps of every optimizer of a process. Not safe for threads by itself."""

    def __init__(self) -> None:
        # By identity: an optimizer may compare as it likes, and need not be hashable.
        self._counts: dict[int, Count] = {}
        self._gone = {holds: Count(_nobody, holds=holds) for holds in (False, True)}

    def ended(self, optimizer: Optimizer) -> None:
        """A step of ``optimizer`` has ended."""
        found = self._counts.get(id(optimizer))
        if found is None or found.optimizer() is not optimizer:
            self._bury()
            found = self._counts[id(optimizer)] = Count(weakref.ref(optimizer))
        found.steps += 1

    def now(self) -> Steps:
        """How far all of them are."""
        return {count: count.steps for count in self._all()}

    def since(self, before: Steps, now: Steps, *, published: Collection[int]) -> int:
        """Steps between two moments of the optimizers that hold published tensors.

        Args:
            before: An earlier moment.
            now: A later one.
            published: Addresses of the published tensors' storages.
        """
        self._look(published)
        known = {*before, *now}
        counted = {count for count in known if count.holds and count.steps} or known
        return sum(now.get(c, 0) - before.get(c, 0) for c in counted)

    def own(self, *, published: Collection[int]) -> int | None:
        """The step count that an optimizer of published tensors keeps, as Adam does, if any does.

        It survives checkpoints, so it tells where a restarted rank is. The largest count, since
        parameters without a gradient (experts that saw no token) stay behind.
        """
        self._look(published)
        alive = [c for c in self._counts.values() if c.optimizer() is not None]
        holding = [c for c in alive if c.holds] or alive
        return _largest([step for c in holding for step in _own_steps(c.optimizer())])

    def _all(self) -> list[Count]:
        self._bury()
        return [*self._counts.values(), *self._gone.values()]

    def _bury(self) -> None:
        """Add the counts of optimizers that are gone together."""
        for key in [key for key, count in self._counts.items() if count.optimizer() is None]:
            count = self._counts.pop(key)
            self._gone[count.holds].steps += count.steps

    def _look(self, published: Collection[int]) -> None:
        for count in self._counts.values():
            optimizer = count.optimizer()
            if optimizer is not None:
                count.holds = any(storage_of(p) in published for p in parameters(optimizer))


def parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor that an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _own_steps(optimizer: Optimizer | None) -> Iterator[Any]:
    """Step counts in an optimizer's state, which may hold anything else as well."""
    for state in list(optimizer.state.values()) if optimizer is not None else ():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, torch.Tensor):
            if step.numel() == 1 and not step.is_complex() and step.device.type != "meta":
                yield step
        elif isinstance(step, int):
            yield step


def _largest(counts: Sequence[Any]) -> int | None:
    """The largest of many step counts: reading each from a GPU would wait for it each time."""
    tensors = [c.detach().reshape(()) for c in counts if isinstance(c, torch.Tensor)]
    found: list[float] = [c for c in counts if not isinstance(c, torch.Tensor)]
    for kind in {(t.device, t.dtype) for t in tensors}:
        alike = [t for t in tensors if (t.device, t.dtype) == kind]
        largest = torch.nan_to_num(torch.stack(alike).double(), nan=-1.0, posinf=-1.0).max()
        found.append(float(largest))
    return max((int(count) for count in found if count >= 0), default=None)
