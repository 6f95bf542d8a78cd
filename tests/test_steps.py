"""Optimizer steps: counted for the optimizers of published weights, whatever those look like."""

import gc
from typing import Any

import pytest
import torch

from weightdelta.steps import StepCounter
from weightdelta.tensors import storage_of


def _weights(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


def _published(*tensors: torch.Tensor) -> set[int]:
    return {storage_of(t) for t in tensors}


class _Other(torch.optim.SGD):
    """An optimizer that compares by value and cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other)


def test_only_optimizers_of_published_weights_count() -> None:
    actor, critic = _weights(2)
    mine, other = torch.optim.SGD([actor]), torch.optim.SGD([critic])
    counter = StepCounter()
    counter.ended(other)
    before = counter.now()
    for optimizer in (other, mine, other, mine, other):
        counter.ended(optimizer)
    now = counter.now()
    assert counter.since(before, now, published=_published(actor)) == 2
    assert counter.since(before, now, published=_published(actor, critic)) == 5
    assert counter.since(before, now, published=_published(torch.zeros(1))) == 5, "master copies"
    assert counter.since(now, counter.now(), published=_published(actor)) == 0


def test_steps_of_optimizers_that_are_gone_still_count() -> None:
    actor, critic = _weights(2)
    counter = StepCounter()
    before = counter.now()
    for _ in range(3):
        optimizer = torch.optim.SGD([actor])
        counter.ended(optimizer)
        other = torch.optim.SGD([critic])
        counter.ended(other)
        assert counter.since(before, counter.now(), published=_published(actor))
        del optimizer, other
        gc.collect()
    keeper = torch.optim.SGD([actor])
    counter.ended(keeper)
    assert counter.since(before, counter.now(), published=_published(actor)) == 4
    assert len(counter.now()) == 3, "what is gone is kept as one number"


def test_optimizers_are_told_apart_by_identity() -> None:
    one, two = _weights(2)
    first, second = _Other([one], lr=1.0), _Other([two], lr=1.0)
    counter = StepCounter()
    before = counter.now()
    for optimizer in (first, second, second):
        counter.ended(optimizer)
    assert counter.since(before, counter.now(), published=_published(one)) == 1


def test_the_count_that_optimizers_keep() -> None:
    one, two, idle = _weights(3)
    plain = torch.optim.SGD([one], lr=1.0)
    adam = torch.optim.AdamW([one, two, idle], lr=1.0)
    counter, published = StepCounter(), _published(one, two, idle)
    assert counter.own(published=published) is None
    one.grad = torch.ones(3)
    plain.step()
    counter.ended(plain)
    assert counter.own(published=published) is None, "SGD keeps no count"
    adam.step()
    counter.ended(adam)
    two.grad = torch.ones(3)
    adam.step()
    assert counter.own(published=published) == 2, "parameters without a gradient stay behind"
    adam.state[one]["step"] = 7  # some optimizers keep a plain number
    assert counter.own(published=published) == 7


def test_another_optimizers_count_says_nothing() -> None:
    actor, critic = _weights(2)
    mine, other = torch.optim.AdamW([actor]), torch.optim.AdamW([critic])
    counter = StepCounter()
    for _ in range(3):
        critic.grad = torch.ones(3)
        other.step()
        counter.ended(other)
    actor.grad = torch.ones(3)
    mine.step()
    counter.ended(mine)
    assert counter.own(published=_published(actor)) == 1


@pytest.mark.parametrize(
    "state",
    [
        3, None, torch.zeros(2), [], {"step": None}, {"step": "7"}, {"step": float("nan")},
        {"step": torch.tensor(float("nan"))}, {"step": torch.tensor(float("inf"))},
        {"step": torch.zeros(3)}, {"step": torch.zeros(0)},
        {"step": torch.zeros((), device="meta")},
        {"step": torch.zeros((), dtype=torch.complex64)}, {"exp_avg": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_odd_state_says_nothing(state: Any) -> None:
    (w,) = _weights()
    optimizer = torch.optim.SGD([w], lr=1.0)
    optimizer.state["global"] = state  # type: ignore[index]
    counter = StepCounter()
    counter.ended(optimizer)
    assert counter.own(published=_published(w)) is None
    optimizer.state[w] = {"step": torch.tensor([4.0])}
    assert counter.own(published=_published(w)) == 4
